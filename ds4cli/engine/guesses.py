"""Guesses for the lanes of a group: whose are fed, and how many, in one call for all.

A lane that knows its next token offers what it can guess behind it, and all lanes get blocks as
long as pays (`drafters/rounds.py`); lanes that run ahead stop together for that. Drafters that
take time, a head or a draft model, are asked for all lanes at once, where what they are expected to
say pays. What calls and drafts cost is learnt by timing those that are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakSet

from ds4cli.drafters.asking import Asking
from ds4cli.drafters.drafter import Drafter, Together
from ds4cli.drafters.rounds import RoundCosts, best_size
from ds4cli.errors import ModelError

if TYPE_CHECKING:
    from ds4cli.drafters.policy import Offer
    from ds4cli.engine.group import Lane
    from ds4cli.engine.session import Chosen, Session

# Rounds between two looks at whether it pays to ask who takes time, while it does not.
PAUSE = 8
# Rounds of which one is looked at for guesses that are there, and after how many in which they were
# not worth it: looking, for each of many lanes, is a part of a round that counts. All lanes look in
# the same one, for what they stop for is what all of them hope for.
LOOK_EVERY, LOOKS_IN_VAIN = 8, 16


class _Turn:
    """What a lane may feed next: `drafts`, kept with these `chances`.

    chosen: what its session decided, where that is not shared out. offer: of a part that takes time
    and may be asked. asked: for how many guesses it is. said: which these are.
    """

    def __init__(self, lane: Lane):
        self.lane = lane
        self.drafts: list[int] = []
        self.chances: list[float] = []
        self.chosen: Chosen | None = None
        self.offer: Offer | None = None
        self.asked = 0
        self.said: list[int] | None = None

    @property
    def part(self) -> Drafter:
        assert self.offer is not None, "somebody is to be asked"
        return self.offer.part

    @property
    def text(self) -> Sequence[int]:
        session = self.lane.session
        return session.ids_to(session.next_token())

    @cached_property
    def hopes(self) -> list[float]:
        """The chance that the first guess of who takes time is kept, the first two, ..."""
        return [] if self.offer is None else self.offer.chances.survival(self.offer.k)

    def hear(self, guesses: list[int]) -> None:
        """Who was asked says this."""
        self.said = guesses[: self.asked]
        if self.chosen is None and self.offer is not None and self.said:
            session = self.lane.session
            self.drafts, self.chances = session.heard(self.offer, self.said)


class Guesses:
    """What is fed behind the next tokens. lanes: those of the group, as they come and go."""

    def __init__(
        self, lanes: Sequence[Lane], warn: Callable[[str], None], clock: Callable[[], float]
    ):
        self._lanes, self._warn, self._clock = lanes, warn, clock
        self._costs = RoundCosts()
        # When the last call was made, its lanes, and the tokens of the block of each.
        self._round: tuple[float, int, int] | None = None
        # Of lanes that run ahead, since the last call: what they could feed, if they stopped.
        self._hopes: list[list[float]] = []
        self._rounds = self._in_vain = 0  # and in how many of those looked at nothing was worth it
        self._stops = False  # they do, whatever that is
        self._asked_s = 0.0  # for asking, since then
        self._askers: dict[str, _Asker] = {}
        self._unplanned = 0  # rounds since it was decided whether to ask

    def close(self) -> None:
        """Nothing is guessed any more."""
        for asker in self._askers.values():
            asker.together.close()
        self._askers.clear()

    # -- what rounds cost -------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int]) -> None:
        """A round of so many rows a lane begins: the one before, if nothing else was done in it,
        says what rounds cost."""
        now = self._clock()
        self._rounds += 1
        if self._round is not None:
            begin, lanes, size = self._round
            self._costs.observe(lanes, size, now - begin - self._asked_s)
        is_whole = len(sizes) == len(self._lanes) and len({*sizes}) == 1
        self._round = (now, len(sizes), sizes[0]) if is_whole else None
        self._asked_s = 0.0

    def interrupt(self) -> None:
        """More is done in this round than a call: it says nothing of what rounds cost."""
        self._round = None

    def timed(self) -> dict[int, float]:
        """What calls of one row a lane take, in seconds by lanes, where enough were seen."""
        return self._costs.timed()

    @property
    def _plain(self) -> float:
        """Seconds of a round of one row a lane; 0 while that is not known."""
        return self._costs.plain(len(self._lanes))

    # -- what is fed ------------------------------------------------------------------------------

    def make(self, lanes: Sequence[Lane]) -> None:
        """Give lanes that know their next token the guesses that pay."""
        self._look_ahead()
        turns = [turn for lane in lanes for turn in self._begun(lane)]
        self._choose_whom_to_ask(turns)
        asked_s = self._ask([turn for turn in turns if turn.asked])
        for turn in turns:
            if turn.chosen is not None:
                with _failing(turn.lane):
                    turn.lane.guess(turn.lane.session.give(turn.chosen, turn.said))
        offers = [turn for turn in turns if turn.chosen is None and turn.drafts]
        if offers and self._plain and len(lanes) == len(self._lanes):
            self._share_out(offers, lanes, asked_s / self._plain)

    def _begun(self, lane: Lane) -> Iterator[_Turn]:
        """The lane's turn; none where it fails, or has nobody to guess."""
        session, turn = lane.session, _Turn(lane)
        if not session.is_drafting:
            return
        with _failing(lane):
            first, left = session.next_token(), lane.left
            if self._shares_out(session):
                turn.drafts, turn.chances = session.offer(first, left)
                turn.offer = session.hope(left) if self._is_asking else None
            else:
                turn.chosen = session.choose(first, left)
                turn.offer = turn.chosen.offer
                if turn.offer is not None and turn.offer.drafts is None:
                    turn.asked = turn.offer.k
            yield turn

    def _share_out(self, turns: Sequence[_Turn], lanes: Sequence[Lane], spent: float) -> None:
        """Feed what pays. lanes: all. spent: for asking, in plain rounds."""
        chances, most = [turn.chances for turn in turns], min([lane.most_rows for lane in lanes])
        size, _ = best_size(self._costs, len(lanes), chances, spent, most)
        if size == 1:
            self._costs.tempt()
        for turn in turns:
            turn.lane.session.stats.parked += size == 1
            turn.lane.guess(turn.drafts[: size - 1])
        for lane in lanes:
            lane.fill(max(size, lane.size))

    def _shares_out(self, session: Session) -> bool:
        """Whether it is decided here, not by the session, if guesses pay."""
        policy = session.policy
        is_shared = len(self._lanes) > 1 and session.is_drafting
        return is_shared and policy.chooses and policy.runs_ahead

    def wants(self, session: Session, token: int, end: int | None) -> bool:
        """Whether a lane is to stop running ahead by itself, to feed guesses behind `token`. What
        it hopes for is part of what all lanes stop for."""
        if not self._shares_out(session):
            return session.wants(token, end)
        if not self._plain:
            return False
        left = None if end is None else end - session.pos
        if self._is_asking and session.hope(left) is not None:
            self._stops = True
        elif self._looks_often or self._rounds % LOOK_EVERY == 0:
            _, chances = session.offer(token, left)
            self._hopes.append(chances[1:])  # the first is being computed
        return False

    @property
    def _looks_often(self) -> bool:
        """Whether guesses that are there are looked at in every round."""
        return self._in_vain < LOOKS_IN_VAIN

    def is_worth_stopping(self) -> bool:
        """Whether all lanes that run ahead are to stop, for what they have said since the last call
        that they could feed."""
        if not self._hopes:
            stops, self._stops = self._stops, False
            return stops
        (hopes, stops), self._hopes, self._stops = (self._hopes, self._stops), [], False
        chances = [own for own in hopes if own]
        wanted = bool(chances) and best_size(self._costs, len(self._lanes), chances)[0] > 1
        if chances and not wanted:
            self._costs.tempt(1 if self._looks_often else LOOK_EVERY)
        self._in_vain = 0 if wanted else self._in_vain + 1
        return wanted or stops

    # -- who takes time ---------------------------------------------------------------------------

    @property
    def _is_asking(self) -> bool:
        return bool(self._askers) and any([a.asking.length for a in self._askers.values()])

    def _look_ahead(self) -> None:
        """Decide whether drafters that take time are asked from here on: lanes that run ahead stop
        for that, all in the same round."""
        self._unplanned += 1
        if not self._plain or (not self._is_asking and self._unplanned < PAUSE):
            return
        kinds: dict[str, list[_Turn]] = {}
        for lane in self._lanes:
            turn = _Turn(lane)
            turn.offer = lane.session.hope(lane.left) if self._shares_out(lane.session) else None
            if turn.offer is not None:
                kinds.setdefault(turn.part.name, []).append(turn)
        for name in self._askers.keys() - kinds:
            self._askers[name].asking.length = 0
        for turns in kinds.values():
            asker, hopes = self._asker(turns[0].part), [turn.hopes for turn in turns]
            new = asker.new(turns)
            asker.asking.plan(self._costs, len(self._lanes), hopes, new, self._unplanned)
        self._unplanned = 0

    def _choose_whom_to_ask(self, turns: Sequence[_Turn]) -> None:
        """Those that are likely to say more than is there already, if that pays."""
        for name, asker in self._askers.items() if self._plain else ():
            most = asker.asking.length
            own = [turn for turn in turns if turn.chosen is None and turn.offer is not None]
            own = [turn for turn in own if turn.part.name == name]
            own = [turn for turn in own if sum(turn.hopes[:most]) > sum(turn.chances)]
            if not most or not own:
                continue
            free = [turn.chances for turn in turns if turn not in own]
            hopes = [turn.hopes for turn in own]
            new = asker.new(own)
            n = asker.asking.guesses(self._costs, len(self._lanes), hopes, new, free)
            for turn in own:
                turn.asked = min(n, len(turn.hopes))

    def _asker(self, part: Drafter) -> _Asker:
        if part.name not in self._askers:
            self.interrupt()  # a head or a model is armed for lanes, which takes calls of it
            self._askers[part.name] = _Asker(part, self._warn)
        return self._askers[part.name]

    def _ask(self, turns: Sequence[_Turn]) -> float:
        """Ask each of its guesses, all of a kind at once. Returns the seconds that it took."""
        begin = self._clock()
        kinds: dict[str, list[_Turn]] = {}
        for turn in turns:
            kinds.setdefault(turn.part.name, []).append(turn)
        for own in kinds.values():
            asker, began = self._asker(own[0].part), self._clock()
            new, n = asker.meet(own), max(turn.asked for turn in own)
            asker.ask(own, n)
            asker.asking.observe(len(own), n, self._clock() - began, new)
        took = self._clock() - begin
        self._asked_s += took
        return took


class _Asker:
    """Asks the parts of one kind, of all lanes. asking: when that pays."""

    def __init__(self, part: Drafter, warn: Callable[[str], None]):
        self.asking = Asking(part)
        self._warn = warn
        self._met: WeakSet[Drafter] = WeakSet()
        try:
            self.together = part.together()
        except ModelError as error:
            self._take_apart(part.name, error)

    def _take_apart(self, name: str, error: Exception) -> None:
        self.together = Together()
        self._warn(f"`{name}` guesses for one line after the other: {error}")

    def new(self, turns: Sequence[_Turn]) -> int:
        """How many were never asked: a part then reads its prompt."""
        return sum(turn.part not in self._met for turn in turns)

    def meet(self, turns: Sequence[_Turn]) -> int:
        """They are asked now. Returns how many never were."""
        new = self.new(turns)
        self._met.update(turn.part for turn in turns)
        return new

    def ask(self, turns: Sequence[_Turn], n: int) -> None:
        """At most n guesses of each. Where not all can be asked at once, one after the other."""
        try:
            with ExitStack() as around:
                for turn in turns:
                    around.enter_context(turn.lane.session.drafting())
                parts, texts = [turn.part for turn in turns], [turn.text for turn in turns]
                found = self.together.propose(parts, texts, n)
        except Exception as error:
            if not self._ask_each(turns):
                self._take_apart(turns[0].part.name, error)
            return
        for turn, guesses in zip(turns, found, strict=True):
            with _failing(turn.lane):
                turn.hear(guesses)

    def _ask_each(self, turns: Sequence[_Turn]) -> int:
        """How many failed."""
        failed = 0
        for turn in turns:
            try:
                with turn.lane.session.drafting():
                    guesses = turn.part.propose(turn.text, turn.asked)
                turn.hear(guesses)
            except Exception as error:
                turn.lane.fail(error)
                failed += 1
        return failed


@contextmanager
def _failing(lane: Lane) -> Iterator[None]:
    """Around what one lane brings about: the others are not to suffer."""
    try:
        yield
    except Exception as error:
        lane.fail(error)
