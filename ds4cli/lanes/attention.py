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
from ds4cli.hooks.rebind import calls, derived, names_used, rebound
from ds4cli.lanes.call import (
    LaneCache,
    LaneError,
    LaneMask,
    LaneOffset,
    LaneRows,
    LaneValue,
    SeatedRows,
)

NAME = "scaled_dot_product_attention"
# Heads times rows that are turned as a batch: on CUDA a grid of these has at most 65,535.
MOST_ENTRIES = 2**15


def is_plain(cls: type) -> bool:
    """Whether its cache, as far as names tell, gives keys for mlx-lm's attention and no more."""
    return calls(cls, NAME) and "update_and_fetch" in names_used(cls)


@cache
def joined(cls: type) -> type:
    return rebound(cls, {NAME: _with_lanes})


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
        if not isinstance(keys, LaneRows):
            return attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        if not isinstance(cache, LaneCache) or isinstance(mask, mx.array):
            raise LaneError("attention over other keys, or another mask, than the cache's")
        attend = partial(attention, scale=scale, sinks=sinks)
        outputs, first = [], 0
        if isinstance(keys, SeatedRows) and _sees_all_before(mask, keys):
            window = None if mask is None else mask.options.get("window_size")
            args = queries[:, :, : keys.table.total], keys.arena, window
            outputs, first = [keys.table.attend(attend, *args)], keys.seated
        if first < len(cache.lanes):
            outputs += [
                attend(queries[:, :, a:b], k, v, own, mask=seen)
                for (a, b), k, v, own, seen in _by_lane(cache, keys, values, mask, first)
            ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)

    return scaled_dot_product_attention


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
        if not isinstance(offset, LaneOffset):
            return inner(self, x, offset, *args, **kwargs)
        if x.ndim != 4 or x.shape[2] != offset.call.rows:
            raise LaneError("a rotation of something else than rows")
        if x.shape[1] * x.shape[2] > MOST_ENTRIES:
            pairs = zip(offset.call.spans, offset.lanes, strict=True)
            lanes = [inner(self, x[:, :, a:b], at, *args, **kwargs) for (a, b), at in pairs]
            return mx.concatenate(lanes, axis=2)
        # (1, heads, N, dim): every row becomes an entry of a batch, with a position of its own.
        return inner(self, x.swapaxes(0, 2), offset.positions, *args, **kwargs).swapaxes(0, 2)

    return derived(cls, __call__)
