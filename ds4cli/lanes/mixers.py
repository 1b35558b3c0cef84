"""Modules that are handed a cache, run lane by lane with the lane's own cache, mask and rows.

What such a module does before and after it touches the cache is most often a projection, the same
for every lane: computed for each lane apart, its weights would be read as often. So while lanes, or
groups of them, run one after the other, a product of rows that all lanes have is computed once, on
the rows of all; and where the result is a product, those of the lanes are replaced by one on the
joined rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import derived
from ds4cli.lanes.call import Call, LaneCache, LaneValue, call_of

# Functions of one input, row by row.
SHARED = (nn.Linear, nn.QuantizedLinear, nn.RMSNorm, nn.LayerNorm)


class Product(NamedTuple):
    """What a module made of rows of the lanes that ran."""

    result: mx.array
    module: nn.Module
    rows: mx.array


class Sharing:
    """While a module runs on some lanes after others: which arrays are rows that all lanes have,
    and what was computed of them.

    part: the rows of the lanes that run now, of those of all. last: the last product of rows that
    only these lanes have.
    """

    part: Callable[[mx.array], mx.array]

    def __init__(self) -> None:
        self.last: Product | None = None
        # By id. What an id belongs to is kept, so that no other array can have it.
        self._wholes: dict[int, tuple[mx.array, mx.array]] = {}  # a slice, and what it is cut from
        self._done: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}  # result, rows

    def begin(self, part: Callable[[mx.array], mx.array]) -> None:
        """The lanes with that part of the rows run now."""
        self.part, self.last = part, None

    def cut(self, whole: mx.array) -> mx.array:
        """What these lanes have of `whole`."""
        part = self.part(whole)
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
        return self.cut(self._done[key][0])


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
        now = here.sharing = Sharing()
        try:
            for lane, (first, end) in enumerate(call.spans):
                now.begin(partial(_rows, first, end))
                own = [_of_lane(arg, lane, call, now) for arg in args]
                named = {k: _of_lane(arg, lane, call, now) for k, arg in kwargs.items()}
                outputs.append(inner(self, *own, **named))
                products.append(now.last)
        finally:
            here.sharing = None
        return _joined(outputs, products, call)

    return derived(cls, __call__)


def _rows(first: int, end: int, x: mx.array) -> mx.array:
    return x[:, first:end]


def _of_lane(arg: Any, lane: int, call: Call, now: Sharing) -> Any:
    """What a lane gets for an argument."""
    if isinstance(arg, (LaneCache, LaneValue)):
        return arg.lanes[lane]
    if isinstance(arg, (tuple, list)):
        return type(arg)(_of_lane(item, lane, call, now) for item in arg)
    return now.cut(arg) if call.has_all_rows(arg) else arg


def _joined(outputs: list[Any], products: list[Product | None], call: Call) -> Any:
    """What the lanes returned as one: rows are joined, whatever comes with them stays a lane's."""
    if not isinstance(outputs[0], tuple):
        return _joined_rows(outputs, products)
    rows, *others = zip(*outputs, strict=True)
    return _joined_rows(rows, products), *(LaneValue(other, call) for other in others)


def _joined_rows(outputs: Sequence[mx.array], products: list[Product | None]) -> mx.array:
    """The rows of all lanes; through the last module at once where each lane's came from it."""
    module, rows = last_module(outputs, products)
    joined = mx.concatenate([*rows], axis=1)
    return joined if module is None else module(joined)


def last_module(
    outputs: Sequence[mx.array], products: Sequence[Product | None]
) -> tuple[nn.Module | None, Sequence[mx.array]]:
    """The module that made all outputs, of these rows; None, and the outputs, without one."""
    module = products[0].module if products[0] is not None else None
    pairs = list(zip(products, outputs, strict=True))
    made = [p.rows for p, y in pairs if p is not None and p.result is y and p.module is module]
    return (module, made) if len(made) == len(outputs) else (None, outputs)
