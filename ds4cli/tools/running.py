"""Running a tool's command when the user has said so, and its output as plain text. Nothing here
decides to run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds4cli.errors import UsageError
from ds4cli.escapes import escaped
from ds4cli.tools.declared import Tool

_CHUNK = 65536
_POLL_S = 0.02
_GRACE_S = 0.2  # for output that is still in the pipe when the command has ended


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

    stdout and stderr are read together, at most `max_bytes`; the process and what it started are
    killed at either limit, and when `cancel()` turns true.
    Raises UsageError when the tool has no command or it cannot be started.
    """
    if tool.command is None:
        raise UsageError(f"the tool `{tool.name}` has no command")
    begin = time.perf_counter()
    try:
        process = subprocess.Popen(
            tool.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"cannot run `{tool.command[0]}`: {error.strerror}") from error
    reader = _Reader(process, max_bytes)
    _write(process, arguments_json)
    try:
        end = _wait_for(process, reader, begin + timeout_s, cancel)
    finally:
        _kill(process)
    reader.join(1.0)
    exit_code = process.wait()
    output = printable(bytes(reader.data[:max_bytes]))
    seconds = time.perf_counter() - begin
    exit_code = None if end != "ended" or reader.truncated else exit_code
    is_late, is_cancelled = end == "late", end == "cancelled"
    return ToolRun(output, exit_code, is_late, reader.truncated, seconds, is_cancelled)


def _wait_for(
    process: subprocess.Popen, reader: _Reader, deadline: float, cancel: Callable[[], bool]
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

    def __init__(self, process: subprocess.Popen, limit: int) -> None:
        super().__init__(daemon=True)
        self.process, self.limit = process, limit
        self.data = bytearray()
        self.truncated = False
        self.start()

    def run(self) -> None:
        with self.process.stdout as pipe:
            while not self.truncated and (chunk := pipe.read1(_CHUNK)):
                self.data += chunk
                self.truncated = len(self.data) > self.limit


def _write(process: subprocess.Popen, text: str) -> None:
    """A thread of its own: a command that does not read its stdin must not block us."""

    def write() -> None:
        # A command may end, or close its stdin, without reading all of it.
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(text.encode("utf-8"))

    threading.Thread(target=write, daemon=True).start()


def _kill(process: subprocess.Popen) -> None:
    """The command, if it still runs, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def printable(data: bytes) -> str:
    """`data` as text: bytes that are no UTF-8 and control characters become visible escapes."""
    text = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
    return "".join(c if c in "\n\t" or c.isprintable() else escaped(c) for c in text)


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Tokens of `text` as data: what spells a special token stays text and cannot end a turn."""
    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    ids = plain.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return list(ids)
