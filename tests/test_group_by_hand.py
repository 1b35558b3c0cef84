"""Lanes on a model that talks by rule, whose calls for all are made one after the other: what is
fed when, who runs ahead, and what one lane's failure leaves to the others. In milliseconds; on
models: `test_group.py`.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import mlx.core as mx
import pytest
from by_hand import Talking
from oracle import OracleDrafter, engine
from test_generation import Script
from test_group import KINDS, rounds, said, sessions, written

from ds4cli.engine.group import Group
from ds4cli.rewind.timeline import Timeline
from ds4cli.tape.tape import Tape
from ds4cli.tools.steps import GuardStep

MODEL = Talking("plain", "window")


class Hooks:
    """Stands where `Lanes` does. fed: the rows of each lane, call by call. broken: how many lanes a
    call may have before it fails. odd: a lane's caches whose rows are no numbers, so many times."""

    def __init__(self, model):
        self.model, self.fed, self.broken, self.odd = model, [], 99, {}
        self.unseated, self.is_armed = [], True
        self._seen = []

    def seat(self, caches):
        """The latest first."""
        self._seen += [own for own in caches if not [1 for seen in self._seen if seen is own]]
        places = [[seen is own for seen in self._seen].index(True) for own in caches]
        return sorted(range(len(caches)), key=lambda i: -places[i])

    def batch(self, sizes, caches):
        return None

    def call(self, feeds, caches):
        self.fed.append([len(feed) for feed in feeds])
        if len(feeds) > self.broken:
            raise RuntimeError("no memory")
        rows = []
        for feed, own in zip(feeds, caches, strict=True):
            ids = mx.array(feed) if isinstance(feed, list) else feed
            rows.append(self.model(ids[None], own)[0])
            if self.odd.get(id(own[0]), 0):
                self.odd[id(own[0])] -= 1
                rows[-1] = rows[-1] * mx.nan
        return mx.concatenate(rows), None

    def unseat(self, caches):
        self.unseated.append(caches)

    def disarm(self):
        self.is_armed = False


def made_with(model=MODEL, **settings):
    with pytest.MonkeyPatch.context() as patch:
        recorder = model._recorder, [], ""
        patch.setattr("ds4cli.engine.engine._recorder", lambda model: recorder)
        made = engine("by hand", model=model, **settings)
    hooks = Hooks(model)
    made.lanes = lambda: hooks
    return made, hooks


def several(n=3, truth=12, warn=lambda text: None, kinds=KINDS, **settings):
    """A group, n sessions, and what each says alone."""
    made, hooks = made_with(**settings)
    alone = [said(s.stream(max_tokens=truth)) for s in sessions(made, kinds=kinds[:n])]
    return Group(made, warn), hooks, list(sessions(made, kinds=kinds[:n])), [t for t, *_ in alone]


def test_lanes_say_what_each_says_alone():
    """Another lane's row, noise, history or end; and a call for each of them."""
    group, hooks, joined, truth = several(5, 20)
    limits = 17, 9, 20, 6, 1
    lanes = [group.join(s, max_tokens=n) for s, n in zip(joined, limits, strict=True)]
    found = written(group, lanes)
    assert [tokens for tokens, *_ in found] == [t[:n] for t, n in zip(truth, limits, strict=True)]
    assert {reason for *_, reason in found} == {"length"}
    lengths = [len(fed) for fed in hooks.fed]
    assert lengths == [5, *[4] * 5, *[3] * 3, *[2] * 8], "the last one steps as its session does"
    assert all({*fed} == {1} for fed in hooks.fed)
    assert [s.stats.forwards for s in joined] == [n + 1 for n in limits], "and one for its prompt"
    for session, tokens, n in zip(joined, truth, limits, strict=True):
        assert session.tokens[-n:] == tokens[:n] and not session.timeline.open_blocks
        assert session.logits.tolist() == MODEL.row(session.tokens)


def test_plain_lanes_run_one_call_ahead():
    """Guards: a call that waits for who reads, a second one on top, one beyond the end."""
    group, hooks, joined, _ = several(2)
    lanes = [group.join(s, max_tokens=3) for s in joined]
    assert not any(lane.has_step for lane in lanes)
    group.call()
    assert [lane.timeline.open_blocks for lane in lanes] == [1, 1]
    assert not any(lane.has_step for lane in lanes), "it may be built on first"
    group.call()
    assert [lane.timeline.open_blocks for lane in lanes] == [2, 2]
    assert all(lane.has_step for lane in lanes) and len(hooks.fed) == 2
    group.call()
    assert len(hooks.fed) == 2, "nobody took what is there"
    calls = MODEL._calls
    before = len(calls)
    next(lanes[0].events)
    group.call()
    assert len(calls) == before + 1 and [lane.timeline.open_blocks for lane in lanes] == [2, 2]
    next(lanes[0].events)
    assert lanes[0].has_step and lanes[0].timeline.open_blocks == 1, "there is one token left"
    group.call()
    assert len(calls) == before + 1
    assert next(lanes[0].events).finish_reason == "length" and group.lanes == [lanes[1]]
    assert lanes[0].left == 0 and lanes[1].left == 3
    assert group.join(joined[0], max_tokens=-1).left is None


def test_no_call_is_made_without_a_lane_that_is_about_to_leave():
    """A call for all but one, whose seat is still taken, is no batch: it took as long as four, on a
    GPU, each time that a line ended."""
    made, hooks = made_with()
    truth = said([*sessions(made, kinds=KINDS[:2])][1].stream(max_tokens=20))[0]
    made.stop_ids = {truth[6]}
    group, joined = Group(made), [*sessions(made, (0, 1), KINDS[:3])]
    waiting, calls = list(zip(joined, [3, 20, 9, 5, 20, 8], strict=True)), 0
    while waiting or group.lanes:
        while waiting and len(group.lanes) < 3:
            session, limit = waiting.pop(0)
            group.join(session, max_tokens=limit)
        group.call()
        assert len(hooks.fed) == calls or len(hooks.fed[-1]) == len(group.lanes)
        calls = len(hooks.fed)
        for lane in [lane for lane in group.lanes if lane.has_step]:
            next(lane.events)
    assert joined[1].tokens[-6:] == truth[:6] and truth[6] not in truth[:6], "it was stopped"


def test_a_last_step_that_nobody_takes_holds_up_no_one():
    """Guards: waiting for ever for who reads another lane."""
    group, _, joined, truth = several(3)
    lanes = [group.join(s, max_tokens=n) for s, n in zip(joined, (1, 1, 12), strict=True)]
    assert said(lanes[2].events)[0] == truth[2]
    assert [said(lane.events)[0] for lane in lanes[:2]] == [truth[0][:1], truth[1][:1]]


def test_who_does_not_run_ahead_holds_all_up():
    """A lane that feeds guesses waits for its picks; the others must not be a call ahead then."""
    group, hooks, joined, _ = several(2, speculate="always")
    joined[0].drafter = OracleDrafter([], 1)
    lanes = [group.join(s, max_tokens=9) for s in joined]
    group.call()
    assert all(lane.has_step for lane in lanes) and hooks.fed == [[1, 1]]


def test_a_text_ends_with_its_lane():
    """Guards: a lane that goes on behind its end of text, and what it ran ahead."""
    made, _ = made_with()
    truth = [said(s.stream(max_tokens=9))[0] for s in sessions(made, kinds=KINDS[:2])]
    end = truth[0][4]
    made.stop_ids = {end}
    group, joined = Group(made), list(sessions(made, kinds=KINDS[:2]))
    lanes = [group.join(s, max_tokens=9) for s in joined]
    tokens, _, reason = written(group, lanes)[0]
    assert (tokens, reason) == (truth[0][: truth[0].index(end)], "stop")
    assert joined[0].tokens[1:][-len(tokens) :] == tokens and not joined[0].timeline.open_blocks
    again = [group.join(joined[0], max_tokens=9), group.join(joined[1], max_tokens=3)]
    group.call()
    assert again[0].has_step and not again[1].has_step, "it is its first token"
    assert next(again[0].events).finish_reason == "stop"


def test_the_only_lane_steps_as_its_session_does():
    """Guards: calls for all with one lane, what is recorded then, and what it ran ahead."""
    group, hooks, joined, truth = several(2)
    joined[0].recording = joined[1].recording = False
    lane = group.join(joined[0], max_tokens=12)
    assert lane.has_step
    group.call()
    next(lane.events)
    next(lane.events)
    assert hooks.fed == [] and not lane.session.recording
    other = group.join(joined[1], max_tokens=12)
    assert not lane.has_step and lane.timeline.open_blocks == 0, "what it ran ahead is undone"
    while group.lanes != [other]:
        group.call()
        for each in [each for each in group.lanes if each.has_step]:
            next(each.events)
    assert joined[0].tokens[-12:] == truth[0] and hooks.fed
    assert said(other.events)[2] == "length" and joined[1].tokens[-12:] == truth[1]
    joined[0].drafter = OracleDrafter([], 1)
    drafting = group.join(joined[0], max_tokens=3)
    next(drafting.events)
    assert joined[0].recording, "what guesses take back is recorded"
    group.leave(drafting)
    assert not joined[0].recording


def test_a_lane_read_alone_makes_the_calls_it_needs():
    """A reply that waits for a call that nobody makes."""
    group, hooks, joined, truth = several(2)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    assert said(lanes[1].events)[0] == truth[1]
    assert hooks.fed == [[1, 1]] * 2, "who is not read has two calls, and no more"
    assert said(lanes[0].events)[0] == truth[0] and group.lanes == []


def test_guesses_of_a_lane_are_its_own():
    """Guards: guesses fed again, kept for another lane, or recorded where nobody goes back."""
    group, hooks, joined, truth = several(3, 30, speculate="always", num_draft_tokens=3)
    for session, tokens, right in zip(joined, truth, (1, 0.5, 0), strict=True):
        session.drafter = OracleDrafter([*session.tokens, *tokens], right)
        session.recording = False
    lanes = [group.join(s, max_tokens=30) for s in joined]
    assert [tokens for tokens, *_ in written(group, lanes)] == truth
    assert hooks.fed[0] == [4, 4, 4] and max(max(fed) for fed in hooks.fed) == 4
    accepted = [s.stats.accepted for s in joined]
    assert accepted[0] == 22 and 5 < accepted[1] < 22 and accepted[2] == 0
    assert not any(s.recording for s in joined)
    assert joined[0].stats.forwards == 1 + 8, "4 tokens a call"


@pytest.mark.parametrize("n", [1, 3])
def test_guesses_are_recorded_while_they_are_fed(n):
    """A block whose guesses fail cannot be cut without; nothing else is to be recorded."""
    group, _, joined, truth = several(2, 30, speculate="always", num_draft_tokens=n)
    seen = []
    feed = group._hooks.call
    group._hooks.call = lambda *args: seen.append([s.recording for s in joined]) or feed(*args)
    joined[0].drafter = OracleDrafter([*joined[0].tokens, *truth[0]], 1)
    for session in joined:
        session.recording = False
        group.join(session, max_tokens=9)
    group.call()
    assert seen == [[True, False]] and not any(s.recording for s in joined)


RECURRENT = Talking("recurrent", "plain")


def test_what_lanes_replay_is_replayed_at_once(monkeypatch):
    """Each lane that kept a part of its guesses ran the recurrences again by itself; or one that
    was moved meanwhile was replayed where it stood before."""
    group, _, joined, truth = several(
        3, 24, model=RECURRENT, kinds=({}, {}, {}), speculate="always", num_draft_tokens=3
    )
    made, replay = [], Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda *a: made.append(len(a[1])) or replay(*a))
    for session, tokens in zip(joined, truth, strict=True):
        session.drafter = OracleDrafter([*session.tokens, *tokens], 0)
        group.join(session, max_tokens=24)
    assert not rounds(group, 4) and made == [3] * 4
    group.call()
    joined[0].rewind(joined[0].pos - 2)
    made.clear()
    for lane in list(group.lanes):
        if lane.has_step:
            next(lane.events)
    assert made == [2], "of the others"
    assert not rounds(group) and [s.tokens[-24:] for s in joined] == truth


def test_a_replay_that_fails_takes_no_reply_with_it(monkeypatch):
    """No memory for what lanes replay together ended the reply that was read first."""
    heard = []
    group, _, joined, truth = several(
        3, 24, heard.append, kinds=({}, {}, {}), model=RECURRENT, speculate="always"
    )
    for session, tokens in zip(joined, truth, strict=True):
        session.drafter = OracleDrafter([*session.tokens, *tokens], 0.5)
        group.join(session, max_tokens=24)

    def fail(timelines, rows):
        if len(timelines) > 1:
            raise RuntimeError("no memory")

    monkeypatch.setattr("ds4cli.engine.group.replay_together", fail)
    assert not rounds(group) and [s.tokens[-24:] for s in joined] == truth
    assert len(heard) == 1 and "no memory" in heard[0]


def test_plain_lanes_of_a_recurrence_record_where_their_sessions_do():
    """Tokens that nobody can go back over without a model call; or a tape for nobody."""
    group, _, joined, truth = several(2, model=RECURRENT)
    joined[1].recording = False
    for session in joined:
        group.join(session, max_tokens=12)
    assert not rounds(group) and [s.tokens[-12:] for s in joined] == truth
    before = len(RECURRENT._calls)
    joined[0].rewind(joined[0].pos - 6)
    assert len(RECURRENT._calls) == before and joined[0].logits.tolist() == RECURRENT.row(
        joined[0].tokens
    )
    assert joined[1].plan(joined[1].pos - 6).forwards > 0


def test_a_guard_has_its_say_in_its_lane():
    """A pick that a grammar forbids was kept, or cost a call."""
    group, _, joined, truth = several(2, 30, speculate="always", num_draft_tokens=3)
    start = len(joined[0].tokens)
    row = MODEL.row([*joined[0].tokens, truth[0][0]])
    second = sorted(range(len(row)), key=lambda i: -row[i])[1]
    guard = Script(is_open=True, forbidden=truth[0][1:2])
    joined[0].drafter = OracleDrafter([*joined[0].tokens, *truth[0]], 0)
    lanes = [group.join(joined[0], max_tokens=2, guard=guard), group.join(joined[1], max_tokens=4)]
    (tokens, *_), (others, *_) = written(group, lanes)
    assert tokens == [truth[0][0], second] and others == truth[1][:4]
    assert guard.asked[0] == (truth[0][:1], truth[0][1], len(row))
    group, _, joined, truth = several(2, 30)
    left = GuardStep(event="left", opened=start, bad_pos=start + 2, reason="why")
    guard = Script({start + 2: left})
    guard.allowed = lambda size: (mx.arange(size) != truth[0][2]).__array__()
    lanes = [group.join(joined[0], max_tokens=8, guard=guard), group.join(joined[1], max_tokens=8)]
    (tokens, *_), (others, *_) = written(group, lanes)
    assert tokens[:2] == truth[0][:2] and tokens[2] != truth[0][2] and others == truth[1][:8]
    assert tokens[3:] == MODEL.goes_on(joined[0].tokens[: start + 3], 5)


def test_a_lane_that_is_moved_goes_on_from_there():
    """What its call ahead had picked was taken for what follows the new place."""
    group, _, joined, truth = several(2)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 5)
    joined[0].rewind(joined[0].pos - 2)
    assert not lanes[0].has_step
    rounds(group)
    assert [s.tokens[-12:] for s in joined] == truth


def test_a_row_without_numbers_is_fed_again_once():
    """Guards: a lane that fails for what another one left, or that is fed again for ever."""
    for times, fails in ((1, False), (2, True)):
        group, hooks, joined, truth = several(2)
        lanes = [group.join(s, max_tokens=12) for s in joined]
        rounds(group, 3)
        hooks.odd[id(joined[1].timeline.caches[0])] = times * 2  # each time one runs ahead
        failed = rounds(group)
        assert list(failed) == ([lanes[1]] if fails else []), times
        assert joined[0].tokens[-12:] == truth[0]
        assert fails or joined[1].tokens[-12:] == truth[1]
        assert hooks.unseated and all(c is joined[1].timeline.caches for c in hooks.unseated)
    # One that goes well between two is no reason to give up.
    group, hooks, joined, truth = several(2)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    for _ in range(2):
        rounds(group, 3)
        hooks.odd[id(joined[1].timeline.caches[0])] = 2
    assert not rounds(group) and joined[1].tokens[-12:] == truth[1]


def test_what_one_lane_brings_about_is_its_own():
    """An error in one lane ended every lane, or left a block open in some."""
    group, hooks, joined, truth = several(3)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 3)
    joined[1].rewind(joined[1].pos)
    joined[1]._pick = lambda: 1 / 0
    failed = rounds(group, expected=ZeroDivisionError)
    assert list(failed) == [lanes[1]] and hooks.unseated == [joined[1].timeline.caches]
    assert [joined[i].tokens[-12:] for i in (0, 2)] == [truth[0], truth[2]]


def test_calls_that_fail_for_all_are_made_one_by_one():
    """A batch ended because there was no memory for so many at a time."""
    heard = []
    group, hooks, joined, truth = several(3, warn=heard.append)
    for session in joined:
        group.join(session, max_tokens=12)
    rounds(group, 3)
    hooks.broken, before = 1, len(hooks.fed)
    assert not rounds(group) and group.is_apart
    assert [s.tokens[-12:] for s in joined] == truth
    assert heard == ["one at a time from here on, for a call for 3 failed: no memory"]
    assert len(hooks.fed) == before + 1, "it is tried once"


def test_calls_that_fail_for_one_are_made_one_by_one_once(monkeypatch):
    """Guards: all lanes apart for ever, for what one of them brought about."""
    heard = []
    group, hooks, joined, truth = several(3, warn=heard.append)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 3)
    bad = joined[2].timeline
    monkeypatch.setattr(bad._now.layers, "before_write", lambda *_: 1 / 0)
    failed = rounds(group, expected=ZeroDivisionError)
    assert list(failed) == [lanes[2]] and not group.is_apart and heard == []
    assert [s.tokens[-12:] for s in joined[:2]] == truth[:2]
    assert len(hooks.fed[-1]) == 2


def test_picks_that_cannot_be_made_leave_nothing_open(monkeypatch):
    """A block stayed open whose picks nobody has."""
    group, _, joined, truth = several(2)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 3)
    monkeypatch.setattr("ds4cli.engine.group.pick_together", lambda *_: 1 / 0)
    failed = rounds(group, 2, ZeroDivisionError)
    assert {*failed} == {*lanes}
    assert all(s.timeline.open_blocks == 0 for s in joined)
    monkeypatch.undo()
    assert said(joined[0].stream(max_tokens=9))[0] == truth[0][2:11]


def test_a_call_that_fails_while_it_runs_is_made_again(monkeypatch):
    """A batch ended where the work failed after the call was built."""
    heard = []
    group, _, joined, truth = several(2, warn=heard.append)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 3)
    part = lanes[0]._open[0]
    monkeypatch.setattr(part.picks, "values", lambda *_: (_ for _ in ()).throw(RuntimeError("x")))
    assert not rounds(group) and [s.tokens[-12:] for s in joined] == truth
    assert group.is_apart and heard[0].endswith("failed: x") and len(heard) == 1
    only = group.join(joined[0], max_tokens=5)
    group.join(joined[1], max_tokens=5)
    group.call()
    part = only._open[0]
    monkeypatch.setattr(part.picks, "values", lambda *_: (_ for _ in ()).throw(RuntimeError("y")))
    assert list(rounds(group, expected=RuntimeError)) == [only], "it was its own call"


def test_texts_are_read_in_one_call(monkeypatch):
    """Guards: what is read again, and what is recorded afterwards."""
    monkeypatch.setattr(Timeline, "last_rows", lambda *_: nullcontext())  # of one model call
    made, hooks = made_with()
    group, reader = Group(made), made.session()
    reader.sync([3, 1, 4])
    branches = [reader.fork(reader.limits) for _ in range(2)]
    branches[1].recording = False
    texts = [[3, 1, 4, 1, 5], [3, 1, 4, 2]]
    assert group.read(branches, texts) == 3 and sorted(hooks.fed[0]) == [1, 2]
    for session, text in zip(branches, texts, strict=True):
        assert session.tokens == text and session.logits.tolist() == MODEL.row(text)
    assert [s.recording for s in branches] == [True, False]


def test_a_group_that_is_closed_leaves_all_as_it_was():
    """Guards: a model that stays armed, a block that stays open."""
    group, hooks, joined, truth = several(2)
    lanes = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 4)
    assert all(lane.timeline.open_blocks for lane in lanes)
    group.close()
    assert group.lanes == [] and not hooks.is_armed
    assert not any(s.timeline.open_blocks for s in joined)
    group.leave(lanes[0])
    assert said(joined[1].stream(max_tokens=4))[0] == truth[1][3:7]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_lane_that_was_left_touches_its_session_no_more(is_closed):
    """Its reply, forgotten half-way, undid what the session had opened since, whenever it happened
    to be collected."""
    group, _, joined, truth = several(2)
    left = [group.join(s, max_tokens=12) for s in joined]
    rounds(group, 4)
    if is_closed:
        group.close()
    else:
        for lane in left:
            group.leave(lane)
    again = [group.join(s, max_tokens=5) for s in joined]
    group.call()
    left.clear()
    lane = None
    gc.collect()
    assert all(s.timeline.open_blocks and s.generation is not None for s in joined)
    assert [tokens for tokens, *_ in written(group, again)] == [t[3:8] for t in truth]


def test_history_of_each_lane_reaches_its_picks():
    """Penalties counted for the tokens of a call that were not fed yet, or not at all."""
    made, _ = made_with(speculate="always", num_draft_tokens=3)
    kinds = [{"temp": 0.0, "repetition_penalty": 1.5}, {"temp": 0.0}]
    truth = [said(s.stream(max_tokens=20))[0] for s in sessions(made, kinds=kinds)]
    group, joined = Group(made), list(sessions(made, kinds=kinds))
    joined[0].drafter = OracleDrafter([*joined[0].tokens, *truth[0]], 0.7)
    lanes = [group.join(s, max_tokens=20) for s in joined]
    assert [tokens for tokens, *_ in written(group, lanes)] == truth


def test_nothing_is_built_beyond_the_end_of_a_lane():
    """A call more than there are tokens, for each line of a batch."""
    group, hooks, joined, truth = several(2)
    lanes = [group.join(s, max_tokens=n) for s, n in zip(joined, (1, 4), strict=True)]
    before = len(MODEL._calls)
    assert [tokens for tokens, *_ in written(group, lanes)] == [truth[0][:1], truth[1][:4]]
    assert hooks.fed == [[1, 1]] and len(MODEL._calls) == before + 5
    assert said(group.join(several(1)[2][0], max_tokens=4).events)[0] == truth[0][:4]
    assert len(MODEL._calls) == before + 5 + 1 + 12 + 1 + 4, "what it says alone, and here"


def test_a_lane_stops_running_ahead_where_guesses_are_wanted():
    """Guards: guesses for another place; a lane that never stops for them, or always."""
    for wants in (False, True):
        group, _, joined, truth = several(2, 30, speculate="auto")
        asked = []
        group.guesses.wants = lambda *told, asked=asked, wants=wants: asked.append(told) or wants
        for session in joined:
            session.drafter = OracleDrafter([], 0)
            group.join(session, max_tokens=9)
        start = joined[0].pos
        depths = []
        for _ in range(6):
            group.call()
            depths.append(joined[0].timeline.open_blocks)
            for lane in [lane for lane in group.lanes if lane.has_step]:
                next(lane.events)
        assert asked[0] == (joined[0], truth[0][1], start + 9)
        assert depths == ([1, 2, 1, 1, 2, 1] if wants else [1, 2, 2, 2, 2, 2])
        rounds(group)
        assert [s.tokens[-9:] for s in joined] == [tokens[:9] for tokens in truth]
