"""Where output lines go: in input order, each durable once it is written.

A file is only appended to, line by line, each followed by a sync, so that a killed run leaves whole
lines and at most one torn one at the end. A result that is finished before its turn waits in
`OUTPUT.waiting`, written the same way. To resume, both are read: good results are kept, whatever
their order, failed and torn ones are made again. Every result says what made it (`settings`,
`system_fingerprint`) and for which request (`id`), so nothing else has to be kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ds4cli.appended import Appended, Taken, reason
from ds4cli.backend import disk
from ds4cli.batch.lines import FileId, file_id
from ds4cli.batch.replies import BEGINNING, differences, request_id
from ds4cli.batch.requests import Item, name_key
from ds4cli.errors import DS4Error, UsageError
from ds4cli.escapes import visible

FORCE_HINT = "use another `--output`, or `--force` to go on with what differs"
TAKEN_HINT = "wait for it, or name another `--output`"
NO_RESULT_HINT = "name the output of the run to go on with"
RESUME_HINT = "what is done stays: when it can be written, run the same command with `--resume`"


class StreamResults:
    """Results to a pipe or a device. What is finished before its turn is held in memory."""

    resume_hint = ""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._turns: deque[str] = deque()
        self._held: dict[str, bytes] = {}

    def check(self, item: Item) -> None:
        """There are no earlier results."""

    def begin(self, settings: dict[str, Any]) -> None:
        """Nothing to prepare."""

    def are_all(self, keys: Sequence[int]) -> bool:
        """Whether there is nothing to make."""
        return not keys

    def check_model(self, fingerprint: str) -> None:
        """There are no earlier results."""

    def expect(self, item: Item) -> bool:
        """The item's result comes after those expected before; False: it has to be made."""
        self._turns.append(item.custom_id)
        return False

    def put(self, item: Item, line: bytes) -> None:
        """Write an item's output line at its turn; a terminal gets it escaped."""
        if self._stream.isatty():
            line = visible(line.decode("utf-8", "backslashreplace")).encode("utf-8")
        self._held[item.custom_id] = line
        while self._turns and self._turns[0] in self._held:
            view = memoryview(self._held.pop(self._turns.popleft()))
            while view:  # an unbuffered stream may take a part
                view = view[self._stream.write(view) or 0 :]
            self._stream.flush()

    def finish(self) -> int:
        """All lines have their result. The number of results that belong to none."""
        return 0

    def close(self) -> None:
        if self._stream is not sys.stdout.buffer:
            self._stream.close()


def waiting_of(path: Path) -> Path:
    """Where results wait for their turn."""
    return Path(f"{path}.waiting")


class FileResults:
    """Results in a file."""

    resume_hint = "go on with the same command and `--resume`"

    def __init__(self, path: Path, resume: bool, force: bool):
        self.path = path
        self._resume, self._force = resume, force
        self._out = _Log(path)
        self._later = _Log(waiting_of(path))
        self._turns: deque[int] = deque()
        self._earlier = _Earlier()
        self._is_in_order = False
        try:
            self._read_earlier()
        except BaseException:
            self.close()
            raise

    def _read_earlier(self) -> None:
        for log in (self._out, self._later):
            if not log.exists():
                continue
            log.open(create=False)
            if self._resume:
                self._earlier.scan(log, in_order=log is self._out, force=self._force)
            elif log.size() and not self._force:
                hint = "`--resume` goes on with it, `--force` starts again"
                raise UsageError(f"`{log.path}` has results already", hint)

    def check(self, item: Item) -> None:
        """UsageError if the result in the file answers another request of the same name."""
        if not self._force and self._earlier.answers_another(item):
            raise UsageError(
                f"line {item.number}: `{item.custom_id}` in `{self.path}` answers another request",
                FORCE_HINT,
            )

    def begin(self, settings: dict[str, Any]) -> None:
        """Open the file to write. UsageError if earlier results were made with other settings."""
        found = [d for then in self._earlier.made_with for d in differences(then, settings)]
        self._refuse_others(found)
        self._out.open(create=True)
        if self._resume:
            self._later.cut_torn()
        else:
            self._out.cut(0)
            self._later.remove()

    def are_all(self, keys: Sequence[int]) -> bool:
        """Whether the file holds the results of just these names, all of them good, in order."""
        return self._earlier.are_all(keys)

    def check_model(self, fingerprint: str) -> None:
        """UsageError if earlier results were made with another model."""
        others = self._earlier.fingerprints - {fingerprint}
        self._refuse_others(["another model, or with other ranks" for _ in others])

    def _refuse_others(self, found: list[str]) -> None:
        if found and not self._force:
            words = ", ".join(dict.fromkeys(found))
            raise UsageError(f"`{self.path}` was made with {words}", FORCE_HINT)

    # -- writing ----------------------------------------------------------------------------------

    def expect(self, item: Item) -> bool:
        """The item's result comes after those expected before; False: it has to be made."""
        self.check(item)
        key = name_key(item.custom_id)
        if self._earlier.is_next(key):
            return True
        self._set_rest_aside()
        done = key in self._earlier.places
        self._turns.append(key)
        self._settle()
        return done

    def put(self, item: Item, line: bytes) -> None:
        """Write an item's output line, at its place or to wait for its turn."""
        key = name_key(item.custom_id)
        if self._turns[0] == key:
            self._turns.popleft()
            self._out.append(line)
            self._settle()
        else:
            self._later.open(create=True)
            self._earlier.places[key] = ~self._later.append(line)

    def _settle(self) -> None:
        """Move results whose turn has come from the waiting ones to the output."""
        while self._turns and self._turns[0] in self._earlier.places:
            place = self._earlier.places.pop(self._turns.popleft())
            self._out.append(self._later.line_at(~place))

    def _set_rest_aside(self) -> None:
        """From here on the file is not as it has to be: good results wait, the rest goes."""
        if self._is_in_order:
            return
        self._is_in_order = True
        end, rest = self._earlier.rest()
        if rest:
            self._later.open(create=True)
        for key in rest:
            line = self._out.line_at(self._earlier.places[key])
            self._earlier.places[key] = ~self._later.append(line, sync=False)
        self._later.sync()
        if end != self._out.size():
            self._out.cut(end)

    def finish(self) -> int:
        """All lines have their result. The number of earlier results that belong to none."""
        self._set_rest_aside()
        unused = len(self._earlier.places)
        if not unused:
            self._later.remove()
        return unused

    def close(self) -> None:
        self._out.close()
        self._later.close()


class _Earlier:
    """Results of earlier runs. places: name -> where its good result begins in the output, or,
    as ~offset, among the waiting ones.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self.made_with: list[dict[str, Any]] = []
        self.fingerprints: set[str] = set()
        self._requests: dict[int, int] = {}
        self._order = array("Q")  # names in the output's order; 0 for a line that is no good
        self._starts = array("q")
        self._next = 0
        self._end = 0

    def scan(self, log: _Log, in_order: bool, force: bool) -> None:
        """Read a file of results; a torn line is nothing."""
        for number, start, raw in log.lines():
            if _is_torn(raw):
                continue
            result = _read(raw)
            if result is None and not force:
                raise UsageError(
                    f"line {number} of `{log.path}` is no result of a batch", NO_RESULT_HINT
                )
            key = name_key(result["custom_id"]) if result and _is_good(result) else 0
            if in_order:
                self._order.append(key)
                self._starts.append(start)
                self._end = start + len(raw)
            if result and key and (in_order or key not in self.places):
                self.places[key] = start if in_order else ~start
                self._note(key, result)

    def _note(self, key: int, result: dict[str, Any]) -> None:
        body = result["response"]["body"]
        self._requests[key] = name_key(str(result.get("id")))
        self.fingerprints.add(str(body.get("system_fingerprint")))
        made_with = body.get("settings")
        if isinstance(made_with, dict) and made_with not in self.made_with:
            self.made_with.append(made_with)

    def answers_another(self, item: Item) -> bool:
        known = self._requests.get(name_key(item.custom_id))
        return known is not None and known != name_key(request_id(item))

    def are_all(self, keys: Sequence[int]) -> bool:
        return list(self._order) == list(keys) and all(p >= 0 for p in self.places.values())

    def is_next(self, key: int) -> bool:
        """Whether the output goes on with this result; it then stays where it is."""
        if self._next >= len(self._order) or self._order[self._next] != key:
            return False
        self._next += 1
        self.places.pop(key, None)
        return True

    def rest(self) -> tuple[int, list[int]]:
        """Where the part of the output that stays ends, and the good results behind it."""
        is_all = self._next == len(self._order)
        end = self._end if is_all else self._starts[self._next]
        keys = dict.fromkeys(self._order[self._next :])
        del self._order[self._next :]
        return end, [key for key in keys if self.places.get(key, -1) >= end]


def _is_torn(raw: bytes) -> bool:
    """Whether a run ended while it wrote this line. What a power cut leaves may be zeros."""
    is_ours = raw.startswith(BEGINNING) or BEGINNING.startswith(raw) or not raw.strip(b"\0")
    return is_ours and not raw.endswith(b"\n")


def _read(raw: bytes) -> dict[str, Any] | None:
    """A result line; None if it is none."""
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        return None
    return line if {"response", "error"} <= line.keys() else None


def _is_good(result: dict[str, Any]) -> bool:
    response = result["response"]
    return result["error"] is None and isinstance(response, dict) and "body" in response


class _Log:
    """A file of lines that is appended to. Errors become a DS4Error that names it."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Appended | None = None

    def exists(self) -> bool:
        return self.path.exists()

    def open(self, create: bool) -> None:
        """Open, once, to read and append; other runs are kept out."""
        if self._file is not None:
            return
        try:
            self._file = Appended(self.path, 0o666, create)
        except Taken:
            raise UsageError(f"another run is writing `{self.path}`", TAKEN_HINT) from None
        except OSError as error:
            raise UsageError(f"cannot write `{self.path}`: {reason(error)}") from None

    @property
    def _open_file(self) -> Appended:
        assert self._file is not None, "it was opened"
        return self._file

    def size(self) -> int:
        return self._open_file.size()

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, offset and bytes of each line; the last one may lack its end."""
        start = 0
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, start, raw
                start += len(raw)

    def line_at(self, start: int) -> bytes:
        """The line that begins at `start`."""
        pieces, piece = [], b""
        while b"\n" not in piece:
            piece = os.pread(self._open_file.fd, 1 << 16, start)
            if not piece:
                raise DS4Error(f"`{self.path}` was changed while it was used")
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces).partition(b"\n")[0] + b"\n"

    def append(self, data: bytes, sync: bool = True) -> int:
        """Add a line, whole or not at all; returns where it begins."""
        start = self.size()
        with self._said_if_it_fails():
            self._open_file.append(data, start, sync)
        return start

    def sync(self) -> None:
        if self._file is not None:
            with self._said_if_it_fails():
                disk.sync(self._file.fd)

    def cut(self, size: int) -> None:
        with self._said_if_it_fails():
            os.ftruncate(self._open_file.fd, size)
            disk.sync(self._open_file.fd)

    @contextlib.contextmanager
    def _said_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DS4Error(f"cannot write `{self.path}`: {reason(error)}", RESUME_HINT) from None

    def cut_torn(self) -> None:
        """Take away a last line without an end, if the file is open."""
        if self._file is not None:
            ends = (at + len(raw) for _, at, raw in self.lines() if raw.endswith(b"\n"))
            self.cut(max(ends, default=0))

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


Results = StreamResults | FileResults


def _refuse_name(path: Path) -> None:
    """OSError or ValueError for what cannot be a file's name."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)


def _refuse_source(source: FileId | None, written: int | Path, words: str) -> None:
    if source is not None and file_id(written) == source:
        raise UsageError(f"{words} is the input, and would be written", "give another `--output`")


def open_results(name: str, resume: bool, force: bool, source: FileId | None = None) -> Results:
    """Results to a file, or to standard output for `-`; pipes and devices are written as they are.

    UsageError if there are results already and nobody said what to do with them, or if a file that
    would be written is `source`, the input.
    """
    if name == "-":
        if resume:
            raise UsageError("there is nothing to resume on standard output", "give `--output`")
        _refuse_source(source, 1, "standard output")
        return StreamResults(sys.stdout.buffer)
    path = Path(name)
    for written in (path, waiting_of(path)):
        _refuse_source(source, written, f"`{written}`")
    try:
        _refuse_name(waiting_of(path))
        is_special = path.exists() and not stat.S_ISREG(path.stat().st_mode)
        if is_special and not path.is_dir():
            return StreamResults(open(path, "wb", buffering=0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write `{name}`: {reason.lower()}") from None
    return FileResults(path, resume, force)
