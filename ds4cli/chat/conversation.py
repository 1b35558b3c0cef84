"""A conversation with a model: the transcript, the session that follows it, and its file.

Every command makes a line of the transcript; `sync` moves the session there. After each operation,
finished or interrupted, the session's tokens are the line's, or a beginning of them, or they go on
with what was read of a message that was taken back; the next operation starts from what fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli import __version__
from ds4cli.chat import journal
from ds4cli.chat.journal import Journal
from ds4cli.chat.transcript import Line, Scribe, Transcript, Turn
from ds4cli.errors import DS4Error, StateError, UsageError
from ds4cli.rewind.plan import RewindReport
from ds4cli.settings import Settings
from ds4cli.structured.asked import from_settings
from ds4cli.text.reasoning import Markers, Piece, ReasoningSplitter, opens_thinking
from ds4cli.text.tokenizer import SHORTEN_HINT
from ds4cli.tokens import common_prefix

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.engine.session import Event, Session
    from ds4cli.structured.guards import AnyGuard
    from ds4cli.tools import Tool

# A head of fewer tokens is not worth a model call of its own.
MIN_HEAD_TOKENS = 16


@dataclass(frozen=True)
class Watch:
    """How the user follows a long operation, and stops it."""

    cancel: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] | None = None


class Conversation:
    """One chat. `transcript` is what was said; `session` holds it; `journal` keeps it."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        tools: Sequence[Tool] = (),
        drop_reasoning: bool = False,
    ):
        self.engine = engine
        self.tools = tools
        self.drop_reasoning = drop_reasoning
        self.session: Session = engine.session()
        self.journal: Journal | None = None
        self._path: Path | None = None  # of a file that begins with the first turn
        self._another: Callable[[], Path] | None = None
        self.unsaved: StateError | None = None
        self.use(settings)
        self.transcript = Transcript(self.scribe.begin(settings.system))
        self.is_unwatched = False  # the reply goes on behind a call that does not fit its tool
        self.remark = ""  # what is wrong with a tool call that the last reply left open
        self._before: Transcript | None = None  # what a reply that never came takes us back to

    def use(self, settings: Settings) -> None:
        """Go on with other sampling, form or template settings; with all of them or none."""
        wanted = from_settings(settings)
        template = self.engine.template(settings, [tool.spec for tool in self.tools])
        self.session.use(settings)
        self.settings = settings
        self._wanted = wanted
        self._kept_guard: tuple[Turn | None, AnyGuard | None] = None, None
        self.scribe = Scribe(template, self.engine.decode)

    @property
    def line(self) -> Line:
        return self.transcript.line

    @property
    def is_complete(self) -> bool:
        """Whether the session has read all of the line."""
        return self.session.pos >= len(self.line.tokens)

    # -- moving -----------------------------------------------------------------------------------

    def go_back(self, line: Line, watch: Watch) -> RewindReport:
        """Make `line` the current one; the present one can be redone."""
        report = self._sync(line, watch)
        self.transcript.go_back(line)
        self.record()
        return report

    def redo(self, watch: Watch) -> RewindReport:
        """Undo the latest going back."""
        self.transcript.redo_last()
        self.record()
        return self._sync(self.line, watch)

    def switch(self, name: str, watch: Watch) -> RewindReport:
        """Go on with another branch."""
        self.transcript.switch(name)
        self.record()
        return self._sync(self.line, watch)

    def catch_up(self, watch: Watch) -> RewindReport:
        """Read what the session lacks of the line."""
        return self._sync(self.line, watch)

    def _sync(self, line: Line, watch: Watch) -> RewindReport:
        """Move the session to `line`, and make places on the way cheap to come back to."""
        tokens, reports = line.tokens, []
        if self._lacks_head(line):
            reports.append(self._read(line.head, "system", watch))
        if self.drop_reasoning and line.turns and line.turns[-1].cue:
            # The template draws the generation prompt otherwise as soon as the reply is history.
            reports.append(self._read(tokens[: -line.turns[-1].cue], "prompt", watch))
        reports.append(self.session.sync(tokens, cancel=watch.cancel, progress=watch.progress))
        report = _joined(reports)
        self.session.stats.cached_tokens = len(tokens) - report.replayed - report.prefilled
        return report

    def _read(self, tokens: Sequence[int], checkpoint: str, watch: Watch) -> RewindReport:
        report = self.session.sync(tokens, cancel=watch.cancel, progress=watch.progress)
        if self.session.pos == len(tokens):
            self.session.checkpoint(checkpoint)
        return report

    def _lacks_head(self, line: Line) -> bool:
        head = list(line.head)
        return len(head) >= MIN_HEAD_TOKENS and self.session.tokens[: len(head)] != head

    # -- talking ----------------------------------------------------------------------------------

    def ask(self, *turns: Turn, after: Line | None = None, watch: Watch) -> bool:
        """Read turns that the model is to answer; False if the user stopped it.

        after: the line they follow, the current one by default. Nothing is said until all is read.
        """
        after = self.line if after is None else after
        line = self.scribe.ask(after, *turns)
        if self.drop_reasoning:
            line = self.scribe.without_reasoning(line, self._answer_part)
        self.check_room(line)
        self._sync(line, watch)
        if self.session.pos < len(line.tokens):
            return False
        self.session.checkpoint("prompt")
        self._before = self.transcript.copy()
        self.transcript.go_back(after)
        self.transcript.say(line)
        self.record()
        return True

    @property
    def open_calls(self) -> tuple[dict[str, Any], ...]:
        """Tool calls of the last reply: it waits for their results."""
        last = self.line.turns[-1] if self.line.turns else None
        return last.calls if last is not None and last.is_reply else ()

    def check_room(self, line: Line) -> None:
        """UsageError if the model cannot read the line and write at least one token."""
        context, tokens = self.engine.context_tokens, len(line.tokens)
        if context is not None and tokens >= context:
            raise UsageError(
                f"the context is full: this makes `{tokens}` tokens, the model reads `{context}`",
                "make room with /undo [n], /rewind TURN or /clear"
                if self.line.turns
                else SHORTEN_HINT,
            )

    @property
    def room(self) -> int | None:
        """Tokens that still fit the model's context; None where it has no limit."""
        context = self.engine.context_tokens
        return None if context is None else context - len(self.line.tokens)

    def answer(self, watch: Watch, attempt: int = 0) -> Generator[Piece, None, None]:
        """Let the model write, or go on with a reply that was cut; yields the new pieces.

        However this ends, what the session holds of the reply is its turn.
        """
        line, begun = self.line, Turn("assistant", "", attempt=attempt)
        if line.turns and line.turns[-1].is_reply:
            line, begun = line.upto(len(line.turns) - 1), line.turns[-1]
        reply = _ReplyTurn(self, line, begun)
        self.session.attempt = begun.attempt
        return reply.pieces(watch)

    def retry(self, number: int, watch: Watch) -> tuple[RewindReport, int]:
        """Go back to where the reply of turn `number` begins. Returns the next attempt, too."""
        line = self.line
        self._before = self.transcript.copy()
        while not line.turn(number).is_reply and number < len(line.turns):
            number += 1
        if not line.turn(number).is_reply:  # a message that never got its reply
            return self.catch_up(watch), 0
        return self.go_back(line.upto(number - 1), watch), line.turn(number).attempt + 1

    def take_back(self) -> str:
        """Unsay a message that got no reply; the transcript is as it was before. Its text."""
        text = self.line.turns[-1].content
        if self._before is not None:
            self.transcript = self._before
        else:
            self.transcript.line = self.line.upto(len(self.line.turns) - 1)
        self.record()
        return text

    def _answer_part(self, turn: Turn) -> str:
        raw, markers = self.raw_text(turn), self.markers
        if markers is not None and markers.end in raw:
            return raw.rpartition(markers.end)[2].lstrip("\n")
        return raw.removeprefix(markers.answer or "") if markers is not None else raw

    def raw_text(self, turn: Turn) -> str:
        """A reply as the model wrote it, reasoning and markers included."""
        return self.engine.decode(list(turn.tokens))

    def raw_with(self, line: Line, turn: Turn, text: str) -> str:
        """The raw reply to `line` with `text` as all that stands behind its reasoning."""
        raw, markers = self.raw_text(turn), self.markers
        if markers is None:
            return text
        if self._opens_thinking(line) or raw.lstrip().startswith(markers.start):
            thought, _, rest = raw.partition(markers.end)
            space = rest[: len(rest) - len(rest.lstrip("\n"))] or "\n\n"
            return thought + markers.end + space + text
        opener = markers.answer or ""
        return (opener if raw.startswith(opener) else "") + text

    def splitter(self, line: Line) -> ReasoningSplitter:
        """A splitter for a reply to `line`, whose end may have opened a think section."""
        return ReasoningSplitter(self.markers, self._opens_thinking(line))

    @property
    def markers(self) -> Markers | None:
        """What opens and closes the model's reasoning."""
        return None if self.settings.raw else self.engine.markers

    def _opens_thinking(self, line: Line) -> bool:
        return opens_thinking(self.engine.decode, line.tokens, self.markers)

    def guard(self, line: Line, begun: Turn) -> AnyGuard | None:
        """What watches a reply for tool calls; a reply that goes on keeps the one it had."""
        self.is_unwatched = False
        if not self.tools and self._wanted is None:
            return None
        turn, guard = self._kept_guard
        if not begun.tokens or turn != begun:
            guard = self._guard_of(line, begun.tokens)
        self.is_unwatched = guard is None
        return guard

    def _guard_of(self, line: Line, tokens: Sequence[int]) -> AnyGuard | None:
        """A guard that has read a reply's tokens; None where they do not fit what it watches."""
        from ds4cli.structured import guards

        guard = guards.make_guard(
            self.engine,
            self.tools,
            self._wanted,
            thinks=self._opens_thinking(line),
            max_repairs=self.settings.max_repairs,
            resumable=True,
        )
        if guard is None or not guard.catch_up(len(line.tokens), tokens, self.engine.decode):
            return None
        return guard

    def edited_reply(self, line: Line, turn: Turn, text: str) -> Turn:
        """The reply to `line` with another raw text. Its tool calls are read again: with whole
        ones it waits for their results, otherwise it may go on."""
        edited = self.scribe.edit_reply(turn, text, turn.content)
        answer = self.answer_text(line, edited.tokens)
        edited = replace(edited, content=answer, finish_reason="edited", calls=())
        guard = self._guard_of(line, edited.tokens) if self.tools else None
        if guard is None or not guard.caught:
            return edited
        split = self.splitter(line)
        pieces = [*split.push(guard.caught_text), *split.flush()]
        answer = "".join(piece.text for piece in pieces if not piece.is_reasoning)
        calls = tuple(call.openai() for call in guard.caught)
        return replace(edited, content=answer, finish_reason="tool", calls=calls)

    def keep_guard(self, turn: Turn, guard: AnyGuard | None) -> None:
        """Keep a reply's guard, in case that the reply goes on."""
        self._kept_guard = turn, guard

    def answer_text(self, line: Line, tokens: Sequence[int]) -> str:
        """The answer in a reply to `line`, without reasoning."""
        split = self.splitter(line)
        pieces = [*split.push(self.engine.decode(list(tokens))), *split.flush()]
        return "".join(piece.text for piece in pieces if not piece.is_reasoning)

    # -- keeping ----------------------------------------------------------------------------------

    def keep_in(self, path: Path, another: Callable[[], Path] | None = None) -> None:
        """Write the chat to a new file at `path`, from the first turn on. another: says where to,
        should somebody have made that file meanwhile."""
        self.close()
        self._path, self._another = path, another
        self.record()

    def record(self) -> None:
        """Write what is new to the session's file. A failure waits in `unsaved`: a full disk must
        not stop a chat; the next record writes what this one could not."""
        self.unsaved = None
        try:
            if self.journal is None and self._path is not None and self.line.turns:
                if self._another is not None and self._path.exists():
                    self._path = self._another()
                self.journal = Journal.create(self._path, self._header())
            if self.journal is not None:
                self.journal.record(self.transcript)
        except StateError as error:
            self.unsaved = error

    def _header(self) -> dict[str, Any]:
        return {
            "model": self.settings.model,
            "fingerprint": self.engine.fingerprint,
            "settings": asdict(self.settings),
            "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ds4cli": __version__,
        }

    def resume(self, path: Path) -> list[str]:
        """Go on with the chat at `path`, in its file. Returns what the user should know.

        A chat of another model is read again as text.
        """
        stored = journal.read(path)
        if stored.header.get("fingerprint") == self.engine.fingerprint:
            for line in stored.transcript.branches().values():
                self.engine.check_stored(line.tokens, path)
        book = Journal.resume(path, stored)
        self.close()
        self.journal, self.transcript, self._before = book, stored.transcript, None
        notices = [stored.notice] if stored.notice else []
        if stored.header.get("fingerprint") != self.engine.fingerprint:
            self._adopt(book, stored.header)
            notices.append(
                f"`{stored.header.get('model')}` held this chat: its texts are read again"
            )
        return notices

    def _adopt(self, book: Journal, header: dict[str, Any]) -> None:
        """Put a chat of another model into this one's tokens."""
        transcript = self.transcript
        transcript.line = self.scribe.retokenised(transcript.line)
        for name, line in transcript.named.items():
            transcript.named[name] = self.scribe.retokenised(line)
        book.retitle({**header, **self._header()})
        self.record()

    def close(self) -> None:
        """Close the session's file."""
        if self.journal is not None:
            self.journal.close()
        self.journal = self._path = None

    def save_state(self, path: Path) -> None:
        """Keep what the model has read, so that nothing is read again."""
        self.session.save(str(path))

    def load_state(self, path: Path) -> str | None:
        """Take up the kept state. Why not, if it does not fit."""
        try:
            session = self.engine.load_session(str(path))
        except DS4Error as error:
            return f"the kept state is not used: {error.message}"
        common = common_prefix(session.tokens, self.line.tokens)
        if common < min(len(session.tokens), len(self.line.tokens)) // 2:
            return "the kept state is not used: it holds another conversation"
        self.session = session
        self.use(self.settings)
        return None


class _ReplyTurn:
    """One reply while it is written."""

    def __init__(self, owner: Conversation, line: Line, begun: Turn):
        self._owner = owner
        self._line = line
        self._begun = begun
        self._start = len(line.tokens)
        self._guard = owner.guard(line, begun)
        waiting = "" if self._guard is None else self._guard.waiting  # comes with the next text
        self._split = owner.splitter(line)
        self._split.push(owner.raw_text(begun).removesuffix(waiting))
        self._answer = begun.content
        self._end = Turn("assistant", "", finish_reason="cancelled", attempt=begun.attempt)

    def pieces(self, watch: Watch) -> Generator[Piece, None, None]:
        session, settings = self._owner.session, self._owner.settings
        events = session.stream(
            max_tokens=settings.max_tokens,
            stop=settings.stop,
            guard=self._guard,
            cancel=watch.cancel,
            since=self._start if self._begun.tokens else None,
        )
        try:
            with closing(events):
                for event in events:
                    yield from self._take(self._split.push(event.text))
                    self._note_end(event)
            yield from self._take(self._split.flush())
        finally:
            self._keep()

    def _take(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._answer += "" if piece.is_reasoning else piece.text
            yield piece

    def _note_end(self, event: Event) -> None:
        if event.finish_reason is not None:
            calls = (*self._begun.calls, *(call.openai() for call in event.calls))
            self._end = replace(self._end, finish_reason=event.finish_reason, calls=calls)
            self._owner.remark = event.note

    def _keep(self) -> None:
        owner = self._owner
        tokens = tuple(owner.session.tokens[self._start :])
        if not tokens and self._end.finish_reason == "cancelled":
            return  # nothing was written: the message stands without a reply
        turn = replace(self._end, content=self._answer, tokens=tokens)
        owner.keep_guard(turn, self._guard)
        owner.session.checkpoint("turn")
        owner.transcript.say(self._line.plus(turn))
        owner.record()


def _joined(reports: Sequence[RewindReport]) -> RewindReport:
    """What several moves in a row did."""
    counts = ("discarded", "replayed", "prefilled", "forwards", "seconds", "back_s")
    sums = {name: sum(getattr(report, name) for report in reports) for name in counts}
    return replace(reports[0], **sums)
