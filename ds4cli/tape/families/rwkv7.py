"""RWKV-7: its slots are the last input of the time mixing, the state, and the last input of the
channel mixing.

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T

A row of the state is w, k, v, a, b (not r, which only makes outputs). The layers of one shape are
replayed as one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ds4cli.rebind import Swaps
from ds4cli.tape import frames
from ds4cli.tape.tracks import Tail, Track

name = "RWKV-7"


@dataclass(frozen=True)
class WkvRows(Track):
    """data: w, k, v, a, b, each (1, T, H, D)."""

    dtype: mx.Dtype

    def key(self, start):
        return self.data[0].shape, self.dtype, start is None

    @classmethod
    def replay(cls, tracks, starts, rows):
        w, k, v, a, b = cls.stack(tracks, rows)
        layers, _, heads, dim = k.shape
        state = mx.zeros((layers, heads, dim, dim), tracks[0].dtype)
        if starts[0] is not None:
            state = mx.concatenate(starts)
        for t in range(rows):
            state = _step(state, w[:, t], k[:, t], v[:, t], a[:, t], b[:, t])
        return mx.split(state.astype(tracks[0].dtype), len(tracks))


@mx.compile
def _step(state, w, k, v, a, b):
    erased = (state @ a[..., None]) @ b[..., None, :]
    return state * w[:, :, None, :] + v[..., None] @ k[..., None, :] + erased


def owns(module: nn.Module) -> bool:
    return hasattr(getattr(module, "attn", None), "_wkv7")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module.attn, _time_mixing(type(module.attn)))
    swaps.swap(module.ffn, frames.framed(type(module.ffn), slot=2))
    for mixing in (module.attn, module.ffn):
        swaps.swap(mixing.token_shift, _token_shift(type(mixing.token_shift)))


@cache
def _time_mixing(cls: type) -> type:
    def _wkv7(self, r, w, k, v, a, b, state):
        y, after = cls._wkv7(self, r, w, k, v, a, b, state)
        frame = frames.current()
        if frame is not None:
            frame.add(WkvRows((w, k, v, a, b), after.dtype))
        return y, after

    body = {"_wkv7": _wkv7, "__module__": cls.__module__}
    return frames.framed(type(cls.__name__, (cls,), body))


@cache
def _token_shift(cls: type) -> type:
    def __call__(self, x, state):
        frame = frames.current()
        if frame is not None:
            frame.add(Tail((x,), 1))
        return cls.__call__(self, x, state)

    return type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})
