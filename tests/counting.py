"""What work costs, in calls and in forms of graphs: the same on every machine, however busy."""

from __future__ import annotations

import cProfile
import re
from collections import Counter
from io import StringIO
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


class CountedCalls:
    """Around some work: `calls` is then how many functions were called in it, Python's and C's."""

    calls = 0

    def __enter__(self) -> CountedCalls:
        self._profile = cProfile.Profile()
        self._profile.enable()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._profile.disable()
        self.calls = sum(entry.callcount for entry in self._profile.getstats())


def form(tree: Any) -> Counter[tuple[str, str]]:
    """What is to be computed for the arrays of a tree: how often which operation takes what another
    one makes. Shapes are no part of it."""
    written = StringIO()
    mx.export_to_dot(written, *[x for _, x in tree_flatten(tree) if isinstance(x, mx.array)])
    text = written.getvalue()
    names = dict(re.findall(r'(\d+) \[label ="([^"]*)"', text))
    made = {array: names[by] for by, array in re.findall(r'(\d+) -> "(\w+)"', text)}
    taken = re.findall(r'"(\w+)" -> (\d+)', text)
    return Counter((made.get(array, "known"), names[by]) for array, by in taken)
