"""The gated delta rule in chunks and row by row: the same function as mlx-lm's loop over tokens,
faster."""

from __future__ import annotations

import mlx.core as mx
import pytest
import tiny
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops

from ds4cli.hooks import delta

pytestmark = pytest.mark.filterwarnings("error")


def inputs(rows, *, groups=2, heads=4, dim=32, channel=False, batch=1, decay=0.0, alike=0.5):
    """Random q, k, v, g, beta, state. decay: larger is stronger; alike: how much keys resemble."""
    mx.random.seed(rows)
    normal = mx.random.normal
    q = normal((batch, rows, groups, dim)) / dim
    k = normal((batch, rows, groups, dim)) * (1 - alike) + alike
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = normal((batch, rows, heads, dim))
    gates = (batch, rows, heads, dim) if channel else (batch, rows, heads)
    g = mx.exp(-mx.exp(normal(gates) * (1 + decay) - 2 + decay))
    beta = 2 * mx.sigmoid(normal((batch, rows, heads)))
    return q, k, v, g, beta, normal((batch, heads, dim, dim))


def error(a, b):
    return (mx.max(mx.abs(a - b)) / mx.max(mx.abs(b))).item()


def agree(args, mask=None, tolerance=2e-6):
    want_y, want = gated_delta_ops(*args, mask)
    few = args[0].shape[1] < 2 * delta.MIN_ROWS
    for form in (delta.chunked, delta.stepped) if few else (delta.chunked,):
        y, state = form(*args, mask)
        assert y.dtype == want_y.dtype and y.shape == want_y.shape and state.dtype == want.dtype
        if mask is not None:
            y, want_y = (mx.where(mask[..., None, None], o, 0) for o in (y, want_y))
        assert error(y, want_y) < tolerance
        assert error(state, want) < tolerance


@pytest.mark.parametrize("channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 31, 32, 33, 100])
def test_equals_the_loop(rows, channel):
    """A chunk boundary, a padded last chunk or a grouped head computed wrongly."""
    agree(inputs(rows, channel=channel))


@pytest.mark.parametrize("channel", [False, True], ids=["per head", "per channel"])
def test_strong_decay_neither_overflows_nor_loses_what_follows_it(channel):
    """Quotients of decays (0 / 0), or sums of logs in which a mild decay drowns."""
    q, k, v, g, beta, state = inputs(70, channel=channel, decay=2.5)
    assert mx.min(g).item() == 0
    agree((q, k, v, g, beta, state))
    g[:, 5:20] = 0
    agree((q, k, v, g, beta, state))


@pytest.mark.parametrize("channel", [False, True], ids=["per head", "per channel"])
def test_equal_keys_stay_accurate(channel):
    """An inverse by powers of a matrix, which explode where keys repeat (a repeated token)."""
    q, k, v, _, beta, state = inputs(64, channel=channel)
    k = mx.broadcast_to(k[:, :1], k.shape)
    agree((q, k, v, mx.ones_like(inputs(64, channel=channel)[3]), beta, state), tolerance=1e-5)


@pytest.mark.parametrize("channel", [False, True], ids=["per head", "per channel"])
def test_new_state_batches_and_masks(channel):
    """A state of None, a second sequence, or padding rows that move the state."""
    for rows in (5, 40):
        args = inputs(rows, channel=channel, batch=3)
        agree((*args[:5], None))
        mask = mx.arange(rows)[None] >= mx.array([0, 2, rows - 1])[:, None]
        agree(args, mask)


def test_final_state_is_the_state_of_the_full_rule():
    """The replay's shorter path computing another state."""
    for channel in (False, True):
        args = inputs(50, channel=channel)
        assert error(delta.final_state(*args[1:]), gated_delta_ops(*args)[1]) < 2e-6


def test_half_precision_keeps_a_float32_state():
    """A state that loses its digits because the rows are bfloat16."""
    for rows, form in ((40, delta.chunked), (1, delta.stepped)):
        args = inputs(rows)
        low = [x.astype(mx.bfloat16) for x in args[:3]]
        y, state = form(*low, *args[3:])
        want_y, want = gated_delta_ops(*low, *args[3:])
        assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
        assert error(state, want) < 2e-6 and error(y, want_y) < 1e-2


def test_inverse_by_products_equals_the_solver():
    """GPUs without mlx-lm's kernel take another path to the inverse than the CPU."""
    for size in (1, 2, 7, 32):
        A = mx.tril(mx.random.normal((3, size, size)), -1) / 4
        want = mx.linalg.inv(A + mx.eye(size), stream=mx.cpu)
        assert mx.allclose(delta._merge_inverse(A, mx.eye(size), size), want, rtol=1e-4, atol=1e-4)


class _Counter:
    """Counts the calls of `delta.chunked` and `delta.stepped`, by their rows."""

    def __init__(self, monkeypatch):
        self.rows, self.few = [], []
        for name, rows in (("chunked", self.rows), ("stepped", self.few)):
            monkeypatch.setattr(delta, name, self._counted(getattr(delta, name), rows))

    def _counted(self, form, rows):
        def counted(q, *args):
            rows.append(q.shape[1])
            return form(q, *args)

        return counted


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "kimi_k3"])
def test_the_switch_keeps_the_model_and_is_undone(name, monkeypatch):
    """Calls that drift from mlx-lm's, or run its loop after all, and a switch that stays."""
    model, other = tiny.build(name), tiny.build(name)
    tokens, next_token = tiny.ids(40)[None], tiny.ids(1, 2)[None]

    def run(model):
        caches = make_prompt_cache(model)
        return model(tokens, cache=caches), model(next_token, cache=caches)

    want = run(model)
    counter = _Counter(monkeypatch)
    swaps = delta.use(model)
    got = run(model)
    assert (counter.rows, counter.few) == ([40] * 3, [1] * 3)
    assert len(swaps) == 3
    assert all(mx.allclose(a, b, atol=2e-5) for a, b in zip(got, want, strict=True))
    run(other)
    swaps.undo()
    run(model)
    assert counter.rows == [40] * 3


def test_the_switch_is_off_where_there_is_a_kernel(monkeypatch):
    """Plain operations in place of mlx-lm's Metal kernel on a Mac."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    model = tiny.build("qwen3_5")
    assert delta.has_kernel()
    assert len(delta.use(model)) == 0


def test_recording_a_switched_model(monkeypatch):
    """The recorder and the switch wrapping one function, and one of them lost."""
    from ds4cli.tape.check import self_check
    from ds4cli.tape.recorder import Recorder

    model = tiny.build("qwen3_5")
    counter = _Counter(monkeypatch)
    delta.use(model)
    recorder = Recorder.arm(model)
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).difference < 0.5
    assert counter.rows == [4] * 3
