"""Lightning attention: `recurrent_gla` of the Bailing (Ling, Ring) linear models.

    S_t = exp(g) S_{t-1} + k_t v_t^T          (g: one constant per head)

A row is k and v. The state after n rows is one product; except in half precision, where the model
rounds k v^T, or the state itself, at every row that it is fed alone: then its own function runs
again, call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, calls, rebound
from ds4cli.tape import frames
from ds4cli.tape.kept import Kept
from ds4cli.tape.tracks import CallRows, batched

if TYPE_CHECKING:
    from typing_extensions import Self

name = "lightning attention"


@dataclass
class GlaRows(CallRows):
    """data: k (1, T, H, K), v (1, T, H, V). gate (H,): log decay. dtype: of the state.
    recurrence: what the model calls."""

    gate: mx.array
    dtype: mx.Dtype
    recurrence: Callable

    def key(self, start: mx.array | None) -> Hashable:
        k, v = self.data
        return k.shape, v.shape, self.calls, self.dtype, start is None

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        if tracks[0].in_half:
            return cls._by_calls(tracks, starts, rows)
        k, v = cls.stack(tracks, rows)
        return cls._all_after(tracks, starts, k, v, mx.array([rows]))

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        if tracks[0].in_half:
            return super().replay_each(tracks, starts, kept)
        k, v = (kept.only(x) for x in cls.stack(tracks, kept.total))
        rows = mx.concatenate([kept.counts] * len(tracks))
        return cls._all_after(tracks, starts, k, v, rows)

    @classmethod
    def _all_after(
        cls,
        tracks: Sequence[Self],
        starts: Sequence[mx.array | None],
        k: mx.array,
        v: mx.array,
        rows: mx.array,
    ) -> list[mx.array]:
        """The states of all tracks as one batch, of which each has so many rows, int (batch,) or
        (1,); k and v are 0 behind them."""
        lanes = len(k) // len(tracks)
        gate = mx.stack([t.gate.reshape(-1) for t in tracks]).astype(mx.float32)
        gate, rows = mx.repeat(gate, lanes, axis=0), rows[:, None]
        later = mx.maximum(rows - 1 - mx.arange(k.shape[1]), 0)[..., None]
        k = k * mx.exp(gate[:, None] * later)[..., None]
        out = k.transpose(0, 2, 3, 1) @ v.astype(k.dtype).swapaxes(1, 2)
        start = batched(starts)
        if start is not None:
            out += mx.exp(gate * rows)[..., None, None] * start
        return list(mx.split(out.astype(tracks[0].dtype), len(tracks)))

    @classmethod
    def _by_calls(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        """All layers at once, as the heads of one."""
        k, v = (x.swapaxes(1, 2).flatten(0, 1)[None] for x in cls.stack(tracks, rows))
        gate = mx.concatenate([t.gate.reshape(-1) for t in tracks])
        state = batched(starts, axis=1)
        advance = tracks[0].recurrence
        for call in tracks[0].slices(rows):
            # Any q will do: only outputs depend on it.
            part = k[:, :, call]
            _, state = advance(part, part, v[:, :, call], gate, scale=1.0, h=state)
        assert state is not None, "there are rows"
        return list(mx.split(state, len(tracks), axis=1))


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
            data, calls = (k.swapaxes(1, 2), v.swapaxes(1, 2)), (k.shape[2],)
            frame.add_state(GlaRows(data, calls, g, state.dtype, recurrence))
        return y, state

    return recurrent_gla
