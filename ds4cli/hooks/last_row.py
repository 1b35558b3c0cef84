"""Computing one logits row of a long call, or one of each text in it, instead of all of them.

A prefill chunk needs its caches and, for a checkpoint, its last row; the output projection of the
other rows is a good part of the work where the vocabulary is large. Inside `only()` the model's own
projection instance has a subclass that looks at the rows that are wanted; a step never meets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import derived
from ds4cli.models import parts

LAST = (-1,)

# Of this thread: another one may call the model meanwhile, and gets all rows.
_wanted: ContextVar[Sequence[int] | None] = ContextVar("ds4cli_wanted_rows", default=None)


class Projections:
    """Where a model makes its logits: the output projection, or an embedding used as one. A model
    that has neither under a known name returns all rows."""

    def __init__(self, model: nn.Module):
        output = parts.output(model)
        found = [] if output is None else [(output, "__call__")]
        tied = (m for m in model.modules() if hasattr(m, "as_linear") and m is not output)
        found += [(m, "as_linear") for m in tied]
        # A class of its own, as it was: whoever ends `only` gives that one back, in any order.
        self._modules = [(m, type(m), _slicing(type(m), method)) for m, method in found]

    @contextmanager
    def only(self, rows: Sequence[int] = LAST) -> Iterator[None]:
        """Calls of the model in here return these logits rows only, (1, len(rows), V)."""
        token = _wanted.set(rows)
        try:
            for module, _, slicing in self._modules:
                module.__class__ = slicing
            yield
        finally:
            for module, own, _ in self._modules:
                module.__class__ = own
            _wanted.reset(token)


@cache
def _slicing(cls: type, method: str) -> type:
    projection = getattr(cls, method)

    def wanted_or_all(self: Any, x: mx.array) -> mx.array:
        rows = _wanted.get()
        if rows is not None:
            x = x[:, -1:] if rows is LAST else x[:, mx.array([*rows])]
        return projection(self, x)

    wanted_or_all.__name__ = method
    return derived(cls, wanted_or_all)
