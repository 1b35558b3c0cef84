"""Several timelines in one model call: each must be what it is alone, token for token."""

import gc
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from unittest.mock import Mock, patch

import mlx.core as mx
import pytest
from oracle import TOLERANCE, engine, error, failing_layer, interrupts, one_of_each, prompt
from tiny import CFG, build

from ds4cli.caches import arena
from ds4cli.caches.build import adapt, build_caches, check_kv_bits
from ds4cli.caches.stack import Stack
from ds4cli.errors import ModelError, UsageError
from ds4cli.hooks.cuda import seats as attention_kernel
from ds4cli.lanes import arm as arm_module
from ds4cli.lanes import attention
from ds4cli.lanes.arm import Lanes
from ds4cli.lanes.batch import Batch
from ds4cli.rewind import together
from ds4cli.rewind.timeline import Limits, Timeline
from ds4cli.rewind.together import evaluate_together, feed_together, replay_together
from ds4cli.tape.recorder import Recorder
from ds4cli.tape.tape import Tape

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import host_cost

REFUSED = ("llama4", "deepseek_v41")
FAMILIES = [name for name in CFG if ":" not in name and name not in REFUSED]
BATCHES = ("qwen3_next", "mamba2", "rwkv7", "lfm2", "falcon_h1", "olmo_hybrid", "granitemoehybrid")
PROMPTS = (21, 9, 14)
# Per step and lane: the guesses fed beside the next token, and how many of them are kept.
STEPS = [((0, 0),) * 3, ((2, 1), (0, 0), (3, 0)), ((1, 1),) * 3, ((0, 0), (0, 0), (2, 2))]
# Sums over a call of several rows, where mlx-lm differs from itself by more.
LOOSE = {"mamba2": 5, "deepseek_v32": 5}


@lru_cache
def armed(name):
    model = build(name, scale=2.0)
    recurrent = any(not a.seekable for a in adapt(build_caches(model, 0)))
    return model, Recorder.arm(model) if recurrent else None


def timeline(name, n, horizon=64, kv_bits=None):
    """One that has read a prompt of n tokens."""
    model, recorder = armed(name)
    made = Timeline(model, recorder, Limits(horizon, 64 << 20, 512), kv_bits=kv_bits)
    made.sync(prompt(n, seed=n))
    return made


def new_caches(name, kv_bits=None):
    model, _ = armed(name)
    return lambda: build_caches(model, 80, kv_bits)


class Together:
    """Lanes of one model, beside a twin of each that runs alone."""

    def __init__(self, name, lanes, prompts=PROMPTS, **options):
        self.name, self.lanes = name, lanes
        self.timelines = [timeline(name, n, **options) for n in prompts]
        self.alone = [timeline(name, n, **options) for n in prompts]

    def step(self, blocks, which=None):
        """One call: a lane's next token and (guesses, kept) beside it. Compares what is left."""
        which = range(len(self.alone)) if which is None else which
        feeds = [self.feed(i, guesses) for i, (guesses, _) in zip(which, blocks, strict=True)]
        own = [self.timelines[i] for i in which]
        rows = feed_together(own, feeds, self.lanes)
        evaluate_together(own, *rows)
        for i, x, feed, (_, kept) in zip(which, rows, feeds, blocks, strict=True):
            expected = self.alone[i].feed(feed)
            self.alone[i].evaluate()
            assert x.shape == expected.shape
            assert mx.array_equal(x.argmax(-1), expected.argmax(-1))
            self.timelines[i].commit(1 + kept)
            self.alone[i].commit(1 + kept)
        self.check()

    def feed(self, i, guesses):
        alone, own = self.alone[i].logits, self.timelines[i].logits
        assert alone.argmax().item() == own.argmax().item()
        return [own.argmax().item(), *prompt(guesses, seed=self.alone[i].pos + i)]

    def check(self):
        allowed = TOLERANCE * LOOSE.get(self.name, 1)
        for own, alone in zip(self.timelines, self.alone, strict=True):
            assert own.tokens == alone.tokens
            assert all(a.pos() in (None, own.pos) for a in own.adapters)
            assert error(own.logits, alone.logits) < allowed

    def rewind(self, i, pos):
        """Without a model call, to where the lane stood alone."""
        report = self.timelines[i].rewind(pos)
        assert (report.forwards, self.alone[i].rewind(pos).forwards) == (0, 0)
        self.check()


@pytest.fixture
def arm(request):
    """Arms a tiny model for lanes; disarmed when the test is over."""

    def make(name, kv_bits=None):
        lanes = Lanes.arm(armed(name)[0], new_caches(name, kv_bits))
        request.addfinalizer(lanes.disarm)
        return lanes

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_lanes_are_what_they_are_alone(name, arm):
    """A neighbour's rows, mask, offset or state in a lane's: wrong text without a word. The tape of
    a joint call must replay as well as one of a call alone, whatever the neighbours fed."""
    both = Together(name, arm(name))
    for blocks in STEPS:
        both.step(blocks)
    for i, own in enumerate(both.timelines):
        both.rewind(i, own.pos - 2 - i)
    both.step(STEPS[1])
    both.step(STEPS[0])


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(name):
    """It must not run, and be left as it was."""
    model, _ = armed(name)
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ModelError, match="cannot run several texts in one call: "):
        Lanes.arm(model, new_caches(name))
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("tolerance", [5e-2, 1e-6])
def test_half_precision_is_judged_by_how_the_model_itself_rounds(monkeypatch, tolerance, is_wrong):
    """Guards: a deep model that rounds more than others refused; a limit that grows with that until
    a lane is given the rows of another."""
    model = build("qwen3_5", scale=2.0)
    model.set_dtype(mx.bfloat16)
    monkeypatch.setattr(arm_module, "_TOLERANCE_HALF", tolerance)
    true = arm_module.run

    def run(*args):
        rows, *rest = true(*args)
        return mx.roll(rows, int(is_wrong), axis=0), *rest

    monkeypatch.setattr(arm_module, "run", run)
    with pytest.raises(ModelError, match="differ from calls") if is_wrong else nullcontext():
        Lanes.arm(model, lambda: build_caches(model, 80)).disarm()


def test_disarming_gives_every_module_its_class_back():
    """A plain session would go on paying for lanes that are over."""
    model, _ = armed("qwen3_next")
    classes = [type(m) for m in model.modules()]
    lanes = Lanes.arm(model, new_caches("qwen3_next"))
    assert [type(m) for m in model.modules()] != classes
    lanes.disarm()
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("pairs", [1, 16])
def test_few_pairs_are_turned_in_small_batches_on_cuda(arm, monkeypatch, pairs):
    """Guards: a rotation of few pairs whose kernel cannot be started, after which no call works;
    mlx-lm's own batch of 16 ended so. Other rotations are one call."""
    lanes, rotation = arm("llama"), armed("llama")[0].layers[0].self_attn.rope
    monkeypatch.setattr(attention, "MIN_PAIRS", rotation.dims // 2 + 16 - pairs)
    monkeypatch.setattr(attention, "MOST_GROUPS", 2)
    both, sizes = Together("llama", lanes), []
    with monkeypatch.context() as inside, patch.object(mx.fast, "rope", noting(sizes)):
        inside.setattr(attention.switch, "is_backend", lambda: True)
        rows = feed_together(
            both.timelines, [both.feed(i, n) for i, n in enumerate((4, 0, 2))], lanes
        )
        mx.eval(rows)
        assert max(sizes) == (2 if pairs == 1 else 9)
        for t in both.timelines:
            t.abort()
        sizes.clear()
        both.step(STEPS[0])  # a batch
    assert max(n for n in sizes if n > 1) == (2 if pairs == 1 else 3)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt_oss"])
def test_an_arena_is_read_by_places(arm, name, monkeypatch):
    """Guards: a kernel told of another lane's seat, position or window. Here plain operations stand
    in for it; a card tests the kernel itself. Sinks are left to mlx-lm's form."""
    lanes, calls = arm(name), []

    def attention(queries, keys, values, rows, columns, scale, window):
        calls.append(len(queries))
        at, column = columns.reshape(-1, 1, 1, 1), mx.arange(keys.shape[2])
        seen = column <= at if window is None else (column <= at) & (column > at - window)
        return mx.fast.scaled_dot_product_attention(
            queries, keys[rows], values[rows], scale=scale, mask=seen
        )

    monkeypatch.setattr(attention_kernel, "fits", lambda *arrays: True)
    monkeypatch.setattr(attention_kernel, "attention", attention)
    both = Together(name, lanes)
    for blocks in (STEPS[0], STEPS[1], STEPS[0], STEPS[0]):
        both.step(blocks)
    both.step(STEPS[0][:2], which=(0, 2))
    assert (3 in calls and 2 in calls) is (name != "gpt_oss")


def noting(sizes):
    """MLX's rotation, which notes how many entries its batches have."""
    rope = mx.fast.rope

    def noted(x, *args, **options):
        sizes.append(x.shape[0])
        return rope(x, *args, **options)

    return noted


def test_a_model_is_tried_once():
    """Each batch, or each retry in a chat, would pay for a dozen calls before its first token; and
    the first of two that is over took the lanes of the other."""
    made = engine("qwen3_next")
    classes = [type(m) for m in made.model.modules()]
    first = made.lanes()
    forwards = Mock(side_effect=AssertionError("a model call"))
    with patch.object(arm_module, "run", forwards):
        second = made.lanes()
    assert second is first
    first.disarm()
    assert [type(m) for m in made.model.modules()] != classes
    second.disarm()
    assert [type(m) for m in made.model.modules()] == classes
    layer = made.model.layers[0]
    layer.__class__ = type("Other", (type(layer),), {})
    third = made.lanes()
    assert third is not first
    third.disarm()


def test_a_joint_step_costs_the_host_about_what_a_call_alone_does():
    """Per lane and layer, Python and nodes of the graph: on a GPU they are most of a step."""
    lanes = Lanes.arm(armed("llama")[0], new_caches("llama"))
    own = [timeline("llama", n) for n in (5, 6, 7, 8)]
    for _ in range(3):
        rows = feed_together(own, [[1]] * 4, lanes)
        nodes = host_cost.nodes([mx.concatenate(rows)])
        evaluate_together(own)
        for t in own:
            t.commit(1)
    lanes.disarm()
    alone = timeline("llama", 5)
    assert nodes <= 1.3 * host_cost.nodes([alone.feed([1])])


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "falcon_h1"])
def test_a_failure_in_the_call_leaves_every_lane_where_it_was(name, arm):
    """Half of the lanes one token ahead of the others, or of their own layers."""
    both = Together(name, arm(name))
    for feeds in ([[5, 6], [7], [8]], [[5], [7], [8]]):
        both.step(STEPS[0])
        for index in range(len(both.alone[0].model.layers)):
            with failing_layer(both.alone[0].model, index), pytest.raises(KeyboardInterrupt):
                feed_together(both.timelines, feeds, both.lanes)
            both.check()
            assert not any(t.open_blocks for t in both.timelines)
    both.step(STEPS[0])
    both.step(STEPS[1])


def test_an_interrupt_at_any_line_leaves_every_lane_where_it_was(arm):
    """Ctrl-C between the openings of two blocks: one lane a token ahead of the others."""
    both, lines = Together("qwen3_next", arm("qwen3_next"), (5, 3)), 0
    inside = feed_together, together._call, Timeline.open, Batch.call, Stack.__init__
    for feeds in ([[5, 6], [7]], [[5], [7]]):
        for interrupted in interrupts(*inside):
            with interrupted:
                feed_together(both.timelines, feeds, both.lanes)
            lines += interrupted.struck
            if not interrupted.struck:
                [t.abort() for t in both.timelines]
            assert not any(t.open_blocks for t in both.timelines)
            both.check()
    both.step(((0, 0), (0, 0)))
    assert lines > 60


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_lanes_join_end_and_go_on_alone(name, arm):
    """A lane that was alone, or is again, has other caches than one that never left."""
    both = Together(name, arm(name))
    both.step(((0, 0), (1, 1)), which=[0, 2])
    both.step(STEPS[1])
    both.step(((2, 1),), which=[1])
    both.rewind(2, both.timelines[2].pos - 1)
    both.step(((0, 0), (0, 0)), which=[2, 1])
    both.step(STEPS[3])


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_calls_run_one_ahead(name, arm):
    """The next call is built on tokens that are not known yet; it must see each lane's own."""
    both = Together(name, arm(name))
    picks = [both.feed(i, 0) for i in range(3)]
    texts = [[] for _ in picks]
    ahead = [mx.array(p, mx.int32) for p in picks]
    for step in range(5):
        rows = feed_together(both.timelines, ahead, both.lanes)
        ahead = [r.argmax(-1).astype(mx.int32) for r in rows]
        evaluate_together(both.timelines, *ahead, wait=False)
        for text, t in zip(texts, both.timelines, strict=True) if step else ():
            text += t.commit(1)
    for text, t in zip(texts, both.timelines, strict=True):
        text += t.commit(1)
    for alone, text in zip(both.alone, texts, strict=True):
        for token in text:
            assert alone.logits.argmax().item() == token
            alone.feed([token])
            alone.evaluate()
            alone.commit(1)
    both.check()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "falcon_h1", "rwkv7"])
def test_lanes_of_a_batch_move_alone(name, arm):
    """States that stay stacked, and cursors that move as one: a lane that went back, ran alone, was
    looked at or forked in between was given the state of another moment, or of another lane."""
    both, calls = Together(name, arm(name)), []
    call = Batch.call

    def noted(*args):
        calls.append(len(args[1]))
        return call(*args)

    with patch.object(Batch, "call", noted):
        for _ in range(3):
            both.step(STEPS[0])
        both.rewind(1, both.timelines[1].pos - 2)
        both.step(STEPS[0])
        assert all(mx.isfinite(x).all() for a in both.timelines[2].adapters for x in a.arrays())
        both.step(STEPS[0])
        for t in (both.timelines[0], both.alone[0]):
            t.sync([*t.tokens, 7, 8])
        both.timelines.append(both.timelines[2].fork())
        both.alone.append(both.alone[2].fork())
        for _ in range(2):
            both.step(((0, 0),) * 4)
        both.rewind(3, both.timelines[3].pos - 3)
        both.step(((0, 0),) * 4)
        both.step(((0, 0),) * 2, which=(1, 3))
    assert calls[:5] == [3] * 5 and calls[5:8] == [4] * 3
    both.step((*STEPS[1], (0, 0)))


@pytest.mark.parametrize("name", ["llama", *one_of_each(BATCHES)])
def test_blocks_of_a_batch_are_cut_at_once(name, arm):
    """Equally many rows a lane, of which each keeps its own: rows of another lane in a state, one
    that kept all of them cut, or none of the joint replay where a guard kept others than the model
    agreed with. Guards against a replay for each lane, too."""
    both, replays, replay = Together(name, arm(name)), [], Tape.replay

    def noted(tape, starts, rows):
        replays.append(rows)
        return replay(tape, starts, rows)

    both.step(STEPS[0])
    for size, kept, said, own in (
        (4, (1, 4, 2), (1, 4, 2), 0),
        (2, (1, 1, 2), (1, 1, 2), 0),
        (2, (2, 2, 2), (2, 2, 2), 0),
        (5, (5, 3, 1), (5, 3, 1), 0),
        (4, (3, 4, 2), (4, 4, 4), 2),
        (4, (4, 1, 3), (2, 4, 3), 2),
        (3, (1, 2, 3), (1, 2, 3), 0),
    ):
        feeds = [both.feed(i, size - 1) for i in range(3)]
        rows = feed_together(both.timelines, feeds, both.lanes)
        evaluate_together(both.timelines, *rows)
        replays.clear()
        with patch.object(Tape, "replay", noted):
            replay_together(both.timelines, said)
            for t, n in zip(both.timelines, kept, strict=True):
                t.commit(n)
        assert len(replays) == (own if both.timelines[0].recorder else 0)
        for t, feed, n in zip(both.alone, feeds, kept, strict=True):
            t.feed(feed)
            t.evaluate()
            t.commit(n)
        both.check()
    both.step(STEPS[0])
    both.rewind(0, both.timelines[0].pos - 3)
    both.step(STEPS[0])


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_a_call_with_guesses_after_others_is_undone(name, arm):
    """What undoes it was of the call before: the lane stood rows before its own position."""
    both = Together(name, arm(name))
    for _ in range(2):
        both.step(STEPS[1])
        both.step(STEPS[1])
        feed_together(both.timelines, [[5, 6], [7], [8, 9]], both.lanes)
        for t in both.timelines:
            t.abort()
        both.check()
    both.rewind(0, both.timelines[0].pos - 1)
    both.step(STEPS[1])


def test_a_lane_of_a_batch_can_be_undone_and_gone_on_from(arm):
    """A hold that was taken of a seat, kept while its cursor moved by itself."""
    both = Together("llama", arm("llama"))
    both.step(STEPS[0])
    own = both.timelines[0]
    for back in (1, 3):
        opening = own.opening()
        own.caches[1].offset -= back
        own.undo(opening)
        both.check()
        both.rewind(0, own.pos - back)
        both.step(STEPS[0])
    feed_together(both.timelines, [[1], [2], [3]], both.lanes)
    feed_together(both.timelines, [[4], [5], [6]], both.lanes)
    for t in both.timelines:
        t.abort()
    both.step(STEPS[0])


@pytest.mark.parametrize("how", ["fails", "is wrong"])
def test_a_model_that_no_batch_can_run_goes_on_in_lanes(arm, monkeypatch, how):
    """Refused as a whole, or run with what differs from calls alone."""
    call = Batch.call

    def broken(*args):
        rows, live = call(*args)
        if how == "fails":
            raise TypeError("no such answer")
        return mx.roll(rows, 1, axis=0), live

    monkeypatch.setattr(Batch, "call", broken)
    both = Together("llama", arm("llama"))
    for blocks in STEPS:
        both.step(blocks)


@pytest.mark.parametrize("name", ["llama:64", "qwen3_next:128"])
def test_quantised_keys_and_values(name, arm):
    """Rows are packed by the cache of their lane."""
    try:
        check_kv_bits(armed(name)[0], 8, 64)
    except UsageError as error:
        pytest.skip(error.message)  # MLX has no such kernel on this backend
    both = Together(name, arm(name, kv_bits=8), kv_bits=8)
    for blocks in STEPS:
        both.step(blocks)
    both.rewind(0, both.timelines[0].pos - 2)
    both.step(STEPS[1])


def test_a_lane_that_is_not_a_number_spoils_no_other(arm):
    """Keys of a broken lane, masked or not, must not reach its neighbours."""
    both = Together("llama", arm("llama"))
    broken = both.timelines[1]
    for adapter in broken.adapters:
        adapter.cache.values[..., :3, :] = mx.nan
    for _ in range(2):
        feeds = [both.feed(0, 1), [1] * 3, both.feed(2, 0)]
        rows = feed_together(both.timelines, feeds, both.lanes)
        evaluate_together(both.timelines, *rows)
        assert mx.isnan(rows[1]).all().item()
        for i in (0, 2):
            expected = both.alone[i].feed(feeds[i])
            both.alone[i].evaluate()
            assert error(rows[i], expected) < TOLERANCE
            both.alone[i].commit(1)
            both.timelines[i].commit(1)
        broken.abort()


def test_a_fork_of_a_lane_is_its_own(arm):
    """A branch shares rows with its lane until one of them writes."""
    both = Together("llama", arm("llama"))
    both.step(STEPS[1])
    both.timelines.append(both.timelines[0].fork())
    both.alone.append(both.alone[0].fork())
    both.step((*STEPS[1], (1, 0)))
    both.rewind(3, both.timelines[3].pos - 3)
    both.step((*STEPS[1], (3, 3)))


def checkpoints_after(tokens):
    """The arrays of the recurrent checkpoints that one of four lanes keeps, nothing else of them
    being alive."""
    lanes = Lanes.arm(armed("qwen3_next")[0], new_caches("qwen3_next"))
    own = [timeline("qwen3_next", n) for n in (5, 6, 7, 8)]
    for token in range(tokens):
        rows = feed_together(own, [[token % 90]] * len(own), lanes)
        evaluate_together(own, *rows)
        for t in own:
            t.commit(1)
    lanes.disarm()
    kept = [s.checkpoint for s in own[0].horizon.segments[1:-1] if s.checkpoint is not None]
    return [x for slots in kept for layer in slots for x in layer]


def test_a_kept_checkpoint_holds_no_neighbours_state():
    """A view of the stacked states kept those of every lane alive, once per lane and checkpoint."""
    checkpoints_after(2)  # what is made once
    gc.collect()
    before = mx.get_active_memory()
    arrays = checkpoints_after(40)
    mx.eval(arrays)
    gc.collect()
    assert arrays
    # MLX leaves what would save less than this.
    assert mx.get_active_memory() - before <= sum(x.nbytes + 16384 for x in arrays)


def test_seats_are_taken_again(arm):
    """An arena that grows with every lane that ever was, or a row that two lanes write to."""
    both = Together("llama", lanes := arm("llama"))
    both.step(STEPS[0])
    seating = lanes._seating
    for n in (4, 17, 30):
        both.timelines[1], both.alone[1] = timeline("llama", n), timeline("llama", n)
        both.step(STEPS[1])
        assert len(seating._seats) == 3
    assert {c.seat.row for t in both.timelines for c in t.caches} == {0, 1, 2}
    both.timelines[3:] = [timeline("llama", n) for n in range(3, 9)]
    both.alone[3:] = [timeline("llama", n) for n in range(3, 9)]
    both.step(((1, 1),) * 9)
    del both.timelines[1:], both.alone[1:]
    both.timelines.append(timeline("llama", 6))
    both.alone.append(timeline("llama", 6))
    both.step(((1, 0), (2, 2)))
    assert len(seating._seats) == 2
    del both.timelines[0], both.alone[0]
    both.step(((1, 0),))
    assert len(seating._seats) == 1


def test_a_lane_that_is_much_longer_has_no_seat(arm, monkeypatch):
    """Every row of an arena is as long as its longest: one long text would make all lanes slow."""
    monkeypatch.setattr(arena, "STEP", 2)
    both = Together("llama", arm("llama"), (60, 5, 3, 6, 4))
    both.step(((1, 0), (1, 1), (0, 0), (2, 2), (0, 0)))
    seated = [isinstance(t.caches[0], arena.SeatedKVCache) for t in both.timelines]
    assert seated == [False, True, True, True, True]
    both.step(((0, 0),) * 5)
    for t in (both.timelines[1], both.alone[1]):
        t.sync(prompt(80))
    both.step(((1, 1), (1, 0), (0, 0), (0, 0), (0, 0)))
    assert not isinstance(both.timelines[1].caches[0], arena.SeatedKVCache)
    both.rewind(1, 75)
    both.step(((0, 0),) * 5)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_lane_is_saved_and_loaded_as_any_session(name, arm):
    """What lies in an arena is the lane's own rows, and nobody else's."""
    both = Together(name, arm(name))
    both.step(STEPS[1])
    state = both.timelines[1].state()
    fresh = timeline(name, 0)
    fresh.load_state(state)
    both.timelines[1] = fresh
    both.check()
    both.step(STEPS[1])


def test_a_short_horizon_moves_on_without_a_replay():
    """Rows that nobody goes back to were replayed one by one, only to be dropped next: a kernel a
    layer, lane and token."""
    own = timeline("qwen3_next", 5, horizon=32)
    with patch.object(Tape, "replay", side_effect=AssertionError("a replay")):
        for _ in range(100):
            own.feed([1])
            own.evaluate()
            own.commit(1)
    assert own.rewind(own.pos - 32).forwards == 0
