"""Recording and replaying recurrences: a replayed slot is the slot a model call would have left."""

from __future__ import annotations

import importlib
import io
import sys
import threading
from itertools import chain
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
import simulated_metal
import tiny
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ds4cli.errors import ModelError
from ds4cli.hooks import delta
from ds4cli.tape import families
from ds4cli.tape.check import self_check
from ds4cli.tape.families import leaf
from ds4cli.tape.recorder import FAMILIES, Recorder, arrays_caches
from ds4cli.tape.tape import Tape

RECURRENT = [
    "qwen3_next",
    "qwen3_5",
    "olmo_hybrid",
    "kimi_linear",
    "kimi_k3",
    "bailing_moe_v3",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "granitemoehybrid",
    "plamo2",
    "mamba",
    "jamba",
    "rwkv7",
    "lfm2",
    "lfm2_moe",
    "gear",
    "baichuan_m1",
    "bailing_moe_linear",
    "bailing_hybrid",
    "recurrent_gemma",
    "longcat_flash_ngram",
]
PROMPT, BLOCK, TEXT = tiny.ids(7, 1), tiny.ids(5, 2), tiny.ids(11, 3)
NEXT = tiny.ids(1, 4)


def feed(model, caches, tokens):
    logits = model(tokens[None], cache=caches)
    mx.eval(logits, slots(caches))
    return logits[0, -1]


def slots(caches):
    return [list(c.cache) for c in arrays_caches(caches)]


def put(caches, values):
    """Replace the recurrent slots and cut the rows of the other caches to `rows`."""
    for cache, layer in zip(arrays_caches(caches), values, strict=True):
        cache.cache = list(layer)


def fresh(model, *chunks):
    """Caches after feeding the chunks."""
    caches = make_prompt_cache(model)
    for chunk in chunks:
        feed(model, caches, chunk)
    return caches


def record(model, recorder, caches, tokens, inner_every=0):
    with recorder.recording(arrays_caches(caches), inner_every) as tape:
        logits = model(tokens[None], cache=caches)
    mx.eval(logits, tape.arrays())
    return tape


def error(got, want):
    """Largest difference over all slots, relative to the largest entry of each."""
    worst = 0.0
    for a, b in zip(chain(*got), chain(*want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = max(1.0, mx.max(mx.abs(b)).item())
        worst = max(worst, mx.max(mx.abs(a - b)).item() / scale)
    return worst


@pytest.fixture(scope="module", params=RECURRENT)
def armed(request):
    model = tiny.build(request.param, scale=1.5)
    return model, Recorder.arm(model)


def test_what_is_recorded_comes_with_the_logits(armed):
    """Recorded rows that nobody evaluates keep the graph of their step, and of all before, alive;
    evaluating them would be an output, and often a copy, per layer and token."""
    model, recorder = armed
    caches = fresh(model, PROMPT)
    with recorder.recording(arrays_caches(caches)) as tape:
        logits = model(NEXT[None][:, :1], cache=caches)
    mx.eval(logits)
    graph = io.StringIO()
    mx.export_to_dot(graph, *tape.arrays())
    assert graph.getvalue().count("shape=rectangle") <= len(tape.arrays())  # views


def test_replay_equals_a_model_call_of_the_kept_rows(armed):
    """A recurrence replayed with a wrong row, gate, history or start state."""
    model, recorder = armed
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    tape = record(model, recorder, caches, BLOCK)
    assert tape.rows == len(BLOCK)
    for keep in range(1, len(BLOCK) + 1):
        want = fresh(model, PROMPT, BLOCK[:keep])
        got = tape.replay(starts, keep)
        assert error(got, slots(want)) < 2e-5
        if keep in (1, 4):
            expected = feed(model, want, NEXT)
            again = fresh(model, PROMPT, BLOCK[:keep])
            put(again, got)
            assert mx.allclose(feed(model, again, NEXT), expected, atol=2e-5)


def test_concatenated_tapes_replay_like_one_text(armed):
    """Calls of different widths, single tokens too, that do not join, or not from a new cache."""
    model, recorder = armed
    caches, tapes, done = make_prompt_cache(model), [], 0
    starts = slots(caches)
    for width in (1, 1, 3, 1, 5):
        tapes.append(record(model, recorder, caches, TEXT[done : done + width]))
        done += width
    tape = Tape.concat(tapes)
    assert tape.rows == len(TEXT)
    reached = slots(caches)
    assert error(tape.replay(starts, len(TEXT)), reached) < 2e-5
    for rows in (1, 2, 4, 6):
        assert error(tape.replay(starts, rows), slots(fresh(model, TEXT[:rows]))) < 2e-5
        rest = tape.last(len(TEXT) - rows)
        assert error(rest.replay(tape.replay(starts, rows), rest.rows), reached) < 2e-5
        assert error(tape.first(rows).replay(starts, rows), tape.replay(starts, rows)) == 0


@pytest.mark.parametrize(
    "name", ["qwen3_5", "kimi_linear", "mamba2", "jamba", "rwkv7", "bailing_hybrid"]
)
def test_long_tapes_replay_in_parts(name):
    """A replay of more rows than one chunk that loses the state between chunks."""
    model = tiny.build(name)
    recorder = Recorder.arm(model)
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    tape = record(model, recorder, caches, tiny.ids(75, 9))
    assert error(tape.replay(starts, 75), slots(caches)) < 2e-5
    assert error(tape.replay(starts, 41), slots(fresh(model, PROMPT, tiny.ids(75, 9)[:41]))) < 2e-5


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_states_inside_a_call_are_those_of_its_rows(name, monkeypatch):
    """A state kept on the way that belongs to another row, or is lost or moved by a cut or a join;
    or one that is computed again although it is kept."""
    model, text = tiny.build(name), tiny.ids(75, 9)
    recorder = Recorder.arm(model)
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    tape = record(model, recorder, caches, text, inner_every=32)
    assert tape.inner_rows() == [32, 64] and tape.last(50).inner_rows() == [7, 39]
    parts = Tape.concat([tape.first(40), tape.last(35)])
    assert parts.inner_rows() == [32, 64]
    for rows in (31, 32, 33, 64, 70, 75):
        want = slots(fresh(model, PROMPT, text[:rows]))
        assert error(tape.replay(starts, rows), want) < 2e-5
        assert error(parts.replay(starts, rows), want) < 2e-5
    monkeypatch.setattr(delta, "final_state", None)
    tape.replay(starts, 64)


def test_self_check_accepts_every_family(armed):
    """The check that guards a load refusing a family that replays correctly."""
    model, recorder = armed
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).difference < 0.5


@pytest.fixture
def uncompiled():
    """Models run as they are written: compiling a shape that is run once takes a second."""
    mx.disable_compile()
    yield
    mx.enable_compile()


BACKENDS = ["this device", "simulated Metal"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch, uncompiled):
    """Where a model runs; returns what the simulated kernels note, None on this device."""
    simulated_metal.half_experts(monkeypatch)
    return simulated_metal.install(monkeypatch) if request.param != "this device" else None


def stored(name, kind):
    """A tiny model with its weights as users have them."""
    model = tiny.build(name, scale=1.5, dtype=mx.float32 if kind == "float32" else mx.bfloat16)
    return tiny.quantise(model) if kind == "4 bit" else model


STORED = ["float32", "bfloat16", "4 bit"]
# What most users have, and each kind of weights and each backend once; the others when asked for.
OFTEN = {("bfloat16", "this device"), ("4 bit", "simulated Metal")}
AS_STORED = [
    pytest.param(kind, place, marks=() if (kind, place) in OFTEN else pytest.mark.slow)
    for kind in STORED
    for place in BACKENDS
]


@pytest.mark.parametrize(("kind", "backend"), AS_STORED, indirect=["backend"])
@pytest.mark.parametrize("name", RECURRENT)
def test_self_check_accepts_every_family_as_stored_on_every_backend(name, kind, backend):
    """A family that loses its rewinds on the machines and with the weights that most users have."""
    model = stored(name, kind)
    recorder = Recorder.arm(model)
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).difference < 0.7


WITH_KERNEL = {
    "gated_delta_kernel": [
        "qwen3_next", "qwen3_next:128", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear",
        "kimi_k3", "bailing_moe_v3",
    ],
    "ssm_update_kernel": ["mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "plamo2"],
    "wkv7_kernel": ["rwkv7"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "name"), [(kernel, name) for kernel, names in WITH_KERNEL.items() for name in names]
)
def test_tiny_sizes_are_those_that_metals_kernels_take(kernel, name, monkeypatch, uncompiled):
    """A tiny model of sizes that a kernel gets silently wrong (fewer than 32 to a lane group), so
    that the tests fail on a Mac alone; or that never reach it, so that they say nothing."""
    calls = simulated_metal.install(monkeypatch)
    model = tiny.build(name)
    fresh(model, PROMPT, NEXT)
    assert set(calls) == {kernel}


@pytest.mark.parametrize(
    "name", ["mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "plamo2"]
)
def test_mamba2_on_metal_is_the_same_in_blocks_and_in_single_rows(name, monkeypatch, uncompiled):
    """Metal's kernel for one row and its form for several computing with different decays, because
    A_log is stored in half precision: drafts change the text and going back feeds tokens again."""
    simulated_metal.install(monkeypatch)
    model = stored(name, "bfloat16")
    Recorder.arm(model)
    mixers = [m for m in model.modules() if hasattr(m, "A_log")]
    assert mixers and all(m.A_log.dtype == mx.float32 for m in mixers)
    block = fresh(model, PROMPT, BLOCK)
    singles = fresh(model, PROMPT, *[BLOCK[i : i + 1] for i in range(len(BLOCK))])
    assert error([slots(block)[0]], [slots(singles)[0]]) < 1e-5, "the first layer has equal input"


def test_two_calls_in_one_recording_are_one_tape():
    """Rows of a second call inside the same recording lost or out of order."""
    model = tiny.build("mamba")
    recorder = Recorder.arm(model)
    caches = make_prompt_cache(model)
    starts = slots(caches)
    with recorder.recording(arrays_caches(caches)) as tape:
        feed(model, caches, BLOCK)
        feed(model, caches, NEXT)
    assert tape.rows == 6
    assert error(tape.replay(starts, 6), slots(caches)) < 2e-5


def test_dropped_convolution_rows_are_noticed():
    """A comparison too weak to see a wrong convolution history (negative control)."""
    model = tiny.build("lfm2")
    recorder = Recorder.arm(model)
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    tape = record(model, recorder, caches, BLOCK)
    want = slots(fresh(model, PROMPT, BLOCK[:3]))
    assert error(tape.replay(starts, 3), want) < 2e-5
    assert error(tape.replay(starts, 2), want) > 1e-2
    blank = [[mx.zeros_like(s) for s in layer] for layer in starts]
    assert error(tape.replay(blank, 1), tape.replay(starts, 1)) > 1e-2


def test_self_check_refuses_a_wrong_replay(monkeypatch):
    """A recurrence that changed upstream and is replayed by the old rule without a word."""
    from ds4cli.tape.families.ssd import SsdRows

    model = tiny.build("mamba2")
    recorder = Recorder.arm(model)
    replay = SsdRows.replay.__func__
    monkeypatch.setattr(
        SsdRows,
        "replay",
        classmethod(lambda cls, t, s, n: [x * 1.01 for x in replay(cls, t, s, n)]),
    )
    assert not self_check(model, recorder, lambda: make_prompt_cache(model)).accepts


def test_self_check_says_what_was_raised(monkeypatch):
    """A failure inside a replay read as a difference without measure: nobody learns what broke."""
    model = tiny.build("mamba2")
    recorder = Recorder.arm(model)

    def fail(*args):
        raise TypeError("replay() takes other arguments now\nand more lines")

    monkeypatch.setattr(Tape, "replay", fail)
    verdict = self_check(model, recorder, lambda: make_prompt_cache(model))
    assert not verdict.accepts
    said = "replaying the recurrences fails: TypeError: replay() takes other arguments now"
    assert str(verdict) == said


@pytest.mark.parametrize("rows", [24, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bailing_moe_linear", "bailing_hybrid", "rwkv7"])
def test_many_single_rows_in_half_precision_are_replayed_as_they_were_rounded(name, rows, backend):
    """A model that rounds its state, or what it adds to it, at every row, and a replay that does
    not: after 128 rows they are far apart, and a session that goes back is in another state."""
    model = stored(name, "bfloat16")
    recorder = Recorder.arm(model)
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    tapes = [record(model, recorder, caches, tiny.ids(1, i)) for i in range(rows)]
    tapes.append(record(model, recorder, caches, BLOCK))
    tape = Tape.concat(tapes)
    assert error(tape.replay(starts, tape.rows), slots(caches)) < 1e-5
    part = rows * 3 // 4
    halfway, rest = tape.replay(starts, part), tape.rows - part
    assert error(tape.last(rest).replay(halfway, rest), slots(caches)) < 1e-5
    assert error(tape.compact().replay(starts, part), halfway) == 0


def test_the_self_check_sees_what_adds_up_over_many_rows(monkeypatch):
    """A replay that is right for five rows and drifts away in a long reply, accepted."""
    from ds4cli.tape.families.lightning import GlaRows

    model = stored("bailing_moe_linear", "bfloat16")
    recorder = Recorder.arm(model)
    monkeypatch.setattr(GlaRows, "in_half", False)
    assert not self_check(model, recorder, lambda: make_prompt_cache(model)).accepts


def test_recording_changes_no_output_and_evaluates_nothing(monkeypatch):
    """Recording that costs a model call its laziness, or moves its numbers."""
    model = tiny.build("qwen3_5")
    plain = feed(model, make_prompt_cache(model), PROMPT)
    recorder = Recorder.arm(model)
    caches = make_prompt_cache(model)

    def refuse(*args):
        raise AssertionError("evaluated while recording")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", refuse)
        patch.setattr(mx, "async_eval", refuse)
        with recorder.recording(arrays_caches(caches)) as tape:
            logits = model(PROMPT[None], cache=caches)
        tape.replay([[None, None]] * 3, 4)
    assert mx.array_equal(logits[0, -1], plain)


def test_nothing_is_recorded_outside_or_by_other_caches():
    """A draft or a plain call leaking rows into a tape that is not its own."""
    model = tiny.build("qwen3_5")
    recorder = Recorder.arm(model)
    mine, other = make_prompt_cache(model), make_prompt_cache(model)
    with recorder.recording(arrays_caches(mine)) as tape:
        feed(model, other, PROMPT)
    assert tape.rows == 0 and tape.arrays() == []
    feed(model, mine, PROMPT)
    assert tape.rows == 0


def test_disarm_restores_classes_and_leaves_other_models_alone():
    """Hooks that outlive their model, or reach another model of the same class."""
    model, other = tiny.build("qwen3_5"), tiny.build("qwen3_5", seed=1)
    before = [type(m) for m in model.modules()]
    module = importlib.import_module("mlx_lm.models.qwen3_5")
    names = dict(vars(module))
    recorder = Recorder.arm(model)
    assert [type(m) for m in model.modules()] != before
    assert [type(m) for m in other.modules()] == before
    assert dict(vars(module)) == names
    recorder.disarm()
    assert [type(m) for m in model.modules()] == before


def test_recordings_of_two_models_nest():
    """Draft rows in the target's tape, or a target that stops recording when the draft starts."""
    target, draft = tiny.build("mamba2"), tiny.build("lfm2")
    recorders = Recorder.arm(target), Recorder.arm(draft)
    big, small = make_prompt_cache(target), make_prompt_cache(draft)
    starts = slots(big), slots(small)
    with recorders[0].recording(arrays_caches(big)) as outer:
        feed(target, big, BLOCK[:2])
        with recorders[1].recording(arrays_caches(small)) as inner:
            feed(draft, small, BLOCK[:1])
            feed(target, big, BLOCK[2:3])
            feed(draft, small, BLOCK[1:])
    assert (outer.rows, inner.rows) == (3, 5)
    assert error(outer.replay(starts[0], 3), slots(big)) < 2e-5
    assert error(inner.replay(starts[1], 5), slots(small)) < 2e-5


def test_another_thread_does_not_record():
    """Process-wide state: a call on another thread writes into this one's tape."""
    model = tiny.build("lfm2")
    recorder = Recorder.arm(model)
    caches, done = make_prompt_cache(model), []
    with recorder.recording(arrays_caches(caches)) as tape:
        # It only builds the graph: evaluation belongs to the thread that made the weights.
        worker = threading.Thread(target=lambda: done.append(model(BLOCK[None], cache=caches)))
        worker.start()
        worker.join(60)
    assert done and tape.rows == 0


def test_an_exception_inside_a_call_leaves_the_recorder_clean(monkeypatch):
    """A frame left open by a failed call, which makes the next recording wrong."""
    model = tiny.build("qwen3_5")
    recorder = Recorder.arm(model)
    caches = make_prompt_cache(model)
    layer = model.language_model.model.layers[1].linear_attn
    with monkeypatch.context() as patch:
        patch.setattr(type(layer.out_proj), "__call__", _fail)
        with pytest.raises(KeyboardInterrupt), recorder.recording(arrays_caches(caches)):
            model(BLOCK[None], cache=caches)
    caches = make_prompt_cache(model)
    starts = slots(caches)
    tape = record(model, recorder, caches, BLOCK)
    assert tape.rows == 5
    assert error(tape.replay(starts, 5), slots(caches)) < 2e-5


def _fail(*args):
    raise KeyboardInterrupt


def test_models_without_recurrent_caches_need_no_tape():
    """An error, or a useless tape, on a plain transformer."""
    model = tiny.build("llama")
    recorder = Recorder.arm(model)
    assert recorder.families == []
    caches = make_prompt_cache(model)
    with recorder.recording(arrays_caches(caches)) as tape:
        feed(model, caches, BLOCK)
    assert tape.rows == 0
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).difference == 0


def test_every_family_is_listed():
    """A recurrence in a file that nobody named, replayed module by module without a word."""
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {family.__name__.rpartition(".")[2] for family in (*FAMILIES, leaf)}


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_5", "kimi_linear"])
def test_unknown_modules_are_replayed_as_leaves(name, monkeypatch):
    """An architecture newer than this package losing its rewinds, although it can be re-run."""
    monkeypatch.setattr("ds4cli.tape.recorder.FAMILIES", ())
    model = tiny.build(name)
    recorder = Recorder.arm(model)
    assert [f.startswith("leaf (") for f in recorder.families] == [True]
    assert self_check(model, recorder, lambda: make_prompt_cache(model)).difference < 0.5
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    tape = record(model, recorder, caches, BLOCK)
    assert error(tape.replay(starts, 2), slots(fresh(model, PROMPT, BLOCK[:2]))) < 2e-5


class _Hidden(nn.Module):
    """A recurrent cache that no module below the model itself is handed."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def __call__(self, x, cache=None):
        return x

    def make_cache(self):
        return [ArraysCache(1), ArraysCache(1), KVCache()]


def test_a_state_nobody_can_record_is_refused_and_left_alone():
    """A model armed by halves: later rewinds silently wrong."""
    model = _Hidden()
    with pytest.raises(ModelError, match="2 recurrent caches"):
        Recorder.arm(model)
    assert type(model) is _Hidden


def test_a_leaf_that_takes_positions_is_refused(monkeypatch):
    """A recorded call with an offset in it, which can't be cut or joined."""
    monkeypatch.setattr("ds4cli.tape.recorder.FAMILIES", ())
    model = tiny.build("bailing_hybrid")
    recorder = Recorder.arm(model)
    with pytest.raises(ModelError, match="takes a `int`"):
        record(model, recorder, make_prompt_cache(model), BLOCK)
    verdict = self_check(model, recorder, lambda: make_prompt_cache(model))
    assert not verdict.accepts and "ModelError: `" in str(verdict) and "a `int`" in str(verdict)


def test_kimi_k3_is_never_recorded_compiled(monkeypatch):
    """Tracers of a compiled one-token step in the tape (it compiles only where Metal exists)."""
    model = tiny.build("kimi_k3")
    recorder = Recorder.arm(model)
    caches = fresh(model, PROMPT)
    starts = slots(caches)
    want = slots(fresh(model, PROMPT, NEXT))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))  # has no Metal kernel
    compiled = []
    monkeypatch.setattr(mx, "compile", lambda f, **kwargs: compiled.append(f) or f)
    tape = record(model, recorder, caches, NEXT)
    assert not compiled and tape.rows == 1
    assert error(tape.replay(starts, 1), want) < 2e-5
    feed(model, caches, NEXT)
    assert compiled


def test_replay_uses_the_metal_kernel_where_there_is_one(monkeypatch):
    """A replay that differs from the kernel that computed the state it replaces."""
    calls = []

    def kernel(q, k, v, g, beta, state, mask=None):
        calls.append(k.shape)
        return delta.chunked(q, k, v, g, beta, state, mask)

    model = tiny.build("qwen3_5")
    recorder = Recorder.arm(model)
    caches = make_prompt_cache(model)
    starts = slots(caches)
    tape = record(model, recorder, caches, BLOCK)
    want = tape.replay(starts, 3)
    monkeypatch.setattr(delta, "has_kernel", lambda dim=32: True)
    monkeypatch.setattr(delta, "gated_delta_kernel", kernel)
    assert error(tape.replay(starts, 3), want) < 2e-6
    assert error(tape.replay_each(starts, [3]), want) < 2e-6
    shape = 3, 3, 2, 32  # three layers of one shape are one launch
    assert calls == [shape, (3, len(BLOCK), 2, 32)]


def test_compact_keeps_no_parent_alive():
    """A few kept rows that hold a whole prefill chunk in memory."""
    model = tiny.build("lfm2", hidden_size=512, block_dim=512)
    recorder = Recorder.arm(model)
    tape = record(model, recorder, make_prompt_cache(model), tiny.ids(2000))
    mx.clear_cache()
    whole = mx.get_active_memory()
    tape = tape.last(4).compact()
    mx.eval(tape.arrays())
    mx.clear_cache()
    assert whole - mx.get_active_memory() > 0.9 * 3 * 2000 * 512 * 4
    assert tape.nbytes == 3 * 4 * 512 * 4


def test_a_long_tape_holds_few_arrays():
    """A tape of many steps that holds what the next steps hold too, or a compact one with an array
    per step and layer (Metal has a limit)."""
    model = tiny.build("qwen3_5")
    recorder = Recorder.arm(model)
    caches = make_prompt_cache(model)
    tapes = [record(model, recorder, caches, tiny.ids(1, seed)) for seed in range(20)]
    tape = Tape.concat(tapes)
    assert len(tape.arrays()) == 3 * (20 * 4 + 20 // 4), "a convolution's input has three rows more"
    assert len(tape.compact().arrays()) == len(tapes[0].arrays())


def test_arming_looks_at_every_module_once_and_makes_each_class_once():
    """A noticeable pause at load: work for every layer that is the same for all of them."""
    text = dict(tiny.CFG["qwen3_5"]["text_config"], num_hidden_layers=64)
    few, many = tiny.build("qwen3_5"), tiny.build("qwen3_5", text_config=text)
    _calls(lambda: Recorder.arm(few))  # makes the classes
    modules = len(list(many.modules()))
    assert _calls(lambda: Recorder.arm(many)) < 60 * modules


def _calls(work):
    """Python functions called by `work`."""
    count = 0

    def count_call(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
