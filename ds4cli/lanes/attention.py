"""Attention modules of the plain kind, run once on the rows of all lanes.

Their projections, norms and rotations are functions of one row and its position; what differs from
lane to lane is in the cache, and in `scaled_dot_product_attention`. So the module runs as it is:
rotations are given a position for every row, and attention finds each lane's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature, unwrap
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from ds4cli.hooks.rebind import calls, derived, names_used, rebound
from ds4cli.lanes.call import LaneCache, LaneError, LaneOffset, LaneRows, LaneValue

NAME = "scaled_dot_product_attention"


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
        outputs = []
        for i, (a, b) in enumerate(cache.call.spans):
            own = mask.lanes[i] if isinstance(mask, LaneValue) else mask
            args = queries[:, :, a:b], keys.lanes[i], values.lanes[i], cache.lanes[i]
            outputs.append(attention(*args, scale=scale, mask=own, sinks=sinks))
        return mx.concatenate(outputs, axis=2)

    return scaled_dot_product_attention


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
        # (1, heads, N, dim): every row becomes an entry of a batch, with a position of its own.
        return inner(self, x.swapaxes(0, 2), offset.positions, *args, **kwargs).swapaxes(0, 2)

    return derived(cls, __call__)
