"""How long a chat template may run, how much it may write, and how much memory that may take.

A template is a program that came with a model's files. transformers runs it in Jinja's sandbox,
which keeps it from files and from Python, and lets it loop for ever.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds4cli.errors import ModelError
from ds4cli.text import template_sandbox

SECONDS = 10.0
LOOK_S = 0.05  # between looks at the memory
MEMORY_BYTES = 2**30  # more than the program had when the template began
# What a template adds to what it was given: markup, a system text, arguments with indents.
ROOM_CHARS, ROOM_FACTOR = 2**20, 8
HINT = "`--chat-template FILE` takes another one; `--raw` none"


class _Stop(BaseException):
    """Raised in the middle of a template. No `except Exception` on the way takes it for its own."""


def render(draw: Callable[[], str], given: Any) -> str:
    """`draw()`, which runs a template on what was `given`.

    ModelError where it takes too long, writes too much, or takes too much memory.
    """
    room = ROOM_CHARS + ROOM_FACTOR * len(str(given))
    template_sandbox.use()
    watch = _Watch()
    try:
        with watch:
            text = draw()
    except _Stop:
        raise _refused(watch.reason) from None
    except template_sandbox.TooLarge as error:
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
    """Memory of this process. macOS tells the most there ever was, which grows all the same."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE")
