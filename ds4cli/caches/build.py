"""From a model to caches that can go back, and from caches to their adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ds4cli.caches.adapter import LayerAdapter
from ds4cli.caches.plain import ConcatenateAdapter, KVAdapter, QuantizedAdapter
from ds4cli.caches.recurrent import RecurrentAdapter
from ds4cli.caches.sliding import ChunkedAdapter, SlackChunkedKVCache, SlidingKVCache, WindowAdapter
from ds4cli.errors import ModelError, UsageError
from ds4cli.settings import Settings

# Exact classes: a subclass may keep its rows in another way, and a wrong guess corrupts silently.
ADAPTERS: dict[type, type[LayerAdapter]] = {
    KVCache: KVAdapter,
    QuantizedKVCache: QuantizedAdapter,
    ConcatenateKVCache: ConcatenateAdapter,
    SlidingKVCache: WindowAdapter,
    SlackChunkedKVCache: ChunkedAdapter,
    ArraysCache: RecurrentAdapter,
}

try:
    from ds4cli.caches import compressed
except ImportError:  # mlx-lm 0.31 has no deepseek_v41
    compressed = None  # type: ignore[assignment]  # a module that may be absent
else:
    ADAPTERS[compressed.SlackLayerCache] = compressed.CompressedAdapter

# The window each model masks with is its cache's size, except here: plamo3 masks with one row
# more, which its stock ring forgets when decoding single tokens but not in a block.
WINDOW_EXTRA = {"plamo3": 1}


KV_BITS = (2, 4, 8)
KV_GROUP_SIZES = (32, 64, 128)
# Calls to try them with: a short one, and an odd one that is beyond the vector kernels.
TRIAL_ROWS = (2, 13)


class UnsupportedCache(ModelError):
    """A cache class that ds4cli cannot rewind exactly."""


def build_caches(
    model: Any,
    slack: int,
    kv_bits: int | None = None,
    kv_group_size: int = Settings.kv_group_size,
) -> list[Any]:
    """Caches for `model(x, cache=caches)`; windows and chunks keep `slack` positions more.

    `kv_bits` quantises the full-attention layers; UsageError where mlx-lm cannot.
    """
    caches = [_with_slack(model, i, c, slack) for i, c in enumerate(make_prompt_cache(model))]
    return caches if kv_bits is None else _quantized(caches, kv_bits, kv_group_size)


def _with_slack(model: Any, index: int, cache: Any, slack: int) -> Any:
    if type(cache) is CacheList:
        return CacheList(*[_with_slack(model, index, child, slack) for child in cache.caches])
    if type(cache) is RotatingKVCache and not cache.keep:
        extra = WINDOW_EXTRA.get(getattr(model, "model_type", ""), 0)
        return SlidingKVCache(cache.max_size + extra, slack)
    if type(cache) is ChunkedKVCache:
        return SlackChunkedKVCache(cache.chunk_size, slack)
    if compressed and type(cache) is compressed.LayerCache:
        return compressed.with_slack(model.layers[index], cache.window_size, slack)
    return cache


def _quantized(caches: list[Any], bits: int, group_size: int) -> list[Any]:
    if bits not in KV_BITS or group_size not in KV_GROUP_SIZES:
        raise UsageError(
            f"cannot quantise the KV cache to `{bits}` bits in groups of `{group_size}`",
            hint=f"bits: {KV_BITS}, group size: {KV_GROUP_SIZES}",
        )
    kinds = {type(cache) for cache in _flat(caches)}
    if KVCache not in kinds or kinds - {KVCache, ArraysCache}:
        names = ", ".join(sorted(kind.kind for kind in map(ADAPTERS.get, kinds) if kind))
        raise UsageError(
            f"`kv_bits` needs layers with a plain KV cache, this model has: {names}",
            hint="leave `kv_bits` out; mlx-lm quantises no windows, chunks or compressed rows",
        )

    def swap(cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*map(swap, cache.caches))
        return QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache

    return [swap(cache) for cache in caches]


def check_kv_group(config: dict[str, Any], kv_group_size: int) -> None:
    """What config.json alone shows: UsageError where a head is no whole number of groups.

    Only where it states `head_dim`: its absence means another size in every other family.
    """
    head_dim = (config.get("text_config") or config).get("head_dim") or 0
    if head_dim % kv_group_size:
        raise UsageError(
            f"`kv_group_size` is `{kv_group_size}`, the heads of this model are {head_dim} wide",
            hint="give one that divides it, or leave `kv_bits` out",
        )


def check_kv_bits(model: Any, kv_bits: int, kv_group_size: int) -> None:
    """Run some tokens through quantised caches; UsageError with the reason where that fails.

    Head sizes that no group divides, latent attention and attention sinks only show in a call, and
    numbers of rows that a backend has no kernel for only in one of such a length.
    """
    caches = build_caches(model, 0, kv_bits, kv_group_size)
    try:
        for rows in TRIAL_ROWS:
            mx.eval(model(mx.zeros((1, rows), mx.int32), cache=caches))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"this model does not run with a KV cache of `{kv_bits}` bits: {error}",
            hint="leave `kv_bits` out, or try another `kv_group_size`",
        ) from error


def adapt(model_caches: list[Any]) -> list[LayerAdapter]:
    """One adapter per cache, `CacheList`s flattened in order."""
    return [_adapter(cache) for cache in _flat(model_caches)]


def nest(model_caches: list[Any], caches: Iterable[Any]) -> list[Any]:
    """`caches`, one after the other, in the shape of `model_caches`: what a model is handed."""
    leaves = iter(caches)
    return [_shaped(cache, leaves) for cache in model_caches]


def _shaped(cache: Any, leaves: Iterator[Any]) -> Any:
    if type(cache) is CacheList:
        return CacheList(*[_shaped(child, leaves) for child in cache.caches])
    return next(leaves)


def _flat(caches: Any) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _flat(cache.caches)
        else:
            yield cache


def _adapter(cache: Any) -> LayerAdapter:
    kind = ADAPTERS.get(type(cache))
    if kind is None:
        raise UnsupportedCache(
            f"cannot rewind the cache class `{type(cache).__name__}`",
            hint="use a model of another family; `ds4cli` knows every single-sequence cache of "
            "mlx-lm 0.32",
        )
    return kind(cache)
