"""What the user sees of a conversation: messages and commands in, replies and notes out."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli import signals, terminal
from ds4cli.chat import shelf
from ds4cli.chat.attachments import Attachments
from ds4cli.chat.calls import Calls
from ds4cli.chat.conversation import Conversation, Watch
from ds4cli.chat.request import ChatRequest
from ds4cli.chat.transcript import Line, Turn
from ds4cli.errors import DS4Error, UsageError
from ds4cli.rewind.plan import RewindReport
from ds4cli.settings import Settings
from ds4cli.terminal import counted

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.tools import Tool

HINT = "/help lists commands; Ctrl-D leaves"


class Chat:
    """What the user sees of a conversation."""

    def __init__(
        self,
        engine: Engine,
        request: ChatRequest,
        settings: Settings,
        tools: Sequence[Tool] = (),
        reader: Any = None,
    ):
        self.request = request
        self.colours = request.colours
        self.conversation = Conversation(
            engine, settings, tools=tools, drop_reasoning=request.drop_reasoning
        )
        self.reader = reader
        self.calls = Calls(self)
        self.draft = ""  # text that waits in the input line
        self.attached = Attachments(lambda text: len(engine.encode(text)))
        self.totals: dict[str, float] = {}
        self.accepted: Counter[int] = Counter()  # blocks by how many guesses they kept
        self.failures = 0
        self.is_over = False
        self.name: str | None = None  # of the session on disk
        self.is_named = False  # by the user

    @property
    def settings(self) -> Settings:
        return self.conversation.settings

    @property
    def line(self) -> Line:
        return self.conversation.line

    # -- the course of a chat ---------------------------------------------------------------------

    def begin(self) -> None:
        """Take up a stored session, or prepare a new one."""
        path = self.request.stored()
        if path is not None:
            self.load(path.stem)
        elif self.request.name is not None:
            self.keep_as(self.request.name, is_named=True)
        elif self.request.save and self.reader.is_interactive:
            self._keep_unnamed()
        if self.reader.is_interactive:
            self.note(HINT)

    def fail(self, message: str, hint: str | None) -> None:
        """An error on stderr; in a pipe it also shows in the exit code."""
        self.failures += 1
        terminal.fail(message, hint)

    def end(self) -> None:
        """Keep the model's state if asked, and close the session's file."""
        conversation = self.conversation
        if conversation.journal is not None:
            path = conversation.journal.path
            if self.request.with_cache or shelf.cache_of(path).exists():
                self.save_state(path)
            if self.reader.is_interactive:
                self.note(f"saved as {self.way_back}")
        conversation.close()

    @property
    def way_back(self) -> str | None:
        """Where the chat is kept; None where it is not."""
        kept = self.conversation.journal
        return None if kept is None else f"`{kept.path.stem}`; `ds4cli chat -c` goes on"

    def kept_hint(self) -> str | None:
        """What is not lost if the process is to end now."""
        return self.way_back and f"the chat is kept as {self.way_back}"

    # -- talking ----------------------------------------------------------------------------------

    def send(self, text: str, after: Line | None = None) -> None:
        """Say `text` and let the model answer; while it waits for a tool's result, that is it."""
        if after is None and self.conversation.open_calls:
            return self.calls.give(text)
        is_sent = False
        try:
            is_sent = self.ask(Turn("user", self.attached.before(text)), after=after)
        finally:
            if is_sent:
                self.attached.drop()
            else:  # nothing typed is ever lost
                self.draft = text
                if self.attached.files:
                    self.note(f"still attached: {self.attached}; `/file -` drops")

    def ask(self, *turns: Turn, after: Line | None = None) -> bool:
        """Read turns and let the model answer them; False if nothing came of it."""
        with self.watching() as watch:
            with self.reading(watch) as reading:
                is_read = self.conversation.ask(*turns, after=after, watch=reading)
            if not is_read:
                self.start_counting()
                self.note("stopped while reading; what was read is kept, your message is not sent")
                return False
            try:
                self._answer(watch)
            finally:
                is_answered = self.line.turns[-1].is_reply
                if not is_answered:
                    self.conversation.take_back()
        if not is_answered:
            self.note("stopped before the first word; your message is not sent")
        return is_answered

    def reply(self, attempt: int = 0) -> None:
        """Let the model answer the last message, or go on with its last reply."""
        with self.watching() as watch:
            with self.reading(watch) as reading:
                self.conversation.catch_up(reading)
            if self.conversation.is_complete:
                self._answer(watch, attempt)

    def _answer(self, watch: Watch, attempt: int = 0) -> None:
        writer = self._writer()
        begun = self.line.turns[-1]
        if begun.is_reply and hasattr(writer, "prime"):
            writer.prime(begun.content)
        self._warn_of_room()
        try:
            with contextlib.closing(self.conversation.answer(watch, attempt)) as pieces:
                if self.conversation.is_unwatched:
                    self.note(
                        "a tool call in this reply does not fit its tool: it goes on unwatched"
                    )
                for piece in pieces:
                    (writer.reasoning if piece.is_reasoning else writer.answer)(piece.text)
        finally:
            if self.line.turns[-1].is_reply:
                self._end_reply(writer)
            self.start_counting()

    def _writer(self) -> terminal.ReplyWriter:
        shows_reasoning = not self.request.quiet and not self.settings.hide_reasoning
        if self.colours and shows_colours():
            from ds4cli.chat.markdown import MarkdownWriter

            return MarkdownWriter(shows_reasoning)
        return terminal.ReplyWriter(shows_reasoning)

    def _warn_of_room(self) -> None:
        room, limit = self.conversation.room, self.settings.max_tokens
        if room is not None and room < min(limit if limit > 0 else 1024, 1024):
            self.note(f"the context is nearly full: room for {room:,} more tokens; /undo or /clear")

    def _end_reply(self, writer: terminal.ReplyWriter) -> None:
        turn, calls = self.line.turns[-1], self.conversation.open_calls
        if turn.content or not calls:
            writer.end()
        else:
            writer.answer("")  # ends the reasoning
        for repair in getattr(self.conversation.session.stats, "repairs", ()):
            self.note(f"repaired: {repair.reason}; {repair.dropped_tokens} tokens back")
        if self.conversation.remark:
            self.note(self.conversation.remark)
        self._note_cut(turn)
        self._print_stats()
        if calls:
            self.calls.announce()

    def _note_cut(self, turn: Turn) -> None:
        if turn.finish_reason == "cancelled":
            self.note("stopped; what was written stays: /continue goes on, /undo takes it back")
        elif turn.finish_reason == "length":
            full = self.conversation.room == 0
            self.note(
                "cut: the context is full" if full else "cut at max_tokens: /continue goes on"
            )

    def _print_stats(self) -> None:
        shown = self.settings.stats
        if (self.reader.is_interactive if shown is None else shown) and not self.request.quiet:
            stats = self.conversation.session.stats
            terminal.note(terminal.stats_line(stats, peak_bytes(), terminal.width()))

    def start_counting(self) -> None:
        """Add the session's counters to the chat's totals, and begin again from zero."""
        session = self.conversation.session
        for name, value in vars(session.stats).items():
            if isinstance(value, (int, float)):
                self.totals[name] = self.totals.get(name, 0) + value
        self.accepted.update(dict(enumerate(session.stats.accept_counts)))
        session.stats = type(session.stats)(drafter=session.stats.drafter)

    # -- moving -----------------------------------------------------------------------------------

    def move(self, go: Callable[[Watch], RewindReport]) -> None:
        """Go somewhere else in the conversation, and print what that took."""
        with self.watching() as watch, self.reading(watch) as reading:
            report = go(reading)
        self.print_move(report)

    def print_move(self, report: RewindReport) -> None:
        """What was kept, dropped and read, and how long it took."""
        read = report.replayed + report.prefilled
        parts = [
            f"now {counted(len(self.line.turns), 'turn')}",
            f"{counted(report.discarded, 'token')} dropped",
            f"{read:,} read" + (" again" if read and not report.prefilled else ""),
            f"{1e3 * report.seconds:,.1f} ms",
        ]
        if not self.conversation.is_complete:
            parts.append("stopped: the rest is read with the next message")
        self.note(" · ".join(parts))
        self.start_counting()  # the next reply's line is about that reply

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Ctrl-C as a flag."""
        with signals.Interrupts() as interrupted:
            yield Watch(lambda: interrupted() or self.reader.was_interrupted)

    @contextlib.contextmanager
    def reading(self, watch: Watch) -> Iterator[Watch]:
        """A bar while a long prompt is read; it is gone before anything else is printed."""
        with terminal.PrefillBar(not self.request.quiet) as bar:
            yield replace(watch, progress=bar)

    # -- on disk ----------------------------------------------------------------------------------

    def keep_as(self, name: str, is_named: bool = False) -> None:
        """Write the chat to a new session file."""
        self.conversation.keep_in(shelf.path_of(name))
        self.name, self.is_named = name, is_named

    def _keep_unnamed(self) -> None:
        if shelf.is_writable(path := self._new_path()):
            self.conversation.keep_in(path, self._new_path)
        else:
            self.name = None
            terminal.note(f"this chat is not kept: `{path.parent}` is read-only")

    def _new_path(self) -> Path:
        """Where a chat without a name is kept; two may begin in one second."""
        self.name, self.is_named = shelf.new_name(), False
        return shelf.path_of(self.name)

    def load(self, name: str) -> None:
        """Go on with a stored session. The present chat stays in its own file."""
        path = shelf.path_of(name)
        if self.conversation.journal is not None and self.conversation.journal.path == path:
            raise UsageError(f"session `{name}` is this one")
        if not path.exists():
            raise UsageError(f"there is no session `{name}`", "see /sessions")
        for notice in self.conversation.resume(path):
            self.note(notice)
        self.name, self.is_named = name, not shelf.is_stamp(name)
        cache = shelf.cache_of(path)
        if cache.exists() and (reason := self.conversation.load_state(cache)):
            self.note(reason)
        self.note(
            f"session `{name}`: {counted(len(self.line.turns), 'turn')}, "
            f"{counted(len(self.line.tokens), 'token')}"
        )
        if self.line.turns and self.line.turns[-1].role == "user":
            self.draft = self.conversation.take_back()
            self.note("the last message got no reply; it is not sent")

    def save_state(self, path: Path) -> None:
        """Write the model's state next to the session's file."""
        try:
            self.conversation.save_state(shelf.cache_of(path))
        except DS4Error as error:
            terminal.fail(error.message, error.hint)

    def note(self, text: str) -> None:
        """A dim line on stderr, unless the user wants quiet."""
        if not self.request.quiet:
            terminal.note(text)


def shows_colours() -> bool:
    """Whether stdout can show colours. `FORCE_COLOR` makes Rich say terminal for a pipe."""
    out = terminal.out()
    return sys.stdout.isatty() and not out.is_dumb_terminal and not out.no_color


def peak_bytes() -> int:
    """The most memory MLX has held."""
    import mlx.core as mx

    return mx.get_peak_memory()
