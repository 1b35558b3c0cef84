"""Where messages come from: a terminal prompt, or a pipe with one message a line.

On the terminal a message may have many lines: in triple quotes, by Alt-Enter, behind a trailing
backslash, or as one paste. Whatever was typed is in the history, a line cleared by Ctrl-C too.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from ds4cli import terminal
from ds4cli.atomic import replacing
from ds4cli.errors import UsageError
from ds4cli.escapes import visible

PROMPT = ">>> "
CONTINUED = "... "
FENCE = '"""'
LEAVE_WITHIN_S = 1.0
HISTORY_LINES = 1000


class Leave(Exception):
    """The user asked twice to leave."""


def is_open(text: str) -> bool:
    """Whether a message goes on in the next line: quotes stand open, or a backslash ends it."""
    if text.lstrip().startswith(FENCE):
        return text.count(FENCE) == 1
    return text.endswith("\\") and not text.endswith("\\\\")


def message_of(text: str) -> str:
    """What was meant: without the triple quotes around it. Other text with quotes stays."""
    stripped = text.strip()
    is_fenced = stripped.startswith(FENCE) and stripped.endswith(FENCE)
    if is_fenced and stripped.count(FENCE) == 2:
        return stripped[len(FENCE) : -len(FENCE)].strip("\n")
    return text


def next_line(text: str) -> str:
    """An open message with the line begun below; a backslash that asked for it is gone."""
    return (text.removesuffix("\\") if not text.lstrip().startswith(FENCE) else text) + "\n"


# -- pipes ----------------------------------------------------------------------------------------


class PipeReader:
    """Messages from a stream that is no terminal: one a line, or all of it as one."""

    is_interactive = False
    was_interrupted = False
    has_keys = False

    def __init__(self, stream: TextIO, single: bool = False):
        self._stream = stream.buffer
        self._single = single
        self._lines_read = 0

    def __enter__(self) -> PipeReader:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def lent(self) -> AbstractContextManager[None]:
        """While another program has the terminal."""
        return contextlib.nullcontext()

    def read(self, default: str = "") -> str:
        """The next message. EOFError at the end. `default` is of use on a terminal only."""
        if self._single:
            self._single = False
            return self._all()
        text = self._next()
        while is_open(text):
            try:
                text = next_line(text) + self._next()
            except EOFError:
                break
        return message_of(text)

    def _all(self) -> str:
        lines = []
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self._next())
        return "\n".join(lines)

    def _next(self) -> str:
        line = self._stream.readline()
        if not line:
            raise EOFError
        self._lines_read += 1
        try:
            text = line.decode("utf-8-sig" if self._lines_read == 1 else "utf-8")
        except UnicodeDecodeError:
            where = f"line {self._lines_read} of standard input"
            raise UsageError(f"{where} is not UTF-8 text") from None
        return text.removesuffix("\n").removesuffix("\r")


class Twice:
    """Ctrl-C at one prompt: once it clears the line, twice with nothing typed between it leaves."""

    def __init__(self) -> None:
        self._at = -LEAVE_WITHIN_S

    def press(self, line: str) -> None:
        """Raises Leave for the second of two in a row; otherwise says how to leave."""
        now = time.monotonic()
        if not line and now - self._at < LEAVE_WITHIN_S:
            raise Leave
        self._at = now
        terminal.note("Ctrl-C again, at once, or Ctrl-D leaves")


class PlainReader(PipeReader):
    """A terminal that cannot be drawn on (TERM=dumb): a plain prompt on stderr."""

    is_interactive = True

    def read(self, default: str = "") -> str:
        if default:
            terminal.note(f"your message: {default}")
        twice = Twice()
        while True:
            try:
                return super().read()
            except KeyboardInterrupt:
                twice.press("")

    def _next(self) -> str:
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
        return super()._next()


# -- history --------------------------------------------------------------------------------------


class HistoryFile:
    """Typed messages as JSON lines, the oldest first; the last thousand are kept. Mode 0600."""

    def __init__(self, path: Path):
        self.path = path

    def load(self) -> list[str]:
        """All entries, the oldest first; a line that cannot be read is skipped."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError:
            return []
        entries = [entry for line in lines if isinstance(entry := _entry(line), str)]
        if len(lines) > 2 * HISTORY_LINES:
            self._write(entries[-HISTORY_LINES:])
        return entries[-HISTORY_LINES:]

    def append(self, text: str) -> None:
        """Add an entry. History is a comfort: a full disk must not stop a chat."""
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(os.open(self.path, flags, 0o600), "ab") as file:
                file.write(_line(text))

    def _write(self, entries: Iterable[str]) -> None:
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_bytes(b"".join(map(_line, entries)))


def _line(text: str) -> bytes:
    return (json.dumps(text, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _entry(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


# -- the terminal ---------------------------------------------------------------------------------


class TerminalReader:
    """A prompt with editing, history with search, and completion.

    complete(text before the cursor) -> (candidates, length of what they replace). Inside its
    context a Ctrl-C between two prompts raises nothing: `was_interrupted` says that it came, so
    that none is lost between the Enter key and the moment that the model begins to read.
    """

    is_interactive = True
    was_interrupted = False

    def __init__(
        self, history: HistoryFile | None, complete: Callable[[str], tuple[list[str], int]]
    ):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._keys = terminal.UnseenKeys()
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "" if wrapped else CONTINUED,
            history=_history(history),
            completer=_completer(complete),
            complete_while_typing=False,
            enable_suspend=True,
            key_bindings=_key_bindings(),
            input_processors=[visible_input()],
            output=create_output(_drawable()),
        )

    def __enter__(self) -> TerminalReader:
        self._handler = signal.signal(signal.SIGINT, self._note_interrupt)
        self._keys.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._keys.__exit__()
        signal.signal(signal.SIGINT, self._handler)

    def lent(self) -> AbstractContextManager[None]:
        """While another program has the terminal."""
        return self._keys.lifted()

    @property
    def has_keys(self) -> bool:
        """Whether keys wait that were typed before there was a prompt."""
        return bool(select.select([0], [], [], 0)[0])

    def _note_interrupt(self, *_: object) -> None:
        self.was_interrupted = True

    def read(self, default: str = "") -> str:
        """The next message. EOFError on Ctrl-D, Leave on Ctrl-C twice."""
        self.was_interrupted, twice = False, Twice()
        while True:
            try:
                return _clean(self._session.prompt(default=default, handle_sigint=False))
            except KeyboardInterrupt:
                twice.press(self._session.default_buffer.text)
                default = ""


def _clean(typed: str) -> str:
    """The message; bytes from the terminal that are no UTF-8 become U+FFFD."""
    return message_of(typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def _drawable() -> TextIO:
    """Where the prompt is drawn: the reply's stream if it is a terminal, else stderr."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _history(file: HistoryFile | None) -> Any:
    from prompt_toolkit.history import History, InMemoryHistory

    if file is None:
        return InMemoryHistory()
    kept: HistoryFile = file

    class Stored(History):
        def load_history_strings(self) -> Iterable[str]:
            return reversed(kept.load())

        def store_string(self, string: str) -> None:
            kept.append(string)

    return Stored()


def _completer(complete: Callable[[str], tuple[list[str], int]]) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(self, document: Any, event: Any) -> Iterator[Any]:
            candidates, length = complete(document.text_before_cursor)
            for candidate in candidates:
                yield Completion(candidate, start_position=-length)

    return Words()


def visible_input() -> Any:
    """Shows what hides in the input line as escapes; the message itself stays as it is."""
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.formatted_text.utils import fragment_list_to_text
    from prompt_toolkit.layout.processors import Processor, Transformation

    class Visible(Processor):
        def apply_transformation(self, given: Any) -> Any:
            text = fragment_list_to_text(given.fragments)
            if visible(text) == text:
                return Transformation(given.fragments)
            starts = [0, *itertools.accumulate(len(visible(char)) for char in text)]
            shown: StyleAndTextTuples = [
                (fragment[0], visible(fragment[1])) for fragment in given.fragments
            ]
            last = len(text)
            return Transformation(
                shown,
                source_to_display=lambda at: starts[min(at, last)] + max(0, at - last),
                display_to_source=lambda at: bisect.bisect_right(starts, at) - 1,
            )

    return Visible()


def _key_bindings() -> Any:
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching, eager=True)
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.complete_state:
            buffer.complete_state = None
        elif buffer.document.is_cursor_at_the_end and is_open(buffer.text):
            buffer.text = next_line(buffer.text)
            buffer.cursor_position = len(buffer.text)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=~is_searching, eager=True)
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=~is_searching, eager=True)
    def _(event: Any) -> None:
        event.current_buffer.append_to_history()
        event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    return keys
