"""What `train.py` does: batches, losses, optimizers, and the run that the clock ends."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from queue import Empty

from model import Config, Model
from pytorch import F, Tensor, torch
from rows import (
    ANSWER,
    MIX,
    PROMPT,
    START,
    TEXT,
    Recipe,
    held_out_rows,
    held_out_text,
    start_workers,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

FILE_BYTES = 15_000_000  # a weight file stays below this


class Store:
    """The newest rows, on the device. A row may be drawn more than once before it is replaced."""

    def __init__(self, queue, capacity: int, length: int, device: str):
        self.queue, self.device = queue, device
        self.data = torch.zeros(capacity, 2, length, dtype=torch.int16, device=device)
        self.filled = self.next = self.received = 0

    def receive(self, wait: float = 0.0) -> None:
        """Take over the blocks that the workers have finished."""
        for _ in range(8):
            try:
                block = self.queue.get(timeout=wait) if wait else self.queue.get_nowait()
            except Empty:
                return
            n = min(len(block), len(self.data) - self.next)
            self.data[self.next : self.next + n] = torch.from_numpy(block[:n].astype("int16")).to(
                self.device
            )
            self.next = (self.next + n) % len(self.data)
            self.received += n
            self.filled = min(len(self.data), self.filled + n)

    def draw(self, n: int) -> Tensor:
        return self.data[torch.randint(self.filled, (n,), device=self.device)]


def unpack(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (B, 2, T) -> tokens, starts, targets, loss weights, each (B, T)."""
    tokens, marks = rows[:, 0].long(), rows[:, 1].long()
    starts = marks >= START
    starts[:, 0] = True
    targets = F.pad(tokens[:, 1:], (0, 1))
    weight = F.pad(weights[marks[:, 1:] % START] * ~starts[:, 1:], (0, 1))
    return tokens, starts, targets, weight


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each position, (B, T)."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


# -- optimizers ---------------------------------------------------------------------------------


def orthogonal(update: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan et al., 2024) on a stack (n, rows, cols)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, for the matrices inside the layers; equal shapes are stacked."""

    def __init__(self, params: list[Tensor], momentum: float = 0.95, decay: float = 0.02):
        shapes: dict[torch.Size, list[Tensor]] = {}
        for param in params:
            shapes.setdefault(param.shape, []).append(param)
        self.groups = list(shapes.values())
        self.buffers = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device)
            for group in self.groups
        ]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([param.grad for param in group])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonal(grads.lerp(buffer, self.momentum)).float()
            scale = max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * scale)


class Optimizers:
    """Muon for a model's matrices, but for those with `apart` in their name, AdamW for the rest."""

    def __init__(self, model: torch.nn.Module, apart: str, args: argparse.Namespace):
        matrices, others = [], []
        for name, param in model.named_parameters():
            inner = param.ndim == 2 and apart not in name and min(param.shape) >= 32
            (matrices if inner else others).append(param)
        fused = others[0].is_cuda
        self.model, self.args, self.muon = model, args, Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    def step(self, factor: float) -> None:
        """One step at the rates of `args` times `factor`; the gradients are gone after it."""
        self.muon.step(self.args.muon_rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.args.adam_rate * factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)


def rate_at(done: float, step: int, decay_from: float) -> float:
    """Learning rate factor: warm-up over 150 steps, then flat, then linear down to zero."""
    return min(1.0, (step + 1) / 150, max(0.0, (1 - done) / (1 - decay_from)))


# -- evaluation and saving ----------------------------------------------------------------------


def evaluate(model: Model, rows: Tensor, kinds: tuple[int, ...]) -> list[tuple[float, float]]:
    """For each kind of token: (mean loss, share of tokens right)."""
    tokens, starts, targets, _ = unpack(rows, torch.ones(4, device=rows.device))
    kind = F.pad(rows[:, 1, 1:], (0, 1), value=-1)  # of the target; starts of dialogues are no kind
    logits = model(tokens, starts).detach()  # not under no_grad, which would compile it all again
    losses, right = losses_of(logits, targets), logits.argmax(-1) == targets
    return [
        (losses[kind == k].mean().item(), right[kind == k].float().mean().item()) for k in kinds
    ]


def save(model: Model, config: Config, folder: Path) -> None:
    """float32 weights in files small enough to carry, and the configuration."""
    part: dict[str, Tensor] = {}
    size, index = 0, 0
    for name, param in model.named_parameters():
        if size + param.numel() * 4 > FILE_BYTES and part:
            save_file(part, folder / f"weights-{index}.safetensors")
            part, size, index = {}, 0, index + 1
        part[name] = param.detach().float().cpu().contiguous()
        size += param.numel() * 4
    save_file(part, folder / f"weights-{index}.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2))


def load(model: Model, folder: Path) -> None:
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        weights |= load_file(path)
    model.load_state_dict(weights)


# -- the run ------------------------------------------------------------------------------------


class Run:
    """Everything of one training run; `go` works until the clock says stop."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.began = args, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.recipe = recipe_of(args)
        path = args.tokenizer / "tokenizer.json"
        queue, self.workers = start_workers(path, self.recipe, args.workers, args.seed)
        self.config = replace(Config(), **json.loads(args.config))
        self.model = Model(self.config).to(self.device)
        if args.start:
            load(self.model, args.start)
        self.optimizers = Optimizers(self.model, "embed", args)
        tokenizer = Tokenizer.from_file(str(path))
        self.dialogues = self.to_device(held_out_rows(tokenizer, self.recipe, args.batch))
        self.text = self.to_device(held_out_text(tokenizer, args.length, args.batch))
        self.store = Store(queue, args.store, args.length, self.device)
        self.losses = losses_of
        if self.device == "cuda" or args.compile:
            self.losses = torch.compile(losses_of)
            for layer in self.model.layers:  # one by one: equal layers share what is compiled
                layer.compile()
        self.weights = torch.tensor(
            [args.prompt_weight, 1.0, args.text_weight, 0.0], device=self.device
        )

    def to_device(self, rows) -> Tensor:
        return torch.from_numpy(rows.astype("int16")).to(self.device)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def go(self) -> None:
        args = self.args
        while self.store.filled < min(args.store, 8 * args.batch):
            self.store.receive(wait=1.0)
        size = sum(param.numel() for param in self.model.parameters())
        print(f"{size} parameters, rows ready after {self.elapsed():.1f} s", flush=True)
        step, reported = 0, self.elapsed()
        started = reported
        while self.elapsed() < args.seconds:
            self.store.receive()
            done = (self.elapsed() - started) / (args.seconds - started)
            self.step(rate_at(done, step, args.decay_from))
            step += 1
            if step == 5:
                started = self.elapsed()  # compilation is over
                print(f"compiled after {started:.1f} s", flush=True)
            if self.elapsed() - reported > args.report:
                self.report(step, started)
                reported = self.elapsed()
        self.report(step, started)
        save(self.model, self.config, args.out)

    def step(self, factor: float) -> None:
        tokens, starts, targets, weight = unpack(self.store.draw(self.args.batch), self.weights)
        with torch.autocast(self.device, torch.bfloat16):
            losses = self.losses(self.model(tokens, starts), targets)
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(factor)

    def report(self, step: int, started: float) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            (answer, right), (prompt, _) = evaluate(self.model, self.dialogues, (ANSWER, PROMPT))
            ((text, _),) = evaluate(self.model, self.text, (TEXT,))
        seen = step * self.args.batch * self.args.length
        speed = seen / max(1e-9, self.elapsed() - started)
        reuse = step * self.args.batch / max(1, self.store.received)
        print(
            f"{self.elapsed():6.1f} s step {step}, {seen / 1e6:.0f}M tokens, {speed / 1e6:.2f}M/s, "
            f"rows used {reuse:.2f} times; held-out: answers {answer:.4f} "
            f"({100 * right:.2f} % right), prompts {prompt:.3f}, "
            f"python {text:.3f} (perplexity {math.exp(text):.1f})",
            flush=True,
        )


def recipe_of(args: argparse.Namespace) -> Recipe:
    mix = json.loads(args.mix) if args.mix else dict(MIX)
    return Recipe(args.length, args.text_share, args.thinking_share, mix=mix)
