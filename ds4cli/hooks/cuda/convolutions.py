"""Depthwise convolutions as one kernel, for all lengths. `ds4cli.hooks.convolutions` chooses."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ds4cli.hooks.cuda import compiler

THREADS = 256


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
