"""Attention of a few rows as two products and a softmax.

With the context growing, MLX's fused attention meets a new number of keys at every call, and on
CUDA it then makes a plan: tens of milliseconds for a block of a 7B model, whatever its size. Plain
products need none. Queries that share a head of keys become rows of one product, so nothing is
repeated; scale and mask are part of that product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from ds4cli.hooks import cuda
from ds4cli.hooks.rebind import Swaps, calls, rebound

NAME = "scaled_dot_product_attention"
# Calls of so many rows take the products. One row has a kernel that needs no plan; calls of a whole
# chunk of a prompt have sizes that come again.
MIN_ROWS, MAX_ROWS = 2, 256
# Scores of all heads at once: a quarter of a gigabyte in half precision, for the length of a layer.
MAX_SCORES = 2**27
# Masks kept in the form that the product adds; a model with windows has two kinds of layers.
KEPT_MASKS = 2


def pays(rows: int, keys: int, heads: int) -> bool:
    """Whether a call of so many rows is faster as products. Measured on an H200, see README."""
    return MIN_ROWS <= rows <= MAX_ROWS and rows * keys * heads <= MAX_SCORES


def use(model: nn.Module) -> Swaps:
    """Let the attention modules of this model or head use products where that pays.

    Their classes are derived once, here. Replacing the function in its module instead would change
    every model of the process, and the stock model that checks are made against.
    """
    swaps = Swaps()
    if cuda.is_on():
        for module in model.modules():
            if calls(type(module), NAME):
                swaps.swap(module, _switched(type(module)))
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
            return products(queries, keys, values, scale, mask, sinks, biases)
        return attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


def _alike(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    return queries.dtype == keys.dtype == values.dtype


def products(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    biases: Biases,
) -> mx.array:
    """What `mx.fast.scaled_dot_product_attention` computes, (B, H, L, Dv).

    queries (B, H, L, D), keys (B, G, n, D), values (B, G, n, Dv). mask: "causal", booleans or what
    is added, up to (B, H, L, n). sinks (H,): logits of a key that everyone sees and nobody reads.
    """
    batch, heads, rows, dim = queries.shape
    groups = keys.shape[1]
    repeats = heads // groups
    q = queries.reshape(batch, groups, repeats * rows, dim)
    bias = biases.bias(mask, rows, keys.shape[2], groups, repeats, q.dtype)
    if bias is None:
        scores = (q * scale) @ keys.swapaxes(-1, -2)
    else:
        scores = mx.addmm(bias, q, keys.swapaxes(-1, -2), alpha=scale)
    if sinks is None:
        weights = mx.softmax(scores, axis=-1, precise=True)
    else:
        weights = _beside_sinks(scores, sinks, repeats)
    return (weights @ values).reshape(batch, heads, rows, values.shape[-1])


def _beside_sinks(scores: mx.array, sinks: mx.array, repeats: int) -> mx.array:
    """The softmax over keys and sink, without the sink's column."""
    batch, groups, rows, _ = scores.shape
    column = sinks.astype(scores.dtype).reshape(1, groups, repeats, 1)
    shape = (batch, groups, repeats, rows // repeats)
    column = mx.broadcast_to(column, shape).reshape(batch, groups, rows, 1)
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


class Biases:
    """Masks as arrays that a product adds; all layers of a call share one."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, tuple, mx.array]] = []  # mask, sizes, what it became

    def bias(
        self,
        mask: mx.array | str | None,
        rows: int,
        keys: int,
        groups: int,
        repeats: int,
        dtype: mx.Dtype,
    ) -> mx.array | None:
        """(B or 1, G or 1, repeats * rows, keys), or None where nothing is masked."""
        if mask is None:
            return None
        sizes = rows, keys, groups, repeats, dtype
        if not isinstance(mask, str) and mask.dtype != mx.bool_:  # made anew for each layer
            return _folded(mask.astype(dtype), *sizes[:4])
        for kept, kept_sizes, bias in self._kept:
            same = kept is mask or (isinstance(kept, str) and isinstance(mask, str))
            if same and kept_sizes == sizes:
                return bias
        bias = _folded(_added(mask, rows, keys, dtype), *sizes[:4])
        self._kept = [(mask, sizes, bias), *self._kept[: KEPT_MASKS - 1]]
        return bias


def _added(mask: mx.array | str, rows: int, keys: int, dtype: mx.Dtype) -> mx.array:
    """0 where a row sees a key, a number far below every score elsewhere."""
    if isinstance(mask, str):
        mask = mx.arange(keys - rows, keys)[:, None] >= mx.arange(keys)[None]
    # Half of the least number: a score added to it does not overflow, so that a row that sees
    # nothing becomes an average, as with MLX's own mask, and not nan.
    return mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min / 2, dtype))


def _folded(mask: mx.array, rows: int, keys: int, groups: int, repeats: int) -> mx.array:
    """A mask up to (B, H, L, n) for queries whose heads of one group are rows."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    batch, heads = mask.shape[:2]
    outer = groups if heads > 1 else 1
    inner = heads // outer
    mask = mask.reshape(batch, outer, inner, *mask.shape[2:])
    mask = mx.broadcast_to(mask, (batch, outer, repeats, rows, keys))
    return mask.reshape(batch, outer, repeats * rows, keys)
