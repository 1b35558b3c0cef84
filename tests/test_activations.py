"""silu as a polynomial: the same function as MLX's, faster on a CPU."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextMLP

from ds4cli.hooks import activations


class Gate(nn.Module):
    """Uses `nn.silu`, as a recurrence does behind its convolution."""

    def __call__(self, x):
        return nn.silu(x) + nn.relu(x)


VALUES = [x / 7 for x in range(-700, 701)]


def exact(x):
    return x / (1 + math.exp(-x))


def test_it_is_as_exact_as_mlxs():
    """A term too few is a model that is a little another one."""
    x = mx.array(VALUES * 4)
    assert x.size >= activations.MIN_SIZE
    want = [exact(float(v)) for v in x.tolist()]
    ones = mx.ones_like(x)
    for silu in (nn.silu, activations.silu, lambda x: activations.swiglu(x, ones)):
        assert silu(x).tolist() == pytest.approx(want, rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("n", [-126, -1, 0, 1, 127])
def test_whole_powers_are_exact(n):
    assert activations.power_of_two(mx.array([float(n)])).item() == 2.0**n


def test_no_number_stays_none_and_no_other_becomes_one():
    """A row that is no number has to be seen as that; a large one is not to become one."""
    odd = mx.array([math.nan, math.inf, 3e38, -1e4, -3e38, 0.0] * 1000)
    got = activations.silu(odd).tolist()[:6]
    assert math.isnan(got[0]) and got[1] == math.inf and got[5] == 0
    assert got[2] == pytest.approx(3e38) and all(abs(x) < 3 for x in got[3:5])


@pytest.fixture
def large(monkeypatch):
    """Notes what was large enough for the polynomial, as it is compiled."""
    found, own = [], activations.power_of_two
    monkeypatch.setattr(activations, "power_of_two", lambda x: found.append(x.shape) or own(x))
    return found


def test_modules_use_it_and_their_classes_do_not(large):
    """Another model, or another instance of the class, got our form; or ours kept MLX's."""
    mlp, other, gate = Qwen3NextMLP(8, 16), Qwen3NextMLP(8, 16), Gate()
    model, x = nn.Sequential(mlp, gate, nn.Linear(8, 8)), mx.random.normal((1, 611, 8))
    want = mlp(x), gate(x)
    swaps = activations.use(model)
    assert len(swaps) == 2 and type(mlp).__name__ == "Qwen3NextMLP"
    got = mlp(x), gate(x)
    assert large == [(1, 611, 16), (1, 611, 8)]
    assert all(mx.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want, strict=True))
    assert type(other) is Qwen3NextMLP and other(x).shape == x.shape
    assert mx.array_equal(mlp(x[:, :1]), other.update(mlp.parameters())(x[:, :1])), "one row"
    for module in (mlp, gate):
        module.set_dtype(mx.bfloat16)
        assert module(x.astype(mx.bfloat16)).dtype == mx.bfloat16, "half precision"
    assert len(large) == 2
    swaps.undo()
    assert type(mlp) is Qwen3NextMLP and type(gate) is Gate


def test_other_devices_keep_their_own(monkeypatch):
    """Two kernels in place of one on a GPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert len(activations.use(nn.Sequential(Gate(), Qwen3NextMLP(8, 16)))) == 0
