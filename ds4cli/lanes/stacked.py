"""Recurrent modules, run once on all lanes that have equally many rows: as a batch (lanes, L, D).

Their caches are lists of states, so the states are stacked, and taken apart again afterwards; a
tape that was recorded on the stacked states is handed to each lane's own frame. What lanes with
other numbers of rows have in common is computed once, see `mixers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ds4cli.hooks.rebind import derived
from ds4cli.lanes.call import LaneCache, LaneError, LaneValue
from ds4cli.lanes.mixers import Product, Sharing, by_lane, here, last_module
from ds4cli.tape import frames


@cache
def stacked(cls: type) -> type:
    """A subclass of a recurrent module, for calls on stand-ins."""
    alone, one_by_one = cls.__call__, by_lane(cls).__call__

    def __call__(self, *args, **kwargs):
        if args and args[0].shape[0] > 1:  # a batch
            return alone(self, *args, **kwargs)
        states = None if here.sharing is not None else _recurrent((*args, *kwargs.values()))
        if states is None:
            return one_by_one(self, *args, **kwargs)
        return _in_groups(partial(alone, self), states, args, kwargs)

    return derived(cls, __call__)


def _in_groups(alone: Callable, states: LaneCache, args: tuple, kwargs: dict) -> Any:
    """What `alone` makes of the rows of all lanes, for one group of lanes after the other."""
    call, settled = states.call, []
    groups = [
        Group(states, lanes) for own in call.by_size.values() for lanes in _alike(states, own)
    ]
    outputs: list[Any] = []
    products: list[Product | None] = []
    now = here.sharing = Sharing() if len(groups) > 1 else None
    try:
        for group in groups:
            if now is not None:
                now.begin(group.part)
            own = [group.pick(arg, now) for arg in args]
            named = {name: group.pick(arg, now) for name, arg in kwargs.items()}
            outputs.append(group.run(alone, own, named))
            products.append(now.last if now is not None else None)
            settled += group.slots
    finally:
        here.sharing = None
    call.settled[states.place] = settled
    if len(groups) == 1:
        return _each(outputs[0], lambda x: x.reshape(1, call.rows, *x.shape[2:]))
    if isinstance(outputs[0], tuple):
        return tuple(_in_order(groups, x) for x in zip(*outputs, strict=True))
    module, rows = last_module(outputs, products)
    joined = _in_order(groups, rows)
    return joined if module is None else module(joined)


def _alike(states: LaneCache, lanes: list[int]) -> Iterable[list[int]]:
    """The lanes by the shapes of their states: token ids that n-grams are looked up with are fewer
    at the beginning of a text."""
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for lane in lanes:
        found.setdefault(tuple([x.shape for x in states.lanes[lane].cache]), []).append(lane)
    return found.values()


def _in_order(groups: Sequence[Group], rows: Sequence[mx.array]) -> mx.array:
    """The rows (lanes, L, ...) of each group as those of all lanes, (1, N, ...)."""
    pairs = zip(groups, rows, strict=True)
    own = {lane: x[i : i + 1] for group, x in pairs for i, lane in enumerate(group.lanes)}
    return mx.concatenate([own[lane] for lane in sorted(own)], axis=1)


def _recurrent(args: Sequence[Any]) -> LaneCache | None:
    """The stand-in for recurrent caches among the arguments, if every state is known."""
    found = [arg for arg in args if isinstance(arg, LaneCache)]
    if len(found) != 1 or type(found[0].lanes[0]) is not ArraysCache:
        return None
    missing = [True for cache in found[0].lanes for slot in cache.cache if slot is None]
    return None if missing else found[0]


class Group:
    """Lanes with equally many rows, as a batch."""

    def __init__(self, states: LaneCache, lanes: list[int]):
        call = states.call
        self.lanes = lanes
        self._states = states
        self._rows = call.sizes[lanes[0]]
        self._all = len(lanes) == len(call.sizes)
        self._caches = [states.lanes[lane] for lane in lanes]
        self._stack: Any = self._caches[0]
        if len(lanes) > 1:
            slots = [cache.cache for cache in self._caches]
            self._stack = ArraysCache(len(slots[0]))
            self._stack.cache = call.stacks.joined((*states.place, lanes[0]), slots)

    @property
    def slots(self) -> list[mx.array]:
        """The states of its lanes, (lanes, ...) each."""
        return self._stack.cache

    def part(self, x: mx.array) -> mx.array:
        """Its rows (lanes, L, ...), of those of all lanes."""
        if not self._all:
            spans = [self._states.call.spans[lane] for lane in self.lanes]
            x = mx.concatenate([x[:, a:b] for a, b in spans], axis=1)
        return x.reshape(len(self.lanes), self._rows, *x.shape[2:])

    def pick(self, arg: Any, now: Sharing | None) -> Any:
        """What the batch gets for an argument."""
        call = self._states.call
        if arg is self._states:
            return self._stack
        if isinstance(arg, LaneCache):
            raise LaneError("a second cache beside that of a recurrence")
        if isinstance(arg, LaneValue):
            values = [arg.lanes[lane] for lane in self.lanes]
            if all(value is None for value in values):
                return None
            return mx.concatenate(values)
        if not call.has_all_rows(arg):
            return arg
        return self.part(arg) if now is None else now.cut(arg)

    def run(self, alone: Callable, args: list, named: dict) -> Any:
        """What `alone` returns for the batch, one array or several, (lanes, L, ...) each; the
        lanes' states move on."""
        if len(self.lanes) == 1 or not frames.recording():
            output = alone(*args, **named)
        else:
            with frames.Recording([self._stack], 0) as (frame,):
                output = alone(*args, **named)
            for i, own in enumerate(self._caches):
                frames.share(own, frame, i)
        if len(self.lanes) > 1:
            self._hand_out()
        shape = len(self.lanes), self._rows
        for x in output if isinstance(output, tuple) else (output,):
            if not isinstance(x, mx.array) or x.shape[:2] != shape:
                raise LaneError("a recurrence returned something else than rows")
        return output

    def _hand_out(self) -> None:
        """The states of the batch, to each lane's own cache."""
        place = *self._states.place, self.lanes[0]
        parts = self._states.call.stacks.apart(place, self.slots, len(self.lanes))
        for own, states in zip(self._caches, parts, strict=True):
            own.cache = states


def _each(output: Any, change: Callable[[mx.array], mx.array]) -> Any:
    return tuple(map(change, output)) if isinstance(output, tuple) else change(output)
