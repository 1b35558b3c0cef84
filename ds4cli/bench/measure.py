"""What a measurement is, and every decision about one. Pure: numbers in, numbers out.

A case is measured in several *ways* (going back with what was kept, reading everything again), in
the same run. A row holds all samples of one way; `against` names the way it is paired with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

SLOW_FIRST = 2.0  # a first sample this many times the median of the others is worth a word
NOISY = 0.2  # so is a spread of this share of the median


@dataclass(frozen=True)
class Sample:
    """One action: wall time, and the model calls and tokens that were counted meanwhile."""

    seconds: float
    forwards: int = 0
    fed_tokens: int = 0
    source: str = ""


@dataclass(frozen=True)
class Row:
    """All samples of one way to do one case.

    unit: "ms", "s", "bytes" or "%". forwards, fed_tokens: the most that one sample took; None where
    nothing was timed. source: how the session went back. match: whether what followed equals a
    fresh session's text; None where it was not compared. are_repeats: whether the samples are of
    one thing, so that their spread says how quiet the machine was.
    """

    scenario: str
    case: str
    way: str
    samples: tuple[float, ...]
    unit: str = "ms"
    context_tokens: int = 0
    distance_tokens: int = 0
    forwards: int | None = None
    fed_tokens: int | None = None
    source: str = ""
    against: str = ""
    match: bool | None = None
    note: str = ""
    are_repeats: bool = True

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.scenario, self.context_tokens, self.case, self.way

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def mad(self) -> float:
        return mad(self.samples)


def timed(samples: Sequence[Sample], scenario: str, case: str, way: str, **fields: Any) -> Row:
    """A row of times in ms, with the counts of its samples."""
    return Row(
        scenario,
        case,
        way,
        tuple(1e3 * s.seconds for s in samples),
        forwards=max(s.forwards for s in samples),
        fed_tokens=max(s.fed_tokens for s in samples),
        source=samples[-1].source,
        **fields,
    )


def mad(samples: Sequence[float]) -> float:
    """Median absolute deviation from the median: a spread that one outlier does not move."""
    middle = median(samples)
    return median(abs(x - middle) for x in samples)


@dataclass(frozen=True)
class Ratio:
    """A quotient of two medians and how far the spreads of both could move it."""

    value: float
    spread: float


def ratio(a: Row, b: Row) -> Ratio:
    """a / b. Equal to 1 where both are zero, infinite where only b is."""
    if b.median == 0:
        return Ratio(1.0 if a.median == 0 else float("inf"), 0.0)
    value = a.median / b.median
    relative = (a.mad / a.median if a.median else 0.0) + b.mad / b.median
    return Ratio(value, value * relative)


def partner(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that `row` is paired with."""
    key = replace(row, way=row.against).key
    return next((r for r in rows if row.against and r.key == key), None)


@dataclass(frozen=True)
class Change:
    """One row against an older run's. ratio: new / old; above 1 is slower, or more bytes."""

    row: Row
    old: Row
    ratio: Ratio
    is_worse: bool


def compare(old: Sequence[Row], new: Sequence[Row], tolerance: float) -> list[Change]:
    """Rows of both runs, paired by key. Worse: more than `tolerance` (a share) above the old median
    and not explained by the spread, or a match that was lost."""
    before = {r.key: r for r in old}
    changes = []
    for row in new:
        if row.key in before:
            was = before[row.key]
            r = ratio(row, was)
            slower = r.value > 1 + tolerance and r.value - r.spread > 1
            lost = row.match is False and was.match is not False
            changes.append(Change(row, was, r, slower or lost))
    return changes


def missing(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Rows of the old run that the new one does not have."""
    keys = {r.key for r in new}
    return [r for r in old if r.key not in keys]


def doubts(rows: Sequence[Row]) -> list[str]:
    """What in the samples themselves says that they should not be trusted."""
    times = [r for r in rows if r.are_repeats and r.unit in ("ms", "s") and len(r.samples) > 2]
    slow = [r for r in times if r.samples[0] > SLOW_FIRST * median(r.samples[1:]) > 0]
    noisy = [r for r in times if r.median and r.mad > NOISY * r.median]
    return [
        *(f"first sample slow: {_name(r)}" for r in slow),
        *(f"noisy: {_name(r)} varies by {r.mad / r.median:.0%}" for r in noisy),
    ]


def _name(row: Row) -> str:
    return f"{row.scenario}, {row.case}, {row.way}"


def failed(rows: Sequence[Row]) -> list[Row]:
    """Rows whose text was not what it should be."""
    return [r for r in rows if r.match is False]
