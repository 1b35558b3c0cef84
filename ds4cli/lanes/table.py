"""Where the rows of a call stand in an arena, and what they may see there.

All layers that stand at the same positions share one table, so its arrays are made once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import mlx.core as mx

from ds4cli.caches.arena import Arena, SeatedKVCache

# Keys a product is made for on a GPU: a multiple of this. Each other number is planned anew there.
KEY_STEP = 64


class Table:
    """The rows of the lanes that sit in an arena, in the order of their seats.

    sizes, starts: each lane's rows in the call, and the position of the first. seats: its row of
    the arena, of `height` rows in all. is_batch: whether rows come as (N, heads, 1, dim), one a
    lane, not as (1, heads, N, dim). longest: most rows of a lane. total: rows of all.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        starts: Sequence[int],
        seats: Sequence[int],
        height: int,
        is_batch: bool,
    ):
        self.is_batch = is_batch
        self._sizes, self._starts, self._seats, self._height = sizes, starts, seats, height
        self.longest = max(sizes)
        self._is_full = height * self.longest == sum(sizes)
        self.total = sum(sizes)
        self._end = max(start + n for start, n in zip(starts, sizes, strict=True))
        self._masks: dict[tuple[int, int | None], mx.array] = {}
        self._is_noted = False  # that cursors move

    def write(self, caches: Sequence[SeatedKVCache], keys: mx.array, values: mx.array) -> None:
        """Rows of the table's lanes, to their places."""
        arena = caches[0].arena
        arena.reserve(self._end)
        if self._is_full:
            arena.write_all(self._all_columns, self.spread(keys), self.spread(values))
        else:
            keys, values = (x.swapaxes(0, 2) if not self.is_batch else x for x in (keys, values))
            arena.write(self.rows, self.columns, keys[:, :, 0], values[:, :, 0])
        for cache, n in zip(caches, self._sizes, strict=True):
            cache.at += n  # as its `offset` does, but that is a call a lane and layer
        if not self._is_noted:  # nobody looks between two layers
            self._is_noted = True
            for cache in caches:
                cache.seat.cursors = object()

    @cached_property
    def rows(self) -> mx.array:
        """Where each row's lane sits, (N,)."""
        pairs = zip(self._seats, self._sizes, strict=True)
        return mx.array([seat for seat, n in pairs for _ in range(n)], mx.int32)

    @cached_property
    def columns(self) -> mx.array:
        """The position of each row (N,)."""
        pairs = zip(self._starts, self._sizes, strict=True)
        return mx.array([start + i for start, n in pairs for i in range(n)], mx.int32)

    @cached_property
    def _all_columns(self) -> mx.array:
        """(height, 1, longest, 1)."""
        return self.columns.reshape(self._height, 1, self.longest, 1)

    @property
    def _flat(self) -> list[int]:
        """Where each row stands in (height, longest), flat."""
        pairs = zip(self._seats, self._sizes, strict=True)
        return [seat * self.longest + i for seat, n in pairs for i in range(n)]

    @cached_property
    def _places(self) -> mx.array:
        return mx.array(self._flat)

    @cached_property
    def _sources(self) -> mx.array:
        """Of each place in (height, longest) the row that stands there; any where none does."""
        sources = [0] * (self._height * self.longest)
        for row, place in enumerate(self._flat):
            sources[place] = row
        return mx.array(sources)

    def spread(self, x: mx.array) -> mx.array:
        """Rows to (height, heads, longest, dim); gaps have rows of anybody."""
        if self.is_batch:
            return x if self._is_full else x[self._sources]
        if not self._is_full:
            x = x[:, :, self._sources]
        if self.longest == 1:
            return x.swapaxes(0, 2)
        _, heads, _, dim = x.shape
        return x.reshape(heads, self._height, self.longest, dim).swapaxes(0, 1)

    def gathered(self, x: mx.array) -> mx.array:
        """The inverse of `spread`."""
        if self.is_batch:
            return x if self._is_full else x[self._places]
        if self.longest == 1:
            x = x.swapaxes(0, 2)
        else:
            x = x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])
        return x if self._is_full else x[:, :, self._places]

    def mask(self, columns: int, window: int | None) -> mx.array:
        """(height, 1, longest, columns): what each row sees, of the last `window` rows if given."""
        key = columns, window
        if key not in self._masks:
            starts = [0] * self._height
            for seat, start in zip(self._seats, self._starts, strict=True):
                starts[seat] = start
            at = mx.array(starts)[:, None] + mx.arange(self.longest)
            at, column = at[:, None, :, None], mx.arange(columns)
            mask = column <= at
            self._masks[key] = mask if window is None else mask & (column > at - window)
        return self._masks[key]

    def attend(
        self, attention: Callable, queries: mx.array, arena: Arena, window: int | None
    ) -> mx.array:
        """One attention over all rows of the arena, for the queries of the table's lanes.

        attention: of queries, keys, values and a mask. window: see `mask`.
        """
        columns = seen_columns(self._end, arena.columns)
        keys, values = arena.keys[:, :, :columns], arena.values[:, :, :columns]
        mask = self.mask(columns, window)
        return self.gathered(attention(self.spread(queries), keys, values, None, mask=mask))


def seen_columns(end: int, columns: int) -> int:
    """How many of an arena's columns a product is made over, for rows that see the first `end`."""
    if mx.default_device() == mx.gpu:
        return min(-(-end // KEY_STEP) * KEY_STEP, columns)
    return end
