"""What the user sees: the reply on stdout, everything else on stderr; and Ctrl-C.

Animation appears only where stderr is a terminal. Nothing that a model, a file or a name says can
steer a terminal: the consoles escape all that they print and know no markup, and stdout is written
by `write` alone. Only what a pipe gets on stdout is byte for byte the model's.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TextIO

from ds4cli.escapes import visible

if TYPE_CHECKING:
    from rich.progress import Progress

    from ds4cli.console import SafeConsole
    from ds4cli.engine.session import Stats


@functools.cache
def out() -> SafeConsole:
    """The console on stdout. Rich is loaded when something is printed there, not for `--help`."""
    from ds4cli.console import SafeConsole

    return SafeConsole()


@functools.cache
def err() -> SafeConsole:
    """The console on stderr."""
    from ds4cli.console import SafeConsole

    return SafeConsole(stderr=True)


EXIT_INTERRUPTED = 130


def allow_other_encodings() -> None:
    """Let standard streams that are not Unicode write `?` for what they lack, and say so once."""
    said: list[bool] = []

    def replace(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        if not said:
            said.append(True)
            note(f"the output is in {error.encoding}: `?` stands for what it lacks")
        return "?" * (error.end - error.start), error.end

    codecs.register_error("ds4cli", replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not is_unicode(stream):
            stream.reconfigure(errors="ds4cli")


def is_unicode(stream: TextIO) -> bool:
    """Whether a stream can hold any text."""
    return (stream.encoding or "").lower().replace("_", "-").startswith("utf")


def argument_text(word: str) -> str:
    """A word of the command line as UTF-8, whatever the locale says; as it is where it is not."""
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeError:
        return word


def is_animated() -> bool:
    """Whether moving output suits stderr. `FORCE_COLOR` makes Rich say terminal for a pipe."""
    return err().is_terminal and not err().is_dumb_terminal and sys.stderr.isatty()


def is_dumb() -> bool:
    """Whether the terminal knows no control codes. A signal's handler asks, where nothing may be
    imported; so not Rich."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def width() -> int | None:
    """Columns that a line on stderr may take; None where there is no screen."""
    return err().width if sys.stderr.isatty() else None


def printable(text: str, stream: TextIO) -> str:
    """`text`, escaped if `stream` is a terminal; a pipe gets every byte."""
    return visible(text) if stream.isatty() else text


class Cursor:
    """Whether the screen's cursor stands behind a piece of a reply, which ends with no newline."""

    is_in_line = False

    @classmethod
    def follow(cls, text: str) -> None:
        """`text` has been written to stdout."""
        if text:
            cls.is_in_line = not text.endswith("\n") and sys.stdout.isatty()

    @classmethod
    def to_new_line(cls) -> None:
        """What is said about a reply begins in a line of its own."""
        if cls.is_in_line:
            write("\n")


def write(text: str) -> None:
    """`text` on stdout, at once."""
    sys.stdout.write(printable(text, sys.stdout))
    sys.stdout.flush()
    Cursor.follow(text)


def write_styled(pieces: Iterable[tuple[str, str]]) -> None:
    """Texts that were made `visible`, with their Rich styles, on a terminal's stdout, at once."""
    from rich.console import COLOR_SYSTEMS

    console = out()
    colours = COLOR_SYSTEMS.get(console.color_system or "")
    for text, style in pieces:
        sys.stdout.write(
            console.get_style(style).render(text, color_system=colours) if style else text
        )
        Cursor.follow(text)
    sys.stdout.flush()


def show(text: str) -> None:
    """Text on stderr as it stands: no styles, no wrapping."""
    err().print(text, soft_wrap=True)


def note(text: str) -> None:
    """One dim line on stderr."""
    Cursor.to_new_line()
    err().print(text, style="dim", soft_wrap=True)


def notes(lines: Iterable[str]) -> None:
    """A dim line on stderr for each."""
    for line in lines:
        note(line)


def fail(message: str, hint: str | None = None) -> None:
    """An error as one line on stderr, and its hint as another."""
    Cursor.to_new_line()
    for label, style, text in (("error", "bold red", message), ("hint", "cyan", hint)):
        if text:
            err().print(f"{label}:", style=style, end=" ")
            err().print(one_line(text), soft_wrap=True)


def one_line(text: str) -> str:
    """`text` in one line, escaped before the white space in it becomes single spaces."""
    return " ".join(visible(text).split())


def status(text: str) -> AbstractContextManager[Any]:
    """A spinner on stderr while something runs, on a terminal only."""
    if not is_animated():
        return contextlib.nullcontext()
    from rich.text import Text

    return err().status(Text(one_line(text)), spinner="dots")


class PrefillBar:
    """Progress of a prompt being read; appears after a second, on a terminal only."""

    DELAY_S = 1.0

    def __init__(self, show: bool) -> None:
        self._show = show and is_animated()
        self._begin = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> PrefillBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` new tokens have been read."""
        late = time.monotonic() - self._begin > self.DELAY_S
        if self._bar is None and self._show and late and done < total:
            self._bar = _token_bar()
            self._bar.add_task("reading the prompt", total=total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)


def _token_bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    return Progress(*columns, console=err(), transient=True)


class ReplyWriter:
    """Writes a reply while it is made: answer to stdout, reasoning to stderr, dim."""

    def __init__(self, show_reasoning: bool) -> None:
        self._show_reasoning = show_reasoning
        self._reasoning_open = False

    def reasoning(self, text: str) -> None:
        """Reasoning: never part of what a pipe receives."""
        if self._show_reasoning:
            self._reasoning_open = True
            err().print(text, style="dim", end="", soft_wrap=True)

    def answer(self, text: str) -> None:
        """Answer text, at once and unchanged: no wrapping, no styles."""
        self._close_reasoning()
        write(text)

    def end(self) -> None:
        """End the reply with a newline."""
        self.answer("\n")

    def _close_reasoning(self) -> None:
        if self._reasoning_open:
            self._reasoning_open = False
            err().print("\n")


class UnseenKeys:
    """Inside the block what is typed is not echoed into the output: it waits for the next prompt.

    Ctrl-C still interrupts. There is one terminal, so what it was like is kept by the class.
    """

    _found: list[Any] | None = None

    def __enter__(self) -> None:
        UnseenKeys._found = termios.tcgetattr(0)
        self._hide()

    def __exit__(self, *exception: object) -> None:
        self.restore()
        UnseenKeys._found = None

    @staticmethod
    def restore() -> None:
        """The terminal as it was found."""
        if UnseenKeys._found is not None:
            termios.tcsetattr(0, termios.TCSANOW, UnseenKeys._found)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """As it was found while another program has the terminal."""
        self.restore()
        try:
            yield
        finally:
            self._hide()

    @staticmethod
    def _hide() -> None:
        modes = termios.tcgetattr(0)
        modes[0] &= ~termios.ICRNL  # Enter arrives as the prompt expects it
        modes[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        modes[3] |= termios.NOFLSH  # Ctrl-C drops nothing that was typed
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(0, termios.TCSANOW, modes)


def counted(number: int, noun: str) -> str:
    """`1 turn`, `2 turns`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def stats_line(stats: Stats, peak_bytes: int, width: int | None = None) -> str:
    """One line about a reply; a part appears only when it says something.

    width: what the line may take. What says least is shortened first, or left out.
    """
    # Each part from long to short, in the order in which they stand, and when it gets shorter.
    parts = [
        ((_rate(stats.generated_tokens, stats.decode_s),), ()),
        ((*_drafts(stats), ""), (2, 5)),
        ((_prompt(stats), ""), (4,)),
        (_going_back(stats), (3,)),
        ((f"{peak_bytes / 1e9:.1f} GB", ""), (1,)),
    ]
    for step in range(6):
        chosen = (forms[sum(step >= when for when in steps)] for forms, steps in parts)
        line = " · ".join(filter(None, chosen))
        if width is None or len(line) <= width:
            break
    return line


def _rate(tokens: int, seconds: float) -> str:
    """Two digits are all that a measurement is good for."""
    rate = tokens / seconds if seconds > 0 else 0
    return f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s"


def _drafts(stats: Stats) -> tuple[str, str]:
    if not stats.proposed:
        return "", ""
    short = f"{1 + stats.accepted / stats.blocks:.1f} "
    right = f"drafts {100 * stats.accepted / stats.proposed:.0f} % right"
    return f"{short}tokens a call ({right})", f"{short}a call"


def _prompt(stats: Stats) -> str:
    kept = f", {stats.cached_tokens:,} kept" if stats.cached_tokens else ""
    return f"prompt {stats.prompt_tokens:,}{kept}"


def _going_back(stats: Stats) -> tuple[str, str]:
    back, took = stats.discarded_tokens, f"in {_duration(stats.back_s)}"
    return (f"back {counted(back, 'token')} {took}", f"back {back:,} {took}") if back else ("", "")


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
