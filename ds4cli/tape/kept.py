"""Which rows each lane of a batch keeps."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class UnlikeSlots(ValueError):
    """Lanes that keep unlike numbers of rows have slots of unlike lengths then."""


class Kept:
    """How many of its first rows each lane of a batch keeps, for the tracks that are replayed to
    there. They are numbers in arrays, so that the graph of a replay is the same for all of them;
    what several layers need is made once.

    rows: of each lane, 1 .. total. total: the rows of the batch. counts: `rows`, int32 (lanes,).
    """

    def __init__(self, rows: Sequence[int], total: int):
        self.rows, self.total = tuple(rows), total
        self.counts = mx.array(self.rows, mx.int32)
        self._masks: dict[tuple[int, int], mx.array] = {}
        self._places: dict[tuple[int, ...], mx.array] = {}

    def mask(self, layers: int = 1, ndim: int = 2) -> mx.array:
        """True where a row is kept, (layers * lanes, total), and 1 in all further dimensions."""
        if (layers, ndim) not in self._masks:
            mask = mx.arange(self.total) < self.counts[:, None]
            mask = mx.concatenate([mask] * layers)
            self._masks[layers, ndim] = mask.reshape(*mask.shape, *[1] * (ndim - 2))
        return self._masks[layers, ndim]

    def only(self, x: mx.array, other: float = 0) -> mx.array:
        """The rows x (layers * lanes, total, ...) that are kept, and `other` in the place of those
        that are not, which may be no numbers."""
        return mx.where(self.mask(x.shape[0] // len(self.rows), x.ndim), x, other)

    def last(self, x: mx.array, n: int) -> mx.array:
        """The last `n` rows that each lane keeps, (lanes, n, ...), of x (lanes, more + total, ...).

        What stands in front of its rows counts as kept; there must be enough of it.
        """
        more, shape = x.shape[1] - self.total, (x.shape[0], n, *x.shape[2:])
        key = (more, *shape)
        if key not in self._places:
            places = self.counts[:, None] + mx.arange(more - n, more)
            places = places.reshape(*places.shape, *[1] * (x.ndim - 2))
            self._places[key] = mx.broadcast_to(places, shape)
        return mx.take_along_axis(x, self._places[key], axis=1)
