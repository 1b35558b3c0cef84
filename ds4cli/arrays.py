"""What mlx's type stubs leave open: what an array's numbers are, and that a flat tree is a list."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten


def integer(x: mx.array) -> int:
    """The one element of an integer array."""
    return cast(int, x.item())


def number(x: mx.array) -> float:
    """The one element of a real array."""
    return cast(float, x.item())


def integers(x: mx.array) -> list[int]:
    """The elements of an integer array (n,)."""
    return cast("list[int]", x.tolist())


def tables(x: mx.array) -> list[list[int]]:
    """The rows of an integer array (m, n)."""
    return cast("list[list[int]]", x.tolist())


def numbers(x: mx.array) -> list[float]:
    """The elements of a real array (n,)."""
    return cast("list[float]", x.tolist())


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path: arrays in a model's parameters."""
    return cast("list[tuple[str, Any]]", tree_flatten(tree))
