"""Interpreters that cannot run this: said in one line, before anything fails in many.

It is read by those interpreters too, so it is written for them.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

OLDEST = (3, 10)


def problem(
    version: Sequence[int] = sys.version_info[:3],
    system: str | None = None,
    machine: str | None = None,
) -> str:
    """Why this interpreter cannot run ds4cli, with a hint; empty if it can."""
    if tuple(version[:2]) < OLDEST:
        wanted, found = (".".join(map(str, v[:2])) for v in (OLDEST, version))
        hint = "make the environment with a newer one: `python3.12 -m venv .venv`"
        return f"ds4cli needs Python {wanted} or newer, not `{found}`\nhint: {hint}"
    if (system or platform.system(), machine or platform.machine()) == ("Darwin", "x86_64"):
        hint = "on Apple silicon this one runs under Rosetta: install Python for arm64"
        return f"MLX runs on Apple silicon only, and this Python is for `x86_64`\nhint: {hint}"
    return ""
