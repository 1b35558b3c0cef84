"""Where messages come from: a terminal prompt, or a pipe with one message a line.

On the terminal a message may have many lines: in triple quotes, by Alt-Enter, behind a trailing
backslash, or as one paste. Whatever was typed is in the history, a line cleared by Ctrl-C too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ds4cli import terminal
from ds4cli.errors import UsageError

PROMPT = ">>> "
CONTINUED = "... "
FENCE = '"""'
LEAVE_WITHIN_S = 1.0
HISTORY_LINES = 1000


class Leave(Exception):
    """The user asked twice to leave."""


def is_open(text: str) -> bool:
    """Whether a message goes on in the next line."""
    if text.lstrip().startswith(FENCE):
        rest = text.strip()[len(FENCE) :]
        return not rest.endswith(FENCE)
    return text.endswith("\\") and not text.endswith("\\\\")


def message_of(text: str) -> str:
    """What was meant: without the triple quotes around it."""
    stripped = text.strip()
    if stripped.startswith(FENCE) and stripped.endswith(FENCE) and len(stripped) >= 2 * len(FENCE):
        return stripped[len(FENCE) : -len(FENCE)].strip("\n")
    return text


def next_line(text: str) -> str:
    """An open message with the line begun below; a backslash that asked for it is gone."""
    return (text.removesuffix("\\") if not text.lstrip().startswith(FENCE) else text) + "\n"


# -- pipes ----------------------------------------------------------------------------------------


class PipeReader:
    """Messages from a stream that is no terminal: one a line, or all of it as one."""

    is_interactive = False

    def __init__(self, stream: TextIO, single: bool = False):
        self._lines = _decoded(stream)
        self._single = single

    def read(self, default: str = "") -> str:
        """The next message. EOFError at the end. `default` is of use on a terminal only."""
        if self._single:
            text, self._single = "".join(self._lines), False
            return text.rstrip("\n")
        text = self._next()
        while is_open(text):
            try:
                text = next_line(text) + self._next()
            except EOFError:
                break
        return message_of(text)

    def _next(self) -> str:
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line.rstrip("\n").removesuffix("\r")


def _decoded(stream: TextIO) -> Iterator[str]:
    """Lines as text, each when it comes; UsageError at bytes that are not UTF-8."""
    for number, line in enumerate(stream.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"line {number} of standard input is not UTF-8 text") from None


class PlainReader(PipeReader):
    """A terminal that cannot be drawn on (TERM=dumb): a plain prompt on stderr."""

    is_interactive = True

    def __init__(self, stream: TextIO):
        super().__init__(stream)

    def read(self, default: str = "") -> str:
        if default:
            terminal.note(f"your message: {default}")
        return super().read()

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
        with contextlib.suppress(OSError):
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.writelines(map(_line, entries))
            os.replace(temporary, self.path)


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

    complete(text before the cursor) -> (candidates, length of what they replace).
    """

    is_interactive = True

    def __init__(
        self, history: HistoryFile | None, complete: Callable[[str], tuple[list[str], int]]
    ):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._interrupted_at = 0.0
        self._session = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "" if wrapped else CONTINUED,
            history=_history(history),
            completer=_completer(complete),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
            output=create_output(_drawable()),
        )

    def read(self, default: str = "") -> str:
        """The next message. EOFError on Ctrl-D, Leave on Ctrl-C twice."""
        while True:
            try:
                return message_of(self._session.prompt(default=default))
            except KeyboardInterrupt:
                self._note_interrupt()
                default = ""

    def _note_interrupt(self) -> None:
        now = time.monotonic()
        if now - self._interrupted_at < LEAVE_WITHIN_S:
            raise Leave
        self._interrupted_at = now
        if not self._session.default_buffer.text:
            terminal.note("Ctrl-C again or Ctrl-D leaves")


def _drawable() -> TextIO:
    """Where the prompt is drawn: the reply's stream if it is a terminal, else stderr."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _history(file: HistoryFile | None) -> Any:
    from prompt_toolkit.history import History, InMemoryHistory

    if file is None:
        return InMemoryHistory()

    class Stored(History):
        def load_history_strings(self) -> Iterable[str]:
            return reversed(file.load())

        def store_string(self, string: str) -> None:
            file.append(string)

    return Stored()


def _completer(complete: Callable[[str], tuple[list[str], int]]) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(self, document: Any, event: Any) -> Iterator[Any]:
            candidates, length = complete(document.text_before_cursor)
            for candidate in candidates:
                yield Completion(candidate, start_position=-length)

    return Words()


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
