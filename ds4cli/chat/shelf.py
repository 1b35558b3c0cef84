"""Where chats lie on disk: names, the latest, and files that only their owner reads."""

from __future__ import annotations

import os
import re
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds4cli import settings
from ds4cli.chat import journal
from ds4cli.errors import DS4Error, UsageError

CACHE_SUFFIX = ".safetensors"
_STAMP = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d+)?")
_NAME = re.compile(r"[\w][\w.+-]{0,99}")


def private_folder(*parts: str) -> Path:
    """A folder under the state folder, made if need be; nobody else may look into it."""
    folder = settings.state_folder().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot make `{folder}`: {reason}", "set XDG_STATE_HOME to a folder of yours"
        ) from None
    return folder


def path_of(name: str) -> Path:
    """The file of session `name`. UsageError for a name that is no plain file name.

    One name for one sequence of characters: some systems write `é` as two, and hand that on.
    """
    name = unicodedata.normalize("NFC", name)
    if not _NAME.fullmatch(name):
        raise UsageError(f"`{name}` cannot name a session", "use letters, digits, and . + - _")
    return private_folder("sessions") / f"{name}{journal.SUFFIX}"


def is_writable(path: Path) -> bool:
    """Whether a session's file, or where it would be made, can be written."""
    return os.access(path if path.exists() else path.parent, os.W_OK)


def cache_of(path: Path) -> Path:
    """Where the model's state of a session lies, if it is kept."""
    return path.with_suffix(CACHE_SUFFIX)


def is_stamp(name: str) -> bool:
    """Whether it is a name that a session got because it had none."""
    return _STAMP.fullmatch(name) is not None


def new_name() -> str:
    """A name for a session that got none: the time to the second, numbered if that is taken."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    names = (stamp, *(f"{stamp}-{i}" for i in range(2, 1000)))
    return next(name for name in names if not path_of(name).exists())


def names() -> list[str]:
    """All sessions, the latest first. A file whose name we would not give is none of ours."""
    folder = settings.state_folder() / "sessions"
    paths = sorted(folder.glob(f"*{journal.SUFFIX}"), key=_age)
    found = (unicodedata.normalize("NFC", path.stem) for path in paths)
    return [name for name in found if _NAME.fullmatch(name)]


def _age(path: Path) -> float:
    return -path.stat().st_mtime if path.exists() else 0.0


def latest() -> Path:
    """The session that was written last. UsageError if there is none."""
    found = next(filter(journal.is_session, map(path_of, names())), None)
    if found is None:
        raise UsageError("there is no session to continue", "start one with `ds4cli chat`")
    return found


@dataclass(frozen=True)
class Entry:
    """One session in a list."""

    name: str
    turns: int
    model: str
    first: str
    written: float


def entries() -> Iterator[Entry]:
    """Every readable session, the latest first."""
    for name in names():
        path = path_of(name)
        try:
            stored = journal.read(path)
            written = path.stat().st_mtime
        except (DS4Error, OSError):
            continue
        turns = stored.transcript.line.turns
        first = turns[0].content if turns else ""
        yield Entry(name, len(turns), str(stored.header.get("model", "")), first, written)
