"""Files that the user named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def refuse_unwritable(path: Path) -> None:
    """UsageError if `path` cannot be written; what is there stays, and what is not there, too."""
    with _writing(path):
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`. UsageError if that is impossible."""
    with _writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write `{path}`: {reason}") from None
