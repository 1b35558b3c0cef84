"""Depthwise convolutions: the same function as MLX's, faster on a CPU."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ds4cli.hooks import convolutions


def convolution(bias, channels=6, size=4):
    conv = nn.Conv1d(channels, channels, size, groups=channels, bias=bias)
    if bias:
        conv.bias = mx.arange(channels) / 3
    return conv


def beside_mlx(shape, bias, dtype):
    """A convolution of so many channels, what it is asked for, and what MLX says."""
    conv = convolution(bias, shape[2])
    conv.set_dtype(dtype)
    x = mx.random.normal(shape).astype(dtype)
    return conv, x, nn.Conv1d.__call__(conv, x)


def test_only_convolutions_of_each_channel_alone_are_taken():
    """A form that computes something else than the convolution it is given to."""
    taken = convolution(False), convolution(True)
    left = [nn.Conv1d(6, 6, 4), nn.Conv1d(6, 6, 4, groups=3), nn.Conv1d(6, 12, 4, groups=6)]
    left += [nn.Conv1d(6, 6, 4, groups=6, **{k: 2}) for k in ("stride", "padding", "dilation")]
    for conv, count in [*((c, 1) for c in taken), *((c, 0) for c in left)]:
        assert len(convolutions.use(nn.Sequential(conv))) == count


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 4, 6), (2, 40, 6)])
def test_a_sum_of_products_is_the_convolution(shape, bias, dtype):
    """A row too few, a second sequence that begins in the first, a bias left out, another type."""
    conv, x, want = beside_mlx(shape, bias, dtype)
    swaps = convolutions.use(nn.Sequential(conv))
    got = conv(x)
    assert got.shape == want.shape and got.dtype == dtype
    assert mx.allclose(got, want, atol=1e-6 if dtype == mx.float32 else 3e-2)
    swaps.undo()
    assert type(conv) is nn.Conv1d


def test_a_weight_that_changes_is_the_one_that_counts():
    """Taps of a weight that was replaced, converted, or written into."""
    conv, x, _ = beside_mlx((2, 7, 6), False, mx.float32)
    convolutions.use(nn.Sequential(conv))
    conv(x)

    def is_right():
        want = nn.Conv1d.__call__(conv, x)
        return conv(x).dtype == want.dtype and mx.allclose(conv(x), want, atol=3e-2)

    conv.update({"weight": conv.weight * 2})
    assert is_right()
    conv.weight[0] = 5
    assert is_right()
    conv.set_dtype(mx.bfloat16)
    x = x.astype(mx.bfloat16)
    assert is_right()
