"""Recurrences as one kernel each: all rows of a call, the state in registers.

A *line* is one row of a state matrix: LANES neighbouring threads hold its elements and add up what
the whole line needs with shuffles. Rows of a call follow one another inside the kernel, so a line
never waits for another. The number of rows is an argument: each set of sizes is compiled once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import mlx.core as mx

from ds4cli.hooks.cuda import compiler

LANES = 8
THREADS = 128

_LINE = """
  constexpr int N = WIDTH / LANES;
  const int lane = threadIdx.x % LANES;
  const int wanted = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int line = wanted < lines ? wanted : lines - 1;  // no thread leaves before the shuffles
  const int d = line % D, h = (line / D) % H, group = h / (H / G);
  const long long first = (long long)(line / (D * H)) * T;
  auto total = [](float x) {
    for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
  };
  float s[N];
  for (int i = 0; i < N; ++i) s[i] = number(state_in[(long long)line * WIDTH + lane * N + i]);
"""
_END = """
  if (wanted < lines)
    for (int i = 0; i < N; ++i) put(state_out[(long long)line * WIDTH + lane * N + i], s[i]);
"""

# S_t = S_{t-1} diag(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  y_t = S_t q_t
_DELTA = """
  float k1[N], q1[N], g1[N], v1, b1;
  auto load = [&](int t) {
    const long long row = first + t, kq = (row * G + group) * WIDTH + lane * N;
    for (int i = 0; i < N; ++i) { k1[i] = number(k[kq + i]); q1[i] = number(q[kq + i]); }
    for (int i = 0; i < (CHANNELS ? N : 1); ++i)
      g1[i] = number(g[CHANNELS ? (row * H + h) * WIDTH + lane * N + i : row * H + h]);
    v1 = number(v[(row * H + h) * D + d]);
    b1 = number(beta[row * H + h]);
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
    if (lane == 0 && wanted < lines) put(y[((first + t) * H + h) * D + d], out);
    keep(t + 1);
  }
"""

# The same state, without outputs, from rows that stand in many short arrays. A block has lines of
# one head: all that they need of TILE rows goes into shared memory at once, so that a row waits for
# no other row's loads.
_DELTA_PIECES = """
  constexpr int N = WIDTH / LANES, LINES = THREADS / LANES, GATES = CHANNELS ? WIDTH : 1;
  constexpr int BLOCKS = (D + LINES - 1) / LINES;  // of a head
  __shared__ int starts[PIECES + 1];
  __shared__ float ks[TILE][WIDTH], vs[TILE][LINES], gs[TILE][GATES], betas[TILE];
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES;
  const int h = blockIdx.x / BLOCKS, first = blockIdx.x % BLOCKS * LINES, group = h / (H / G);
  const int wanted = first + own, d = wanted < D ? wanted : D - 1;  // no thread leaves the shuffles
  const long long at = ((long long)h * D + d) * WIDTH + lane * N;
  auto total = [](float x) {
    for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
  };
  float s[N];
  for (int i = 0; i < N; ++i) s[i] = number(state_in[at + i]);
  if (threadIdx.x == 0)
    for (int i = 0, row = 0; i <= PIECES; row += i < PIECES ? counts[i] : 0, ++i) starts[i] = row;
  __syncthreads();
  const int rows = starts[PIECES];
  for (int begin = 0; begin < rows; begin += TILE) {
    const int tile = rows - begin < TILE ? rows - begin : TILE;
    for (int r = threadIdx.x / 32; r < tile; r += THREADS / 32) {  // a warp for each row
      int p = 0;
      for (int size = PIECES / 2; size; size /= 2) if (starts[p + size] <= begin + r) p += size;
      const long long t = begin + r - starts[p];
      for (int i = threadIdx.x % 32; i < WIDTH; i += 32)
        ks[r][i] = number(k[p][(t * G + group) * WIDTH + i]);
      for (int i = threadIdx.x % 32; i < LINES; i += 32)
        vs[r][i] = number(v[p][(t * H + h) * D + (first + i < D ? first + i : D - 1)]);
      for (int i = threadIdx.x % 32; i < GATES; i += 32)
        gs[r][i] = number(g[p][(t * H + h) * GATES + i]);
      if (threadIdx.x % 32 == 0) betas[r] = number(beta[p][t * H + h]);
    }
    __syncthreads();
    for (int r = 0; r < tile; ++r) {
      float kt[N], known = 0.f;
      for (int i = 0; i < N; ++i) {
        kt[i] = ks[r][lane * N + i];
        s[i] *= gs[r][CHANNELS ? lane * N + i : 0];
        known += s[i] * kt[i];
      }
      const float update = (vs[r][own] - total(known)) * betas[r];
      for (int i = 0; i < N; ++i) s[i] += kt[i] * update;
    }
    __syncthreads();
  }
  if (wanted < D)
    for (int i = 0; i < N; ++i) put(state_out[at + i], s[i]);
"""

# S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t
_SSD = """
  const float A = -expf(number(A_log[h])), through = number(skip[h]);
  for (int t = 0; t < T; ++t) {
    const long long row = first + t, bc = (row * G + group) * WIDTH + lane * N;
    const float dt = number(steps[row * H + h]), xt = number(x[(row * H + h) * D + d]);
    const float decay = expf(A * dt), added = dt * xt;
    float out = 0.f;
    for (int i = 0; i < N; ++i) {
      s[i] = decay * s[i] + added * number(B[bc + i]);
      out += s[i] * number(C[bc + i]);
    }
    out = total(out);
    if (lane == 0 && wanted < lines) put(y[(row * H + h) * D + d], out + through * xt);
    keep(t + 1);
  }
"""

# S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T,  y_t = S_t r_t
_WKV = """
  for (int t = 0; t < T; ++t) {
    const long long row = ((first + t) * H + h) * WIDTH, at = row + lane * N;
    float known = 0.f, out = 0.f;
    for (int i = 0; i < N; ++i) known += s[i] * number(a[at + i]);
    known = total(known);
    const float vt = number(v[row + d]);
    for (int i = 0; i < N; ++i) {
      s[i] = s[i] * number(w[at + i]) + known * number(b[at + i]) + vt * number(k[at + i]);
      out += s[i] * number(r[at + i]);
    }
    out = total(out);
    if (lane == 0 && wanted < lines) put(y[row + d], out);
    keep(t + 1);
  }
"""
# After every so many rows but the last, the state goes out.
_KEEP = """
  auto keep = [&](int done) {{
    if (done % {stop_rows} != 0 || done >= T || wanted >= lines) return;
    {state}* const stops[] = {{{names}}};
    {state}* const to = stops[done / {stop_rows} - 1] + (long long)line * WIDTH + lane * N;
    for (int i = 0; i < N; ++i) put(to[i], s[i]);
  }};
"""
_KEEP_NONE = "auto keep = [](int) {};"
# The state goes out after the rows that its sequence keeps; those behind them lead nowhere.
_KEEP_EACH = """
  const int own = kept[line / (D * H)];
  auto keep = [&](int done) {
    if (done != own || wanted >= lines) return;
    for (int i = 0; i < N; ++i) put(state_out[(long long)line * WIDTH + lane * N + i], s[i]);
  };
"""
_BODIES = {
    "gated_delta": (("q", "k", "v", "g", "beta", "state_in"), _DELTA),
    "ssd": (("x", "A_log", "B", "C", "skip", "steps", "state_in"), _SSD),
    "wkv7": (("r", "w", "k", "v", "a", "b", "state_in"), _WKV),
}


# Pieces of one launch of `gated_delta_state`: where there are fewer, the last is named again with
# no rows. One number for all, so that MLX knows the CUDA graph of a replay from the one before.
PIECES = 32
# Rows that stand in shared memory at once, at most, and numbers of their keys and gates.
TILE, TILE_NUMBERS = 32, 8192


def fits(width: int) -> bool:
    """Whether the kernels can do lines of so many elements. They win at any number of rows."""
    return width % LANES == 0 and width <= 32 * LANES


def gated_delta(q, k, v, g, beta, state=None, mask=None, kept=None):
    """What mlx-lm's `gated_delta_ops` computes; arguments as for `ds4cli.hooks.delta.chunked`.

    kept: for the state of each sequence after so many rows of it, int32 (B,), 1 .. T.
    """
    y, after, _ = gated_delta_stops(q, k, v, g, beta, state, mask, kept=kept)
    return y, after


def gated_delta_stops(q, k, v, g, beta, state=None, mask=None, stop_rows=0, kept=None):
    """The same, and the states after every `stop_rows` rows before the last (0: none)."""
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0)
        g = mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1)
    rows, heads, dim = v.shape[1:]
    groups, width = k.shape[2:]
    if state is None:
        state = mx.zeros((v.shape[0], heads, dim, width), mx.float32)
    sizes = (heads, groups, dim, width, int(g.ndim == 4))
    inputs, stops = [q, k, v, g, beta, state], (rows - 1) // stop_rows if stop_rows else 0
    y, after, *states = _run(
        "gated_delta", inputs, sizes, v.shape, q.dtype, mx.float32, (stops, stop_rows), kept
    )
    return y, after, states


def gated_delta_state(
    pieces: Sequence[tuple[mx.array, ...]], state: mx.array | None = None
) -> mx.array:
    """The state after all rows of consecutive pieces, each k, v, g, beta as for `gated_delta` with
    batch 1. Nothing is joined: a launch reads up to PIECES pieces where they stand."""
    k, v, g, _ = pieces[0]
    (heads, dim), (groups, width) = v.shape[2:], k.shape[2:]
    if state is None:
        state = mx.zeros((1, heads, dim, width), mx.float32)
    sizes = (heads, groups, dim, width, int(g.ndim == 4))
    for i in range(0, len(pieces), PIECES):
        state = _state_after(pieces[i : i + PIECES], state, sizes)
    return state


def _state_after(
    pieces: Sequence[tuple[mx.array, ...]], state: mx.array, sizes: tuple[int, ...]
) -> mx.array:
    missing = PIECES - len(pieces)
    counts = [piece[0].shape[1] for piece in pieces] + [0] * missing
    columns = zip(*pieces, *[pieces[-1]] * missing, strict=True)
    dtypes = tuple(x.dtype for x in (*pieces[0], state))
    (after,) = mx.fast.precompiled_cuda_kernel(
        name="gated_delta_state",
        compiled_source=_compiled_pieces(sizes, dtypes),
        inputs=[*chain(*columns), state],
        output_shapes=[state.shape],
        output_dtypes=[mx.float32],
        scalars=counts,
        grid=(sizes[0] * -(-sizes[2] // (THREADS // LANES)) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    return after


@cache
def _compiled_pieces(sizes: tuple[int, ...], dtypes: tuple[mx.Dtype, ...]) -> bytes:
    """The kernel of `gated_delta_state` for these sizes and types (k, v, g, beta, state)."""
    *types, state = (compiler.TYPES[t] for t in dtypes)
    width = sizes[3] * (1 + sizes[4])
    tile = min(TILE, TILE_NUMBERS // width)
    known = {"PIECES": PIECES, "TILE": tile, "THREADS": THREADS}
    body = _constants((*sizes, LANES))
    body += "".join(f"constexpr int {n} = {x}; " for n, x in known.items())
    inputs = []
    for warp, (kind, name) in enumerate(zip(types, ("k", "v", "g", "beta"), strict=True)):
        names = [f"{name}{i}" for i in range(PIECES)]
        inputs += [f"{kind} {n}" for n in names]
        body += f"__shared__ const {kind}* {name}[PIECES]; if (threadIdx.x == {32 * warp}) {{"
        body += "".join(f"{name}[{i}] = {n};" for i, n in enumerate(names)) + "}"
    counts = [f"count{i}" for i in range(PIECES)]
    body += f"const int counts[] = {{{', '.join(counts)}}};" + _DELTA_PIECES
    arguments = [*inputs, f"{state} state_in"], ["float state_out"], counts
    return compiler.kernel("gated_delta_state", *arguments, body)


def _constants(sizes: tuple[int, ...]) -> str:
    known = zip(("H", "G", "D", "WIDTH", "CHANNELS", "LANES"), sizes, strict=True)
    return "".join(f"constexpr int {n} = {value}; " for n, value in known)


def ssd(x, A_log, B, C, D, dt, state=None, kept=None):
    """Mamba-2's recurrence, as mlx-lm's `ssm_attn`: outputs and the state after all rows.

    x (B, T, H, D), A_log, D (H,), B, C (B, T, G, N), dt (B, T, H) float32, as used (after its bias,
    softplus and limits), state (B, H, D, N); kept: see `gated_delta`.
    """
    heads, dim = x.shape[2:]
    groups, width = B.shape[2:]
    if state is None:
        state = mx.zeros((x.shape[0], heads, dim, width), mx.float32)
    dtype = x.dtype if D.dtype == x.dtype else mx.float32
    inputs = [x, A_log, B, C, D, dt, state]
    sizes = (heads, groups, dim, width, 0)
    return _run("ssd", inputs, sizes, x.shape, dtype, state.dtype, kept=kept)


def wkv7(r, w, k, v, a, b, state, kept=None):
    """RWKV-7's recurrence; all (B, T, H, D), state (B, H, D, D); kept: see `gated_delta`."""
    heads, dim = v.shape[2:]
    inputs = [r, w, k, v, a, b, state]
    sizes = (heads, heads, dim, dim, 0)
    return _run("wkv7", inputs, sizes, v.shape, r.dtype, state.dtype, kept=kept)


def _run(
    name: str,
    inputs: Sequence[mx.array],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    state_dtype: mx.Dtype,
    stops: tuple[int, int] = (0, 0),
    kept: mx.array | None = None,
) -> list[mx.array]:
    """Outputs of `shape`, the state, and the states at the stops (how many, rows between them).
    sizes: heads, groups, lines of a head, their elements, and whether gates are per channel.
    kept: after how many rows of each sequence the state is wanted; None: after all, and stops."""
    state, states = inputs[-1], 1 + stops[0]
    lines, dtypes = state.size // sizes[3], tuple(x.dtype for x in inputs)
    return mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=_compiled(name, sizes, dtypes, dtype, state_dtype, stops, kept is not None),
        inputs=inputs if kept is None else [*inputs, kept],
        output_shapes=[shape, *[state.shape] * states],
        output_dtypes=[dtype, *[state_dtype] * states],
        scalars=[shape[1], lines],
        grid=(-(-lines * LANES // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )


@cache
def _compiled(
    name: str,
    sizes: tuple[int, ...],
    dtypes: tuple[mx.Dtype, ...],
    dtype: mx.Dtype,
    state_dtype: mx.Dtype,
    stops: tuple[int, int],
    is_each: bool,
) -> bytes:
    """The kernel for these sizes, types and stops; is_each: whether each sequence has a number of
    rows of its own."""
    names, rows = _BODIES[name]
    types = compiler.TYPES
    inputs = [f"{types[t]} {n}" for t, n in zip(dtypes, names, strict=True)]
    count, stop_rows = stops
    kept, state = [f"stop{i}" for i in range(count)], types[state_dtype]
    outputs = [f"{types[dtype]} y", *(f"{state} {n}" for n in ("state_out", *kept))]
    body = _constants((*sizes, LANES)) + _LINE
    if is_each:
        inputs.append("int kept")
        body += _KEEP_EACH + rows
    else:
        keep = _KEEP.format(stop_rows=stop_rows, state=state, names=", ".join(kept))
        body += (keep if count else _KEEP_NONE) + rows + _END
    return compiler.kernel(name, inputs, outputs, ("T", "lines"), body)
