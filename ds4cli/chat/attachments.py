"""Files that go with the next message. One that cannot be read or does not fit is not attached."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4cli.errors import UsageError


@dataclass(frozen=True)
class Attachment:
    """A text file, and how many tokens it makes."""

    name: str
    text: str
    tokens: int


class Attachments:
    """What was attached so far, in order. count: how many tokens a text makes."""

    def __init__(self, count: Callable[[str], int]):
        self.files: list[Attachment] = []
        self._count = count

    def __str__(self) -> str:
        return ", ".join(f"`{file.name}` ({file.tokens:,} tokens)" for file in self.files)

    def add(self, pattern: str, room: int | None) -> list[Attachment]:
        """Attach a file, or all that a pattern names; all or nothing. room: tokens that fit."""
        new = [self._read(path) for path in _paths(pattern)]
        tokens = sum(file.tokens for file in new)
        left = None if room is None else max(0, room - sum(file.tokens for file in self.files))
        if left is not None and tokens >= left:
            raise UsageError(
                f"`{pattern}` makes `{tokens}` tokens, the context has room for `{left}`",
                "attach less, or make room with /undo or /clear",
            )
        self.files += new
        return new

    def drop(self, name: str = "") -> None:
        """Drop one, or all without a name. UsageError for one that is not attached."""
        kept = [file for file in self.files if name and file.name != name]
        if name and len(kept) == len(self.files):
            raise UsageError(f"`{name}` is not attached", "/file lists what is")
        self.files = kept

    def before(self, text: str) -> str:
        """A message with the files in front of it."""
        return "\n\n".join([*(file.text for file in self.files), text])

    def _read(self, path: Path) -> Attachment:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"cannot read `{path}`: {reason.lower()}") from None
        text = text.replace("\r\n", "\n").rstrip("\n")
        return Attachment(str(path), text, self._count(text))


def _paths(pattern: str) -> Sequence[Path]:
    """The file of this very name, else the files that the pattern matches."""
    path = Path(os.path.expanduser(pattern))
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = [name for name in found if name.is_file()]
    if not files:
        raise UsageError(f"no file matches `{pattern}`")
    return files
