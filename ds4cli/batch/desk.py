"""Reads prompts and writes completions: one at a time, or several stepped together.

What two prompts have in common is not read again: the reader goes back to where they part, by a
cursor, or on hybrids and windows by a checkpoint that was left there on the way. Where several are
written at a time, each is written by a branch of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ds4cli import generate
from ds4cli.batch.grouping import shared_lengths
from ds4cli.batch.width import Width
from ds4cli.errors import Interrupted, ModelError
from ds4cli.generate import Completion
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.text.reasoning import ReasoningSplitter
from ds4cli.tokens import common_prefix

if TYPE_CHECKING:
    from ds4cli.batch.requests import Item
    from ds4cli.engine.engine import Engine
    from ds4cli.engine.generation import Event
    from ds4cli.engine.group import Group, Lane
    from ds4cli.engine.session import Session
    from ds4cli.rewind.timeline import Limits
    from ds4cli.settings import Settings
    from ds4cli.structured.guards import AnyGuard

# Prompts are read in one call where that reads at most so many times what is read one by one.
MOST_MORE = 1.2
# Of a completion without a limit.
EXPECTED_TOKENS = 1024


@dataclass(frozen=True)
class Job:
    """An item, and its prompt's token ids; none where the item cannot be answered: see `error`."""

    item: Item
    prompt: Sequence[int] = field(default=(), repr=False)
    error: str = ""


@dataclass(frozen=True)
class PlannedJob:
    """A job in working order. shared: prompt tokens it has in common with the job before it;
    checkpoints: where later prompts branch off."""

    job: Job
    shared: int = 0
    checkpoints: Sequence[int] = ()


class Answer:
    """A line while its completions are written.

    is_raw: the prompt goes to the model without a chat template. is_guarded: its completions are
    watched, and repaired. generated: tokens, of all.
    """

    settings: Settings
    is_raw = is_guarded = False
    session: Session | None = None  # one that has read the prompt

    def __init__(self, step: PlannedJob):
        self.step = step
        self.finished: dict[int, Completion] = {}
        self.generated = 0
        self.has_failed = False

    @property
    def item(self) -> Item:
        return self.step.job.item

    @property
    def prompt(self) -> Sequence[int]:
        return self.step.job.prompt


class Choice:
    """One of an answer's completions; `index` is the attempt that it is made with."""

    session: Session
    events: Generator[Event, None, None]

    def __init__(self, answer: Answer, index: int):
        self.answer, self.index = answer, index
        self.completion = Completion()
        self.split = ReasoningSplitter(None)
        self.lane: Lane | None = None

    @property
    def tokens(self) -> int:
        """How many it has so far."""
        return self.session.pos - len(self.answer.prompt)


class Desk:
    """Where choices are written. width: how many at a time; 1 needs no branches.

    warn: told why fewer are written at a time than wanted.
    """

    def __init__(
        self,
        engine: Engine,
        width: Width,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._engine, self._width, self._clock = engine, width, clock
        self.writing: list[Choice] = []
        self._tokens = 0  # written so far
        from ds4cli.backend import memory  # MLX comes with it: not before a line is checked

        self._room = memory.free_bytes() // 2  # for what branches hold
        self._reader = engine.session()
        self._group = self._grouped(warn)

    def _grouped(self, warn: Callable[[str], None]) -> Group | None:
        """What steps branches together; None where one is written at a time."""
        if self._width.now == 1:
            return None
        if self._engine.settings.reproducible:
            warn("one at a time: with `reproducible` no call may depend on other lines")
            return None
        from ds4cli.engine.group import Group

        try:
            group = Group(self._engine, warn)
        except ModelError as error:
            warn(f"one at a time: {error.message}")
            return None
        if not self._reader.drafter.is_free:
            self._width.begin_alone()
        if not self._engine.is_float32:
            warn("several at a time: these weights are not float32, so ties may fall otherwise")
        return group

    def close(self) -> None:
        """Nothing is written any more."""
        self.writing.clear()
        if self._group is not None:
            self._engine.prices.remember(self._group.guesses.timed())
            self._group.close()

    @property
    def lanes(self) -> int:
        """How many are written at a time."""
        return 1 if self._group is None else self._width.now

    def has_room(self, waiting: Sequence[Choice]) -> bool:
        """Whether another one may be begun after these."""
        return len(self.writing) + len(waiting) < self.lanes

    def fits(self, choice: Choice, waiting: Sequence[Choice]) -> bool:
        """Whether there is memory for it beside these: as the user says, or for its rows and, in
        what is given to going back, for what that keeps."""
        others = [*self.writing, *waiting]
        if self._width.is_given or not others:
            return True
        held = [self._bytes_of(each.answer) for each in (choice, *others)]
        rows, kept = (sum(parts) for parts in zip(*held, strict=True))
        return rows <= self._room and kept <= self._reader.limits.budget_bytes

    def _bytes_of(self, answer: Answer) -> tuple[int, int]:
        """What a branch holds at its end, about: in its caches, and for going back."""
        most = answer.settings.max_tokens
        tokens = len(answer.prompt) + (most if most >= 0 else EXPECTED_TOKENS)
        row = self._engine.capabilities.cache_bytes_per_token
        return tokens * row, self._reader.horizon_bytes(self._limits(answer))

    # -- reading ----------------------------------------------------------------------------------

    def begin(self, choice: Choice, guard: AnyGuard | None, cancel: Callable[[], bool]) -> int:
        """Read the choice's prompt, and write it from now on. Returns the tokens read."""
        answer = choice.answer
        if answer.settings.reproducible and choice.index == 0:
            self.begin_anew()  # nothing of what was read before may shape the calls
        session = answer.session or self._reader
        session.use(answer.settings)
        session.attempt = choice.index
        read = self._read(answer, cancel) if answer.session is None else 0
        limits: dict[str, Any] = {"raw": answer.is_raw, "guard": guard, "cancel": cancel}
        limits |= {"max_tokens": answer.settings.max_tokens, "stop": answer.settings.stop}
        if self._group is None:
            choice.session, choice.events = session, session.stream(**limits)
        else:
            self._branch(choice, limits)
        choice.session.score(answer.item.top_logprobs)
        self.writing.append(choice)
        return read

    def read_together(self, answers: Sequence[Answer]) -> int:
        """Read the prompts of several lines in one call, if that is little more than what would be
        read one after the other. What fails is left to `begin`. Returns the tokens read."""
        answers = [answer for answer in answers if answer.item.n == 1]
        prompts = [answer.prompt for answer in answers]
        if self._group is None or self._group.is_apart or len(answers) < 2:
            return 0
        common = min(common_prefix(prompts[0], prompt[:-1]) for prompt in prompts)
        rows = sum(map(len, prompts)) - common * len(prompts)
        shared = shared_lengths(prompts, self._reader.tokens)
        one_by_one = sum(map(len, prompts)) - sum(shared)
        beyond = max(0, common - shared[0])
        if rows > self._reader.limits.chunk_tokens or rows + beyond > MOST_MORE * one_by_one:
            return 0
        try:
            return self._read_branches(answers, common)
        except Exception:  # whatever a line brings about, the others are not to suffer
            for answer in answers:
                answer.session = None
            return 0

    def _read_branches(self, answers: Sequence[Answer], common: int) -> int:
        assert self._group is not None
        for answer in answers:
            self._engine.check_tokens(answer.prompt)
        first = answers[0]
        report = self._reader.sync(first.prompt[:common], checkpoints=first.step.checkpoints)
        branches = [self._reader.fork(self._limits(answer)) for answer in answers]
        read = self._group.read(branches, [answer.prompt for answer in answers])
        for answer, branch in zip(answers, branches, strict=True):
            branch.sync(answer.prompt)  # it stands there
            answer.session = branch
        return report.prefilled + report.replayed + read

    def begin_anew(self) -> None:
        """Read with a session that knows nothing."""
        self._reader = self._engine.session()

    def _read(self, answer: Answer, cancel: Callable[[], bool]) -> int:
        step = answer.step
        report = self._reader.sync(answer.prompt, cancel=cancel, checkpoints=step.checkpoints)
        if cancel():
            raise Interrupted("stopped")
        if answer.item.n > 1 and self._group is None:
            self._reader.checkpoint("prompt")  # for the next choice
        return report.prefilled + report.replayed

    def _branch(self, choice: Choice, limits: dict[str, Any]) -> None:
        assert self._group is not None
        answer = choice.answer
        session = answer.session or self._reader.fork(self._limits(answer))
        answer.session = None  # the choice's own: with that it goes
        # Only a repair and a stop string go back: all else need not be recorded.
        session.recording = answer.is_guarded or bool(answer.settings.stop)
        if answer.is_guarded:
            session.checkpoint("prompt")  # a repair goes no further back
        choice.session = session
        choice.lane = self._group.join(session, **limits)
        choice.events = choice.lane.events

    def _limits(self, answer: Answer) -> Limits:
        """How far back a branch keeps: as far as any session if repairs go back, else over a block
        and a stop string."""
        limits = self._reader.limits
        most = max((len(text.encode()) for text in answer.settings.stop), default=0)
        rows = limits.horizon_tokens
        if not answer.is_guarded:
            rows = min(rows, MAX_BLOCK_TOKENS + most)
        budget = limits.budget_bytes // self._width.now
        return replace(limits, horizon_tokens=rows, budget_bytes=budget)

    # -- writing ----------------------------------------------------------------------------------

    def round(self) -> Iterator[Choice]:
        """The choices that have an event to take, after a model call for all that need one."""
        begin, before = self._clock(), self._tokens
        if self._group is not None:
            self._group.call()
        for choice in list(self.writing):
            if choice.lane is None or choice.lane.has_step:
                yield choice
        made = self._tokens - before
        self._width.observe(len(self.writing), made, self._clock() - begin)

    def take(self, choice: Choice) -> None:
        """Take the choice's next event; after the last one it is written no more."""
        before = choice.tokens
        generate.take(choice.completion, next(choice.events), choice.split)
        self._tokens += max(0, choice.tokens - before)
        if choice.completion.finish_reason is not None:
            self._score(choice)
            choice.answer.generated += choice.tokens
            choice.events.close()
            self.writing.remove(choice)

    def _score(self, choice: Choice) -> None:
        """How likely each token was, where the line asks for that."""
        if choice.answer.item.top_logprobs is not None:
            scores = choice.session.scores(len(choice.answer.prompt))
            choice.completion.logprobs = self._engine.spelling.openai(scores)

    def drop(self, answer: Answer) -> None:
        """Write no more of a line."""
        for choice in [c for c in self.writing if c.answer is answer]:
            self.writing.remove(choice)
            if choice.lane is not None and self._group is not None:
                self._group.leave(choice.lane)
            choice.events.close()
