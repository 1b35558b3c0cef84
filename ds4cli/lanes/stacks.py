"""States of recurrent caches, stacked from call to call."""

from __future__ import annotations

from operator import is_

import mlx.core as mx


class Stacks:
    """The states of a model's recurrent caches as the last call left them, stacked: what comes
    back untouched need not be stacked again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[list], list]] = {}

    def joined(self, place: tuple[int, ...], lanes: list[list[mx.array]]) -> list[mx.array]:
        """The slots of the cache at `place`, (lanes, ...) each."""
        parts, wholes = self._known.get(place, ([], []))
        if len(parts) == len(lanes) and all(map(_are_same, parts, lanes)):
            return [*wholes]
        return [mx.concatenate([*slot]) for slot in zip(*lanes, strict=True)]

    def apart(
        self, place: tuple[int, ...], slots: list[mx.array], lanes: int
    ) -> list[list[mx.array]]:
        """The slots of each lane (views)."""
        parts = [[*own] for own in zip(*(mx.split(x, lanes) for x in slots), strict=True)]
        self._known[place] = parts, slots
        return [[*own] for own in parts]


def _are_same(a: list, b: list) -> bool:
    return all(map(is_, a, b))
