"""A chat on disk: JSON lines, only ever appended, so that a kill loses the open turn at most.

The first line is a header: format, model, fingerprint, settings. After it, a line per change: a
turn with the branch it belongs to and its place there (`at`: the turns in front of it that stay), a
change of branch, system text, course or model, or a list of those that belong together. A line is
read whole or not at all, and so is a change. Reading them in order gives the transcript back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds4cli.appended import Appended, Taken, reason
from ds4cli.chat.transcript import MAIN, Line, Transcript, Turn
from ds4cli.errors import StateError, UsageError

FORMAT = 1
BEGINNING = b'{"format": '
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
        _text(record, "role"),
        _text(record, "content"),
        _ids(record, "tokens"),
        _count(record, "cue", 0),
        None if record.get("finish_reason") is None else _text(record, "finish_reason"),
        _count(record, "attempt", 0),
        _calls(record),
    )


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is no text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"half of a surrogate pair stands alone in `{name}`") from None
    return value


def _count(record: Record, name: str, default: int | None = None) -> int:
    value = record.get(name, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"`{name}` is no number from 0")
    return value


def _ids(record: Record, name: str) -> tuple[int, ...]:
    value = record.get(name)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"`{name}` is no list of token ids")
    return tuple(value)


def _calls(record: Record) -> tuple[Any, ...]:
    calls = record.get("calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise ValueError("`calls` is no list of calls in OpenAI's form")
    return tuple(calls)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and all(
        isinstance(function.get(name), str) for name in ("name", "arguments")
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


def apply(lines: dict[str, Line], record: Record) -> str:
    """Carry out one record on the named lines; the name of the line that it is about."""
    name = _text(record, "branch")
    line = lines.get(name, Line())
    if "role" in record:
        at = _count(record, "at")
        if at > len(line.turns):
            raise ValueError(f"turn {at + 1} of branch {name} has nothing in front of it")
        line = line.upto(at).plus(turn_of(record))
    elif "keep" in record:
        line = line.upto(_count(record, "keep"))
    elif "head" in record:
        system = None if record.get("system") is None else _text(record, "system")
        line = replace(line, system=system, head=_ids(record, "head"))
    lines[name] = line
    return name


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
        _first_line(path)
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read session `{path}`: {reason(error)}") from None
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
    except (ValueError, RecursionError):
        return False
    return True


def is_session(path: Path) -> bool:
    """Whether a session begins in the file."""
    try:
        _header(path, [_first_line(path)])
    except (OSError, StateError):
        return False
    return True


def is_unbegun(path: Path) -> bool:
    """Whether the file holds nothing but a header that a kill has torn, or not even that."""
    try:
        first = _first_line(path)
    except OSError:  # whoever reads it is told why not
        return False
    is_ours = first.startswith(BEGINNING) or BEGINNING.startswith(first)
    return is_ours and not first.endswith(b"\n")


def _first_line(path: Path) -> bytes:
    """StateError for a folder or a pipe: that is read for ever."""
    if path.exists() and not path.is_file():
        raise StateError(f"`{path}` is not a session file")
    with path.open("rb") as file:
        return file.readline()


def _header(path: Path, lines: Sequence[bytes]) -> Record:
    try:
        header = json.loads(lines[0])
        known = header["format"] == FORMAT
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
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
            change = json.loads(raw)
            for record in change if isinstance(change, list) else [change]:
                if not isinstance(record, dict):
                    raise ValueError("it is no object")
                if "fingerprint" in record:
                    header.update(record)
                else:
                    current = apply(named, record)
        except (ValueError, RecursionError) as error:
            raise StateError(f"line {number} of session `{path}` is broken: {error}") from None
    return Transcript(named.pop(current, Line()), current, named)


@dataclass
class Journal:
    """An open session file. `record` appends what changed since the last time, and syncs it."""

    path: Path
    _written: dict[str, Line] = field(default_factory=dict)
    _current: str = ""
    _file: Appended | None = None
    _nbytes: int = 0  # of the whole lines in the file
    _retitled: list[Record] = field(default_factory=list)  # a header that is not written yet

    @classmethod
    def create(cls, path: Path, header: Record) -> Journal:
        """A new file with its header. UsageError if there is one already."""
        journal = cls(path)
        journal._open(create=True)
        try:
            if not is_unbegun(path):
                raise UsageError(f"there is a session `{path.stem}` already")
            journal._append({"format": FORMAT, **header})
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def resume(cls, path: Path, stored: Stored) -> Journal:
        """Go on with a file that was read; a torn end goes."""
        transcript = stored.transcript
        journal = cls(path, {**transcript.named, transcript.name: transcript.line}, transcript.name)
        journal._open(create=False)
        journal._nbytes = stored.nbytes  # what was torn behind it is cut off by the first append
        return journal

    def _open(self, create: bool) -> None:
        try:
            self._file = Appended(self.path, 0o600, create)
        except Taken:
            raise StateError(
                f"session `{self.path.stem}` is open in another chat", "close it there first"
            ) from None
        except OSError as error:
            raise StateError(f"cannot write session `{self.path}`: {reason(error)}") from None

    def retitle(self, header: Record) -> None:
        """The tokens of what is recorded from here on are those of another model."""
        self._retitled = [header]

    def record(self, transcript: Transcript) -> None:
        """Append whatever is new in `transcript`, as one line."""
        records = changes(self._written, transcript)
        last = records[-1]["branch"] if records else self._current
        if transcript.name != last:
            records.append({"branch": transcript.name})
        records = self._retitled + records
        if records:
            self._append(records[0] if len(records) == 1 else records)
        self._retitled = []
        self._written = {**transcript.named, transcript.name: transcript.line}
        self._current = transcript.name

    def _append(self, change: Record | list[Record]) -> None:
        """Write a line and sync it, or leave the file as it was."""
        assert self._file is not None, "it is open"
        data = (json.dumps(change, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        try:
            self._file.append(data, self._nbytes)
        except OSError as error:
            raise StateError(f"cannot write session `{self.path}`: {reason(error)}") from None
        self._nbytes += len(data)

    def close(self) -> None:
        """Give the file back to other chats. Nothing is left to write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
