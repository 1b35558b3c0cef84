"""The gated delta rule: `gated_delta_update` of mlx-lm.

With one gate per head (Qwen3-Next, Qwen3.5, OLMo hybrid) or per channel (Kimi linear, Kimi K3,
Bailing v3). A row is k, v, the gate and beta, as they reach the recurrence itself; q only makes
outputs, so it is not kept. Layers of one shape are replayed as one batch by `ds4cli.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps

import mlx.core as mx
import mlx.nn as nn

from ds4cli import delta
from ds4cli.rebind import Swaps, calls, derived, rebound, with_globals
from ds4cli.tape import frames
from ds4cli.tape.families.short_conv import arm_convolutions
from ds4cli.tape.tracks import Track

name = "gated delta"


@dataclass(frozen=True)
class DeltaRows(Track):
    """data: k (1, T, Hk, Dk), v (1, T, Hv, Dv), g (1, T, Hv[, Dk]), beta (1, T, Hv)."""

    comes_with_step = True

    def key(self, start):
        return *(x.shape for x in self.data), start is None

    @classmethod
    def replay(cls, tracks, starts, rows):
        state = None if starts[0] is None else mx.concatenate(starts)
        return mx.split(delta.final_state(*cls.stack(tracks, rows), state), len(tracks))


def owns(module: nn.Module) -> bool:
    return calls(type(module), "gated_delta_update")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))
    arm_convolutions(module, swaps)


@cache
def _recording(cls: type) -> type:
    inner = frames.framed(rebound(cls, {"gated_delta_update": _recorded_update}))
    return _never_compiled(inner) if hasattr(cls, "_decode_core") else inner


def _recorded_update(update: Callable) -> Callable:
    """mlx-lm's `gated_delta_update`; the recurrence it chooses records what it is given."""
    scope = dict(update.__globals__)
    for choice in ("gated_delta_ops", "gated_delta_kernel"):
        if choice in scope:
            scope[choice] = _recorded(scope[choice])
    return with_globals(update, scope)


def _recorded(recurrence: Callable) -> Callable:
    @wraps(recurrence)
    def record(q, k, v, g, beta, *args, **kwargs):
        frame = frames.current()
        if frame is not None:
            frame.add_state(DeltaRows((k, v, g, beta)))
        return recurrence(q, k, v, g, beta, *args, **kwargs)

    return record


def _never_compiled(cls: type) -> type:
    """Kimi K3 compiles its one-token step on Metal: while it is recorded, run it as it is written.

    A compiled function would hand the tape tracers on its first call and nothing on later ones.
    """
    call = cls.__call__

    def __call__(self, *args, **kwargs):
        if not frames.recording():
            return call(self, *args, **kwargs)
        compiled, self._step = self._step, self._decode_core
        try:
            return call(self, *args, **kwargs)
        finally:
            self._step = compiled

    return derived(cls, __call__)
