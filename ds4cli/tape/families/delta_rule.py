"""The gated delta rule: `gated_delta_update` of mlx-lm.

With one gate per head (Qwen3-Next, Qwen3.5, OLMo hybrid) or per channel (Kimi linear, Kimi K3,
Bailing v3). A row is k, v, the gate and beta, as they reach the recurrence itself; q only makes
outputs, so it is not kept. Layers of one shape are replayed as one batch by `ds4cli.hooks.delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import accumulate
from types import FunctionType
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks import delta
from ds4cli.hooks.cuda import kernels
from ds4cli.hooks.rebind import Swaps, calls, derived, rebound, with_globals
from ds4cli.tape import frames
from ds4cli.tape.families.short_conv import arm_convolutions
from ds4cli.tape.kept import Kept
from ds4cli.tape.tracks import Track, batched, by_kernels

if TYPE_CHECKING:
    from typing_extensions import Self

name = "gated delta"


@dataclass
class DeltaRows(Track):
    """data: k (1, T, Hk, Dk), v (1, T, Hv, Dv), g (1, T, Hv[, Dk]), beta (1, T, Hv).

    states: (rows, the state (1, Hv, Dv, Dk) after so many rows), kept as the call went through it.
    """

    states: tuple[tuple[int, mx.array], ...] = ()

    has_inner_states = True

    def inner_rows(self) -> list[int]:
        return [rows for rows, _ in self.states]

    def cut(self, start: int, stop: int) -> Self:
        if start == 0 and stop == self.rows:
            return self
        kept = tuple((rows - start, s) for rows, s in self.states if start < rows <= stop)
        return replace(super().cut(start, stop), states=kept)

    @classmethod
    def join(cls, tracks: Sequence[Self]) -> Self:
        ends = accumulate((t.rows for t in tracks), initial=0)
        states = ((end + r, s) for t, end in zip(tracks, ends, strict=False) for r, s in t.states)
        return replace(super().join(tracks), states=tuple(states))

    @classmethod
    def gather(cls, tracks: Sequence[Self], rows: int) -> Track:
        first = tracks[0].data
        if not delta.runs_alone(first[0].shape[-1]) or any([t.states for t in tracks]):
            return cls.join(tracks)
        return DeltaPieces(first, tracks)

    def key(self, start: mx.array | None) -> Hashable:
        return *[x.shape for x in self.data], start is None, *self.inner_rows()

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        stop = max((s for s in tracks[0].inner_rows() if s <= rows), default=0)
        if stop:
            inside = [dict(t.states)[stop] for t in tracks]
            if stop == rows:
                return inside
            starts = inside
        if delta.runs_alone(tracks[0].data[0].shape[-1]):
            return by_kernels([t.cut(stop, rows) for t in tracks], starts)
        k, v, g, beta = cls.stack(tracks, rows, stop)
        return list(mx.split(delta.final_state(k, v, g, beta, batched(starts)), len(tracks)))

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        if delta.runs_alone(tracks[0].data[0].shape[-1]):
            return by_kernels(tracks, starts, kept.counts)
        k, v, g, beta = cls.stack(tracks, kept.total)
        state, mask = batched(starts), kept.mask(len(tracks))
        return list(mx.split(delta.final_state(k, v, g, beta, state, mask), len(tracks)))

    def by_kernel(self, start: mx.array | None, kept: mx.array | None = None) -> mx.array:
        """The state after all rows, or those that are kept, by the kernel on CUDA; any q will do:
        only outputs depend on it."""
        k, v, g, beta = self.data
        return kernels.gated_delta(k, k, v, g, beta, start, kept=kept)[1]


@dataclass
class DeltaPieces(Track):
    """Rows of several calls that are replayed where they stand, without being joined: on CUDA."""

    pieces: Sequence[DeltaRows]

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        pairs = zip(tracks, starts, strict=True)
        return [
            kernels.gated_delta_state([piece.data for piece in t.pieces], start)
            for t, start in pairs
        ]


def owns(module: nn.Module) -> bool:
    return calls(type(module), "gated_delta_update")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))
    arm_convolutions(module, swaps)


@cache
def _recording(cls: type) -> type:
    inner = frames.framed(rebound(cls, {"gated_delta_update": _recorded_update}))
    return _never_compiled(inner) if hasattr(cls, "_decode_core") else inner


def _recorded_update(update: FunctionType) -> FunctionType:
    """mlx-lm's `gated_delta_update`; the recurrence it chooses records what it is given."""
    scope = dict(update.__globals__)
    for choice in ("gated_delta_ops", "gated_delta_kernel"):
        if choice in scope:
            scope[choice] = _recorded(scope[choice])
    return with_globals(update, scope)


def _recorded(recurrence: Callable) -> Callable:
    of_one_row = delta.of_one_row(recurrence)

    @wraps(recurrence)
    def record(q, k, v, g, beta, state=None, mask=None):
        frame, rows = frames.here.frame, k.shape[1]
        run = of_one_row if rows == 1 else recurrence
        if frame is None:
            return run(q, k, v, g, beta, state, mask)
        data, size = (k, v, g, beta), frame.inner_every
        if mask is not None or not 0 < size < rows:
            frame.tracks[-1] += (DeltaRows(data),)
            return run(q, k, v, g, beta, state, mask)
        y, states = _in_pieces(recurrence, (q, *data), state, size)
        frame.add_state(DeltaRows(data, tuple(states[:-1])))
        return y, states[-1][1]

    return record


def _in_pieces(
    recurrence: Callable, data: tuple[mx.array, ...], state: mx.array | None, size: int
) -> tuple[mx.array, list[tuple[int, mx.array]]]:
    """All outputs, and the states after every `size` rows and the last, with their row numbers."""
    ys, states, total = [], [], data[0].shape[1]
    if delta.runs_alone(data[0].shape[-1]):
        q, k, v, g, beta = data
        y, last, inside = kernels.gated_delta_stops(q, k, v, g, beta, state, stop_rows=size)
        return y, [*((size * (i + 1), s) for i, s in enumerate(inside)), (total, last)]
    for start in range(0, total, size):
        y, state = recurrence(*(x[:, start : start + size] for x in data), state, None)
        ys.append(y)
        states.append((min(start + size, total), state))
    return mx.concatenate(ys, axis=1), states


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
