"""RWKV-7: its slots are the last input of the time mixing, the state, and the last input of the
channel mixing.

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T

A row of the state is w, k, v, a, b (not r, which only makes outputs). The layers of one shape are
replayed as one batch: in chunks, or, where the state is in half precision and so rounded in every
call, by the model's own function call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks import delta
from ds4cli.hooks.cuda import kernels, switch
from ds4cli.hooks.rebind import Swaps, derived
from ds4cli.tape import frames
from ds4cli.tape.kept import Kept
from ds4cli.tape.tracks import HALF, CallRows, Tail, batched, by_kernels

if TYPE_CHECKING:
    from typing_extensions import Self

name = "RWKV-7"

_CHUNK = delta.CHANNEL_CHUNK


@dataclass
class WkvRows(CallRows):
    """data: w, k, v, a, b, each (1, T, H, D). dtype: of the state. advance: what the model calls
    to move it."""

    dtype: mx.Dtype
    advance: Callable

    def key(self, start: mx.array | None) -> Hashable:
        return self.data[0].shape, self.calls, self.dtype, start is None

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        if tracks[0].has_kernel:
            return by_kernels([t.cut(0, rows) for t in tracks], starts)
        return cls._all_after(tracks, starts, cls.stack(tracks, rows))

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        if tracks[0].has_kernel:
            return by_kernels(tracks, starts, kept.counts)
        w, *others = cls.stack(tracks, kept.total)
        columns = [kept.only(w, 1), *(kept.only(x) for x in others)]
        return cls._all_after(tracks, starts, columns)

    @property
    def has_kernel(self) -> bool:
        known = switch.is_on() and kernels.fits(self.data[0].shape[-1])
        return known and self.dtype not in HALF

    def by_kernel(self, start: mx.array | None, kept: mx.array | None = None) -> mx.array:
        """The state after all rows, or those that are kept, by the kernel; r makes outputs only."""
        state = _state([self], [start]).astype(self.dtype)
        w, k, v, a, b = self.data
        return kernels.wkv7(w, w, k, v, a, b, state, kept=kept)[1]

    @classmethod
    def _all_after(
        cls,
        tracks: Sequence[Self],
        starts: Sequence[mx.array | None],
        columns: Sequence[mx.array],
    ) -> list[mx.array]:
        """The states after the rows of all tracks as one batch, w, k, v, a, b."""
        in_half = tracks[0].dtype in HALF
        state = (cls._by_calls if in_half else cls._in_chunks)(tracks, starts, columns)
        return list(mx.split(state, len(tracks)))

    @classmethod
    def _in_chunks(
        cls,
        tracks: Sequence[Self],
        starts: Sequence[mx.array | None],
        columns: Sequence[mx.array],
    ) -> mx.array:
        w, k, v, a, b = (x.astype(mx.float32).swapaxes(1, 2) for x in columns)
        state = _state(tracks, starts)
        for i in range(0, w.shape[2], _CHUNK):
            state = _advance(state, *(x[:, :, i : i + _CHUNK] for x in (w, k, v, a, b)))
        return state.astype(tracks[0].dtype)

    @classmethod
    def _by_calls(
        cls,
        tracks: Sequence[Self],
        starts: Sequence[mx.array | None],
        columns: Sequence[mx.array],
    ) -> mx.array:
        first, state = tracks[0], batched(starts)
        for call in first.slices(columns[0].shape[1]):
            part = [x[:, call] for x in columns]
            # Any r of its type will do: only outputs depend on it.
            _, state = first.advance(part[1].astype(first.dtype), *part, state)
        assert state is not None, "there are rows"
        return state


def _state(tracks: Sequence[WkvRows], starts: Sequence[mx.array | None]) -> mx.array:
    """Those of all tracks as one batch, (batch, H, D, D) float32."""
    known = batched(starts)
    if known is not None:
        return known.astype(mx.float32)
    batch, _, heads, dim = tracks[0].data[0].shape
    return mx.zeros((len(tracks) * batch, heads, dim, dim))


def _advance(
    S: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array
) -> mx.array:
    """The state after the rows of one chunk; inputs (layers, H, C, D).

    With U_t = S_{t-1} a_t every row adds U_t b_t^T + v_t k_t^T and decays what was there, so the U
    of a chunk solve one triangular system, as in the gated delta rule (see `ds4cli.hooks.delta`).
    """
    D, D_in = delta.products(w), mx.cumprod(w, axis=-2)
    strict = delta.lower(w.shape[-2], 1)
    # Decay up to the row before: what a_t meets.
    D_before = mx.concatenate([D[..., :1, :, :], D[..., :-1, :, :]], axis=-3)
    a_in = mx.concatenate([a[..., :1, :], a[..., 1:, :] * D_in[..., :-1, :]], axis=-2)
    known = a_in @ S.swapaxes(-1, -2) + (delta.pairs(a, k, D_before) * strict) @ v
    U = delta.unit_inverse(-delta.pairs(a, b, D_before) * strict) @ known
    D_out = D[..., -1, :, :]
    added = U.swapaxes(-1, -2) @ (b * D_out) + v.swapaxes(-1, -2) @ (k * D_out)
    return S * D_in[..., -1:, :] + added


def owns(module: nn.Module) -> bool:
    return hasattr(getattr(module, "attn", None), "_wkv7")


def arm(module: nn.Module, swaps: Swaps) -> None:
    attention: type = type(module.attn)
    swaps.swap(module.attn, _time_mixing(attention))
    swaps.swap(module.ffn, frames.framed(type(module.ffn), slot=2))
    for mixing in (module.attn, module.ffn):
        shift: type = type(mixing.token_shift)
        swaps.swap(mixing.token_shift, _token_shift(shift))


@cache
def _time_mixing(cls: Any) -> type:
    def _wkv7(self, r, w, k, v, a, b, state):
        advance = partial(cls._wkv7, self)
        y, after = advance(r, w, k, v, a, b, state)
        frame = frames.current()
        if frame is not None:
            frame.add(WkvRows((w, k, v, a, b), (w.shape[1],), after.dtype, advance))
        return y, after

    return frames.framed(derived(cls, _wkv7))


@cache
def _token_shift(cls: type) -> type:
    def __call__(self, x, state):
        frame = frames.current()
        if frame is not None:
            frame.add(Tail((x,), 1))
        return cls.__call__(self, x, state)

    return derived(cls, __call__)
