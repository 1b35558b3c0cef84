"""Sliding windows and chunks whose past can be revisited.

mlx-lm keeps these layers in rings (`RotatingKVCache`) or cuts their front off for good
(`ChunkedKVCache`). Here the rows stand in one buffer in position order, with `slack` more of them
than attention needs. Attention gets views of exactly the rows the stock caches would show, with
masks of the same shape, so it computes the same and costs the same; a rewind moves a cursor.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from ds4cli.caches.adapter import SharedRows, check_checkpoint
from ds4cli.caches.plain import leaves


class LinearRows:
    """Keys and values of positions `start` and up, in order, written in place behind `offset`.

    Arrays are (1, heads, capacity, dim). When the buffer is full, the oldest rows beyond
    `context + slack` make room; growth and that compaction both copy what they keep, once per
    `step` rows.
    """

    step = 256
    keys: mx.array | None
    values: mx.array | None
    offset: int

    def __init__(self, size: int, slack: int):
        super().__init__(size)  # type: ignore[call-arg]  # the next class is one of mlx-lm's caches
        self.slack = slack
        self.start = 0

    @property
    def context(self) -> int:
        """Rows before a token that it may need."""
        raise NotImplementedError

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last write showed to attention."""
        raise NotImplementedError

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """What attention was shown; mlx-lm 0.31 reads shared layers through it."""
        return (None, None) if self.keys is None else self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append rows at `offset`, dropping whatever stood at or above it."""
        new = keys.shape[2]
        held = self.offset - self.start
        if self.keys is None or self.values is None or held + new > self.keys.shape[2]:
            kept = min(held, self.context + self.slack)
            self.keys = self._moved(self.keys, held, kept, keys)
            self.values = self._moved(self.values, held, kept, values)
            self.start, held = self.offset - kept, kept
        self.keys[..., held : held + new, :] = keys
        self.values[..., held : held + new, :] = values
        self.offset += new

    def _moved(self, rows: mx.array | None, held: int, kept: int, new: mx.array) -> mx.array:
        """A buffer with the last `kept` of `held` rows in front and room for `new`."""
        room = -(-new.shape[2] // self.step) * self.step
        space = mx.zeros((*new.shape[:2], room, new.shape[3]), new.dtype)
        if rows is None or not kept:
            return space
        return mx.concatenate([rows[..., held - kept : held, :], space], axis=2)

    def rows_from(self, pos: int) -> tuple[mx.array, mx.array]:
        """Views of the rows from position `pos` up to the cursor."""
        assert pos >= self.start, "rows below the buffer were asked for"
        assert self.keys is not None and self.values is not None
        low, high = pos - self.start, self.offset - self.start
        return self.keys[..., low:high, :], self.values[..., low:high, :]


class SlidingKVCache(LinearRows, RotatingKVCache):
    """A window of `max_size` rows (the token's own included) and `slack` positions more."""

    _shown = 0  # first position that the last write showed to attention

    @property
    def context(self) -> int:
        return self.max_size - 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._shown = max(self.offset - self.context, 0)
        self.write(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.rows_from(self._shown)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The stock mask; only its one-row case knows of a ring, and here rows are in order."""
        if N > 1 or window_size is None:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        shown = min(self.offset, self.context) + 1
        if shown <= window_size:
            return None
        return mx.arange(shown) >= shown - window_size


class SlackChunkedKVCache(LinearRows, ChunkedKVCache):
    """Attention inside chunks of `chunk_size`; `start_position` is the first row shown."""

    @property
    def context(self) -> int:
        return self.chunk_size - 1

    def maybe_trim_front(self) -> None:
        """Hide the rows that stock mlx-lm drops here; the buffer keeps them for a rewind.

        llama4 calls this before every step, and then builds its mask from `start_position`.
        """
        self.start_position = max(self.offset - self.context, self.start)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.write(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.rows_from(self.start_position)


class WindowAdapter(SharedRows):
    """`SlidingKVCache`: seeks as far as the rows held still fill a window."""

    kind = "window"
    keeps_every_row = False

    def _needs_from(self, pos: int) -> int:
        """First row that the token at `pos` may attend to."""
        return max(pos - self.cache.context, 0)

    def low(self) -> int:
        # Before the first drop every position is whole; afterwards a full window must be held.
        return self.cache.start + self.cache.context if self.cache.start else 0

    def _leave(self) -> None:
        self._adopt(*self._rows(self.cache.start), self.cache.start, self.cache.offset)

    def _rows(self, first: int) -> tuple[mx.array | None, mx.array | None]:
        if self.cache.keys is None or first == self.cache.offset:
            return None, None
        return self.cache.rows_from(first)

    def _adopt(self, keys: mx.array | None, values: mx.array | None, start: int, pos: int) -> None:
        """Stand at `pos` on rows `start..pos`."""
        self.cache.keys, self.cache.values = keys, values
        self.cache.start, self.cache.offset = start, pos
        self._sought = None

    def checkpoint(self) -> Any:
        first = self._needs_from(self.cache.offset)
        rows = (None if a is None else mx.contiguous(a) for a in self._rows(first))
        return self.cache.offset, first, *rows

    def restore_checkpoint(self, state: Any, pos: int) -> None:
        taken, first, keys, values = state
        check_checkpoint(taken, pos)
        if self.low() <= pos <= self.high():
            self.seek(pos)  # the same rows, and more of them below
        else:
            # Aliases: the checkpoint serves again, so it must not be written into.
            keys, values = (None if a is None else mx.array(a) for a in (keys, values))
            self._adopt(keys, values, first, pos)

    def checkpoint_arrays(self, state: Any) -> list[mx.array]:
        return leaves(state[2:])

    def arrays(self) -> list[mx.array]:
        return leaves((self.cache.keys, self.cache.values))

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        pos = self.cache.offset
        start = max(self.cache.start, pos - self.cache.context - self.cache.slack)
        keys, values = self._rows(start)
        rows = {"keys": keys, "values": values}
        arrays = {name: x for name, x in rows.items() if x is not None}
        return arrays, {"pos": pos, "start": start}

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        self._adopt(arrays.get("keys"), arrays.get("values"), meta["start"], meta["pos"])

    def saved_rows(self, meta: dict[str, Any]) -> int:
        return meta["pos"] - meta["start"]

    def bytes_per_token(self) -> int:
        return 0

    def describe(self) -> str:
        return f"the last {self.cache.slack} positions, a cursor move"


class ChunkedAdapter(WindowAdapter):
    """`SlackChunkedKVCache`: a position needs its chunk from the first row on."""

    kind = "chunked"

    def _needs_from(self, pos: int) -> int:
        return pos - pos % self.cache.chunk_size

    def low(self) -> int:
        # Below the next chunk boundary, part of the chunk is gone.
        size = self.cache.chunk_size
        return -(-self.cache.start // size) * size
