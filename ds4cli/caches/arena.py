"""Keys and values of several lanes in one array a layer, so that one attention serves them all.

A lane has a *seat*: a row of every layer's arena. Its caches stay its own, `KVCache` in all that
they can do; only their rows lie in the arena. So a lane goes back, is forked or saved, and runs
alone as before, and leaves without a word: a seat that nobody holds any more is free.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

# Columns are added in steps of so many.
STEP = KVCache.step
# Which of a model's caches: its number, and one number more for each `CacheList` that it is in.
Place = tuple[int, ...]


class Seat:
    """The place of one lane in all arenas. row: of each; it may change while no call runs. moved:
    rows that calls for all lanes wrote, to all layers at once. cursors: another object whenever one
    layer's cursor is set by itself."""

    def __init__(self, row: int):
        self.row = row
        self.moved = 0
        self.cursors = object()


class Arena:
    """One layer's keys and values: (rows, heads, columns, dim), a row a lane."""

    def __init__(self, like: KVCache, rows: int):
        keys, values = like.keys, like.values
        assert keys is not None and values is not None, "a lane that has read nothing takes no seat"
        self.keys = mx.zeros((rows, keys.shape[1], STEP, keys.shape[3]), keys.dtype)
        self.values = mx.zeros((rows, values.shape[1], STEP, values.shape[3]), values.dtype)

    @property
    def rows(self) -> int:
        return self.keys.shape[0]

    @property
    def columns(self) -> int:
        return self.keys.shape[2]

    def reserve(self, columns: int) -> None:
        """Room for so many positions in every row."""
        if columns > self.columns:
            more = -(-(columns - self.columns) // STEP) * STEP
            self.keys, self.values = _padded(self.keys, more), _padded(self.values, more)

    def add(self, rows: int) -> None:
        """So many empty rows more."""
        self.keys, self.values = (
            mx.concatenate([x, mx.zeros((rows, *x.shape[1:]), x.dtype)])
            for x in (self.keys, self.values)
        )

    def keep(self, rows: Sequence[int]) -> None:
        """These rows, in this order, and no others."""
        index = mx.array([*rows])
        self.keys, self.values = self.keys[index], self.values[index]

    def adopt(self, cache: KVCache, seat: Seat) -> None:
        """Take the rows of `cache` over. It is a `SeatedKVCache` from now on."""
        self.reserve(cache.offset)
        assert cache.keys is not None and cache.values is not None
        for whole, own in ((self.keys, cache.keys), (self.values, cache.values)):
            rows = own[..., : cache.offset, :]
            # What somebody else left behind must not be there: 0 times not a number is none.
            whole[seat.row : seat.row + 1] = _padded(rows, self.columns - cache.offset)
        # In this order, so that it is one thing or the other wherever it is interrupted.
        vars(cache).update(arena=self, seat=seat, at=cache.offset - seat.moved)
        cache.__class__ = SeatedKVCache
        del vars(cache)["keys"], vars(cache)["values"], vars(cache)["offset"]

    def write(self, rows: mx.array, columns: mx.array, keys: mx.array, values: mx.array) -> None:
        """Rows (N, heads, dim), each to its place: rows, columns (N,)."""
        self.keys[rows, :, columns] = keys
        self.values[rows, :, columns] = values

    def write_all(self, columns: mx.array, keys: mx.array, values: mx.array) -> None:
        """The same for equally many rows in every row of the arena, (rows, heads, n, dim), to
        columns (rows, 1, n, 1). An index is dear: it makes a dozen nodes of the graph."""
        self.keys = mx.put_along_axis(self.keys, columns, keys, axis=2)
        self.values = mx.put_along_axis(self.values, columns, values, axis=2)


class SeatedKVCache(KVCache):
    """A `KVCache` whose rows lie in an arena. at: its cursor, but for what moves the whole seat."""

    arena: Arena
    seat: Seat
    at: int

    @property
    def offset(self) -> int:
        return self.at + self.seat.moved

    @offset.setter
    def offset(self, pos: int) -> None:
        self.at, self.seat.cursors = pos - self.seat.moved, object()

    @property
    def keys(self) -> mx.array:  # type: ignore[override]  # an attribute there
        return self.arena.keys[self.seat.row : self.seat.row + 1]

    @property
    def values(self) -> mx.array:  # type: ignore[override]  # an attribute there
        return self.arena.values[self.seat.row : self.seat.row + 1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What the lane does alone."""
        first, self.offset = self.offset, self.offset + keys.shape[2]
        self.arena.reserve(self.offset)
        row, columns = slice(self.seat.row, self.seat.row + 1), slice(first, self.offset)
        self.arena.keys[row, :, columns] = keys
        self.arena.values[row, :, columns] = values
        return self.keys_and_values()

    def __copy__(self) -> KVCache:
        """A fork's: it shares nothing, as a view of the arena would make its next write a copy."""
        twin = KVCache()
        vars(twin).update(self._own_rows())
        return twin

    def leave(self) -> None:
        """Be a `KVCache` on rows of its own again."""
        vars(self).update(self._own_rows())
        self.__class__ = KVCache  # type: ignore[assignment]  # what it was before
        del self.arena, self.seat, self.at

    def _own_rows(self) -> dict[str, Any]:
        keys, values = (mx.contiguous(x) for x in self.keys_and_values())
        mx.async_eval(keys, values)
        return {"keys": keys, "values": values, "offset": self.offset}


def evaluate(arenas: Sequence[Arena]) -> None:
    """Start what was done to them, apart from the call that follows, whose form is not to depend on
    it: CUDA makes a plan for each form."""
    mx.async_eval([(arena.keys, arena.values) for arena in arenas])


def held(cache: Any) -> dict[str, Any]:
    """What `put_back` needs of a layer's cache: where the rows of one in an arena lie is no part
    of it."""
    return {"at": cache.at} if isinstance(cache, SeatedKVCache) else {**vars(cache)}


def put_back(cache: Any, was: dict[str, Any], moved: int) -> None:
    """`cache` stands where it stood when it was `held`, wherever its rows lie now. moved: of its
    seat then."""
    if "at" in was:
        cache.offset = was["at"] + moved
    elif isinstance(cache, SeatedKVCache):
        cache.offset = was["offset"]
    else:
        vars(cache).update(was)


class Seating:
    """Which lane sits where in the arenas of a model.

    places: which of a lane's caches have an arena. arenas: in that order; another list where they
    are others. is_full: whether the lanes of the last call have all rows, in order.
    """

    def __init__(self, places: Sequence[Place]):
        self._places = list(places)
        self.arenas: list[Arena] = []
        self.is_full = False
        self._most = 0  # positions that a lane may have to keep its seat, as last found
        self._seats: list[weakref.ref[Seat] | None] = []  # by row; None: not taken yet

    def seat(self, lanes: Sequence[list[Any]]) -> list[int]:
        """Give a seat to every lane whose length makes it pay; lanes: the caches of each. Returns
        their numbers in the order of their rows, those without a seat last."""
        if not self._places:
            return list(range(len(lanes)))
        last = of_lanes(lanes, self._places[-1])
        if self._sit(last):
            return list(range(len(lanes)))
        pairs = list(zip(lanes, last, strict=True))
        short, long = _lengths(sorted(cache.offset for cache in last))
        self._most = long
        for caches, cache in pairs:
            if self._sits(cache) and cache.offset > long:
                for layer in self._layers(caches):
                    layer.leave()
        new = [own for own, c in pairs if not self._sits(c) and 0 < c.offset <= short]
        self._tidy(len(new))
        self._admit(new)
        evaluate(self.arenas)
        rows = [c.seat.row if self._sits(c) else len(self._seats) for c in last]
        order = sorted(range(len(lanes)), key=rows.__getitem__)
        self.is_full = [rows[i] for i in order] == [*range(len(self._seats))]
        return order

    def _sit(self, last: Sequence[Any]) -> bool:
        """Whether the lanes whose last caches these are have all rows, in order, as in the call
        before: most often, so nothing is called for a lane."""
        if not self.is_full or len(last) != len(self._seats):
            return False
        for row, cache in enumerate(last):
            if type(cache) is not SeatedKVCache or cache.arena is not self.arenas[-1]:
                return False
            if cache.seat.row != row or cache.at + cache.seat.moved > self._most:
                return False
        return True

    def unseat(self, caches: list[Any]) -> None:
        """Take a lane's rows out of the arenas: what stands behind them stays there, in a row that
        is cleared for whoever has it next, the same lane or another."""
        for layer in self._layers(caches):
            if isinstance(layer, SeatedKVCache):
                layer.leave()

    def _sits(self, cache: KVCache) -> bool:
        """Whether a lane sits here: its layers are seated in order, and `cache` is of the last."""
        here = self.arenas[-1] if self.arenas else None
        return isinstance(cache, SeatedKVCache) and cache.arena is here

    def _held(self) -> list[Seat | None]:
        """The seat of each row, if somebody has it."""
        return [None if ref is None else ref() for ref in self._seats]

    def _layers(self, caches: list[Any]) -> list[Any]:
        return [at(caches, place) for place in self._places]

    def _tidy(self, new: int) -> None:
        """Let rows go that nobody has: attention runs over all rows, and only where each is one of
        a lane of the call it is a batch. Who takes a place that got free does so before the call.
        """
        seats = [seat for seat in self._held() if seat is not None]
        if len(self._seats) <= len(seats) + new:
            return
        if not seats:
            self.arenas, self._seats = [], []
            return
        for arena in self.arenas:
            arena.keep([seat.row for seat in seats])
        self._seats = [weakref.ref(seat) for seat in seats]
        for row, seat in enumerate(seats):
            seat.row = row

    def _admit(self, lanes: Sequence[list[Any]]) -> None:
        """Give each a row that is free, or a new one."""
        if not lanes:
            return
        free = [row for row, seat in enumerate(self._held()) if seat is None]
        missing = max(0, len(lanes) - len(free))
        if not self.arenas:
            self.arenas = [Arena(layer, missing) for layer in self._layers(lanes[0])]
        elif missing:
            for arena in self.arenas:
                arena.add(missing)
        free += range(len(self._seats), len(self._seats) + missing)
        self._seats += [None] * missing
        for caches, row in zip(lanes, free, strict=False):
            seat = Seat(row)
            self._seats[row] = weakref.ref(seat)
            for arena, layer in zip(self.arenas, self._layers(caches), strict=True):
                if isinstance(layer, SeatedKVCache):  # elsewhere, or half, when interrupted
                    layer.leave()
                arena.adopt(layer, seat)


def _lengths(lengths: Sequence[int]) -> tuple[int, int]:
    """Positions that a lane may have to be given a seat, and to keep it: every row of an arena is
    as long as the longest."""
    usual = lengths[len(lengths) // 2]
    return 4 * usual + 4 * STEP, 8 * usual + 8 * STEP


def of_lanes(lanes: Sequence[list[Any]], place: Place) -> list[Any]:
    """The cache at a place of each lane."""
    first, *inside = place
    found = [caches[first] for caches in lanes]
    for index in inside:
        found = [cache[index] for cache in found]
    return found


def at(caches: Any, place: Place) -> Any:
    """The cache at a place of what the model is given."""
    for index in place:
        caches = caches[index]
    return caches


def _padded(x: mx.array, columns: int) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (0, columns), (0, 0)]) if columns else x
