"""What mlx's type stubs leave open: what an array's numbers are, that a flat tree is a list. And
arrays taken apart by what each has of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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


def apart(rows: mx.array, sizes: Sequence[int]) -> list[mx.array]:
    """So many of the rows (N, ...) for each, one after the other: one operation for all."""
    return list(mx.split(rows, [*accumulate(sizes)][:-1]))
