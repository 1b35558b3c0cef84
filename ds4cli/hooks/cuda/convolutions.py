"""Depthwise convolutions as one kernel.

MLX plans a convolution anew for every length on CUDA, and prompts are of all lengths.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.cuda import compiler, switch
from ds4cli.hooks.rebind import Swaps, derived

# From so many rows on. One row is one length.
MIN_ROWS = 2
THREADS = 256


def use(model: nn.Module) -> Swaps:
    """Let this model's depthwise convolutions use the kernel; call it before `Recorder.arm`."""
    swaps = Swaps()
    if switch.is_on():
        for module in model.modules():
            if type(module) is nn.Conv1d and _is_plain(module):
                swaps.swap(module, _with_kernel(nn.Conv1d))
    return swaps


def _is_plain(conv: nn.Conv1d) -> bool:
    """Whether each channel is on its own, and every place is taken."""
    plain = (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)
    return plain and conv.groups == conv.weight.shape[0] and conv.weight.shape[2] == 1


@cache
def _with_kernel(cls: type) -> type:
    call = cls.__call__

    def __call__(self, x):
        if x.shape[1] - self.weight.shape[1] + 1 < MIN_ROWS:
            return call(self, x)
        return depthwise(x, self.weight, self.get("bias"))

    return derived(cls, __call__)


def depthwise(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """y (B, T, C): y[b, t, c] = bias[c] + sum over k of x[b, t + k, c] weight[c, k, 0]."""
    batch, length, channels = x.shape
    size = weight.shape[1]
    rows, inputs = length - size + 1, [x, weight] if bias is None else [x, weight, bias]
    (y,) = mx.fast.precompiled_cuda_kernel(
        name="depthwise",
        compiled_source=_compiled(size, tuple(a.dtype for a in inputs)),
        inputs=inputs,
        output_shapes=[(batch, rows, channels)],
        output_dtypes=[x.dtype],
        scalars=[batch, rows, channels],
        grid=(-(-batch * rows * channels // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    return y


@cache
def _compiled(size: int, dtypes: tuple[mx.Dtype, ...]) -> bytes:
    types = [compiler.TYPES[t] for t in dtypes]
    inputs = [f"{t} {n}" for t, n in zip(types, ("x", "weight", "bias"), strict=False)]
    start = "number(bias[c])" if len(types) > 2 else "0.f"
    body = f"""
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x, row = at / channels;
  if (row >= batch * rows) return;
  const unsigned c = at % channels;
  const long long first = row + row / rows * ({size} - 1);  // in x
  float sum = {start};
  for (int k = 0; k < {size}; ++k)
    sum += number(x[(first + k) * channels + c]) * number(weight[c * {size} + k]);
  put(y[at], sum);
"""
    scalars = "batch", "rows", "channels"
    return compiler.kernel("depthwise", inputs, [f"{types[0]} y"], scalars, body)
