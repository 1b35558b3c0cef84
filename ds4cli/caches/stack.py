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
    whether every lane still has all its slots here. lanes: how many there are."""

    def __init__(self, lanes: Sequence[Sequence[ArraysCache]]):
        """lanes: the recurrent caches of each."""
        slots: list[list[Any]] = [[cache.cache for cache in caches] for caches in lanes]
        self.layers = stacked(slots)
        self.is_whole = True
        self.lanes = len(lanes)
        for row, caches in enumerate(lanes):
            for index, cache in enumerate(caches):
                # In this order, so that it is one thing or the other wherever it is interrupted.
                vars(cache).update(stack=self, row=row, index=index)
                cache.__class__ = StackedCache
                del vars(cache)["cache"]

    def has(self, lanes: Sequence[ArraysCache]) -> bool:
        """Whether these lanes, of each of which this is one recurrent cache, are its own, all of
        them, in order, and nobody looked."""
        if not self.is_whole or len(lanes) != self.lanes:
            return False
        rows = [c.row for c in lanes if type(c) is StackedCache and c.stack is self]
        return rows == [*range(self.lanes)]


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

    @property
    def place(self) -> tuple[list[Layer], int] | None:
        """Those of all lanes, and which of them this is; None once somebody looked."""
        return (self._layers, self._row) if self._own is None else None

    def are_in(self, caches: Sequence[Any]) -> bool:
        """Whether they are what these caches of the lane hold."""
        own, place = vars(caches[0]), self.place
        if place is None or "stack" not in own or not own["stack"].is_whole:
            return False
        return own["stack"].layers is place[0] and own["row"] == place[1]


def stacked(lanes: Sequence[Sequence[list]]) -> list[Layer]:
    """The slots (lanes, ...) per recurrent cache, of those of each lane, in order."""
    places = [own.place if isinstance(own, StackedSlots) else None for own in lanes]
    layers: list[Layer] = places[0][0] if places[0] is not None else [[None]]
    rows = [place[1] for place in places if place is not None and place[0] is layers]
    first = layers[0][0]
    if first is not None and rows == [*range(len(lanes))] == [*range(len(first))]:
        return layers
    return [_concatenated(layer) for layer in zip(*lanes, strict=True)]


def _concatenated(lanes: Sequence[Layer]) -> Layer:
    """The slots of one cache, (lanes, ...) each."""
    return [mx.concatenate([*slot]) for slot in zip(*lanes, strict=True)]


def _row(slots: Layer, row: int) -> Layer:
    return [None if x is None else x[row : row + 1] for x in slots]
