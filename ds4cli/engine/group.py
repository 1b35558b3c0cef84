"""Sessions of one engine, stepped together: one model call for the blocks of all.

A `Lane` writes one session's reply. It goes on by itself, with its own guard, stop strings and
repairs; only the model calls, and the picks from their rows, are made for all lanes at once. So
what a lane says is what its session would have said alone.

    Group.call              what every lane feeds next, in one call; its picks are on their way.
                            Nothing where a lane's last step is found: it is to be taken first
    Lane.has_step           whether something waits for who reads the lane
    next(Lane.events)       commits the lane's part of a call, and shows what it did

Plain lanes run one call ahead, as a session alone does: two parts are open then. The only lane of a
group steps as its session does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, NamedTuple

import mlx.core as mx

from ds4cli.arrays import integers
from ds4cli.engine.engine import Engine
from ds4cli.engine.generation import Event
from ds4cli.engine.guesses import Guesses
from ds4cli.engine.session import Session, Step, accepted_drafts
from ds4cli.errors import ModelError
from ds4cli.lanes.call import Split
from ds4cli.rewind.timeline import Timeline
from ds4cli.rewind.together import evaluate_together, feed_together, replay_together
from ds4cli.sampling import Asked, pick_together, refuse_nan
from ds4cli.settings import MAX_BLOCK_TOKENS

# A block's tokens: the next one and guesses, or what the call before picks, (1,), not known yet.
Feed = list[int] | mx.array


class Picks:
    """What follows each row of one call: int32 (rows,), read when the first lane asks."""

    def __init__(self, array: mx.array, lanes: int):
        self.array, self.lanes = array, lanes
        self.is_replayed = False  # what lanes replay for keeping a part of their guesses
        self._values: list[int] = []

    @cached_property
    def each(self) -> list[mx.array]:
        """Row by row, (1,), without waiting: one operation, not one a lane."""
        return list(mx.split(self.array, len(self.array)))

    def values(self, start: int, stop: int) -> list[int]:
        """Waits for the call."""
        if not self._values:
            self._values = integers(self.array)
        return self._values[start:stop]


class Part(NamedTuple):
    """What a lane has of a call: its rows (k, V) are rows start .. start + k of all; it was fed
    `size` tokens, of which those behind its guesses mean nothing."""

    drafts: list[int]
    source: str
    rows: mx.array
    picks: Picks
    start: int
    size: int

    @property
    def following(self) -> mx.array:
        """What its only row picks, (1,), without waiting for it."""
        return self.picks.each[self.start]

    def values(self) -> list[int]:
        """What follows each of its rows, once the call is done. ModelError for no number."""
        taken = self.picks.values(self.start, self.start + len(self.rows))
        refuse_nan(self.rows, taken)
        return taken


class Lane:
    """A session of a group, and the reply that it writes. events: as `Session.stream` has them."""

    def __init__(self, group: Group, session: Session, limits: dict[str, Any]):
        self.session = session
        self._group = group
        self._reply = session.reply(**limits)
        session.generation = self._reply  # its first block may be opened before it is begun
        self.timeline = self._reply.timeline
        self._records = session.recording
        self._open: deque[Part] = deque()
        self._is_seated_anew = False  # because its last block's rows were not numbers
        self._runs_ahead = False  # a block may be opened on top of the one that is open
        self._has_told_end = False
        self.guess([])
        self._step: Step | None = None
        self._error: Exception | None = None
        self._alone: Generator[Step, None, None] | None = None  # while there is no other lane
        self.events = self._events()

    def _events(self) -> Generator[Event, None, None]:
        try:
            for event in self._reply.events(self._steps):
                if event.finish_reason is not None:
                    self._group.leave(self)  # before the next call for all
                yield event
        finally:
            self._group.leave(self)

    @property
    def has_step(self) -> bool:
        """Whether the next event is there to take, or is the lane's own affair."""
        if self._alone is not None:
            if self._is_only:
                return True
            self._end_alone()
        blocks = len(self._open)
        if self.timeline.open_blocks != blocks:
            self._open.clear()  # the session was moved
            blocks = 0
        if self._step is not None or self._error is not None:
            return True
        return blocks > self._runs_ahead if blocks else self._is_only

    @property
    def _is_only(self) -> bool:
        """Whether the session steps by itself, for there is no other lane."""
        return self._group.lanes == [self] and not self._open

    def _end_alone(self) -> None:
        if self._alone is not None:
            self._alone.close()
            self._alone = None
        self.session.recording = self._records  # also where `record` was cut short

    # -- what the group asks ----------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether the lane needs a block: it has no step that nobody took."""
        if self.has_step:
            return False
        if not self._open:
            try:
                self._begin()
            except Exception as error:  # the other lanes are not to suffer
                self._error = error
        return self._step is None and self._error is None

    def _begin(self) -> None:
        """What the next block begins with is known now."""
        self.guess([])
        if self.session.next_token() in self.session.engine.stop_ids:
            self._step = Step([], "stop")

    def tells_end(self) -> bool:
        """Whether its last step is there to take. Told once: nobody may come to take it."""
        is_last = self._step is not None or (bool(self._open) and self.left == 1)
        tells, self._has_told_end = is_last and not self._has_told_end, is_last
        return tells

    @property
    def knows_next(self) -> bool:
        """Whether the token that the next block begins with is known."""
        return not self._open

    def guess(self, drafts: list[int]) -> None:
        """The next block carries these."""
        self._drafts, self.size = drafts, 1 + len(drafts)

    def fill(self, size: int) -> None:
        """The next block has so many tokens: what is missing is filled up, and never kept."""
        self.size = size

    @property
    def most_rows(self) -> int:
        """Tokens that the next block can have before the context ends."""
        context = self.session.engine.context_tokens
        most = MAX_BLOCK_TOKENS
        return most if context is None else min(most, context - self.timeline.pos)

    def record(self, is_fed: bool) -> None:
        """What goes back is recorded where the session does so; else in blocks of which a part may
        be kept, while they are fed, and nothing of it is kept."""
        self.timeline.recording = self._records or (is_fed and self.size > 1)

    @property
    def feed(self) -> Feed:
        """The next block."""
        if self._open:
            return self._open[0].following
        first = self.session.next_token()
        return [first, *self._drafts, *[first] * (self.size - 1 - len(self._drafts))]

    @property
    def oldest(self) -> Part | None:
        """What it has of the oldest call that is not committed."""
        return self._open[0] if self._open else None

    @property
    def left(self) -> int | None:
        """Tokens until the reply has to end; None without a limit."""
        end = self._reply.end
        return None if end is None else end - self.timeline.pos

    def asked(self, rows: mx.array, feed: Feed) -> Asked:
        """What the block's rows (k, V), just opened, are to be picked with."""
        session, timeline = self.session, self.timeline
        history = [*timeline.tokens, *feed] if session.sampler.needs_history else ()
        return Asked(session.sampler, len(rows), timeline.pos + 1 + len(self._open), history)

    def opened(self, rows: mx.array, picks: Picks, start: int, waits: bool) -> None:
        """The block that `feed` gave is part of a call that runs. waits: other lanes wait for it,
        so that nothing is won by running ahead."""
        session, size = self.session, self.size
        if size > 1:
            rows = rows[: 1 + len(self._drafts)]
        self._open.append(Part(self._drafts, session.guessed_by, rows, picks, start, size))
        session.stats.forwards += 1
        if len(self._open) == 1:
            self._runs_ahead = not waits and size == 1 and self._may_run_ahead()
        if size > 1:
            self.guess([])

    def stop_ahead(self) -> None:
        """No block is opened on top of an open one: what the next begins with is to be known."""
        self._runs_ahead = False

    def _may_run_ahead(self) -> bool:
        """Whether the oldest open block may be built on before its pick is known."""
        end = self._reply.end
        return self.session.runs_ahead and (end is None or end - self.timeline.pos > 1)

    def fail(self, error: Exception) -> None:
        """`error` is what the lane's next event will raise."""
        self._error = error

    def forget(self) -> None:
        """Nothing that is not committed stays."""
        self._end_alone()
        self.timeline.abort()
        self._open.clear()
        self._step = self._error = None

    # -- what the reply asks ----------------------------------------------------------------------

    def _steps(self, end: int | None) -> Generator[Step, None, None]:
        """The session's steps, see `Session.steps`."""
        try:
            while True:
                while not self.has_step:
                    self._group.call()
                step = self._take(end)
                if step is not None:
                    yield step
        finally:
            self.forget()

    def _take(self, end: int | None) -> Step | None:
        """The step that waits; None where the call it was part of failed."""
        step, error, self._step, self._error = self._step, self._error, None, None
        if error is not None:
            self._group.unseat(self)
            raise error
        if step is None and self._is_only:
            self.session.recording = self._records or self.session.is_drafting
            self._alone = self._alone or self.session.steps(end)
            step = next(self._alone)
        return step or self._commit()

    def _commit(self) -> Step | None:
        part, session = self._open[0], self.session
        try:
            taken = part.values()
            if part.size > 1:
                self._group.replay(part.picks)
        except ModelError:
            if not self._sits_anew():
                raise
            return None
        except RuntimeError as error:
            if part.picks.lanes == 1:
                raise
            self._group.part(error)
            return None
        self._open.popleft()
        self._is_seated_anew = False
        if part.drafts:
            feed = [session.next_token(), *part.drafts]
            taken = self._reply.repicked(feed, taken, part.rows)
        step = session.keep(part.drafts, taken, part.source)
        kept = len(step.tokens)
        following, is_drafting = taken[kept - 1], session.is_drafting
        if is_drafting:
            session.policy.kept(kept)
        if following in session.engine.stop_ids:
            self.forget()
        elif self._open:
            self._runs_ahead = self._may_run_ahead()
            if is_drafting and self._runs_ahead:
                wants = self._group.guesses.wants(session, following, self._reply.end)
                self._runs_ahead = not wants
        return step

    def waits_for(self, picks: Picks) -> bool:
        """Whether its oldest block is part of the call that these come from."""
        is_there = self.timeline.open_blocks == len(self._open)
        return is_there and bool(self._open) and self._open[0].picks is picks

    @property
    def kept_rows(self) -> int:
        """Rows of its oldest block that agree with what the model takes, if no guard objects."""
        part = self._open[0]
        taken = part.picks.values(part.start, part.start + len(part.rows))
        return 1 + accepted_drafts(part.drafts, taken, self.session.engine.stop_ids)

    def _sits_anew(self) -> bool:
        """A row is not a number: whether the block may be fed once more, from a clean seat. Guesses
        that were not kept may have left such rows behind the lane's own, and masked or not, 0 times
        those is none."""
        self.forget()
        self._group.unseat(self)
        before, self._is_seated_anew = self._is_seated_anew, True
        return not before


class Group:
    """Lanes over one engine. warn: told what takes the lanes apart again.

    ModelError, with the reason, for a model whose sessions cannot be stepped together.
    """

    def __init__(
        self,
        engine: Engine,
        warn: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.lanes: list[Lane] = []
        self.guesses = Guesses(self.lanes, warn, clock)
        self._hooks = engine.lanes()
        self._warn = warn
        self.is_apart = False  # one after the other, because calls for all fail

    def close(self) -> None:
        """No lane is written any more; the model is as it was."""
        for lane in list(self.lanes):
            self.leave(lane)
        self.guesses.close()
        self._hooks.disarm()

    def join(self, session: Session, **limits: Any) -> Lane:
        """Write a reply from where `session` stands, among the others. limits: as for
        `Session.stream`. The session is the lane's until its events have ended, or `leave`."""
        self.guesses.interrupt()  # a prompt was read
        lane = Lane(self, session, limits)
        self.lanes.append(lane)
        return lane

    def leave(self, lane: Lane) -> None:
        """The lane is written no further; its session stands where its last event left it."""
        if lane in self.lanes:
            self.lanes.remove(lane)
            lane.forget()
            if getgeneratorstate(lane.events) != GEN_RUNNING:
                lane.events.close()  # or it would do so whenever it is collected

    def unseat(self, lane: Lane) -> None:
        """The lane's next call finds a clean row for it."""
        self._hooks.unseat(lane.timeline.caches)

    def read(self, sessions: Sequence[Session], texts: Sequence[Sequence[int]]) -> int:
        """Bring each session to the end of its text, which begins with what it has read, in one
        call for all. Nothing is kept of it to go back by. Returns the tokens read."""
        timelines = [session.timeline for session in sessions]
        feeds = [list(text[session.pos :]) for session, text in zip(sessions, texts, strict=True)]
        kept = [session.recording for session in sessions]
        for session in sessions:
            session.recording = False
        feed_together(timelines, feeds, self._hooks, record=False, last=True)
        evaluate_together(timelines)
        for session, timeline, feed, own in zip(sessions, timelines, feeds, kept, strict=True):
            timeline.commit(len(feed))
            session.recording = own
        self.guesses.interrupt()
        return sum(map(len, feeds))

    # -- one call ---------------------------------------------------------------------------------

    def call(self) -> None:
        """Open the next block of every lane that has no step to take, all in one model call."""
        if self.guesses.is_worth_stopping():
            for lane in self.lanes:
                lane.stop_ahead()
        due = self._due()
        if self.is_apart:
            self._call_each(due)
        elif due:
            self.guesses.begin([lane.size for lane in due])
            try:
                self._open(due)
            except Exception as error:  # what one lane brought about, or all together
                self.part(error)

    def _due(self) -> list[Lane]:
        """The lanes that need a block, with the guesses that it carries. None while one is about to
        leave: a call without it would be no batch, and who comes instead can be part of the next.
        """
        due = [lane for lane in self.lanes if lane.is_due()]
        if len(due) < len(self.lanes) and any([lane.tells_end() for lane in self.lanes]):
            return []
        asked = [lane for lane in due if lane.knows_next]
        self.guesses.make(asked)
        return [lane for lane in due if not lane.has_step] if asked else due

    def _open(self, due: Sequence[Lane]) -> None:
        due = self._in_order(due)
        timelines, feeds = [lane.timeline for lane in due], _feeds(due)
        guessed = [lane for lane in due if lane.size > 1]
        try:
            for lane in guessed:
                lane.record(True)
            rows = self._feed(timelines, feeds)
        finally:
            for lane in guessed:
                lane.record(False)
        try:
            asked = [lane.asked(r, f) for lane, r, f in zip(due, rows, feeds, strict=True)]
            picks = Picks(pick_together(rows.whole, asked), len(due))
            # Tokens that were cut out of picks, too: at `commit` it would be done for each of them.
            _evaluate(timelines, picks.array, *[x for x in feeds if isinstance(x, mx.array)])
        except BaseException:
            for timeline in timelines:
                timeline.abort()
            raise
        start, waits = 0, bool(guessed) or not all([lane.session.runs_ahead for lane in due])
        for lane, own in zip(due, rows, strict=True):
            lane.opened(own, picks, start, waits)
            start += len(own)

    def _in_order(self, due: Sequence[Lane]) -> Sequence[Lane]:
        """The lanes as the call will have them, so that nothing of it is put in another order."""
        if len(due) == 1:
            return due
        return [due[i] for i in self._hooks.seat([lane.timeline.caches for lane in due])]

    def _feed(self, timelines: list[Timeline], feeds: Sequence[Feed]) -> Split:
        if len(timelines) == 1:
            rows = timelines[0].feed(feeds[0])
            return Split([rows], rows)
        record = any([timeline.recording for timeline in timelines])
        return feed_together(timelines, feeds, self._hooks, record=record)

    def part(self, error: Exception) -> None:
        """A call for all failed: what is open is undone, and each lane goes on with a call of its
        own. Where that fails for none of them, it is the joint call that cannot be."""
        for lane in self.lanes:
            lane.forget()
        due = self._due()  # none where the only lane left goes on as its session does
        if due and not self._call_each(due):
            self.is_apart = True
            self._warn(f"one at a time from here on, for a call for {len(due)} failed: {error}")

    def replay(self, picks: Picks) -> None:
        """Before the first lane of a call keeps a part of its guesses: what is replayed for that in
        all of them. What a guard keeps instead is replayed by its own lane."""
        if not picks.is_replayed:
            picks.is_replayed = True
            waiting = [lane for lane in self.lanes if lane.waits_for(picks)]
            rows = [lane.kept_rows for lane in waiting]
            replay_together([lane.timeline for lane in waiting], rows)

    def _call_each(self, due: Sequence[Lane]) -> int:
        """A call for each; how many failed."""
        failed = 0
        for lane in due:
            try:
                self._open([lane])
            except Exception as error:
                lane.fail(error)
                failed += 1
        return failed


def _feeds(due: Sequence[Lane]) -> Sequence[Feed]:
    """The next block of each; in one piece where a call picked just these tokens."""
    oldest = due[0].oldest
    if oldest is not None and len(oldest.picks.array) == len(due):
        rows = [(i, oldest.picks) for i in range(len(due))]
        if [(part.start, part.picks) for lane in due if (part := lane.oldest)] == rows:
            return Split(oldest.picks.each, oldest.picks.array)
    return [lane.feed for lane in due]


def _evaluate(timelines: list[Timeline], *arrays: mx.array) -> None:
    """Start the work on the newest block of each."""
    if len(timelines) == 1:
        timelines[0].evaluate(*arrays, wait=False)
    else:
        evaluate_together(timelines, *arrays, wait=False)
