"""What is measured: one function per scenario, lab in, rows out. To add one, write it and name it
in `SCENARIOS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ds4cli.bench.measure import Row
from ds4cli.bench.scenarios.acceptance import acceptance
from ds4cli.bench.scenarios.agent import agent
from ds4cli.bench.scenarios.control import control
from ds4cli.bench.scenarios.edits import edits
from ds4cli.bench.scenarios.memory import memory
from ds4cli.bench.scenarios.rewind import rewind

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab

SCENARIOS: dict[str, Callable[[Lab], Iterator[Row]]] = {
    "rewind": rewind,
    "acceptance": acceptance,
    "control": control,
    "agent": agent,
    "edits": edits,
    "memory": memory,
}
