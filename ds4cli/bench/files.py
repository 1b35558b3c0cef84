"""Files that the user named."""

from __future__ import annotations

from pathlib import Path

from ds4cli.errors import UsageError


def read_text(path: Path) -> str:
    """The text of `path`. UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{path}`: {reason}") from None
    except UnicodeDecodeError:
        raise UsageError(f"`{path}` is not UTF-8 text") from None


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`. UsageError if that is impossible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write `{path}`: {reason}") from None
