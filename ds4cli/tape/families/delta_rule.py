"""The gated delta rule: `gated_delta_update` of mlx-lm.

With one gate per head (Qwen3-Next, Qwen3.5, OLMo hybrid) or per channel (Kimi linear, Kimi K3,
Bailing v3). A row is k, v and the raw gates a, b; q only makes outputs, so it is not kept. The layers
of one shape are replayed as one batch by the chunked rule of `ds4cli.delta`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps

import mlx.core as mx
import mlx.nn as nn

from ds4cli import delta
from ds4cli.tape import frames
from ds4cli.tape.families.short_conv import arm_convolutions
from ds4cli.tape.rebind import Swaps, calls, rebound
from ds4cli.tape.tracks import Track

name = "gated delta"


@dataclass(frozen=True)
class DeltaRows(Track):
    """data: k (1, T, Hk, Dk), v (1, T, Hv, Dv), a (1, T, Hv[, Dk]), b (1, T, Hv).

    A_log (Hv[, 1]) and dt_bias (Hv[, Dk]) are the layer's own parameters.
    """

    A_log: mx.array
    dt_bias: mx.array
    lower_bound: float | None
    allow_neg_eigval: bool

    def key(self):
        k, v, a, _ = self.data
        sizes = (k.shape, v.shape[2:], a.shape[3:])
        return (*sizes, k.dtype, a.dtype, self.lower_bound, self.allow_neg_eigval)

    @classmethod
    def replay(cls, tracks, starts, rows):
        columns = zip(*(t.data for t in tracks), strict=True)
        k, v, a, b = (mx.concatenate([x[:, :rows] for x in column]) for column in columns)
        state = None if starts[0] is None else mx.concatenate(starts)
        out = delta.final_state(k, v, _log_gate(tracks, a), _beta(tracks[0], b), state)
        return mx.split(out, len(tracks))


def _log_gate(tracks: list[DeltaRows], a: mx.array) -> mx.array:
    """log g of every row, float32, as mlx-lm's `compute_g` and `compute_lower_bound_g` define g."""
    first = tracks[0]
    A_log = mx.stack([t.A_log for t in tracks])[:, None].astype(mx.float32)
    dt_bias = mx.stack([t.dt_bias for t in tracks])[:, None]
    if first.lower_bound is None:
        return -mx.exp(A_log) * nn.softplus(a + dt_bias)
    return first.lower_bound * mx.sigmoid(mx.exp(A_log) * (a.astype(mx.float32) + dt_bias))


def _beta(first: DeltaRows, b: mx.array) -> mx.array:
    beta = mx.sigmoid(b)
    return beta * 2.0 if first.allow_neg_eigval else beta


def owns(module: nn.Module) -> bool:
    return calls(type(module), "gated_delta_update")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))
    arm_convolutions(module, swaps)


@cache
def _recording(cls: type) -> type:
    return frames.framed(rebound(cls, {"gated_delta_update": _recorded}))


def _recorded(update: Callable) -> Callable:
    @wraps(update)
    def gated_delta_update(q, k, v, a, b, A_log, dt_bias, *args, **kwargs):
        frame = frames.current()
        if frame is not None:
            bounds = kwargs.get("lower_bound"), kwargs.get("allow_neg_eigval", False)
            frame.add_state(DeltaRows((k, v, a, b), A_log, dt_bias, *bounds))
        return update(q, k, v, a, b, A_log, dt_bias, *args, **kwargs)

    return gated_delta_update
