"""The timeline on models whose rows are computed by hand: every number that it shows, keeps, counts
and reports, in milliseconds. So these tests come first where a fault is looked for in it:

    .ci/mutants ds4cli/rewind/timeline.py tests/test_timeline_by_hand.py
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest
from by_hand import GROUP, NUMBER_BYTES, Noted, V, check, text, timeline

from ds4cli.backend import memory
from ds4cli.errors import StateError
from ds4cli.rewind import timeline as module
from ds4cli.rewind.timeline import Limits, Timeline
from ds4cli.settings import MAX_BLOCK_TOKENS

KINDS = [("plain",), ("window",), ("recurrent",), ("plain", "recurrent", "window")]
HYBRID = ("plain", "recurrent")


def step(t, feed, kept=None):
    t.feed(feed)
    t.evaluate()
    return t.commit(len(feed) if kept is None else kept)


def singles(t, n):
    for token in text(n, seed=t.pos):
        step(t, [token])
    return t


def row(t, tokens):
    return [float(x) for x in t.model.row(tokens)]


def shown(t):
    """All that anybody can see of a timeline, and what it will be able to do."""
    horizon, kept = t.horizon, [(c.pos, c.kind) for c in t.checkpoints.kept]
    logits = None if t.logits is None else t.logits.tolist()
    return (
        *(list(t.tokens), list(t.redo_tokens), t.pos, logits, t.last_block),
        *(t.open_blocks, horizon.low, horizon.end, horizon.rows(), kept),
        *(a.pos() for a in t.adapters),
    )


# -- one block ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
def test_a_block_is_published_row_by_row(kinds):
    """Guards: rows of another position, a block that begins elsewhere, tokens that were cut off."""
    t = timeline(*kinds)
    assert (t.tokens, t.pos, t.logits, t.last_block) == ([], 0, None, (0, 0))
    rows = t.feed([1, 2, 3])
    assert (t.open_blocks, t.open_tokens, t.pos, t.tokens) == (1, 3, 0, [])
    assert rows.tolist() == [row(t, [1]), row(t, [1, 2]), row(t, [1, 2, 3])]
    t.evaluate()
    assert t.commit(3) == [1, 2, 3]
    assert (t.tokens, t.pos, t.last_block) == ([1, 2, 3], 3, (1, 3)), "the first row is after 1"
    assert (t.open_blocks, t.open_tokens) == (0, 0)
    check(t)
    assert step(t, [4, 5, 6, 0], kept=2) == [4, 5]
    assert (t.tokens, t.last_block) == ([1, 2, 3, 4, 5], (3, 5))
    check(t)
    assert step(t, [6]) == [6] and t.last_block == (5, 6)
    check(t)
    assert (t.counters.forwards, t.counters.fed_tokens) == (3, 8)
    assert t.model._calls == [3, 4, 1]


@pytest.mark.parametrize("kinds", KINDS)
def test_a_second_block_stands_on_a_token_that_is_not_known_yet(kinds):
    """Guards: plain decoding, which opens the next call while one runs."""
    t = timeline(*kinds)
    step(t, [1, 2])
    t.feed([3])
    t.evaluate(wait=False)
    t.feed(mx.array([4], mx.int32))
    t.evaluate(wait=False)
    assert (t.open_blocks, t.open_tokens, t.tokens) == (2, 2, [1, 2])
    assert (t.commit(1), t.tokens, t.open_blocks, t.last_block) == ([3], [1, 2, 3], 1, (2, 3))
    assert t.logits.tolist() == row(t, [1, 2, 3])
    assert (t.commit(1), t.tokens, t.open_blocks, t.last_block) == ([4], [1, 2, 3, 4], 0, (3, 4))
    check(t)
    t.feed([5])
    t.feed([6])
    t.abort()
    assert (t.tokens, t.open_blocks) == ([1, 2, 3, 4], 0)
    check(t)


def test_blocks_before_the_last_are_not_cut():
    """A later block stands on the rows that would go."""
    t = timeline("plain")
    step(t, [1, 2])
    t.feed([3, 4])
    t.feed([5])
    before = shown(t)
    with pytest.raises(AssertionError):
        t.commit(1)
    assert t.open_blocks == 0 and shown(t)[:5] == before[:5]
    check(t)


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_cut_off_is_undone(kinds, recording):
    """Without a tape the rest is fed again, and only there."""
    t = timeline(*kinds)
    t.recording = recording
    step(t, [1, 2])
    calls = t.counters.forwards
    for kept in (1, 2, 3, 4):
        step(t, [3, 4, 5, 6], kept=kept)
        check(t)
    again = not recording and "recurrent" in kinds
    assert t.counters.forwards - calls == (4 + 3 if again else 4)
    assert bool(t.horizon.segments) is recording
    t.checkpoint("turn")
    assert bool(t.checkpoints.kept) is (recording and kinds != ("plain",))


def test_what_was_replayed_for_all_is_not_replayed_again():
    """`replay_together` found the slots of the kept rows beforehand; those of others are no use."""
    t = timeline("plain", "recurrent")
    step(t, [1, 2])
    for rows in (2, 1, 3):  # all: where a guard keeps what the model did not agree with
        t.feed([3, 4, 5])
        t.evaluate()
        tape, starts = t.to_replay()
        t.replayed(2, tape.replay(starts, 2))
        tape.replay = pytest.fail if rows == 2 else tape.replay
        t.commit(rows)
        check(t)
    plain = timeline("plain")
    plain.feed([1, 2])
    assert plain.to_replay() is None
    unrecorded = timeline("recurrent")
    unrecorded.feed([1, 2], record=False)
    assert unrecorded.to_replay() is None


def test_what_was_replayed_is_of_the_oldest_block():
    """Guards: a later block that is lost, or taken for the one that was replayed."""
    t = timeline("recurrent")
    step(t, [1, 2])
    t.feed([3])
    t.feed([4])
    t.replayed(1, [["own"]])
    first, second = t._now.open
    assert (first.replayed, second.replayed) == ((1, [["own"]]), (0, []))
    assert (first.feed, second.feed) == ([3], [4])


@pytest.mark.parametrize("kinds", KINDS)
def test_any_failure_leaves_everything_as_it_was(kinds):
    """In the model, in the evaluation, in an observer: half a step stayed."""
    t = timeline(*kinds, horizon=8)
    t.sync(text(20))
    singles(t, 3)
    before = shown(t)

    def fail(*_):
        raise MemoryError("planted")

    for at in range(len(kinds)):
        t.model._fails = at
        with pytest.raises(KeyboardInterrupt):
            t.feed([1, 2])
        t.model._fails = None
        assert shown(t) == before
        check(t)
    t.feed([1, 2])
    with pytest.raises(MemoryError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "eval", fail)
        t.evaluate()
    assert shown(t) == before
    t.taps, t.observer = Noted(t.model), fail
    for kept in (1, 2):
        t.feed([1, 2])
        t.feed([3]) if kept == 2 else None
        with pytest.raises(MemoryError):
            t.commit(kept)
        assert shown(t) == before
        check(t)
    t.observer = None
    step(t, [1])
    check(t)


def test_one_call_evaluates_all_of_a_block(monkeypatch):
    """What is not evaluated with the block waits for the next one, and so does a failure in it."""
    t, runs = timeline("plain", "recurrent"), []
    t.taps = Noted(t.model)
    for name in ("eval", "async_eval"):
        run = getattr(mx, name)
        spy = lambda *trees, run=run, name=name: runs.append((name, trees)) or run(*trees)  # noqa: E731
        monkeypatch.setattr(mx, name, spy)
    first = t.feed([1])
    rows = t.feed([2, 3])
    pick = mx.array([5])
    t.evaluate(pick)
    ((name, (given, pending)),) = runs
    (logits, hidden), live = pending
    assert (name, given is pick, logits is rows) == ("eval", True, True)
    assert [x.tolist() for x in hidden] == [[[2.0], [3.0]]]
    assert live == t._now.layers.live() and len(live) == 1  # plain rows come with the logits
    t.evaluate(wait=False)
    assert runs[1][0] == "async_eval" and first is not rows


def test_who_reads_the_residual_rows_gets_those_that_stay():
    """Guards: heads that see rows of tokens that were cut off, or at another position."""
    t, told = timeline("plain"), []
    t.taps, t.observer = Noted(t.model), lambda at, rows: told.append((at, rows[0].tolist()))
    step(t, [1, 2])
    step(t, [3, 4, 5], kept=2)
    step(t, [6])
    assert told == [(0, [[1.0], [2.0]]), (2, [[3.0], [4.0]]), (4, [[6.0]])]
    t.taps = None
    step(t, [1])
    assert len(told) == 3, "nothing was noted"


def test_a_witness_is_told_what_was_published():
    """Guards: scores of tokens that were cut off, or read from the row of another one."""
    t, told = timeline("plain"), []
    t.witness = lambda at, tokens, before, rows: told.append((at, tokens, before, len(rows)))
    step(t, [1, 2])
    step(t, [3, 4, 5], kept=2)
    (at, tokens, before, rows), second = told
    assert (at, tokens, before, rows) == (0, [1, 2], None, 2)
    assert (second[0], second[1], second[3]) == (2, [3, 4], 3)
    assert second[2].tolist() == row(t, [1, 2])


def test_freed_memory_goes_back_now_and_then(monkeypatch):
    """Guards: what MLX keeps of freed arrays grows with a long text; or is dropped every token."""
    cleared = []
    monkeypatch.setattr(memory, "CLEAR_TOKENS", 8)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(t.pos))
    t = timeline("plain")
    step(t, [1] * 7)
    assert not cleared
    step(t, [1])
    singles(t, 7)
    assert cleared == [8]
    step(t, [1, 2, 3], kept=1)
    assert cleared == [8, 16]


# -- back and forward -----------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
def test_every_position_within_the_horizon_is_free(kinds):
    """A call where none was needed, or a row of another position."""
    t = timeline(*kinds, horizon=20)
    t.sync(text(12))
    while t.pos < 60:
        step(t, text(4, seed=t.pos), kept=1 + t.pos % 3)
    end, whole, calls = t.pos, list(t.tokens), t.counters.forwards
    for pos in (*range(end, end - 21, -1), *range(end - 20, end + 1, 3)):
        report = t.rewind(pos)
        assert (report.forwards, report.replayed, t.tokens) == (0, 0, whole[:pos])
        assert t.redo_tokens == whole[pos:]
        check(t)
    assert t.counters.forwards == calls


def test_what_a_rewind_reports():
    """Guards: tokens counted twice, or as fed again where they were not."""
    t = singles(timeline(*HYBRID, horizon=8, chunk=16, at=30), 60)
    report = t.rewind(85)
    assert (report.source, report.discarded, report.replayed) == ("horizon", 5, 0)
    assert t.rewind(87).discarded == 0 and len(t.redo_tokens) == 3
    calls, fed = t.counters.forwards, t.counters.fed_tokens
    report = t.rewind(20)
    assert (report.source, report.discarded, report.prefilled) == ("frontier", 67, 0)
    assert report.replayed == t.counters.fed_tokens - fed == 20 - 14
    assert report.forwards == t.counters.forwards - calls == 1
    assert report.seconds == report.back_s > 0
    assert (t.pos, t.redo_tokens, t.last_block) == (20, [], (14, 20))
    check(t)


def test_where_nobody_was_nobody_goes():
    """Guards: a position beyond the text, or before it; the ends of what is known."""
    t = singles(timeline(*HYBRID, at=10), 3)
    t.rewind(11)
    for pos in (-1, 14):
        with pytest.raises(StateError, match=f"`{pos}`") as refused:
            t.plan(pos)
        assert "0 to 13" in str(refused.value.hint)
    assert (t.plan(0).source, t.plan(13).forwards) == ("rebuild", 0)
    t.rewind(0)
    assert (t.tokens, t.pos, t.logits, t.horizon.segments) == ([], 0, None, [])
    assert t.redo_tokens == [] and t.last_block == (0, 0)
    t.sync(text(5))
    check(t)


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_written_over_is_forgotten(kinds):
    """A checkpoint, a row or a tape of a text that is gone served another one."""
    t = singles(timeline(*kinds, horizon=64, at=10), 5)
    t.checkpoint("turn")
    singles(t, 10)
    t.rewind(12)
    assert t.reach().high == 25
    checkpoints = [c.pos for c in t.checkpoints.kept]
    assert checkpoints == ([] if kinds == ("plain",) else [15])
    t.feed([1])  # nothing of it is published yet, and the way forward is gone
    assert (t.redo_tokens, t.horizon.end, t.checkpoints.kept) == ([], 12, [])
    t.abort()
    assert (t.pos, t.reach().high, t._now.known) == (12, 12, t.tokens)
    singles(t, 8)
    for pos in (15, 12, 20, 11):
        assert t.rewind(pos).forwards == 0
        check(t)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_rewind_that_fails_has_not_happened(kinds):
    """It feeds tokens, and dies in the last layer, or in its second call."""
    t = singles(timeline(*kinds, horizon=2, chunk=4, at=70), 5)
    t.rewind(74)
    far = next(pos for pos in range(72, 0, -1) if t.plan(pos).forwards)
    before = shown(t)
    t.model._fails = len(kinds) - 1
    with pytest.raises(KeyboardInterrupt):
        t.rewind(far)
    t.model._fails = None
    assert shown(t) == before
    assert t.rewind(75).forwards == 0, "the way forward, too"
    check(t)
    t.rewind(far)
    check(t)


def test_open_blocks_are_undone_by_every_move():
    """The layers of an open block stand beyond the text."""
    for move in (
        lambda t: t.rewind(9),
        lambda t: t.sync(text(9)),
        lambda t: t.checkpoint("turn"),
        lambda t: t.fork(),
        lambda t: t.state(),
    ):
        t = timeline(*HYBRID, at=10)
        t.feed([1])
        t.feed([2])
        move(t)
        assert t.open_blocks == 0
        check(t)
        singles(t, 2)
        check(t)


# -- sync -----------------------------------------------------------------------------------------


def test_a_sync_keeps_what_both_texts_have_in_common():
    """Guards: tokens read again that are there, or kept that are others."""
    t = timeline(*HYBRID, horizon=64, chunk=8)
    report = t.sync(text(30))
    assert (report.source, report.discarded, report.replayed) == ("live", 0, 0)
    assert (report.prefilled, report.forwards, t.model._calls) == (30, 4, [6, 8, 8, 8])
    other = [*text(20), 7 - text(21)[20], 3, 3]
    calls = t.counters.forwards
    report = t.sync(other)
    assert (report.source, report.discarded, report.replayed) == ("horizon", 10, 0)
    assert (report.prefilled, report.forwards) == (3, 1) and t.counters.forwards == calls + 1
    assert (t.tokens, t.redo_tokens) == (other, [])
    check(t)
    report = t.sync(other[:21])
    assert (report.discarded, report.forwards, t.redo_tokens) == (2, 0, other[21:])
    report = t.sync(other)
    assert (report.discarded, report.prefilled, report.forwards) == (0, 0, 0), "forward again"
    check(t)
    t.sync([])
    assert (t.pos, t.tokens, t.horizon.segments) == (0, [], [])


def test_a_sync_reads_again_only_what_it_has_to():
    """Guards: what was read again told as new, and the other way round."""
    t = singles(timeline(*HYBRID, horizon=4, chunk=16, at=40), 52)
    other = [*text(30), 7, 7]
    plan = t.plan(30, needs_row=False)
    assert (plan.source, plan.base, plan.replay) == ("frontier", 24, 6)
    report = t.sync(other)
    assert (report.discarded, report.replayed, report.prefilled) == (92 - 30, 6, 2)
    assert report.forwards == 1
    check(t)


def test_a_row_that_nobody_reads_is_not_fed_for(monkeypatch):
    """The tokens that follow give the row: to land without one costs no call."""
    t = timeline("window", horizon=8, chunk=64, at=60)
    asked, plan = [], Timeline.plan
    spy = lambda t, pos, **k: asked.append((pos, k)) or plan(t, pos, **k)  # noqa: E731
    monkeypatch.setattr(Timeline, "plan", spy)
    t.sync([*text(58), 7])
    t.sync(text(57))
    assert asked == [(58, {"needs_row": False}), (57, {"needs_row": True})]


def test_a_sync_that_is_cancelled_keeps_what_was_read():
    """Ctrl-C in a long prompt: the calls that were made stay, and are told so."""
    t, told = timeline(*HYBRID, chunk=8), []
    left = iter([False, False, True])
    report = t.sync(
        text(30), cancel=lambda: next(left), progress=lambda *at: told.append(at), checkpoints=()
    )
    assert (t.pos, report.prefilled, report.forwards, told) == (14, 14, 2, [(6, 30), (14, 30)])
    check(t)
    report = t.sync(text(30), progress=lambda *at: told.append(at))
    assert (report.prefilled, told[2:]) == (16, [(8, 16), (16, 16)])
    # Cancelled on the way of what is read again: fewer tokens than were in common.
    t = singles(timeline(*HYBRID, horizon=2, chunk=4, at=16), 60)
    left = iter([False, True])
    report = t.sync([*text(15), 7, 7], cancel=lambda: next(left))
    assert (t.pos, report.discarded, report.replayed, report.prefilled) == (13, 61, 1, 0)
    check(t)


def test_seconds_are_shared_out_by_tokens(monkeypatch):
    """What going back took, and what of the feeding was for tokens read again."""
    ticks = iter([10.0, 11.0, 19.0])
    t = singles(timeline(*HYBRID, horizon=4, chunk=16, at=40), 52)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    report = t.sync([*text(30), 7, 7])
    assert (report.replayed, report.prefilled) == (6, 2)
    assert (report.seconds, report.back_s) == (9.0, 1.0 + 6 / 8 * 8.0)
    ticks = iter([10.0, 11.0, 19.0])
    report = t.sync(t.tokens)
    assert (report.seconds, report.back_s) == (9.0, 1.0)
    ticks = iter([10.0, 13.0])
    report = t.rewind(t.pos)
    assert (report.seconds, report.back_s) == (3.0, 3.0)


def test_checkpoints_on_the_way_of_a_sync():
    """Where other texts branch off: kept once, in order, and none where the text does not go."""
    t = timeline(*HYBRID, chunk=16)
    t.sync(text(40), checkpoints=[25, 5, 25, 40, 77])
    marks = [(c.pos, c.kind) for c in t.checkpoints.kept if c.kind == "system"]
    assert marks == [(5, "system"), (25, "system")]
    assert t.model._calls == [5, 4, 16, 15]
    assert t.last_block == (25, 40)
    check(t)
    t.sync([*text(40), 1, 1], checkpoints=[25, 40, 41])
    assert [c.pos for c in t.checkpoints.kept if c.kind == "system"] == [5, 25, 40, 41]
    there = next(c for c in t.checkpoints.kept if c.pos == 25)
    t.sync([*text(25), 1, 1], checkpoints=[25])
    assert any(c is there for c in t.checkpoints.kept), "it is not taken again"
    t = timeline("plain", chunk=16)
    t.sync(text(40), checkpoints=[25])
    assert (t.model._calls, t.checkpoints.kept) == ([8, 16, 16], [])


def test_a_sync_cancelled_at_a_checkpoint_goes_no_further():
    """Guards: a mark where the text did not get to."""
    t = timeline(*HYBRID, chunk=4)
    left = iter([False, False, True, True, True])
    t.sync(text(20), cancel=lambda: next(left), checkpoints=[6, 12])
    assert t.pos == 2 and not t.checkpoints.has(6)
    check(t)


# -- long feeds -----------------------------------------------------------------------------------


def test_a_prompt_is_read_in_chunks():
    """Rows and tape of what is far from its end are not kept; what is near it is free."""
    t = timeline("plain", horizon=20, chunk=8)
    rows = []
    feed = Timeline.feed

    def spy(t, tokens, **how):
        rows.append((len(tokens), how, len(feed(t, tokens, **how))))
        return t._now.open[-1].logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeline, "feed", spy)
        t.sync(text(46))
    early, near = {"record": False, "inner_every": 0}, {"record": True, "inner_every": 0}
    calls = [(6, early, 1), *[(8, early, 1)] * 2, *[(8, near, 8)] * 3]
    assert rows == calls
    assert t.last_block == (38, 46)
    assert (t.horizon.low, t.horizon.end) == (22, 46)
    assert t._logits_row_bytes == 2 * NUMBER_BYTES


def test_a_model_whose_output_is_not_known_makes_all_rows():
    """A call was refused, or asked for its last row where nobody cuts the others off."""
    known = timeline("plain", at=3)
    unknown = Timeline(known.model, None, known.limits)
    for t, rows in ((known, 1), (unknown, 5)):
        with t.last_rows():
            assert len(t.feed([1] * 5)) == rows
        t.abort()
    with known.last_rows((0, 2)):
        assert known.feed([1, 2, 3]).tolist() == [
            row(known, [*text(3), *x]) for x in ([1], [1, 2, 3])
        ]


def test_between_its_calls_a_prompt_leaves_checkpoints():
    """Going back into a long prompt, all of it was read again."""
    t = timeline(*HYBRID, horizon=4, chunk=16)
    t.sync(text(70))
    assert [(c.pos, c.kind) for c in t.checkpoints.kept] == [
        *((6, "chunk"), (22, "chunk"), (38, "chunk")),
        (54, "chunk"),
    ]
    for pos in (54, 38, 22, 6):
        assert t.plan(pos).forwards == 0
        twin = t.fork()
        twin.rewind(pos)
        check(twin)
    assert t.plan(40).replay == 2


def test_the_last_call_is_no_longer_than_what_is_kept_of_it():
    """Its first rows were not free: the horizon, a budget or a window's slack held fewer."""
    assert timeline(*HYBRID, horizon=4, chunk=16)._last_call_tokens() == 16
    t = timeline(*HYBRID, horizon=64, budget=0, chunk=16)
    t.sync(text(3))
    assert (t._last_call_tokens(), t._call_sizes(0, 3)) == (1, [2, 1])
    t = timeline("plain", horizon=0, chunk=64)
    t._now.layers.splits_long_calls = True
    assert t._last_call_tokens() == MAX_BLOCK_TOKENS == t.limits.slack_tokens
    t.limits = replace(t.limits, horizon_tokens=20)
    t.horizon.limit = 100
    assert t._last_call_tokens() == 20 + MAX_BLOCK_TOKENS


def test_marks_inside_a_long_call():
    """Between the ends of two calls of a long prompt, half a call had to be read again."""
    t = timeline("recurrent", "window", horizon=300, chunk=200, at=700)
    recorder = t.recorder
    assert (t.model._calls, recorder.made) == ([100, 200, 200, 200], [128, 128, 128])
    marks = [(c.pos, c.kind, c.logits is None) for c in t.checkpoints.kept]
    ends = [(100, "chunk", False), (300, "chunk", False), (500, "chunk", False)]
    assert marks == sorted([*ends, *((n, "chunk", True) for n in (228, 428, 628))])
    check(t)
    for pos, again in ((240, 12), (228, 128), (101, 1), (428, 0), (631, 0)):
        twin = t.fork()
        assert twin.rewind(pos).replayed == again, "a mark inside has no row"
        check(twin)


def test_marks_inside_a_call_only_where_they_pay():
    """States, or a tape, that fill the budget push out the checkpoints at turns."""
    assert module.INNER_EVERY == 128
    t = timeline(*HYBRID, chunk=512, at=2)
    assert (t._inner_every(128), t._inner_every(129), t._inner_every(512)) == (0, 128, 128)
    tape = t.recorder.sizes.row
    t.horizon.budget_bytes = 512 * tape
    assert (t._inner_every(512), t._inner_every(513)) == (128, 0)
    t.horizon.budget_bytes = 1 << 20
    t.recorder.sizes = t.recorder.sizes._replace(state=1 << 19)
    assert t._inner_every(512) == 0
    t.recorder.has_inner_states = False
    assert t._inner_every(512) == 0
    assert timeline("plain", at=2)._inner_every(512) == 0


def test_no_marks_where_a_layer_cannot_be_brought_to():
    """Compressed rows drop their first ones in the same call: a `StateError` inside a prompt."""
    t = timeline(*HYBRID, chunk=400, at=2)
    t._now.layers.low = lambda: 258
    t.sync(text(402))
    assert [c.pos for c in t.checkpoints.kept] == [258, 386]
    check(t)


# -- what is kept ---------------------------------------------------------------------------------


def test_bytes_are_those_that_are_kept():
    """Guards: a budget that is kept on paper."""
    t = timeline(*HYBRID, horizon=40, chunk=16)
    assert t.kept_bytes() == {"last_block": 0, "horizon": 0, "checkpoints": 0}
    assert (t.tape_bytes_per_token, t.horizon_bytes(t.limits)) == (0, 0)
    t.sync(text(3))
    state, line, tape = 2 * NUMBER_BYTES, 4 * NUMBER_BYTES, 2 * NUMBER_BYTES
    assert t.kept_bytes() == {
        "last_block": 3 * (tape + line),
        "horizon": 3 * (tape + line),
        "checkpoints": 0,
    }
    t.checkpoint("turn")
    step(t, [1])
    kept = t.kept_bytes()
    assert kept["checkpoints"] == state + line == t.checkpoints.nbytes
    assert (kept["horizon"], kept["last_block"]) == (4 * (tape + line), tape + line + state)
    assert t.tape_bytes_per_token == tape
    assert t.horizon_bytes(Limits(10, 0, 0)) == 10 * (line + tape) + 2 * state
    assert t.horizon_bytes(t.limits) == 40 * (line + tape) + 2 * state
    plain = timeline("plain", at=3)
    assert plain.horizon_bytes(Limits(10, 0, 0)) == 10 * 2 * NUMBER_BYTES


def test_horizon_and_checkpoints_share_one_budget():
    """Each kept to its own share, both together held more than was granted."""
    t = timeline(*HYBRID, horizon=60, budget=2000, chunk=16, at=3)
    assert (t.horizon.budget_bytes, t.checkpoints.budget_bytes) == (1000, 2000)
    most = 0
    for i in range(150):
        step(t, [i % V])
        t.checkpoint("turn")
        kept = t.kept_bytes()
        assert kept["horizon"] + kept["checkpoints"] <= 2000
        most = max(most, kept["checkpoints"])
    assert most > 950, "what the horizon leaves is used"
    t.limits = replace(t.limits, budget_bytes=100)  # less than the horizon takes
    t.checkpoint("turn")
    assert t.checkpoints.kept == []


def test_a_mark_is_kept_where_going_back_is_not_free_anyway():
    """Guards: marks of nothing, of what is not recorded, and where every layer cuts."""
    t = timeline(*HYBRID)
    t.checkpoint("turn")
    assert t.checkpoints.kept == []
    t.sync(text(4))
    t.recording = False
    t.checkpoint("turn")
    assert t.checkpoints.kept == []
    t.recording = True
    t.checkpoint("turn")
    (mark,) = t.checkpoints.kept
    assert (mark.pos, mark.kind, mark.logits.tolist()) == (4, "turn", row(t, text(4)))
    assert mark.nbytes == 6 * NUMBER_BYTES
    plain = timeline("plain", horizon=4, chunk=8, at=64)
    plain.checkpoint("turn")
    assert plain.checkpoints.kept == [] and plain.rewind(5).source == "trim"
    check(plain)


def test_a_mark_lands_without_a_call():
    """Landing exactly on a checkpoint needs no model call: it keeps its logits row."""
    t = timeline(*HYBRID, horizon=4, at=40)
    t.checkpoint("turn")
    singles(t, 60)
    report = t.rewind(40)
    assert (report.source, report.forwards, report.replayed) == ("frontier", 0, 0)
    assert t.redo_tokens == text(60, seed=40)[:0] + t._now.known[40:100]
    check(t)
    assert t.rewind(90).source == "rebuild" or t.pos == 90
    check(t)


@pytest.mark.parametrize("kinds", [("plain", "recurrent"), ("window",)])
def test_what_the_horizon_leaves_is_kept_now_and_then(kinds):
    """Checkpoints at the live end lay where all is free; at every token they took all memory."""
    for horizon, apart in ((16, 64), (288, 72)):
        t = timeline(*kinds, horizon=horizon, chunk=8, at=9)
        t.feed([1])
        while t.pos < horizon + 3 * apart + 64:
            t.feed([t.pos % V])
            t.evaluate(wait=False)
            t.commit(1)
            kept = [c for c in t.checkpoints.kept if c.kind == "block"]
            assert all(c.pos <= max(t.horizon.low, t._now.layers.low()) for c in kept)
        assert t.open_blocks == 1
        gaps = [b.pos - a.pos for a, b in pairwise(kept)]
        assert len(kept) >= 2 and apart <= min(gaps) and max(gaps) < apart + 64
        for mark in kept:
            twin = t.fork()
            assert (twin.rewind(mark.pos).forwards, twin.pos) == (0, mark.pos)
            check(twin)
    plain = singles(timeline("plain", horizon=4, at=9), 200)
    assert plain.checkpoints.kept == []


def test_early_calls_of_a_feed_leave_no_rows():
    """The one row that a call kept was taken for the row of another position."""
    for kinds in KINDS:
        t = singles(timeline(*kinds, horizon=300, chunk=8, at=10), 30)
        t.feed(text(6, seed=2), record=False)
        t.evaluate()
        t.commit(6)
        if "recurrent" in kinds:
            assert t.horizon.segments == []
        else:
            assert (t.horizon.low, t.horizon.end) == (0 if t.can_cut else t.horizon.low, 46)
        with t.last_rows():
            t.feed([1, 2, 3])
        t.evaluate()
        t.commit(3)
        assert t.horizon.segments == []
        check(t)
        singles(t, 5)
        assert t.horizon.low == 49
        for pos in (49, 52, 47):
            t.rewind(pos)
            check(t)


@pytest.mark.parametrize("kinds", [("plain",), ("window",)])
def test_rows_of_long_feeds_are_not_mistaken_for_each_other(kinds):
    """Early calls of a feed keep one row: going back into them took the row of another position."""
    t = singles(timeline(*kinds, horizon=64, chunk=8, at=10), 100)
    t.sync([*t.tokens, *text(30, seed=4)])
    for pos in range(t.pos - 1, t.pos - 61, -1):
        twin = t.fork()
        twin.rewind(pos)
        check(twin)


def test_how_far_back_is_free():
    """Guards: more promised to a front end than is kept, or less."""
    assert timeline("plain").free_tokens() is None
    t = timeline(*HYBRID, horizon=20, at=3)
    assert t.free_tokens() == 20
    t = timeline(*HYBRID, horizon=10**6, budget=4000, at=3)
    assert t.free_tokens() == t.horizon.room_for(4 * NUMBER_BYTES).free_rows < 100
    t.recorder = None
    assert t.free_tokens() == 0
    assert timeline("window", horizon=12, at=3).free_tokens() == 12


def test_what_is_reached():
    """Guards: a plan over rows, states or checkpoints that are not there."""
    t = singles(timeline("plain", "recurrent", horizon=4, chunk=16, at=9), 60)
    t.checkpoint("turn")
    reach = t.reach()
    assert (reach.pos, reach.low, reach.high) == (69, t.horizon.low, 69)
    assert reach.rows == range(t.horizon.low, 70) and not reach.can_cut
    assert reach.last_block == (68, 69)
    assert [c.pos for c in reach.checkpoints] == [c.pos for c in t.checkpoints.kept]
    t.rewind(66)
    reach = t.reach()
    assert (reach.pos, reach.high, reach.rows.stop) == (66, 69, 70)
    assert [c.pos for c in reach.checkpoints][-1] == 69, "recurrences go forward again"
    window = singles(timeline("window", horizon=4, at=9), 60)
    window.checkpoint("turn")
    window.rewind(67)
    assert 69 in [c.pos for c in window.reach().checkpoints]
    bare = timeline("plain", at=9)
    bare._now = bare._now._replace(horizon=bare._nothing_kept()[0])
    assert bare.reach().rows == {9}, "the row where it stands"
    assert timeline("plain").reach().rows == range(0)


# -- branches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
def test_branches_do_not_hear_of_each_other(kinds):
    """Tokens, rows, tape, checkpoints or counters of one in the other."""
    t = singles(timeline(*kinds, horizon=64, at=20), 3)
    t.checkpoint("turn")
    t.observer = t.witness = pytest.fail
    twin = t.fork()
    t.observer = t.witness = None
    assert (twin.observer, twin.witness) == (None, None)
    assert (twin.counters.forwards, twin.counters.fed_tokens) == (0, 0)
    assert (twin.tokens, twin.last_block, twin.limits) == (t.tokens, t.last_block, t.limits)
    step(t, [1, 2])
    step(twin, [3])
    third = twin.fork()
    step(third, [4, 4, 4], kept=1)
    twin.rewind(21)
    step(twin, [5, 6])
    for each, tokens in ((t, [1, 2]), (third, [3, 4])):
        assert each.tokens[23:] == tokens
    assert (t.counters.forwards, twin.counters.forwards) == (5, 2)
    for each in (t, twin, third):
        check(each)
        for pos in (each.pos - 1, 20, 22):
            if pos <= each.pos:
                assert each.rewind(pos).forwards == 0
                check(each)


def test_a_twin_does_not_go_forward_to_what_was_left():
    """The rows beyond are shared, and whoever writes first has them."""
    t = singles(timeline(*HYBRID, at=10), 4)
    t.checkpoint("turn")
    t.rewind(11)
    twin = t.fork()
    assert (twin.redo_tokens, twin.horizon.end, twin.checkpoints.kept) == ([], 11, [])
    assert (len(t.redo_tokens), t.horizon.end, t.checkpoints.has(14)) == (3, 14, True)
    step(twin, [1, 2])
    t.rewind(14)
    check(t)
    check(twin)


def test_a_twin_keeps_within_its_own_limits():
    """A lane's branch with a short horizon kept as much as the text it came from."""
    t = timeline(*HYBRID, horizon=64, at=30)
    t.checkpoint("turn")
    step(t, [1, 2, 3])
    few = Limits(4, 1 << 10, 16)
    twin = t.fork(few)
    assert (twin.limits, twin.horizon.limit, twin.checkpoints.budget_bytes) == (few, 4, 1 << 10)
    assert (twin.last_block, twin.horizon.segments, twin.checkpoints.kept) == ((33, 33), [], [])
    assert (t.limits.horizon_tokens, t.last_block, t.checkpoints.has(30)) == (64, (30, 33), True)
    singles(twin, 3)
    check(twin)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_written_is_read(kinds, tmp_path):
    """A loaded text that stands elsewhere, or knows less, or more, than the one that was saved."""
    path = tmp_path / "session"
    t = singles(timeline(*kinds, horizon=4, chunk=8, at=20), 50)
    t.checkpoint("turn")
    singles(t, 3)
    t.rewind(71)
    t.write(path, "mine")
    for how in (lambda new: new.read(path, "mine"), lambda new: new.load_state(t.state())):
        loaded = timeline(*kinds, horizon=4, chunk=8)
        how(loaded)
        assert (loaded.tokens, loaded.redo_tokens, loaded.last_block) == (t.tokens, [], (71, 71))
        want = [(c.pos, c.kind, c.nbytes) for c in t.checkpoints.kept if c.pos <= 71]
        assert [(c.pos, c.kind, c.nbytes) for c in loaded.checkpoints.kept] == want
        assert loaded.checkpoints.budget_bytes == 1 << 20
        assert loaded.horizon.segments == [] and loaded.reach().rows == {71}
        check(loaded)
        singles(loaded, 2)
        check(loaded)
        loaded.rewind(70)
        check(loaded)
    with pytest.raises(StateError, match="another model"):
        timeline(*kinds).read(path, "another")
    empty = timeline(*kinds)
    loaded = timeline(*kinds)
    loaded.load_state(empty.state())
    assert (loaded.pos, loaded.logits) == (0, None)
    loaded.sync(text(4))
    check(loaded)


def test_no_checkpoint_of_a_text_that_is_not_in_the_file():
    """After going back and saving, a checkpoint ahead served another text, without a model call."""
    t = timeline(*HYBRID, at=20)
    t.checkpoint("turn")
    earlier = [vars(c) for c in t.checkpoints.kept]
    t.rewind(17)
    assert t.state()["frontiers"] == []
    loaded = timeline(*HYBRID)
    loaded.load_state({**t.state(), "frontiers": earlier})  # as earlier versions wrote it
    assert loaded.checkpoints.kept == []
    loaded.sync([*t.tokens, *text(60, seed=2)])
    loaded.rewind(20)
    check(loaded)


def test_files_that_do_not_fit_are_refused(tmp_path):
    """Guards: rows of another type, width or number that fail, or change the text, much later."""
    t = singles(timeline("plain", "recurrent", "window", at=8), 1)
    t.checkpoint("turn")
    state = t.state()
    plain, _, window = state["layers"]

    def layers(i, **arrays):
        parts = [*state["layers"]]
        parts[i] = {**parts[i], "arrays": {**parts[i]["arrays"], **arrays}}
        return {**state, "layers": parts}

    def tokens(*last):
        return {**state, "tokens": [*state["tokens"][:-1], *last]}

    keys, rows = plain["arrays"]["keys"], window["arrays"]["keys"]
    (mark,) = state["frontiers"]
    refused = (
        ("is whole", {**state, "kv": "8-bit (groups of 32)"}),
        ("`2` layers, this model 3", {**state, "layers": state["layers"][:2]}),
        ("`logits`", {**state, "logits": state["logits"][:-1]}),
        ("`layer 0: keys`", layers(0, keys=keys.astype(mx.float16))),
        ("`layer 0: keys`", layers(0, keys=keys[:, :, :-1])),
        ("`layer 0: values`", layers(0, values=keys[..., :-1])),
        ("`layer 1: 0`", layers(1, **{"0": mx.zeros((1, 3))})),
        ("`layer 2: keys`", layers(2, keys=rows[:, :, :-1])),
        *(("do not stand", tokens(*last)) for last in ([-1], [1.0], [])),
        ("with other layers", {**state, "frontiers": [{**mark, "payload": mark["payload"][:-1]}]}),
    )
    for words, wrong in refused:
        new = timeline("plain", "recurrent", "window")
        with pytest.raises(StateError) as error:
            new.load_state(wrong)
        assert words in error.value.message
    new = timeline("plain", "recurrent", "window")
    with pytest.raises(StateError, match="does not fit this model: KeyError"):
        new._load(tmp_path, {**state, "layers": [{}] * 3})
    bare = timeline("plain", "recurrent", "window")
    bare.load_state({**state, "logits": None})
    assert (bare.logits, bare.pos) == (None, 9)


def test_rows_kept_in_8_bits():
    """Guards: a file of whole rows read into packed ones, and the other way round."""
    whole = timeline("plain", at=9)
    packed = timeline("plain", at=9, kv_bits=8, kv_group_size=GROUP)
    check(packed)
    assert (whole.state()["kv"], packed.state()["kv"]) == ("whole", "8-bit (groups of 32)")
    loaded = timeline("plain", kv_bits=8, kv_group_size=GROUP)
    loaded.load_state(packed.state())
    check(loaded)
    step(loaded, [1, 2])
    for into, state in ((whole.fork(), packed.state()), (loaded, whole.state())):
        with pytest.raises(StateError, match="KV cache"):
            into.load_state(state)
    loaded.sync([])
    loaded.sync(text(5))
    assert type(loaded.caches[0]).__name__ == "QuantizedKVCache"


def test_arrays_are_alike_but_for_their_rows():
    """Guards: what is checked of a file's arrays."""
    like = mx.zeros((2, 1, 5))
    fits = module._check_like
    fits("x", mx.zeros((2, 1, 5)), like)
    fits("x", mx.zeros((2, 9, 5)), like, 1)
    fits("x", mx.zeros((2, 9, 5)), like, 1, 9)
    fits("x", mx.zeros((2, 1, 8)), like, -1)
    for x, *how in (
        (mx.zeros((2, 9, 5)),),
        (mx.zeros((2, 9, 5)), 1, 8),
        (mx.zeros((2, 9, 5)), 2),
        (mx.zeros((2, 1, 5), mx.int32), 1),
        (mx.zeros((2, 1)), 1),
        (mx.zeros((2, 1)), 1, 1),
    ):
        with pytest.raises(StateError) as error:
            fits("x", x, like, *how)
        assert str(x.dtype) in error.value.message and str(list(x.shape)) in error.value.message


# -- any course -----------------------------------------------------------------------------------

DEEDS = (*["step"] * 3, *["single"] * 2, "rewind", "redo", "edit", "mark", "fork", "load", "die")


class Course:
    """A timeline with a short horizon and little memory, and what dice do with it."""

    def __init__(self, kinds, seed):
        self.dice, self.kinds = random.Random(seed), kinds
        self.limits = dict(horizon=(6, 40)[seed], budget=(700, 4000)[seed], chunk=8)
        self.t, self.left = timeline(*kinds, at=10, **self.limits), []

    def some(self, least, most):
        return text(self.dice.randint(least, most), seed=self.dice.randrange(99))

    def step(self, most=6):
        fed = self.some(1, most)
        step(self.t, fed, self.dice.randint(1, len(fed)))
        horizon = self.t.horizon
        assert horizon.nbytes <= self.limits["budget"] // 2 or len(horizon.segments) == 1

    def single(self):
        self.step(1)

    def rewind(self):
        self.t.rewind(max(0, self.t.pos - self.dice.choice((1, 2, 5, 30, 200))))

    def redo(self):
        self.t.rewind(self.t.pos + self.dice.randint(0, len(self.t.redo_tokens)))

    def edit(self):
        kept = max(0, self.t.pos - self.dice.randint(0, 20))
        self.t.sync([*self.t.tokens[:kept], *self.some(0, 20)])

    def mark(self):
        self.t.checkpoint(self.dice.choice(("turn", "tool", "prompt")))
        kept = self.t.kept_bytes()
        assert (
            not kept["checkpoints"]
            or kept["checkpoints"] + kept["horizon"] <= (self.limits["budget"])
        )

    def fork(self):
        self.left.append(self.t)
        self.t = self.t.fork()

    def load(self):
        state = self.t.state()
        self.t = timeline(*self.kinds, **self.limits)
        self.t.load_state(state)

    def die(self):
        before = shown(self.t)
        self.t.model._fails = self.dice.randrange(len(self.kinds))
        with pytest.raises(KeyboardInterrupt):
            self.t.feed([1, 2])
        self.t.model._fails = None
        tokens, _, *rest = shown(self.t)  # what lay ahead is forgotten
        assert (tokens, rest[:3]) == (before[0], [*before[2:5]])

    def go(self, deeds):
        for _ in range(deeds):
            getattr(self, self.dice.choice(DEEDS))()
            check(self.t)
        for each in self.left:
            check(each)
            each.sync([*each.tokens, 1, 2])
            check(each)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", KINDS)
def test_any_course(kinds, seed):
    """Anything that can be done, in any order: what is shown is what the tokens give, what is kept
    fits, what fails has not happened, and no branch hears of another."""
    Course(kinds, seed).go(150)
