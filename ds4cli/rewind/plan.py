"""Deciding how to go back. Pure: integers, lists and opaque payloads; no mlx.

`plan` compares every way to reach a position and takes the one that
feeds the fewest tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ds4cli.rewind.checkpoints import Checkpoint


@dataclass(frozen=True)
class RewindReport:
    """What a rewind or a sync did.

    source: "live", "block", "horizon", "trim", "frontier" or "rebuild".
    discarded, replayed, prefilled: tokens dropped, fed again, fed for the first time.
    forwards: model calls. seconds: wall time; back_s: what of it is not for the tokens fed for the
    first time.
    """

    source: str
    discarded: int = 0
    replayed: int = 0
    prefilled: int = 0
    forwards: int = 0
    seconds: float = 0.0
    back_s: float = 0.0


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
class Reach:
    """What a timeline can reach now, without a model call.

    Every state in `low..high` (inclusive) is reachable; those in `rows` have their logits row too.
    `last_block` is the last accepted block, start and end inclusive. `can_cut` is True when every
    layer is positional and nothing was ever dropped, so that `low` is 0.
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

    The odd remainder goes first, so that the final call, which becomes the last block, is long.
    """
    if n <= 0:
        return []
    final = min(n, chunk, last)
    return [*_even(n - final, chunk), final]


def stepped_sizes(start: int, n: int, chunk: int, last: int, step: int) -> list[int]:
    """The same, from position `start` on, where calls whose rows and end are multiples of `step`
    come again at no cost: all but the ends of a long feed go into such calls.
    """
    head, final = -start % step, (start + n) % step + step
    if final > last:
        final -= step
    body, whole = n - head - final, chunk // step * step
    if min(body, whole, final) <= 0 or final > last:
        return call_sizes(n, min(chunk, 2 * step), last)
    return [*_even(head, chunk), *_even(body, whole), final]


def _even(n: int, chunk: int) -> list[int]:
    """n tokens in calls of `chunk`, the remainder first."""
    return ([n % chunk] if n % chunk else []) + [chunk] * (n // chunk)


def plan(
    pos: int, reach: Reach, *, calls: Callable[[int, int], int], needs_row: bool = True
) -> RewindPlan:
    """The cheapest way to `pos`: fewest tokens fed again, among equals the first listed below.

    `calls` says how many model calls so many tokens take from a position on.
    `needs_row` False is for a caller that feeds on at once and does not read the logits at `pos`.
    """
    if pos == reach.pos and (pos in reach.rows or not needs_row or pos == 0):
        return RewindPlan(pos, "live", pos)
    candidates = _without_call(pos, reach, needs_row)
    if candidates and candidates[0].base == pos:
        return candidates[0]
    candidates += [*_from_checkpoints(pos, reach, needs_row), RewindPlan(pos, "rebuild", 0)]
    best = min(candidates, key=lambda c: c.replay)
    return replace(best, forwards=calls(best.base, best.replay)) if best.replay else best


def _without_call(pos: int, reach: Reach, needs_row: bool) -> list[RewindPlan]:
    """Bring the layers to pos, or one token short of it where the logits row is not kept.

    Position 0 is a rebuild, which frees all memory, unless the last block starts there.
    """
    start, end = reach.last_block
    near = pos in reach.rows or not reach.can_cut
    has_row = pos in reach.rows or pos == 0 or not needs_row
    found = []
    if has_row and reach.low <= pos <= reach.high and (pos or start == 0):
        source = "block" if start <= pos <= end else "horizon" if near else "trim"
        found.append(RewindPlan(pos, source, pos))
    if reach.low <= pos - 1 <= reach.high and (pos > 1 or start == 0):
        found.append(RewindPlan(pos, "horizon" if near else "trim", pos - 1))
    return found


def _from_checkpoints(pos: int, reach: Reach, needs_row: bool) -> Iterable[RewindPlan]:
    for f in reach.checkpoints:
        exact = f.pos == pos and (f.logits is not None or not needs_row)
        if exact or f.pos < pos:
            yield RewindPlan(pos, "frontier", f.pos, checkpoint=f)
