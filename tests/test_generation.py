"""What a reply does when its guard speaks: guesses that are cut, picks that are made again,
repairs, the checkpoint of a long call, and where a reply ends behind a call. By a guard that says
what it is told to, on a model that talks by rule.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from by_hand import WORDS, Talking
from oracle import engine

from ds4cli.engine.generation import Generation
from ds4cli.tools.parse import ParsedCall
from ds4cli.tools.steps import GuardEnd, GuardStep, Instead

MODEL = Talking("plain", "window")
START = [0, 4, 1, 6, 2]  # 14 different tokens follow
TRUTH = MODEL.goes_on(START, 60)


class Script:
    """A guard that answers each position as it is told to. says: a step by position, once."""

    def __init__(self, says=None, is_open=False, opened=None, fits=99, must=(), forbidden=()):
        self.says, self.is_open, self.opened, self.fits = says or {}, is_open, opened, fits
        self.must, self.forbidden, self.asked, self.settled = list(must), {*forbidden}, [], 10**6

    def feed(self, pos, token, text):
        step = self.says.pop(pos, None)
        return GuardStep(emit=text) if step is None else step

    def rewind(self, pos):
        self.asked.append(("rewind", pos))

    def filter(self, tokens):
        return self.fits

    def forced(self, tokens):
        return self.must

    def allowed(self, size):
        return (mx.arange(size) != TRUTH[0]).__array__()

    def instead(self, tokens, pick, size):
        self.asked.append((list(tokens), pick, size))
        if pick not in self.forbidden:
            return None
        return Instead((mx.arange(size) != pick).__array__(), "odd")

    def finish(self, reason):
        return GuardEnd()


def reply_of(guard, max_tokens=9, **settings) -> Generation:
    session = engine("by hand", model=MODEL, **settings).session()
    session.sync(START)
    return session.reply(max_tokens, guard=guard)


def ended(reply):
    events = list(reply.events(reply._session.steps))
    return [t for event in events for t in event.tokens], events[-1]


def test_guesses_inside_a_call_are_cut_where_it_would_be_left():
    """Guards: a guess that is fed and taken back, and prose that is cut."""
    for is_open, fits, kept in ((True, 3, 2), (True, 1, 0), (True, 0, 0), (False, 0, 3)):
        reply = reply_of(Script(is_open=is_open, fits=fits))
        assert reply.allowed(1, [2, 3, 4]) == [2, 3, 4][:kept]
    assert reply_of(None).allowed(1, [2, 3]) == [2, 3]
    assert reply_of(Script(is_open=True, must=[7])).forced([1]) == [7]
    assert reply_of(Script(must=[7])).forced([1]) == reply_of(None).forced([1]) == []


def test_picks_of_a_block_are_made_again_where_the_guard_knows_better():
    """What a grammar forces cost a call of its own; or a pick of another row."""
    feed, rows = TRUTH[:4], mx.array([MODEL.row([*START, *TRUTH[: i + 1]]) for i in range(4)])
    best = [sorted(range(WORDS), key=lambda i, row=row: -row[i]) for row in rows.tolist()]
    picks = [row[0] for row in best]
    assert picks == TRUTH[1:5]
    prose = reply_of(Script(forbidden=picks))
    assert prose.repicked(feed, picks, rows) is picks and prose._reply.guard.asked == []
    agreed = reply_of(Script(is_open=True, forbidden=picks))
    assert agreed.repicked(feed, picks, rows) == picks and agreed._reply.guard.asked == []
    second = best[0][1]
    for guesses, found in (
        ([second, TRUTH[2], 0], [second, *picks[1:]]),  # and goes on to the next
        ([0, 0, 0], [second, *picks[1:]]),
    ):
        reply = reply_of(Script(is_open=True, forbidden=picks[:1]))
        assert reply.repicked([feed[0], *guesses], picks, rows) == found
        (repair,) = reply._session.stats.repairs
        assert (repair.pos, repair.reason, repair.dropped_tokens) == (6, "odd", 0)
        assert 0 <= repair.seconds < 60
        assert reply._reply.guard.asked[0] == (feed[:1], picks[0], WORDS)
    later = reply_of(Script(is_open=True, forbidden=picks[1:2]))
    assert later.repicked([*feed[:2], 0, 0], picks, rows) == [picks[0], best[1][1], *picks[2:]]
    allowed = reply_of(Script(is_open=True))
    assert allowed.repicked([feed[0], 0, 0, 0], picks, rows) == picks
    assert len(allowed._reply.guard.asked) == 1, "nothing behind it will be kept"


def test_a_broken_call_is_written_again_with_other_noise():
    """The same tokens again, for ever; or another attempt for all that follows the reply."""
    broken = GuardStep(event="broken", opened=6, bad_pos=6, reason="why")
    reply = reply_of(Script({8: broken}), temp=9.0, seed=3)
    session, attempts = reply._session, []
    pick = session.sampler.pick
    session.sampler.pick = lambda *a: attempts.append(session.attempt) or pick(*a)
    tokens, last = ended(reply)
    assert len(tokens) == 9 and last.finish_reason == "length"
    assert attempts[0] == 0 and attempts[-1] == 1 and session.attempt == 0
    (repair,) = session.stats.repairs
    assert (repair.pos, repair.reason, repair.dropped_tokens) == (6, "why", 3)
    assert session.stats.generated_tokens == 9 and session.generation is None


def test_a_token_that_left_the_grammar_is_picked_under_its_mask():
    """Guards: the mask of another place, or of the whole rest of the reply."""
    left = GuardStep(event="left", opened=5, bad_pos=5, reason="why")
    guard = Script({5: left})
    tokens, _ = ended(reply_of(guard))
    assert tokens[0] != TRUTH[0] and tokens == [
        tokens[0],
        *MODEL.goes_on([*START, tokens[0]], 8),
    ]
    assert ("rewind", 5) in guard.asked


class Sure(Script):
    """Knows, inside a call, what is said."""

    def forced(self, tokens):
        at = TRUTH.index(tokens[0])
        return TRUTH[at + 1 : at + 8]


def test_a_repair_in_the_middle_of_a_block():
    """What the block held behind it was taken for text; or all behind a call's opening was lost."""
    left = GuardStep(event="left", opened=8, bad_pos=8, reason="why")
    guard = Sure({6: GuardStep(emit="", event="open", opened=6), 8: left}, is_open=True)
    guard.allowed = lambda size: (mx.arange(size) != TRUTH[3]).__array__()
    reply = reply_of(guard, 8, drafter="ngram")
    tokens, last = ended(reply)
    timeline, kept = reply.timeline, TRUTH[:3]
    assert tokens == timeline.tokens[5:] and last.finish_reason == "length"
    assert tokens[:3] == kept and tokens[3] != TRUTH[3]
    assert tokens[4:] == MODEL.goes_on([*START, *tokens[:4]], 4)
    (repair,) = reply._session.stats.repairs
    assert (repair.pos, repair.dropped_tokens) == (8, 5) and 0 < repair.seconds < 60
    assert 0 < reply._session.stats.decode_s < 60


def test_a_guard_is_asked_in_every_block():
    """Guards: a grammar that counts for the first block of a reply."""
    reply = reply_of(Sure(is_open=True), 14, drafter="ngram")
    before = len(MODEL._calls)
    assert ended(reply)[0] == TRUTH[:14] and MODEL._calls[before:] == [8, 6]


def test_what_a_guard_forbids_is_allowed_again_behind_its_reply():
    """The next reply began with the token that a grammar wanted."""
    guard = Script({5: GuardStep(event="left", opened=5, bad_pos=5, reason="why")})
    session = engine("by hand", model=MODEL).session()
    session.sync(START)
    reply = session.reply(9, guard=guard, cancel=lambda: bool(session.stats.repairs))
    tokens, last = ended(reply)
    assert (tokens, last.finish_reason) == ([], "cancelled")
    assert session.next_token() == TRUTH[0]


def test_a_reply_goes_on_where_somebody_took_the_session():
    """Guards: text that was taken back, shown again or counted for the limit."""
    session = engine("by hand", model=MODEL).session()
    session.sync(START)
    said = []
    for event in session.stream(9):
        said += event.tokens
        if len(said) == 4:
            session.rewind(7)
    assert said == [*TRUTH[:4], *TRUTH[2:9]] and session.tokens == [*START, *TRUTH[:9]]


@pytest.mark.parametrize("is_open", [True, False])
def test_the_opening_of_a_long_call_stays_cheap_to_come_back_to(is_open):
    """A repair of a call longer than the horizon read the prompt again."""
    opening = GuardStep(event="open", opened=7)
    guard = Script({7: opening}, opened=7 if is_open else None)
    reply = reply_of(guard, 40, horizon_tokens=40)
    tokens, _ = ended(reply)
    assert tokens == TRUTH[:40], "it is only visited"
    marks = [c.pos for c in reply.timeline.checkpoints.kept if c.kind == "tool"]
    assert marks == ([7] if is_open else []) and reply._checkpoint_at is None


def test_a_reply_ends_with_its_last_call():
    """White space behind a call, kept because the limit came first."""
    call = ParsedCall("now", "{}")
    closed = GuardStep(event="closed", opened=6, calls=(call,))
    for end, reason in ((8, "tool"), (None, "length")):
        reply = reply_of(Script({} if end is None else {7: closed}))
        reply._reply._decode = lambda ids: " " * len(ids)
        reply._reply._detokenizer._decode = reply._reply._decode
        tokens, last = ended(reply)
        assert last.finish_reason == reason and last.calls == ((call,) if end else ())
        assert reply.timeline.pos == (end or 14) and tokens == TRUTH[: reply.timeline.pos - 5]
