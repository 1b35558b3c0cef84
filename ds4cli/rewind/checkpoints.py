"""What is kept of earlier positions, and what of it goes first. Pure; no mlx.

A *checkpoint* brings every layer back to one position. It is keyed by the absolute number of tokens
its state has consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# What goes first when the byte budget is short. A later kind outlives all earlier kinds.
EVICTION_ORDER = ("block", "chunk", "prompt", "tool", "turn", "system")
THINNED = ("block", "chunk")
WIDENING = (1.1, 1.25, 1.5, 2.0)
# Bounds the number of live arrays, which some backends limit.
MAX_CHECKPOINTS = 256


@dataclass(frozen=True)
class Checkpoint:
    """What brings every layer back to `pos`. `payload` and `logits` are the timeline's business."""

    pos: int
    kind: str
    payload: Any = field(repr=False)
    nbytes: int = 0
    logits: Any = field(default=None, repr=False)


class Checkpoints:
    """Checkpoints in order of position, thinned with distance where the budget asks for it.

    While bytes and `MAX_CHECKPOINTS` allow, every one stays. Then thinning walks from old to new
    and drops one whose older neighbour is at most `widen` times as far from the live end as its
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
        """Thin those of blocks and chunks by distance, then drop by kind until the budget holds."""
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        for widen in WIDENING:
            if self.nbytes <= budget and len(self.kept) <= MAX_CHECKPOINTS:
                return
            self.kept = thinned(self.kept, live, THINNED, widen)
        for kind in EVICTION_ORDER:
            widen = WIDENING[-1]
            while self.nbytes > budget and any(f.kind == kind for f in self.kept):
                widen *= 2
                if widen <= live + 2:
                    self.kept = thinned(self.kept, live, (kind,), widen)
                else:
                    self._drop_oldest(kind)

    def _drop_oldest(self, kind: str) -> None:
        index = next(i for i, f in enumerate(self.kept) if f.kind == kind)
        del self.kept[index]


def _rank(checkpoint: Checkpoint) -> int:
    return EVICTION_ORDER.index(checkpoint.kind)


def thinned(
    checkpoints: Sequence[Checkpoint], live: int, kinds: Sequence[str], widen: float
) -> list[Checkpoint]:
    """One pass of the thinning rule over those of `kinds`; position 0 is a free neighbour."""
    kept: list[Checkpoint] = []
    for i, f in enumerate(checkpoints):
        older = live - (kept[-1].pos if kept else 0)
        newer = live - (checkpoints[i + 1].pos if i + 1 < len(checkpoints) else live)
        if f.kind in kinds and older <= widen * newer:
            continue
        kept.append(f)
    return kept
