"""Files that only grow, a whole piece at a time, and belong to one process while they are open."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from ds4cli import signals
from ds4cli.backend import disk


class Taken(OSError):
    """Another process has the file open."""


class Appended:
    """An open file. OSError where it cannot be opened or written, Taken where another has it.

    create: make it if there is none, for whom `mode` lets.
    """

    def __init__(self, path: Path, mode: int, create: bool):
        is_new = create and not path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.fd = os.open(path, flags, mode)
        try:
            self._lock()
            if is_new:
                _sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Taken(*error.args) from None

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def append(self, data: bytes, at: int, sync: bool = True) -> None:
        """`data` whole, from `at` on, which is the end but for what an earlier failure left there;
        or OSError and the file as it was."""
        view = memoryview(data)
        with signals.Whole():
            try:
                os.ftruncate(self.fd, at)
                while view:
                    view = view[os.write(self.fd, view) :]
                if sync:
                    disk.sync(self.fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, at)
                raise

    def close(self) -> None:
        """Give it back to others. Nothing is left to write."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def reason(error: OSError) -> str:
    """What the system says of it, to stand in a sentence."""
    return (error.strerror or str(error)).lower()


def _sync_folder(folder: Path) -> None:
    """Make a new file's name as durable as its content."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        disk.sync(fd)
    finally:
        os.close(fd)
