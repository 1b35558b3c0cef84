"""deepseek_v41's `LayerCache`: a raw window, closed compressed groups, and the open group's rows.

Every write replaces arrays, so going back is cutting: the window by rows, the closed groups by
count (`pos // ratio`). What closing a group throws away are the compressor's inputs that formed
it; a log of the last `slack + ratio` of them lets any group be open again, at every residue.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v41
from mlx_lm.models.deepseek_v41 import Compressor, LayerCache

from ds4cli.caches.adapter import ReplacedRows, check_checkpoint
from ds4cli.caches.plain import leaves
from ds4cli.errors import StateError


class SlackLayerCache(LayerCache):
    """A `LayerCache` that keeps `slack` positions more of its window and of the compressor's rows.

    `_window_indices` works from the rows that are there, so attention picks the same ones.
    """

    def __init__(self, window: int, slack: int, ratio: int):
        super().__init__(window + slack)
        self.context = window - 1
        self.slack = slack
        self.ratio = max(ratio, 1)
        self.log_kv: mx.array | None = None
        self.log_gate: mx.array | None = None

    def log(self, kv: mx.array, gate: mx.array) -> None:
        """Keep the compressor's new rows, float32 (1, n, head_dim) each."""
        last = self.slack + self.ratio
        self.log_kv = joined(self.log_kv, kv)[:, -last:]
        self.log_gate = joined(self.log_gate, gate)[:, -last:]


class RecordingCompressor(Compressor):
    """mlx-lm's compressor, which shows a `SlackLayerCache` the rows it appends."""

    def __call__(self, x: mx.array, start_pos: int, cache: LayerCache) -> Any:
        if not isinstance(cache, SlackLayerCache):
            return super().__call__(x, start_pos, cache)
        new: list[mx.array] = []

        def append(cached: mx.array | None, rows: mx.array) -> mx.array:
            new.append(rows)
            return joined(cached, rows)

        # Its own code over a copy of its globals: nothing outside this call sees the other name.
        stock = Compressor.__call__
        names = {**stock.__globals__, "_append": append}
        result = FunctionType(stock.__code__, names)(self, x, start_pos, cache)
        if new:
            cache.log(*new)
        return result


joined = deepseek_v41._append


def with_slack(layer: nn.Module, window: int, slack: int) -> SlackLayerCache:
    """The cache of one decoder layer, whose compressor from now on records for such caches."""
    for module in layer.modules():
        if type(module) is Compressor:
            module.__class__ = RecordingCompressor
    return SlackLayerCache(window, slack, layer.self_attn.ratio)


class CompressedAdapter(ReplacedRows):
    """`SlackLayerCache`: cut to any position whose window and open group are still held."""

    kind = "compressed"
    row_axis = 1
    keeps_every_row = False
    splits_long_calls = True
    fields = (
        "window",
        "compress_kv",
        "index_k",
        "log_kv",
        "log_gate",
        "pending_kv",
        "pending_gate",
    )

    def low(self) -> int:
        cache, pos = self.cache, self.cache.offset
        first = pos - rows(cache.window)
        whole_window = first + cache.context if first else 0
        if cache.log_kv is None:
            return whole_window
        # Below the first logged group start, part of the open group is gone.
        whole_group = -(-(pos - rows(cache.log_kv)) // cache.ratio) * cache.ratio
        return max(whole_window, whole_group)

    def _cut(self, whole: tuple, end: int, pos: int) -> tuple:
        window, compress_kv, index_k, log_kv, log_gate, *_ = whole
        drop = end - pos
        groups = pos // self.cache.ratio
        logs = without_last(log_kv, drop), without_last(log_gate, drop)
        return (
            without_last(window, drop),
            first_rows(compress_kv, groups),
            first_rows(index_k, groups),
            *logs,
            *self._open_group(logs, pos),
        )

    def _open_group(self, logs: tuple, pos: int) -> list[mx.array | None]:
        """The rows that wait for their group to fill at `pos`."""
        waiting = pos % self.cache.ratio
        return [last_rows(log, waiting) for log in logs]

    def checkpoint(self) -> Any:
        cache = self.cache
        window = last_rows(cache.window, cache.context)
        kept = (window, *self._open_group((cache.log_kv, cache.log_gate), cache.offset))
        return cache.offset, *(None if a is None else mx.contiguous(a) for a in kept)

    def restore_checkpoint(self, state: Any, pos: int) -> None:
        taken, window, kv, gate = state
        check_checkpoint(taken, pos)
        if not self.restores(state):
            raise StateError(f"position `{pos}` is past the compressed rows held")
        if self.low() <= pos:
            self.seek(pos)
            return
        # Closed groups are append-only: their count brings them back.
        groups = pos // self.cache.ratio
        closed = (first_rows(a, groups) for a in (self.cache.compress_kv, self.cache.index_k))
        self._set((window, *closed, kv, gate, kv, gate), pos)

    def restores(self, state: Any) -> bool:
        return state[0] <= self.high()

    def checkpoint_arrays(self, state: Any) -> list[mx.array]:
        return leaves(state[1:])

    def arrays(self) -> list[mx.array]:
        return leaves(self._get())

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        named = zip(self.fields[:5], self._get()[:5], strict=True)
        return {k: a for k, a in named if rows(a)}, {"pos": self.cache.offset}

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        kept = tuple(arrays.get(name) for name in self.fields[:5])
        self._set((*kept, *self._open_group(kept[3:], meta["pos"])), meta["pos"])

    def bytes_per_token(self) -> int:
        closed = leaves((self.cache.compress_kv, self.cache.index_k))
        per_group = sum(a.nbytes // a.shape[1] for a in closed)
        return per_group // self.cache.ratio

    def describe(self) -> str:
        return f"the last {self.cache.slack} positions, by cutting rows"


def rows(a: mx.array | None) -> int:
    return 0 if a is None else a.shape[1]


def first_rows(a: mx.array | None, n: int) -> mx.array | None:
    return a[:, :n] if a is not None and n else None


def last_rows(a: mx.array | None, n: int) -> mx.array | None:
    return a[:, max(rows(a) - n, 0) :] if a is not None and n else None


def without_last(a: mx.array | None, n: int) -> mx.array | None:
    return first_rows(a, rows(a) - n)
