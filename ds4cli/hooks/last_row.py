"""Computing one logits row of a long call, or one of each text in it, instead of all of them.

A prefill chunk needs its caches and, for a checkpoint, its last row; the output projection of the
other rows is a good part of the work where the vocabulary is large. The model's own projection
instance gets a subclass that, inside `only()`, looks at the rows that are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, derived

# What mlx-lm's models call their output projection when it is not the tied embedding.
NAMES = ("lm_head", "output", "embed_out")

LAST = (-1,)

_wanted: ContextVar[Sequence[int] | None] = ContextVar("ds4cli_wanted_rows", default=None)


@contextmanager
def only(rows: Sequence[int] = LAST) -> Iterator[None]:
    """Armed models called in here return these logits rows only, (1, len(rows), V)."""
    token = _wanted.set(rows)
    try:
        yield
    finally:
        _wanted.reset(token)


def arm(model: nn.Module) -> Swaps:
    """Let `model` obey `only`. A model whose projection has another name returns all rows."""
    swaps = Swaps()
    for path, module in model.named_modules():
        if path.rsplit(".", 1)[-1] in NAMES:
            swaps.swap(module, _slicing(type(module), "__call__"))
        elif hasattr(module, "as_linear"):
            swaps.swap(module, _slicing(type(module), "as_linear"))
    return swaps


def _slicing(cls: type, method: str) -> type:
    projection = getattr(cls, method)

    def wanted_or_all(self: Any, x: Any) -> Any:
        rows = _wanted.get()
        if rows is not None:
            x = x[:, -1:] if rows is LAST else x[:, mx.array([*rows])]
        return projection(self, x)

    wanted_or_all.__name__ = method
    return derived(cls, wanted_or_all)
