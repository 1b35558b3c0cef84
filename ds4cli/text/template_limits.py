"""How long a chat template may run, how much it may write, and how much memory that may take.

A template is a program that came with a model's files. transformers runs it in Jinja's sandbox,
which keeps it from files and from Python, and lets it loop for ever.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ds4cli.errors import ModelError
from ds4cli.models import mlx_lm

SECONDS = 10.0
LOOK_S = 0.05  # between looks at the memory
MEMORY_BYTES = 2**30  # more than the program had when the template began
# What a template adds to what it was given: markup, a system text, arguments with indents.
ROOM_CHARS, ROOM_FACTOR = 2**20, 8
MAX_LENGTH = 2**26  # of one value, before it is written
MAX_DIGITS = 4300  # Python prints no longer number
HINT = "`--chat-template FILE` takes another one; `--raw` none"


class _Stop(BaseException):
    """Raised in the middle of a template. No `except Exception` on the way takes it for its own."""


def render(draw: Callable[[], str], given: Any) -> str:
    """`draw()`, which runs a template on what was `given`.

    ModelError where it takes too long, writes too much, or takes too much memory.
    """
    room = ROOM_CHARS + ROOM_FACTOR * len(str(given))
    _hold()
    watch = _Watch()
    try:
        with watch:
            text = draw()
    except _Stop:
        raise _refused(watch.reason) from None
    except _TooLarge as error:
        raise _refused(str(error)) from None
    if len(text) > room:
        raise _refused(f"writes {len(text)} characters, of which {room} are allowed")
    return text


def _refused(what: str) -> ModelError:
    return ModelError(f"the chat template {what}", HINT)


class _Watch:
    """Stops the thread that entered the block, should it last too long or take too much memory."""

    def __init__(self) -> None:
        self.reason = ""
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._before = _memory_bytes()
        self._over = threading.Event()
        self._lock = threading.Lock()  # held while it is stopped, and while it ends

    def __enter__(self) -> None:
        _thread.start_new_thread(self._look, ())  # `Thread.start` would wait for it to run

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._over.set()
        # What was sent arrives at one of the next instructions. Calling it off would leave the
        # interpreter looking for it for ever: slower, and a profiled generator never goes on.
        while self.reason and kind is not _Stop:
            time.sleep(0)

    def _look(self) -> None:
        for _ in range(round(SECONDS / LOOK_S)):
            if self._over.wait(LOOK_S):
                return
            if _memory_bytes() - self._before > MEMORY_BYTES:
                return self._stop(f"takes more than {MEMORY_BYTES >> 20} MB")
        self._stop(f"runs for more than {SECONDS:g} s")

    def _stop(self, reason: str) -> None:
        with self._lock:
            if not self._over.is_set():
                self.reason = reason
                stop = ctypes.py_object(_Stop)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, stop)


def _memory_bytes() -> int:
    """Memory of this process; 0 where it cannot be told, as on macOS."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- what no watch can stop, because one operation does it ----------------------------------------


class _TooLarge(Exception):
    """One operation that would make a value of any size."""


@cache
def _hold() -> None:
    """Let transformers compile templates for a sandbox in which values stay small: constants are
    worked out when it compiles."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Held(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})
        concat = staticmethod(_joined)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _digits_of(operator, left, right) > MAX_DIGITS:
                raise _TooLarge(f"makes a number of more than {MAX_DIGITS} digits")
            if operator == "*" and _length_of(left, right) > MAX_LENGTH:
                raise _TooLarge(f"makes a value of more than {MAX_LENGTH} characters or items")
            return super().call_binop(context, operator, left, right)

    mlx_lm.use_sandbox(Held)


def _digits_of(operator: str, left: Any, right: Any) -> int:
    """About how many digits a power or a product has; 0 where it is no whole number."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    digits = left.bit_length() * 0.3
    return int(digits * abs(right) if operator == "**" else digits + right.bit_length() * 0.3)


def _length_of(left: Any, right: Any) -> int:
    """How long a text or list is when it is repeated; 0 for what is neither."""
    one, times = (right, left) if isinstance(left, int) else (left, right)
    repeats = isinstance(one, (str, bytes, list, tuple)) and isinstance(times, int)
    return len(one) * times if repeats else 0


def _joined(pieces: Iterable[str]) -> str:
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_LENGTH:
            raise _TooLarge(f"writes more than {MAX_LENGTH} characters")
        out.append(piece)
    return "".join(out)
