"""One message into a kept chat, for scripts: `ds4cli generate --session NAME`, or `-c`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds4cli import terminal
from ds4cli.chat.console import Chat
from ds4cli.chat.request import ChatRequest
from ds4cli.chat.transcript import Turn
from ds4cli.settings import Settings

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.tools import Tool


@dataclass
class StoredCall:
    """A tool call as the transcript has it."""

    fields: dict[str, Any]

    def openai(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return self.fields


class OneMessage:
    """In place of a prompt: nobody is there to be asked."""

    is_interactive = False
    was_interrupted = False
    has_keys = False

    def lent(self) -> AbstractContextManager[None]:
        """There is no terminal to lend."""
        return contextlib.nullcontext()


class Writer(terminal.ReplyWriter):
    """Keeps the reasoning, and writes the reply if it is to be seen while it is made."""

    def __init__(self, is_live: bool, shows_reasoning: bool):
        super().__init__(shows_reasoning)
        self.thought = ""
        self._is_live = is_live

    def reasoning(self, text: str) -> None:
        self.thought += text
        super().reasoning(text)

    def answer(self, text: str) -> None:
        if self._is_live:
            super().answer(text)


class OneReply(Chat):
    """A chat that says one thing. What is printed at the reply's end is the caller's."""

    def __init__(
        self,
        engine: Engine,
        request: ChatRequest,
        settings: Settings,
        tools: Sequence[Tool],
        writer: Writer,
    ):
        super().__init__(engine, request, settings, tools, OneMessage())
        self.writer = writer

    def say(self, text: str) -> Turn | None:
        """The reply to `text`; None if it was stopped before the first word."""
        with self._kept():
            self.send(text)
        last = self.line.turns[-1] if self.line.turns else None
        return last if last is not None and last.is_reply and not self.draft else None

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def start_counting(self) -> None:
        """The session's counters are those of the reply."""

    def _writer(self) -> terminal.ReplyWriter:
        return self.writer

    def _end_reply(self, writer: terminal.ReplyWriter) -> None:
        writer.answer("")  # ends the reasoning
