"""Evaluate a model folder on held-out dialogues, greedily, through ds4cli.

    python evaluate.py MODEL_FOLDER [--per-family 40] [--json RESULTS] [--samples]

Every name and value comes from the held-out side of `corpus.words`; tool names are never the
catalogue's own. Each family is asked twice: with a think section and without.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ds4cli import Engine  # first: it chooses the BLAS before mlx is loaded

# isort: split
import mlx.core as mx
from corpus import GROUPS, Message, Pool, Sample
from corpus.chat import draw_weighted
from plaintext import excerpts, standard_library

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"^<think>.*?</think>\s*", re.DOTALL)
CALLING = ("tool-single", "tool-several", "tool-session", "tool-chain")
COPYING = ("replace", "rename", "json", "edit-code")


@dataclass
class Outcome:
    sample: Sample
    thinking: bool
    reply: str  # without the think section
    right: bool
    valid: bool = True  # of a reply that should call: every call parses and names a declared tool
    tool: bool = True  # and names the right tools in the right order

    def line(self) -> str:
        asked = self.sample.messages[-2]["content"]
        return f"[{self.sample.family}] {asked!r} -> {self.reply!r}"


def calls_in(reply: str) -> list[dict] | None:
    """The calls of a reply; None when one of them is broken."""
    if reply.count("<tool_call>") != len(CALL.findall(reply)):
        return None
    try:
        calls = [json.loads(text) for text in CALL.findall(reply)]
    except ValueError:
        return None
    wellformed = all(
        isinstance(c, dict) and isinstance(c.get("arguments"), dict) and "name" in c for c in calls
    )
    return calls if wellformed else None


def judge(sample: Sample, thinking: bool, reply: str) -> Outcome:
    reply = THOUGHT.sub("", reply)
    wanted = [call["function"] for call in sample.answer.get("tool_calls", ())]
    if not wanted:
        return Outcome(sample, thinking, reply, reply.strip() == sample.answer["content"].strip())
    calls = calls_in(reply) or []
    declared = {tool["function"]["name"] for tool in sample.tools or ()}
    valid = bool(calls) and all(call["name"] in declared for call in calls)
    tool = valid and [call["name"] for call in calls] == [call["name"] for call in wanted]
    return Outcome(sample, thinking, reply, tool and calls == wanted, valid, tool)


def bare(messages: list[Message], thinking: bool) -> list[Message]:
    """The conversation as a client sends it: think sections only where they are on."""
    if thinking:
        return messages
    return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]


def ask(engine: Engine, sample: Sample, thinking: bool, max_tokens: int = 400) -> tuple[str, float]:
    """(reply, tokens a model call)."""
    session = engine.session()
    session.sync(
        engine.render(bare(sample.messages[:-1], thinking), tools=sample.tools, think=thinking)
    )
    text = "".join(event.text for event in session.stream(max_tokens=max_tokens))
    stats = session.stats
    return text, stats.generated_tokens / max(1, stats.blocks)


def held_out_samples(per_family: int, seed: int = 0) -> list[Sample]:
    """`per_family` dialogues of every family, each in plain surroundings."""
    pool = Pool(random.Random(seed), held_out=True)
    taken: Counter[str] = Counter()
    samples = []
    for name, table in GROUPS.items():
        for _ in range(per_family * 40):
            sample = draw_weighted(table, pool)
            if name != "conversations" and taken[sample.family] < per_family:
                taken[sample.family] += 1
                samples.append(sample)
    return samples


def run(
    engine: Engine, samples: list[Sample], modes: tuple[bool, ...]
) -> tuple[list[Outcome], dict]:
    outcomes, pace = [], defaultdict(list)
    for sample in samples:
        for thinking in modes:
            reply, tokens_a_call = ask(engine, sample, thinking)
            outcomes.append(judge(sample, thinking, reply))
            if sample.family in COPYING and not thinking:
                pace[sample.family].append(tokens_a_call)
    return outcomes, {family: sum(values) / len(values) for family, values in pace.items()}


def share(flags: list[bool]) -> float:
    return round(100 * sum(flags) / max(1, len(flags)), 1)


def summary(outcomes: list[Outcome]) -> dict:
    """Shares in percent, by family and mode, and the totals that the aims are about."""
    result: dict = {"families": {}}
    for family in dict.fromkeys(o.sample.family for o in outcomes):
        rows = [o for o in outcomes if o.sample.family == family]
        result["families"][family] = {
            "think": share([o.right for o in rows if o.thinking]),
            "no think": share([o.right for o in rows if not o.thinking]),
        }
    for mode, thinking in (("think", True), ("no think", False)):
        calling = [o for o in outcomes if o.sample.family in CALLING and o.thinking == thinking]
        result[mode] = {
            "valid calls": share([o.valid for o in calling]),
            "right tool": share([o.tool for o in calling]),
            "exact arguments": share([o.right for o in calling]),
        }
        others = [
            rows[mode]
            for family, rows in result["families"].items()
            if not family.startswith("tool")
        ]
        result[mode]["instruction families"] = round(sum(others) / max(1, len(others)), 1)
    return result


def python_perplexity(engine: Engine, pieces: int = 30, length: int = 3000) -> float:
    """Per token, over excerpts of library modules that training does not read."""
    total = count = 0.0
    for text in islice(excerpts(standard_library(held_out=True), random.Random(1), length), pieces):
        ids = mx.array(engine.encode(text))[None]
        logits = engine.model(ids[:, :-1]).astype(mx.float32)
        picked = mx.take_along_axis(logits, ids[:, 1:, None], -1).squeeze(-1)
        total += (mx.logsumexp(logits, -1) - picked).sum().item()
        count += ids.shape[1] - 1
    return round(math.exp(total / count), 2)


def broken_at_temperature_one(folder: str, samples: list[Sample]) -> float:
    """Share of replies with a broken or undeclared call when sampled freely, without the guard."""
    engine = Engine.load(folder, temp=1.0)
    calling = [sample for sample in samples if sample.family in CALLING]
    outcomes = [judge(sample, False, ask(engine, sample, False)[0]) for sample in calling]
    return share([not o.valid for o in outcomes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--per-family", type=int, default=40)
    parser.add_argument("--mode", choices=("both", "think", "plain"), default="both")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument(
        "--samples", type=int, default=0, help="print this many wrong and right replies a family"
    )
    args = parser.parse_args()
    engine = Engine.load(args.model)
    samples = held_out_samples(args.per_family)
    modes = {"both": (True, False), "think": (True,), "plain": (False,)}[args.mode]
    outcomes, pace = run(engine, samples, modes)
    result = summary(outcomes)
    result["tokens per model call, copy-edit tasks"] = {k: round(v, 2) for k, v in pace.items()}
    result["held-out Python perplexity"] = python_perplexity(engine)
    result["broken calls at temperature 1, no guard"] = broken_at_temperature_one(
        args.model, samples
    )
    print(json.dumps(result, indent=1))
    show(outcomes, args.samples)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


def show(outcomes: list[Outcome], n: int) -> None:
    """Up to `n` wrong and `n` right replies of every family."""
    seen: Counter[tuple[str, bool]] = Counter()
    for outcome in sorted(outcomes, key=lambda o: o.right):
        key = (outcome.sample.family, outcome.right)
        seen[key] += 1
        if seen[key] > n:
            continue
        print("RIGHT" if outcome.right else "WRONG", outcome.line())
        if not outcome.right:
            calls = [call["function"] for call in outcome.sample.answer.get("tool_calls", ())]
            print("   WANTED", calls or repr(outcome.sample.answer["content"]))


if __name__ == "__main__":
    main()
