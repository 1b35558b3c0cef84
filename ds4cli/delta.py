"""The gated delta rule in chunks, in plain mx operations.

S_t = S_{t-1} diag(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T          y_t = S_t q_t
"""

from __future__ import annotations

import mlx.core as mx


def final_state(k, v, log_g, beta, state):
    """The state after all rows (no outputs)."""
    layers, rows, groups, _ = k.shape
    heads, dim = v.shape[2:]
    g = mx.exp(log_g)
    k = mx.repeat(k, heads // groups, axis=2)
    if state is None:
        state = mx.zeros((layers, heads, dim, k.shape[-1]))
    for t in range(rows):
        decay = g[:, t][..., None, None] if g.ndim == 3 else g[:, t][..., None, :]
        state = state * decay
        error = v[:, t] - (state * k[:, t, :, None]).sum(axis=-1)
        state = state + (error * beta[:, t][..., None])[..., None] * k[:, t, :, None]
    return state
