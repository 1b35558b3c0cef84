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
    slots (lanes, ...); a call puts another list there, a list once made stays as it is. has_all: of
    each lane whether all its slots are still here."""

    def __init__(self, lanes: Sequence[Sequence[ArraysCache]]):
        """lanes: the recurrent caches of each."""
        self.layers = stacked([slots_of(caches) for caches in lanes])
        mx.async_eval(self.layers)
        self.has_all = [True] * len(lanes)
        for row, caches in enumerate(lanes):
            for index, cache in enumerate(caches):
                # In this order, so that it is one thing or the other wherever it is interrupted.
                vars(cache).update(stack=self, row=row, index=index)
                cache.__class__ = StackedCache
                vars(cache).pop("cache", None)

    def has(self, lanes: Sequence[ArraysCache]) -> bool:
        """Whether these lanes, of each of which this is one recurrent cache, are its own, all of
        them, in order, and nobody looked."""
        if False in self.has_all or len(lanes) != len(self.has_all):
            return False
        rows = [c.row for c in lanes if type(c) is StackedCache and c.stack is self]
        return rows == [*range(len(lanes))]


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
        self.stack.has_all[self.row] = False
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
        stack, place = stack_of(caches), self.place
        if stack is None or place is None:
            return False
        return place[0] is stack.layers and place[1] == caches[0].row


def stack_of(caches: Sequence[Any]) -> Stack | None:
    """Where all slots of a lane, whose recurrent caches these are, lie; None if nowhere."""
    first = caches[0]
    if type(first) is not StackedCache or not first.stack.has_all[first.row]:
        return None
    return first.stack


def slots_of(caches: Sequence[Any]) -> Sequence[Layer]:
    """The slots of a lane, whose recurrent caches these are, as they are now."""
    stack = stack_of(caches)
    if stack is None:
        return [[*c.cache] for c in caches]
    return StackedSlots(stack.layers, caches[0].row)


def stacked(lanes: Sequence[Sequence[list]]) -> list[Layer]:
    """The slots (lanes, ...) per recurrent cache, of those of each lane, in order. Lanes that lie
    one after the other in a stack are taken as one piece: most often one of many is another."""
    runs: list[tuple[Any, int, int]] = []  # layers, first lane, end
    for own in lanes:
        place = own.place if isinstance(own, StackedSlots) else None
        layers, row = (own, 0) if place is None else place
        if runs and runs[-1][0] is layers and runs[-1][2] == row:
            runs[-1] = layers, runs[-1][1], row + 1
        else:
            runs.append((layers, row, row + 1))
    whole, first, end = runs[0]
    if len(runs) == 1 and isinstance(whole, list) and (first, end) == (0, len(whole[0][0])):
        return whole
    pieces = [[[x[a:b] for x in slots] for slots in layers] for layers, a, b in runs]
    return [
        [mx.concatenate([*slot]) for slot in zip(*slots, strict=True)]
        for slots in zip(*pieces, strict=True)
    ]


def _row(slots: Layer, row: int) -> Layer:
    return [None if x is None else x[row : row + 1] for x in slots]
