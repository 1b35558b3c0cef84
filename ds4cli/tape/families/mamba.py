"""Mamba-1's selective scan: the method `ssm_step` of Mamba, Falcon-Mamba and Jamba.

    S_t = exp(delta_t A) * S_{t-1} + delta_t x_t B_t^T          (element by element)

A row is x, the step's input. delta and B come from x by the step's own two small projections, which
the replay applies again: keeping them would double the tape, keeping states would grow it 16-fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, derived
from ds4cli.tape import frames
from ds4cli.tape.families.short_conv import arm_convolutions
from ds4cli.tape.kept import Kept
from ds4cli.tape.tracks import Track

if TYPE_CHECKING:
    from typing_extensions import Self

name = "Mamba-1"

# Rows scanned at once: bounds the (rows, channels, states) products of a replay.
_SEGMENT = 32


@dataclass
class ScanRows(Track):
    """data: x (1, T, D). mixer: the module whose `ssm_step` took it."""

    mixer: nn.Module
    recomputes = True

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        return [t._after(start, rows) for t, start in zip(tracks, starts, strict=True)]

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        return [t._after_each(start, kept) for t, start in zip(tracks, starts, strict=True)]

    def _after(self, state: mx.array | None, rows: int) -> mx.array:
        x = self.data[0][:, :rows]
        return self._scanned(x, *_delta_and_B(self.mixer, x), state)

    def _after_each(self, state: mx.array | None, kept: Kept) -> mx.array:
        x = kept.only(self.data[0])
        delta, B = _delta_and_B(self.mixer, x)
        # In a step of no length nothing decays, and nothing is added.
        return self._scanned(x, kept.only(delta), B, state)

    def _scanned(
        self, x: mx.array, delta: mx.array, B: mx.array, state: mx.array | None
    ) -> mx.array:
        A = -mx.exp(self.mixer.A_log)
        for i in range(0, x.shape[1], _SEGMENT):
            part = slice(i, i + _SEGMENT)
            state = _scan(x[:, part], delta[:, part], B[:, part], A, state)
        assert state is not None, "there are rows"
        return state


def _scan(
    x: mx.array, delta: mx.array, B: mx.array, A: mx.array, state: mx.array | None
) -> mx.array:
    """x, delta (L, T, D), B (L, T, N), A (D, N), state (L, D, N) -> the state after T rows."""
    later = mx.cumsum(delta, axis=1, reverse=True, inclusive=False)
    decay = mx.exp(later[..., None] * A)
    new = mx.sum(decay * (delta * x)[..., None] * B[:, :, None], axis=1)
    if state is None:
        return new
    return new + state * mx.exp(mx.sum(delta, axis=1)[..., None] * A)


def _delta_and_B(mixer: nn.Module, x: mx.array) -> tuple[mx.array, mx.array]:
    """The first half of `ssm_step`, of both model files."""
    ranks = [mixer.time_step_rank, mixer.time_step_rank + mixer.ssm_state_size]
    delta, B, _ = mx.split(mixer.x_proj(x), ranks, axis=-1)
    if hasattr(mixer, "dt_layernorm"):
        delta, B = mixer.dt_layernorm(delta), mixer.b_layernorm(B)
    elif mixer.use_bcdt_rms:
        eps = mixer.args.mixer_rms_eps
        delta, B = mx.fast.rms_norm(delta, None, eps), mx.fast.rms_norm(B, None, eps)
    return nn.softplus(mixer.dt_proj(delta)), B


def owns(module: nn.Module) -> bool:
    return hasattr(module, "ssm_step")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))
    arm_convolutions(module, swaps)


@cache
def _recording(cls: Any) -> type:
    def ssm_step(self, x, A, state=None):
        frame = frames.current()
        if frame is not None:
            # Mamba calls it once per token with (1, D), Jamba once with (1, T, D).
            frame.add_state(ScanRows((x if x.ndim == 3 else x[:, None],), self))
        return cls.ssm_step(self, x, A, state)

    return frames.framed(derived(cls, ssm_step))
