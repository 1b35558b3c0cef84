"""States of recurrent caches, stacked from call to call."""

from __future__ import annotations

from itertools import chain

import mlx.core as mx


class Stacks:
    """The states of a model's recurrent caches as the last call left them, stacked: what comes
    back untouched need not be stacked again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[list], list]] = {}

    def joined(self, place: tuple[int, ...], lanes: list[list[mx.array]]) -> list[mx.array]:
        """The slots of the cache at `place`, (lanes, ...) each. place: of the cache, and the first
        lane's number."""
        parts, wholes = self._known.get(place, ([], []))
        if len(parts) == len(lanes):
            pairs = zip(chain.from_iterable(parts), chain.from_iterable(lanes), strict=True)
            if all([a is b for a, b in pairs]):
                return [*wholes]
        return [mx.concatenate([*slot]) for slot in zip(*lanes, strict=True)]

    def apart(
        self, place: tuple[int, ...], slots: list[mx.array], lanes: int
    ) -> list[list[mx.array]]:
        """The slots of each lane (views)."""
        parts = [[*own] for own in zip(*(mx.split(x, lanes) for x in slots), strict=True)]
        self._known[place] = parts, slots
        return [[*own] for own in parts]
