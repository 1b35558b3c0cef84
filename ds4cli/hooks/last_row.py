"""Computing one logits row of a long call instead of all of them.

A prefill chunk needs its caches and, for a checkpoint, its last row; the output projection of the
other rows is a good part of the work where the vocabulary is large. The model's own projection
instance gets a subclass that, inside `only()`, looks at the last row only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, derived

# What mlx-lm's models call their output projection when it is not the tied embedding.
NAMES = ("lm_head", "output", "embed_out")

_last_only: ContextVar[bool] = ContextVar("ds4cli_last_row", default=False)


@contextmanager
def only() -> Iterator[None]:
    """Armed models called in here return the last logits row only, (1, 1, V)."""
    token = _last_only.set(True)
    try:
        yield
    finally:
        _last_only.reset(token)


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

    def last_or_all(self: Any, x: Any) -> Any:
        return projection(self, x[:, -1:] if _last_only.get() else x)

    last_or_all.__name__ = method
    return derived(cls, last_or_all)
