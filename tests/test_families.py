"""Each recurrence by itself: small rows of two layers, replayed together, against the loop that the
file's formula states. What models do with them is in `test_tape.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_ops

from ds4cli.hooks.cuda import kernels, switch
from ds4cli.hooks.rebind import Swaps
from ds4cli.tape.families import (
    baichuan,
    delta_rule,
    griffin,
    leaf,
    lightning,
    mamba,
    ngram,
    rwkv7,
    short_conv,
    ssd,
)
from ds4cli.tape.frames import Recording
from ds4cli.tape.kept import Kept
from ds4cli.tape.tape import Tape
from ds4cli.tape.tracks import Track

ROWS = 5


@pytest.fixture(autouse=True)
def uncompiled():
    """Compiling a shape that is run once takes a second."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def noise(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def near(a, b, tolerance=1e-5):
    assert a.shape == b.shape and a.dtype == b.dtype
    return mx.max(mx.abs(a - b)).item() <= tolerance * max(1, mx.max(mx.abs(b)).item())


def follow(step: Callable, state, rows):
    """The state after so many rows, one by one."""
    for i in range(rows):
        state = step(state, i)
    return state


def check(tracks, steps, shape, tolerance=1e-5):
    """`tracks` of one key, replayed as a batch from new caches and from states of `shape`."""
    cls = type(tracks[0])
    new, known = [None] * len(tracks), [noise(9 + i, *shape) for i in range(len(tracks))]
    for starts in (new, known):
        assert len({track.key(start) for track, start in zip(tracks, starts, strict=True)}) == 1
        for rows in range(1, tracks[0].rows + 1):
            for some in (tracks, tracks[:1]):
                got = cls.replay(some, starts[: len(some)], rows)
                assert len(got) == len(some)
                for i, state in enumerate(got):
                    start = mx.zeros(shape) if starts[i] is None else starts[i]
                    want = follow(steps[i], start, rows).astype(state.dtype)
                    assert near(state, want, tolerance), (rows, i)
    assert tracks[0].key(None) != tracks[0].key(known[0])
    check_each(tracks, known, tolerance)


def check_each(tracks, known, tolerance=1e-5):
    """The same of lanes that keep rows of their own: as they are replayed one by one, whatever
    numbers the other rows are."""
    cls = type(tracks[0])
    total = tracks[0].rows
    kept = Kept([total, 1, total - 1], total)
    clean, spoilt = [[in_lanes(t, kept, other) for t in tracks] for other in (0, mx.nan)]
    for starts in ([None] * len(tracks), [mx.concatenate([x, -x, 2 * x]) for x in known]):
        want = Track.replay_each.__func__(cls, clean, starts, kept)
        for some in (spoilt, spoilt[:1]):
            got = cls.replay_each(some, starts[: len(some)], kept)
            assert all(near(a, b, tolerance) for a, b in zip(got, want, strict=False))


def in_lanes(track, kept, other):
    """Three lanes that have its rows in another order each; `other` where they are not kept."""
    lanes = [mx.concatenate([x, x[:, ::-1], mx.roll(x, 1, axis=1)]) for x in track.data]
    return replace(track, data=tuple(kept.only(x, other) for x in lanes))


def check_call_by_call(tracks, halves, advance):
    """Replays of calls of 1, 2 and 2 rows are `advance(track, begin, end, start)` of each call in
    turn, to the bit, alone and with another. halves: a start of each track."""
    for starts in ([None, None], halves):
        for rows, ends in ((1, [1]), (2, [1, 2]), (3, [1, 3]), (5, [1, 3, 5])):
            got = type(tracks[0]).replay(tracks, starts, rows)
            (alone,) = type(tracks[0]).replay(tracks[:1], starts[:1], rows)
            assert near(alone, got[0], 0)
            for track, start, state in zip(tracks, starts, got, strict=True):
                begin = 0
                for end in ends:
                    start = advance(track, begin, end, start)
                    begin = end
                assert near(state, start, 0), rows


def differ(a, b):
    """Not to be replayed together."""
    return a.key(None) != b.key(None)


def keeping(form):
    """A stand-in for a recurrence's kernel that can be told how many rows each sequence keeps;
    form: one that cannot."""

    def run(*args, kept=None):
        if kept is None:
            return form(*args)
        shape, (*args, state) = args[0].shape[:2], args
        states = []
        for i, n in enumerate(kept.tolist()):
            own = [x[i : i + 1, :n] if x.shape[:2] == shape else x for x in args]
            states.append(form(*own, None if state is None else state[i : i + 1])[1])
        return None, mx.concatenate(states)

    return run


@pytest.fixture
def cuda(monkeypatch):
    """Kernels are on, for rows of the width that this is set to."""
    found = SimpleNamespace(width=None, calls=[])
    monkeypatch.setattr(switch, "is_on", lambda: found.width is not None)
    monkeypatch.setattr(kernels, "fits", lambda width: width == found.width)
    return found


# --- the gated delta rule -------------------------------------------------------------------------


def delta_rows(seed=1, rows=ROWS, channel=False):
    k, v = noise(seed, 1, rows, 1, 4), noise(seed + 1, 1, rows, 2, 3)
    g = mx.sigmoid(noise(seed + 2, 1, rows, 2, *([4] if channel else [])))
    return delta_rule.DeltaRows((k, v, g, mx.sigmoid(noise(seed + 3, 1, rows, 2))))


def delta_step(track):
    k, v, g, beta = track.data
    k = mx.repeat(k, 2, axis=2)
    g = g if g.ndim == 4 else g[..., None]

    def step(state, i):
        state = state * g[:, i, :, None, :]
        new = v[:, i] - (state @ k[:, i, ..., None])[..., 0]
        return state + (beta[:, i, :, None] * new)[..., None] * k[:, i, :, None, :]

    return step


SHAPE = (1, 2, 3, 4)


@pytest.mark.parametrize("channel", [False, True])
def test_rows_of_the_delta_rule(channel):
    tracks = [delta_rows(seed, channel=channel) for seed in (1, 11)]
    check(tracks, [delta_step(t) for t in tracks], SHAPE)
    assert differ(tracks[0], delta_rows(1, 4, channel))
    assert differ(tracks[0], delta_rows(1, channel=not channel))


def with_states(track, *stops):
    """The track with states that only they can have."""
    track.states = tuple((rows, mx.full(SHAPE, float(rows))) for rows in stops)
    return track


def test_states_inside_a_call_are_where_a_replay_begins():
    """One that is kept and not used, or used for other rows, or of another layer."""
    one, two = with_states(delta_rows(1), 2, 4), with_states(delta_rows(11), 2, 4)
    two.states = tuple((rows, -s) for rows, s in two.states)
    assert one.inner_rows() == [2, 4] and one.has_inner_states
    assert one.key(None) == two.key(None) and differ(one, delta_rows(1))
    starts = [noise(5, *SHAPE), noise(6, *SHAPE)]
    for rows, stop in ((1, 0), (2, 2), (3, 2), (4, 4), (5, 4)):
        got = delta_rule.DeltaRows.replay([one, two], starts, rows)
        for track, start, state in zip((one, two), starts, got, strict=True):
            begin = dict(track.states)[stop] if stop else start
            step = delta_step(track)
            for i in range(stop, rows):
                begin = step(begin, i)
            assert near(state, begin), rows
    got = delta_rule.DeltaRows.replay([one], [None], 4)
    assert got[0] is one.states[1][1]


def test_states_inside_a_call_stay_at_their_rows():
    """Cut, joined, or gathered: a state that belongs to other rows then is another text's."""
    track = with_states(delta_rows(), 2, 4)
    assert track.cut(0, ROWS) is track
    assert track.cut(0, 2).inner_rows() == [2] and track.cut(2, 5).inner_rows() == [2]
    assert track.cut(1, 4).inner_rows() == [1, 3] and track.cut(0, 4).inner_rows() == [2, 4]
    assert track.cut(1, 4).states[1][1] is track.states[1][1]
    assert track.cut(1, 4).data[1].tolist() == track.data[1][:, 1:4].tolist()
    other = with_states(delta_rows(11, 3), 1)
    for joined in (track.join([track, other, track]), track.gather([track, other, track], 13)):
        assert joined.inner_rows() == [2, 4, 6, 10, 12] and joined.rows == 13
        assert [s.max().item() for _, s in joined.states] == [2, 4, 1, 2, 4]


def test_the_delta_rule_on_cuda_reads_rows_where_they_stand(cuda, monkeypatch):
    """Layers are replayed one by one there: copying their rows together costs more."""

    def gated_delta(q, k, v, g, beta, state):
        cuda.calls.append(k.shape)
        return gated_delta_ops(q, k, v, g, beta, state)

    def pieces_state(pieces, start):
        cuda.calls.append([piece[0].shape[1] for piece in pieces])
        k, *rest = (mx.concatenate(column, axis=1) for column in zip(*pieces, strict=True))
        return gated_delta_ops(k, k, *rest, start)[1]

    tracks = [delta_rows(1), delta_rows(11)]
    gathered = delta_rule.DeltaRows.gather(tracks, 10)
    assert isinstance(gathered, delta_rule.DeltaRows)  # not on CUDA
    assert gathered.rows == 10 and gathered.data[0].shape[1] == 10
    cuda.width = 4
    monkeypatch.setattr(kernels, "gated_delta", keeping(gated_delta))
    monkeypatch.setattr(kernels, "gated_delta_state", pieces_state)
    check(tracks, [delta_step(t) for t in tracks], SHAPE)
    assert {*cuda.calls} == {(1, rows, 1, 4) for rows in range(1, ROWS + 1)}
    cuda.calls.clear()
    one, two = with_states(delta_rows(1), 2), with_states(delta_rows(11), 2)
    got = delta_rule.DeltaRows.replay([one, two], [None, None], 3)
    assert cuda.calls == [(1, 1, 1, 4)] * 2
    for track, state in zip((one, two), got, strict=True):
        assert near(state, delta_step(track)(track.states[0][1], 2))
    pieces = delta_rule.DeltaRows.gather(tracks, 10)
    assert isinstance(pieces, delta_rule.DeltaPieces) and pieces.data is tracks[0].data
    starts = [None, noise(5, *SHAPE)]
    cuda.calls.clear()
    got = pieces.replay([pieces, pieces], starts, 10)
    assert cuda.calls == [[5, 5], [5, 5]]
    for start, state in zip(starts, got, strict=True):
        state_in = mx.zeros(SHAPE) if start is None else start
        for track in tracks:
            state_in = follow(delta_step(track), state_in, ROWS)
        assert near(state, state_in)
    for kept in ((one, tracks[0]), (tracks[0], one)):
        assert isinstance(delta_rule.DeltaRows.gather(kept, 10), delta_rule.DeltaRows)
    cuda.width = 3  # keys of another width
    assert isinstance(delta_rule.DeltaRows.gather(tracks, 10), delta_rule.DeltaRows)


# --- Mamba-2 --------------------------------------------------------------------------------------


def ssd_rows(seed=1, rows=ROWS, limit=(0.0, 2.0)):
    x, B = noise(seed, 1, rows, 4, 3), noise(seed + 1, 1, rows, 2, 6)
    dt, A_log, dt_bias = noise(seed + 2, 1, rows, 4), noise(seed + 3, 4), noise(seed + 4, 4)
    return ssd.SsdRows((x, B, 2 * dt), A_log, dt_bias, limit)


def ssd_step(track):
    x, B, dt = track.data
    dt = mx.clip(nn.softplus(dt + track.dt_bias), *track.time_step_limit)
    B = mx.repeat(B, 2, axis=2)

    def step(state, i):
        decay = mx.exp(-mx.exp(track.A_log) * dt[0, i])[None, :, None, None]
        return decay * state + (dt[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None]

    return step


def test_rows_of_mamba_2(cuda, monkeypatch):
    tracks = [ssd_rows(1), ssd_rows(11)]
    steps = [ssd_step(t) for t in tracks]
    check(tracks, steps, (1, 4, 3, 6))
    assert differ(tracks[0], ssd_rows(1, 4)) and differ(tracks[0], ssd_rows(1, limit=(0.0, 3.0)))
    other = ssd_rows(1)
    other.data = (other.data[0], other.data[1][..., :4], other.data[2])
    assert differ(tracks[0], other)
    assert not differ(tracks[0], ssd_rows(1, limit=[0.0, 2.0]))

    def kernel(x, A_log, B, C, D, dt, state):
        assert C.shape == B.shape and D.shape == A_log.shape
        cuda.calls.append(x.shape[1])
        state = mx.zeros((1, 4, 3, 6)) if state is None else state
        B = mx.repeat(B, 2, axis=2)
        for i in range(x.shape[1]):
            decay = mx.exp(-mx.exp(A_log) * dt[0, i])[None, :, None, None]
            state = decay * state + (dt[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None]
        return None, state

    monkeypatch.setattr(kernels, "ssd", keeping(kernel))
    cuda.width = 3
    check(tracks, steps, (1, 4, 3, 6))
    assert cuda.calls == []
    cuda.width = 6
    check(tracks, steps, (1, 4, 3, 6))
    assert {*cuda.calls} == {*range(1, ROWS + 1)}


def test_a_decay_that_forgets_all_keeps_the_newest_rows_exact():
    track = ssd_rows(limit=(0.0, 100.0))
    x, B, dt = track.data
    track.data = (x, B, dt + 60)
    check([track], [ssd_step(track)], (1, 4, 3, 6))


# --- Mamba-1 --------------------------------------------------------------------------------------


class Step(nn.Module):
    """The part of a mixer that its step uses, as Mamba and Falcon-Mamba have it, or as Jamba."""

    def __init__(self, norms="none"):
        super().__init__()
        self.time_step_rank, self.ssm_state_size = 2, 3
        self.x_proj, self.dt_proj = nn.Linear(4, 2 + 3 + 3, bias=False), nn.Linear(2, 4)
        self.A_log = noise(3, 4, 3)
        if norms == "layers":
            self.dt_layernorm, self.b_layernorm = nn.RMSNorm(2), nn.RMSNorm(3)
            self.dt_layernorm.weight = noise(6, 2)
            self.b_layernorm.weight = noise(7, 3)
        else:
            self.use_bcdt_rms = norms == "rms"
            self.args = SimpleNamespace(mixer_rms_eps=0.5)

    def parts(self, x):
        found = self.x_proj(x)
        delta, B = found[..., :2], found[..., 2:5]
        if hasattr(self, "dt_layernorm"):
            delta, B = self.dt_layernorm(delta), self.b_layernorm(B)
        elif self.use_bcdt_rms:
            delta, B = (
                y / mx.sqrt(mx.mean(y * y, axis=-1, keepdims=True) + 0.5) for y in (delta, B)
            )
        return nn.softplus(self.dt_proj(delta)), B


@pytest.mark.parametrize("norms", ["none", "rms", "layers"])
def test_rows_of_mamba_1(norms, monkeypatch):
    """A replay that leaves out a norm, or loses the state between its parts."""
    mixer = Step(norms)
    track = mamba.ScanRows((noise(1, 1, 9, 4),), mixer)
    assert track.recomputes and not track.has_inner_states
    delta, B = mixer.parts(track.data[0])

    def step(state, i):
        decay = mx.exp(delta[:, i, :, None] * -mx.exp(mixer.A_log))
        return decay * state + (delta[:, i] * track.data[0][:, i])[..., None] * B[:, i, None]

    widths, scan = [], mamba._scan
    monkeypatch.setattr(mamba, "_scan", lambda x, *a: widths.append(x.shape[1]) or scan(x, *a))
    for segment in (32, 4):
        monkeypatch.setattr(mamba, "_SEGMENT", segment)
        for start in (None, noise(5, 1, 4, 3)):
            for rows in (1, 4, 5, 9):
                (got,) = mamba.ScanRows.replay([track], [start], rows)
                assert near(
                    got, follow(step, mx.zeros((1, 4, 3)) if start is None else start, rows)
                )
    assert max(widths[:8]) == 9 and max(widths[8:]) == 4
    assert differ(track, mamba.ScanRows(track.data, mixer))
    with pytest.raises(ValueError):
        mamba.ScanRows.replay([track], [None, None], 1)


# --- RWKV-7 ---------------------------------------------------------------------------------------


def wkv_step(w, k, v, a, b):
    def step(state, i):
        w_, k_, v_, a_, b_ = (x[:, i] for x in (w, k, v, a, b))
        read = state @ a_[..., None]
        return state * w_[:, :, None] + read * b_[:, :, None] + v_[..., None] * k_[:, :, None]

    return step


def wkv_calls(dtype):
    """What a model calls: rounds its state once a call."""

    def advance(r, w, k, v, a, b, state):
        assert r.shape == w.shape and r.dtype == dtype
        if state is None:
            state = mx.zeros((len(w), 2, 3, 3))
        step = wkv_step(*(x.astype(mx.float32) for x in (w, k, v, a, b)))
        return None, follow(step, state.astype(mx.float32), w.shape[1]).astype(dtype)

    return advance


def wkv_rows(seed=1, rows=ROWS, dtype=mx.float32, calls=None):
    w, *rest = (noise(seed + i, 1, rows, 2, 3) for i in range(5))
    data = tuple(x.astype(dtype) for x in (mx.sigmoid(w), *rest))
    return rwkv7.WkvRows(data, calls or (rows,), dtype, wkv_calls(dtype))


def test_rows_of_rwkv_7(cuda, monkeypatch):
    """More rows than one chunk, whose later ones meet what the earlier ones left."""
    tracks = [wkv_rows(1, 11), wkv_rows(11, 11)]
    tracks[0].data = (mx.array(tracks[0].data[0]), *tracks[0].data[1:])
    tracks[0].data[0][:, 2] = 0  # what was there is gone
    steps, shape = [wkv_step(*t.data) for t in tracks], (1, 2, 3, 3)
    check(tracks, steps, shape)
    for other in (wkv_rows(1, 10), wkv_rows(1, 11, calls=(5, 6)), wkv_rows(1, 11, mx.bfloat16)):
        assert differ(tracks[0], other)
    widths, advance = [], rwkv7._advance
    monkeypatch.setattr(
        rwkv7, "_advance", lambda S, *x: widths.append(x[0].shape[-2]) or advance(S, *x)
    )
    rwkv7.WkvRows.replay(tracks, [None, None], 10)
    assert widths == [8, 2]

    def kernel(r, w, k, v, a, b, state):
        cuda.calls.append(w.shape[1])
        assert r.shape == w.shape and state.dtype == mx.float32
        return None, follow(wkv_step(w, k, v, a, b), state, w.shape[1])

    monkeypatch.setattr(kernels, "wkv7", keeping(kernel))
    cuda.width = 4
    check(tracks, steps, shape)
    assert cuda.calls == []
    cuda.width = 3
    check(tracks, steps, shape)
    assert {*cuda.calls} == {*range(1, 12)}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rows_of_rwkv_7_in_half_precision_are_replayed_call_by_call(dtype, cuda):
    """A state that the model rounded after every call, and the replay did not."""
    cuda.width = 3
    tracks = [wkv_rows(seed, dtype=dtype, calls=(1, 2, 2)) for seed in (1, 11)]

    def advance(track, begin, end, start):
        part = [x[:, begin:end] for x in track.data]
        return track.advance(part[0], *part, start)[1]

    halves = [noise(7 + i, 1, 2, 3, 3).astype(dtype) for i in (0, 1)]
    check_call_by_call(tracks, halves, advance)
    check_each(tracks, halves, 0)


# --- lightning attention --------------------------------------------------------------------------


def gla(q, k, v, g, scale, h):
    """Rounds k v^T and the state in every call."""
    assert scale == 1.0 and q.shape == k.shape
    rows = k.shape[2]
    state = mx.zeros((1, k.shape[1], k.shape[3], v.shape[3])) if h is None else h
    for i in range(rows):
        state = state.astype(mx.float32) * mx.exp(g.astype(mx.float32))[None, :, None, None]
        state = state + k[:, :, i, :, None] * v[:, :, i, None]
    return None, state.astype(k.dtype)


def gla_rows(seed=1, rows=ROWS, dtype=mx.float32, calls=None, state=mx.float32):
    k, v = noise(seed, 1, rows, 2, 3).astype(dtype), noise(seed + 1, 1, rows, 2, 4).astype(dtype)
    gate = -mx.abs(noise(seed + 2, 2))
    return lightning.GlaRows((k, v), calls or (rows,), gate, state, gla)


def gla_step(track):
    k, v = track.data

    def step(state, i):
        return (
            state * mx.exp(track.gate).reshape(1, 2, 1, 1) + k[:, i, ..., None] * v[:, i, :, None]
        )

    return step


def test_rows_of_lightning_attention():
    tracks = [gla_rows(1), gla_rows(11)]
    tracks[1].gate = tracks[1].gate.reshape(2, 1, 1)  # as the other model file has it
    steps, shape = [gla_step(t) for t in tracks], (1, 2, 3, 4)
    check(tracks, steps, shape)
    for other in (gla_rows(1, 4), gla_rows(1, calls=(2, 3)), gla_rows(1, state=mx.float16)):
        assert differ(tracks[0], other)
    for i in (0, 1):
        other = gla_rows(1)
        other.data = tuple(x[..., :2] if j == i else x for j, x in enumerate(other.data))
        assert differ(tracks[0], other)
    (state,) = lightning.GlaRows.replay([gla_rows(state=mx.float16)], [None], 3)
    assert state.dtype == mx.float16
    tracks[0].gate = tracks[0].gate.astype(mx.bfloat16)
    (state,) = lightning.GlaRows.replay(tracks[:1], [None], 3)
    exact = gla_step(tracks[0])
    tracks[0].gate = tracks[0].gate.astype(mx.float32)
    assert near(state, follow(exact, mx.zeros(shape), 3)), "the gate's powers are not rounded"


def test_rows_of_lightning_attention_in_half_precision_are_replayed_call_by_call():
    tracks = [gla_rows(seed, dtype=mx.bfloat16, calls=(1, 2, 2)) for seed in (1, 11)]
    tracks[1].gate = tracks[1].gate.reshape(2, 1, 1)
    half = [noise(7 + i, 1, 2, 3, 4).astype(mx.bfloat16) for i in (0, 1)]

    def advance(track, begin, end, start):
        k, v = (x[:, begin:end].swapaxes(1, 2) for x in track.data)
        return gla(k, k, v, track.gate.reshape(-1), 1.0, start)[1]

    check_call_by_call(tracks, half, advance)
    check_each(tracks, half, 0)


# --- modules --------------------------------------------------------------------------------------


def rnn_scan(x, a, h0):
    state, states = mx.zeros((1, 4)) if h0 is None else h0, []
    for i in range(x.shape[1]):
        state = a * state + x[:, i]
        states.append(state)
    return mx.stack(states, axis=1), state


def ssm_update(x, A_log, B, C, D, dt, dt_bias, state=None, time_step_limit=(0.0, 9.0)):
    track = ssd.SsdRows((x, B, dt), A_log, dt_bias, time_step_limit)
    start = mx.zeros((1, 4, 3, 6)) if state is None else state
    return x, follow(ssd_step(track), start, x.shape[1])


def recurrent_gla(q, k, v, g, scale, h=None):
    return gla(q, k, v, g, scale, h)


def gated_delta_kernel(q, k, v, g, beta, state, mask=None):
    return gated_delta_ops(q, k, v, g, beta, state, mask)


def gated_delta_update(q, k, v, g, beta, state=None, mask=None, kernel=False):
    run = gated_delta_kernel if kernel else gated_delta_ops
    return run(q, k, v, g, beta, state, mask)


class Conv1d(nn.Module):
    """A model's own, which is given the history apart from the new rows."""

    def __init__(self, rows):
        super().__init__()
        self.weight = mx.ones((4, rows, 1))

    def __call__(self, x, cache=None):
        keep = self.weight.shape[1] - 1
        history = mx.zeros((1, keep, 4)) if cache is None else cache
        return x, mx.concatenate([history, x], axis=1)[:, -keep:]


class Wrapper(nn.Module):
    """Kimi's, with nothing but a convolution in it."""

    def __init__(self, *inside):
        super().__init__()
        for i, module in enumerate(inside):
            setattr(self, f"part{i}", module)

    def __call__(self, x):
        return self.part0(x)


class Convolving(nn.Module):
    """A module whose first slots are histories of convolutions, and that goes on with `last`."""

    def __init__(self, *convolutions):
        super().__init__()
        for i, convolution in enumerate(convolutions):
            setattr(self, f"conv{i}", convolution)
        self.slots = len(convolutions)

    def convolve(self, x, cache):
        for i in range(self.slots):
            conv = getattr(self, f"conv{i}")
            if isinstance(conv, Conv1d):
                x, cache[i] = conv(x, cache=cache[i])
            else:
                history = mx.zeros((1, 2, 4)) if cache[i] is None else cache[i]
                rows = mx.concatenate([history, x], axis=1)
                cache[i] = rows[:, -2:]
                x = conv(rows)
        return x

    def __call__(self, x, cache=None):
        return self.convolve(x, cache)


def depthwise():
    conv = nn.Conv1d(4, 4, 3, groups=4, bias=False)
    conv.weight = noise(8, 4, 3, 1)
    return conv


class Lru(nn.Module):
    def __call__(self, x, state):
        return rnn_scan(x, 0.5, state)


class Griffin(Convolving):
    def __init__(self):
        super().__init__(Conv1d(3))
        self.rg_lru = Lru()

    def __call__(self, x, cache=None):
        x = self.convolve(x, cache)
        y, cache[1] = self.rg_lru(x, cache[1])
        return y


class Mamba2(Convolving):
    """limit: what it passes for the steps, by place or by name."""

    def __init__(self, *args, **named):
        super().__init__(depthwise())
        self.A_log, self.dt_bias = noise(3, 4), noise(4, 4)
        self._args, self._named = args, named

    def __call__(self, x, cache=None):
        y = self.convolve(x, cache)
        rows = (
            mx.stack([y, 2 * y, 3 * y], axis=-1),
            mx.stack([y[..., :1]] * 12, -1).reshape(1, -1, 2, 6),
        )
        given = (rows[0], self.A_log, rows[1], rows[1], self.A_log, y, self.dt_bias, cache[1])
        y, cache[1] = ssm_update(*given, *self._args, **self._named)
        return y


class Mamba1(Step):
    """by_token: it calls the step for every token."""

    slots, convolve = 1, Convolving.convolve

    def __init__(self, by_token):
        super().__init__()
        self.conv0, self.by_token = depthwise(), by_token

    def ssm_step(self, x, A, state=None):
        state = mx.zeros((1, 4, 3)) if state is None else state
        for row in [x] if x.ndim == 2 else [x[:, i] for i in range(x.shape[1])]:
            delta, B = self.parts(row)
            state = mx.exp(delta[..., None] * A) * state + (delta * row)[..., None] * B[:, None]
        return row, state

    def __call__(self, x, cache=None):
        y, A = self.convolve(x, cache), -mx.exp(self.A_log)
        for row in [y[:, i] for i in range(y.shape[1])] if self.by_token else [y]:
            _, cache[1] = self.ssm_step(row, A, cache[1])
        return y


class TokenShift(nn.Module):
    def __call__(self, x, state):
        before = mx.zeros((1, 1, 4)) if state is None else state
        return mx.concatenate([before, x], axis=1)[:, :-1]


class TimeMixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_shift = TokenShift()

    def _wkv7(self, r, w, k, v, a, b, state):
        return wkv_calls(mx.float32)(r, w, k, v, a, b, state)

    def __call__(self, x, cache=None):
        y = self.token_shift(x, cache[0])
        cache[0] = x[:, -1:]
        rows = mx.sigmoid(mx.stack([mx.stack([y[..., i] for i in range(3)], -1)] * 2, axis=2))
        _, cache[1] = self._wkv7(rows, rows, 0.5 * rows, rows, -rows, 0.3 * rows, cache[1])
        return x + y


class ChannelMixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_shift = TokenShift()

    def __call__(self, x, cache=None):
        y = self.token_shift(x, cache[2])
        cache[2] = x[:, -1:]
        return y


class Rwkv7(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.ffn = TimeMixing(), ChannelMixing()

    def __call__(self, x, cache=None):
        return self.ffn(self.attn(x, cache), cache)


class Lightning(nn.Module):
    def __call__(self, x, cache=None):
        k = mx.stack([x[..., :3], x[..., 1:]], axis=1)
        v = mx.stack([x, -x], axis=1)
        y, cache[0] = recurrent_gla(k, k, v, mx.array([-0.1, -0.4]), scale=1.0, h=cache[0])
        return y


class Baichuan(nn.Module):
    def _custom_convolution(self, u, weights, state=None):
        before = mx.zeros((1, 2, 1, 2)) if state is None else state
        return u + weights * mx.concatenate([before, u], axis=2)[:, :, :-1]

    def __call__(self, x, cache=None):
        u = x.reshape(1, -1, 2, 2).swapaxes(1, 2)
        k, v = self._custom_convolution(u, 0.5, cache[0]), self._custom_convolution(-u, 2, cache[1])
        cache[0], cache[1] = u[:, :, -1:], -u[:, :, -1:]
        return k + v


class Ngrams(nn.Module):
    n = 4

    def _get_ngram_ids(self):
        return None

    def __call__(self, ids, cache=None):
        known = ids if cache[0] is None else mx.concatenate([cache[0], ids.astype(mx.int64)], 1)
        cache[0] = known[:, -3:].astype(mx.int64)
        return ids


class DeltaRule(Convolving):
    def __init__(self, kernel=False):
        super().__init__(Wrapper(depthwise()), depthwise())
        self._kernel = kernel

    def plain(self, x, cache, mask=None):
        y = self.convolve(x, cache)
        heads = mx.stack([y, -y], axis=2)
        g, beta = mx.sigmoid(heads[..., 0]), mx.sigmoid(heads[..., 1])
        k, v = heads[:, :, :1], heads[..., :3]
        y, cache[2] = gated_delta_update(k, k, v, g, beta, cache[2], mask, self._kernel)
        return y

    def __call__(self, x, mask=None, cache=None):
        return self.plain(x, cache, mask)


class Compiled(DeltaRule):
    """Has a compiled form of one step; `_decode_core` is what it compiles."""

    def __init__(self):
        super().__init__()
        self.taken, self._step = [], self.compiled

    def compiled(self, x, cache):
        self.taken.append("compiled")
        return self.plain(x, cache)

    def _decode_core(self, x, cache):
        self.taken.append("core")
        return self.plain(x, cache)

    def __call__(self, x, cache=None):
        return self._step(x, cache)


CASES = {
    "gated delta": (delta_rule, DeltaRule, 3),
    "gated delta, kernel": (delta_rule, lambda: DeltaRule(kernel=True), 3),
    "gated delta, compiled": (delta_rule, Compiled, 3),
    "Mamba-2": (ssd, Mamba2, 2),
    "Mamba-2, limited": (ssd, lambda: Mamba2((0.5, 1.0)), 2),
    "Mamba-2, limited by name": (ssd, lambda: Mamba2(time_step_limit=(0.5, 1.0)), 2),
    "Mamba-1": (mamba, lambda: Mamba1(by_token=False), 2),
    "Mamba-1, by token": (mamba, lambda: Mamba1(by_token=True), 2),
    "RWKV-7": (rwkv7, Rwkv7, 3),
    "RG-LRU": (griffin, Griffin, 2),
    "lightning": (lightning, Lightning, 1),
    "Baichuan": (baichuan, Baichuan, 2),
    "n-grams": (ngram, Ngrams, 1),
    "convolutions": (short_conv, lambda: Convolving(depthwise(), Wrapper(depthwise())), 2),
    "convolutions of other lengths": (short_conv, lambda: Convolving(Conv1d(2), Conv1d(4)), 2),
    "leaf": (leaf, lambda: Convolving(depthwise()), 1),
}


def input_of(module):
    return mx.array([[5, 3, 8, 1, 9]]) if isinstance(module, Ngrams) else noise(2, 1, ROWS, 4)


def fed(module, size, *calls, inner_every=0):
    """The slots after these calls, and their tape."""
    cache, tape = ArraysCache(size), Tape()
    with Recording([cache], inner_every) as (frame,):
        for x in calls:
            module(x, cache=cache)
    tape.fill([frame.found()])
    return [*cache.cache], tape


@pytest.mark.parametrize("case", CASES)
def test_an_armed_module_records_what_moves_its_slots(case):
    """Rows of another slot, without their history, or of another call; hooks that stay, or change
    what the module computes."""
    family, make, size = CASES[case]
    module = make()
    x = input_of(module)
    assert family.owns(module) and not family.owns(nn.Linear(2, 2))
    before = {id(part): type(part) for part in module.modules()}
    swaps = Swaps()
    family.arm(module, swaps)
    assert type(module) is not before[id(module)] or family is rwkv7
    whole, tape = fed(module, size, x[:, :3], x[:, 3:])
    assert tape.rows == ROWS
    for rows in range(1, ROWS + 1):
        want, _ = fed(module, size, x[:, :rows])
        (got,) = tape.replay([[None] * size], rows)
        assert all(near(a, b) for a, b in zip(got, want, strict=True)), rows
    swaps.undo()
    assert {id(part): type(part) for part in module.modules()} == before
    again, nothing = fed(module, size, x[:, :3], x[:, 3:])
    assert nothing.rows == 0 and all(near(a, b) for a, b in zip(again, whole, strict=True))


def arm(family, module):
    family.arm(module, Swaps())
    return module


def test_calls_that_are_not_recorded_stay_what_they_were():
    for family, make, size in CASES.values():
        module, cache = make(), ArraysCache(size)
        x = input_of(module)
        module(x, cache=(stock := ArraysCache(size)))
        arm(family, module)(x, cache=cache)
        assert all(near(a, b) for a, b in zip(cache.cache, stock.cache, strict=True))
        with Recording([ArraysCache(size)], 0) as (frame,):
            module(x, cache=cache)
        assert frame.tracks == [()] * size


def test_a_long_call_of_the_delta_rule_is_cut_where_states_are_kept(cuda, monkeypatch):
    x = noise(2, 1, 9, 4)
    for kernel in (False, True):
        module = arm(delta_rule, DeltaRule(kernel))
        want, plain = fed(module, 3, x)
        got, tape = fed(module, 3, x, inner_every=4)
        assert plain.inner_rows() == [] and tape.inner_rows() == [4, 8]
        assert all(near(a, b) for a, b in zip(got, want, strict=True))
        y = module(x, cache=ArraysCache(3))
        with Recording([cache := ArraysCache(3)], 4):
            assert near(module(x, cache=cache), y)
        for rows in (3, 4, 5, 8, 9):
            ((*_, state),) = tape.replay([[None] * 3], rows)
            assert near(state, fed(module, 3, x[:, :rows])[0][2])
        assert fed(module, 3, x[:, :8], inner_every=4)[1].inner_rows() == [4]
        assert fed(module, 3, x[:, :4], inner_every=4)[1].inner_rows() == []
        # Rows that are masked move nothing: which of them the state has seen is not known.
        with Recording([cache := ArraysCache(3)], 4) as (frame,):
            module(x, mx.ones((1, 9)) > 0, cache)
        assert frame.tracks[2][0].inner_rows() == []

    def stops(q, k, v, g, beta, state, stop_rows):
        cuda.calls.append(k.shape[1])
        ends = [*range(stop_rows, k.shape[1], stop_rows), k.shape[1]]
        states = [gated_delta_ops(*(a[:, :e] for a in (q, k, v, g, beta)), state) for e in ends]
        return *states[-1], [state for _, state in states[:-1]]

    monkeypatch.setattr(kernels, "gated_delta_stops", stops)
    cuda.width = 4
    got, tape = fed(module, 3, x, inner_every=4)
    assert cuda.calls == [9] and tape.inner_rows() == [4, 8] and near(got[2], want[2])
    assert near(fed(module, 3, x[:, :4], x[:, 4:], inner_every=4)[0][2], want[2])
    for rows in (4, 8):
        ((*_, state),) = tape.replay([[None] * 3], rows)
        assert near(state, fed(module, 3, x[:, :rows])[0][2])


def test_a_compiled_step_runs_as_it_is_written_while_it_is_recorded():
    """The tape held tracers of the first call, and nothing of later ones."""
    module = arm(delta_rule, Compiled())
    x = noise(2, 1, 1, 4)
    step = module._step
    module(x, cache=ArraysCache(3))
    fed(module, 3, x)
    module(x, cache=ArraysCache(3))
    assert module.taken == ["compiled", "core", "compiled"] and module._step == step
    with pytest.raises(TypeError), Recording([ArraysCache(3)], 0):
        module(x, cache=None)
    assert module._step == step


def test_mamba_2_decays_in_single_precision():
    module = Mamba2()
    module.A_log = rounded = module.A_log.astype(mx.float16)
    arm(ssd, module)
    assert module.A_log.dtype == mx.float32 and mx.array_equal(module.A_log, rounded)


def test_convolutions_are_those_of_the_module_and_of_plain_wrappers():
    """One too many, or too few: the slots behind it get each other's rows."""
    two = Wrapper(depthwise(), depthwise())
    mixed = Wrapper(depthwise(), nn.Linear(4, 4))
    for other in (two, mixed, Wrapper(nn.Linear(4, 4)), Wrapper(Wrapper(depthwise()))):
        assert not short_conv.owns(Convolving(other))
    for one in (Wrapper(depthwise()), Conv1d(2), Wrapper(Conv1d(2))):
        assert short_conv.owns(Convolving(one))
    assert not short_conv.owns(Wrapper(depthwise())), "it is handed no cache"
    module = Convolving(nn.Linear(4, 4), depthwise(), Wrapper(Conv1d(4)))
    arm(short_conv, module)
    assert type(module.conv0) is nn.Linear and type(module.conv2) is Wrapper
    assert type(module.conv1) is not nn.Conv1d and type(module.conv2.part0) is not Conv1d
