"""One reply while it is written: what to show of each block, where it ends, and repairs on the way.

The session takes the steps; all that belongs to one reply stands here and ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ds4cli.arrays import integer
from ds4cli.engine.reply import ReplyText, Taken
from ds4cli.settings import MAX_BLOCK_TOKENS

if TYPE_CHECKING:
    from ds4cli.engine.session import Session, Step
    from ds4cli.rewind.timeline import Timeline
    from ds4cli.tools import GuardStep, ParsedCall


@dataclass(frozen=True)
class Event:
    """A piece of a reply: committed tokens, the text they completed, and at the end the reason.

    finish_reason: "stop", "length", "tool", "cancelled", or None while the reply goes on.
    calls: with the last event, the tool calls that closed. note: what is wrong with an open one.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Repair:
    """A tool call that went wrong: where, why, how many tokens were taken back, in how long."""

    pos: int
    reason: str
    dropped_tokens: int
    seconds: float


# Blocks without end, or up to a position: what a session does alone, or among others.
Steps = Callable[["int | None"], Generator["Step", None, None]]


class Generation:
    """A reply that a session writes. end: the position to stop at, None for no limit."""

    def __init__(
        self,
        session: Session,
        timeline: Timeline,
        reply: ReplyText,
        end: int | None,
        cancel: Callable[[], bool],
    ):
        self.timeline = timeline
        self.end = end
        self._session = session
        self._reply = reply
        self._cancel = cancel
        self._masked_at: int | None = None  # where only what the guard allows may be picked
        self._checkpoint_at: int | None = None  # where an open call needs one

    # -- what the session asks --------------------------------------------------------------------

    @property
    def region(self) -> str:
        """What kind of text comes next, see `ReplyText.region`."""
        return self._reply.region

    def mask(self) -> mx.array | None:
        """What the grammar of an open tool call allows here, if it was left here."""
        guard, row = self._reply.guard, self._session.logits
        if self._masked_at != self._session.pos or guard is None or row is None:
            return None
        allowed = guard.allowed(row.shape[-1])
        return mx.array(allowed) if allowed.any() else None

    def allowed(self, first: int, drafts: list[int]) -> list[int]:
        """The drafts behind `first` that an open tool call may go on with."""
        guard = self._reply.guard
        if self.region != "tool" or guard is None:
            return drafts
        return drafts[: max(0, guard.filter([first, *drafts]) - 1)]

    def forced(self, tokens: list[int]) -> list[int]:
        """What an open tool call leaves no choice about behind `tokens`, which come next."""
        guard = self._reply.guard
        return guard.forced(tokens) if self.region == "tool" and guard is not None else []

    def repicked(self, feed: list[int], picks: list[int], rows: mx.array) -> list[int]:
        """`picks`, what the model takes after each token of a block, with those that the guard
        would take back picked again from their rows (k, V), as far as that leads into the block:
        what a grammar forces costs no call of its own, though the model would not have written it.
        """
        guard, taken, sampler = self._reply.guard, list(picks), self._session.sampler
        if guard is None or self.region != "tool":
            return picks
        history = [*self.timeline.tokens, *feed] if sampler.needs_history else ()
        for i, guess in enumerate(feed[1:]):
            if taken[i] == guess:
                continue
            begin = time.perf_counter()
            instead = guard.instead(feed[: i + 1], taken[i], rows.shape[-1])
            if instead is None:
                break
            pos, mask = self.timeline.pos + 1 + i, mx.array(instead.allowed)
            taken[i] = integer(sampler.pick(rows[i : i + 1], pos, history, mask))
            took = time.perf_counter() - begin
            self._session.stats.repairs.append(Repair(pos, instead.reason, 0, took))
            if taken[i] != guess:
                break
        return taken

    # -- the reply --------------------------------------------------------------------------------

    def events(self, begin: Steps) -> Generator[Event, None, None]:
        """Write it: an event a block, and a last one with the finish reason. begin: takes its
        steps, of the session alone or among others."""
        session, attempt = self._session, self._session.attempt
        session.generation = self
        try:
            yield from self._blocks(begin)
        finally:
            if self._reply.guard is not None:
                session.pick_again()  # what it forbade is allowed again
            session.attempt, session.generation = attempt, None

    def _blocks(self, begin: Steps) -> Iterator[Event]:
        session, timeline = self._session, self.timeline
        steps = begin(self.end)
        text, reason = "", self._reason_to_end()
        while reason is None:
            began = time.perf_counter()
            step = next(steps)
            session.stats.decode_s += time.perf_counter() - began
            text, reason = self._take(step)
            reason = reason or self._reason_to_end()
            if reason is None:
                here = session.moves, timeline.pos
                yield Event(self._reply.report(), text)
                if here != (session.moves, timeline.pos):
                    steps.close()
                    steps, self._reply = begin(self.end), self._reply.moved(session.pos)
                    text, reason = "", self._reason_to_end()
                session.generation = self  # another one may have been at work
        steps.close()
        yield self._last_event(text, reason)

    def _reason_to_end(self) -> str | None:
        if self.end is not None and self.timeline.pos >= self.end:
            return "length"
        return "cancelled" if self._cancel() else None

    def _take(self, step: Step) -> tuple[str, str | None]:
        """What to show of a block, and the finish reason; repairs are made on the way."""
        if step.finish_reason is not None:
            return self._act(self._reply.end(self._session.next_token()))
        shown, reason, rest = "", None, step.tokens
        while rest and reason is None:
            taken = self._reply.take(rest)
            text, reason = self._act(taken)
            shown += text
            repaired = taken.step is not None and taken.step.bad_pos is not None
            rest = [] if repaired else rest[taken.used :]
        return shown, reason

    def _act(self, taken: Taken) -> tuple[str, str | None]:
        step = taken.step
        if taken.keep is not None:
            self._keep(taken.keep)
        elif step is not None and step.bad_pos is not None:
            self._repair(step, step.bad_pos)
        elif step is not None and step.event == "open":
            # Before one more block could put the call's opening out of reach.
            free = self.timeline.free_tokens() or 0
            assert step.opened is not None
            self._checkpoint_at = step.opened + free - MAX_BLOCK_TOKENS
        if self._checkpoint_at is not None and self._session.pos >= self._checkpoint_at:
            self._checkpoint_opening()
        return taken.text, taken.reason

    def _keep(self, pos: int) -> None:
        """The reply ends at `pos`: drop what was generated beyond it."""
        session = self._session
        if pos != session.pos:
            session.stats.generated_tokens -= session.pos - pos
            session.rewind(pos)
        self._reply.rewind(pos)

    def _repair(self, step: GuardStep, bad: int) -> None:
        """Back to where a tool call went wrong: the kept row under the grammar's mask, or, where no
        grammar can say what is wrong, the call's opening with the next attempt's noise."""
        session = self._session
        begin, dropped = time.perf_counter(), session.pos - bad
        self._keep(bad)
        session.pick_again()
        if step.event == "left":
            self._masked_at = bad
            session.next_token()  # from the kept row, so a part of what the repair took
        else:
            session.attempt += 1
        took = time.perf_counter() - begin
        session.stats.repairs.append(Repair(bad, step.reason, dropped, took))

    def _checkpoint_opening(self) -> None:
        """The open call is nearly as long as what is free to go back over: keep its beginning cheap
        to come back to."""
        timeline, end, guard = self.timeline, self._session.pos, self._reply.guard
        opened = None if guard is None else guard.opened
        self._checkpoint_at = None
        if opened is not None and not timeline.can_cut and timeline.plan(opened).forwards == 0:
            timeline.rewind(opened)
            timeline.checkpoint("tool")
            timeline.rewind(end)

    def _last_event(self, text: str, reason: str) -> Event:
        reply = self._reply
        if reply.closed_at is not None and reason == "length":
            self._keep(reply.closed_at)
            reason = "tool"
        tokens, rest, reason, note = reply.finish(reason)
        return Event(tokens, text + rest, reason, tuple(reply.calls), note)
