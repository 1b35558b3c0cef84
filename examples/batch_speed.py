"""Tokens a second of several texts written at a time, beside mlx_lm's own batches.

python examples/batch_speed.py MODEL [--lanes N ...] [--prompt TOKENS] [--shared TOKENS]

Each row is so many prompts of unlike lengths, read and answered to their end, by sessions that are
stepped together and by `mlx_lm.batch_generate` on the same weights, in turns in one process. The
last two columns count the texts that are what each of the two says to that prompt alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from ds4cli import Engine

# ruff: noqa: I001  (the package chooses a BLAS before mlx is imported)
import mlx.core as mx
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step

from ds4cli.bench.corpus import Corpus
from ds4cli.bench.reference import stock
from ds4cli.engine.group import Group
from ds4cli.rewind.timeline import Limits
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tokens import common_prefix

Texts = list[list[int]]


def prompts(engine: Engine, n: int, own: int, shared: int, seed: int) -> Texts:
    """n prompts: `shared` tokens that all begin with, then half to one and a half times `own`."""
    text, draw = Corpus(engine.encode), random.Random(seed)
    common = text.take(shared)
    sizes = [draw.randint(max(1, own // 2), own * 3 // 2) for _ in range(n)]
    return [common + text.take(size, at=draw.randrange(10**6)) for size in sizes]


class Ours:
    """One session reads, branches of it write, as in `ds4cli generate --batch`."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._group = Group(engine, print)

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        session = self.engine.session()
        session.sync(prompt)
        return [t for event in session.stream(max_tokens=tokens, stop=[]) for t in event.tokens]

    def together(self, prompts: Texts, tokens: int) -> Texts:
        reader, group = self.engine.session(), self._group
        few = Limits(MAX_BLOCK_TOKENS, reader.limits.budget_bytes, reader.limits.chunk_tokens)
        common = min(common_prefix(prompts[0], prompt[:-1]) for prompt in prompts)
        reader.sync(prompts[0][:common])
        sessions = [reader.fork(few) for _ in prompts]
        for session in sessions:
            session.recording = False  # nothing goes back here
        group.read(sessions, prompts)
        lanes = [group.join(session, max_tokens=tokens, stop=[]) for session in sessions]
        found = {lane: [] for lane in lanes}
        try:
            while group.lanes:
                group.call()
                for lane in [lane for lane in group.lanes if lane.has_step]:
                    found[lane] += next(lane.events).tokens
        finally:
            for lane in lanes:
                group.leave(lane)
        return [found[lane] for lane in lanes]


class Theirs:
    """mlx_lm with the same weights, in its own classes."""

    def __init__(self, engine: Engine):
        self._model, self._tokenizer = stock(engine.model), engine.tokenizer
        self._stops = engine.stop_ids

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        found = []
        for token, _ in generate_step(mx.array(prompt), self._model, max_tokens=tokens):
            if token in self._stops:
                break
            found.append(token)
        return found

    def together(self, prompts: Texts, tokens: int) -> Texts:
        done = batch_generate(
            self._model, self._tokenizer, prompts, max_tokens=tokens, return_token_ids=True
        )
        return done.token_ids


def timed(work: Callable[[Texts, int], Texts], prompts: Texts, tokens: int) -> tuple[float, Texts]:
    """Tokens a second, and the texts; 0 and none where it fails."""
    mx.clear_cache()
    begin = time.perf_counter()
    try:
        texts = work(prompts, tokens)
    except Exception as error:
        print(f"{work.__self__.__class__.__name__}: {type(error).__name__}: {error}"[:200])
        return 0.0, []
    return sum(map(len, texts)) / (time.perf_counter() - begin), texts


def row(sides: dict, lanes: int, given: argparse.Namespace, engine: Engine) -> str:
    """One line of the table."""
    asked = prompts(engine, lanes, given.prompt, given.shared, seed=lanes)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    same = {}
    for turn in range(given.repeats + 1):
        for name, side in sides.items():
            rate, texts = timed(side.together, asked, given.tokens)
            if turn:
                rates[name].append(rate)
            elif not given.fast:
                alone = [side.alone(prompt, given.tokens) for prompt in asked]
                same[name] = sum(a == b for a, b in zip(alone, texts, strict=False))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    ours, theirs = rates.values()
    ratio = statistics.median(
        a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)
    )
    cells = [f"{lanes:5}", *(f"{middle[name]:9.1f}" for name in sides), f"{ratio:6.2f}"]
    cells += [f"{same[name]:6} of {lanes:2}" for name in sides if name in same]
    return "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt, about")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="turns, after one that warms up")
    parser.add_argument("--dtype", default="auto", help="weights in memory, see ds4cli")
    parser.add_argument("--drafter", default="none", help="where guesses come from, see ds4cli")
    parser.add_argument("--fast", action="store_true", help="compare no text with one alone")
    given = parser.parse_args()
    engine = Engine.load(given.model, dtype=given.dtype, drafter=given.drafter)
    engine.stop_ids = set()  # all texts are of one length
    engine.tokenizer.eos_token_ids = set()
    sides = {"ds4cli": Ours(engine), "mlx_lm": Theirs(engine)}
    print("lanes   ds4cli   mlx_lm ratio   ds4cli    mlx_lm")
    print("         tok/s    tok/s         as alone  as alone")
    for lanes in given.lanes:
        print(row(sides, lanes, given, engine), flush=True)


if __name__ == "__main__":
    main()
