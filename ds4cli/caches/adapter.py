"""What every layer's adapter can do, whatever cache mlx-lm gave the layer.

An adapter owns all access to one mlx-lm cache object of batch size 1; `ds4cli.rewind.layers` moves
all layers of a model together. A `checkpoint()` is self-contained and outlives any number of later
writes beyond its position.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ds4cli.errors import StateError


class LayerAdapter:
    """One layer's cache. Subclasses implement what raises here, and say what they can:

    kind: what people read. seekable: whether a cursor moves it; else it holds slots that only a
    replay or a checkpoint brings back. keeps_every_row: whether it can go back to any position by
    itself, so that it needs no checkpoint. splits_long_calls: whether a call of more rows than its
    slack leaves positions inside that call out of reach. row_axis: the axis of the saved arrays
    that grows with the position; None: there is none. comes_with_logits: whether attention reads
    every row in the very call that writes it, so that evaluating its logits computes the cache.
    """

    # Without defaults where a wrong guess would be silent: forgetting one stops the load.
    kind: str
    seekable: bool
    keeps_every_row: bool
    splits_long_calls = False
    row_axis: int | None = 2
    comes_with_logits = False

    def __init__(self, cache: Any):
        self.cache = cache

    def pos(self) -> int | None:
        """Tokens consumed; None where the cache does not count them (recurrent layers)."""
        raise NotImplementedError

    def low(self) -> int:
        """Lowest absolute position that `seek` reaches from here."""
        raise NotImplementedError

    def high(self) -> int:
        """Highest position that `seek` reaches: the last one written and not forgotten since."""
        raise NotImplementedError

    def seek(self, pos: int) -> None:
        """Move to any position in [low(), high()]; StateError, unchanged, outside of it."""
        raise NotImplementedError

    def forget_redo(self) -> None:
        """The rows above the position are not gone forward to again."""

    def leave(self, others: Sequence[LayerAdapter], writers: Sequence[LayerAdapter] = ()) -> bool:
        """Before a call: stop sharing rows with `others`, this layer in branches of the text, where
        the call could overwrite what they need, and with `writers`, those of them that the same
        call writes to. Whether rows are shared still."""
        return False

    def checkpoint(self) -> Any:
        """What brings the layer back to this position after any later writes beyond it."""
        raise NotImplementedError

    def restore_checkpoint(self, state: Any, pos: int) -> None:
        """Stand at `pos` again; StateError when `state` was taken elsewhere."""
        raise NotImplementedError

    def restores(self, state: Any) -> bool:
        """Whether `restore_checkpoint(state)` is possible from here."""
        return True

    def checkpoint_arrays(self, state: Any) -> list[mx.array]:
        """The arrays a checkpoint keeps alive: evaluate them with the step that made them."""
        return []

    def fork(self) -> LayerAdapter:
        """An independent twin at the same position with its own cache object."""
        raise NotImplementedError

    def arrays(self) -> list[mx.array]:
        """The live arrays of the cache."""
        raise NotImplementedError

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and JSON-able facts that `load_state` turns into the same state."""
        raise NotImplementedError

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, in a cache built by the same model."""
        raise NotImplementedError

    def saved_rows(self, meta: dict[str, Any]) -> int | None:
        """How many rows each array of a `state_dict` with these facts has; None: it depends."""
        return None

    def bytes_per_token(self) -> int:
        """Bytes that one more position costs; 0 for a fixed state and before the first write."""
        raise NotImplementedError

    def describe(self) -> str:
        """How this layer goes back, in words for the capability report."""
        raise NotImplementedError


class CursorAdapter(LayerAdapter):
    """A layer whose rows stand in position order behind a cursor, `cache.offset`.

    Rows above the cursor stay valid until the model writes again, so a seek can be redone. The
    model moves the cursor only upwards, hence: cursor unchanged since the last seek = no write.
    """

    seekable = True

    def __init__(self, cache: Any):
        super().__init__(cache)
        self._sought: tuple[int, int] | None = None  # (cursor, end) of the last seek

    def pos(self) -> int:
        return self.cache.offset

    def high(self) -> int:
        if self._sought and self._sought[0] == self.cache.offset:
            return self._sought[1]
        return self.cache.offset

    def low(self) -> int:
        return 0

    def seek(self, pos: int) -> None:
        low, end = self.low(), self.high()
        if not low <= pos <= end:
            raise StateError(
                f"position `{pos}` is out of reach: a {self.kind} layer holds `{low}` to `{end}`"
            )
        self._move(pos, end)
        self._sought = (pos, end)

    def _move(self, pos: int, end: int) -> None:
        self.cache.offset = pos

    def forget_redo(self) -> None:
        self._sought = None

    def checkpoint(self) -> Any:
        return self.cache.offset

    def restore_checkpoint(self, state: Any, pos: int) -> None:
        check_checkpoint(state, pos)
        self.seek(pos)

    def fork(self) -> LayerAdapter:
        twin = copy.copy(self)
        twin.cache = copy.copy(self.cache)
        twin.forget_redo()
        return twin


class SharedRows(CursorAdapter):
    """Copy-on-write for branches whose caches write into one buffer in place.

    Forked caches hold the same array object. A writer may go on in place while no living branch
    that still holds that object needs a row at or past the writer's position; else it leaves first.
    No owner is recorded: who writes first past the others' rows keeps the buffer.
    """

    comes_with_logits = True

    def _buffers(self) -> tuple[Any, Any]:
        """What a write goes into. Either may be shared alone: deepseek_v32 puts another `keys`
        object into its cache after every call."""
        return self.cache.keys, self.cache.values

    def _leave(self) -> None:
        """Keep only views of our rows: the next write finds no room in them and copies."""
        raise NotImplementedError

    def leave(self, others: Sequence[LayerAdapter], writers: Sequence[LayerAdapter] = ()) -> bool:
        pos, mine = self.cache.offset, self._buffers()
        sharing = [a for a in others if isinstance(a, SharedRows) and _share(a._buffers(), mine)]
        if any(a.high() > pos or a in writers for a in sharing):
            self._leave()
            return False
        return bool(sharing)


def _share(a: tuple, b: tuple) -> bool:
    """Whether two (keys, values, ...) have an array object in common."""
    return any(x is y is not None for x, y in zip(a[:2], b[:2], strict=True))


class ReplacedRows(CursorAdapter):
    """A layer whose writes make new arrays: references are snapshots, and a seek cuts views."""

    fields: tuple[str, ...]

    def __init__(self, cache: Any):
        super().__init__(cache)
        self._whole: tuple = ()  # the fields at high(), for the redo

    def _get(self) -> tuple:
        return tuple(getattr(self.cache, name) for name in self.fields)

    def _set(self, values: tuple, pos: int) -> None:
        for name, value in zip(self.fields, values, strict=True):
            setattr(self.cache, name, value)
        self.cache.offset = pos
        self._sought = None

    def _cut(self, whole: tuple, end: int, pos: int) -> tuple:
        """The fields at `pos`, from the fields at `end`."""
        raise NotImplementedError

    def _move(self, pos: int, end: int) -> None:
        if self.cache.offset == end:
            self._whole = self._get()
        self._set(self._cut(self._whole, end, pos), pos)

    def forget_redo(self) -> None:
        # The whole arrays would outlive the next write for no one.
        self._whole, self._sought = (), None


def check_checkpoint(taken: int, pos: int) -> None:
    """A checkpoint is only good for the exact number of tokens its state has consumed."""
    if taken != pos:
        raise StateError(f"a checkpoint taken at `{taken}` cannot restore position `{pos}`")
