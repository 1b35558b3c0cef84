"""The timeline: transactions, the horizon, the checkpoints, counted calls, memory."""

import gc
import io
import random
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import mlx.core as mx
import pytest
from oracle import (
    FAMILIES,
    KINDS,
    TWINS,
    Noting,
    assert_fresh,
    failing_layer,
    interrupts,
    one_of_each,
    prompt,
)
from tiny import CFG, V, build

from ds4cli.caches.build import adapt, build_caches
from ds4cli.rewind import room
from ds4cli.rewind import timeline as timeline_module
from ds4cli.rewind.horizon import Horizon
from ds4cli.rewind.timeline import Limits, Timeline
from ds4cli.tape.recorder import Recorder
from ds4cli.tape.tape import Tape

HYBRIDS = tuple(n for n in FAMILIES if n not in ("llama", "gemma3_text", "gpt_oss"))


@lru_cache
def armed(name):
    model = build(name, scale=2.0)
    recurrent = any(not a.seekable for a in adapt(build_caches(model, 0)))
    return model, Recorder.arm(model) if recurrent else None


def timeline(name, horizon=256, mb=512, chunk=512):
    model, recorder = armed(name)
    return Noting(model, recorder, Limits(horizon, mb << 20, chunk))


def step(t, feed, kept=None):
    t.feed(feed)
    t.evaluate()
    return t.commit(len(feed) if kept is None else kept)


def check(t):
    """State and logits equal a fresh prefill; all layers stand at pos."""
    assert all(a.pos() in (None, t.pos) for a in t.adapters)
    if t.logits is not None:
        assert_fresh(t.model, t)


@pytest.mark.parametrize("name", [n for n in CFG if ":" not in n])
def test_what_comes_with_the_logits_is_computed_with_them(name):
    """Else what a layer holds waits for a reader that never comes, and grows by every call."""
    t = timeline(name)
    t.sync(prompt(5))
    t.feed([1])
    mx.eval(t.pending())
    t.commit(1)
    t.feed([2])
    mx.eval(t.pending())
    waiting = io.StringIO()
    mx.export_to_dot(waiting, *(x for a in t.adapters for x in a.arrays()))
    assert "shape=rectangle" not in waiting.getvalue()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_plain_rows_are_not_evaluated_by_themselves(name):
    """Each array more is a cost of the host's, for every token."""
    t = timeline(name)
    t.sync(prompt(5))
    slots = sum(not a.seekable for a in t.adapters)
    assert len(t._now.layers.live()) == slots


@pytest.mark.parametrize("rows", [1, 3])
def test_an_undo_of_a_call_that_made_room_puts_the_buffers_back(rows):
    """A layer that was stopped between its keys and its values has buffers of two lengths."""
    t = timeline("llama")
    t.sync(prompt(256 - rows + 1))
    cache = t.adapters[1].cache
    before = cache.keys.shape, cache.values.shape
    opening = t.opening()
    cache.keys = mx.concatenate([cache.keys, cache.keys], axis=2)
    t.undo(opening)
    assert (cache.keys.shape, cache.values.shape) == before
    step(t, [*range(1, rows + 1)])
    check(t)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_error_between_layers_leaves_the_block_undone(name):
    """A block that dies after some layers wrote must not shift those layers."""
    t = timeline(name)
    t.sync(prompt(9))
    step(t, [1, 2, 3, 4], kept=2)
    before, logits = t.tokens[:], t.logits
    for index in range(len(t.model.layers)):
        for feed in ([5], [5, 6, 7]):
            with failing_layer(t.model, index), pytest.raises(KeyboardInterrupt):
                t.feed(feed)
            assert t.tokens == before
            check(t)
    assert mx.array_equal(t.logits, logits)
    for pos in (11, 10, 9):
        assert t.rewind(pos).forwards == 0
        check(t)
    step(t, [7])
    check(t)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "deepseek_v41"])
def test_an_interrupt_at_any_line_of_a_feed_leaves_the_block_undone(name):
    """After the model's call, before the block was noted, the layers stood ahead of the tokens."""
    t = timeline(name)
    t.sync(prompt(20))
    lines = 0
    places = [Timeline.feed, Timeline.opening, Timeline.open, Timeline._forget_redo]
    for interrupted in interrupts(*places):
        twin = t.fork()
        twin.checkpoint("turn")
        twin.rewind(12)  # so that there is something ahead to forget
        with interrupted:
            twin.feed([5, 6, 7])
        lines += interrupted.struck
        if not interrupted.struck:
            twin.abort()
        assert (twin.tokens, twin.open_blocks) == (prompt(12), 0)
        check(twin)
    assert lines > 10


def test_an_interrupt_at_any_line_of_a_commit_leaves_it_done_or_undone():
    """Tokens published and the horizon not, or the other way round: a rewind served other rows."""
    t = timeline("qwen3_next", horizon=8)
    t.sync(prompt(20))
    for i in range(60):  # so that rows are dropped, and a checkpoint is due
        step(t, [i])
    before, lines = t.tokens[:], 0
    places = [Timeline.commit, Timeline._after, Timeline._remember, Timeline._keep_edge]
    places += [Timeline._keep_checkpoint]
    places += [Horizon.append, Horizon._trim, Horizon._drop_first, Horizon._release_checkpoint]
    for interrupted in interrupts(*places):
        twin = t.fork()
        twin.feed([5, 6, 7])
        twin.evaluate()
        with interrupted:
            twin.commit(2)
        lines += interrupted.struck
        twin.abort()  # before its first line, nothing has happened
        assert twin.tokens in (before, [*before, 5, 6])
        check(twin)
        assert twin.rewind(twin.pos - 3).forwards <= 1
        check(twin)
    assert lines > 30


@pytest.mark.parametrize("name", FAMILIES)
def test_an_error_inside_a_rewind_leaves_the_session_unchanged(name):
    """A rewind is done or not done: a replay that dies must not leave half of it."""
    t = timeline(name, horizon=4, chunk=4)
    t.sync(prompt(30))
    tokens = t.tokens[:]
    tried = 0
    for pos in range(1, 30):
        if t.plan(pos).forwards:
            tried += 1
            with failing_layer(t.model, -1), pytest.raises(KeyboardInterrupt):
                t.rewind(pos)
        assert t.tokens == tokens
        check(t)
    assert tried
    assert t.rewind(28).forwards == 0
    check(t)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_error_inside_a_sync_keeps_what_was_read(name):
    """A prefill that dies in its third call stands after the second, and can go on."""
    t = timeline(name, chunk=4)
    t.sync(prompt(8))
    with failing_layer(t.model, 0), pytest.raises(KeyboardInterrupt):
        t.sync(prompt(20))
    assert t.tokens == prompt(8)
    t.sync(prompt(20))
    check(t)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cancelled_sync_stops_between_calls_and_goes_on(name):
    """Ctrl-C in a long prompt keeps the calls that were made."""
    t = timeline(name, chunk=4)
    calls = iter([False, False, True])
    report = t.sync(prompt(20), cancel=lambda: next(calls))
    assert (t.pos, report.prefilled, report.forwards) == (8, 8, 2)
    report = t.sync(prompt(20))
    assert (report.prefilled, report.replayed) == (12, 0)
    check(t)


@pytest.mark.parametrize("name", one_of_each(FAMILIES))
def test_the_horizon_reaches_every_position_without_a_call(name):
    """One-token steps, blocks and partial acceptance concatenate into one horizon."""
    t = timeline(name, horizon=40)
    t.sync(prompt(12))
    rng = random.Random(2)
    while t.pos < 100:
        n = rng.choice([1, 1, 1, 4, 6])
        step(t, [rng.randrange(V) for _ in range(n)], rng.randrange(1, n + 1))
    end = t.pos
    for pos in [*range(end - 40, end + 1), *range(end, end - 41, -3)]:
        calls = t.counters.forwards
        report = t.rewind(pos)
        assert (t.counters.forwards - calls, report.forwards) == (0, 0)
        assert report.source in ("block", "horizon", "live")
        check(t)


def arrays(horizon):
    """Arrays that a horizon keeps alive."""
    states = [x for s in horizon.segments for slots in s.checkpoint or [] for x in slots]
    tapes = [x for s in horizon.segments for x in s.tape.arrays()]
    return len(tapes) + len(states) + sum(len(s.logits) for s in horizon.segments)


@pytest.mark.parametrize("horizon_tokens", [100, 4096])
def test_a_long_horizon_holds_few_arrays(horizon_tokens, monkeypatch):
    """An array for every row, layer and input: 450,000 of them in a horizon of 4,096 tokens, where
    Metal has room for 499,000 in all."""
    monkeypatch.setattr(room, "LINKED_ROWS", 64)
    monkeypatch.setattr(room, "MAX_ARRAYS", 3000)
    t = timeline("qwen3_next", horizon=horizon_tokens)
    t.sync(prompt(7))
    most = 0
    for token in prompt(min(360, 2 * horizon_tokens), seed=3):
        step(t, [token])
        most = max(most, arrays(t.horizon))
    assert t.horizon.room.is_dense and most < 3000
    low, end = t.horizon.low, t.pos
    assert end - low >= min(end, t.free_tokens())
    assert end - low > (300 if horizon_tokens > 360 else 99)
    for pos in (end - 65, end - 250, low):
        if pos >= low:
            assert t.rewind(pos).forwards == 0
            check(t)


def test_rows_are_copied_together_a_little_at_a_time(monkeypatch):
    """Every 32 tokens a wait for thousands of copies, on a model with big states."""
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 10**9)
    t = timeline("qwen3_next", horizon=256)
    joined, join = [0], Tape.compact

    def compact(tape, first, stop):
        joined[-1] += min(stop, tape.layers) - first
        return join(tape, first, stop)

    monkeypatch.setattr(Tape, "compact", compact)
    t.sync(prompt(7))
    for token in prompt(100, seed=3):
        joined.append(0)
        step(t, [token])
    assert not t.horizon.room.is_dense and max(joined) == 1 and sum(joined) == 3 * 3
    packed = t.horizon.segments[1:4]
    assert [len(s.tape.arrays()) for s in packed] == [t.recorder.sizes.row_arrays] * 3
    check(t)


@pytest.mark.parametrize(
    "name",
    [  # the others are the same by hand: see `test_timeline_by_hand.py`
        "deepseek_v41",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_next", "gemma3_text")),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
    ],
)
def test_what_the_horizon_leaves_is_kept_while_a_call_runs(name):
    """Checkpoints were taken at the live end: four or more lay where all is free anyway, and each
    made plain decoding wait."""
    t = timeline(name, horizon=40)
    t.sync(prompt(9))
    t.feed([1])
    for token in prompt(170, seed=2):
        t.feed([token])
        t.evaluate(wait=False)
        t.commit(1)
    assert t.open_blocks == 1
    kept = [f.pos for f in t.checkpoints.kept if f.kind == "block"]
    assert len(kept) == 2 and kept[-1] <= t.horizon.low
    for pos in kept:
        twin = t.fork()
        assert (twin.rewind(pos).forwards, twin.pos) == (0, pos)
        check(twin)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n > 1 else ()) for n in range(4)]
)
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", "gemma3_text"])
def test_what_is_promised_is_free_whatever_was_fed(name, seed):
    """Short of budget 109 tokens were promised and 5 were free: rows of single tokens take more,
    old tape was kept without its logits, and a second checkpoint pushed all rows out."""
    dice = random.Random(f"{name} {seed}")
    budget = dice.randrange(150_000, 1_200_000)
    t = timeline(name, horizon=dice.choice((48, 160)), mb=0)
    t.limits = replace(t.limits, budget_bytes=2 * budget)
    t.load_state(t.state())  # a horizon for that budget
    t.sync(prompt(dice.randrange(4, 90)))
    begin = furthest = t.pos
    for _ in range(40):
        rows = dice.choice((1, 1, 1, 1, 2, 8))
        step(t, prompt(rows, seed=t.pos), kept=dice.randint(1, rows))
        if dice.random() < 0.1:
            t.rewind(max(begin, t.pos - dice.randrange(12)))
        furthest = max(furthest, t.pos)
        low = max(begin, furthest - t.free_tokens())
        assert not any(t.plan(pos).forwards for pos in range(low, t.pos + 1)), (t.pos, low)
        assert t.horizon.nbytes <= budget or len(t.horizon.segments) == 1
        assert t.horizon.about_bytes >= t.horizon.nbytes
    assert t.free_tokens() > 0
    t.rewind(max(low, t.pos - 9))
    check(t)


@pytest.mark.parametrize(
    ("name", "horizon", "chunk"),
    [
        *((name, 16, 64) for name in FAMILIES),
        *((name, 0, 64) for name in ("qwen3_next", "deepseek_v41")),
        ("qwen3_next", 0, 1),
        pytest.param("deepseek_v41", 0, 1, marks=pytest.mark.slow),
    ],
)
def test_what_a_sync_read_last_is_a_record(name, horizon, chunk):
    """The last call was longer than what DeepSeek V4.1 holds: its first rows were not free."""
    t = timeline(name, horizon=horizon, chunk=chunk)
    t.sync(prompt(100))
    t.sync([*t.tokens, *prompt(70, seed=5)])
    start, end = t.last_block
    assert start < end == 170
    assert not any(t.plan(pos).forwards for pos in range(start, end + 1))
    for pos in (start, end, (start + end) // 2, start + 1, end):
        t.rewind(pos)
        check(t)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "gemma3_text"])
def test_a_prompt_read_in_short_calls_is_within_the_horizon_too(name):
    """What `max_rollback` promises holds right after a prompt, however it was cut into calls."""
    t = timeline(name, horizon=20, chunk=6)
    t.sync(prompt(50))
    for pos in range(49, 29, -1):
        assert t.rewind(pos).forwards == 0
        check(t)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", "rwkv7", "falcon_h1"])
def test_a_long_call_is_replayed_from_near(name):
    """Right after a prompt, going back a little must not replay hundreds of rows."""
    t = timeline(name)
    t.sync(prompt(400))
    end = t.pos
    for pos in (399, 385, 384, 383, 300, 256, 255, 200, 145):
        assert t.horizon.path(pos)[2] <= 128
        assert t.rewind(pos).forwards == 0
        check(t)
    t.rewind(end)
    step(t, [1, 2, 3], kept=1)
    check(t)


@pytest.mark.parametrize("name", one_of_each(FAMILIES))
def test_the_record_of_a_replay_answers_for_every_position_of_it(name):
    """A rewind that had to feed tokens leaves a record too, its start included."""
    t = timeline(name, horizon=8, chunk=512)
    t.sync(prompt(30))
    for i in range(40):
        step(t, [i])
    t.rewind(22)
    start, end = t.last_block
    for pos in range(max(start, 1), end + 1):
        assert t.plan(pos).forwards == 0
        t.rewind(pos)
        check(t)


@pytest.mark.parametrize("name", HYBRIDS)
def test_short_of_budget_the_oldest_positions_go(name):
    """Memory goes where it frees positions: every one that tape or logits are kept for is free."""
    t = timeline(name, horizon=30)
    t.sync(prompt(12))
    for i in range(40):
        step(t, [i])
    before = t.horizon.low
    t.horizon.budget_bytes = t.horizon.nbytes - 20 * V * 4
    step(t, [1])
    low, end = t.horizon.low, t.pos
    assert before < low < end and t.horizon.rows() == range(low, end + 1)
    assert t.horizon.nbytes <= t.horizon.budget_bytes
    for pos in (low, low + 1, end - 1):
        twin = t.fork()
        assert twin.rewind(pos).forwards == 0
        check(twin)
    assert t.rewind(low - 1).forwards > 0
    check(t)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in KINDS and n != "deepseek_v41" else pytest.mark.slow)
        for n in HYBRIDS
    ],
)
def test_going_back_far_costs_at_most_the_depth_plus_a_block(name):
    """The promise of checkpoints, in counted tokens and in one batched call."""
    t = timeline(name, horizon=32, chunk=512)
    t.sync(prompt(8))
    rng = random.Random(3)
    while t.pos < 330:
        step(t, [rng.randrange(V) for _ in range(5)])
    whole = t.tokens[:]
    for depth in (33, 60, 120, 250):
        fed = t.counters.fed_tokens
        report = t.rewind(len(whole) - depth)
        assert t.counters.fed_tokens - fed == report.replayed <= depth + 64
        # A compressed layer's call drops what its slack does not hold: the record's is its own.
        slack = t.limits.slack_tokens if name == "deepseek_v41" else report.replayed
        assert report.forwards <= 1 + (report.replayed > slack)
        check(t)
        t.sync(whole)
        check(t)


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_marks_lie_inside_long_calls(name):
    """Between the ends of two calls of a long prompt, half a call had to be read again."""
    t = timeline(name, horizon=16, chunk=200)
    t.sync(prompt(4))  # shows what a row costs
    whole = prompt(504)
    t.sync(whole)
    checkpoints = [f.pos for f in t.checkpoints.kept]
    assert checkpoints == [104, 232, 304, 432]
    for pos in (503, 432, 400, 303, 232, 150):
        fed = t.counters.fed_tokens
        assert t.rewind(pos).replayed == t.counters.fed_tokens - fed <= 128
        check(t)
        t.sync(whole)
        check(t)


def test_no_call_is_longer_than_a_chunk(monkeypatch):
    """What is read again, or read last, in one call of any length: its memory is not bounded."""
    t, sizes, feed = timeline("qwen3_next", horizon=4, chunk=8), [], Timeline.feed
    monkeypatch.setattr(
        Timeline, "feed", lambda t, tokens, **k: sizes.append(len(tokens)) or feed(t, tokens, **k)
    )
    t.sync(prompt(30))
    assert sum(sizes) == 30 and max(sizes) == 8
    for pos in (27, 13):
        t.sync(prompt(60))
        sizes.clear()
        report = t.rewind(pos)
        assert sum(sizes) == report.replayed and max(sizes) <= 8 and len(sizes) == report.forwards
        check(t)


def test_an_exact_repeat_feeds_nothing():
    """`/retry` right after a reply, or the same prompt twice, must not read it again."""
    for name in FAMILIES:
        t = timeline(name)
        t.sync(prompt(20))
        fed = t.counters.fed_tokens
        report = t.sync(prompt(20))
        assert (t.counters.fed_tokens - fed, report.forwards) == (0, 0)


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3_next", "gemma3_text", pytest.param("deepseek_v41", marks=pytest.mark.slow)],
)
def test_nothing_leaks(name):
    """Hundreds of blocks, then a fresh start: memory is back, and arrays do not pile up."""
    t = timeline(name, horizon=32)
    t.sync(prompt(16))
    step(t, [1])
    gc.collect()
    mx.clear_cache()
    t.sync([])
    before = mx.get_active_memory()
    t.sync(prompt(16))
    sizes = []
    for i in range(120):
        step(t, [i % V, 3, 4], kept=1 + i % 3)
        sizes.append(len(t.horizon.segments))
    assert max(sizes) <= 64
    t.sync([])
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() <= before * 1.01 + 4096


@pytest.mark.parametrize("mb", [512, 0.25])
def test_the_number_of_arrays_is_bounded(mb):
    """Single tokens leave arrays of their own: they must go with the horizon, or be joined where
    one state serves all of it (as with 0.25 MB here)."""
    t = timeline("qwen3_next", horizon=64, mb=1)
    t.horizon.budget_bytes = int(mb * 2**20)
    t.sync(prompt(16))
    counts = []
    for i in range(260):
        step(t, [i % V])
        held = [s for s in t.horizon.segments if s.tape is not None]
        counts.append(sum(len(s.tape.arrays()) + len(s.logits) for s in held))
    assert max(counts[200:]) == max(counts[130:200])
    assert max(counts) <= (64 + 64) * (1 + 16)


def test_few_checkpoints_stay_where_a_state_is_large():
    """A session begins with states of no bytes: they must not pass for cheap ones from then on."""
    t = timeline("qwen3_next", horizon=128)
    t.horizon.budget_bytes = 20 * sum(x.nbytes for x in _states(t))
    t.sync(prompt(16))
    for i in range(200):
        step(t, [i % V])
    assert t.horizon.room.spacing is None
    assert sum(s.checkpoint is not None for s in t.horizon.segments) <= 3
    runs = [s for s in t.horizon.segments if s.start > 16 and s.rows > 1]
    assert runs and all(len(s.tape.arrays()) == 3 * 5 for s in runs), "rows are copied together"


def _states(t):
    """The recurrent states of a model after one token."""
    twin = t.fork()
    twin.sync([1])
    return [x for a in twin.adapters if not a.seekable for x in a.arrays()]


# What `drive` keeps within reach; what it writes beyond a checkpoint in a detour.
HORIZON, OVERWRITTEN = 16, 30


class Driven:
    """A timeline under a list of operations, compared with a fresh one after every move."""

    def __init__(self, name, seed):
        self.dice, self.sources = random.Random(seed), set()
        self.t = timeline(name, horizon=HORIZON, chunk=8)
        self.went(self.t.sync(prompt(10, seed=seed)))

    def went(self, report):
        self.sources.add(report.source)
        check(self.t)

    def tokens(self, n):
        return [self.dice.randrange(V) for _ in range(n)]

    def step(self, n, kept):
        step(self.t, self.tokens(n), min(n, kept))
        check(self.t)

    def rewind(self, depth):
        self.went(self.t.rewind(max(1, self.t.pos + len(self.t.redo_tokens) - depth)))

    def edit(self, depth, n):
        kept = max(0, self.t.pos - depth)
        self.went(self.t.sync([*self.t.tokens[:kept], *self.tokens(n)]))

    def fork(self, n):
        was, self.t = self.t, self.t.fork()
        step(was, self.tokens(n))
        check(self.t)

    def reload(self):
        state = self.t.state()
        made = self.t.made
        self.t = Noting(self.t.model, self.t.recorder, self.t.limits)
        self.t.load_state(state)
        self.t.made = made
        check(self.t)

    def detour(self, n, back, kept=False):
        """Mark a place, go on, go back to a little before it, write another text over it, and go
        to where the checkpoint was."""
        marked = self.t.pos
        self.t.checkpoint("turn")
        self.step(n, n)
        self.rewind(n + back)
        if kept:
            self.reload()
        self.edit(0, OVERWRITTEN)
        self.went(self.t.rewind(marked))

    def interrupt(self, index, n):
        model = self.t.model
        with failing_layer(model, index % len(model.layers)), pytest.raises(KeyboardInterrupt):
            self.t.feed(self.tokens(n))
        check(self.t)

    def reset(self):
        self.t.sync([])
        self.went(self.t.sync(prompt(5)))

    def apply(self, kind, a, b):
        """Carry out one operation: its name and two numbers."""
        if kind in ("rewind", "fork"):
            getattr(self, kind)(a)
        elif kind in ("reload", "reset"):
            getattr(self, kind)()
        elif kind == "kept detour":
            self.detour(a, b, kept=True)
        else:
            getattr(self, kind)(a, b)


def drive(name, operations, seed):
    """Carry the operations out; the sources that the moves came from."""
    driven = Driven(name, seed)
    for operation in operations:
        driven.apply(*operation)
    return driven.sources


# Always include: accepted >= 2 then a one-token step; two rewinds in a row; a rewind over the wrap;
# a checkpoint whose text is overwritten, with a save in between or without.
FIXED = [
    ("step", 5, 3),
    ("step", 1, 1),
    ("rewind", 2, 0),
    ("rewind", 1, 0),
    ("step", 8, 8),
    ("step", 8, 8),
    ("rewind", 14, 0),
    ("step", 2, 1),
    ("reload", 0, 0),
    ("rewind", 3, 0),
    ("fork", 3, 0),
    ("edit", 20, 9),
    ("interrupt", 1, 3),
    ("step", 3, 2),
    ("rewind", 0, 0),
    ("detour", 7, 3),
    ("kept detour", 7, 3),
    ("rewind", 10**6, 0),
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if ":" in n or n in TWINS else ()) for n in CFG],
)
def test_the_sequences_that_broke_other_tools(name):
    """Accepted >= 2 then a one-token step, rewinds in a row, a rewind across the wrap, a checkpoint
    of a text that is gone."""
    pytest.importorskip(f"mlx_lm.models.{name.split(':')[0]}")
    sources = drive(name, FIXED, seed=1)
    far = "trim" if timeline(name).can_cut else "frontier"
    assert sources == {"live", "block", "horizon", far, "rebuild"}


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_on_cuda_the_next_call_of_a_prompt_is_built_while_one_runs(name, monkeypatch):
    """The card waited for the host at every call of a prompt, and each prompt's calls were of
    lengths that nobody had met. No more than two run at once: each takes memory."""
    waits, evaluate, run = [], Timeline.evaluate, mx.eval

    def noted(self, *arrays, wait=True):
        waits.append((len(self._now.open[-1].feed), wait))
        evaluate(self, *arrays, wait=wait)

    def noted_row(*arrays):
        if isinstance(arrays[0], mx.array) and arrays[0].shape == (V,):
            waits.append("row before")
        run(*arrays)

    monkeypatch.setattr(Timeline, "evaluate", noted)
    monkeypatch.setattr(timeline_module.attention, "CHUNK", 8)
    t = timeline(name, chunk=16, horizon=8)
    t.sync(prompt(45))
    assert waits == [(13, True), (16, True), (16, True)]
    waits.clear()
    monkeypatch.setattr(timeline_module, "switch", SimpleNamespace(is_on=lambda: True))
    monkeypatch.setattr(mx, "eval", noted_row)
    t = timeline(name, chunk=16, horizon=8)
    t.sync(prompt(45))
    assert waits == [(16, False), (16, False), "row before", (13, True), "row before"]
    monkeypatch.undo()
    check(t)


@pytest.mark.parametrize("name", ["mamba2", "gemma3_text"])
@pytest.mark.parametrize("mb", [0, 1])
def test_a_session_without_horizon_may_have_any_budget(name, mb):
    """`--horizon-tokens 0 --rewind-mb 0` divided by zero."""
    t = timeline(name, horizon=0, mb=mb)
    t.sync(prompt(40))
    t.rewind(20)
    check(t)
