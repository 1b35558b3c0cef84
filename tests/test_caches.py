"""Every layer kind goes back, forwards and aside exactly: logits equal those of fresh caches."""

from __future__ import annotations

import gc
import json
import random
from functools import cache
from unittest import mock

import mlx.core as mx
import pytest
from folder import save_folder
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)
from oracle import TOLERANCE, failing_layer, fresh_logits
from tiny import BASE, CFG, V, build

from ds4cli.caches.adapter import LayerAdapter
from ds4cli.caches.build import (
    ADAPTERS,
    UnsupportedCache,
    adapt,
    build_caches,
    check_kv_bits,
    check_kv_group,
)
from ds4cli.caches.sliding import SlackChunkedKVCache, SlidingKVCache
from ds4cli.engine.engine import Engine
from ds4cli.errors import StateError, UsageError
from ds4cli.rewind.layers import Layers

WINDOW = 8  # of every tiny model with a window or chunks
_LAYERS = ["sliding_attention", "full_attention"] * 2
_DENSE = dict(BASE, num_hidden_layers=4, head_dim=16)
_WINDOWED = dict(_DENSE, sliding_window=WINDOW, layer_types=_LAYERS)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_ROPE = dict(rope_theta=1e4, rope_type="default")
_ROPES = dict(full_attention=_ROPE, sliding_attention=_ROPE)

# The windowed architectures that `tiny` does not have; with those it has, all of mlx-lm 0.32.2
# but muse_spark, whose attention is a Metal kernel.
MORE_WINDOWS = {
    "olmo3": dict(_WINDOWED, model_type="olmo3", rope_theta=1e4),
    "llama:window": dict(_WINDOWED, model_type="llama"),
    "ministral3": dict(
        _WINDOWED,
        model_type="ministral3",
        rope_parameters=dict(_ROPE, llama_4_scaling_beta=0.1, original_max_position_embeddings=512),
    ),
    "afmoe": dict(_WINDOWED, **_EXPERTS, model_type="afmoe", num_dense_layers=1),
    "gemma3n": dict(
        model_type="gemma3n",
        text_config=dict(
            _WINDOWED,
            model_type="gemma3n_text",
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=V,
            rope_local_base_freq=1e4,
            rope_theta=1e4,
            final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.0] * 4,
            hidden_size_per_layer_input=16,
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        ),
    ),
    "mimo_v2_flash": dict(
        _DENSE,
        **_EXPERTS,
        model_type="mimo_v2_flash",
        hybrid_layer_pattern=[1, 0, 1, 0],
        moe_layer_freq=[0] * 4,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        n_shared_experts=None,
        n_routed_experts=4,
        routed_scaling_factor=1.0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        layernorm_epsilon=1e-5,
        rope_theta=1e4,
        swa_rope_theta=1e4,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        v_head_dim=16,
        swa_head_dim=16,
        swa_v_head_dim=16,
        partial_rotary_factor=0.5,
    ),
    "step3p5": dict(
        _WINDOWED,
        model_type="step3p5",
        num_attention_groups=2,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
        moe_layers_enum="3",
        partial_rotary_factors=[1.0] * 4,
        attention_other_setting=dict(num_attention_heads=4, num_attention_groups=2),
    ),
    "iquestloopcoder": dict(
        _DENSE, model_type="iquestloopcoder", num_hidden_layers=2, loop_window_size=WINDOW
    ),
    "exaone_moe": dict(
        _WINDOWED,
        **_EXPERTS,
        model_type="exaone_moe",
        num_shared_experts=1,
        is_moe_layer=[False, True, False, True],
    ),
    "laguna": dict(
        _WINDOWED,
        **_EXPERTS,
        model_type="laguna",
        shared_expert_intermediate_size=32,
        rope_parameters=_ROPES,
        mlp_layer_types=["dense", "sparse"] * 2,
    ),
    "mellum": dict(
        _WINDOWED,
        **_EXPERTS,
        model_type="mellum",
        tie_word_embeddings=True,
        norm_topk_prob=True,
        rope_parameters=_ROPES,
    ),
    "muse_glimmer": dict(_WINDOWED, model_type="muse_glimmer"),
    "spark2_5": dict(_WINDOWED, model_type="spark2_5", rope_parameters=_ROPES),
}
PLAIN = ("llama", "afm7", "longcat_flash")
WINDOWS = ("gemma3_text", "gemma4_text", "gpt_oss", "exaone4", "cohere2", "plamo3", *MORE_WINDOWS)
SEEKABLE = (*PLAIN, *WINDOWS, "llama4", "deepseek_v41")
HYBRIDS = ("gear", "baichuan_m1", "recurrent_gemma", "falcon_h1", "lfm2", "longcat_flash_ngram")
# One per layer kind, for tests that need no more.
KINDS = ("llama", "afm7", "gemma3_text", "llama4", "deepseek_v41", "baichuan_m1")


@cache
def model_of(name: str):
    """Tiny model `name`; longcat_flash_ngram looks up hashed n-grams, so its ids stay small."""
    with mock.patch.dict(CFG, MORE_WINDOWS):
        return build(name)


def close(row: mx.array, fresh: mx.array) -> bool:
    scale = max(1.0, mx.abs(fresh).max().item())
    return mx.abs(row - fresh).max().item() < TOLERANCE * scale


def fresh_rows(model, tokens: list[int]):
    """The row after `tokens` from stock caches. deepseek_v41 rounds to 4 and 8 bits on the way, so
    where a value lies on an edge, mlx-lm's own answer differs (4e-3) by the size of the calls."""
    yield fresh_logits(model, tokens)
    if model.model_type == "deepseek_v41":
        for size in (1, 3):
            caches = model.make_cache()
            for i in range(0, len(tokens), size):
                row = model(mx.array([tokens[i : i + size]]), cache=caches)[0, -1]
            yield row


class Rig:
    """A model, its caches and what they have consumed, moved by hand.

    `step` is the growth of the buffers: small, so that they grow and compact all the time.
    Recurrent layers cannot seek; they go back to checkpoints kept here at every position written.
    """

    def __init__(self, name: str, slack: int = 5, seed: int = 0, step: int = 4, caches=None, **kv):
        self.model = model_of(name)
        self.rng = random.Random(seed)
        self.layers = Layers(caches or build_caches(self.model, slack, **kv))
        for a in self.adapters:
            if hasattr(a.cache, "step"):
                a.cache.step = step
        self.tokens: list[int] = []
        self.known: list[int] = []  # tokens, and those a seek left ahead
        self.kept = {0: [a.checkpoint() for a in self.recurrent]}

    @property
    def adapters(self) -> list:
        return self.layers.adapters

    @property
    def seekable(self) -> list:
        return [a for a in self.adapters if a.seekable]

    @property
    def recurrent(self) -> list:
        return self.layers.recurrent

    def words(self, n: int) -> list[int]:
        return [self.rng.randrange(V) for _ in range(n)]

    def call(self, tokens: list[int]) -> mx.array:
        self.layers.before_write()
        logits = self.model(mx.array([tokens]), cache=self.layers.caches)[0]
        mx.eval(logits, [a.arrays() for a in self.adapters])
        return logits

    def feed(self, n: int) -> list[int]:
        new = self.words(n)
        self.layers.forget_redo()
        self.call(new)
        self.kept = {p: kept for p, kept in self.kept.items() if p <= len(self.tokens)}
        self.tokens = self.known = [*self.tokens, *new]
        self.kept[len(self.tokens)] = [a.checkpoint() for a in self.recurrent]
        return new

    def reach(self) -> range:
        """Positions that every seekable layer says it reaches."""
        low = max((a.low() for a in self.seekable), default=0)
        return range(low, min([len(self.known), *(a.high() for a in self.seekable)]) + 1)

    def targets(self) -> list[int]:
        return [p for p in self.reach() if not self.recurrent or p in self.kept]

    def seek(self, pos: int) -> None:
        for a in self.seekable:
            a.seek(pos)
        for a, state in zip(self.recurrent, self.kept.get(pos, ()), strict=False):
            a.restore_checkpoint(state, pos)
        self.tokens = self.known[:pos]

    def check(self) -> None:
        """A probe token after this state gets the logits it gets after a fresh prefill."""
        assert {a.pos() for a in self.seekable} <= {len(self.tokens)}
        self.layers.forget_redo()
        hold = self.layers.hold()
        probe = self.words(1)
        row = self.call(probe)[-1]
        self.layers.restore(hold)
        assert any(close(row, fresh) for fresh in fresh_rows(self.model, [*self.tokens, *probe]))

    def checkpoint(self) -> list:
        states = [a.checkpoint() for a in self.adapters]
        mx.eval([a.checkpoint_arrays(s) for a, s in zip(self.adapters, states, strict=True)])
        return states

    def restore_checkpoint(self, states: list, tokens: list[int]) -> None:
        for a, state in zip(self.adapters, states, strict=True):
            a.restore_checkpoint(state, len(tokens))
        self.tokens = self.known = tokens

    def fork(self) -> Rig:
        twin = object.__new__(Rig)
        twin.model, twin.rng = self.model, random.Random(99)
        twin.tokens = twin.known = list(self.tokens)
        twin.layers = self.layers.fork()
        twin.kept = dict(self.kept)
        return twin


def run_schedule(rig: Rig, steps: int = 12) -> None:
    """Blocks of 1..8 and seeks down, up again and twice in a row, checked on the way."""
    rng = rig.rng
    rig.feed(rng.randrange(1, 21))
    for _ in range(steps):
        if rng.random() < 0.6:
            rig.feed(rng.randrange(1, 9))
            if rng.random() < 0.3:
                rig.check()
            continue
        for _ in range(rng.choice([1, 2, 3])):
            rig.seek(rng.choice(rig.targets()))
        rig.check()


# How far back one can seek, by the seed of a schedule; a layer kind meets all of them, and what has
# the layers of another one of them.
SLACKS = (0, 5, 24)
SCHEDULES = [
    pytest.param(name, seed, marks=() if name in KINDS or i % 3 == seed else pytest.mark.slow)
    for i, name in enumerate(SEEKABLE)
    for seed in range(len(SLACKS))
]


@pytest.mark.parametrize(("name", "seed"), SCHEDULES)
def test_any_schedule_of_blocks_and_seeks_equals_a_fresh_prefill(name, seed):
    """Where a window wraps, a group closes or a buffer grows, no row may be lost or kept."""
    if name == "gemma3n" and not hasattr(KVCache, "keys_and_values"):
        pytest.skip("the answer of mlx-lm 0.31's own gemma3n depends on the size of the calls")
    run_schedule(Rig(name, SLACKS[seed], seed, step=[1, 4, 16][seed]))


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_layers_move_together(name):
    """Nested and ragged caches: no leaf is forgotten, recurrent slots are restored whole."""
    for seed, slack in enumerate((5, 24)):
        run_schedule(Rig(name, slack, seed))


@pytest.mark.parametrize("name", ("gemma3_text", "gpt_oss"))
def test_the_stock_ring_fails_the_same_schedule(name):
    """Control: mlx-lm's own trim of a wrapped ring is wrong or crashes: the schedules bite."""
    model, rng = model_of(name), random.Random(0)
    tokens = [rng.randrange(V) for _ in range(30)]
    caches = model.make_cache()
    model(mx.array([tokens]), cache=caches)
    for c in caches:
        c.trim(5)
    try:
        row = model(mx.array([[7]]), cache=caches)[0, -1]
    except ValueError:
        return
    fresh = fresh_logits(model, [*tokens[:-5], 7])
    assert mx.abs(row - fresh).max().item() > 1e-2


@pytest.mark.parametrize("name", ("gemma3_text", "plamo3", "llama4", "deepseek_v41"))
def test_one_position_below_the_reach_is_refused_and_would_be_wrong(name):
    """An overstated reach is silent corruption: below it the logits differ, and seek raises."""
    rig = Rig(name, slack=3, step=1)
    rig.feed(20)
    for _ in range(25):
        rig.feed(1)
    known, low = rig.tokens, rig.reach().start
    assert 0 < low <= len(known) - 3
    with pytest.raises(StateError, match="out of reach"):
        rig.seek(low - 1)
    with pytest.raises(StateError, match="out of reach"):
        rig.seek(len(known) + 1)
    rig.check()
    rig.seek(low)
    rig.check()
    if name == "llama4":
        return  # the next lower position of a chunk needs only the rows that are there
    tight = [a for a in rig.seekable if a.low() == low]
    with mock.patch.object(type(tight[0]), "low", lambda self: 0), pytest.raises(AssertionError):
        rig.seek(low - 1)
        rig.check()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n % 3 else ()) for n in range(4)]
)
@pytest.mark.parametrize("name", ("gemma3_text", "llama4", "deepseek_v41"))
def test_the_reach_never_shrinks_below_the_slack(name, seed):
    """Compaction, one-token steps, rewinds and aborted calls leave `slack` positions to go back."""
    slack, top = 6, 0
    rig = Rig(name, slack, seed, step=[1, 2, 8, 256][seed])
    for _ in range(40):
        choice = rig.rng.random()
        if choice < 0.6:
            rig.feed(rig.rng.choice([1, 1, 1, 5, 17]))
        elif choice < 0.8:
            rig.seek(rig.rng.choice(rig.reach()))
        else:
            abort(rig, layer=rig.rng.randrange(4), n=rig.rng.choice([1, 9, 30]))
        top = max(top, len(rig.tokens))
        assert rig.reach().start <= max(0, top - slack)
    rig.check()


def abort(rig: Rig, layer: int, n: int) -> None:
    """A call of n tokens that dies after `layer`, undone."""
    rig.layers.forget_redo()
    hold = rig.layers.hold()
    with failing_layer(rig.model, layer), pytest.raises(KeyboardInterrupt):
        rig.call(rig.words(n))
    rig.layers.restore(hold)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_that_dies_between_layers_is_undone(name):
    """Some layers wrote and some did not: every one stands where it stood, redo rows or not."""
    rig = Rig(name, slack=5, step=4)
    layers = len(rig.model.layers)
    abort(rig, layer=0, n=3)
    rig.feed(13)
    for i in range(layers):
        abort(rig, layer=i, n=[1, 6, 20][i % 3])
        rig.check()
        rig.feed(1 + i)
        rig.check()
        rig.seek(rig.targets()[-2:][0])
        abort(rig, layer=layers - 1 - i, n=2)
        rig.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_hold_undoes_seeks_and_restored_checkpoints_with_the_redo(name):
    """A rewind that fails half-way, before any write, is put back with all it could redo."""
    rig = Rig(name, slack=5, step=1)
    rig.feed(3)
    early, first = rig.checkpoint(), rig.tokens
    for _ in range(30):
        rig.feed(1)
    known = rig.tokens
    rig.seek(rig.targets()[-3])
    here, end = rig.tokens, rig.reach().stop
    hold = rig.layers.hold()
    rig.restore_checkpoint(early, first)
    rig.layers.restore(hold)
    rig.tokens, rig.known = here, known
    assert rig.reach().stop == end
    rig.check()


def test_replayed_tokens_leave_a_hold_good():
    """A replay that dies inside writes the rows that stood there: the position is restored."""
    for name in ("llama", "gemma3_text"):
        rig = Rig(name, slack=24, step=256)
        rig.feed(20)
        hold, known = rig.layers.hold(), rig.tokens
        rig.seek(12)
        rig.call(known[12:15])
        rig.layers.restore(hold)
        rig.tokens = rig.known = known
        rig.check()


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if i % 3 == seed else pytest.mark.slow)
        for i, name in enumerate(KINDS)
        for seed in range(3)
    ],
)
def test_forks_write_both_and_stay_apart(name, seed):
    """Branches share rows until one writes below another's end; neither sees the other's tokens."""
    rig = Rig(name, slack=24, seed=seed, step=[1, 16, 256][seed])
    rig.feed(14)
    twin = rig.fork()
    third = twin.fork()
    for branch, n in ((rig, 3), (twin, 2), (third, 4), (twin, 1), (rig, 5)):
        branch.feed(n)
    for branch in (twin, rig, third):
        branch.seek(branch.targets()[-2])
        branch.check()
        branch.feed(6)
    late = rig.fork()
    rig.feed(1)
    late.feed(2)
    for branch in (rig, twin, third, late):
        branch.check()


def test_a_twin_rewound_below_the_fork_leaves_the_other_alone():
    """Writing below the fork point in the shared buffer would change the other branch's past."""
    for name in ("llama", "gemma3_text", "llama4"):
        rig = Rig(name, slack=24, step=256)
        rig.feed(20)
        twin = rig.fork()
        rig.seek(12)
        rig.feed(4)
        twin.check()
        rig.check()
        twin.feed(3)
        twin.check()


LONG = 2048


def append(cache, rows: mx.array) -> None:
    """One write, the way a model makes it."""
    if isinstance(cache, SlackChunkedKVCache):
        cache.maybe_trim_front()
    mx.eval(cache.update_and_fetch(rows, rows))


def filled(cls, *args):
    """Layers of one cache with LONG rows, 4 heads of 16, float32."""
    c = cls(*args)
    rows = mx.random.normal((1, 4, LONG - 256, 16))
    append(c, rows)
    append(c, rows[:, :, :8])
    mx.eval(c.keys, c.values)
    return Layers([c])


def nbytes(layers) -> int:
    return sum(a.nbytes for a in layers.adapters[0].arrays())


def write(layers, n: int = 1) -> int:
    """Write n rows; returns the most bytes that were allocated above those live before."""
    rows = mx.zeros((1, 4, n, 16))
    mx.eval(rows)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    layers.before_write()
    append(layers.caches[0], rows)
    mx.eval(layers.live())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(
    "make",
    [
        lambda: filled(KVCache),
        lambda: filled(SlidingKVCache, 1024, 1024),
        lambda: filled(SlackChunkedKVCache, 1024, 1024),
    ],
    ids=["kv", "window", "chunked"],
)
def test_a_fork_costs_nothing_until_both_write(make):
    """The buffer of a long chat must not be copied for a branch that only one side goes on with."""
    first = make()
    size = nbytes(first)
    write(first)
    assert write(first) < size / 20
    second = first.fork()
    hold = second.hold()
    assert write(first) < size / 20
    assert size / 4 < write(second)  # now it has to leave
    assert write(second) < size / 20
    assert write(first) < size / 20
    del hold, second
    third = first.fork()
    del first
    gc.collect()
    third.stand(third.adapters[0].pos() - 5, [])
    assert write(third) < size / 20  # nobody else is left


def test_a_hold_or_a_checkpoint_makes_no_write_copy():
    """A kept slice of a buffer costs a full copy at every following write."""
    for layers in (filled(KVCache), filled(SlidingKVCache, 1024, 1024)):
        size = nbytes(layers)
        write(layers)
        kept, hold = layers.checkpoint(0, "turn", None), layers.hold()
        assert write(layers) < size / 20
        layers.restore(hold)
        assert write(layers) < size / 20
        del kept


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_outlives_everything_written_after_it(name):
    """Growth, compaction, other tokens and its own use must not change what it restores."""
    rig = Rig(name, slack=4, step=3)
    checkpoints = []
    for n in (3, 6, 1, 9):
        rig.feed(n)
        checkpoints.append((rig.checkpoint(), rig.tokens))
    for _ in range(20):
        rig.feed(1)
    for states, tokens in reversed(checkpoints):
        for _ in range(2):
            rig.restore_checkpoint(states, tokens)
            rig.check()
            rig.feed(5)
            rig.feed(1)
            rig.check()


def test_a_restored_checkpoint_is_not_written_into():
    """Two branches may share it: restore, seek below it, write, and it must still be the same."""
    for make in (SlidingKVCache, SlackChunkedKVCache):
        adapter = adapt([make(WINDOW, 4)])[0]
        adapter.cache.step = 4
        rows = mx.random.normal((1, 2, 5, 4))
        append(adapter.cache, rows)
        state = adapter.checkpoint()
        for _ in range(30):
            append(adapter.cache, rows)
        adapter.restore_checkpoint(state, 5)
        before = [mx.array(a) + 0 for a in adapter.checkpoint_arrays(state)]
        mx.eval(before)
        adapter.seek(2)
        append(adapter.cache, rows[..., :2, :] - 9)
        for a, b in zip(before, adapter.checkpoint_arrays(state), strict=True):
            assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", ("llama", "gemma3_text", "deepseek_v41"))
def test_a_checkpoint_is_keyed_by_its_position(name):
    """A state filed under another count of tokens is the classic silent corruption."""
    rig = Rig(name)
    rig.feed(9)
    states = rig.checkpoint()
    rig.feed(5)
    with pytest.raises(StateError, match="taken at `9`"):
        rig.adapters[0].restore_checkpoint(states[0], 8)
    assert rig.adapters[0].pos() == 14


def test_a_checkpoint_pins_nothing_big():
    """A convolution tail is a slice of a whole prefill chunk and would keep it alive."""
    c = ArraysCache(2)
    chunk = mx.zeros((1, 4096, 256))
    mx.eval(chunk)
    c[0], c[1] = chunk[:, -3:], mx.zeros((1, 8, 16, 16))
    adapter = adapt([c])[0]
    state = adapter.checkpoint()
    mx.eval(adapter.checkpoint_arrays(state))
    c[0] = c[1] = None
    size = chunk.nbytes
    before = mx.get_active_memory()
    del chunk
    gc.collect()
    assert before - mx.get_active_memory() >= size


@pytest.mark.parametrize("name", (*KINDS, "gpt_oss", "longcat_flash_ngram"))
def test_saved_layers_go_on_and_still_go_back(name, tmp_path):
    """A loaded session answers like the saved one, and rewinds as far as its rows say."""
    rig = Rig(name, slack=6, step=4)
    for n in (11, 4, 7, 1, 1):
        rig.feed(n)
    rig.seek(rig.targets()[-2])
    arrays, metas = {}, []
    for i, a in enumerate(rig.adapters):
        mine, meta = a.state_dict()
        arrays.update({f"{i}/{key}": value for key, value in mine.items()})
        metas.append(json.dumps(meta))
    path = str(tmp_path / "layers.safetensors")
    mx.save_safetensors(path, arrays)
    loaded, other = mx.load(path), Rig(name, slack=6, step=4)
    for i, (a, meta) in enumerate(zip(other.adapters, metas, strict=True)):
        prefix = f"{i}/"
        mine = {k[len(prefix) :]: v for k, v in loaded.items() if k.startswith(prefix)}
        a.load_state(mine, json.loads(meta))
    other.tokens = other.known = rig.tokens
    other.kept = {p: s for p, s in rig.kept.items() if p <= len(rig.tokens)}
    other.check()
    assert other.reach().start <= len(other.tokens) - 6 or other.reach().start == 0
    other.seek(other.targets()[0])
    other.check()
    other.feed(3)
    other.check()
    assert Rig(name).adapters[0].state_dict()[0] == {}  # nothing written yet, nothing saved


def test_chunked_reach_stops_at_a_chunk_boundary():
    """Half a chunk is not enough for a token in it, although its rows start inside the buffer."""
    rig = Rig("llama4", slack=3, step=1)
    for _ in range(45):
        rig.feed(1)
        chunked = rig.adapters[0]
        assert chunked.low() % WINDOW == 0 and chunked.low() >= chunked.cache.start


def test_attention_sees_no_more_rows_than_stock():
    """Slack must cost memory only: the same number of rows, the same masks, none for one token."""
    for size in (1, 2, 5, 30):
        ours, stock = SlidingKVCache(WINDOW, 40), RotatingKVCache(WINDOW)
        for n in (size, 1, 1, 4, 1, 9):
            rows = mx.random.normal((1, 1, n, 4))
            for smaller in (None, WINDOW, WINDOW - 3):
                mask, other = ours.make_mask(n, smaller), stock.make_mask(n, smaller)
                assert type(mask) is type(other)
                if n > 1 and not isinstance(mask, str):
                    assert mx.array_equal(mask, other)
            shown = ours.update_and_fetch(rows, rows)[0].shape
            assert shown == stock.update_and_fetch(rows, rows)[0].shape


def test_a_window_smaller_than_the_buffer_is_masked_for_one_token():
    """The stock mask of one row assumes a ring; ours has the newest rows last."""
    ours = SlidingKVCache(WINDOW, 4)
    rows = mx.zeros((1, 1, 1, 4))
    for _ in range(12):
        ours.update_and_fetch(rows, rows)
    assert ours.make_mask(1, 3).tolist() == [False] * 5 + [True] * 3


def test_the_window_buffer_stays_bounded():
    """Hours of one-token steps must not grow a window layer."""
    c = SlidingKVCache(16, 8)
    rows = mx.zeros((1, 1, 1, 4))
    for _ in range(1500):
        c.update_and_fetch(rows, rows)
        mx.eval(c.keys, c.values)
        assert c.keys.shape[2] <= 15 + 8 + c.step


def concatenating(seed: int = 0) -> Rig:
    return Rig("llama", seed=seed, caches=[ConcatenateKVCache() for _ in range(3)])


def test_concatenated_rows_are_cut():
    """The class's own trim moves only the offset; the next write would append to dropped rows."""
    for seed in range(3):
        run_schedule(concatenating(seed))
    rig = concatenating()
    abort(rig, layer=1, n=4)
    rig.feed(9)
    twin = rig.fork()
    rig.seek(4)
    rig.feed(2)
    twin.feed(1)
    abort(twin, layer=0, n=2)
    rig.check()
    twin.check()


def test_rows_that_a_write_gave_up_are_freed():
    """What a redo needs must not stay alive once something else was written."""
    layers = filled(ConcatenateKVCache)
    size = nbytes(layers)
    before = mx.get_active_memory()
    layers.stand(10, [])
    layers.forget_redo()
    write(layers)
    assert mx.get_active_memory() < before - size / 2


@pytest.mark.parametrize("kind", ADAPTERS.values(), ids=lambda kind: kind.__name__)
def test_every_cache_kind_says_what_it_can(kind):
    """A kind that forgot to was kept checkpoints that it did not need, or none that it needed."""
    assert {kind.seekable, kind.keeps_every_row, kind.splits_long_calls} <= {True, False}
    assert kind.kind
    inherited = [n for n, f in vars(LayerAdapter).items() if callable(f) and not n.startswith("__")]
    optional = {"leave", "restores", "checkpoint_arrays", "forget_redo", "saved_rows"}
    missing = [n for n in inherited if getattr(kind, n) is getattr(LayerAdapter, n)]
    assert set(missing) <= optional


def test_quantised_rows_go_back_too():
    """kv_bits must not change what a rewind reaches, nor what it finds there."""
    with mock.patch.dict(CFG, {"llama:wide": dict(CFG["llama"], head_dim=64)}):
        model_of("llama:wide")
    rig = Rig("llama:wide", step=4, kv_bits=8, kv_group_size=32)
    assert {a.kind for a in rig.adapters} == {"quantized kv"}
    stock = mock.patch("oracle.make_prompt_cache", lambda model: build_caches(model, 0, 8, 32))
    with stock:
        run_schedule(rig, steps=20)
        for branch in (rig, twin := rig.fork()):
            branch.feed(3)
        rig.check()
        twin.check()
        states, tokens = rig.checkpoint(), rig.tokens
        rig.feed(9)
        rig.restore_checkpoint(states, tokens)
        rig.check()
        arrays, meta = rig.adapters[0].state_dict()
        rig.adapters[0].load_state(arrays, meta)
        rig.check()


@pytest.mark.parametrize(
    ("name", "bits", "group", "reason"),
    [
        ("gemma3_text", 8, 64, "window"),
        ("llama4", 8, 64, "chunked"),
        ("deepseek_v41", 8, 64, "compressed"),
        ("mamba2", 8, 64, "recurrent"),
        ("llama", 5, 64, "`5` bits"),
        ("llama", 8, 48, "groups of `48`"),
        ("llama", 8, 64, "does not run"),
        ("longcat_flash", 8, 32, "does not run"),
    ],
)
def test_quantised_kv_is_refused_with_the_reason(name, bits, group, reason):
    """mlx-lm dies inside the first call, or worse; the user hears it before anything is read."""
    with pytest.raises(UsageError, match=reason):
        check_kv_bits(model_of(name), bits, group)


def test_quantised_kv_is_refused_where_the_backend_has_no_kernel_for_long_calls(monkeypatch):
    """MLX on CUDA has none for 13 rows: the user heard it in the middle of the prompt."""
    product = mx.quantized_matmul

    def without_long_ones(x, *args, **kwargs):
        if x.shape[-2] > 8:
            raise RuntimeError("No implementation for problem shape")
        return product(x, *args, **kwargs)

    with mock.patch.dict(CFG, {"llama:wide": dict(CFG["llama"], head_dim=64)}):
        model = model_of("llama:wide")
    check_kv_bits(model, 8, 32)
    monkeypatch.setattr(mx, "quantized_matmul", without_long_ones)
    with pytest.raises(UsageError, match="No implementation"):
        check_kv_bits(model, 8, 32)


def test_heads_that_no_group_divides_are_refused_before_the_weights_are_read(tmp_path):
    """It took loading a model of many GB to hear that its heads are 80 wide."""
    config = {"model_type": "qwen3_5", "text_config": {"hidden_size": 448, "head_dim": 64}}
    check_kv_group(config, 32)
    check_kv_group({"hidden_size": 512, "num_attention_heads": 8}, 64)
    # latent attention: a head is not hidden_size / num_attention_heads wide
    check_kv_group({"hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512}, 64)
    check_kv_group({"model_type": "mamba2"}, 64)
    with pytest.raises(UsageError, match="heads of this model are 64 wide"):
        check_kv_group(config, 128)
    save_folder(tmp_path, "llama", head_dim=16)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="`kv_group_size` is `128`"):
        Engine.load(tmp_path, kv_bits=8, kv_group_size=128)


class Later(KVCache):
    """A cache class that mlx-lm may add one day."""


@pytest.mark.parametrize(
    "unknown", [BatchKVCache([0]), RotatingKVCache(8), RotatingKVCache(8, keep=4), Later()]
)
def test_an_unknown_cache_is_refused_by_name(unknown):
    """Guessing that a new class behaves like an old one corrupts silently."""
    with pytest.raises(UnsupportedCache, match=type(unknown).__name__) as caught:
        adapt([KVCache(), CacheList(KVCache(), unknown)])
    assert caught.value.hint


def test_adapters_describe_themselves():
    """The capability report needs a kind, a sentence and the bytes of one more token."""
    rig = Rig("baichuan_m1")
    rig.feed(4)
    kinds = {a.kind: a for a in rig.adapters}
    assert {"recurrent", "kv"} <= set(kinds)
    assert all(a.describe() for a in rig.adapters)
    assert kinds["kv"].bytes_per_token() > 0 == kinds["recurrent"].bytes_per_token()
    with pytest.raises(StateError):
        kinds["recurrent"].seek(0)
    rig = Rig("deepseek_v41")
    rig.feed(9)
    per_token = [a.bytes_per_token() for a in rig.adapters]
    assert per_token[0] == 0 < per_token[2] < per_token[1]
