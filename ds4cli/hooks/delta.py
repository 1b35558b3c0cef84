"""The gated delta rule in chunks, and row by row, in plain mlx operations.

    S_t = S_{t-1} diag(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T            y_t = S_t q_t

mlx-lm has a Metal kernel for this and, everywhere else, a Python loop over tokens. Here the rows of
a chunk are solved together (the WY representation of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024; with gates, "Gated Delta Networks",
2025). With D_ti the product of the gates of rows i + 1 .. t, S the state before the chunk and S'
after it:

    A_ti = beta_t (k_t D_ti . k_i)  for i < t            U = (I + A)^-1 beta (V - (K D_in) S^T)
    S' = S D_all + U^T (K D_out)                         Y = (Q D_in) S^T + (Q D K^T) U

Every D is a running product of gates, never a quotient of two: no decay, however strong, overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_kernel

from ds4cli.hooks.cuda import kernels, switch
from ds4cli.hooks.rebind import Swaps, calls, rebound, with_globals

# From this many rows a model call uses the chunks. Measured on a CPU: 4 to 8 rows of 8 heads x 32
# and 6 of 12 x 64 take as long one by one, 3 of 16 x 128.
MIN_ROWS = 4

# Rows solved together. A gate per channel needs (chunk, chunk, Dk) products, hence the shorter one.
CHUNK = 32
CHANNEL_CHUNK = 8

# Elements of one (rows, Dk) operand over all heads: temporaries that fit a CPU's cache are worth
# more than fewer, larger products.
_OPERAND = 2**17


def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """What mlx-lm's `gated_delta_ops` computes: outputs, and the state after all rows.

    q, k (B, T, Hk, Dk), v (B, T, Hv, Dv), g (B, T, Hv) or (B, T, Hv, Dk) in [0, 1],
    beta (B, T, Hv), state (B, Hv, Dv, Dk) or None for zeros, mask (B, T): a False row leaves the
    state alone, and its output means nothing. Returns y (B, T, Hv, Dv) of q's dtype, and the
    state in float32.
    """
    if mask is not None:
        g, beta = _masked(g, beta, mask)
    ys: list[mx.array] = []
    for rows in _segments(k, v, g):
        y, state = _segment(q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], state)
        assert y is not None, "there are queries"
        ys.append(y)
    assert state is not None, "there are rows"
    y = ys[0] if len(ys) == 1 else mx.concatenate(ys, axis=1)
    return y.astype(q.dtype), state


def stepped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The same row by row, for a few rows on a CPU; arguments and results as for `chunked`.

    Sums over keys are products, as the BLAS makes them: with 8 lanes of 12 heads x 64 a row takes
    half the time of mlx-lm's step.
    """
    if mask is not None:
        g, beta = _masked(g, beta, mask)
    if (each := v.shape[2] // k.shape[2]) > 1:
        q, k = mx.repeat(q, each, 2), mx.repeat(k, each, 2)
    if state is None:
        state = mx.zeros((k.shape[0], *v.shape[2:], k.shape[-1]))
    if k.shape[1] == 1:
        return _step(q, k, v, g, beta, state)
    ys = []
    for t in range(k.shape[1]):
        one = slice(t, t + 1)
        y, state = _step(q[:, one], k[:, one], v[:, one], g[:, one], beta[:, one], state)
        ys.append(y)
    return mx.concatenate(ys, axis=1), state


@mx.compile
def _step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One row (B, 1, ...), with as many heads of keys as of values."""
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    state = state * (g[..., None, None] if g.ndim == 2 else g[..., None, :])
    told = (state @ k[..., None])[..., 0]
    update = (v - told) * beta[..., None]
    state = mx.addmm(state, update[..., None], k[..., None, :].astype(state.dtype))
    y = (state @ q[..., None])[..., 0]
    return y[:, None].astype(q.dtype), state


def _masked(g: mx.array, beta: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
    """Gates and betas with which a False row leaves the state alone."""
    beta = mx.where(mask[..., None], beta, 0)
    return mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1), beta


def final_state(
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> mx.array:
    """The state after all rows, without outputs; arguments as for `chunked`. What a False row holds
    may be no numbers."""
    if has_kernel(k.shape[-1]):
        return _kernel_state(k, v, g, beta, state, mask)
    if mask is not None:
        k, v = (mx.where(mask[..., None, None], x, 0) for x in (k, v))
        g, beta = _masked(g, beta, mask)
    for rows in _segments(k, v, g):
        _, state = _segment(None, k[:, rows], v[:, rows], g[:, rows], beta[:, rows], state)
    assert state is not None, "there are rows"
    return state


def has_kernel(dim: int = 32) -> bool:
    """Whether mlx-lm runs its Metal kernel here, for keys of this size."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu and dim % 32 == 0


def runs_alone(dim: int) -> bool:
    """Whether layers are replayed one by one here, by a kernel that needs no copies: on CUDA."""
    return switch.is_on() and kernels.fits(dim)


def _kernel_state(
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None,
    mask: mx.array | None,
) -> mx.array:
    if state is None:
        state = mx.zeros((k.shape[0], *v.shape[2:], k.shape[-1]))
    # Any q will do: only outputs depend on it.
    return gated_delta_kernel(k, k, v, g, beta, state, mask)[1]


def _segments(k: mx.array, v: mx.array, g: mx.array) -> list[slice]:
    """The rows in groups of whole chunks that are solved at once."""
    batch, rows, _, dim = k.shape
    size = CHUNK if g.ndim == 3 else CHANNEL_CHUNK
    chunks = max(1, _OPERAND // (batch * v.shape[2] * dim * size))
    return [slice(i, i + chunks * size) for i in range(0, rows, chunks * size)]


def _segment(
    q: mx.array | None,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None,
) -> tuple[mx.array | None, mx.array]:
    """Outputs (None without q) and the state after the rows of one segment."""
    batch, rows, groups, dim_k = k.shape
    heads, dim_v = v.shape[2:]
    size = min(CHUNK if g.ndim == 3 else CHANNEL_CHUNK, rows)
    # A padding row has beta 0 and gate 1, so that it does nothing.
    g = _split(g if g.ndim == 4 else g[..., None], groups, size, fill=1)
    k, v, beta = (_split(x, groups, size) for x in (k, v, beta[..., None]))
    shape = (batch, groups, heads // groups, dim_v, dim_k)
    state = mx.zeros(shape) if state is None else state.reshape(shape)

    D, D_in = products(g), mx.cumprod(g, axis=-2)
    A = beta * pairs(k, k, D) * lower(size, 1)
    T = unit_inverse(A) * beta.swapaxes(-1, -2)
    states, updates = _scan(T, k * D_in, v, k * D[..., -1, :, :], D_in[..., -1:, :], state)
    after = states.pop().reshape(batch, heads, dim_v, dim_k)
    if q is None:
        return None, after
    q = _split(q, groups, size)
    y = (q * D_in) @ mx.stack(states, axis=3).swapaxes(-1, -2)
    y += (pairs(q, k, D) * lower(size, 0)) @ mx.stack(updates, axis=3)
    return _join(y, rows), after


def _split(x: mx.array, groups: int, size: int, fill: float = 0) -> mx.array:
    """(B, T, H, D) -> (B, groups, H / groups, chunks, size, D), float32, padded to whole chunks."""
    batch, rows, heads, dim = x.shape
    x = x.astype(mx.float32)
    if pad := -rows % size:
        x = mx.pad(x, [(0, 0), (0, pad), (0, 0), (0, 0)], constant_values=fill)
    x = x.reshape(batch, -1, size, groups, heads // groups, dim).transpose(0, 3, 4, 1, 2, 5)
    # Each product would copy a strided operand again.
    return mx.contiguous(x)


def _join(y: mx.array, rows: int) -> mx.array:
    """(B, groups, H / groups, chunks, size, D) -> (B, rows, H, D)."""
    batch, groups, per_group, _, _, dim = y.shape
    y = y.transpose(0, 3, 4, 1, 2, 5).reshape(batch, -1, groups * per_group, dim)
    return y[:, :rows]


def lower(size: int, below: int) -> mx.array:
    """A float mask (size, size): 1 where row - column >= below."""
    index = mx.arange(size)
    return (index[:, None] - index[None] >= below).astype(mx.float32)


def products(g: mx.array) -> mx.array:
    """g (..., C, D) -> (..., C, C, D): at t, i the product of rows i + 1 .. t; 1 for i >= t."""
    later = lower(g.shape[-2], 1)[..., None] > 0
    return mx.cumprod(mx.where(later, g[..., None, :], 1.0), axis=-3)


def pairs(x: mx.array, k: mx.array, D: mx.array) -> mx.array:
    """The products x_t D_ti . k_i, (..., C, C); meaningful for i <= t."""
    if D.shape[-1] == 1:
        return (x @ k.swapaxes(-1, -2)) * D[..., 0]
    return ((D * k[..., None, :, :]) @ x[..., None])[..., 0]


def unit_inverse(A: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A (..., C, C)."""
    size = A.shape[-1]
    eye = mx.eye(size)
    if mx.default_device() == mx.cpu:
        return mx.linalg.tri_inv(A + eye, stream=mx.cpu)
    return _merge_inverse(A, eye, size)


def _merge_inverse(A: mx.array, eye: mx.array, size: int) -> mx.array:
    """The same by products alone: inverses of diagonal blocks of 1, 2, 4 .. rows, merged in pairs.

    Not by powers of A: those grow without bound where keys resemble each other.
    """
    T, rows, block = mx.broadcast_to(eye, A.shape), mx.arange(size), 1
    while block < size:
        own, pair = rows // block, rows // (2 * block)
        merging = (pair[:, None] == pair[None]) & (own[:, None] != own[None])
        T = T - T @ mx.where(merging, A, 0) @ T
        block *= 2
    return T


def _scan(
    T: mx.array, K_in: mx.array, V: mx.array, K_out: mx.array, D_all: mx.array, state: mx.array
) -> tuple[list[mx.array], list[mx.array]]:
    """The sequential part: the state before each chunk and after the last, and the updates U."""
    states, updates = [state], []
    for c in range(T.shape[3]):
        T_, K_in_, V_, K_out_, D_all_ = (x[:, :, :, c] for x in (T, K_in, V, K_out, D_all))
        update = T_ @ (V_ - K_in_ @ state.swapaxes(-1, -2))
        state = state * D_all_ + update.swapaxes(-1, -2) @ K_out_
        states.append(state)
        updates.append(update)
    return states, updates


def use(model: nn.Module) -> Swaps:
    """Let this model's own layers use `chunked` for calls of MIN_ROWS rows and more, and on a CPU
    `stepped` for others; on CUDA, a kernel for all calls.

    Does nothing where mlx-lm has its Metal kernel. Call it before `Recorder.arm`; `undo()` of the
    result takes it back (after `Recorder.disarm`).
    """
    swaps = Swaps()
    if not has_kernel():
        few = stepped if mx.default_device() == mx.cpu else None
        for module in model.modules():
            own: type = type(module)
            if calls(own, "gated_delta_update"):
                swaps.swap(module, _switched(own, few, switch.is_on()))
    return swaps


@cache
def _switched(cls: type, few: Callable | None, on_cuda: bool) -> type:
    """few: computes calls of few rows; None: mlx-lm's own loop."""

    def switched(update):
        """mlx-lm's `gated_delta_update` with another loop inside."""
        ops = update.__globals__["gated_delta_ops"]

        @wraps(ops)
        def gated_delta_ops(q, k, v, g, beta, state=None, mask=None):
            if on_cuda and kernels.fits(k.shape[-1]):
                return kernels.gated_delta(q, k, v, g, beta, state, mask)
            run = chunked if k.shape[1] >= MIN_ROWS else few or ops
            return run(q, k, v, g, beta, state, mask)

        if not on_cuda:
            gated_delta_ops.of_one_row = few or ops  # type: ignore[attr-defined]
        return with_globals(update, {**update.__globals__, "gated_delta_ops": gated_delta_ops})

    return rebound(cls, {"gated_delta_update": switched})


def of_one_row(recurrence: Callable) -> Callable:
    """What `recurrence`, switched or not, comes to for one row: without asking at every token."""
    return getattr(recurrence, "of_one_row", recurrence)
