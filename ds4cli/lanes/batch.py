"""Equally many rows of every lane as a batch (lanes, rows): what mlx-lm's own batches are, over the
arenas and over recurrent states that stay stacked.

Most calls are such ones, and on a fast machine the host's part of them counts: nothing here runs
per lane and layer, and the model's modules run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from ds4cli.caches.arena import Arena, Place, SeatedKVCache, Seating, at, evaluate, of_lanes
from ds4cli.caches.build import nest
from ds4cli.caches.stack import Stack, stack_of
from ds4cli.hooks.cuda import seats
from ds4cli.lanes.call import Feed, LaneError, ids
from ds4cli.lanes.table import seen_columns


class Step:
    """What the layers of one call share. size: rows a lane. seats, positions: of each lane in the
    arena, and of its first row, (lanes,) int32; places: the positions of all rows
    (lanes, 1, size, 1), to index it with. end: columns that are seen."""

    def __init__(self, positions: list[int], size: int, arena: Arena):
        self.size = size
        self.seats, self.positions = mx.arange(len(positions)), mx.array(positions, mx.int32)
        self.places = self.positions.reshape(-1, 1, 1, 1)
        if size > 1:
            self.places = self.places + mx.arange(size)[:, None]
        self.end = seen_columns(max(positions) + size, arena.columns)
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None = None) -> mx.array:
        """(lanes, 1, size, end): what each row sees, of the last `window` rows if given."""
        if window not in self._masks:
            column = mx.arange(self.end)
            mask = column <= self.places
            self._masks[window] = mask if window is None else mask & (column > self.places - window)
        return self._masks[window]

    def window(self, mask: Any) -> int | None:
        """The window of a mask that this step made; LookupError for another one."""
        if mask is None:
            return None
        for window, known in self._masks.items():
            if known is mask:
                return window
        raise LookupError("a mask of somebody else")


class ArenaRows:
    """Stands for one layer's cache: its arena. What a model asks of it is what mlx-lm's batch
    caches answer.

    offset: the positions of the lanes' first rows. step: of the call that runs.
    """

    offset: mx.array
    step: Step

    def __init__(self, arena: Arena):
        self.arena = arena
        # Whether attention finds what it wants in the whole arena; None before it was asked.
        self._has_kernel: bool | None = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.step.mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        arena, places = self.arena, self.step.places
        arena.keys = keys = mx.put_along_axis(arena.keys, places, keys, axis=2)
        arena.values = values = mx.put_along_axis(arena.values, places, values, axis=2)
        if self._has_kernel and self.step.size == 1:
            return keys, values
        end = self.step.end
        return keys[:, :, :end], values[:, :, :end]

    def attend(self, queries: mx.array, scale: float, mask: Any) -> mx.array | None:
        """Attention by a kernel; None where there is none for it."""
        keys, values, step = self.arena.keys, self.arena.values, self.step
        if step.size > 1:
            return None
        if self._has_kernel is None:
            self._has_kernel = seats.fits(queries, keys, values)
        if not self._has_kernel:
            return None
        window = step.window(mask)
        return seats.attention(queries, keys, values, step.seats, step.positions, scale, window)


class Batch:
    """A model's calls on equally many tokens of each lane."""

    def __init__(self, model: Any, places: Sequence[Place], recurrent: Sequence[Place]):
        """places: of the caches that have an arena, in the order of the arenas; recurrent: of the
        others, whose states are stacked."""
        self._model = model
        self._places, self._recurrent = list(places), list(recurrent)
        self._arenas: list[Arena] = []
        self._rows: list[ArenaRows] = []
        self._stack: Stack | None = None
        self.states: list[Any] = []  # of all lanes, by their places
        self._caches: list[Any] = []  # what the model is given

    @classmethod
    def of(cls, model: Any, caches: list[Any], places: Sequence[Place]) -> Batch | None:
        """None where a cache is of a kind that no batch has. caches: of one lane."""
        others = [place for place in _places(caches) if place not in places]
        kinds = {type(at(caches, place)) for place in others}
        return cls(model, places, others) if kinds <= {ArraysCache} else None

    def ready(self, lanes: Sequence[list[Any]], seating: Seating) -> bool:
        """Whether a call can be made on the lanes whose caches these are, in the order of their
        seats; `states` are theirs then."""
        if self._places and not seating.is_full:
            return False
        if not self._caches or self._arenas is not seating.arenas:
            self._build(lanes[0], seating.arenas)
        return not self._recurrent or self._stand_on(lanes)

    def _build(self, like: list[Any], arenas: list[Arena]) -> None:
        """The stand-ins, nested like the caches of a lane."""
        self._arenas, self._rows = arenas, [ArenaRows(arena) for arena in arenas]
        self.states = [ArraysCache(len(at(like, place).cache)) for place in self._recurrent]
        made: dict[Place, Any] = dict(zip(self._places, self._rows, strict=True))
        made |= zip(self._recurrent, self.states, strict=True)
        self._caches = nest(like, [made[place] for place in _places(like)])

    def _stand_on(self, lanes: Sequence[list[Any]]) -> bool:
        """Take the states of the lanes: as the call before left them, if nobody looked since."""
        stack = self._stack
        if stack is None or not stack.has(of_lanes(lanes, self._recurrent[0])):
            own = [[at(caches, place) for place in self._recurrent] for caches in lanes]
            apart = [caches for caches in own if stack_of(caches) is None]
            if any(x is None for caches in apart for cache in caches for x in cache.cache):
                return False
            try:
                stack = self._stack = Stack(own)
            except ValueError:  # states of unlike shapes: token ids at the beginning of a text
                return False
        for cache, slots in zip(self.states, stack.layers, strict=True):
            cache.cache = [*slots]
        return True

    def call(self, feeds: Sequence[Feed], lanes: Sequence[list[Any]]) -> tuple[mx.array, Any]:
        """See `Lanes.call`: one call on equally many tokens of each lane."""
        last: list[SeatedKVCache] = of_lanes(lanes, self._places[-1]) if self._places else []
        shape = len(lanes), len(feeds[0])
        if last:
            self._begin([cache.at + cache.seat.moved for cache in last], shape[1])
        logits = self._model(ids(feeds).reshape(shape), cache=self._caches)
        if logits.shape[:2] != shape:
            raise LaneError("a batch has other rows than its lanes")
        layers = [cache.cache for cache in self.states]
        if self._stack is not None:
            self._stack.layers = layers
        for cache in last:
            cache.seat.moved += shape[1]
        return logits.reshape(-1, logits.shape[2]), layers

    def _begin(self, positions: list[int], size: int) -> None:
        end = max(positions) + size
        if end > min([arena.keys.shape[2] for arena in self._arenas]):
            for arena in self._arenas:
                arena.reserve(end)
            evaluate(self._arenas)
        step = Step(positions, size, self._arenas[0])
        for rows in self._rows:
            rows.offset, rows.step = step.positions, step


def _places(caches: Sequence[Any], above: Place = ()) -> Iterator[Place]:
    for i, cache in enumerate(caches):
        if type(cache) is CacheList:
            yield from _places(cache.caches, (*above, i))
        else:
            yield (*above, i)
