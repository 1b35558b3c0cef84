"""One conversation's timeline and the speculative loop over it.

A step is one block: pick the next token from the kept logits, draft what may follow, verify both in
one model call, commit what agrees. A sampled token enters `tokens` when it is fed, so an EOS or a
token after a stop is never in the state. Output depends on weights, tokens, sampling settings, seed
and attempt only.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, cast

import mlx.core as mx

from ds4cli.arrays import integer
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.policy import DraftPolicy, Offer
from ds4cli.engine.generation import Event, Generation, Repair
from ds4cli.engine.reply import ReplyText
from ds4cli.engine.scores import Score, Scores
from ds4cli.errors import StateError, UsageError
from ds4cli.rewind.plan import RewindPlan, RewindReport
from ds4cli.sampling import Sampler, refuse_nan
from ds4cli.settings import MAX_BLOCK_TOKENS, Settings
from ds4cli.text.reasoning import Markers, opens_thinking

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.rewind.timeline import Counters, Limits, Timeline
    from ds4cli.structured.guards import AnyGuard


# Who guessed what a grammar leaves no choice about, in the counts.
FORCED = "grammar"
# What one such token is taken to be kept with: the model may say another one first.
FORCED_CHANCE = 0.95


@dataclass(frozen=True)
class Step:
    """One block's outcome: the tokens it committed, or "stop" when the next token is an EOS."""

    tokens: list[int]
    finish_reason: str | None = None


class Chosen(NamedTuple):
    """Whose guesses are fed behind `first`, at most `room` of them; None for nobody's. forced: what
    an open call leaves no choice about."""

    first: int
    room: int
    forced: list[int]
    offer: Offer | None


@dataclass
class Stats:
    """What a session did so far. Times in seconds.

    accept_counts[k]: blocks that kept k drafts. parked: blocks where there were guesses and none
    was worth its time. by_drafter: proposed and accepted, by the name of who guessed.
    """

    drafter: str = "none"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    generated_tokens: int = 0
    decode_s: float = 0.0
    blocks: int = 0
    proposed: int = 0
    accepted: int = 0
    parked: int = 0
    accept_counts: list[int] = field(default_factory=list)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    rewinds: int = 0
    discarded_tokens: int = 0
    replayed_tokens: int = 0
    back_s: float = 0.0
    forwards: int = 0
    repairs: list[Repair] = field(default_factory=list)

    def count_block(self, drafted: int, accepted: int, source: str = "") -> None:
        self.blocks += 1
        self.proposed += drafted
        self.accepted += accepted
        while accepted >= len(self.accept_counts):
            self.accept_counts.append(0)
        self.accept_counts[accepted] += 1
        if drafted:
            counts = self.by_drafter.setdefault(source, [0, 0])
            counts[0] += drafted
            counts[1] += accepted

    def count_move(self, report: RewindReport) -> None:
        self.rewinds += report.discarded > 0
        self.discarded_tokens += report.discarded
        self.replayed_tokens += report.replayed
        self.back_s += report.back_s if report.discarded else 0.0
        self.forwards += report.forwards


def accepted_drafts(drafts: Sequence[int], picks: Sequence[int], stop_ids: set[int]) -> int:
    """How many drafts equal the target's own picks, in order, up to the first EOS (not counted)."""
    for i, (draft, pick) in enumerate(zip(drafts, picks, strict=False)):
        if draft != pick or draft in stop_ids:
            return i
    return len(drafts)


class _Drafting:
    """See `Session.drafting`. Entered once a token, where a generator takes three times as long."""

    __slots__ = ("_session",)

    def __init__(self, session: Session):
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._session.drafter.forget()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method` as long as its object lives: a session that nobody has any more is gone at once,
    with all that it read, not when Python looks for circles."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        own = known()
        if own is not None:
            own(*args)

    return call


P = ParamSpec("P")


def _written(
    reply: Callable[Concatenate[Session, P], Generation],
) -> Callable[Concatenate[Session, P], Generator[Event, None, None]]:
    """What writes the reply that the session `reply`s with, taking the same arguments."""

    @wraps(reply, assigned=["__doc__"])
    def stream(self: Session, *args: P.args, **kwargs: P.kwargs) -> Generator[Event, None, None]:
        yield from reply(self, *args, **kwargs).events(self.steps)

    return stream


class Session:
    """One timeline of one engine. Public state: tokens, pos, logits, stats, attempt."""

    def __init__(self, engine: Engine, timeline: Timeline, sampler: Sampler, drafter: Drafter):
        self.engine = engine
        self.sampler = sampler
        self.drafter = drafter
        self.stats = Stats(drafter=drafter.name)
        self.policy = DraftPolicy(engine.settings, engine.experience)
        self.guessed_by = ""  # whose guesses are fed
        self._timeline = timeline
        timeline.observer = _weakly(self._observe) if drafter.taps else None
        self._owner = threading.current_thread()
        self._next: tuple[mx.array | None, int, int] | None = (
            None  # row, attempt, the token picked from it
        )
        self.moves = 0  # how often the session was taken elsewhere
        self._drafted_ids: list[int] = []  # what the drafter was given last, see `ids_to`
        self.generation: Generation | None = None  # the reply being streamed
        self._scores: Scores | None = None
        self._knows_prices = False

    # -- state ------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The tokens that every layer has consumed."""
        return list(self._timeline.tokens)

    @property
    def pos(self) -> int:
        return self._timeline.pos

    @property
    def logits(self) -> mx.array | None:
        """The row (V,) that predicts the token at pos; None before the first token."""
        return self._timeline.logits

    @property
    def attempt(self) -> int:
        return self.sampler.attempt

    @attempt.setter
    def attempt(self, value: int) -> None:
        self.sampler.attempt = value

    @property
    def recording(self) -> bool:
        """Whether what going back needs is kept. Without it, what cannot be cut is read again."""
        return self._timeline.recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._timeline.recording = value

    @property
    def counters(self) -> Counters:
        """Model calls and tokens fed since this session began, whoever asked for them."""
        return self._timeline.counters

    @property
    def why_no_drafts(self) -> str:
        """Why no guess was fed, in words; empty if one was, or if there was none to feed."""
        return "" if self.stats.proposed or not self.stats.parked else self.policy.verdict

    def kept_bytes(self) -> dict[str, int]:
        """Bytes kept alive for going back: "last_block" (a part of "horizon"), "horizon",
        "checkpoints"."""
        return self._timeline.kept_bytes()

    @property
    def timeline(self) -> Timeline:
        """Where the session's state is, for who steps several sessions."""
        return self._timeline

    @property
    def limits(self) -> Limits:
        """How far back is kept."""
        return self._timeline.limits

    def horizon_bytes(self, limits: Limits) -> int:
        """About what a branch that keeps so far back holds alive for that."""
        return self._timeline.horizon_bytes(limits)

    # -- moving -----------------------------------------------------------------------------------

    def plan(self, pos: int) -> RewindPlan:
        """How `rewind(pos)` would go and what it would cost. No side effect."""
        return self._timeline.plan(pos)

    def rewind(self, pos: int) -> RewindReport:
        """Stand at `pos` or raise StateError with nothing changed."""
        self._check_thread()
        with self._moving():
            report = self._timeline.rewind(pos)
        self.stats.count_move(report)
        return report

    def sync(
        self,
        tokens: Sequence[int],
        *,
        cancel: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] | None = None,
        checkpoints: Iterable[int] = (),
    ) -> RewindReport:
        """Make the session's tokens equal `tokens`; what both have in common is not read again.

        `progress(done, total)` after each model call. When `cancel()` turns true the session stops
        between calls and keeps what it read. checkpoints: positions in `tokens` to keep cheap to
        come back to, because other texts branch off there; ignored where going back is free.
        """
        self._check_thread()
        self.engine.check_context(len(tokens))
        self.engine.check_tokens(tokens)
        with self._moving():
            report = self._timeline.sync(
                tokens, cancel=cancel, progress=progress, checkpoints=checkpoints
            )
        self.stats.count_move(report)
        self.stats.prompt_tokens = len(tokens)
        self.stats.cached_tokens = len(tokens) - report.replayed - report.prefilled
        self.stats.prompt_s += report.seconds
        return report

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Around a move: what was known of the text's end is void, also where the move is cut short
        and other tokens stand where the old ones stood."""
        row = self._timeline.logits
        try:
            yield
        except BaseException:
            if self._timeline.logits is not row:
                self._moved()
            raise
        self._moved()

    def _moved(self) -> None:
        self._next, self._drafted_ids = None, []
        self.moves += 1
        if self.drafter.name == "none":
            return
        try:
            with self.drafting():
                self.drafter.rewind(self._timeline.pos)
        except Exception as error:  # the move is made, and a drafter may cost time only
            self.engine.notices.append(f"`{self.drafter.name}` begins anew: {error!r}")

    def drafting(self) -> _Drafting:
        """Around all that a drafter does by itself: cut short anywhere, it forgets all it knew."""
        return _Drafting(self)

    def _observe(self, start: int, hidden: Sequence[mx.array]) -> None:
        with self.drafting():
            self.drafter.observe(start, hidden)

    def _check_thread(self) -> None:
        """StateError in another thread than the one that filled this session: MLX cannot go on
        there with what it began here."""
        here = threading.current_thread()
        if self._timeline.pos == 0:
            self._owner = here
        if self._owner is not here:
            raise StateError(
                f"this session belongs to the thread `{self._owner.name}`, not `{here.name}`",
                "use it there; or save it there and load it here",
            )

    def checkpoint(self, kind: str = "turn") -> None:
        """Keep this position cheap to come back to: "system", "turn", "prompt" or "tool"."""
        self._check_thread()
        self._timeline.checkpoint(kind)

    def use(self, settings: Settings) -> None:
        """Sample as `settings` say from here on: temperature, filters, penalties, bias, seed."""
        sampler = self.engine.sampler(settings)
        sampler.attempt = self.attempt
        self.sampler, self._next, self._knows_prices = sampler, None, False
        self.drafter.use(sampler)

    def fork(self, limits: Limits | None = None) -> Session:
        """An independent branch at the same position that samples alike; both may go on.

        limits: how far back the branch keeps, if it is another; it begins anew then.
        """
        self._check_thread()
        twin = self.engine.session_from(self._timeline.fork(limits), self.drafter.fork())
        twin.use(self.sampler.settings)
        twin.attempt = self.attempt
        return twin

    def score(self, top: int | None) -> None:
        """From here on keep how likely each token was, and the `top` likeliest in its place; None
        ends that."""
        self._scores = None if top is None else Scores(top, self.engine.token_limit)
        self._timeline.witness = None if self._scores is None else self._scores.note

    def scores(self, start: int) -> list[Score]:
        """The scores of the tokens from position `start` on; they were written since `score`."""
        if self._scores is None:
            raise UsageError("no scores were kept", "call `score` before the reply")
        return self._scores.of(self._timeline.tokens, start)

    def save(self, path: str) -> None:
        """Write tokens, state and checkpoints to `path` (safetensors), complete or not at all."""
        self._check_thread()
        self.engine.save_session(self._timeline, path)

    # -- the speculative loop ---------------------------------------------------------------------

    def step(self, max_tokens: int | None = None, drafts: Sequence[int] | None = None) -> Step:
        """One block: at least one token is committed unless the next one is an EOS.

        max_tokens: commit at most this many. drafts: use these guesses instead of the drafter's.
        """
        first = self.next_token()
        if first in self.engine.stop_ids:
            return Step([], "stop")
        if drafts is None:
            drafts = self.propose(first, max_tokens)
            return self._verify([first, *drafts], self.guessed_by)
        self.engine.check_tokens(drafts)
        return self._verify([first, *drafts], "given")

    def next_token(self) -> int:
        """The token that the next step will feed first."""
        self._check_thread()
        row, attempt, pick = self._next or (None, 0, 0)
        if row is None or row is not self._timeline.logits or attempt != self.sampler.attempt:
            pick = self._pick()
            self.picked(pick)
        return pick

    def _pick(self) -> int:
        if self.logits is None:
            if self.pos == 0:
                raise StateError("there is nothing to go on from", "sync a prompt first")
            self.rewind(self.pos)
        logits = self.logits
        assert logits is not None, "it has been fed again"
        row = logits[None]
        mask = None if self.generation is None else self.generation.mask()
        pick = integer(self.sampler.pick(row, self.pos, self._timeline.tokens, mask))
        refuse_nan(row, [pick])
        return pick

    def picked(self, pick: int) -> None:
        """`pick` follows. It was made from the very row, so whatever moves the session voids it."""
        self._next = (self._timeline.logits, self.sampler.attempt, pick)

    def pick_again(self) -> None:
        """What follows is picked anew: less is allowed, or another attempt has other noise."""
        self._next = None

    @property
    def is_drafting(self) -> bool:
        """Whether there is anyone to ask for guesses."""
        return self.drafter.name != "none"

    def propose(self, first: int, max_tokens: int | None) -> list[int]:
        """Guesses for what follows `first`, the token that is fed next: what an open call leaves no
        choice about, or the drafter's, if these say no other and more, and what must follow."""
        if not self.is_drafting:
            return []
        return self.give(self.choose(first, max_tokens))

    def choose(self, first: int, max_tokens: int | None) -> Chosen:
        """The first half of `propose`: whose guesses, and how many. Who takes time is not asked."""
        self._look_up_prices()
        room = self.room(max_tokens)
        forced, offer = self.forced([first], room), None
        if not forced or all(part.is_free for part in self.drafter.parts):
            offer = self._ask(self.policy.choose, first, room)
        return Chosen(first, room, forced, offer)

    def give(self, chosen: Chosen, said: list[int] | None = None) -> list[int]:
        """The second half. said: what the drafter says, where others asked it."""
        first, room, forced, offer = chosen
        drafts: list[int] = []
        if offer is not None:
            with self.drafting():
                drafts = self.policy.give(offer, self.ids_to(first), said)
        self.guessed_by = self.policy.source
        if self.generation is not None and drafts:
            drafts = self.generation.allowed(first, drafts)
        if forced and drafts[: len(forced)] != forced:
            self.guessed_by = FORCED
            return forced
        return [*drafts, *self.forced([first, *drafts], room - len(drafts))] if drafts else []

    def offer(self, first: int, max_tokens: int | None) -> tuple[list[int], list[float]]:
        """Guesses for what follows `first` in a call for several sessions, and the chance that the
        first, the first two, ... are kept."""
        room = self.room(max_tokens)
        forced = self.forced([first], room)
        drafts, chances = self._ask(self.policy.offer, first, room)
        self.guessed_by = self.policy.source
        if self.generation is not None and drafts:
            drafts = self.generation.allowed(first, drafts)
        if forced and drafts[: len(forced)] != forced:
            self.guessed_by = FORCED
            return forced, [FORCED_CHANCE**i for i in range(1, len(forced) + 1)]
        return drafts, chances[: len(drafts)]

    def hope(self, max_tokens: int | None) -> Offer | None:
        """What a drafter that takes time may have to offer in such a call, if it is asked."""
        room = self.room(max_tokens)
        return self.policy.hope(self.drafter, self.pos + 1, room, self._region)

    def heard(self, hope: Offer, drafts: list[int]) -> tuple[list[int], list[float]]:
        """It was asked behind the token fed next, and gave these guesses: see `offer`."""
        first = self.next_token()
        chances = self.policy.heard(hope, self.ids_to(first), drafts)
        self.guessed_by = hope.part.name
        if self.generation is not None:
            drafts = self.generation.allowed(first, drafts)
        return drafts[: len(chances)], chances[: len(drafts)]

    def forced(self, tokens: list[int], room: int) -> list[int]:
        """What the syntax of an open call lets follow `tokens`, where that is one text only."""
        if self.generation is None or room <= 0:
            return []
        most = self.engine.settings.num_draft_tokens
        return self.generation.forced(tokens)[: room if most is None else min(room, most)]

    def _ask(self, question: Callable[..., Any], last: int, room: int) -> Any:
        """Ask the controller about the text that ends with `last`."""
        before = self.policy.parked
        with self.drafting():
            answer = question(self.drafter, self.ids_to(last), room, self._region)
        self.stats.parked += self.policy.parked - before
        return answer

    def ids_to(self, last: int) -> list[int]:
        """The tokens and `last`, in one list that grows: no copy of the context per token."""
        ids = self._drafted_ids
        del ids[-1:]
        ids += self._timeline.tokens[len(ids) :]
        ids.append(last)
        return ids

    @property
    def _region(self) -> str:
        return "prose" if self.generation is None else self.generation.region

    def room(self, max_tokens: int | None) -> int:
        """How many guesses may be fed after the next token."""
        room = MAX_BLOCK_TOKENS - 1
        if max_tokens is not None:
            room = min(room, max_tokens - 1)
        if self.engine.context_tokens is not None:
            room = min(room, self.engine.context_tokens - self.pos - 1)
        return room

    def _look_up_prices(self) -> None:
        """Tell the controller what calls cost here; measured when it first matters, then kept."""
        if not self.policy.chooses:
            return
        prices, ahead = self.engine.prices, not self.sampler.needs_history
        if prices.is_stale(self.policy.costs.plain, self.pos, runs_ahead=ahead):
            prices.seconds, self._knows_prices = {}, False  # measured anew, below or later
        if self._knows_prices:
            return
        if not prices.seconds and self.policy.wants_prices:
            self._timeline.abort()  # what a suspended stream runs ahead
            prices.measure(self.engine.scratch_timeline(), self.sampler, self._timeline.tokens)
            self.engine.notices.append(prices.notice)
        if prices.seconds:
            self._knows_prices = True
            self.policy.costs.use(prices.seconds, runs_ahead=ahead)

    def _verify(self, feed: list[int], source: str) -> Step:
        """One model call on the block; commit its first token and the drafts that agree."""
        begin = time.perf_counter()
        step = self.keep(feed[1:], self._picks_of(feed), source)
        if len(feed) > 1:
            self.policy.observe(len(feed), len(step.tokens), time.perf_counter() - begin)
        elif self.is_drafting:
            ahead = self.runs_ahead
            self.policy.observe_plain(time.perf_counter() - begin, first=ahead, last=ahead)
        self.stats.forwards += 1
        return step

    def keep(self, drafts: Sequence[int], picks: Sequence[int], source: str) -> Step:
        """Commit the oldest open block: its first token and the `drafts` behind it that agree with
        `picks`, what the model takes after each of its tokens."""
        accepted = accepted_drafts(drafts, picks, self.engine.stop_ids) if drafts else 0
        tokens = self._timeline.commit(1 + accepted)
        self.picked(picks[accepted])
        self.stats.count_block(len(drafts), accepted, source)
        self.stats.generated_tokens += len(tokens)
        return Step(tokens)

    def _picks_of(self, feed: list[int]) -> list[int]:
        """Open a block on `feed`: what the model itself takes after each of its tokens."""
        timeline = self._timeline
        timeline.abort()  # what a suspended stream runs ahead
        rows = timeline.feed(feed)
        try:
            history = [*timeline.tokens, *feed] if self.sampler.needs_history else ()
            picks = self.sampler.pick(rows, timeline.pos + 1, history)
            timeline.evaluate(picks)
            taken = cast("list[int]", picks.tolist())
            refuse_nan(rows, taken)
            if self.generation is not None and len(feed) > 1:
                taken = self.generation.repicked(feed, taken, rows)
        except BaseException:
            timeline.abort()
            raise
        return taken

    def reply(
        self,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        guard: AnyGuard | None = None,
        cancel: Callable[[], bool] = lambda: False,
        since: int | None = None,
        raw: bool | None = None,
    ) -> Generation:
        """A reply that goes on from here. `stream` writes it: one event a block, and a last one
        with the finish reason.

        max_tokens: None = the engine's setting, -1 = no limit. stop: strings; the answer ends
        before the first one, and the tokens that touch it are not in the state. guard: watches for
        tool calls; one that leaves its grammar is repaired by going back, and the reply ends where
        the last call ends. since: position where the text that goes on began (for a reply that was
        cut). raw: all of it is answer, markers of reasoning, too (None = the engine's setting).
        Leaving early keeps the session usable. Where the session was moved between two events, the
        text goes on from there, unless a guard watches it (StateError).
        """
        settings = self.engine.settings
        limit = settings.max_tokens if max_tokens is None else max_tokens
        if limit < -1:
            raise UsageError(f"max_tokens is `{limit}`", "give -1 for no limit, or 0 and more")
        stop = settings.stop if stop is None else [stop] if isinstance(stop, str) else stop
        before = self.tokens[since:] if since is not None else []
        is_raw = settings.raw if raw is None else raw
        think = None if is_raw else self._think(len(before))
        text = ReplyText(self.engine.decode, self.pos, before, stop, guard, think)
        ends = [] if limit < 0 else [self.pos + limit]
        if self.engine.context_tokens is not None:
            ends.append(self.engine.context_tokens)
        end = min(ends, default=None)
        return Generation(self, self._timeline, text, end, cancel)

    stream = _written(reply)

    def _think(self, said: int) -> tuple[Markers, bool] | None:
        """The markers of reasoning, and whether the prompt, all but the last `said` tokens, opened
        it."""
        markers = self.engine.markers
        if markers is None:
            return None
        prompt = self._timeline.tokens[: self.pos - said]
        return markers, opens_thinking(self.engine.decode, prompt, markers)

    @property
    def runs_ahead(self) -> bool:
        """Whether plain decoding may build a call while the one before runs."""
        return self.policy.runs_ahead and not self.sampler.needs_history

    def steps(self, end: int | None) -> Generator[Step, None, None]:
        """Blocks without end, or up to position `end`; plain decoding runs one call ahead."""
        while True:
            first, left = self.next_token(), None if end is None else end - self.pos
            if first in self.engine.stop_ids:
                yield Step([], "stop")
                continue
            drafts = self.propose(first, left)
            if drafts or not self.runs_ahead:
                yield self._verify([first, *drafts], self.guessed_by)
            else:
                yield from self._plain_steps(first, end)

    def _plain_steps(self, token: int, end: int | None) -> Iterator[Step]:
        """One token a step, the next call being built while this one runs. Returns where that
        cannot be: at a checkpoint, at the end, where guesses shall be fed, and when somebody moved
        the session meanwhile."""
        begin, first, wants = time.perf_counter(), True, False
        timeline = self._timeline
        timeline.abort()  # what another, suspended stream runs ahead
        try:
            pick, row = self._run_ahead(mx.array([token], mx.int32))
            while timeline.open_blocks:
                last = end is not None and timeline.pos + 1 >= end
                alone = wants or last
                following = None if alone else self._run_ahead(pick)
                value = integer(pick)
                refuse_nan(row, [value])
                timeline.commit(1)
                self._count_plain(value, time.perf_counter() - begin, first, alone)
                yield Step([token])
                if value in self.engine.stop_ids:
                    return
                begin, first, token = time.perf_counter(), False, value
                if following is not None:
                    pick, row = following
                if timeline.open_blocks:
                    wants = self.wants(token, end)
        finally:
            timeline.abort()

    def wants(self, token: int, end: int | None) -> bool:
        """Whether to feed guesses once the call on `token`, which runs, is done."""
        if not self.is_drafting:
            return False
        room = self.room(None if end is None else end - self.pos)
        if len(self.forced([token], room)) > 1:  # the first of them is what this call picks
            return True
        return self._ask(self.policy.wants, token, room) or self._is_to_measure

    @property
    def _is_to_measure(self) -> bool:
        return self.policy.wants_prices and not self._knows_prices

    def _run_ahead(self, token: mx.array) -> tuple[mx.array, mx.array]:
        """Open a block on a token (1,) that may not be known yet; the next pick (1,) and the row
        (1, V) it is made from, both being computed."""
        timeline = self._timeline
        pos = timeline.pos + timeline.open_blocks + 1
        row = timeline.feed(token)
        self.stats.forwards += 1
        pick = self.sampler.pick(row, pos, ())
        timeline.evaluate(pick, wait=False)
        return pick, row

    def _count_plain(self, following: int, seconds: float, first: bool, last: bool) -> None:
        self.picked(following)
        if self.is_drafting:
            self.policy.observe_plain(seconds, first=first, last=last)
        self.stats.count_block(0, 0)
        self.stats.generated_tokens += 1
