"""`--prompt-cache FILE`: what was read of a prompt, kept between runs. The next run reads what is
new; a hybrid keeps a state where the question begins, so that another question may follow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ds4cli import terminal
from ds4cli.errors import StateError, UsageError

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.engine.session import Session

MOST_HEADER_BYTES = 100_000_000  # what the format allows


def check(path: Path) -> None:
    """UsageError for a place that cannot be written, or a file that is something else: it would be
    written over."""
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write `{path}`", "name a file in a folder of yours")
    if path.exists() and not _is_session(path):
        raise UsageError(f"`{path}` is no prompt cache", "name another file")


def _is_session(path: Path) -> bool:
    """By the header of the file alone."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if 2 <= size <= MOST_HEADER_BYTES else {}
    except (OSError, ValueError):
        return False
    return str(header.get("__metadata__", {}).get("format", "")).startswith("ds4cli session")


def session(engine: Engine, path: Path | None, quiet: bool) -> Session:
    """The session that the file keeps, or a new one; why not, where it does not fit."""
    if path is None or not path.exists():
        return engine.session()
    try:
        return engine.load_session(path)
    except StateError as error:
        if not quiet:
            terminal.note(f"the prompt cache is written anew: {error.message}")
        return engine.session()


def keep(found: Session, path: Path | None) -> None:
    """Write what was read. A failure costs the next run time, and this one nothing."""
    if path is None:
        return
    try:
        found.save(str(path))
    except StateError as error:
        terminal.fail(error.message, error.hint)
