"""What replaces MLX's own forms on CUDA: tried on the CPU where it is plain MLX, and on a card, if
there is one, where it is a kernel."""

from __future__ import annotations

from itertools import chain

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.rwkv7 import _wkv7_step_ops
from mlx_lm.models.ssm import compute_dt, ssm_attn, ssm_update
from test_convolutions import beside_mlx, convolution
from test_families import keeping

from ds4cli.bench.reference import stock
from ds4cli.hooks import convolutions as forms
from ds4cli.hooks import delta
from ds4cli.hooks.cuda import attention, convolutions, kernels, recurrences, rows, seats, switch
from ds4cli.tape.check import self_check
from ds4cli.tape.recorder import Recorder, arrays_caches

pytestmark = pytest.mark.filterwarnings("error")
needs_cuda = pytest.mark.skipif(not switch.is_on(), reason="needs CUDA and DS4CLI_TEST_DEVICE=gpu")
TOLERANCE = 2e-6


@pytest.fixture
def on(monkeypatch):
    """The switch, as on a machine with CUDA."""
    monkeypatch.setattr(switch, "is_on", lambda: True)


def error(a, b):
    return (mx.max(mx.abs(a - b)) / mx.max(mx.abs(b))).item()


# --- the switch ---------------------------------------------------------------------------------


def test_the_switch_needs_cuda_and_can_be_turned_off(monkeypatch):
    """Guards: a kernel asked for without a card, or a user who cannot turn it off."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert switch.is_on()
    monkeypatch.setenv("DS4CLI_CUDA_FORMS", "none")
    assert not switch.is_on()
    monkeypatch.delenv("DS4CLI_CUDA_FORMS")
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert not switch.is_on()


def test_a_model_is_left_alone_without_cuda(monkeypatch):
    """Guards: another form of attention where MLX's own is the fast one."""
    monkeypatch.setattr(switch, "is_on", lambda: False)
    model = tiny.build("llama")
    assert not len(attention.use(model)) and not len(recurrences.use(model))


# --- attention ----------------------------------------------------------------------------------


def bound():
    """mlx-lm's attention as a model that was armed calls it."""
    return attention._by_rows(attention.base.scaled_dot_product_attention)


def inputs(rows, keys, heads=8, groups=2, dim=16, values=16, dtype=mx.float32):
    mx.random.seed(rows)
    shapes = (1, heads, rows, dim), (1, groups, keys, dim), (1, groups, keys, values)
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]


def window(rows, keys, size):
    ahead = mx.arange(keys - rows, keys)[:, None] - mx.arange(keys)[None]
    return (ahead >= 0) & (ahead < size)


def additive(shape):
    return mx.random.normal(shape, key=mx.random.key(3))


MASKS = {
    "none": lambda n, m: None,
    "causal": lambda n, m: "causal",
    "window": lambda n, m: window(n, m, 5),
    "window of four axes": lambda n, m: window(n, m, 5)[None, None],
    "per head": lambda n, m: mx.random.uniform(shape=(1, 8, n, m)) < 0.8,
    "added": lambda n, m: additive((n, m)),
    "added per head": lambda n, m: additive((1, 8, n, m)),
    "one row for all": lambda n, m: mx.arange(m)[None] < m - 1,
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n, m", [(2, 2), (5, 23), (32, 70)])
def test_products_equal_mlx(n, m, name, sinks):
    """Guards: a mask folded onto the wrong head or row, a lost scale, a sink that is read."""
    arrays, mask = inputs(n, m), MASKS[name](n, m)
    more = {"sinks": mx.random.normal((8,))} if sinks else {}
    want = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask=mask, **more)
    got = bound()(*arrays, cache=None, scale=0.3, mask=mask, **more)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert error(got, want) < TOLERANCE


def test_other_sizes_of_values_and_more_sequences():
    """Guards: latent attention, whose values are longer than its keys; padded batches."""
    q, k, v = (mx.concatenate([x, x[::-1] * 0.5]) for x in inputs(4, 9, values=24))
    seen = mx.arange(9)[None, None, None] >= mx.array([0, 3])[:, None, None, None]
    mask = seen & window(4, 9, 9)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert error(bound()(q, k, v, None, 0.3, mask), want) < TOLERANCE


@pytest.mark.parametrize("name", MASKS)
def test_rows_beyond_the_last_key_change_nothing(name, monkeypatch):
    """Guards: keys that were cut off, or not written yet, and are seen."""
    widths = []
    run = attention.products
    monkeypatch.setattr(attention, "products", lambda *a: widths.append(a[1].shape[2]) or run(*a))
    q, k, v = inputs(5, 90)
    cache = KVCache()
    cache.update_and_fetch(*(mx.random.normal((1, 2, 200, 16)) for _ in range(2)))
    cache.trim(200)
    keys, values = cache.update_and_fetch(k, v)
    mask = MASKS[name](5, 90)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert error(bound()(q, keys, values, cache, 0.3, mask), want) < TOLERANCE
    assert widths == [90 if name.startswith("added") else 128]


def test_a_row_that_sees_nothing_is_not_nan():
    """Guards: a masked row of half precision that overflows and spoils the whole text."""
    q, k, v = inputs(3, 9, dtype=mx.float16)
    mask = mx.arange(3)[:, None] + mx.zeros((1, 9)) > 0
    assert not mx.any(mx.isnan(bound()(q, k, v, None, 0.3, mask))).item()


def test_masks_of_two_kinds_of_layers_are_kept_apart():
    """Guards: the window of one layer used in another, or a mask of the call before."""
    arrays, call = inputs(4, 12), bound()
    for mask in ("causal", window(4, 12, 3), "causal", window(4, 12, 6)):
        want = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask=mask)
        assert error(call(*arrays, None, 0.3, mask), want) < TOLERANCE
    other = inputs(4, 20)
    want = mx.fast.scaled_dot_product_attention(*other, scale=0.3, mask="causal")
    assert error(call(*other, None, 0.3, "causal"), want) < TOLERANCE


def test_which_calls_take_products():
    """Guards: products where MLX's kernels win, or scores that fill the card."""
    assert not attention.pays(1, 10, 10) and attention.pays(2, 4000, 32)
    most = attention.MAX_ROWS
    assert attention.pays(most, most + 7, 10) and not attention.pays(most + 1, most + 7, 10)
    assert not attention.pays(most, 2 * most, 10), "the second chunk of every prompt"
    assert not attention.pays(most, attention.MAX_SCORES // most + 1, 1)


def test_one_row_long_calls_and_packed_caches_stay_as_they_are(monkeypatch):
    """Guards: products asked for on keys that are packed, or whatever `pays` says."""
    monkeypatch.setattr(attention, "products", lambda *_: pytest.fail("products"))
    packed = QuantizedKVCache(32, 8)
    for n in (1, attention.MAX_ROWS + 1):
        bound()(*inputs(n, n + 3), None, 0.3, None)
    q, k, v = inputs(4, 4, dim=32, values=32)
    assert bound()(q, *packed.update_and_fetch(k, v), packed, 0.3, None).shape == q.shape


@pytest.mark.parametrize("name", tiny.CFG)
def test_every_family_keeps_its_logits(on, name):
    """Guards: a family whose call of attention is another, or whose modules are not found."""
    model = tiny.build(name)
    plain = stock(model)
    swaps = attention.use(model)
    caches = [make_prompt_cache(m) for m in (model, plain)]
    for n in (3, 1, 5):
        want, got = (
            m(tiny.ids(n)[None], cache=c) for m, c in zip((plain, model), caches, strict=True)
        )
        assert error(got, want) < 2e-5
    swaps.undo()
    assert type(model) is type(plain)


def test_the_stock_model_is_untouched(on):
    """Guards: a reference that runs what it is to check."""
    model = tiny.build("llama")
    attention.use(model)
    layer = model.layers[0].self_attn
    assert type(layer) is not type(stock(model).layers[0].self_attn)
    assert type(stock(model).layers[0].self_attn) is type(tiny.build("llama").layers[0].self_attn)


# --- recurrences --------------------------------------------------------------------------------

FAMILIES = ["qwen3_next", "kimi_linear", "mamba2", "nemotron_h", "rwkv7"]


def plain_ssd(x, A_log, B, C, D, dt, state=None):
    """The recurrence as it is written, row by row; dt as it is used."""
    repeats = x.shape[2] // B.shape[2]
    B, C = mx.repeat(B, repeats, axis=2), mx.repeat(C, repeats, axis=2)
    state = mx.zeros((*x.shape[:1], *x.shape[2:], B.shape[-1])) if state is None else state
    ys = []
    for t in range(x.shape[1]):
        decay = mx.exp(-mx.exp(A_log) * dt[:, t])[..., None, None]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = decay * state + added
        ys.append((state @ C[:, t, ..., None])[..., 0] + D[:, None] * x[:, t])
    return mx.stack(ys, axis=1).astype(x.dtype), state


def plain_wkv7(r, w, k, v, a, b, state):
    ys = []
    for t in range(r.shape[1]):
        y, state = _wkv7_step_ops(*(x[:, t] for x in (r, w, k, v, a, b)), state)
        ys.append(y[..., 0])
    return mx.stack(ys, axis=1), state


@pytest.fixture
def taken(on, monkeypatch):
    """The switch is on, with plain forms in the place of kernels; the rows that each was given."""
    found = []

    def noting(run):
        def noted(*args, **named):
            found.append(args[0].shape[1])
            return run(*args, **named)

        return noted

    for name, form in (("gated_delta", gated_delta_ops), ("ssd", plain_ssd), ("wkv7", plain_wkv7)):
        monkeypatch.setattr(kernels, name, noting(keeping(form)))

    def plain_state(pieces, state):
        found.append(sum(piece[0].shape[1] for piece in pieces))
        k, *rest = (mx.concatenate(column, axis=1) for column in zip(*pieces, strict=True))
        return gated_delta_ops(k, k, *rest, state)[1]

    monkeypatch.setattr(kernels, "gated_delta_state", plain_state)
    monkeypatch.setattr(rows, "_gathered", lambda pieces: mx.concatenate(pieces, axis=1))
    return found


def armed(name, **over):
    model = tiny.build(name, **over)
    delta.use(model)
    recurrences.use(model)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_take_the_kernel(taken, name):
    """Guards: a family whose recurrence still loops over the rows of a call."""
    model = armed(name)
    plain = stock(model)
    caches = [make_prompt_cache(m) for m in (model, plain)]
    for n in (7, 1, 4):
        want, got = (
            m(tiny.ids(n)[None], cache=c) for m, c in zip((plain, model), caches, strict=True)
        )
        assert error(got, want) < 2e-5
    assert set(taken) == {7, 1, 4}


@pytest.mark.parametrize("name", FAMILIES)
def test_replays_take_the_kernel(taken, name):
    """Guards: a replay that copies every layer's rows together, or gives another state."""
    model = armed(name)
    recorder = Recorder.arm(model)
    taken.clear()
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).accepts
    assert 2 in taken


@pytest.mark.parametrize("name", FAMILIES)
def test_lanes_keep_rows_of_their_own_by_the_kernel(taken, name):
    """Guards: a kernel for each lane, or another one's number of rows."""
    model = armed(name)
    recorder, caches, kept = Recorder.arm(model), make_prompt_cache(model), [2, 4, 1]
    model(tiny.ids(9).reshape(3, 3), cache=caches)
    recurrent = arrays_caches(caches)
    starts = [list(c.cache) for c in recurrent]
    with recorder.recording_batch(recurrent, 3, 4) as tapes:
        model(tiny.ids(12).reshape(3, 4), cache=caches)
    taken.clear()
    got = tapes[0].whole.replay_each(starts, kept)
    assert set(taken) == {4}
    for i, (tape, n) in enumerate(zip(tapes, kept, strict=True)):
        want = tape.replay([[x[i : i + 1] for x in slots] for slots in starts], n)
        for a, b in zip(chain(*got), chain(*want), strict=True):
            assert error(a[i : i + 1], b) < 2e-5


def test_states_inside_a_long_call_come_from_one_launch(taken, monkeypatch):
    """Guards: a prompt that is cut into launches, or states whose rows are miscounted."""

    def plain_stops(*args, stop_rows):
        data, state, states = args[:5], args[5], []
        for end in range(stop_rows, data[0].shape[1], stop_rows):
            states.append(gated_delta_ops(*(x[:, :end] for x in data), state)[1])
        return *gated_delta_ops(*data, state), states

    monkeypatch.setattr(kernels, "gated_delta_stops", plain_stops)
    model = armed("qwen3_next")
    recorder, caches = Recorder.arm(model), make_prompt_cache(model)
    recurrent = arrays_caches(caches)
    with recorder.recording(recurrent, inner_every=4) as tape:
        model(tiny.ids(10)[None], cache=caches)
    assert tape.inner_rows() == [4, 8]
    fresh = make_prompt_cache(model)
    model(tiny.ids(10)[None, :8], cache=fresh)
    starts = [[None] * len(c.cache) for c in recurrent]
    want = [x for c in arrays_caches(fresh) for x in c.cache]
    got = [x for slots in tape.replay(starts, 8) for x in slots]
    assert all(error(a, b) < 2e-5 for a, b in zip(got, want, strict=True))


def test_masked_rows_leave_the_state_alone(taken):
    """Guards: padding that moves a Mamba-2 state."""
    update = recurrences._as_kernel(ssm_update)
    x, A_log, B, C, D, dt, bias, state = ssd_inputs(6)
    mask = mx.arange(6)[None] >= 2
    y, after = update(x, A_log, B, C, D, dt, bias, state, mask=mask)
    parts = [a[:, 2:] for a in (x, B, C, dt)]
    want_y, want = ssm_attn(parts[0], A_log, *parts[1:3], D, parts[3], bias, state)
    assert error(y[:, 2:], want_y) < 1e-5 and error(after, want) < 1e-5


def ssd_inputs(n, heads=4, groups=2, dim=16, width=32, dtype=mx.float32):
    mx.random.seed(n)
    normal = mx.random.normal
    sizes = (1, n, heads, dim), (heads,), (1, n, groups, width), (1, n, groups, width), (heads,)
    given = [normal(size).astype(dtype) for size in sizes]
    state = normal((1, heads, dim, width))
    return *given, normal((1, n, heads)).astype(dtype), normal((heads,)).astype(dtype), state


def test_rows_of_unlike_shapes_are_joined_as_ever(on):
    """Guards: a kernel that takes every piece to be as long as the first."""
    pieces = [mx.full((1, n, 3), n) for n in (1, 2, 1, 1)]
    assert rows.joined(pieces).tolist() == mx.concatenate(pieces, axis=1).tolist()
    assert not rows.pays(pieces) and rows.pays([pieces[0]] * 4)


# --- on a card ----------------------------------------------------------------------------------


def delta_inputs(n, channels, heads=4, groups=2, dim=64, width=64, dtype=mx.float32):
    mx.random.seed(n)
    normal = mx.random.normal
    k = normal((1, n, groups, width))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    g = mx.sigmoid(normal((1, n, heads, width) if channels else (1, n, heads)))
    q, v = normal((1, n, groups, width)) / width, normal((1, n, heads, dim))
    beta = mx.sigmoid(normal((1, n, heads)))
    return (
        *(x.astype(dtype) for x in (q, k, v)),
        g,
        beta.astype(dtype),
        normal((1, heads, dim, width)),
    )


@needs_cuda
@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 5e-6), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("n", [1, 2, 9, 130])
def test_kernels_equal_the_loops(n, dtype, tolerance):
    """Guards: a line computed by the wrong threads, a row read too early."""
    for channels, width in ((False, 64), (True, 64), (False, 128)):
        args = delta_inputs(n, channels, width=width, dtype=dtype)
        close(kernels.gated_delta(*args), gated_delta_ops(*args), tolerance)
    x, A_log, B, C, D, dt, bias, state = ssd_inputs(n, dtype=dtype)
    used = compute_dt(dt, bias, (0.001, 100.0))
    want = ssm_attn(x, A_log, B, C, D, dt, bias, state)
    close(kernels.ssd(x, A_log, B, C, D, used, state), want, max(tolerance, 2e-5))
    args = [mx.random.normal((1, n, 3, 64)).astype(dtype) * 0.1 for _ in range(6)]
    state = mx.random.normal((1, 3, 64, 64)).astype(dtype)
    close(kernels.wkv7(*args, state), plain_wkv7(*args, state), max(tolerance, 2e-5))


def close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert error(a.astype(mx.float32), b.astype(mx.float32)) < tolerance


@needs_cuda
@pytest.mark.parametrize("n", [100, 128, 300, 384])
def test_states_at_stops_are_those_of_shorter_calls(n):
    """Guards: a state that goes out a row early or late, or a stop at the very end of a call."""
    args = delta_inputs(n, False)
    y, after, states = kernels.gated_delta_stops(*args, stop_rows=128)
    close((y, after), kernels.gated_delta(*args), 1e-6)
    ends = list(range(128, n, 128))
    assert len(states) == len(ends)
    for end, state in zip(ends, states, strict=True):
        head = (x[:, :end] for x in args[:5])
        assert error(state, kernels.gated_delta(*head, args[5])[1]) < 1e-6


@needs_cuda
def test_kernels_take_masks_new_states_and_several_sequences():
    """Guards: padding that moves a state, a state of None, a second sequence read as the first."""
    args = [mx.concatenate([x, x * 0.5]) for x in delta_inputs(9, False)]
    mask = mx.arange(9)[None] >= mx.array([0, 4])[:, None]
    got, want = kernels.gated_delta(*args, mask), gated_delta_ops(*args, mask)
    seen = mask[..., None, None]
    close([mx.where(seen, got[0], 0), got[1]], [mx.where(seen, want[0], 0), want[1]], 5e-6)
    close(kernels.gated_delta(*args[:5]), gated_delta_ops(*args[:5]), 5e-6)


@needs_cuda
@pytest.mark.parametrize("channels, dim", [(False, 64), (True, 64), (False, 2)])
def test_each_sequence_keeps_rows_of_its_own(channels, dim):
    """Guards: a state that goes out a row early or late, or after the rows of another sequence,
    which a warp may share."""
    kept = [1, 9, 4, 8, 2]
    for dtype in (mx.float32, mx.bfloat16):
        args = delta_inputs(9, channels, heads=2 if dim > 2 else 1, groups=1, dim=dim, dtype=dtype)
        args = [mx.concatenate([x * (1 + i) / 8 for i in range(5)]) for x in args]
        is_each(kernels.gated_delta, args, kept)
    x, A_log, B, C, D, dt, bias, state = ssd_inputs(9)
    dt = compute_dt(dt, bias, (0.001, 100.0))
    x, B, C, dt, state = (
        mx.concatenate([a * (1 + i) / 8 for i in range(5)]) for a in (x, B, C, dt, state)
    )
    is_each(kernels.ssd, [x, A_log, B, C, D, dt, state], kept)
    args = [mx.random.normal((5, 9, 3, 64)) * 0.1 for _ in range(6)]
    is_each(kernels.wkv7, [*args, mx.random.normal((5, 3, 64, 64))], kept)


def is_each(kernel, args, kept):
    """Whether each sequence's state is that of a call on its first rows."""
    _, got = kernel(*args, kept=mx.array(kept, mx.int32))
    for i, n in enumerate(kept):
        own = [x[i : i + 1, :n] if x.ndim > 1 else x for x in args[:-1]]
        assert error(got[i : i + 1], kernel(*own, args[-1][i : i + 1])[1]) < 1e-6


@needs_cuda
@pytest.mark.parametrize("calls", [(1,), (1,) * 31, (5, 1, 1, 8), (1,) * 33, (2,) * 70])
def test_a_state_is_read_from_the_pieces_where_they_stand(calls):
    """Guards: a piece that is left out, read twice, or taken for a row; more than one launch."""
    for channels, dtype in ((False, mx.float32), (True, mx.float32), (False, mx.bfloat16)):
        _, *data, state = delta_inputs(sum(calls), channels, dtype=dtype)
        ends = np.cumsum(calls)[:-1].tolist()
        pieces = list(zip(*(mx.split(x, ends, axis=1) for x in data), strict=True))
        _, want = kernels.gated_delta(data[0], *data, state)
        assert mx.array_equal(kernels.gated_delta_state(pieces, state), want)


@needs_cuda
@pytest.mark.parametrize("n", [3, 8, 9, 32, 70])
def test_rows_are_joined_in_order(n):
    """Guards: a piece that is left out, or named twice."""
    pieces = [mx.full((1, 1, 2, 100), i).astype(mx.bfloat16) for i in range(n)]
    assert rows.joined(pieces)[0, :, 0, 0].tolist() == list(range(n))


@needs_cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_models_and_replays_hold_on_a_card(name):
    """Guards: a kernel that a family calls with other shapes than these tests do."""
    model = armed(name)
    plain = stock(model)
    for n in (1, 8, 40):
        want, got = (m(tiny.ids(n)[None], cache=make_prompt_cache(m)) for m in (plain, model))
        assert error(got, want) < 1e-4
    recorder = Recorder.arm(model)
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).accepts


# --- lanes in an arena --------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["", "bf16"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads, groups, dim", [(4, 4, 64), (8, 2, 128), (4, 1, 256)])
def test_lanes_read_their_own_seats(heads, groups, dim, window, dtype):
    """Guards: a seat, a head or the last key taken wrongly; what others left behind is not read."""
    draw = iter(mx.random.split(mx.random.key(0), 3))
    q = mx.random.normal((3, heads, 1, dim), key=next(draw)).astype(dtype)
    k, v = (mx.random.normal((5, groups, 300, dim), key=next(draw)).astype(dtype) for _ in "kv")
    rows_, columns = mx.array([4, 0, 2]), mx.array([0, 299, 70])
    at, column = columns.reshape(-1, 1, 1, 1), mx.arange(300)
    seen = column <= at if window is None else (column <= at) & (column > at - window)
    kf, vf = (x[rows_].astype(mx.float32) for x in (k, v))
    expected = mx.fast.scaled_dot_product_attention(
        q.astype(mx.float32), kf, vf, scale=0.1, mask=seen
    )
    k[1], v[3], k[4, :, 1:] = mx.nan, mx.nan, mx.nan
    assert seats.fits(q, k, v)
    found = seats.attention(q, k, v, rows_, columns, 0.1, window)
    assert error(found.astype(mx.float32), expected) < (1e-2 if dtype == mx.bfloat16 else 2e-6)


def test_other_heads_than_the_kernel_knows_are_left_to_mlx(on):
    """Guards: a head whose parts cannot be loaded at once, keys and values of two kinds."""
    x = mx.zeros((2, 4, 1, 128))
    assert seats.fits(x, x, x)
    assert not seats.fits(x[..., :80], x[..., :80], x[..., :80])
    assert not seats.fits(x, x, x[..., :64]) and not seats.fits(x, x, x.astype(mx.float16))


# --- convolutions -------------------------------------------------------------------------------


def test_a_convolution_of_one_row_is_mlxs(on):
    """Guards: the kernel on one row of a token, whose one length is planned once."""
    conv = convolution(False)
    assert len(forms.use(nn.Sequential(conv))) == 1
    x = mx.random.normal((1, 4, 6))
    assert mx.array_equal(conv(x), nn.Conv1d.__call__(conv, x))


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 5, 6), (2, 40, 6), (1, 1300, 700)])
def test_depthwise_convolutions_are_mlx(shape, bias, dtype):
    """Guards: a row too few, a second sequence that begins in the first, a bias left out."""
    conv, x, want = beside_mlx(shape, bias, dtype)
    got = convolutions.depthwise(x, conv.weight, conv.get("bias"))
    assert got.shape == want.shape and got.dtype == dtype
    assert error(got, want) < (2e-6 if dtype == mx.float32 else 8e-3)
