"""The user's own editor, on a temporary file that nobody else can read."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ds4cli import settings
from ds4cli.errors import UsageError


def edit(text: str) -> str | None:
    """`text` as the user left it in their editor; None if they left it unchanged or empty.

    UsageError if the editor cannot be run or fails, which also counts as leaving it unchanged.
    """
    descriptor, name = tempfile.mkstemp(prefix="ds4cli-", suffix=".md")  # mode 0600
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(_with_newline(text))
        _run(settings.editor(), path)
        edited = _read(path)
    finally:
        path.unlink(missing_ok=True)
    if not text.endswith("\n"):
        edited = edited.removesuffix("\n")  # the one that editors want at the end of a file
    return edited if edited.strip() and edited != text else None


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _run(command: str, path: Path) -> None:
    try:
        # An editor that read our piped messages would eat them.
        stdin = None if sys.stdin.isatty() else subprocess.DEVNULL
        code = subprocess.call([*shlex.split(command), str(path)], stdin=stdin)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot run the editor `{command}`: {error}", "set VISUAL or EDITOR to yours"
        ) from None
    if code:
        raise UsageError(f"the editor `{command}` failed with code `{code}`; nothing changed")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read what the editor wrote: {error}; nothing changed") from None
