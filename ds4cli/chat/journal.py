"""A chat on disk: JSON lines, only ever appended, so that a kill loses the open turn at most.

The first line is a header: format, model, fingerprint, settings. After it, a line per turn with the
branch it belongs to and its place there (`at`: the turns in front of it that stay), and a line for
each change of branch, system text or course. Reading them in order gives the transcript back.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds4cli.chat.transcript import MAIN, Line, Transcript, Turn
from ds4cli.errors import StateError, UsageError

FORMAT = 1
SUFFIX = ".jsonl"
Record = dict[str, Any]


def turn_record(turn: Turn, branch: str, at: int) -> Record:
    """A turn as one JSON line."""
    record: Record = {"branch": branch, "at": at, "role": turn.role, "content": turn.content}
    if turn.is_reply:
        record |= {"finish_reason": turn.finish_reason, "attempt": turn.attempt}
    record |= {"calls": list(turn.calls)} if turn.calls else {}
    record |= {"cue": turn.cue} if turn.cue else {}
    return record | {"tokens": list(turn.tokens)}


def turn_of(record: Record) -> Turn:
    """The inverse of `turn_record`."""
    return Turn(
        record["role"],
        record["content"],
        tuple(record["tokens"]),
        record.get("cue", 0),
        record.get("finish_reason"),
        record.get("attempt", 0),
        tuple(record.get("calls", ())),
    )


def changes(before: dict[str, Line], now: Transcript) -> list[Record]:
    """The records that lead from the named lines in `before` to those of `now`."""
    records: list[Record] = []
    lines = {**now.named, now.name: now.line}
    for name, line in lines.items():
        records += _line_changes(name, before.get(name, Line()), line, name in before)
    return records


def _line_changes(name: str, old: Line, new: Line, known: bool) -> list[Record]:
    records: list[Record] = []
    if (old.system, old.head) != (new.system, new.head) or not known:
        records.append({"branch": name, "system": new.system, "head": list(new.head)})
    same = old.shared(replace(new, system=old.system, head=old.head))
    if same < len(old.turns) and same == len(new.turns):
        records.append({"branch": name, "keep": same})
    turns = enumerate(new.turns[same:], same)
    return records + [turn_record(turn, name, at) for at, turn in turns]


def apply(lines: dict[str, Line], record: Record) -> None:
    """Carry out one record on the named lines."""
    name = record["branch"]
    line = lines.get(name, Line())
    if "role" in record:
        if not 0 <= record["at"] <= len(line.turns):
            raise ValueError(f"turn {record['at'] + 1} of branch {name} has nothing in front of it")
        line = line.upto(record["at"]).plus(turn_of(record))
    elif "keep" in record:
        line = line.upto(record["keep"])
    elif "head" in record:
        line = replace(line, system=record["system"], head=tuple(record["head"]))
    lines[name] = line


@dataclass(frozen=True)
class Stored:
    """What a file held: its header, its transcript, and what was wrong with its end, if anything.

    nbytes: length of the part that was read well; an append goes on from there.
    """

    header: Record
    transcript: Transcript
    nbytes: int
    notice: str | None = None


def read(path: Path) -> Stored:
    """Read a session file. A torn last line is left out, with a notice. StateError otherwise."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read session `{path}`: {_reason(error)}") from None
    lines = data.split(b"\n")
    good = lines[:-1]  # what stands behind the last line end was torn off while it was written
    if len(good) > 1 and not _is_json(good[-1]):
        good = good[:-1]
    nbytes = sum(len(line) + 1 for line in good)
    header = _header(path, good)
    transcript = _replayed(path, good[1:], header)
    torn = len(data) - nbytes
    notice = f"the last line of `{path.name}` is torn: left out ({torn} bytes)" if torn else None
    return Stored(header, transcript, nbytes, notice)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _header(path: Path, lines: Sequence[bytes]) -> Record:
    try:
        header = json.loads(lines[0])
        known = header["format"] == FORMAT
    except (IndexError, ValueError, KeyError, TypeError):
        raise StateError(f"`{path}` is not a session file") from None
    if not known:
        raise StateError(f"session `{path}` has format `{header['format']}`, not {FORMAT}")
    return header


def _replayed(path: Path, lines: Sequence[bytes], header: Record) -> Transcript:
    """Carry out all records; one with a fingerprint brings the header up to date."""
    named: dict[str, Line] = {}
    current = MAIN
    for number, raw in enumerate(lines, 2):
        try:
            record = json.loads(raw)
            if "fingerprint" in record:
                header.update(record)
                continue
            current = record["branch"]
            apply(named, record)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"line {number} of session `{path}` is broken: {error}") from None
    return Transcript(named.pop(current, Line()), current, named)


@dataclass
class Journal:
    """An open session file. `record` appends what changed since the last time, and syncs it."""

    path: Path
    _written: dict[str, Line] = field(default_factory=dict)
    _current: str = ""
    _file: int = -1
    _nbytes: int = 0  # of the whole records in the file

    @classmethod
    def create(cls, path: Path, header: Record) -> Journal:
        """A new file with its header. UsageError if there is one already."""
        journal = cls(path)
        journal._open(os.O_CREAT | os.O_EXCL)
        journal._append([{"format": FORMAT, **header}])
        return journal

    @classmethod
    def resume(cls, path: Path, stored: Stored) -> Journal:
        """Go on with a file that was read; a torn end is cut off."""
        transcript = stored.transcript
        journal = cls(path, {**transcript.named, transcript.name: transcript.line}, transcript.name)
        journal._open(0)
        journal._nbytes = stored.nbytes
        os.ftruncate(journal._file, stored.nbytes)
        return journal

    def _open(self, flags: int) -> None:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(self.path, flags, 0o600)
        except FileExistsError:
            raise UsageError(f"there is a session `{self.path.stem}` already") from None
        except OSError as error:
            raise StateError(f"cannot write session `{self.path}`: {_reason(error)}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise StateError(
                f"session `{self.path.stem}` is open in another chat", "close it there first"
            ) from None

    def record(self, transcript: Transcript) -> None:
        """Append whatever is new in `transcript`."""
        records = changes(self._written, transcript)
        last = records[-1]["branch"] if records else self._current
        if transcript.name != last:
            records.append({"branch": transcript.name})
        self._append(records)
        self._written = {**transcript.named, transcript.name: transcript.line}
        self._current = transcript.name

    def retitle(self, header: Record) -> None:
        """From here on the tokens are those of another model."""
        self._append([header])

    def _append(self, records: Sequence[Record]) -> None:
        """Write all records and sync them, or leave the file as it was."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        data = memoryview(text.encode("utf-8", "surrogatepass"))
        if not data:
            return
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._nbytes)
            raise StateError(f"cannot write session `{self.path}`: {_reason(error)}") from None
        self._nbytes += written

    def close(self) -> None:
        """Give the file back to other chats. Nothing is left to write."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
