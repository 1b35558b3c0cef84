"""Depthwise convolutions, the short ones in front of recurrences, in a form that is fast here.

MLX plans a convolution anew for every length on CUDA, where a kernel is in its place. On a CPU it
takes three to eight times as long as the products of its shifted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.cuda import convolutions, switch
from ds4cli.hooks.rebind import Swaps, derived

# On CUDA, from so many rows on. One row is one length.
MIN_ROWS = 2


def use(model: nn.Module) -> Swaps:
    """Let this model's depthwise convolutions use that form; call it before `Recorder.arm`."""
    swaps = Swaps()
    on_cuda = switch.is_on()
    if on_cuda or mx.default_device() == mx.cpu:
        cls = _with_kernel() if on_cuda else _with_products()
        for module in model.modules():
            if type(module) is nn.Conv1d and _is_plain(module):
                swaps.swap(module, cls)
    return swaps


def _is_plain(conv: nn.Conv1d) -> bool:
    """Whether each channel is on its own, and every place is taken."""
    plain = (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)
    return plain and conv.groups == conv.weight.shape[0] and conv.weight.shape[2] == 1


@cache
def _with_kernel() -> type:
    call = nn.Conv1d.__call__

    def __call__(self, x):
        if x.shape[1] - self.weight.shape[1] + 1 < MIN_ROWS:
            return call(self, x)
        return convolutions.depthwise(x, self.weight, self.get("bias"))

    return derived(nn.Conv1d, __call__)


@cache
def _with_products() -> type:
    def __call__(self, x):
        return by_products(x, self.weight, self.get("bias"))

    return derived(nn.Conv1d, __call__)


def by_products(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """y (B, T, C): y[b, t, c] = bias[c] + sum over k of x[b, t + k, c] weight[c, k, 0].

    A split is one node of the graph, and so many slices are as many. Taps that are kept would be
    two nodes less, and the old ones where somebody writes into the weight.
    """
    size = weight.shape[1]
    rows = x.shape[1] - size + 1
    shifted = [*mx.split(x, size, 1)] if rows == 1 else [x[:, k : k + rows] for k in range(size)]
    return _summed(shifted, [*mx.split(weight.T, size, 1)], bias)


@partial(mx.compile, shapeless=True)
def _summed(
    shifted: Sequence[mx.array], taps: Sequence[mx.array], bias: mx.array | None
) -> mx.array:
    total = mx.array(0.0) if bias is None else bias.astype(mx.float32)
    for x, w in zip(shifted, taps, strict=True):
        total = total + x.astype(mx.float32) * w.astype(mx.float32)
    return total.astype(shifted[0].dtype)
