"""Input lines, numbered from 1: from a file, which can be looked through first, or from a pipe,
of which only what has arrived is known. Neither is read whole.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ds4cli.errors import UsageError

# Lines that are looked at together: to group them, and to see where their prompts branch.
BLOCK_LINES = 256
BLOCK_BYTES = 8 << 20
READ_BYTES = 1 << 16
# How often a wait for input looks whether the user wants to stop.
POLL_S = 0.1

Line = tuple[int, bytes]
FileId = tuple[int, int]


def file_id(file: int | str | Path) -> FileId | None:
    """Device and inode: what tells a regular file, whatever it is called. None for all else."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):  # there is none, or the name cannot be one's
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


class _Source:
    """A stream that is closed at the end, unless it is standard input."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream

    def close(self) -> None:
        if sys.stdin is None or self._stream is not sys.stdin.buffer:
            self._stream.close()


class FileLines(_Source):
    """The lines of a file, from where it stands."""

    is_pipe = False

    def __init__(self, stream: BinaryIO):
        super().__init__(stream)
        self._start = stream.tell()
        self._number = 0

    def preview(self) -> Iterator[Line]:
        """All lines; afterwards the file stands at its beginning again."""
        yield from enumerate(self._stream, 1)
        self._stream.seek(self._start)

    def next(self, wait: bool, cancel: Callable[[], bool]) -> Line | None:
        """The next line; None at the end."""
        raw = self._stream.readline()
        self._number += bool(raw)
        return (self._number, raw) if raw else None


class PipeLines(_Source):
    """The lines of a pipe, as they come."""

    is_pipe = True

    def __init__(self, stream: BinaryIO):
        super().__init__(stream)
        self._fd = stream.fileno()  # nothing is read through the stream's own buffer
        self._ready: deque[Line] = deque()
        self._rest = bytearray()
        self._number = 0
        self._ended = False

    def preview(self) -> Iterator[Line]:
        """What has arrived so far, one block at most; `next` gives it again."""
        while len(self._ready) < BLOCK_LINES and self._fill(0):
            pass
        yield from list(self._ready)

    def next(self, wait: bool, cancel: Callable[[], bool]) -> Line | None:
        """The next line; None at the end, if the user stops, or if there is none yet."""
        while not self._ready and not cancel():
            if not self._fill(POLL_S if wait else 0) and (self._ended or not wait):
                break
        return self._ready.popleft() if self._ready else None

    def _fill(self, timeout: float) -> bool:
        """Read what is there; False if nothing is."""
        if self._ended or not select.select([self._fd], [], [], timeout)[0]:
            return False
        data = os.read(self._fd, READ_BYTES)
        if not data:
            self._ended = True
            self._take([bytes(self._rest)] if self._rest else [])
        elif b"\n" in data:
            *lines, rest = (bytes(self._rest) + data).split(b"\n")
            self._take([line + b"\n" for line in lines])
            self._rest = bytearray(rest)
        else:
            self._rest += data
        return True

    def _take(self, lines: list[bytes]) -> None:
        for raw in lines:
            self._number += 1
            self._ready.append((self._number, raw))


Lines = FileLines | PipeLines


def open_lines(name: str) -> Lines:
    """The lines of a file, or of standard input for `-`."""
    if name == "-":
        if sys.stdin is None:
            raise UsageError("cannot read standard input: it is closed")
        stream = sys.stdin.buffer
    else:
        try:
            stream = open(name, "rb")  # noqa: SIM115 - read until the run ends
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise UsageError(f"cannot read `{name}`: {reason}") from None
    if stream.seekable():
        return FileLines(stream)
    return PipeLines(stream)


def take_block(
    lines: Lines, full: bool, cancel: Callable[[], bool], wait: bool = True
) -> list[Line]:
    """The next lines, up to a block's size; [] at the end, or where there is none without `wait`.

    full: wait for all of them, so that blocks begin and end at the same lines in every run.
    Otherwise only the first is waited for.
    """
    taken: list[Line] = []
    size = 0
    if full and lines.is_pipe and not wait:
        return taken
    while len(taken) < BLOCK_LINES and size < BLOCK_BYTES:
        line = lines.next(wait and (full or not taken), cancel)
        if line is None:
            break
        taken.append(line)
        size += len(line[1])
    return taken
