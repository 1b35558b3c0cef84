"""Deciding how to go back. Pure: integers, lists and opaque payloads; no mlx.

A *checkpoint* is keyed by the absolute number of tokens its state has consumed. The *checkpoints* holds
checkpoints under a byte budget. `plan` compares every way to reach a position and takes the one that
feeds the fewest tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# What goes first when the byte budget is short. Checkpoints of a later kind outlive all earlier kinds.
EVICTION_ORDER = ("block", "chunk", "prompt", "tool", "turn", "system")
THINNED = ("block", "chunk")
WIDENING = (1.1, 1.25, 1.5, 2.0)
# Bounds the number of live arrays, which some backends limit.
MAX_CHECKPOINTS = 256


@dataclass(frozen=True)
class RewindReport:
    """What a rewind or a sync did.

    source: "live", "block", "horizon", "trim", "frontier" or "rebuild".
    discarded, replayed, prefilled: tokens dropped, fed again, fed for the first time.
    forwards: model calls. seconds: wall time.
    """

    source: str
    discarded: int = 0
    replayed: int = 0
    prefilled: int = 0
    forwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RewindPlan:
    """How to get to `pos`: bring the state to `base`, feed `replay` tokens in `forwards` calls."""

    pos: int
    source: str
    base: int
    forwards: int = 0
    checkpoint: Checkpoint | None = field(default=None, repr=False)

    @property
    def replay(self) -> int:
        return self.pos - self.base


@dataclass(frozen=True)
class Checkpoint:
    """What brings every layer back to `pos`. `payload` and `logits` are the timeline's business."""

    pos: int
    kind: str
    payload: Any = field(repr=False)
    nbytes: int = 0
    logits: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Reach:
    """What a timeline can reach now, without a model call.

    Every state in `low..high` (inclusive) is reachable; those in `rows` have their logits row too.
    `last_block` is the last accepted block, start and end inclusive. `can_cut` is True when every layer
    is positional and nothing was ever dropped, so that `low` is 0.
    """

    pos: int
    low: int
    high: int
    rows: range | frozenset[int]
    last_block: tuple[int, int]
    can_cut: bool
    checkpoints: Sequence[Checkpoint] = ()


def call_sizes(n: int, chunk: int, last: int) -> list[int]:
    """Split a feed of n tokens into model calls of at most `chunk`, the final one at most `last`.

    The odd remainder goes first, so that the final call, which becomes the record, is long.
    """
    if n <= 0:
        return []
    final = min(n, chunk, last)
    body = n - final
    sizes = [chunk] * (body // chunk)
    return ([body % chunk] if body % chunk else []) + sizes + [final]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:  # slices compare in C; a bisection beats a Python loop over tokens
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def plan(pos: int, reach: Reach, *, chunk: int, last: int, needs_row: bool = True) -> RewindPlan:
    """The cheapest way to `pos`: fewest tokens fed again, among equals the first listed below.

    `needs_row` False is for a caller that feeds on at once and does not read the logits at `pos`.
    """
    if pos == reach.pos and (pos in reach.rows or not needs_row or pos == 0):
        return RewindPlan(pos, "live", pos)
    candidates = [*_without_call(pos, reach, needs_row), *_from_checkpoints(pos, reach, needs_row)]
    candidates.append(RewindPlan(pos, "rebuild", 0))
    best = min(candidates, key=lambda c: c.replay)
    calls = len(call_sizes(best.replay, chunk, last))
    return RewindPlan(best.pos, best.source, best.base, calls, best.checkpoint)


def _without_call(pos: int, reach: Reach, needs_row: bool) -> Iterable[RewindPlan]:
    """Bring the layers to pos, or one token short of it where the logits row is not kept.

    Position 0 is a rebuild, which frees all memory, unless the record itself starts there.
    """
    for base in (pos, pos - 1):
        if base == 0 != reach.last_block[0]:
            continue
        has_row = base == pos and (pos in reach.rows or pos == 0 or not needs_row)
        if reach.low <= base <= reach.high and (has_row or base < pos):
            yield RewindPlan(pos, _source(pos, base, reach), base)


def _source(pos: int, base: int, reach: Reach) -> str:
    start, end = reach.last_block
    if start <= pos <= end and base == pos:
        return "block"
    near = pos in reach.rows or not reach.can_cut
    return "horizon" if near else "trim"


def _from_checkpoints(pos: int, reach: Reach, needs_row: bool) -> Iterable[RewindPlan]:
    for f in reach.checkpoints:
        exact = f.pos == pos and (f.logits is not None or not needs_row)
        if exact or f.pos < pos:
            yield RewindPlan(pos, "frontier", f.pos, checkpoint=f)


class Checkpoints:
    """Checkpoints in order of position, thinned with distance where the budget asks for it.

    While bytes and `MAX_CHECKPOINTS` allow, every checkpoint stays. Then thinning walks from old to new and
    drops a checkpoint whose older neighbour is at most `widen` times as far from the live end as its
    newer neighbour, `widen` growing to 2: going back d tokens then replays at most d tokens plus
    one block, with about 2 log2(pos) checkpoints. What still does not fit goes kind by kind.
    """

    def __init__(self, budget_bytes: int, checkpoints: Iterable[Checkpoint] = ()):
        self.budget_bytes = budget_bytes
        self.kept = list(checkpoints)

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.kept)

    def copy(self) -> Checkpoints:
        return Checkpoints(self.budget_bytes, self.kept)

    def has(self, pos: int, kind: str | None = None) -> bool:
        return any(f.pos == pos and kind in (None, f.kind) for f in self.kept)

    def add(self, checkpoint: Checkpoint, live: int) -> None:
        """Insert by position (a stronger kind replaces a weaker one there), then thin."""
        here = [f for f in self.kept if f.pos == checkpoint.pos]
        if here and _rank(here[0]) > _rank(checkpoint):
            return
        others = [f for f in self.kept if f.pos != checkpoint.pos]
        self.kept = sorted([*others, checkpoint], key=lambda f: f.pos)
        self.thin(live)

    def drop_after(self, pos: int) -> None:
        """Forget checkpoints beyond pos: their tokens are about to be overwritten."""
        if self.kept and self.kept[-1].pos > pos:
            self.kept = [f for f in self.kept if f.pos <= pos]

    def thin(self, live: int, budget_bytes: int | None = None) -> None:
        """Thin block and chunk checkpoints by distance, then drop by kind until the budget holds."""
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        for widen in WIDENING:
            if self.nbytes <= budget and len(self.kept) <= MAX_CHECKPOINTS:
                return
            self.kept = thinned(self.kept, live, THINNED, widen)
        for kind in EVICTION_ORDER:
            widen = WIDENING[-1]
            while self.nbytes > budget and any(f.kind == kind for f in self.kept):
                widen *= 2
                self.kept = thinned(self.kept, live, (kind,), widen)
                if widen > live + 2:
                    self._drop_oldest(kind)

    def _drop_oldest(self, kind: str) -> None:
        index = next(i for i, f in enumerate(self.kept) if f.kind == kind)
        del self.kept[index]


def _rank(checkpoint: Checkpoint) -> int:
    return EVICTION_ORDER.index(checkpoint.kind)


def thinned(
    checkpoints: Sequence[Checkpoint], live: int, kinds: Sequence[str], widen: float
) -> list[Checkpoint]:
    """One pass of the thinning rule over the checkpoints of `kinds`; position 0 is a free neighbour."""
    kept: list[Checkpoint] = []
    for i, f in enumerate(checkpoints):
        older = live - (kept[-1].pos if kept else 0)
        newer = live - (checkpoints[i + 1].pos if i + 1 < len(checkpoints) else live)
        if f.kind in kinds and older <= widen * newer:
            continue
        kept.append(f)
    return kept
