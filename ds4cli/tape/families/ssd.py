"""Mamba-2's state-space duality: `ssm_update` of mlx-lm (Mamba-2, Nemotron-H, Falcon-H1, Granite 4,
PLaMo 2).

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T

A row is x, B and the raw dt; C only makes outputs. The state after n rows is one product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import compute_dt

from ds4cli.hooks.cuda import kernels, switch
from ds4cli.hooks.rebind import Swaps, calls, rebound
from ds4cli.tape import frames
from ds4cli.tape.families.short_conv import arm_convolutions
from ds4cli.tape.kept import Kept
from ds4cli.tape.tracks import Track, batched, by_kernels

if TYPE_CHECKING:
    from typing_extensions import Self

name = "Mamba-2"


@dataclass
class SsdRows(Track):
    """data: x (1, T, H, D), B (1, T, G, N), dt (1, T, H). A_log, dt_bias (H,): the layer's own."""

    A_log: mx.array
    dt_bias: mx.array
    time_step_limit: tuple[float, float]

    def key(self, start: mx.array | None) -> Hashable:
        x, B, _ = self.data
        return x.shape, B.shape, tuple(self.time_step_limit), start is None

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        if tracks[0].has_kernel:
            return by_kernels([t.cut(0, rows) for t in tracks], starts)
        x, B, dt = cls.stack(tracks, rows)
        return cls._all_after(tracks, starts, x, B, cls._steps(tracks, dt))

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        if tracks[0].has_kernel:
            return by_kernels(tracks, starts, kept.counts)
        x, B, dt = cls.stack(tracks, kept.total)
        # In a step of no length nothing decays, and nothing is added.
        dt = kept.only(cls._steps(tracks, dt))
        return cls._all_after(tracks, starts, kept.only(x), kept.only(B), dt)

    @property
    def has_kernel(self) -> bool:
        return switch.is_on() and kernels.fits(self.data[1].shape[-1])

    def by_kernel(self, start: mx.array | None, kept: mx.array | None = None) -> mx.array:
        """The state after all rows, or those that are kept, by the kernel; C and D make outputs
        only."""
        x, B, dt = self.data
        dt = compute_dt(dt, self.dt_bias, self.time_step_limit)
        return kernels.ssd(x, self.A_log, B, B, self.A_log, dt, start, kept=kept)[1]

    @classmethod
    def _steps(cls, tracks: Sequence[Self], dt: mx.array) -> mx.array:
        """dt as it is used, of all tracks as one batch."""
        bias = _of_layers([t.dt_bias for t in tracks], dt)
        return compute_dt(dt, bias, tracks[0].time_step_limit)

    @classmethod
    def _all_after(
        cls,
        tracks: Sequence[Self],
        starts: Sequence[mx.array | None],
        x: mx.array,
        B: mx.array,
        dt: mx.array,
    ) -> list[mx.array]:
        """The states after the rows of all tracks as one batch; dt as it is used."""
        A = -mx.exp(_of_layers([t.A_log for t in tracks], dt)).astype(dt.dtype)
        out = _final_state(x, B, dt, dt * A)
        start = batched(starts)
        if start is not None:
            out += mx.exp(mx.sum(dt * A, axis=1))[..., None, None] * start
        return list(mx.split(out, len(tracks)))


def _of_layers(values: Sequence[mx.array], batch: mx.array) -> mx.array:
    """What each layer has of its own, (H,), beside a batch of all of them: (batch, 1, H)."""
    return mx.repeat(mx.stack([*values]), len(batch) // len(values), axis=0)[:, None]


def _final_state(x: mx.array, B: mx.array, dt: mx.array, dtA: mx.array) -> mx.array:
    """What the rows alone leave: sum over i of exp(dtA_{i+1} + ... + dtA_T) dt_i x_i B_i^T."""
    # Summing from the end keeps the recent rows exact however strong the decay before them was.
    decay = mx.exp(mx.cumsum(dtA, axis=1, reverse=True, inclusive=False))
    dtx = (dt * decay)[..., None] * x
    B = mx.repeat(B, x.shape[2] // B.shape[2], axis=2)
    return dtx.transpose(0, 2, 3, 1) @ B.swapaxes(1, 2)


def owns(module: nn.Module) -> bool:
    return calls(type(module), "ssm_update")


def arm(module: nn.Module, swaps: Swaps) -> None:
    """Also holds A_log as float32. Of a half-precision one, mlx-lm's Metal kernel for one row takes
    float(A_log), and its form for several rows, like a replay, exp(A_log) rounded to half: states
    that differ by more than a replay may."""
    module.A_log = module.A_log.astype(mx.float32)
    swaps.swap(module, _recording(type(module)))
    arm_convolutions(module, swaps)


@cache
def _recording(cls: type) -> type:
    return frames.framed(rebound(cls, {"ssm_update": _recorded}))


def _recorded(update: Callable) -> Callable:
    default_limit = signature(update).parameters["time_step_limit"].default

    @wraps(update)
    def ssm_update(x, A_log, B, C, D, dt, dt_bias, state=None, *args, **kwargs):
        frame = frames.here.frame
        if frame is not None:
            limit = args[0] if args else kwargs.get("time_step_limit", default_limit)
            frame.tracks[-1] += (SsdRows((x, B, dt), A_log, dt_bias, limit),)
        return update(x, A_log, B, C, D, dt, dt_bias, state, *args, **kwargs)

    return ssm_update
