"""Attention of one row a lane over an arena, as one kernel.

mlx-lm's own form with a mask is three kernels and two products, and on a fast card a step of many
lanes waits for the host that launches them. Here a block has one head of one lane; LANES threads
beside each other score a key, and every lane reads as many keys as it has.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ds4cli.hooks.cuda import compiler, switch

LANES = 8
THREADS = 256
# Elements of a head: what LANES threads load 16 bytes at a time, up to what fits shared memory.
HEAD_STEP, MAX_HEAD = 64, 256

_BODY = """
  const float NOTHING = __int_as_float(0xff800000);  // minus infinity
  constexpr int N = WIDTH / LANES, GROUPS = THREADS / LANES, PIECE = 16 / sizeof(KIND);
  __shared__ float tops[GROUPS], sums[GROUPS], parts[GROUPS * WIDTH];
  auto load = [](const KIND* from, float* x) {
    for (int i = 0; i < N / PIECE; ++i) {
      const uint4 raw = ((const uint4*)from)[i];
      const KIND* piece = (const KIND*)&raw;
      for (int j = 0; j < PIECE; ++j) x[i * PIECE + j] = number(piece[j]);
    }
  };
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const int h = blockIdx.x % H, n = blockIdx.x / H;
  const int last = columns[n], first = window > 0 && last >= window ? last - window + 1 : 0;
  const long long base = ((long long)rows[n] * G + h / (H / G)) * length;
  const unsigned mine = 0xffu << (threadIdx.x % 32 / LANES * LANES);
  float q1[N], k1[N], out[N], top = NOTHING, sum = 0.f;
  load(q + (long long)blockIdx.x * WIDTH + lane * N, q1);
  for (int i = 0; i < N; ++i) out[i] = 0.f;
  for (int j = first + group; j <= last; j += GROUPS) {
    const long long at = (base + j) * WIDTH + lane * N;
    float score = 0.f;
    load(k + at, k1);
    for (int i = 0; i < N; ++i) score += q1[i] * k1[i];
    for (int o = LANES / 2; o; o >>= 1) score += __shfl_xor_sync(mine, score, o);
    score *= SCALE;
    const float above = fmaxf(top, score), kept = expf(top - above), weight = expf(score - above);
    load(v + at, k1);
    for (int i = 0; i < N; ++i) out[i] = out[i] * kept + weight * k1[i];
    sum = sum * kept + weight;
    top = above;
  }
  if (lane == 0) { tops[group] = top; sums[group] = sum; }
  for (int i = 0; i < N; ++i) parts[group * WIDTH + lane * N + i] = out[i];
  __syncthreads();
  float highest = NOTHING, total = 0.f;
  for (int g = 0; g < GROUPS; ++g) highest = fmaxf(highest, tops[g]);
  for (int g = 0; g < GROUPS; ++g) total += sums[g] * expf(tops[g] - highest);
  for (int d = threadIdx.x; d < WIDTH; d += THREADS) {
    float x = 0.f;
    for (int g = 0; g < GROUPS; ++g) x += parts[g * WIDTH + d] * expf(tops[g] - highest);
    put(y[(long long)blockIdx.x * WIDTH + d], x / total);
  }
"""


def fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel can do it: queries (N, H, 1, D), keys and values of an arena."""
    dim, kind = queries.shape[-1], queries.dtype
    alike = keys.dtype == values.dtype == kind and keys.shape == values.shape
    return switch.is_on() and alike and dim % HEAD_STEP == 0 and dim <= MAX_HEAD


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: mx.array,
    columns: mx.array,
    scale: float,
    window: int | None,
) -> mx.array:
    """(N, H, 1, D). keys, values: (height, G, length, D), whole. rows, columns (N,) int32: where
    each query's lane sits, and its position: it sees what stands up to there, or the last `window`
    of that."""
    lanes, heads, _, dim = queries.shape
    groups, length = keys.shape[1:3]
    (y,) = mx.fast.precompiled_cuda_kernel(
        name="seats",
        compiled_source=_compiled(heads, groups, dim, queries.dtype, scale),
        inputs=[queries, keys, values, rows, columns],
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
        scalars=[length, window or 0],
        grid=(lanes * heads * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    return y


@cache
def _compiled(heads: int, groups: int, dim: int, dtype: mx.Dtype, scale: float) -> bytes:
    sizes = {"H": heads, "G": groups, "WIDTH": dim, "LANES": LANES, "THREADS": THREADS}
    head = "".join(f"constexpr int {name} = {value}; " for name, value in sizes.items())
    kind = compiler.TYPES[dtype]
    head += f"constexpr float SCALE = {scale!r}f; using KIND = {kind};"
    inputs = [f"{kind} q", f"{kind} k", f"{kind} v", "int rows", "int columns"]
    return compiler.kernel("seats", inputs, [f"{kind} y"], ("length", "window"), head + _BODY)
