"""Caches that keep every row: KVCache, QuantizedKVCache and ConcatenateKVCache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ds4cli.arrays import named_leaves
from ds4cli.caches.adapter import ReplacedRows, SharedRows


class KeysAndValues:
    """What caches with `keys` and `values` of shape (1, heads, rows, dim) have in common."""

    cache: Any
    _sought: tuple[int, int] | None

    def _rows(self) -> tuple[Any, Any]:
        """Rows below the cursor, as views; None for none, the way an empty cache has it."""
        cache = self.cache
        if not cache.offset or cache.keys is None:
            return None, None
        return tree_map(lambda x: x[..., : cache.offset, :], (cache.keys, cache.values))

    def arrays(self) -> list[mx.array]:
        return leaves((self.cache.keys, self.cache.values))

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        keys, values = self._rows()
        arrays = {} if keys is None else dict(named_leaves({"keys": keys, "values": values}))
        return arrays, {"pos": self.cache.offset}

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        self._put(arrays.get("keys"), arrays.get("values"), meta["pos"])

    def _put(self, keys: Any, values: Any, pos: int) -> None:
        """Stand at `pos` on these rows: arrays, or packed ones."""
        self.cache.keys, self.cache.values = keys, values
        self.cache.offset, self._sought = pos, None

    def saved_rows(self, meta: dict[str, Any]) -> int:
        return meta["pos"]

    def bytes_per_token(self) -> int:
        arrays = self.arrays()
        return sum(a.nbytes for a in arrays) // arrays[0].shape[-2] if arrays else 0

    def describe(self) -> str:
        return "any depth, a cursor move"


class KVAdapter(KeysAndValues, SharedRows):
    """`KVCache`: rows behind the cursor are never rewritten, so a checkpoint is the integer.

    Never keep its arrays: a slice makes the next write copy the whole buffer, and a reference is
    written through.
    """

    kind = "kv"
    keeps_every_row = True

    def _leave(self) -> None:
        self.cache.keys, self.cache.values = self._rows()


class QuantizedAdapter(KVAdapter):
    """`QuantizedKVCache`: keys and values are triples of packed rows, scales and biases."""

    kind = "quantized kv"

    def _buffers(self) -> tuple[Any, Any]:
        keys, values = super()._buffers()
        return keys[0] if keys else None, values[0] if values else None

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        keys, values = (
            tuple(arrays[f"{name}.{i}"] for i in range(3)) if arrays else None
            for name in ("keys", "values")
        )
        self._put(keys, values, meta["pos"])


class ConcatenateAdapter(KeysAndValues, ReplacedRows):
    """`ConcatenateKVCache`: its own trim moves only the offset; here the arrays are cut too."""

    kind = "concatenate"
    keeps_every_row = True
    fields = ("keys", "values")

    def _cut(self, whole: tuple, end: int, pos: int) -> tuple:
        return tuple(x[..., :pos, :] if pos else None for x in whole)


def leaves(tree: Any) -> list[mx.array]:
    """The arrays of a tree that may hold None."""
    return [a for _, a in named_leaves(tree) if a is not None]
