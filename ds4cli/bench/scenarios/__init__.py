"""What is measured: one function per scenario, lab in, rows out. To add one, write a module with a
function of its name, and name it in `SCENARIOS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.bench.measure import Row

SCENARIOS = ("rewind", "acceptance", "control", "agent", "edits", "memory")


def scenario(name: str) -> Callable[[Lab], Iterator[Row]]:
    """The function of this name, imported now."""
    return getattr(import_module(f"{__name__}.{name}"), name)
