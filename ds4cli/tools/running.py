"""Running a tool's command when the user has said so, and its output as plain text. Nothing here
decides to run.

On Linux all that a command started ends with it. Elsewhere that is its process group: a child that
began a session of its own outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4cli import signals
from ds4cli.errors import UsageError
from ds4cli.escapes import escaped
from ds4cli.tools.declared import Tool

_CHUNK = 65536
_POLL_S = 0.02
_GRACE_S = 0.2  # for output that is still in the pipe when the command has ended
_REST_S = 5.0  # for the end of the pipe when everything that held it was killed
_SET_CHILD_SUBREAPER = 36
# Environment variables that hold secrets, by their names and by what is in them.
_SECRET_NAMES = re.compile(
    r"(^|_)(\w*token|\w*secret|\w*passw(or)?d|passphrase|\w*key|\w*credential|cookie)s?(_|$)", re.I
)
_SECRET_VALUES = re.compile(
    r"://[^/@\s]*:[^/@\s]+@|\b(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA)\w{8}"
)


@dataclass(frozen=True)
class ToolRun:
    """What a command gave: its output made printable, how it ended (None: killed), and what was
    cut. cancelled: the user stopped it.
    """

    output: str
    exit_code: int | None
    timed_out: bool
    truncated: bool
    seconds: float
    cancelled: bool = False

    @property
    def content(self) -> str:
        """The text to give to the model: the output, and a line for whatever went wrong."""
        remarks = []
        if self.truncated:
            remarks.append("[output cut]")
        if self.timed_out:
            remarks.append(f"[stopped after {self.seconds:.1f} s]")
        elif self.exit_code:
            remarks.append(f"[exit code {self.exit_code}]")
        return "\n".join([self.output.rstrip("\n"), *remarks]).lstrip("\n")


def run_tool(
    tool: Tool,
    arguments_json: str,
    timeout_s: float = 30.0,
    max_bytes: int = 100_000,
    cancel: Callable[[], bool] = lambda: False,
) -> ToolRun:
    """Run the tool's command without a shell, the arguments as JSON on its stdin.

    stdout and stderr are read together, at most `max_bytes`; the process is killed at either limit,
    and when `cancel()` turns true; what it started ends with it. It does not get the secrets of our
    environment, but for those that the tool declares.
    Raises UsageError when the tool has no command or it cannot be started.
    """
    if tool.command is None:
        raise UsageError(f"the tool `{tool.name}` has no command")
    begin = time.perf_counter()
    with _started(tool, tool.command) as process:
        reader = _Reader(process, max_bytes)
        _write(process, arguments_json)
        end = _wait_for(process, reader, begin + timeout_s, cancel)
    reader.join(_REST_S)
    process.wait()
    output = printable(bytes(reader.data[:max_bytes]))
    is_cut = reader.truncated or len(output) > max_bytes
    seconds = time.perf_counter() - begin
    exit_code = None if end != "ended" or reader.truncated else process.returncode
    is_late, is_cancelled = end == "late", end == "cancelled"
    return ToolRun(output[:max_bytes], exit_code, is_late, is_cut, seconds, is_cancelled)


@contextlib.contextmanager
def _started(tool: Tool, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The tool's command; it and what it started are killed at the end, and should we be killed."""
    _adopt_orphans(True)
    others = _processes_below()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_of(tool, os.environ),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot run `{command[0]}`: {reason}") from error
    try:
        with signals.before_end(lambda: _kill(process, others)):
            yield process
    finally:
        _kill(process, others)
        _adopt_orphans(False)


def environment_of(tool: Tool, ours: Mapping[str, str]) -> dict[str, str]:
    """What the tool's command may know of our environment."""
    return {
        name: value
        for name, value in ours.items()
        if name in tool.env or not (_SECRET_NAMES.search(name) or _SECRET_VALUES.search(value))
    }


def _wait_for(
    process: subprocess.Popen[bytes], reader: _Reader, deadline: float, cancel: Callable[[], bool]
) -> str:
    """Until the command "ended" or said too much; "late" or "cancelled" if that was before. What it
    left behind is not waited for."""
    while process.poll() is None and not reader.truncated:
        if cancel():
            return "cancelled"
        if time.perf_counter() > deadline:
            return "late"
        if reader.is_alive():
            reader.join(_POLL_S)
        else:
            time.sleep(_POLL_S)
    reader.join(_GRACE_S)
    return "ended"


class _Reader(threading.Thread):
    """Reads a process's output until it ends or is too long."""

    def __init__(self, process: subprocess.Popen[bytes], limit: int) -> None:
        super().__init__(daemon=True)
        self.process, self.limit = process, limit
        self.data = bytearray()
        self.truncated = False
        self.start()

    def run(self) -> None:
        pipe = self.process.stdout
        assert isinstance(pipe, io.BufferedReader)
        with pipe:
            while not self.truncated and (chunk := pipe.read1(_CHUNK)):
                self.data += chunk
                self.truncated = len(self.data) > self.limit


def _write(process: subprocess.Popen[bytes], text: str) -> None:
    """A thread of its own: a command that does not read its stdin must not block us."""

    pipe = process.stdin
    assert pipe is not None, "it is a pipe"

    def write() -> None:
        # A command may end, or close its stdin, without reading all of it.
        with contextlib.suppress(OSError), pipe:
            # Half of a surrogate pair, which JSON can hold, becomes the escape that it came as.
            pipe.write(text.encode("utf-8", "backslashreplace"))

    threading.Thread(target=write, daemon=True).start()


def _kill(process: subprocess.Popen[bytes], others: set[int]) -> None:
    """The command, if it still runs, and what it started: all that is below us but `others`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + _REST_S
    while (left := _processes_below() - others) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            if pid != process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        process.poll()


def _adopt_orphans(yes: bool) -> None:
    """Whether processes below us that lose their parent become our children, where that exists."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _processes_below() -> set[int]:
    """Our children, theirs, and so on, in whatever session; none where there is no /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    below: set[int] = set()
    more = {os.getpid()}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - below
        below |= more
    return below


def printable(data: bytes) -> str:
    """`data` as text: bytes that are no UTF-8 and control characters become visible escapes."""
    text = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
    return "".join(c if c in "\n\t" or c.isprintable() else escaped(c) for c in text)
