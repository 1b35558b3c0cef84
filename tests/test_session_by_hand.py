"""The loop over a timeline, on a model that talks by rule: what is asked of the drafter, the
controller and the guard, and when; what is counted; what ends a reply. In milliseconds, so that
faults can be looked for in it:

    .ci/mutants ds4cli/engine/session.py tests/test_session_by_hand.py
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import mlx.core as mx
import pytest
from by_hand import WORDS, Talking, check, text
from oracle import engine

from ds4cli.drafters.drafter import Drafter
from ds4cli.engine import session as module
from ds4cli.engine.session import Session, Stats, Step, accepted_drafts
from ds4cli.errors import ModelError, StateError, UsageError
from ds4cli.rewind.plan import RewindReport
from ds4cli.rewind.timeline import Limits
from ds4cli.settings import MAX_BLOCK_TOKENS, Settings
from ds4cli.text.reasoning import Markers

MODEL = Talking("plain", "window")
START = [0, 4, 1, 6, 2]  # 14 different tokens follow
TRUTH = MODEL.goes_on(START, 40)


def session_of(tokens=START, eos=(), **settings) -> Session:
    made = engine("by hand", model=MODEL, eos=eos, **settings).session()
    made.sync(tokens)
    return made


def after(n: int) -> list[int]:
    """The text when n tokens were said."""
    return [*START, *TRUTH[:n]]


def said(stream):
    return [token for event in stream for token in event.tokens]


class Spy(Drafter):
    """Guesses what is right `n` times, and notes what it hears."""

    name = "spy"

    def __init__(self, n=3, wrong=0, is_free=True):
        self.n, self.wrong, self.is_free, self.heard = n, wrong, is_free, []
        self.fails = False

    def propose(self, tokens, n):
        self.heard.append(("propose", list(tokens), n))
        known = TRUTH[len(tokens) - len(START) :][: min(n, self.n)]
        return [*known, *[(t + 1) % WORDS for t in TRUTH[: self.wrong]]][:n]

    def rewind(self, pos):
        self.heard.append(("rewind", pos))
        if self.fails:
            raise ValueError("planted")

    def forget(self):
        self.heard.append(("forget",))

    def observe(self, start, hidden):
        self.heard.append(("observe", start, hidden))
        if self.fails:
            raise ValueError("planted")

    def use(self, sampler):
        self.heard.append(("use", sampler))

    def told(self, kind):
        return [what for name, *what in self.heard if name == kind]


class Policy:
    """Stands where a session's controller stands: takes all guesses, and notes what it is told."""

    def __init__(self, chooses=False, runs_ahead=True, wanting=()):
        self.chooses, self.runs_ahead, self.wants_prices = chooses, runs_ahead, False
        self.parked, self.source, self.verdict = 0, "who", "why not"
        self.told, self._wanting = [], list(wanting)
        self.costs = SimpleNamespace(plain="plain", use=lambda *a, **k: self.told.append((a, k)))

    def choose(self, drafter, tokens, room, region):
        self.told.append(("choose", list(tokens), room, region))
        self.parked += 1
        drafts = drafter.propose(tokens, room) if room > 0 else []
        return SimpleNamespace(part=drafter, drafts=drafts) if drafts else None

    def give(self, offer, tokens, said):
        self.told.append(("give", list(tokens)))
        return offer.drafts if said is None else said

    def offer(self, drafter, tokens, room, region):
        chosen = self.choose(drafter, tokens, room, region)
        guesses = [] if chosen is None else chosen.drafts
        return guesses, [0.5**i for i in range(1, len(guesses) + 1)]

    def hope(self, *asked):
        self.told.append(("hope", *asked))
        return SimpleNamespace(part=asked[0])

    def heard(self, hope, tokens, drafts):
        self.told.append(("heard", list(tokens), drafts))
        return [0.5, 0.25]

    def wants(self, drafter, tokens, room, region):
        self.told.append(("wants", list(tokens), room, region))
        return self._wanting.pop(0) if self._wanting else False

    def observe(self, rows, kept, seconds):
        assert 0 < seconds < 60
        self.told.append(("observe", rows, kept))

    def observe_plain(self, seconds, first, last):
        assert 0 < seconds < 60
        self.told.append(("plain", first, last))

    def of(self, *kinds):
        return [what for what in self.told if what[0] in kinds]


def spied(n=3, wrong=0, is_free=True, tokens=START, policy=None, **settings):
    made = session_of(tokens, **settings)
    made.drafter = Spy(n, wrong, is_free)
    made.policy = policy or Policy()
    return made


class Grammar:
    """A reply's side of a guard: inside a call, `fits` of the drafts do, and `must` has to follow.
    must: by the token before."""

    region = "tool"

    def __init__(self, fits=99, must=None):
        self.fits, self.must, self.asked = fits, must or {}, []

    def mask(self):
        return None

    def allowed(self, first, drafts):
        self.asked.append((first, list(drafts)))
        return drafts[: self.fits]

    def forced(self, tokens):
        self.asked.append(list(tokens))
        return list(self.must.get(tokens[-1], []))

    def repicked(self, feed, picks, rows):
        self.asked.append(("held", list(feed), list(picks), len(rows)))
        return picks


# -- counting -------------------------------------------------------------------------------------


def test_what_is_counted_of_a_block():
    """Guards: statistics that add up to something else than what was done."""
    stats = Stats()
    for drafted, accepted, source in ((0, 0, ""), (3, 2, "a"), (4, 4, "a"), (2, 0, "b")):
        stats.count_block(drafted, accepted, source)
    assert (stats.blocks, stats.proposed, stats.accepted) == (4, 9, 6)
    assert stats.accept_counts == [2, 0, 1, 0, 1]
    assert stats.by_drafter == {"a": [7, 6], "b": [2, 0]}


def test_what_is_counted_of_a_move():
    """Guards: a way forward, or none, told as a rewind; seconds of a prompt told as its."""
    stats = Stats()
    for _ in range(2):
        stats.count_move(RewindReport("horizon", 4, 3, 9, 2, seconds=5.0, back_s=1.5))
    assert (stats.rewinds, stats.discarded_tokens, stats.replayed_tokens) == (2, 8, 6)
    assert (stats.back_s, stats.forwards) == (3.0, 4)
    stats.count_move(RewindReport("live", 0, 1, 9, 2, seconds=5.0, back_s=1.5))
    assert (stats.rewinds, stats.replayed_tokens, stats.back_s, stats.forwards) == (2, 7, 3.0, 6)
    stats.count_move(RewindReport("block", 1))
    assert stats.rewinds == 3


@pytest.mark.parametrize(
    ("drafts", "picks", "accepted"),
    [
        ([], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2], [1, 3, 3], 1),
        ([2, 2], [1, 2, 3], 0),
        ([1, 9, 2], [1, 9, 2, 3], 1),
        ([9], [9, 1], 0),
    ],
)
def test_guesses_are_kept_up_to_the_first_wrong_one_or_the_end(drafts, picks, accepted):
    """A guess behind a wrong one, or an end of text, in the text."""
    assert accepted_drafts(drafts, picks, {9}) == accepted


def test_what_a_sync_counts():
    """Guards: a prompt read twice told as one that was known."""
    session = session_of()
    stats = session.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.forwards) == (5, 0, 1)
    assert 0 < stats.prompt_s < 60
    before = stats.prompt_s
    session.sync([*START[:3], 1, 1, 1])
    assert (stats.prompt_tokens, stats.cached_tokens, stats.rewinds) == (6, 3, 1)
    assert (stats.discarded_tokens, stats.forwards) == (2, 2) and stats.prompt_s > before
    session.rewind(4)
    assert (stats.rewinds, stats.discarded_tokens) == (2, 4)
    assert session.counters is session.timeline.counters and session.timeline.pos == 4
    assert session.plan(2).pos == 2 and session.limits is session.timeline.limits
    assert session.horizon_bytes(Limits(10, 0, 0)) == 10 * WORDS * 4
    assert session.kept_bytes() == session.timeline.kept_bytes()


# -- one step -------------------------------------------------------------------------------------


def test_a_step_is_one_call():
    """What it picks, feeds, keeps and counts."""
    session = session_of()
    assert session.next_token() == TRUTH[0]
    assert session.step() == Step(TRUTH[:1])
    assert session.tokens == after(1) and session.pos == 6
    calls = session.counters.forwards
    step = session.step(drafts=[*TRUTH[2:4], (TRUTH[4] + 1) % WORDS, 0])
    assert step == Step(TRUTH[1:4], None) and session.counters.forwards == calls + 1
    assert session.tokens == after(4)
    stats = session.stats
    assert (stats.generated_tokens, stats.forwards, stats.blocks) == (4, 3, 2)
    assert stats.by_drafter == {"given": [4, 2]}
    assert session.next_token() == TRUTH[4] and session.counters.forwards == calls + 1
    check(session.timeline)


def test_an_end_is_not_fed():
    """An end of text in the text, fed by itself or accepted as a guess."""
    session = session_of(eos=[TRUTH[2]])
    assert session.step(drafts=TRUTH[1:5]).tokens == TRUTH[:2]
    assert session.step() == session.step(drafts=[1]) == Step([], "stop")
    assert session.tokens == after(2)


def test_guesses_that_are_no_tokens_are_refused():
    """MLX would read beyond the end of a table."""
    session, checked = session_of(), []
    session.engine.check_tokens = checked.append
    session.step(drafts=[3, 4])
    assert checked == [[3, 4]]


def test_there_is_nothing_to_go_on_from_before_a_prompt():
    """Guards: a first token made of nothing."""
    empty = engine("by hand", model=MODEL).session()
    with pytest.raises(StateError, match="nothing to go on from"):
        empty.next_token()
    session = session_of()
    session.recording = False
    assert not session.recording and not session.timeline.recording
    session.recording = True
    session.timeline._now = session.timeline._now._replace(logits=None)
    assert session.next_token() == TRUTH[0], "a row that is not kept is read again"


def test_a_pick_is_good_for_its_row_and_attempt():
    """/retry wrote the first token of the reply that it was to replace."""
    session, rows = session_of(), []
    pick = session.sampler.pick
    session.sampler.pick = lambda *a: rows.append(a) or pick(*a)
    for _ in range(2):
        assert session.next_token() == TRUTH[0]
    ((row, pos, history, mask),) = rows
    assert (row.tolist(), pos, history, mask) == ([MODEL.row(START)], 5, START, None)
    session.attempt = 3
    assert (session.attempt, session.sampler.attempt) == (3, 3)
    session.next_token(), session.next_token()
    assert len(rows) == 2
    session.pick_again()
    session.next_token()
    assert len(rows) == 3
    session.picked(44)
    assert session.next_token() == 44
    session.rewind(4)
    assert session.next_token() == MODEL.goes_on(START[:4], 1)[0]
    session.sync(START)
    session.generation = SimpleNamespace(mask=lambda: mx.arange(WORDS) != TRUTH[0])
    assert session.next_token() != TRUTH[0], "what a grammar forbids"


def test_no_number_is_picked_from(monkeypatch):
    """Plain decoding wrote token 0 for ever."""
    session = session_of()
    nan = lambda self, x: mx.broadcast_to(mx.array(float("nan")), (*x.shape[:2], WORDS))  # noqa: E731
    monkeypatch.setattr(type(MODEL.lm_head), "__call__", nan)
    with pytest.raises(ModelError):
        session.step()
    with pytest.raises(ModelError):
        list(session.stream(max_tokens=3))
    assert session.tokens == START and session.timeline.open_blocks == 0
    session.sync([1, 2])
    with pytest.raises(ModelError):
        session.next_token()


# -- guesses --------------------------------------------------------------------------------------


def test_guesses_are_asked_for_behind_the_next_token():
    """Guards: guesses for another place; a copy of the whole context at every token."""
    session = spied(n=3, policy=Policy(runs_ahead=False))
    assert session.propose(TRUTH[0], 9) == TRUTH[1:4]
    assert session.guessed_by == "who"
    assert session.policy.told == [("choose", after(1), 8, "prose"), ("give", after(1))]
    ids = session._drafted_ids
    assert session.step().tokens == TRUTH[:4]
    assert session.step(max_tokens=3).tokens == TRUTH[4:7]
    assert session.policy.of("choose")[1:] == [
        ("choose", after(1), MAX_BLOCK_TOKENS - 1, "prose"),
        ("choose", after(5), 2, "prose"),
    ]
    assert session._drafted_ids is ids and len(ids) == 10 and session.stats.parked == 3
    assert session.policy.of("observe") == [("observe", 4, 4), ("observe", 3, 3)]
    assert session.stats.by_drafter == {"who": [5, 5]}
    session.drafter.n = 0
    session.step()
    session.policy.runs_ahead = True
    session.step()
    assert session.policy.of("plain") == [("plain", False, False), ("plain", True, True)]


def test_nobody_is_asked_where_nobody_guesses():
    """A drafter `none` costs nothing."""
    session = session_of()
    session.policy = Policy()
    assert session.propose(TRUTH[0], 9) == [] and not session.is_drafting
    list(session.stream(max_tokens=4))
    session.policy.runs_ahead = False
    list(session.stream(max_tokens=4))
    assert session.policy.told == []
    assert session.wants(3, None) is False


def test_room_for_guesses():
    """A block that ends behind the reply, or behind what the model can read."""
    session = session_of()
    assert (session.room(None), session.room(4), session.room(99)) == (31, 3, 31)
    session.engine.context_tokens = 16
    assert (session.room(None), session.room(4)) == (10, 3)
    session.engine.context_tokens = 8
    assert (session.room(None), session.room(4)) == (2, 2)


@pytest.mark.parametrize("guesses", [0, 4])
def test_nothing_is_fed_beyond_the_context(guesses):
    """A block that ends behind what the model can read; a call that ran ahead to there."""
    session = spied(n=guesses)
    session.engine.context_tokens = 16
    events = list(session.stream(max_tokens=30))
    assert (session.tokens, events[-1].finish_reason) == (after(11), "length")
    assert session.counters.fed_tokens == 16 and session.room(None) == -1


def test_what_must_follow_comes_before_what_is_guessed():
    """A grammar's own text was guessed otherwise; a costly drafter was asked for it."""
    session = spied(n=2)
    first = TRUTH[0]
    session.generation = Grammar(must={first: [7, 8], TRUTH[2]: [9, 9, 9]})
    assert session.propose(first, None) == [7, 8] and session.guessed_by == "grammar"
    assert session.policy.of("choose"), "a free one may know more"
    session.generation = Grammar(must={first: TRUTH[1:2], TRUTH[2]: [9, 9, 9]})
    assert session.propose(first, None) == [*TRUTH[1:3], 9, 9, 9] and session.guessed_by == "who"
    assert session.propose(first, 5) == [*TRUTH[1:3], 9, 9]
    assert session.policy.of("choose")[-1][2:] == (4, "tool")
    session.generation = Grammar(fits=0, must={})
    assert session.propose(first, None) == [] and session.guessed_by == "who"
    assert session.generation.asked == [[first], (first, TRUTH[1:3])]
    costly = spied(n=2, is_free=False)
    costly.generation = Grammar(must={first: TRUTH[1:2]})
    assert costly.propose(first, None) == TRUTH[1:2] and costly.policy.told == []
    costly.generation = Grammar()
    assert costly.propose(first, None) == TRUTH[1:3]


def test_what_must_follow_is_bounded():
    """Guards: a text that is fed beyond the reply's end, or in blocks of any length."""
    session = spied(num_draft_tokens=3)
    assert session.forced([1], 9) == []
    session.generation = Grammar(must={1: [5] * 20})
    assert [session.forced([1], n) for n in (9, 2, 1)] == [[5] * 3, [5] * 2, [5]]
    assert session.forced([1], 0) == session.forced([1], -1) == []
    session.engine.settings = Settings()
    assert session.forced([1], 9) == [5] * 9


def test_what_is_offered_among_others():
    """Guesses and chances of another length; a grammar's text that counts as a guess."""
    session = spied(n=3)
    assert session.offer(TRUTH[0], 9) == (TRUTH[1:4], [0.5, 0.25, 0.125])
    assert session.guessed_by == "who" and session.policy.told[-1][1:3] == (after(1), 8)
    session.generation = Grammar(fits=2)
    assert session.offer(TRUTH[0], 9) == (TRUTH[1:3], [0.5, 0.25])
    session.generation = Grammar(must={TRUTH[0]: TRUTH[1:3]})
    assert session.offer(TRUTH[0], 9) == (TRUTH[1:4], [0.5, 0.25, 0.125])
    session.generation = Grammar(must={TRUTH[0]: [7, 8]})
    chance = module.FORCED_CHANCE
    assert session.offer(TRUTH[0], 9) == ([7, 8], [chance, chance**2])
    assert session.guessed_by == "grammar" and 0.5 < chance < 1
    session.generation = None
    session.drafter.n = 0
    assert session.offer(TRUTH[0], 9) == ([], []) and session.guessed_by == "who"


def test_a_guard_sees_the_picks_of_a_block():
    """Guards: picks of another row; a single token that is looked at twice."""
    session = spied(n=2, policy=Policy(runs_ahead=False))
    session.generation = Grammar()
    session.step()
    assert session.generation.asked[-1] == ("held", TRUTH[:3], TRUTH[1:4], 3)
    session.drafter.n = 0
    session.step()
    assert session.generation.asked[-1] != ("held", TRUTH[3:4], TRUTH[4:5], 1)


def test_penalties_see_the_whole_text():
    """A pick inside a block whose history ends before it."""
    session, histories = session_of(repetition_penalty=1.3), []
    assert not session.runs_ahead
    pick = session.sampler.pick
    session.sampler.pick = lambda rows, pos, history, *m: (
        histories.append((pos, list(history))) or pick(rows, pos, history, *m)
    )
    session.step(drafts=TRUTH[1:3])
    assert histories == [(5, START), (6, [*START, *TRUTH[:1], *TRUTH[1:3]])]
    plain = session_of(repetition_penalty=1.3)
    for _ in range(6):
        plain.step()
    list(session.stream(max_tokens=plain.pos - session.pos))
    assert session.tokens == plain.tokens


def test_why_nothing_was_guessed():
    """Guards: a reason for what did not happen."""
    session = spied()
    assert session.why_no_drafts == ""
    session.stats.parked = 2
    assert session.why_no_drafts == "why not"
    session.stats.proposed = 1
    assert session.why_no_drafts == ""


def test_a_drafter_that_others_ask_is_heard():
    """Guesses for another place, or beyond what a grammar and the chances leave."""
    session = spied(n=3)
    chosen = session.choose(TRUTH[0], 9)
    assert (chosen.first, chosen.room, chosen.forced) == (TRUTH[0], 8, [])
    assert session.give(chosen, [1, 2]) == [1, 2]
    hope = session.hope(9)
    assert session.policy.of("hope") == [("hope", session.drafter, 6, 8, "prose")]
    assert session.heard(hope, [1, 2, 3]) == ([1, 2], [0.5, 0.25])
    assert session.guessed_by == "spy"
    assert session.policy.of("heard") == [("heard", after(1), [1, 2, 3])]
    session.generation = Grammar(fits=1)
    assert session.heard(hope, [1, 2, 3]) == ([1], [0.5])
    assert session.generation.asked == [(TRUTH[0], [1, 2, 3])]


class Prices:
    """Stands where the engine's list of prices stands."""

    notice = "measured"

    def __init__(self, seconds=None):
        self.seconds, self.stale, self.asked = seconds or {}, False, []

    def is_stale(self, plain, pos, runs_ahead):
        self.asked.append((plain, pos, runs_ahead))
        return self.stale

    def measure(self, timeline, sampler, tokens):
        self.asked.append(("measure", timeline.pos, sampler, list(tokens)))
        self.seconds = {1: 0.1}


def test_prices_are_looked_up_once_and_measured_when_they_matter():
    """Guards: calls tried out at every block, or never; an old list used for ever."""
    session = spied(policy=Policy())
    prices = session.engine.prices = Prices({1: 0.5})
    session.propose(TRUTH[0], None)
    assert prices.asked == [], "nobody chooses"
    policy = session.policy = Policy(chooses=True)
    for _ in range(2):
        session.propose(TRUTH[0], None)
    assert prices.asked == [("plain", 5, True)] * 2
    used = [told for told in policy.told if told[0] not in ("choose", "give")]
    assert used == [(({1: 0.5},), {"runs_ahead": True})] and not session._is_to_measure
    prices.stale, before = True, list(session.engine.notices)
    session.propose(TRUTH[0], None)
    assert (prices.seconds, session.engine.notices) == ({}, before), "not before it matters"
    prices.stale, policy.wants_prices = False, True
    assert session._is_to_measure
    session.timeline.feed([1])
    session.propose(TRUTH[0], None)
    assert prices.asked[-1] == ("measure", 0, session.sampler, START)
    assert session.timeline.open_blocks == 0, "what ran ahead"
    assert session.engine.notices == [*before, "measured"]
    assert policy.told[-3] == (({1: 0.1},), {"runs_ahead": True})
    assert not session._is_to_measure
    session.use(Settings(repetition_penalty=1.2))
    session.propose(TRUTH[0], None)
    assert policy.told[-3] == (({1: 0.1},), {"runs_ahead": False})


# -- replies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_reply_says_what_follows(drafting, runs_ahead):
    """Plain, with guesses, one call ahead or not: the same text, to the limit and no further."""
    session = spied(n=2) if drafting else session_of()
    session.policy = Policy(runs_ahead=runs_ahead)
    events = list(session.stream(max_tokens=11))
    assert said(events) == TRUTH[:11] and session.tokens == after(11)
    assert events[-1].finish_reason == "length"
    assert session.stats.generated_tokens == 11
    assert session.stats.forwards == session.counters.forwards
    assert session.stats.blocks == (4 if drafting else 11)
    check(session.timeline)


def test_plain_decoding_runs_one_call_ahead_and_no_further():
    """Guards: calls that are thrown away at the end, or a wait for each of them."""
    session, fed = session_of(), []
    timeline = session.timeline
    feed, evaluate = timeline.feed, timeline.evaluate
    timeline.feed = lambda tokens, **k: fed.append((timeline.open_blocks, k)) or feed(tokens, **k)
    waits = []
    timeline.evaluate = lambda *a, wait=True: waits.append(wait) or evaluate(*a, wait=wait)
    assert said(session.stream(max_tokens=6)) == TRUTH[:6]
    assert fed == [(0, {})] + [(1, {})] * 5 and waits == [False] * 6
    assert session.next_token() == TRUTH[6] and session.counters.forwards == 1 + 6


def test_what_runs_ahead_is_drawn_for_its_own_position():
    """At a temperature plain decoding wrote another text than a step at a time."""
    ahead, alone = (session_of(temp=9.0, seed=5) for _ in range(2))
    alone.policy = Policy(runs_ahead=False)
    drawn = said(ahead.stream(max_tokens=12))
    assert drawn == said(alone.stream(max_tokens=12)) and len({*drawn}) > 6


def test_a_run_ahead_ends_where_guesses_shall_be_fed():
    """Guards: what a controller is told of plain tokens; guesses missed, or asked for too often."""
    policy = Policy(wanting=[False, False, True])
    session = spied(n=0, policy=policy)
    assert said(session.stream(max_tokens=9)) == TRUTH[:9]
    drafts, wants = policy.of("choose"), policy.of("wants")
    assert [len(told[1]) for told in drafts] == [6, 10]
    assert [told[1] for told in wants] == [after(n) for n in (2, 3, 4, 6, 7, 8, 9)]
    assert [told[2] for told in wants] == [7, 6, 5, 3, 2, 1, 0]
    flags = [(True, False), *[(False, False)] * 2, (False, True)]
    flags += [(True, False), *[(False, False)] * 3, (False, True)]
    assert policy.of("plain") == [("plain", *flag) for flag in flags]
    assert session.stats.accept_counts == [9]


def test_a_run_ahead_ends_where_a_grammar_leaves_no_choice():
    """Guards: a call for each token that had to follow."""
    session = spied(n=0)
    session.generation = Grammar(must={TRUTH[1]: TRUTH[2:4], TRUTH[4]: TRUTH[5:6]})
    assert session.wants(TRUTH[1], None) and not session.wants(TRUTH[4], None)
    assert not session.wants(TRUTH[1], session.pos + 2), "room for one"
    assert session.policy.of("wants")[0][2:] == (MAX_BLOCK_TOKENS - 1, "tool")
    session.policy.wants_prices = True
    assert session.wants(TRUTH[4], None), "prices are to be measured"


def test_a_reply_ends_with_the_text():
    """An end of text that comes first, later, or among guesses."""
    for n, at in ((0, 0), (0, 3), (2, 3), (2, 4)):
        session = spied(n=n, eos=[TRUTH[at]])
        events = list(session.stream(max_tokens=20))
        assert (said(events), events[-1].finish_reason) == (TRUTH[:at], "stop")
        assert session.tokens == after(at) and session.next_token() == TRUTH[at]
        assert session.timeline.open_blocks == 0


def test_limits_of_a_reply():
    """Guards: a limit of nothing taken for none; a setting that is not looked at."""
    session = session_of(max_tokens=4)
    assert said(session.stream(max_tokens=0)) == []
    assert said(session.stream()) == TRUTH[:4]
    endless = session.stream(max_tokens=-1)
    assert [next(endless).tokens for _ in range(6)] == [[t] for t in TRUTH[4:10]]
    endless.close()
    with pytest.raises(UsageError, match="`-2`"):
        next(session.stream(max_tokens=-2))
    session.engine.context_tokens = 18
    assert said(session.stream(max_tokens=-1)) == TRUTH[10:13]


def test_stop_strings_of_a_reply():
    """Guards: one string taken for its letters; a setting that is not looked at; text of before."""
    spell = session_of().engine.decode
    word = spell(TRUTH[3:5])
    for how in ({"stop": word}, {"stop": [word]}, {}):
        session = session_of(stop=[word])
        events = list(session.stream(max_tokens=20, **how))
        assert (said(events), events[-1].finish_reason) == (TRUTH[:3], "stop")
    assert said(session_of(stop=[word]).stream(max_tokens=9, stop=[])) == TRUTH[:9]
    session = session_of()
    list(session.stream(max_tokens=4))
    assert said(session.stream(max_tokens=9, stop=[word])) == TRUTH[4:13]


def test_reasoning_is_known_from_the_prompt():
    """Guards: a stop string inside thoughts ends the answer; thoughts of a cut reply forgotten."""
    spell = session_of().engine.decode
    start, end = (spell([x]) for x in (START[4], TRUTH[5]))
    for raw, expected in ((False, TRUTH[:9]), (True, TRUTH[:3]), (None, TRUTH[:9])):
        session = session_of()
        session.engine.markers = Markers(start, end)
        stream = session.stream(max_tokens=9, stop=[spell(TRUTH[3:5])], raw=raw)
        assert said(stream) == expected
    session = session_of(raw=True)
    session.engine.markers = Markers(start, end)
    assert session.reply()._reply._think is None
    assert session.reply(raw=False)._reply._think == (session.engine.markers, True)
    session.sync(after(3))
    assert session.reply(raw=False, since=5)._reply._think[1] is True
    assert session.reply(raw=False, since=5)._reply._before == TRUTH[:3]
    session.engine.markers = None
    assert session.reply(raw=False)._reply._think is None


def test_a_reply_that_is_cancelled_keeps_what_was_said():
    """Guards: Ctrl-C that is looked at once."""
    session = session_of()
    flags = iter([False, False, False, True])
    events = list(session.stream(max_tokens=20, cancel=lambda: next(flags)))
    assert (said(events), events[-1].finish_reason) == (TRUTH[:3], "cancelled")


# -- moves ----------------------------------------------------------------------------------------


def test_a_drafter_hears_of_every_move():
    """Guards: guesses for a text that is gone; a drafter that breaks breaks the move."""
    session = spied()
    for move, pos in ((lambda: session.rewind(3), 3), (lambda: session.sync(START), 5)):
        moves = session.moves
        session._drafted_ids = [1]
        move()
        assert session.drafter.told("rewind")[-1] == [pos]
        assert (session.moves, session._drafted_ids, session._next) == (moves + 1, [], None)
    session.drafter.fails = True
    session.rewind(2)
    assert session.tokens == START[:2] and session.drafter.told("forget") == [[]]
    notice = session.engine.notices[-1]
    assert "`spy` begins anew" in notice and "planted" in notice


def test_a_move_that_is_cut_short_is_a_move_where_it_led_elsewhere():
    """What was picked for the old text was taken for the new one's."""
    session = spied(tokens=text(9), prefill_step_size=4)
    session.next_token()
    moves, known = session.moves, session._next
    session.engine.context_tokens = 50
    with pytest.raises(UsageError):
        session.sync([1] * 51)
    with pytest.raises(StateError):
        session.rewind(99)
    assert (session.moves, session._next) == (moves, known)
    left = iter([False])
    with pytest.raises(StopIteration):
        session.sync([1] * 9, cancel=lambda: next(left))
    assert (session.moves, session._next) == (moves + 1, None)
    assert session.tokens == [1] and session.drafter.told("rewind")[-1] == [1]


def test_a_sync_tells_and_keeps_what_it_is_asked_to():
    """Guards: arguments that are lost on the way to the timeline."""
    session, told = session_of(prefill_step_size=4), []
    session.sync(text(20), progress=lambda *at: told.append(at), checkpoints=[9])
    assert told[-1] == (11, 11) and session.timeline.checkpoints.has(9, "system")
    session.checkpoint()
    session.sync(text(26))
    session.checkpoint("tool")
    assert session.timeline.checkpoints.has(20, "turn")
    assert session.timeline.checkpoints.has(26, "tool")
    session.engine.context_tokens = 30
    with pytest.raises(UsageError, match="31"):
        session.sync(text(31))
    checked = []
    session.engine.check_tokens = checked.append
    session.sync(text(3))
    assert checked == [text(3)]


def test_another_drafter_sees_what_is_kept():
    """A head hears of rows, and forgets all if it is cut short."""
    seen = Spy()
    seen.taps = (0,)
    made = engine("by hand", model=MODEL)
    timeline = made.scratch_timeline()
    session = Session(made, timeline, made.sampler(made.settings), seen)
    timeline.observer(3, ["rows"])
    assert seen.told("observe") == [[3, ["rows"]]] and not seen.told("forget")
    seen.fails = True
    with pytest.raises(ValueError):
        timeline.observer(3, [])
    assert seen.told("forget") == [[]]
    assert session.stats.drafter == "spy"
    del session
    timeline.observer(3, [])
    assert len(seen.told("observe")) == 2, "nobody holds the session any more"
    assert session_of().timeline.observer is None


def test_other_settings_keep_the_attempt():
    """`use` began with the first attempt again, or with the old settings' pick."""
    session = spied()
    session.attempt, session._knows_prices = 4, True
    session.next_token()
    session.use(Settings(temp=1.5, seed=7))
    assert (session.attempt, session._next, session._knows_prices) == (4, None, False)
    assert session.sampler.settings.seed == 7
    assert session.drafter.told("use") == [[session.sampler]]


def test_a_fork_goes_on_alike():
    """A branch with other settings, another attempt, drafter or thread."""
    session = spied()
    session.use(Settings(temp=1.5, seed=7))
    session.attempt = 2
    twin = session.fork()
    assert twin.drafter is not session.drafter and twin.drafter.name == "spy"
    assert (twin.attempt, twin.sampler.settings) == (2, session.sampler.settings)
    assert (twin.tokens, twin.engine) == (START, session.engine)
    twin.policy = session.policy
    assert said(twin.stream(max_tokens=8)) == said(session.stream(max_tokens=8))
    few = Limits(4, 1 << 10, 16)
    assert session.fork(few).limits == few and twin.limits == session.limits


def test_scores_are_kept_while_they_are_asked_for():
    """Guards: scores of another reply, or after nobody wants them."""
    session = session_of()
    with pytest.raises(UsageError, match="no scores"):
        session.scores(5)
    session.score(2)
    list(session.stream(max_tokens=3))
    scores = session.scores(6)
    assert [score.token for score in scores] == TRUTH[1:3]
    assert all(len(score.top) == 2 for score in scores)
    session.score(None)
    assert session.timeline.witness is None
    with pytest.raises(UsageError):
        session.scores(5)


def test_a_session_belongs_to_a_thread(tmp_path):
    """In a second thread MLX failed with a bare `RuntimeError` about streams."""
    session, refused = session_of(), []
    empty = engine("by hand", model=MODEL).session()
    uses = (
        session.next_token,
        session.step,
        session.fork,
        session.checkpoint,
        lambda: session.rewind(3),
        lambda: session.sync([1]),
        lambda: session.save(str(tmp_path / "s")),
    )

    def elsewhere():
        empty.sync(START)
        for use in uses:
            try:
                use()
            except StateError as error:
                refused.append((error.message, error.hint))

    thread = threading.Thread(target=elsewhere, name="second")
    thread.start()
    thread.join(60)
    assert [m for m, _ in refused] == [
        "this session belongs to the thread `MainThread`, not `second`"
    ] * len(uses)
    assert "load it here" in refused[0][1]
    with pytest.raises(StateError, match="`second`, not `MainThread`"):
        empty.step()
    session.save(str(tmp_path / "s"))
    loaded = session.engine.load_session(tmp_path / "s")
    assert loaded.tokens == START and loaded.next_token() == TRUTH[0]
