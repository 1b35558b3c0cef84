"""Gives a model's own Mamba-2 and RWKV-7 modules their recurrence as one kernel.

The gated delta rule has a form for every backend: `ds4cli.hooks.delta` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import compute_dt

from ds4cli.hooks.cuda import kernels, switch
from ds4cli.hooks.rebind import Swaps, calls, derived, rebound


def use(model: nn.Module) -> Swaps:
    """Let the recurrent modules of this model use the kernels; call it before `Recorder.arm`.

    Single instances, as everywhere: the stock model that checks compare with shares their classes.
    """
    swaps = Swaps()
    if switch.is_on():
        for module in model.modules():
            own: type = type(module)
            if calls(own, "ssm_update"):
                swaps.swap(module, _with_ssd(own))
            elif hasattr(module, "_wkv7"):
                swaps.swap(module, _with_wkv7(own))
    return swaps


@cache
def _with_ssd(cls: type) -> type:
    return rebound(cls, {"ssm_update": _as_kernel})


def _as_kernel(update: Callable) -> Callable:
    """mlx-lm's `ssm_update`; the kernel where it fits. `lengths` are left to mlx-lm."""
    default_limit = signature(update).parameters["time_step_limit"].default

    @wraps(update)
    def ssm_update(
        x, A_log, B, C, D, dt, dt_bias, state=None, limit=default_limit, mask=None, lengths=None,
        **named,
    ):  # fmt: skip
        limit = named.pop("time_step_limit", limit)
        if lengths is not None or not kernels.fits(B.shape[-1]):
            return update(x, A_log, B, C, D, dt, dt_bias, state, limit, mask, lengths, **named)
        dt = compute_dt(dt, dt_bias, limit)
        if mask is not None:
            dt = mx.where(mask[..., None], dt, 0)  # no time passes: the state stays
        return kernels.ssd(x, A_log, B, C, D, dt, state)

    return ssm_update


@cache
def _with_wkv7(cls: Any) -> type:
    def _wkv7(self, r, w, k, v, a, b, state):
        if not kernels.fits(r.shape[-1]):
            return cls._wkv7(self, r, w, k, v, a, b, state)
        if state is None:
            state = mx.zeros((r.shape[0], r.shape[2], r.shape[3], r.shape[3]), r.dtype)
        return kernels.wkv7(r, w, k, v, a, b, state)

    return derived(cls, _wkv7)
