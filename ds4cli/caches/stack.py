"""Recurrent states of several lanes in one array a slot, from call to call.

A lane's caches stay its own, `ArraysCache` in all that they can do; as long as nobody looks at them
or puts other slots there, what they hold is a row of the stack, which a call for all moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

Layer = list[mx.array | None]  # slots


class Stack:
    """The states of lanes that are called together. layers: per recurrent cache of the model its
    slots (lanes, ...); a call puts another list there, a list once made stays as it is. is_whole:
    whether every lane still has all its slots here."""

    def __init__(self, lanes: Sequence[Sequence[ArraysCache]]):
        """lanes: the recurrent caches of each."""
        slots = [[cache.cache for cache in layer] for layer in zip(*lanes, strict=True)]
        self.layers: list[Layer] = [
            [mx.concatenate([*slot]) for slot in zip(*layer, strict=True)] for layer in slots
        ]
        self.is_whole = True
        self._lanes = len(lanes)
        for row, caches in enumerate(lanes):
            for index, cache in enumerate(caches):
                # In this order, so that it is one thing or the other wherever it is interrupted.
                vars(cache).update(stack=self, row=row, index=index)
                cache.__class__ = StackedCache
                del vars(cache)["cache"]

    def has(self, lanes: Sequence[ArraysCache]) -> bool:
        """Whether these lanes, of each of which this is one recurrent cache, are its own, all of
        them, in order, and nobody looked."""
        if not self.is_whole or len(lanes) != self._lanes:
            return False
        rows = [c.row for c in lanes if type(c) is StackedCache and c.stack is self]
        return rows == [*range(self._lanes)]


class StackedCache(ArraysCache):
    """An `ArraysCache` whose slots are a row of a stack, until they are looked at."""

    stack: Stack
    row: int
    index: int

    @property
    def cache(self) -> Any:
        self.cache = _row(self.stack.layers[self.index], self.row)
        return self.cache

    @cache.setter
    def cache(self, slots: Any) -> None:
        self.stack.is_whole = False
        vars(self)["cache"] = slots
        self.__class__ = ArraysCache  # type: ignore[assignment]  # what it was before
        del self.stack, self.row, self.index


class StackedSlots(Sequence[Layer]):
    """The slots of a lane, per recurrent cache, as they were when this was made: cut out of those
    of all lanes when somebody looks."""

    def __init__(self, layers: list[Layer], row: int):
        self._layers, self._row = layers, row
        self._own: list[Layer] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: Any) -> Any:
        if self._own is None:
            self._own = self._layers = [_row(layer, self._row) for layer in self._layers]
        return self._own[index]


def _row(slots: Layer, row: int) -> Layer:
    return [None if x is None else x[row : row + 1] for x in slots]
