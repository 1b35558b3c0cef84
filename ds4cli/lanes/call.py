"""One model call on several lanes: the rows of all of them, one after the other, as (1, N).

Weights see all rows at once. Above the modules that use a cache, the model is given stand-ins: a
`LaneCache` for each cache, and for what it answers (a mask, an offset, keys) a `LaneValue`, one
value a lane. They can be handed on and nothing else: any other use is an error, which `arm` finds
before the first real call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList

from ds4cli.caches.arena import SeatedKVCache
from ds4cli.lanes.stacks import Stacks
from ds4cli.lanes.table import Table

Feed = Sequence[int] | mx.array


class Split(list[mx.array]):
    """What each of several lanes has of something, its rows or tokens."""

    def __init__(self, each: Iterable[mx.array], whole: mx.array | None = None):
        """whole: what they are parts of, one after the other, if that is at hand: on a GPU it takes
        an operation a lane to make it."""
        super().__init__(each)
        self._whole = whole

    @property
    def whole(self) -> mx.array:
        """Those of all, one after the other."""
        return mx.concatenate(self) if self._whole is None else self._whole


class LaneError(TypeError):
    """The model does with a stand-in what has no one answer for all lanes."""


class Call:
    """The rows of one call, and what its stand-ins share.

    sizes: rows a lane. stacks: states of the call before. is_batch: whether each has one, so that
    attention is given them as a batch. spans: (first, end) a lane, among the rows of all. joined:
    what kind of cache took the rows of all lanes at once, by its place. settled: arrays of which
    all lanes' at a place are views.
    """

    def __init__(self, sizes: Sequence[int], stacks: Stacks):
        self.sizes = tuple(sizes)
        self.stacks = stacks
        self.rows = sum(sizes)
        self.is_batch = self.rows == len(sizes)
        self.spans = list(pairwise(accumulate(sizes, initial=0)))
        self.joined: dict[tuple[int, ...], type] = {}
        self.settled: dict[tuple[int, ...], list[mx.array]] = {}
        self._offsets: dict[tuple[int, ...], LaneOffset] = {}

    def close(self) -> None:
        """The model has run: no circle is left that would keep what the call made of the states."""
        self._offsets.clear()

    @cached_property
    def by_size(self) -> dict[int, list[int]]:
        """The lanes with equally many rows."""
        found: dict[int, list[int]] = {}
        for lane, size in enumerate(self.sizes):
            found.setdefault(size, []).append(lane)
        return found

    def has_all_rows(self, x: Any) -> bool:
        """Whether `x` has the rows of all lanes on axis 1: hidden states, or token ids."""
        if not isinstance(x, mx.array) or x.ndim < 2 or x.shape[:2] != (1, self.rows):
            return False
        return x.ndim > 2 or not mx.issubdtype(x.dtype, mx.floating)

    def part(self, x: mx.array, first: int, end: int) -> mx.array:
        """These rows of keys or the like: (1, heads, rows, dim), or (rows, heads, 1, dim) in a
        batch."""
        return x[first:end] if self.is_batch else x[:, :, first:end]

    def joined_parts(self, parts: list[mx.array]) -> mx.array:
        """The inverse of `part`."""
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, 0 if self.is_batch else 2)

    def offset(self, starts: tuple[int, ...]) -> LaneOffset:
        """One stand-in for all layers that stand at the same positions."""
        if starts not in self._offsets:
            self._offsets[starts] = LaneOffset(starts, self)
        return self._offsets[starts]


class LaneValue:
    """One value a lane."""

    lanes: Sequence[Any]

    def __init__(self, lanes: Iterable[Any], call: Call):
        self.lanes = list(lanes)
        self.call = call

    def __bool__(self) -> bool:
        raise LaneError("a value of several lanes was asked whether it is true")


class LaneOffset(LaneValue):
    """Positions of the lanes' first rows."""

    @cached_property
    def positions(self) -> mx.array:
        """The position of every row (N,)."""
        pairs = zip(self.lanes, self.call.sizes, strict=True)
        return mx.array([start + i for start, n in pairs for i in range(n)], mx.int32)

    def table(self, seated: Sequence[SeatedKVCache]) -> Table:
        """Where the rows of the first lanes, whose caches in one layer these are, stand."""
        n, call = len(seated), self.call
        if n not in self._tables:
            seats, height = [cache.seat.row for cache in seated], seated[0].arena.rows
            self._tables[n] = Table(call.sizes[:n], self.lanes[:n], seats, height, call.is_batch)
        return self._tables[n]

    @cached_property
    def _tables(self) -> dict[int, Table]:
        return {}


class LaneRows(LaneValue):
    """Keys or values (1, heads, rows, dim) a lane, on their way from a cache to attention."""


class SeatedRows(LaneRows):
    """The same where the first `seated` lanes sit in an arena.

    side: 0 for keys, 1 for values. others: those of the other lanes.
    """

    def __init__(
        self,
        side: int,
        caches: Sequence[SeatedKVCache],
        others: list[mx.array],
        call: Call,
        table: Table,
    ):
        self.call, self.table = call, table
        self.arena, self.seated = caches[0].arena, len(caches)
        self._side, self._caches, self._others = side, caches, others

    @property
    def lanes(self) -> list[mx.array]:  # type: ignore[override]  # views, where they are wanted
        return [c.keys_and_values()[self._side] for c in self._caches] + self._others


class LaneMask(LaneValue):
    """Attention masks, made when they are looked at: the layers of a call share one stand-in.

    options: what the model asked for.
    """

    def __init__(self, caches: Sequence[Any], call: Call, options: dict[str, Any]):
        self.call, self.options = call, options
        self.caches = caches

    @cached_property
    def lanes(self) -> list[Any]:  # type: ignore[override]  # made late
        pairs = zip(self.caches, self.call.sizes, strict=True)
        return [_mask(cache, n, self.options) for cache, n in pairs]


class _Hidden:
    """All that mlx-lm's masks ask of hidden states."""

    def __init__(self, rows: int):
        self.shape = (1, rows)


def _mask(cache: Any, rows: int, options: dict[str, Any]) -> Any:
    if isinstance(cache, ArraysCache):
        return cache.make_mask(rows)
    return base.create_attention_mask(_Hidden(rows), cache, **options)


class LaneCache:
    """Stands for one layer's cache: `lanes` has the caches, one a lane.

    place: which of the model's caches it is; one number more for each `CacheList` it is in.
    """

    def __init__(self, lanes: Sequence[Any], call: Call, place: tuple[int, ...]):
        self.lanes = lanes
        self.call = call
        self.place = place
        self._offset: LaneOffset | None = None  # until rows are added

    def __getitem__(self, index: int) -> LaneCache:
        if not isinstance(self.lanes[0], CacheList):
            raise LaneError(f"a slot of `{type(self.lanes[0]).__name__}` is used outside a mixer")
        inner = [cache[index] for cache in self.lanes]
        return LaneCache(inner, self.call, (*self.place, index))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.lanes[0], name):
            raise AttributeError(name)
        raise LaneError(f"`{type(self.lanes[0]).__name__}.{name}` is used outside a mixer")

    @property
    def offset(self) -> LaneOffset:
        if self._offset is None:
            self._offset = self.call.offset(tuple([cache.offset for cache in self.lanes]))
        return self._offset

    def make_mask(self, N: int, *args: Any, **options: Any) -> LaneMask | None:
        if self.call.rows != N or args:
            raise LaneError(f"a mask of {N} rows in a call of {self.call.rows}")
        mask = LaneMask(self.lanes, self.call, options)
        if isinstance(self.lanes[0], ArraysCache) and all(m is None for m in mask.lanes):
            return None
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[LaneRows, LaneRows]:
        """Rows of all lanes, see `Call.part`, each to its own cache."""
        call, seated = self.call, _seated(self.lanes)
        call.joined[self.place] = type(self.lanes[-1])
        starts, self._offset = self.offset, None
        if seated:
            table = starts.table(seated)
            own = keys, values
            if table.total < call.rows:
                own = call.part(keys, 0, table.total), call.part(values, 0, table.total)
            table.write(seated, *own)
        sides: tuple[list[mx.array], list[mx.array]] = [], []
        for i in range(len(seated), len(self.lanes)):
            first, end = call.spans[i]
            rows = call.part(keys, first, end), call.part(values, first, end)
            for side, found in zip(sides, self.lanes[i].update_and_fetch(*rows), strict=True):
                side.append(found)
        if not seated:
            return LaneRows(sides[0], call), LaneRows(sides[1], call)
        both = [SeatedRows(i, seated, side, call, table) for i, side in enumerate(sides)]
        return both[0], both[1]

    def live(self) -> Any:
        """A tree of all that the call left in the caches, for `mx.eval`. Rows in an arena are
        computed for attention anyway, and whoever keeps the tree is to keep nobody's seat."""
        if self.place in self.call.settled:
            return self.call.settled[self.place]
        if isinstance(self.lanes[0], CacheList):
            return [self[i].live() for i in range(len(self.lanes[0].caches))]
        return [vars(own) for own in self.lanes if not isinstance(own, SeatedKVCache)]

    def keys_and_values(self) -> tuple[LaneRows, LaneRows]:
        found = [cache.keys_and_values() for cache in self.lanes]
        return LaneRows([k for k, _ in found], self.call), LaneRows(
            [v for _, v in found], self.call
        )


def _seated(lanes: Sequence[Any]) -> Sequence[SeatedKVCache]:
    """The caches in an arena: they come first."""
    n = len(lanes)
    while n and not isinstance(lanes[n - 1], SeatedKVCache):
        n -= 1
    return lanes if n == len(lanes) else lanes[:n]


def ids(feeds: Sequence[Feed]) -> mx.array:
    """The tokens of all lanes (N,) int32."""
    if isinstance(feeds, Split):
        return feeds.whole
    if not any(isinstance(feed, mx.array) for feed in feeds):
        return mx.array([*chain(*feeds)], mx.int32)
    known = [feed if isinstance(feed, mx.array) else mx.array([*feed], mx.int32) for feed in feeds]
    joined = mx.concatenate(known).astype(mx.int32)
    mx.async_eval(joined)  # the call's own form is not to depend on which lanes they are
    return joined


def call_of(args: Iterable[Any]) -> Call | None:
    """The call that the stand-ins among `args` belong to; None without any."""
    for arg in args:
        if isinstance(arg, (LaneCache, LaneValue)):
            return arg.call
        if isinstance(arg, (tuple, list)):
            call = call_of(arg)
            if call is not None:
                return call
    return None
