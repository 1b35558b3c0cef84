"""Attention modules of the plain kind, run once on the rows of all lanes.

Their projections, norms and rotations are functions of one row and its position; what differs from
lane to lane is in the cache, and in `scaled_dot_product_attention`. So the module runs as it is:
rotations are given a position for every row, and attention finds each lane's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from inspect import signature, unwrap
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from ds4cli.caches.arena import SeatedKVCache
from ds4cli.hooks.cuda import seats, switch
from ds4cli.hooks.rebind import calls, derived, names_used, rebound
from ds4cli.lanes.batch import ArenaRows
from ds4cli.lanes.call import (
    Call,
    LaneCache,
    LaneError,
    LaneMask,
    LaneOffset,
    LaneRows,
    LaneValue,
    SeatedRows,
    call_of,
)

NAME = "scaled_dot_product_attention"
# MLX's rotation on CUDA asks for a block of up to 128 threads along the batch where it turns fewer
# pairs than MIN_PAIRS, and no block may have more than 64; below so many groups of HEAD_GROUP heads
# it asks for 64.
MIN_PAIRS, MOST_GROUPS, HEAD_GROUP = 16, 127, 4


def is_plain(cls: type) -> bool:
    """Whether its cache, as far as names tell, gives keys for mlx-lm's attention and no more."""
    return calls(cls, NAME) and "update_and_fetch" in names_used(cls)


@cache
def joined(cls: type) -> type:
    """A subclass of such a module. Rows that are one a lane are a batch inside, so that nothing has
    to be turned round for rotation, arena and attention."""
    flat = rebound(cls, {NAME: _with_lanes})
    inner = flat.__call__

    def __call__(self, *args, **kwargs):
        if args and args[0].shape[0] > 1:  # a batch
            return inner(self, *args, **kwargs)
        call = call_of((*args, *kwargs.values()))
        if call is None or not call.is_batch:
            return inner(self, *args, **kwargs)
        own = [_as_batch(arg, call) for arg in args]
        output = inner(self, *own, **{k: _as_batch(arg, call) for k, arg in kwargs.items()})
        if isinstance(output, tuple):
            return tuple(_as_rows(x, call) for x in output)
        return _as_rows(output, call)

    return derived(flat, __call__)


def _as_batch(arg: Any, call: Call) -> Any:
    return arg.reshape(call.rows, 1, *arg.shape[2:]) if call.has_all_rows(arg) else arg


def _as_rows(x: Any, call: Call) -> Any:
    is_batch = isinstance(x, mx.array) and x.ndim > 2 and x.shape[:2] == (call.rows, 1)
    return x.reshape(1, call.rows, *x.shape[2:]) if is_batch else x


def _with_lanes(attention: Callable) -> Callable:
    if unwrap(attention) is not base.scaled_dot_product_attention:
        return attention  # a model file's own, of another form

    @wraps(attention)
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if type(cache) is ArenaRows:
            found = cache.attend(queries, scale, mask) if sinks is None else None
            if found is not None:
                return found
            mask = cache.step.mask() if mask is None else mask
            return attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        if not isinstance(keys, LaneRows):
            return attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        if not isinstance(cache, LaneCache) or isinstance(mask, mx.array):
            raise LaneError("attention over other keys, or another mask, than the cache's")
        attend = partial(attention, scale=scale, sinks=sinks)
        call, outputs, first = cache.call, [], 0
        if isinstance(keys, SeatedRows) and _sees_all_before(mask, keys):
            window = None if mask is None else mask.options.get("window_size")
            total, first = keys.table.total, keys.seated
            own = queries if total == call.rows else call.part(queries, 0, total)
            outputs = [_over_arena(attend, own, keys, window)]
        if first < len(cache.lanes):
            outputs += [
                attend(call.part(queries, a, b), k, v, own, mask=seen)
                for (a, b), k, v, own, seen in _by_lane(cache, keys, values, mask, first)
            ]
        return call.joined_parts(outputs)

    return scaled_dot_product_attention


def _over_arena(
    attend: partial, queries: mx.array, keys: SeatedRows, window: int | None
) -> mx.array:
    """Attention for the queries of the lanes that sit in an arena. attend: see `Table.attend`."""
    table, arena, options = keys.table, keys.arena, attend.keywords
    is_plain = table.is_batch and options["sinks"] is None
    if is_plain and seats.fits(queries, arena.keys, arena.values):
        places = table.rows, table.columns
        scale = options["scale"]
        return seats.attention(queries, arena.keys, arena.values, *places, scale, window)
    return table.attend(attend, queries, arena, window)


def _sees_all_before(mask: Any, keys: SeatedRows) -> bool:
    """Whether every row sees all, or the last few, of the rows up to itself."""
    if isinstance(mask, LaneMask):
        return isinstance(mask.caches[0], SeatedKVCache)
    return mask is None and keys.table.longest == 1


def _by_lane(
    cache: LaneCache, keys: LaneRows, values: LaneRows, mask: Any, first: int
) -> Iterator[tuple]:
    """For each lane from the `first` on: its rows, keys, values, cache and mask."""
    masks = mask.lanes if isinstance(mask, LaneValue) else [mask] * len(cache.lanes)
    lanes = (cache.call.spans, keys.lanes, values.lanes, cache.lanes, masks)
    return islice(zip(*lanes, strict=True), first, None)


def rotations(module: nn.Module) -> list[nn.Module]:
    """The modules inside `module` that are given positions."""
    inner: list[tuple[nn.Module, type]] = [(part, type(part)) for part in module.modules()]
    return [part for part, cls in inner if part is not module and _takes_offset(cls)]


@cache
def _takes_offset(cls: type) -> bool:
    return "offset" in signature(cls.__call__).parameters


@cache
def at_positions(cls: type) -> type:
    """A subclass of a rotation that takes a position for every row of all lanes."""
    inner = cls.__call__

    def __call__(self, x, offset=0, *args, **kwargs):
        if type(offset) is not LaneOffset:
            few = x.ndim != 4 or x.shape[0] * -(-x.shape[1] // HEAD_GROUP) <= MOST_GROUPS
            if few or type(offset) is not mx.array:
                return inner(self, x, offset, *args, **kwargs)
            return turned(self, x, offset, *args, **kwargs)
        call = offset.call
        if x.ndim != 4 or x.shape[0 if call.is_batch else 2] != call.rows:
            raise LaneError("a rotation of something else than rows")
        # Every row is an entry of a batch (N, heads, 1, dim), with a position of its own.
        x = x if call.is_batch else x.swapaxes(0, 2)
        x = turned(self, x, offset.positions, *args, **kwargs)
        return x if call.is_batch else x.swapaxes(0, 2)

    def turned(self, x, positions, *args, **kwargs):
        size = _entries(self, x)
        if size == len(x):
            return inner(self, x, positions, *args, **kwargs)
        parts = [slice(i, i + size) for i in range(0, len(x), size)]
        return mx.concatenate([inner(self, x[p], positions[p], *args, **kwargs) for p in parts])

    return derived(cls, __call__)


def _entries(rotation: Any, x: mx.array) -> int:
    """Rows of x (N, heads, 1, dim) that one rotation may turn."""
    rows, heads, _, dim = x.shape
    if not switch.is_backend() or getattr(rotation, "dims", dim) // 2 >= MIN_PAIRS:
        return rows
    return max(1, min(rows, MOST_GROUPS // -(-heads // HEAD_GROUP)))
