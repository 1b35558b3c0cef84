"""Files that are whole or absent: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4cli.backend import disk


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """A new empty file, readable by its owner alone, that takes the place of `path` when the body
    is done; where the body fails, what was there stays. Its name, which ends with `suffix`, fits
    wherever that of `path` does.
    """
    handle, name = tempfile.mkstemp(suffix, ".ds4cli-", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            disk.sync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
