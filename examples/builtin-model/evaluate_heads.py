"""How many tokens one call of the target yields with a drafting head, greedily, through ds4cli.

    python evaluate_heads.py MODEL_FOLDER [--samples 12] [--drafter dspark --drafter mtp]

Names and values of the dialogues are held out from training, as are the library modules that the
plain text comes from. Guesses are always made and always as many, so nothing depends on the clock.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from ds4cli import Engine  # first: it chooses the BLAS before mlx is loaded

# isort: split
from corpus import GROUPS, Pool
from corpus.chat import draw_weighted
from evaluate import COPYING, bare
from plaintext import excerpts, standard_library

DRAFTS = {"dspark": 8, "mtp": 4, "ngram": 8}  # a block; as many runs as training made


def prompts(engine: Engine, per_group: int) -> Iterator[tuple[str, list[int]]]:
    """(kind, tokens) of every prompt; copy tasks are a kind of their own."""
    pool, taken = Pool(random.Random(1), held_out=True), defaultdict(int)
    for group, table in GROUPS.items():
        for _ in range(per_group * 20):
            sample = draw_weighted(table, pool)
            kind = "copy and edit" if sample.family in COPYING else group
            if taken[kind] < per_group:
                taken[kind] += 1
                messages = bare(sample.messages[:-1], thinking=False)
                yield kind, engine.render(messages, tools=sample.tools, think=False)
    texts = excerpts(standard_library(held_out=True), random.Random(1), 1000)
    for text in islice(texts, per_group):
        yield "python text", engine.encode(text)


def measure(engine: Engine, per_group: int) -> dict[str, list[float]]:
    """By kind: tokens written, calls, guesses made, guesses right."""
    sums: dict[str, list[float]] = {}
    for kind, tokens in prompts(engine, per_group):
        session = engine.session()
        session.sync(tokens)
        for _ in session.stream(max_tokens=64 if kind == "python text" else 200):
            pass
        stats = session.stats
        row = (stats.generated_tokens, stats.blocks, stats.proposed, stats.accepted)
        sums[kind] = [a + b for a, b in zip(sums.get(kind, [0] * 4), row, strict=True)]
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=12, help="prompts of each kind")
    parser.add_argument("--drafter", action="append", choices=tuple(DRAFTS))
    args = parser.parse_args()
    for drafter in args.drafter or ("dspark", "mtp"):
        n = DRAFTS[drafter]
        engine = Engine.load(
            args.model, drafter=drafter, num_draft_tokens=n, speculate="always", temp=0.0
        )
        for kind, (tokens, calls, made, right) in measure(engine, args.samples).items():
            share = 100 * right / max(1, made)
            print(
                f"{drafter:7} {kind:14} {tokens / calls:5.2f} tokens a call, {share:3.0f} % right"
            )


if __name__ == "__main__":
    main()
