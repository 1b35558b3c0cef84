"""Recurrences as one kernel each: all rows of a call, the state in registers.

A *line* is one row of a state matrix: LANES neighbouring threads hold its elements and add up what
the whole line needs with shuffles. Rows of a call follow one another inside the kernel, so a line
never waits for another. Numbers of rows and of sequences come with the inputs' shapes, not as
template arguments: each set of those is compiled once more, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

LANES = 8
THREADS = 128

_LINE = """
  constexpr int N = WIDTH / LANES;
  const int lane = threadIdx.x % LANES;
  const int wanted = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int T = v_shape[1], lines = v_shape[0] * H * D;
  const int line = wanted < lines ? wanted : lines - 1;  // no thread leaves before the shuffles
  const int d = line % D, h = (line / D) % H, group = h / (H / G);
  const long first = (long)(line / (D * H)) * T;
  auto total = [](float x) {
    for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
  };
  float s[N];
  for (int i = 0; i < N; ++i) s[i] = (float)state_in[(long)line * WIDTH + lane * N + i];
"""
_END = """
  if (wanted < lines)
    for (int i = 0; i < N; ++i) state_out[(long)line * WIDTH + lane * N + i] = (TS)s[i];
"""

# S_t = S_{t-1} diag(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  y_t = S_t q_t
_DELTA = """
  float k1[N], q1[N], g1[N], v1, b1;
  auto load = [&](int t) {
    const long row = first + t, kq = (row * G + group) * WIDTH + lane * N;
    for (int i = 0; i < N; ++i) { k1[i] = (float)k[kq + i]; q1[i] = (float)q[kq + i]; }
    for (int i = 0; i < (CHANNELS ? N : 1); ++i)
      g1[i] = (float)g[CHANNELS ? (row * H + h) * WIDTH + lane * N + i : row * H + h];
    v1 = (float)v[(row * H + h) * D + d];
    b1 = (float)beta[row * H + h];
  };
  load(0);
  for (int t = 0; t < T; ++t) {
    float kt[N], qt[N], known = 0.f, out = 0.f;
    for (int i = 0; i < N; ++i) {
      kt[i] = k1[i]; qt[i] = q1[i];
      s[i] *= g1[CHANNELS ? i : 0];
      known += s[i] * kt[i];
    }
    const float vt = v1, bt = b1;
    if (t + 1 < T) load(t + 1);  // on its way while this row is computed
    const float update = (vt - total(known)) * bt;
    for (int i = 0; i < N; ++i) { s[i] += kt[i] * update; out += s[i] * qt[i]; }
    out = total(out);
    if (lane == 0 && wanted < lines) y[((first + t) * H + h) * D + d] = (TY)out;
  }
"""

# S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t;  v is x
_SSD = """
  const float A = -expf((float)A_log[h]), through = (float)D_skip[h];
  for (int t = 0; t < T; ++t) {
    const long row = first + t, bc = (row * G + group) * WIDTH + lane * N;
    const float dt = steps[row * H + h], x = (float)v[(row * H + h) * D + d];
    const float decay = expf(A * dt), added = dt * x;
    float out = 0.f;
    for (int i = 0; i < N; ++i) {
      s[i] = decay * s[i] + added * (float)B[bc + i];
      out += s[i] * (float)C[bc + i];
    }
    out = total(out);
    if (lane == 0 && wanted < lines) y[(row * H + h) * D + d] = (TY)(out + through * x);
  }
"""

# S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T,  y_t = S_t r_t
_WKV = """
  for (int t = 0; t < T; ++t) {
    const long row = ((first + t) * H + h) * WIDTH, at = row + lane * N;
    float known = 0.f, out = 0.f;
    for (int i = 0; i < N; ++i) known += s[i] * (float)a[at + i];
    known = total(known);
    const float vt = (float)v[row + d];
    for (int i = 0; i < N; ++i) {
      s[i] = s[i] * (float)w[at + i] + known * (float)b[at + i] + vt * (float)k[at + i];
      out += s[i] * (float)r[at + i];
    }
    out = total(out);
    if (lane == 0 && wanted < lines) y[row + d] = (TY)out;
  }
"""


def fits(width: int) -> bool:
    """Whether the kernels can do lines of so many elements. They win at any number of rows."""
    return width % LANES == 0 and width <= 32 * LANES


def gated_delta(q, k, v, g, beta, state=None, mask=None):
    """What mlx-lm's `gated_delta_ops` computes; arguments as for `ds4cli.hooks.delta.chunked`."""
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0)
        g = mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1)
    heads, dim = v.shape[2:]
    groups, width = k.shape[2:]
    if state is None:
        state = mx.zeros((v.shape[0], heads, dim, width), mx.float32)
    sizes = {"H": heads, "G": groups, "D": dim, "WIDTH": width, "CHANNELS": g.ndim == 4}
    return _run(_delta(), [q, k, v, g, beta, state], sizes, v.shape, q.dtype, mx.float32)


def ssd(x, A_log, B, C, D, dt, state=None):
    """Mamba-2's recurrence, as mlx-lm's `ssm_attn`: outputs and the state after all rows.

    x (B, T, H, D), A_log, D (H,), B, C (B, T, G, N), dt (B, T, H) float32, as used (after its bias,
    softplus and limits), state (B, H, D, N).
    """
    heads, dim = x.shape[2:]
    groups, width = B.shape[2:]
    if state is None:
        state = mx.zeros((x.shape[0], heads, dim, width), mx.float32)
    sizes = {"H": heads, "G": groups, "D": dim, "WIDTH": width}
    dtype = x.dtype if D.dtype == x.dtype else mx.float32
    inputs = [x, A_log, B, C, D, dt, state]
    return _run(_ssd(), inputs, sizes, x.shape, dtype, state.dtype)


def wkv7(r, w, k, v, a, b, state):
    """RWKV-7's recurrence; all (B, T, H, D), state (B, H, D, D)."""
    heads, dim = v.shape[2:]
    sizes = {"H": heads, "G": heads, "D": dim, "WIDTH": dim}
    return _run(_wkv(), [r, w, k, v, a, b, state], sizes, v.shape, r.dtype, state.dtype)


@cache
def _delta():
    return _kernel("gated_delta", ["q", "k", "v", "g", "beta", "state_in"], _DELTA)


@cache
def _ssd():
    return _kernel("ssd", ["v", "A_log", "B", "C", "D_skip", "steps", "state_in"], _SSD)


@cache
def _wkv():
    return _kernel("wkv7", ["r", "w", "k", "v", "a", "b", "state_in"], _WKV)


def _kernel(name: str, inputs: list[str], rows: str):
    return mx.fast.cuda_kernel(
        name=f"ds4cli_{name}",
        input_names=inputs,
        output_names=["y", "state_out"],
        source=_LINE + rows + _END,
    )


def _run(
    kernel,
    inputs: Sequence[mx.array],
    sizes: dict[str, int],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    state_dtype: mx.Dtype,
) -> tuple[mx.array, mx.array]:
    """Outputs of `shape`, and the state."""
    state = inputs[-1]
    threads = state.size // sizes["WIDTH"] * LANES
    y, after = kernel(
        inputs=inputs,
        template=[("TY", dtype), ("TS", state_dtype), ("LANES", LANES), *sizes.items()],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape, state.shape],
        output_dtypes=[dtype, state_dtype],
    )
    return y, after
