"""Metal's branches of mlx-lm on a CPU.

`install` makes mlx-lm and this package find a GPU with Metal. What only Metal could run is done by
plain operations with the kernels' types: float32 inside, rounded where the kernel rounds; and sizes
that a kernel would get silently wrong are refused. It shows which branch is taken and what is
rounded where, not what the real kernels compute. `half_experts` lets a CPU run mixtures of experts
in half precision.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

from ds4cli.tape.families import delta_rule

LANES = 32  # a kernel gives each of so many lanes an equal share of a row


def install(monkeypatch) -> list[str]:
    """Pretend until the test ends; returns a list in which each kernel notes its calls."""
    calls: list[str] = []
    for name in ("kimi_k3", "deepseek_v41"):  # these look for Metal when they are imported
        if find_spec(f"mlx_lm.models.{name}"):
            import_module(f"mlx_lm.models.{name}")
    kernels = [(gated_delta, gated_delta_kernel), (ssm, ssm_update_kernel)]
    kernels += [(import_module("ds4cli.hooks.delta"), gated_delta_kernel)]
    if find_spec("mlx_lm.models.rwkv7"):
        kernels.append((import_module("mlx_lm.models.rwkv7"), wkv7_kernel))
    for module, kernel in kernels:
        monkeypatch.setattr(module, kernel.__name__, _noting(kernel, calls))
    # Classes made before have the other kernels in them, and those made now must not stay.
    made = cache(delta_rule._recording.__wrapped__)
    monkeypatch.setattr(delta_rule, "_recording", made)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    return calls


def half_experts(monkeypatch) -> None:
    """MLX's CPU backend gathers products in float32 only."""
    gather = mx.gather_mm

    def gather_mm(a, b, *args, **kwargs):
        wide = gather(a.astype(mx.float32), b.astype(mx.float32), *args, **kwargs)
        return wide.astype(a.dtype)

    monkeypatch.setattr(mx, "gather_mm", gather_mm)


def _noting(kernel, calls: list[str]):
    def noted(*args, **kwargs):
        calls.append(kernel.__name__)
        return kernel(*args, **kwargs)

    return noted


def _floats(*arrays):
    return [x.astype(mx.float32) for x in arrays]


def gated_delta_kernel(q, k, v, g, beta, state, mask=None):
    assert k.shape[-1] % LANES == 0, k.shape
    floats = _floats(q, k, v, g, beta, state)
    y, after = gated_delta.gated_delta_ops(*floats, mask)
    return y.astype(q.dtype), after.astype(state.dtype)


def ssm_update_kernel(x, A_log, B, C, D, dt, dt_bias, state, limit):
    """One row, and exp(float(A_log)), which is not what several rows compute with."""
    assert B.shape[-1] % LANES == 0 and x.shape[1] == 1, (x.shape, B.shape)
    dt = ssm.compute_dt(dt, dt_bias, limit)[:, 0]
    rows, A_log, B, C, D, before = _floats(x[:, 0], A_log, B[:, 0], C[:, 0], D, state)
    B, C = (mx.repeat(z, x.shape[2] // z.shape[1], axis=1) for z in (B, C))
    decay = mx.exp(-mx.exp(A_log) * dt)[..., None, None]
    after = decay * before + (rows * dt[..., None])[..., None] * B[:, :, None]
    y = (after * C[:, :, None]).sum(-1) + rows * D[:, None]
    return y.astype(x.dtype)[:, None], after.astype(state.dtype)


def wkv7_kernel(r, w, k, v, a, b, state):
    """Several rows in float32; the state is rounded once, at the end of the call."""
    assert r.shape[-1] % LANES == 0, r.shape
    rows, after, ys = _floats(r, w, k, v, a, b), state.astype(mx.float32), []
    for t in range(r.shape[1]):
        r_t, w_t, k_t, v_t, a_t, b_t = (x[:, t] for x in rows)
        moved = (after @ a_t[..., None]) @ b_t[..., None, :]
        after = after * w_t[:, :, None] + v_t[..., None] @ k_t[..., None, :] + moved
        ys.append((after @ r_t[..., None])[..., 0])
    return mx.stack(ys, axis=1).astype(r.dtype), after.astype(r.dtype)
