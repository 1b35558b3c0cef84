"""`ArraysCache`: recurrent and convolution states, which no cursor can move back."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from ds4cli.caches.adapter import LayerAdapter
from ds4cli.errors import StateError


class RecurrentAdapter(LayerAdapter):
    """Slots that each step replaces by new arrays: holding the old ones is an exact snapshot.

    The cache counts no tokens; the timeline knows at which position a list of slots was taken.
    """

    kind = "recurrent"
    seekable = False
    row_axis = None
    keeps_every_row = False

    def pos(self) -> None:
        return None

    def low(self) -> int:
        raise StateError("a recurrent layer has no rows to seek in")

    high = low

    def seek(self, pos: int) -> None:
        self.low()

    def checkpoint(self) -> Any:
        # A convolution tail is a few rows sliced from a whole prefill chunk. `contiguous` copies
        # where the buffer behind an array is much larger than the array, and only there.
        return [None if a is None else mx.contiguous(a) for a in self.cache.cache]

    def restore_checkpoint(self, state: Any, pos: int) -> None:
        self.cache.cache = list(state)

    def checkpoint_arrays(self, state: Any) -> list[mx.array]:
        return [a for a in state if a is not None]

    def fork(self) -> LayerAdapter:
        twin = copy.copy(self)
        twin.cache = copy.copy(self.cache)
        twin.cache.cache = list(self.cache.cache)
        return twin

    def arrays(self) -> list[mx.array]:
        return self.checkpoint_arrays(self.cache.cache)

    def state_dict(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        slots = self.cache.cache
        return {str(i): a for i, a in enumerate(slots) if a is not None}, {"slots": len(slots)}

    def load_state(self, arrays: dict[str, mx.array], meta: dict[str, Any]) -> None:
        self.cache.cache = [arrays.get(str(i)) for i in range(meta["slots"])]

    def bytes_per_token(self) -> int:
        return 0

    def describe(self) -> str:
        return "recorded inputs are replayed, or a kept state restored"
