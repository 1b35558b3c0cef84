"""Ctrl-C stops what runs; SIGTERM, SIGHUP and SIGQUIT end the process as its parent expects.

Whatever ends it, the terminal is left as it was found, commands that were started end too, and a
line that is being written to a file is written whole.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ds4cli import terminal

DEADLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SHOW_CURSOR = b"\x1b[?25h"
END_PASTE = b"\x1b[?2004l"  # what a prompt has switched on

_found_modes: list[Any] | None = None  # of the terminal, when the program began
_before_end: list[Callable[[], None]] = []
_hints: list[Callable[[], str | None]] = []


class Program:
    """Inside the block signals mean what they mean to the command line; an ignored one still is."""

    def __enter__(self) -> None:
        global _found_modes
        _found_modes = termios.tcgetattr(0) if os.isatty(0) else None
        wanted = dict.fromkeys(DEADLY, die) | {signal.SIGINT: _leave}
        self._before = {number: signal.getsignal(number) for number in wanted}
        for number, handler in wanted.items():
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _leave(*_: object) -> None:
    leave_now()


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Inside the block Ctrl-C raises KeyboardInterrupt, for who has something to finish."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupts:
    """Inside the block the first Ctrl-C sets a flag; the second leaves the process with 130.

    The state of a session is consistent between blocks only, so the flag is read there. Python runs
    signal handlers between bytecodes, but one model call may take seconds: a thread on the wake-up
    descriptor sees the second Ctrl-C, and what ends the process, while the call still runs.
    """

    def __init__(self) -> None:
        self._count = 0
        self._ours = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def __call__(self) -> bool:
        """Whether the user asked to stop."""
        return self._count > 0

    def __enter__(self) -> Interrupts:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if self._ours:
            self._handler = signal.signal(signal.SIGINT, lambda *_: None)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, self._handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] in DEADLY:
                die(number[0])
            self._count += number[0] == signal.SIGINT
            if self._count > 1:
                leave_now()


# -- the end --------------------------------------------------------------------------------------


class Whole:
    """Inside the block something is written that no signal but SIGKILL cuts in two."""

    _lock = threading.Lock()  # held while it is written, and from the beginning of the end
    _is_open = False
    _due = 0  # the signal that came meanwhile

    def __enter__(self) -> None:
        Whole._lock.acquire()
        Whole._is_open = True

    def __exit__(self, *exception: object) -> None:
        Whole._is_open = False
        Whole._lock.release()
        if Whole._due:
            die(Whole._due)

    @classmethod
    def waits(cls, number: int) -> bool:
        """Whether a signal that came in the thread that writes has to wait until it has written."""
        in_writer = cls._is_open and threading.current_thread() is threading.main_thread()
        cls._due = number if in_writer else cls._due
        return in_writer

    @classmethod
    def no_more(cls) -> None:
        """Wait until all is written; nothing is from here on."""
        cls._lock.acquire()


@contextlib.contextmanager
def before_end(tidy: Callable[[], None]) -> Iterator[None]:
    """Should the process be ended inside the block, `tidy` is called first."""
    _before_end.append(tidy)
    try:
        yield
    finally:
        _before_end.remove(tidy)


@contextlib.contextmanager
def hinting(hint: Callable[[], str | None]) -> Iterator[None]:
    """Should `fail_now` end the process inside the block, this is its hint."""
    _hints.append(hint)
    try:
        yield
    finally:
        _hints.remove(hint)


def die(number: int, frame: FrameType | None = None) -> None:
    """End the process by a signal, when what is being written is whole."""
    if Whole.waits(number):
        return
    Whole.no_more()
    _tidy()
    # Python changes what a signal does in its main thread only; this may be another one.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal(number, None)
    os.kill(os.getpid(), number)


def leave_now() -> None:
    """End the process at once: the terminal as it was found, the cursor visible in a new line."""
    _tidy()
    if sys.stderr.isatty():
        os.write(2, b"\r\n")
    os._exit(terminal.EXIT_INTERRUPTED)


def fail_now(message: str) -> None:
    """End the process with one line, from any thread, when what is being written is whole."""
    Whole.no_more()
    try:
        with contextlib.suppress(OSError, termios.error):
            _restore_terminal()
        terminal.fail(message, next(filter(None, (hint() for hint in _hints)), None))
        _tidy()
    finally:  # whoever read what is said may have gone
        os._exit(1)


def at_end(done: Callable[[], None], cut_short: Callable[[], None]) -> None:
    """Call `done` when the program has ended by itself, `cut_short` when it is ended; not both."""
    atexit.register(done)
    _before_end.append(cut_short)


def _tidy() -> None:
    for tidy in _before_end:
        tidy()
    with contextlib.suppress(OSError, termios.error):  # the terminal may have gone
        _restore_terminal()


def _restore_terminal() -> None:
    """The terminal as it was found. Whoever touches it from the background is stopped."""
    if _found_modes is not None and os.tcgetpgrp(0) == os.getpgrp():
        termios.tcsetattr(0, termios.TCSANOW, _found_modes)
    shown = next((number for number in (2, 1) if os.isatty(number)), None)
    if shown is not None and not terminal.is_dumb():
        os.write(shown, SHOW_CURSOR + END_PASTE)
