"""What keeping the past costs a reply that never goes back: one text, recording on and off."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from ds4cli.bench.measure import Row, Sample, mad, timed

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.session import Session


@dataclass
class Runs:
    """Samples of one way, and what was generated: a hash of the tokens and the number of blocks."""

    samples: list[Sample] = field(default_factory=list)
    outputs: set[tuple[str, int]] = field(default_factory=set)


def control(lab: Lab) -> Iterator[Row]:
    """Pairs of runs, one token a step and in full blocks; which goes first alternates."""
    n = lab.matrix.generate
    (context, *_) = lab.contexts(n)
    truth = lab.truth(lab.text.take(context), n)
    session = lab.session(truth[:context])
    cases: dict[str, Callable[[], object]] = {
        f"{n} tokens, one a step": lambda: lab.decode(session, n),
        f"{n} tokens in full blocks": lambda: lab.decode_blocks(session, truth, len(truth)),
    }
    for case, run in cases.items():
        on, off = _pairs(lab, session, context, run)
        same = len(on.outputs | off.outputs) == 1
        note = difference([s.seconds for s in on.samples], [s.seconds for s in off.samples])
        yield timed(
            on.samples, "control", case, "recording", against="not recording", match=same,
            note=note, context_tokens=context,
        )  # fmt: skip
        yield timed(off.samples, "control", case, "not recording", context_tokens=context)


def _pairs(lab: Lab, session: Session, start: int, run: Callable[[], object]) -> tuple[Runs, Runs]:
    ways = {True: Runs(), False: Runs()}
    for pair in range(-lab.matrix.warmup, lab.matrix.pairs):
        for recording in (True, False) if pair % 2 else (False, True):
            session.rewind(start)
            session.next_token()
            session.recording = recording
            blocks = session.stats.blocks
            sample = lab.sample(session, run)
            session.recording = True
            if pair >= 0:
                output = fingerprint(session.tokens), session.stats.blocks - blocks
                ways[recording].samples.append(sample)
                ways[recording].outputs.add(output)
    return ways[True], ways[False]


def fingerprint(tokens: Sequence[int]) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def difference(on: Sequence[float], off: Sequence[float]) -> str:
    """The cost of the first in percent of the second, pair by pair: median and spread."""
    percents = [100 * (a / b - 1) for a, b in zip(on, off, strict=True)]
    return f"{median(percents):+.1f} ± {mad(percents):.1f} %"
