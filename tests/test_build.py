"""From a model to its caches, without a model: what is exchanged for what, and what is refused."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ds4cli.caches.build import (
    TRIAL_ROWS,
    UnsupportedCache,
    adapt,
    build_caches,
    check_kv_bits,
    check_kv_group,
    nest,
)
from ds4cli.caches.plain import ConcatenateAdapter, KVAdapter
from ds4cli.caches.recurrent import RecurrentAdapter
from ds4cli.caches.sliding import ChunkedAdapter, SlackChunkedKVCache, SlidingKVCache, WindowAdapter
from ds4cli.errors import UsageError


class Model:
    """Has these caches; a call notes what it is given."""

    def __init__(self, *caches, fails=None):
        self.caches, self.fails, self.calls = caches, fails, []

    def make_cache(self):
        return [*self.caches]

    def __call__(self, ids, cache):
        self.calls.append((ids.shape, ids.dtype, ids.sum().item(), cache))
        if self.fails and len(self.calls) == 2:
            raise self.fails
        return mx.zeros((1, 1))


def kinds(caches):
    return [kinds(c.caches) if isinstance(c, CacheList) else type(c) for c in caches]


def test_windows_and_chunks_get_slack_and_all_else_stays():
    """A stock ring among the caches: what it overwrote is gone."""
    plain, slots, joined = KVCache(), ArraysCache(2), ConcatenateKVCache()
    pinned = RotatingKVCache(16, keep=4)
    inside = CacheList(plain, CacheList(RotatingKVCache(6, keep=0), slots))
    model = Model(RotatingKVCache(8, keep=0), ChunkedKVCache(12), inside, joined, pinned)
    caches = build_caches(model, 5)
    nested = [KVCache, [SlidingKVCache, ArraysCache]]
    want = [SlidingKVCache, SlackChunkedKVCache, nested, ConcatenateKVCache, RotatingKVCache]
    assert kinds(caches) == want
    window, chunks, nested, kept, ring = caches
    inner, same = nested.caches[1].caches
    assert (window.max_size, window.slack) == (8, 5) and (inner.max_size, inner.slack) == (6, 5)
    assert (chunks.chunk_size, chunks.slack) == (12, 5)
    assert (nested.caches[0], same, kept, ring) == (plain, slots, joined, pinned)


def test_a_window_is_what_its_model_masks_with():
    """plamo3 sees one row more than its stock ring keeps."""
    for kind, size in (("plamo3", 9), ("gemma3", 8)):
        model = Model(CacheList(RotatingKVCache(8, keep=0)))
        model.model_type = kind
        (cache,) = build_caches(model, 5)
        assert cache.caches[0].max_size == size


def test_compressed_rows_are_kept_by_the_layer_that_makes_them():
    deepseek = pytest.importorskip("mlx_lm.models.deepseek_v41")
    layer = nn.Module()
    layer.self_attn = nn.Module()
    layer.self_attn.ratio = 3
    model = Model(KVCache(), CacheList(deepseek.LayerCache(4)))
    model.layers = [None, layer]
    _, caches = build_caches(model, 5)
    (cache,) = caches.caches
    assert (cache.window_size, cache.slack, cache.ratio) == (9, 5, 3)
    (_, adapter) = adapt([KVCache(), caches])
    assert adapter.kind == "compressed" and adapter.cache is cache


def test_only_plain_rows_are_quantised():
    slots = ArraysCache(1)
    model = Model(KVCache(), CacheList(slots, KVCache()))
    plain, nested = build_caches(model, 5, 4, 32)
    assert kinds([plain, nested]) == [QuantizedKVCache, [ArraysCache, QuantizedKVCache]]
    assert (plain.bits, plain.group_size) == (4, 32) and nested.caches[0] is slots
    assert (nested.caches[1].bits, nested.caches[1].group_size) == (4, 32)
    assert build_caches(model, 5, 8)[0].group_size == 64
    for bits, group in ((2, 32), (4, 64), (8, 128)):
        assert kinds(build_caches(Model(KVCache()), 0, bits, group)) == [QuantizedKVCache]


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (0, 32), (16, 64), (8, 16), (8, 0)])
def test_sizes_that_nothing_packs_are_refused(bits, group):
    with pytest.raises(UsageError, match=f"to `{bits}` bits in groups of `{group}`"):
        build_caches(Model(KVCache()), 5, bits, group)


@pytest.mark.parametrize(
    ("caches", "names"),
    [
        ((ArraysCache(1),), "recurrent"),
        ((KVCache(), CacheList(RotatingKVCache(8, keep=0))), "kv, window"),
        ((KVCache(), ChunkedKVCache(8), ArraysCache(1)), "chunked, kv, recurrent"),
        ((RotatingKVCache(8, keep=4), ConcatenateKVCache()), "concatenate"),
        ((), ""),
    ],
)
def test_layers_that_are_not_quantised_are_named(caches, names):
    with pytest.raises(UsageError) as refused:
        build_caches(Model(*caches), 5, 8, 32)
    assert str(refused.value).endswith(f"this model has: {names}")


def test_heads_must_be_whole_groups_where_a_config_says_how_wide_they_are():
    for config in ({}, {"head_dim": None}, {"head_dim": 64}, {"text_config": {"head_dim": 128}}):
        check_kv_group(config, 64)
    check_kv_group({"head_dim": 80, "text_config": {"head_dim": 64}}, 64)
    for config in ({"head_dim": 80}, {"head_dim": 64, "text_config": {"head_dim": 80}}):
        with pytest.raises(UsageError, match="is `64`, the heads of this model are 80 wide"):
            check_kv_group(config, 64)


def test_quantised_caches_are_tried_in_calls_of_both_kinds():
    """A head size, or a number of rows, that only fails in the middle of a text."""
    model = Model(KVCache(), ArraysCache(1))
    check_kv_bits(model, 4, 32)
    assert [call[:3] for call in model.calls] == [((1, n), mx.int32, 0) for n in TRIAL_ROWS]
    (*_, caches), (*_, again) = model.calls
    assert kinds(caches) == [QuantizedKVCache, ArraysCache] and caches is again
    assert (caches[0].bits, caches[0].group_size) == (4, 32)
    for error in (ValueError, TypeError, AttributeError, RuntimeError):
        with pytest.raises(UsageError, match="of `4` bits: no kernel") as refused:
            check_kv_bits(Model(KVCache(), fails=error("no kernel")), 4, 32)
        assert isinstance(refused.value.__cause__, error)
    with pytest.raises(KeyError):
        check_kv_bits(Model(KVCache(), fails=KeyError("a fault of ours")), 4, 32)


def test_every_cache_has_its_adapter_in_order():
    caches = [
        KVCache(),
        CacheList(ArraysCache(1), CacheList(ConcatenateKVCache()), KVCache()),
        SlidingKVCache(8, 5),
        SlackChunkedKVCache(8, 5),
    ]
    adapters = adapt(caches)
    kinds = [KVAdapter, RecurrentAdapter, ConcatenateAdapter, KVAdapter, WindowAdapter]
    assert [type(a) for a in adapters] == [*kinds, ChunkedAdapter]
    leaves = [a.cache for a in adapters]
    assert leaves[:2] == [caches[0], caches[1].caches[0]] and leaves[3] is caches[1].caches[2]
    again = nest(caches, leaves)
    assert again[0] is leaves[0] and again[1].caches[1].caches == (leaves[2],)
    assert [type(c) for c in again] == [type(c) for c in caches] and again[3] is leaves[5]
    assert [a.cache for a in adapt(again)] == leaves and adapt([]) == nest([], []) == []


@pytest.mark.parametrize("cache", [RotatingKVCache(8), type("Rows", (KVCache,), {})(), None])
def test_a_cache_of_another_class_is_refused(cache):
    """A subclass may keep its rows in another way."""
    for caches in ([cache], [CacheList(KVCache(), cache)]):
        with pytest.raises(UnsupportedCache, match=f"cache class `{type(cache).__name__}`"):
            adapt(caches)
