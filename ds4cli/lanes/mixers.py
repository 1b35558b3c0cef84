"""Modules that are handed a cache, run lane by lane with the lane's own cache, mask and rows.

What such a module does before and after it touches the cache is most often a projection, the same
for every lane: computed for each lane apart, its weights would be read as often. So while lanes run
one after the other, a product of rows that all lanes have is computed once, on the rows of all; and
where the result is a product, the products of the lanes are replaced by one on the joined rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import derived
from ds4cli.lanes.call import Call, LaneCache, LaneValue, call_of

# Functions of one input, row by row.
SHARED = (nn.Linear, nn.QuantizedLinear, nn.RMSNorm, nn.LayerNorm)


class Product(NamedTuple):
    """What a module made of rows of one lane."""

    result: mx.array
    module: nn.Module
    rows: mx.array


class Sharing:
    """While a module runs lane by lane: which arrays are rows that all lanes have, and what was
    computed of them.

    last: the last product of rows that only this lane has.
    """

    def __init__(self, call: Call):
        self.lane = 0
        self.last: Product | None = None
        self._call = call
        # By id. What an id belongs to is kept, so that no other array can have it.
        self._wholes: dict[int, tuple[mx.array, mx.array]] = {}  # a slice, and what it is cut from
        self._done: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}  # result, rows

    def of_lane(self, arg: Any) -> Any:
        """What the lane that runs gets for an argument."""
        if isinstance(arg, (LaneCache, LaneValue)):
            return arg.lanes[self.lane]
        if isinstance(arg, (tuple, list)):
            return type(arg)(self.of_lane(item) for item in arg)
        return self._slice(arg) if self._call.has_all_rows(arg) else arg

    def _slice(self, whole: mx.array) -> mx.array:
        first, end = self._call.spans[self.lane]
        part = whole[:, first:end]
        self._wholes[id(part)] = part, whole
        return part

    def run(self, module: nn.Module, inner: Callable, x: mx.array) -> mx.array:
        """What `module` makes of `x`."""
        known = self._wholes.get(id(x))
        if known is None:
            result = inner(module, x)
            self.last = Product(result, module, x)
            return result
        key = id(module), id(known[1])
        if key not in self._done:
            self._done[key] = inner(module, known[1]), known[1]
        return self._slice(self._done[key][0])


class Here(threading.local):
    """What a thread runs lane by lane."""

    sharing: Sharing | None = None


here = Here()


@cache
def sharing(cls: type) -> type:
    """A subclass of a row by row module that computes rows of all lanes once."""
    inner = cls.__call__

    def __call__(self, x):
        now = here.sharing
        return inner(self, x) if now is None else now.run(self, inner, x)

    return derived(cls, __call__)


@cache
def by_lane(cls: type) -> type:
    """A subclass of a module that uses a cache, for calls on stand-ins."""
    inner = cls.__call__

    def __call__(self, *args, **kwargs):
        call = None if here.sharing is not None else call_of((*args, *kwargs.values()))
        if call is None:
            return inner(self, *args, **kwargs)
        outputs: list[Any] = []
        products: list[Product | None] = []
        now = here.sharing = Sharing(call)
        try:
            for lane in range(len(call.sizes)):
                now.lane, now.last = lane, None
                own = [now.of_lane(arg) for arg in args]
                named = {name: now.of_lane(arg) for name, arg in kwargs.items()}
                outputs.append(inner(self, *own, **named))
                products.append(now.last)
        finally:
            here.sharing = None
        return _joined(outputs, products, call)

    return derived(cls, __call__)


def _joined(outputs: list[Any], products: list[Product | None], call: Call) -> Any:
    """What the lanes returned as one: rows are joined, whatever comes with them stays a lane's."""
    if not isinstance(outputs[0], tuple):
        return _joined_rows(outputs, products)
    rows, *others = zip(*outputs, strict=True)
    return _joined_rows(rows, products), *(LaneValue(other, call) for other in others)


def _joined_rows(outputs: Sequence[mx.array], products: list[Product | None]) -> mx.array:
    """The rows of all lanes; through the last module at once where each lane's came from it."""
    module = products[0].module if products[0] is not None else None
    pairs = list(zip(products, outputs, strict=True))
    if module is not None and all(
        p is not None and p.result is y and p.module is module for p, y in pairs
    ):
        return module(mx.concatenate([p.rows for p in products if p is not None], axis=1))
    return mx.concatenate([*outputs], axis=1)
