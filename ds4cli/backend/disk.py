"""What is written being on disk, not only on its way."""

from __future__ import annotations

import contextlib
import fcntl
import os

# macOS: fsync leaves data in the drive's own memory, this asks the drive to write it.
_FULL = getattr(fcntl, "F_FULLFSYNC", None)


def sync(fd: int) -> None:
    """Force a file, or a folder's names, to disk. OSError if that fails."""
    if _FULL is not None:
        with contextlib.suppress(OSError):  # network and foreign file systems know fsync only
            fcntl.fcntl(fd, _FULL)
            return
    os.fsync(fd)
