"""From a model to caches that can go back, and from caches to their adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from ds4cli.caches.sliding import (
    ChunkedAdapter,
    SlackChunkedKVCache,
    SlidingKVCache,
    WindowAdapter,
)
from ds4cli.errors import ModelError

# Exact classes: a subclass may keep its rows in another way, and a wrong guess corrupts silently.
ADAPTERS: dict[type, type[LayerAdapter]] = {
    KVCache: KVAdapter,
    QuantizedKVCache: QuantizedAdapter,
    ConcatenateKVCache: ConcatenateAdapter,
    SlidingKVCache: WindowAdapter,
    SlackChunkedKVCache: ChunkedAdapter,
    ArraysCache: RecurrentAdapter,
}

# The window each model masks with is its cache's size, except here: plamo3 masks with one row
# more, which its stock ring forgets when decoding single tokens but not in a block.
WINDOW_EXTRA = {"plamo3": 1}


class UnsupportedCache(ModelError):
    """A cache class that ds4cli cannot rewind exactly."""


def build_caches(model: Any, slack: int) -> list[Any]:
    """Caches for `model(x, cache=caches)`; windows and chunks keep `slack` positions more."""
    extra = WINDOW_EXTRA.get(getattr(model, "model_type", None), 0)

    def with_slack(cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*map(with_slack, cache.caches))
        if type(cache) is RotatingKVCache and not cache.keep:
            return SlidingKVCache(cache.max_size + extra, slack)
        if type(cache) is ChunkedKVCache:
            return SlackChunkedKVCache(cache.chunk_size, slack)
        return cache

    return [with_slack(cache) for cache in make_prompt_cache(model)]


def adapt(model_caches: list[Any]) -> list[LayerAdapter]:
    """One adapter per cache, `CacheList`s flattened in order."""
    return [_adapter(cache) for cache in _flat(model_caches)]


def nest(model_caches: list[Any], adapters: list[LayerAdapter]) -> list[Any]:
    """The caches of `adapters` in the shape of `model_caches`: what a fork hands to the model."""
    leaf = iter(adapters)

    def shaped(cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*[shaped(child) for child in cache.caches])
        return next(leaf).cache

    return [shaped(cache) for cache in model_caches]


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
