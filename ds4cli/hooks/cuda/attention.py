"""Attention of a few rows as two products and a softmax.

With the context growing, MLX's fused attention meets a new number of keys at every call, and on
CUDA it then makes a plan: tens of milliseconds for a block of a 7B model, whatever its size. Plain
products need none. Queries that share a head of keys become rows of one product, so nothing is
repeated; scale and mask are part of that product.

Products are chosen by their sizes too, and a graph of other kernels is made anew. So keys are taken
in whole steps of KEY_STEP where the cache's buffer has as many rows; what lies beyond the last key
is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from ds4cli.hooks.cuda import switch
from ds4cli.hooks.rebind import Swaps, calls, rebound

NAME = "scaled_dot_product_attention"
# Calls of so many rows take the products; one row has a kernel that needs no plan.
MIN_ROWS, MAX_ROWS = 2, 512
# Rows and keys that are both multiples of this come again, as in the chunks of every prompt: their
# plan is made once.
CHUNK = 256
# Scores of all heads at once: a quarter of a gigabyte in half precision, for the length of a layer.
MAX_SCORES = 2**27
# Keys a product is made for: a multiple of this. Rows of odd length have slower kernels, too.
KEY_STEP = 64
# Masks kept in the form that the product adds; a model with windows has two kinds of layers.
KEPT_MASKS = 2


def pays(rows: int, keys: int, heads: int) -> bool:
    """Whether a call of so many rows is faster as products. Measured on an H200, see README."""
    fits = MIN_ROWS <= rows <= MAX_ROWS and rows * keys * heads <= MAX_SCORES
    return fits and (rows % CHUNK != 0 or keys % CHUNK != 0)


def use(model: nn.Module) -> Swaps:
    """Let the attention modules of this model or head use products where that pays.

    Their classes are derived once, here. Replacing the function in its module instead would change
    every model of the process, and the stock model that checks are made against.
    """
    swaps = Swaps()
    if switch.is_on():
        for module in model.modules():
            own: type = type(module)
            if calls(own, NAME):
                swaps.swap(module, _switched(own))
    return swaps


@cache
def _switched(cls: type) -> type:
    return rebound(cls, {NAME: _by_rows})


def _by_rows(attention: Callable) -> Callable:
    """mlx-lm's attention; products for calls of a few rows on plain caches."""
    if attention is not base.scaled_dot_product_attention:  # a model file's own, of another form
        return attention
    biases = Biases()

    @wraps(attention)
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        _, heads, rows, _ = queries.shape
        plain = rows >= MIN_ROWS and not hasattr(cache, "bits")
        if plain and pays(rows, keys.shape[2], heads) and _alike(queries, keys, values):
            known, groups = keys.shape[2], keys.shape[1]
            keys, values = _in_steps(keys, values, cache, mask)
            sizes = Sizes(rows, known, keys.shape[2], groups, heads // groups)
            bias = biases.bias(mask, sizes, queries.dtype)
            return products(queries, keys, values, scale, bias, sinks)
        return attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


def _alike(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    return queries.dtype == keys.dtype == values.dtype


def _in_steps(
    keys: mx.array, values: mx.array, cache: Any, mask: mx.array | str | None
) -> tuple[mx.array, mx.array]:
    """The same rows and, where the buffer they lie in has them, more up to a multiple of KEY_STEP.

    A buffer is made of zeros, and what was cut off is numbers: nothing there spoils a product.
    """
    known = keys.shape[2]
    wanted = -(-known // KEY_STEP) * KEY_STEP
    if not isinstance(cache, KVCache) or cache.offset != known or _is_added(mask):
        return keys, values
    assert cache.keys is not None and cache.values is not None, "the call has written into them"
    if not known < wanted <= cache.keys.shape[2]:
        return keys, values
    return cache.keys[:, :, :wanted], cache.values[:, :, :wanted]


def products(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    bias: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """What `mx.fast.scaled_dot_product_attention` computes, (B, H, L, Dv).

    queries (B, H, L, D), keys (B, G, n, D), values (B, G, n, Dv). bias: see `Biases`. sinks (H,):
    logits of a key that everyone sees and nobody reads.
    """
    batch, heads, rows, dim = queries.shape
    groups = keys.shape[1]
    q = queries.reshape(batch, groups, heads // groups * rows, dim)
    if bias is None:
        scores = (q * scale) @ keys.swapaxes(-1, -2)
    else:
        scores = mx.addmm(bias, q, keys.swapaxes(-1, -2), alpha=scale)
    if sinks is None:
        weights = mx.softmax(scores, axis=-1, precise=True)
    else:
        weights = _beside_sinks(scores, sinks, heads // groups)
    return (weights @ values).reshape(batch, heads, rows, values.shape[-1])


def _beside_sinks(scores: mx.array, sinks: mx.array, repeats: int) -> mx.array:
    """The softmax over keys and sink, without the sink's column."""
    batch, groups, rows, _ = scores.shape
    column = sinks.astype(scores.dtype).reshape(1, groups, repeats, 1)
    shape = (batch, groups, repeats, rows // repeats)
    column = mx.broadcast_to(column, shape).reshape(batch, groups, rows, 1)
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


class Sizes(NamedTuple):
    """Of one call: rows, keys, columns of the product (keys and what is masked beyond them), heads
    of keys, and heads of queries for each of those."""

    rows: int
    keys: int
    columns: int
    groups: int
    repeats: int


class Biases:
    """Masks as arrays that a product adds; all layers of a call share one."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, tuple, mx.array]] = []  # mask, sizes and type, what it became

    def bias(self, mask: mx.array | str | None, sizes: Sizes, dtype: mx.Dtype) -> mx.array | None:
        """(B or 1, G or 1, repeats * rows, columns), or None where nothing is masked."""
        if mask is None and sizes.keys == sizes.columns:
            return None
        if _is_added(mask):  # made anew for each layer
            return _folded(mask.astype(dtype), sizes)
        for kept, key, bias in self._kept:
            same = kept is mask or (isinstance(kept, str) and isinstance(mask, str))
            if same and key == (sizes, dtype):
                return bias
        bias = _folded(_added(mask, sizes, dtype), sizes)
        self._kept = [(mask, (sizes, dtype), bias), *self._kept[: KEPT_MASKS - 1]]
        return bias


def _is_added(mask: mx.array | str | None) -> TypeGuard[mx.array]:
    return isinstance(mask, mx.array) and mask.dtype != mx.bool_


def _added(mask: mx.array | str | None, sizes: Sizes, dtype: mx.Dtype) -> mx.array:
    """0 where a row sees a key, a number far below every score elsewhere."""
    columns, beyond = mx.arange(sizes.columns), sizes.columns - sizes.keys
    if isinstance(mask, str):
        mask = mx.arange(sizes.keys - sizes.rows, sizes.keys)[:, None] >= columns[None]
    elif mask is None:
        mask = columns[None] < sizes.keys
    elif beyond:
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], sizes.keys))
        mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, beyond)])
    # Half of the least number: a score added to it does not overflow, so that a row that sees
    # nothing becomes an average, as with MLX's own mask, and not nan.
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min / 2, dtype))


def _folded(mask: mx.array, sizes: Sizes) -> mx.array:
    """A mask up to (B, H, L, n) for queries whose heads of one group are rows."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    batch, heads = mask.shape[:2]
    outer = sizes.groups if heads > 1 else 1
    mask = mask.reshape(batch, outer, heads // outer, *mask.shape[2:])
    shape = (batch, outer, sizes.repeats, sizes.rows, sizes.columns)
    mask = mx.broadcast_to(mask, shape)
    return mask.reshape(batch, outer, sizes.repeats * sizes.rows, sizes.columns)
