"""Caches that keep every row: KVCache, QuantizedKVCache and ConcatenateKVCache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ds4cli.caches.adapter import Hold, SharedRows


class KVAdapter(SharedRows):
    """`KVCache`: rows behind the cursor are never rewritten, so a frontier is the integer.

    Never keep its arrays: a slice makes the next write copy the whole buffer, and a reference is
    written through.
    """

    kind = "kv"

    def _leave(self) -> None:
        self.cache.keys, self.cache.values = self._rows()

    def _rows(self) -> Any:
        """Rows below the cursor, as views; None for none, the way an empty cache has it."""
        cache = self.cache
        if not cache.offset or cache.keys is None:
            return None, None
        return tree_map(lambda x: x[..., : cache.offset, :], (cache.keys, cache.values))

    def arrays(self) -> list[mx.array]:
        return leaves((self.cache.keys, self.cache.values))

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        keys, values = self._rows()
        arrays = {"keys": keys, "values": values} if keys is not None else {}
        return dict(tree_flatten(arrays)), {"pos": self.cache.offset}

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        self.cache.keys, self.cache.values = arrays.get("keys"), arrays.get("values")
        self._loaded(meta["pos"])

    def _loaded(self, pos: int) -> None:
        self.cache.offset = pos
        self._sought = None

    def bytes_per_token(self) -> int:
        arrays = self.arrays()
        return sum(a.nbytes for a in arrays) // arrays[0].shape[-2] if arrays else 0

    def describe(self) -> str:
        return "any depth, a cursor move"


class QuantizedAdapter(KVAdapter):
    """`QuantizedKVCache`: keys and values are triples of packed rows, scales and biases."""

    kind = "quantized kv"

    def _buffer(self) -> mx.array | None:
        return self.cache.keys[0] if self.cache.keys else None

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        for name in ("keys", "values"):
            parts = tuple(arrays[f"{name}.{i}"] for i in range(3)) if arrays else None
            setattr(self.cache, name, parts)
        self._loaded(meta["pos"])


class ConcatenateAdapter(KVAdapter):
    """`ConcatenateKVCache`: each write makes new arrays, so references are snapshots.

    Its own trim moves only the offset and leaves the rows in place; here the arrays are cut too.
    """

    kind = "concatenate"

    def __init__(self, cache: Any):
        super().__init__(cache)
        self._whole = (None, None)  # keys and values up to end(), for the redo

    def _move(self, pos: int, end: int) -> None:
        if self.cache.offset == end:
            self._whole = (self.cache.keys, self.cache.values)
        self.cache.keys, self.cache.values = (x[..., :pos, :] if pos else None for x in self._whole)
        self.cache.offset = pos

    def _references(self) -> Any:
        return self.cache.keys, self.cache.values, self._whole

    def _writes_into(self, hold: Hold) -> bool:
        return False

    def _put_back(self, hold: Hold) -> None:
        self.cache.keys, self.cache.values, self._whole = hold.rows
        self.cache.offset = hold.pos

    def before_write(self) -> None:
        # Nothing is shared; but the whole arrays would outlive the write for no one.
        self._whole = (None, None)
        self._sought = None


def leaves(tree: Any) -> list[mx.array]:
    """The arrays of a tree that may hold None."""
    return [a for _, a in tree_flatten(tree) if a is not None]
