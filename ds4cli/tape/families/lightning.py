"""Lightning attention: `recurrent_gla` of the Bailing (Ling, Ring) linear models.

    S_t = exp(g) S_{t-1} + k_t v_t^T          (g: one constant per head)

A row is k and v. The state after n rows is one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, calls, rebound
from ds4cli.tape import frames
from ds4cli.tape.tracks import Track

name = "lightning attention"


@dataclass
class GlaRows(Track):
    """data: k (1, T, H, K), v (1, T, H, V). gate (H,): log decay. dtype: of the state."""

    gate: mx.array
    dtype: mx.Dtype

    def key(self, start):
        k, v = self.data
        return k.shape, v.shape, self.dtype, start is None

    @classmethod
    def replay(cls, tracks, starts, rows):
        k, v = cls.stack(tracks, rows)
        gate = mx.stack([t.gate.reshape(-1) for t in tracks]).astype(mx.float32)
        later = mx.arange(rows - 1, -1, -1)[:, None]
        k = k * mx.exp(gate[:, None] * later)[..., None]
        out = k.transpose(0, 2, 3, 1) @ v.astype(k.dtype).swapaxes(1, 2)
        if starts[0] is not None:
            out += mx.exp(gate * rows)[..., None, None] * mx.concatenate(starts)
        return mx.split(out.astype(tracks[0].dtype), len(tracks))


def owns(module: nn.Module) -> bool:
    return calls(type(module), "recurrent_gla")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))


@cache
def _recording(cls: type) -> type:
    return frames.framed(rebound(cls, {"recurrent_gla": _recorded}))


def _recorded(recurrence: Callable) -> Callable:
    @wraps(recurrence)
    def recurrent_gla(q, k, v, g, *args, **kwargs):
        y, state = recurrence(q, k, v, g, *args, **kwargs)
        frame = frames.current()
        if frame is not None:
            frame.add_state(GlaRows((k.swapaxes(1, 2), v.swapaxes(1, 2)), g, state.dtype))
        return y, state

    return recurrent_gla
