"""What `train_heads.py` does: chains, losses, acceptance, and the run that the clock ends."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from corpus import MIX
from heads import Chains, DsparkConfig, Heads, at, look
from model import Config, Model
from pytorch import F, Tensor, torch
from rows import Recipe, held_out_rows, held_out_text, start_workers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from training import Optimizers, Store, load, rate_at, unpack

DISCOUNT = 0.9  # of a draft's loss against the draft before it: it counts only if that was right
CONFIDENCE = 0.1  # weight of the confidence head's loss


def start_chains(weight: Tensor, starts: Tensor, n: int) -> Tensor:
    """Anchors (B, n), drawn where the loss has weight; a dialogue's first token has no context."""
    return torch.multinomial(weight.clamp(min=1e-9) * ~starts, n)


def draft_weights(anchor: Tensor, weight: Tensor, starts: Tensor, n: int) -> Tensor:
    """(B, A, n): what each draft of a chain counts. Anchors are drawn by their first draft's
    weight, so that one counts 1; drafts of another dialogue or past the row count nothing."""
    ahead = anchor[..., None] + torch.arange(n, device=anchor.device)
    inside = ahead < weight.shape[1] - 1
    ahead = ahead.clamp(max=weight.shape[1] - 1)
    document = starts.cumsum(1)
    same = at(document, ahead) == at(document, anchor)[..., None]
    own = at(weight, ahead)
    share = (own / own[..., :1].clamp(min=1e-6)).clamp(max=1.0)
    return share * inside * same


def compare(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy against the target's own distribution, and whether the best guess agrees."""
    wanted = wanted.float()
    losses = -(wanted.softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    return losses, logits.argmax(-1) == wanted.argmax(-1)


def mean(losses: Tensor, weight: Tensor) -> Tensor:
    return (losses * weight).sum() / weight.sum().clamp(min=1e-6)


def losses_of(heads: Heads, chains: Chains, weight: Tensor, runs: int) -> tuple[Tensor, ...]:
    """Losses of DSpark, of its confidence, and of MTP; weight (B, A, block)."""
    block = weight.shape[-1]
    ahead = chains.anchor[..., None] + torch.arange(block, device=weight.device)
    with torch.no_grad():
        wanted = chains.head(at(chains.hidden, ahead.clamp(max=chains.tokens.shape[1] - 1)))
    weight = weight * DISCOUNT ** torch.arange(block, device=weight.device)
    logits, confidence = heads.dspark(chains)
    losses, right = compare(logits, wanted)
    doubts = F.binary_cross_entropy_with_logits(confidence.float(), right.float(), reduction="none")
    repeated, _ = compare(heads.mtp(chains, runs), wanted[:, :, :runs])
    return mean(losses, weight), mean(doubts, weight), mean(repeated, weight[:, :, :runs])


@torch.no_grad()
def accepted(heads: Heads, chains: Chains, valid: Tensor, runs: int) -> list[tuple[Tensor, Tensor]]:
    """For each head: the share of chains whose first 1, 2, ... drafts are all the text's own, and
    the share that has that many left to guess before the reply ends."""
    block = valid.shape[-1]
    text = chains.token(torch.arange(1, block + 1, device=valid.device))
    some = valid[..., 0] > 0
    result = []
    for logits in (heads.dspark(chains)[0], heads.mtp(chains, runs)):
        n = logits.shape[2]
        inside = valid[..., :n] > 0
        right = (logits.argmax(-1) == text[..., :n]) & inside
        result.append((right.cumprod(-1)[some].float().mean(0), inside[some].float().mean(0)))
    return result


# -- the run ------------------------------------------------------------------------------------


class Run:
    """Everything of one training run; `go` works until the clock says stop."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.began = args, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        path = args.tokenizer / "tokenizer.json"
        recipe = Recipe(args.length, args.text_share)
        queue, self.workers = start_workers(path, recipe, args.workers, args.seed)
        self.target = self.frozen(args.target)
        self.config = replace(DsparkConfig(), **json.loads(args.config))
        self.heads = Heads(self.target.config, self.config).to(self.device)
        if args.start:
            restore(self.heads, args.start)
        else:  # the output head expects states of the size that the target's own norm gives
            for head in self.heads.children():
                head.norm.load_state_dict(self.target.norm.state_dict())
        self.optimizers = Optimizers(self.heads, "markov", args)
        self.held_out = dict(self.held_out_groups(Tokenizer.from_file(str(path)), recipe))
        self.store = Store(queue, args.store, args.length, self.device)
        self.losses = losses_of
        if self.device == "cuda" or args.compile:
            self.losses = torch.compile(losses_of)
            for layer in self.target.layers:
                layer.compile()
        self.weights = torch.tensor([args.prompt_weight, 1.0, 1.0, 0.0], device=self.device)

    def frozen(self, folder: Path) -> Model:
        target = Model(Config()).to(self.device)
        load(target, folder)
        return target.requires_grad_(False)

    def held_out_groups(self, tokenizer: Tokenizer, recipe: Recipe):
        """Rows of each group of dialogues whose names and values no training row contains."""
        n = self.args.held_out
        for group in MIX:
            rows = held_out_rows(tokenizer, replace(recipe, mix={group: 1.0}), n)
            yield group, torch.from_numpy(rows.astype("int16")).to(self.device)
        rows = held_out_text(tokenizer, recipe.length, n)
        yield "python text", torch.from_numpy(rows.astype("int16")).to(self.device)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def go(self) -> None:
        args = self.args
        while self.store.filled < min(args.store, 8 * args.batch):
            self.store.receive(wait=1.0)
        for name, head in self.heads.named_children():
            print(f"{name}: {sum(p.numel() for p in head.parameters())} parameters")
        print(f"rows ready after {self.elapsed():.1f} s", flush=True)
        step, reported = 0, self.elapsed()
        started = reported
        while self.elapsed() < args.seconds:
            self.store.receive()
            done = (self.elapsed() - started) / (args.seconds - started)
            losses = self.step(rate_at(done, step, args.decay_from))
            step += 1
            if step == 5:
                torch.stack(losses).tolist()  # waits for the GPU
                started = reported = self.elapsed()
                print(f"compiled after {started:.1f} s", flush=True)
            if self.elapsed() - reported > args.report:
                self.report(step, losses, started)
                reported = self.elapsed()
        self.report(step, losses, started)
        save(self.heads, self.config, args.out)

    def chains(self, rows: Tensor, weights: Tensor, n: int) -> tuple[Chains, Tensor]:
        """The target's view of rows with `n` chains in each, and what each draft counts."""
        tokens, starts, _, weight = unpack(rows, weights)
        anchor = start_chains(weight, starts, n)
        counts = draft_weights(anchor, weight, starts, self.config.block_size)
        return look(self.target, tokens, starts, anchor), counts

    def step(self, factor: float) -> tuple[Tensor, ...]:
        with torch.autocast(self.device, torch.bfloat16):
            rows = self.store.draw(self.args.batch)
            chains, weight = self.chains(rows, self.weights, self.args.anchors)
            losses = self.losses(self.heads, chains, weight, self.args.runs)
            drafts, doubts, repeated = losses
        (drafts + CONFIDENCE * doubts + repeated).backward()
        for head in self.heads.children():
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        self.optimizers.step(factor)
        return tuple(loss.detach() for loss in losses)

    def report(self, step: int, losses: tuple[Tensor, ...], started: float) -> None:
        """Expected number of accepted drafts, from a random place in the answers of each group."""
        drafts, doubts, repeated = (loss.item() for loss in losses)
        pace = step / max(1e-9, self.elapsed() - started)
        reuse = step * self.args.batch / max(1, self.store.received)
        print(
            f"{self.elapsed():6.1f} s step {step}, {pace:.1f}/s, rows used {reuse:.2f} times; "
            f"losses {drafts:.4f} {doubts:.4f} {repeated:.4f}; accepted, dspark and mtp:"
        )
        answers = torch.tensor([0.0, 1.0, 1.0, 0.0], device=self.device)
        for group, rows in self.held_out.items():
            with torch.autocast(self.device, torch.bfloat16):
                chains, valid = self.chains(rows, answers, self.args.anchors)
                shares = accepted(self.heads, chains, valid, self.args.runs)
            parts = (f"{x.sum():.2f} of {most.sum():.2f} {rounded(x)}" for x, most in shares)
            print(f"    {group:14}", *parts)
        print(end="", flush=True)


def rounded(shares: Tensor) -> list[float]:
    return [round(x, 3) for x in shares.tolist()]


def save(heads: Heads, config: DsparkConfig, folder: Path) -> None:
    for name, head in heads.named_children():
        weights = {k: v.float().cpu().contiguous() for k, v in head.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")
    text = json.dumps(config.to_json(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def restore(heads: Heads, folder: Path) -> None:
    for name, head in heads.named_children():
        head.load_state_dict(load_file(folder / f"{name}.safetensors"))
