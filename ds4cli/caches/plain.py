"""Caches that keep every row: KVCache, QuantizedKVCache and ConcatenateKVCache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ds4cli.caches.adapter import ReplacedRows, SharedRows


class KeysAndValues:
    """What caches with `keys` and `values` of shape (1, heads, rows, dim) have in common."""

    cache: Any

    def _rows(self) -> tuple:
        """Rows below the cursor, as views; None for none, the way an empty cache has it."""
        cache = self.cache
        if not cache.offset or cache.keys is None:
            return None, None
        return tree_map(lambda x: x[..., : cache.offset, :], (cache.keys, cache.values))

    def arrays(self) -> list[mx.array]:
        return leaves((self.cache.keys, self.cache.values))

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        keys, values = self._rows()
        arrays = {} if keys is None else dict(tree_flatten({"keys": keys, "values": values}))
        return arrays, {"pos": self.cache.offset}

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        self.cache.keys, self.cache.values = arrays.get("keys"), arrays.get("values")
        self.cache.offset, self._sought = meta["pos"], None

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
        return tuple(packed[0] if packed else None for packed in super()._buffers())

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        triples = [
            tuple(arrays[f"{k}.{i}"] for i in range(3)) for k in ("keys", "values") if arrays
        ]
        super().load_state(dict(zip(("keys", "values"), triples, strict=False)), meta)


class ConcatenateAdapter(KeysAndValues, ReplacedRows):
    """`ConcatenateKVCache`: its own trim moves only the offset; here the arrays are cut too."""

    kind = "concatenate"
    keeps_every_row = True
    fields = ("keys", "values")

    def _cut(self, whole: tuple, end: int, pos: int) -> tuple:
        return tuple(x[..., :pos, :] if pos else None for x in whole)


def leaves(tree: Any) -> list[mx.array]:
    """The arrays of a tree that may hold None."""
    return [a for _, a in tree_flatten(tree) if a is not None]
