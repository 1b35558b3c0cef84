"""What the host does for a decoded token: Python calls, and with --nodes the graph it builds.

python examples/host_cost.py MODEL [--context N] [--tokens N] [--drafter NAME] [--nodes]

Both are counted, not timed, so a busy machine says the same as a quiet one: mlx-lm's own
`generate_step` over the same weights, a session that keeps nothing, and one that records. Where a
token takes a few milliseconds, its calls are a good part of them, and on CUDA every node is too.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import random
from collections.abc import Callable, Iterator
from typing import Any

from ds4cli import Engine

# ruff: noqa: I001  (the package chooses a BLAS before mlx is imported)
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from ds4cli.bench.reference import stock

WARM_TOKENS = 8  # compiling, first blocks, a full pipeline of calls


def mlx_lm(engine: Engine, prompt: list[int], tokens: int) -> Iterator[object]:
    """Plain decoding by mlx-lm, with no code of ours in the model."""
    return generate_step(mx.array(prompt), stock(engine.model), max_tokens=tokens)


def ours(engine: Engine, prompt: list[int], tokens: int, recording: bool) -> Iterator[object]:
    """Plain decoding the way replies are generated."""
    session = engine.session()
    session.recording = recording
    session.sync(prompt)
    return session.stream(max_tokens=tokens, stop=[])


def calls_per_token(steps: Iterator[object], tokens: int) -> float:
    """Python and C function calls of one of the next `tokens` steps."""
    take(steps, WARM_TOKENS)
    profile = cProfile.Profile()
    profile.enable()
    take(steps, tokens)
    profile.disable()
    return pstats.Stats(profile).total_calls / tokens


def graph_per_call(steps: Iterator[object]) -> tuple[int, int]:
    """The graph of one step, as it is handed to MLX's evaluation: operations, and outputs."""
    take(steps, WARM_TOKENS)
    found: list[tuple[int, int]] = []
    evaluate = mx.async_eval

    def counted(*arrays: Any) -> None:
        wanted = flat(arrays)
        found.append((nodes(wanted), len(wanted)))
        evaluate(*arrays)

    mx.async_eval = counted  # this program's own process, and back before anything else runs
    try:
        take(steps, 1)
    finally:
        mx.async_eval = evaluate
    operations, outputs = zip(*found, strict=True)
    return sum(operations), sum(outputs)


def nodes(arrays: list[mx.array]) -> int:
    """Operations that `arrays` still wait for."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


def flat(tree: Any) -> list[mx.array]:
    """The arrays in a tree; evaluation skips all else."""
    return [x for _, x in tree_flatten(tree) if isinstance(x, mx.array)]


def take(steps: Iterator[object], n: int) -> None:
    for _ in range(n):
        next(steps)


def report(ways: dict[str, Callable[[int], Iterator[object]]], tokens: int, graph: bool) -> None:
    """One line a way; each run is a fresh one, so that counting does not count itself."""
    base = None
    print(f"{'a token':24}{'calls':>8}{'times mlx-lm':>14}{'nodes, outputs' if graph else '':>18}")
    for name, run in ways.items():
        # more than are taken: an iterator that is about to end no longer works ahead
        calls = calls_per_token(run(WARM_TOKENS + tokens + 4), tokens)
        base = base or calls
        counts = "{:>10}{:>8}".format(*graph_per_call(run(WARM_TOKENS + 4))) if graph else ""
        print(f"{name:24}{calls:8.0f}{calls / base:14.2f}{counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=64, help="tokens read before")
    parser.add_argument("--tokens", type=int, default=32, help="tokens counted")
    parser.add_argument("--drafter", default="none", help="of our sessions; guesses change it all")
    parser.add_argument("--nodes", action="store_true", help="the graph of one token too")
    given = parser.parse_args()
    engine = Engine.load(given.model, drafter=given.drafter)
    engine.stop_ids = set()
    prompt = random.Random(0).choices(range(engine.token_limit), k=given.context)
    ways = {
        "mlx-lm generate_step": lambda n: mlx_lm(engine, prompt, n),
        "ours, recording off": lambda n: ours(engine, prompt, n, recording=False),
        "ours": lambda n: ours(engine, prompt, n, recording=True),
    }
    report(ways, given.tokens, given.nodes)


if __name__ == "__main__":
    main()
