"""Recurrent modules, run once on all lanes that have equally many rows: as a batch (lanes, L, D).

Their caches are lists of states, so the states are stacked, and taken apart again afterwards; a
tape that was recorded on the stacked states is handed to each lane's own frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ds4cli.hooks.rebind import derived
from ds4cli.lanes.call import LaneCache, LaneError, LaneValue
from ds4cli.lanes.mixers import by_lane, here
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
        call, settled = states.call, []
        outputs: list[Any] = [None] * len(states.lanes)
        for lanes in call.by_size.values():
            group = Group(states, lanes)
            own = [group.pick(arg) for arg in args]
            named = {name: group.pick(arg) for name, arg in kwargs.items()}
            output = group.run(alone, self, own, named)
            settled += group.slots
            for i, lane in enumerate(lanes if len(lanes) < len(outputs) else ()):
                outputs[lane] = _each(output, itemgetter(slice(i, i + 1)))
        call.settled[states.place] = settled
        if len(lanes) == len(outputs):
            return _each(output, lambda x: x.reshape(1, call.rows, *x.shape[2:]))
        return _joined(outputs)

    return derived(cls, __call__)


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
        self._states, self._lanes = states, lanes
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

    def pick(self, arg: Any) -> Any:
        """What the batch gets for an argument."""
        call = self._states.call
        if arg is self._states:
            return self._stack
        if isinstance(arg, LaneCache):
            raise LaneError("a second cache beside that of a recurrence")
        if isinstance(arg, LaneValue):
            values = [arg.lanes[lane] for lane in self._lanes]
            if all(value is None for value in values):
                return None
            return mx.concatenate(values)
        if not call.has_all_rows(arg):
            return arg
        if not self._all:
            spans = [call.spans[lane] for lane in self._lanes]
            arg = mx.concatenate([arg[:, a:b] for a, b in spans], axis=1)
        return arg.reshape(len(self._lanes), self._rows, *arg.shape[2:])

    def run(self, alone: Callable, module: Any, args: list, named: dict) -> Any:
        """The module's output for the batch, one array or several, (lanes, L, ...) each; the lanes'
        states move on."""
        if len(self._lanes) == 1 or not frames.recording():
            output = alone(module, *args, **named)
        else:
            with frames.Recording([self._stack], 0) as (frame,):
                output = alone(module, *args, **named)
            for i, own in enumerate(self._caches):
                frames.share(own, frame, i)
        if len(self._lanes) > 1:
            self._hand_out()
        shape = len(self._lanes), self._rows
        for x in output if isinstance(output, tuple) else (output,):
            if not isinstance(x, mx.array) or x.shape[:2] != shape:
                raise LaneError("a recurrence returned something else than rows")
        return output

    def _hand_out(self) -> None:
        """The states of the batch, to each lane's own cache."""
        place = *self._states.place, self._lanes[0]
        parts = self._states.call.stacks.apart(place, self.slots, len(self._lanes))
        for own, states in zip(self._caches, parts, strict=True):
            own.cache = states


def _each(output: Any, change: Callable[[mx.array], mx.array]) -> Any:
    return tuple(map(change, output)) if isinstance(output, tuple) else change(output)


def _joined(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(mx.concatenate([*x], axis=1) for x in zip(*outputs, strict=True))
    return mx.concatenate(outputs, axis=1)
