"""What kept positions take, and so how many of them a budget holds. Pure arithmetic; no mlx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ds4cli.tape.recorder import Sizes

# Rows of a run: one-row calls are put together when so many are complete. As many as one of dense
# checkpoints serves, or fewer where that leaves clearly more rows free: rows go by runs, and calls
# that are not in one yet take more; but each run that goes takes a replay.
RUN_ROWS = (32, 16, 8, 4)
CLEARLY = 1.1
# Newest rows that stay one array each where checkpoints are dense: copying a row costs as much as
# recording it, and most are never gone back to.
LINKED_ROWS = 256
# Arrays alive at most, about: Metal has room for 499,000 in all.
MAX_ARRAYS = 250_000
# Rows between checkpoints where many fit the budget: so many in a quarter of it.
DENSE_SPACING = 32
DENSE_CHECKPOINTS = 8
# Elsewhere as close as there is room for beside the whole horizon: what going back takes grows with
# the rows to replay.
SPACINGS = (32, 64, 128)


@dataclass(frozen=True)
class Room:
    """How the rows of a horizon are kept.

    free_rows: so many are always reached, were every call of one row. run_rows: rows of a run.
    spacing: rows between the checkpoints that stay; None where there is one, at the beginning.
    linked_rows: newest rows that are not copied. most_segments: calls of one row, so that not too
    many arrays are alive. state_bytes: of a checkpoint.
    """

    free_rows: int
    run_rows: int
    spacing: int | None
    is_dense: bool
    linked_rows: int
    most_segments: int
    state_bytes: int

    @staticmethod
    def of(
        limit: int, budget: int, sizes: Sizes, logits: int, page: int, in_place: bool = False
    ) -> Room:
        """Room for `limit` rows in `budget` bytes; less if that is short. logits: bytes of a row.
        page: the unit in which an array takes memory. in_place: whether replays read rows where
        they stand."""
        dense = DENSE_CHECKPOINTS * sizes.state <= budget // 4
        pages = 0 if page == 1 else page * sizes.row_arrays
        # Where a replay would spend its time on joining rows, and where every array takes pages,
        # rows are copied as soon as their run is complete.
        linked = LINKED_ROWS if dense and page == 1 else 0
        if in_place:  # nothing is won by copying, and on a fast card it is what recording costs
            linked = min(limit, MAX_ARRAYS // 2 // (1 + sizes.row_arrays + sizes.state_arrays))
        kinds = [_Kept(sizes, logits, pages, n, linked, dense) for n in RUN_ROWS]
        rooms = [kind.room(limit, budget) for kind in kinds]
        most = max(min(room.free_rows, limit) for room in rooms)
        rooms = [room for room in rooms if CLEARLY * room.free_rows >= most]
        return min(rooms, key=lambda room: room.spacing or limit + 1)  # of equals the longest runs


class _Kept(NamedTuple):
    """What rows take that are put together in runs of `run`. pages: of the arrays of a row, beyond
    their bytes."""

    sizes: Sizes
    logits: int
    pages: int
    run: int
    linked: int
    dense: bool

    def room(self, limit: int, budget: int) -> Room:
        spacing = DENSE_SPACING if self.dense else self._spacing(limit, budget)
        arrays = 1 + self.sizes.row_arrays + self.sizes.state_arrays
        copied = max(0, MAX_ARRAYS - self._loose * arrays) // arrays * self.run
        rows = min(self.rows_in(budget), self._loose + copied) - (self.run - 1)
        if not self.dense and spacing in SPACINGS:  # checkpoints have the rest
            rows = min(rows, limit)
        free, most, state = max(0, rows), MAX_ARRAYS // arrays, self.sizes.state
        return Room(free, self.run, spacing, self.dense, self.linked, most, state)

    def _spacing(self, limit: int, budget: int) -> int | None:
        """Rows from one checkpoint to the next; the oldest leaves when the second is old enough."""
        for spacing in (*(n for n in SPACINGS if n < limit), limit):
            more = limit // max(1, spacing) * (self.sizes.state + self.logits)
            if self.bytes_of(limit + spacing + self.run) + more <= budget:
                return spacing
        return None

    @property
    def _loose(self) -> int:
        """Rows in arrays of their own, at most: the newest, and the run being copied, too."""
        return self.linked + 3 * self.run

    @property
    def _row(self) -> int:
        """A row, with its part of what a checkpoint takes."""
        state = -(-self.sizes.state // DENSE_SPACING) if self.dense else 0
        return max(1, self.sizes.row + self.logits + state)

    @property
    def _fixed(self) -> int:
        """The first checkpoint, the logits row there, the histories of calls not yet in a run."""
        return self.sizes.state + self.logits + self.run * self.sizes.history

    def bytes_of(self, rows: int) -> int:
        return self._fixed + rows * self._row + min(rows, self._loose) * self.pages

    def rows_in(self, budget: int) -> int:
        """The most rows that take no more."""
        left = max(0, budget - self._fixed)
        loose = min(self._loose, left // (self._row + self.pages))
        return loose + (left - loose * (self._row + self.pages)) // self._row
