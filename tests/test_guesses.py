"""Whose guesses are fed in a call for all, and how many: by lanes that are told what they know, and
a clock that says what rounds take.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ds4cli.drafters.drafter import Drafter, Together
from ds4cli.engine.guesses import LOOK_EVERY, LOOKS_IN_VAIN, PAUSE, Guesses
from ds4cli.errors import ModelError


class Part(Drafter):
    """Takes time: `takes` seconds a draft on the clock, whoever and however many are asked."""

    is_free = False

    def __init__(self, clock, name="head", takes=0.5, says=(7, 8, 9), fails=None):
        self.clock, self.name, self.takes, self.says = clock, name, takes, list(says)
        self.fails, self.asked = fails, []

    def propose(self, tokens, n):
        if self.fails is not None:
            raise self.fails
        self.asked.append((list(tokens), n))
        return self.says[:n]

    def together(self):
        part = self

        class Slowly(Together):
            def propose(self, parts, texts, n):
                part.clock.now += part.takes
                return super().propose(parts, texts, n)

            def close(self):
                part.takes = None

        return Slowly()


class Session:
    """Knows these guesses, kept with these chances; `part` may be asked for `k` more."""

    def __init__(self, drafts=(), chances=(), part=None, k=3, hopes=0.9, chooses=True, ahead=True):
        self.is_drafting, self.stats = True, SimpleNamespace(parked=0)
        self.pos = 10
        self.policy = SimpleNamespace(chooses=chooses, runs_ahead=ahead)
        self.drafts, self.chances, self.part, self.k = list(drafts), list(chances), part, k
        self.hopes, self.fails, self.is_watched, self.told = hopes, None, False, []

    def next_token(self):
        if self.fails is not None:
            raise self.fails
        return 1

    def ids_to(self, token):
        return [5, token]

    def offer(self, first, left):
        self.told.append(("offer", first, left))
        return list(self.drafts), list(self.chances)

    def hope(self, left):
        self.told.append(("hope", left))
        return None if self.part is None else self._offer()

    def _offer(self, drafts=None):
        chances = SimpleNamespace(survival=lambda k: [self.hopes ** (i + 1) for i in range(k)])
        return SimpleNamespace(part=self.part, k=self.k, chances=chances, drafts=drafts)

    def heard(self, offer, said):
        assert self.policy.chooses, "who decides alone learns by itself"
        return said, [self.hopes ** (i + 1) for i in range(len(said))]

    def choose(self, first, left):
        self.told.append(("choose", first, left))
        self.chosen = SimpleNamespace(offer=None if self.part is None else self._offer())
        return self.chosen

    def give(self, chosen, said=None):
        assert chosen is self.chosen
        return self.drafts if said is None else said

    def wants(self, token, end):
        return ("wants", token, end)

    @contextmanager
    def drafting(self):
        self.is_watched = True
        yield


class Lane:
    def __init__(self, session, left=20):
        self.session, self.left, self.fed, self.error = session, left, None, None
        self.size, self.most_rows = 1, 32

    def guess(self, drafts):
        self.fed, self.size = drafts, 1 + len(drafts)

    def fill(self, size):
        self.size = size

    def fail(self, error):
        self.error = error


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def guesses_of(*sessions, warn=lambda text: None, plain=8):
    """Guesses for lanes over these, after so many rounds of one row a lane, a second each."""
    clock = sessions[0].clock if isinstance(sessions[0], Clock) else Clock()
    lanes = [Lane(session) for session in sessions]
    made = Guesses(lanes, warn, clock)
    rounds(made, clock, lanes, [1] * len(lanes), 1.0, plain)
    return made, lanes, clock


def rounds(made, clock, lanes, sizes, seconds, n):
    for _ in range(n):
        made.begin(sizes)
        clock.now += seconds


def learn(made, clock, lanes, row=0.05, n=12):
    """Rounds with guesses, whose further rows on all lanes cost so much."""
    for size in (2, 4, 8) * n:
        made.begin([size] * len(lanes))
        clock.now += 1 + row * (size - 1)
    made.begin([1] * len(lanes))


def test_what_a_round_costs_is_what_lies_between_two():
    """Guards: rounds in which a prompt was read, a line ended, or somebody was asked."""
    made, _, clock = guesses_of(Session(), Session(), plain=12)
    assert made.timed() == {2: 1.0}
    made.begin([1])  # another lane waits
    clock.now += 50
    made.begin([1, 1])
    made.interrupt()
    clock.now += 50
    made.begin([1, 1])
    clock.now += 1
    made.begin([1, 1])
    assert made.timed() == {2: 1.0}
    clock.now += 3
    made.begin([1, 1])
    assert made.timed()[2] > 1.0
    one, _, _ = guesses_of(Session())
    assert list(one.timed()) == []


def test_guesses_are_shared_out_once_prices_are_known():
    """Guards: lanes fed at any price, or told that they were where they were not."""
    sure, unsure = Session([1, 2, 3], [0.95, 0.9, 0.8]), Session([4, 5], [0.04, 0.01])
    made, lanes, clock = guesses_of(sure, unsure, plain=1)
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [None, None], "nothing is known yet"
    silent = Session()
    made, lanes, clock = guesses_of(sure, unsure, silent)
    learn(made, clock, lanes)
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [[1, 2, 3], [4, 5], None]
    assert [lane.size for lane in lanes] == [4, 4, 4], "all blocks are equally long"
    lanes[2].most_rows, lanes[2].size = 3, 1  # where its context ends
    made.make(lanes)
    assert [lane.size for lane in lanes] == [2, 2, 2] and lanes[0].fed == [1]
    made.make(lanes[:2])
    assert [s.stats.parked for s in (sure, unsure, silent)] == [0, 0, 0]
    assert sure.told[-1] == ("offer", 1, 20), "nobody is to be asked"
    made, lanes, clock = guesses_of(sure, unsure)
    learn(made, clock, lanes, row=3.0)
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [[], []]
    assert [s.stats.parked for s in (sure, unsure)] == [1, 1]


def test_guesses_wait_for_lanes_that_run_ahead():
    """Blocks of unlike lengths cost more than all the rows that would make them alike."""
    made, lanes, clock = guesses_of(Session([1, 2], [0.9, 0.9]), Session([4], [0.9]))
    learn(made, clock, lanes)
    made.make(lanes[:1])
    assert lanes[0].fed is None and lanes[0].size == 1


def test_a_price_that_keeps_guesses_out_is_forgotten_in_time():
    """One bad measurement parked all guesses for ever."""
    made, lanes, clock = guesses_of(Session([1], [0.5]), Session([2], [0.5]))
    learn(made, clock, lanes, row=3.0)
    fed = []
    while not fed or not fed[-1]:
        made.make(lanes)
        fed.append(len(lanes[0].fed))
        rounds(made, clock, lanes, [1 + len(lane.fed) for lane in lanes], 1.0, 1)
        assert len(fed) < 2000
    assert len(fed) > 100
    sure = Session([1, 2], [0.99, 0.98])
    made, lanes, clock = guesses_of(sure, Session())
    learn(made, clock, lanes, row=3.0)
    waited = 0
    while not stops(made, sure):
        rounds(made, clock, lanes, [1, 1], 1.0, 1)
        waited += 1
        assert waited < 2000
    assert waited > 100


def test_a_lane_whose_session_decides_is_left_to_it():
    """Guards: `always`, a pinned number, and the only lane."""
    for session in (Session([1, 2], chooses=False), Session([1, 2], ahead=False)):
        made, lanes, _ = guesses_of(session, Session())
        made.make(lanes)
        assert lanes[0].fed == [1, 2] and session.told == [("choose", 1, 20)]
        assert made.wants(session, 3, 30) == ("wants", 3, 30)
    alone = Session([1, 2], [0.9, 0.9])
    made, lanes, _ = guesses_of(alone)
    made.make(lanes)
    assert lanes[0].fed == [1, 2] and alone.told[0][0] == "choose"
    quiet = Session([1])
    quiet.is_drafting = False
    made, lanes, _ = guesses_of(quiet, Session())
    made.make(lanes)
    assert lanes[0].fed is None and quiet.told == []
    assert made.wants(quiet, 3, 30) == ("wants", 3, 30)


def test_what_one_lane_brings_about_is_its_own():
    """A lane that fails took the guesses of all."""
    bad, good = Session(), Session([1, 2], chooses=False)
    bad.fails = ZeroDivisionError()
    made, lanes, _ = guesses_of(bad, good)
    made.make(lanes)
    assert lanes[0].error is bad.fails and lanes[1].error is None and lanes[1].fed == [1, 2]
    worse = Session([1], chooses=False)
    worse.give = lambda *_: 1 / 0
    made, lanes, _ = guesses_of(worse, good)
    made.make(lanes)
    assert isinstance(lanes[0].error, ZeroDivisionError) and lanes[1].fed == [1, 2]


def test_lanes_stop_running_ahead_together_for_guesses_that_are_worth_it():
    """Guards: stopping for any guess, before prices are known, or behind the end."""
    sure, unsure = Session([1, 2, 3], [0.99] * 3), Session([1], [0.3])
    made, lanes, clock = guesses_of(sure, unsure, plain=1)
    assert made.wants(sure, 3, 30) is False and sure.told == []
    made, lanes, clock = guesses_of(sure, unsure)
    learn(made, clock, lanes)
    assert stops(made, unsure) is False and unsure.told == [("offer", 3, 20)]
    assert stops(made, unsure, sure) is True and sure.told == [("offer", 3, 20)]
    assert made.is_worth_stopping() is False, "that was said before the last call"


def test_lanes_look_for_guesses_in_the_same_rounds_where_none_were_worth_it():
    """Each lane looked at a token of its own, so that what several hoped for was never seen at
    once; a line that was new looked at all of its first ones."""
    few, many = Session([1, 2], [0.3, 0.1]), Session([1, 2, 3, 4], [0.99] * 4)
    made, lanes, clock = guesses_of(few, many)
    learn(made, clock, lanes)
    looks = []
    for _ in range(LOOKS_IN_VAIN + 3 * LOOK_EVERY):
        before = len(few.told)
        assert stops(made, few, few) is False
        looks.append(len(few.told) - before)
        made.begin([1, 1])
    assert looks[:LOOKS_IN_VAIN] == [2] * LOOKS_IN_VAIN, "both lanes"
    assert {*looks[LOOKS_IN_VAIN:]} == {0, 2} and sum(looks[LOOKS_IN_VAIN:]) == 2 * 3
    while not stops(made, few, many):
        made.begin([1, 1])
    made.begin([1, 1])
    assert stops(made, few, many) is True, "it is worth it again"


def stops(made, *sessions):
    """Lanes over these run ahead, and are asked behind a token: whether all lanes then stop."""
    assert [made.wants(session, 3, 30) for session in sessions] == [False] * len(sessions)
    return made.is_worth_stopping()


def asked(*sessions, row=0.05, **how):
    """After prices are known, and it was decided whether to ask who takes time."""
    made, lanes, clock = guesses_of(*sessions, **how)
    for session in sessions:
        if session.part is not None:
            session.part.clock = clock
    learn(made, clock, lanes, row)
    return made, lanes, clock


def asked_parts(takes):
    """Two lanes, each with a part that takes time."""
    parts = [Part(Clock(), takes=takes) for _ in range(2)]
    return parts, *asked(*(Session(part=part) for part in parts))


def test_who_takes_time_is_asked_for_all_where_that_pays():
    """Guards: one after the other, at any price, and for more than it can say."""
    parts, made, lanes, _ = asked_parts(0.1)
    for _ in range(PAUSE - 1):
        made.make(lanes)
    assert all(part.asked == [] for part in parts), "it is not looked at in every round"
    for _ in range(40):
        made.make(lanes)
    assert parts[0].asked and parts[0].asked == parts[1].asked
    assert parts[0].asked[-1] == ([5, 1], 3) and lanes[0].fed == [7, 8, 9]
    assert all(lane.session.is_watched for lane in lanes)
    assert stops(made, lanes[0].session) is True, "all stop for that"
    hopes = [told for told in lanes[0].session.told if told[0] == "hope"]
    assert {*hopes} == {("hope", 20)}, "as far as its limit"
    made.close()
    assert parts[0].takes is None


def test_who_is_asked_says_what_it_takes():
    """A drafter that takes longer than the calls it saves was asked for ever."""
    parts, made, lanes, clock = asked_parts(30.0)
    for _ in range(200):
        made.make(lanes)
        made.begin([1 + len(lane.fed or []) for lane in lanes])
        clock.now += 1
    assert 0 < len(parts[0].asked) < 10
    assert made.timed()[2] < 1.1, "asking is no part of a round"
    assert made.wants(lanes[0].session, 3, 30) is False


def test_the_reading_of_a_prompt_is_no_price_of_a_draft():
    """A head that read its prompt when it was first asked was taken to be that slow for ever."""
    parts, made, lanes, _ = asked_parts(20.0)
    for _ in range(400):
        made.make(lanes)
        if parts[0].asked:
            parts[0].takes = 0.1
    assert len(parts[0].asked) > 100


def test_who_decides_alone_is_not_looked_at():
    """Lanes stopped running ahead for a head whose session asks it by itself."""
    pinned = Session(part=Part(Clock()), chooses=False)
    made, lanes, _ = asked(pinned, Session(), Session())
    for _ in range(2 * PAUSE):
        made.make(lanes)
    assert not [told for told in pinned.told if told[0] == "hope"]


def test_each_kind_is_asked_where_it_pays():
    """Of two kinds only one was ever asked."""
    clock = Clock()
    head, model = Part(clock, "head", 0.1, [1]), Part(clock, "model", 0.1, [2])
    made, lanes, _ = asked(Session(part=head), Session(part=model), Session(part=head))
    for _ in range(100):
        made.make(lanes)
    assert head.asked and model.asked
    assert [lane.fed for lane in lanes] == [[1], [2], [1]]


def test_guesses_that_are_there_come_before_asking():
    """Guards: a draft for a lane that has better guesses already, or for none of a kind."""
    clock = Clock()
    sure = Session([1, 2, 3], [0.99, 0.98, 0.97], part=Part(clock, takes=0.1), hopes=0.5)
    lacking, other = Session(part=Part(clock, takes=0.1)), Session([4, 5], [0.9, 0.9])
    made, lanes, _ = asked(sure, lacking, other)
    for _ in range(60):
        made.make(lanes)
    assert lacking.part.asked and not sure.part.asked
    assert [lane.fed for lane in lanes] == [[1, 2, 3], [7, 8, 9], [4, 5]]


def test_a_lane_that_ends_takes_its_drafter_along():
    """Lanes stopped running ahead for a drafter that none of them has."""
    part = Part(Clock(), takes=0.1)
    session, plain = Session(part=part), Session()
    made, lanes, _ = asked(session, plain)
    for _ in range(60):
        made.make(lanes)
    assert part.asked and stops(made, session) is True
    session.part = None
    made.make(lanes)
    session.told.clear()
    assert stops(made, session) is False
    assert session.told == [("offer", 3, 20)], "nobody is to be asked"


def test_a_session_that_decides_asks_with_the_others():
    """Guards: a head asked by itself, or for another number than its session chose."""
    part = Part(Clock())
    session = Session(part=part, chooses=False, k=2)
    made, lanes, _ = guesses_of(session, Session())
    made.make(lanes)
    assert part.asked == [([5, 1], 2)] and lanes[0].fed == [7, 8]
    before = Session([3], part=part, chooses=False)
    before._offer = lambda offer=before._offer: offer([3])
    made, lanes, _ = guesses_of(before, Session())
    made.make(lanes)
    assert len(part.asked) == 1 and lanes[0].fed == [3], "it has guessed already"


def test_kinds_are_asked_apart():
    """Guesses of a head were taken for those of a draft model."""
    head, model = Part(Clock(), "head", says=[1]), Part(Clock(), "model", says=[2])
    sessions = Session(part=head, chooses=False), Session(part=model, chooses=False, k=2)
    made, lanes, _ = guesses_of(*sessions)
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [[1], [2]]
    assert (head.asked, model.asked) == ([([5, 1], 3)], [([5, 1], 2)])


def test_more_are_asked_for_than_one_wants():
    """Each is given as many as it asked for."""
    one, three = Part(Clock()), Part(Clock())
    sessions = Session(part=one, chooses=False, k=1), Session(part=three, chooses=False, k=3)
    made, lanes, _ = guesses_of(*sessions)
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [[7], [7, 8, 9]]


def test_a_joint_draft_that_fails_is_made_one_by_one():
    """A batch ended because one head could not be asked; or all were asked apart for ever."""
    said = []
    good, bad = Part(Clock()), Part(Clock(), fails=ZeroDivisionError("x"))
    sessions = Session(part=good, chooses=False), Session(part=bad, chooses=False)
    made, lanes, _ = guesses_of(*sessions, warn=said.append)
    made.make(lanes)
    assert lanes[0].fed == [7, 8, 9] and lanes[0].error is None
    assert lanes[1].error is bad.fails and said == []
    broken = Part(Clock())
    broken.together = lambda: SimpleNamespace(propose=lambda *_: 1 / 0, close=lambda: None)
    other = Part(Clock())
    sessions = Session(part=broken, chooses=False, k=2), Session(part=other, chooses=False)
    made, lanes, _ = guesses_of(*sessions, warn=said.append)
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [[7, 8], [7, 8, 9]]
    assert said == ["`head` guesses for one line after the other: division by zero"]
    made.make(lanes)
    assert [lane.fed for lane in lanes] == [[7, 8], [7, 8, 9]] and len(said) == 1
    made, lanes, _ = guesses_of(Session(part=broken, chooses=False), Session(), warn=said.append)
    made.make(lanes)
    assert lanes[0].fed == [7, 8, 9] and len(said) == 2


def test_a_kind_that_cannot_be_asked_at_once_is_named():
    """A batch that is slow, and does not say why."""
    said = []
    part = Part(Clock())

    def refuse():
        raise ModelError("no way")

    part.together = refuse
    made, lanes, _ = guesses_of(Session(part=part, chooses=False), Session(), warn=said.append)
    made.make(lanes)
    assert said == ["`head` guesses for one line after the other: no way"]
    assert lanes[0].fed == [7, 8, 9]


def test_arming_a_kind_is_no_part_of_a_round():
    """The round in which a head was armed for lanes made all rounds look slow."""
    part = Part(Clock())
    made, lanes, clock = guesses_of(Session(part=part, chooses=False), Session(), plain=12)
    arm = part.together
    part.clock = clock

    def slowly():
        clock.now += 100
        return arm()

    part.together = slowly
    made.make(lanes)
    made.begin([1, 1])
    assert made.timed() == {2: pytest.approx(1.0)}
