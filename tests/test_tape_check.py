"""What a load is told of its replays, on a model that is computed by hand."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from ds4cli.tape.check import LONG_ROWS, Verdict, difference, long_error, self_check
from ds4cli.tape.tape import Tape
from ds4cli.tape.tracks import CallRows, Track


class Adding:
    """Replays a slot that is the sum of its rows."""

    @classmethod
    def replay(cls, tracks, starts, rows):
        sums = [t.data[0][:, :rows].sum(axis=1) for t in tracks]
        return [(s + x).astype(s.dtype) for s, x in zip(starts, sums, strict=True)]


@dataclass
class Sums(Adding, Track):
    pass


@dataclass
class Calls(Adding, CallRows):
    calls: tuple = ()


@dataclass
class Kept(Sums):
    """Whose states are all on the tape."""

    def inner_rows(self):
        return None


@dataclass
class Coarse(Sums):
    recomputes = True


class Model:
    """Adds up what it reads, in a slot for each kind of track; `state` and `rows` are the types.
    adds: what call number n adds on its own, of which the tape knows nothing."""

    def __init__(self, *kinds, state=mx.float32, rows=mx.float32, adds=None):
        self.kinds, self.state, self.rows, self.adds = kinds, state, rows, adds or {}
        self.fed, self.tracks = [], []

    def caches(self):
        return [KVCache(), CacheList(KVCache(), self.one(0)), *map(self.one, range(1, self.n))]

    @property
    def n(self):
        return len(self.kinds)

    def one(self, i):
        cache = ArraysCache(1)
        cache[0] = mx.full((1, 1), 4.0, self.state)
        return cache

    def __call__(self, ids, cache):
        self.fed.append(ids.tolist())
        recurrent = [cache[1].caches[1], *cache[2:]]
        rows = ids[..., None].astype(self.rows)
        off = self.adds.get(len(self.fed), 0)
        for own in recurrent:
            own[0] = (own[0] + rows.sum(axis=1) + off).astype(self.state)
        self.tracks = [[(kind((rows,)),)] for kind in self.kinds]

    @contextmanager
    def recording(self, caches):
        assert len(caches) == self.n
        tape = Tape()
        yield tape
        tape.fill(self.tracks)

    def check(self):
        return self_check(self, self, self.caches)


SHORT = [[[1, 2, 3]], [[1, 2, 3, 4]], [[1]]]


def test_a_right_replay_is_accepted_after_three_short_calls():
    model = Model(Sums, Sums)
    verdict = model.check()
    assert verdict.accepts and verdict == Verdict(0.0, "") and model.fed == SHORT
    without = Model()
    without.caches = lambda: [KVCache()]
    assert without.check() == Verdict() and without.fed == []


@pytest.mark.parametrize("call", [2, 3])
@pytest.mark.parametrize(("kind", "state"), [(Sums, mx.float32), (Coarse, mx.float32)])
def test_a_replay_that_misses_a_call_is_refused(call, kind, state):
    """Of the slot's 21, one is more than rounding; what the tape begins with is no part of it."""
    assert not Model(kind, state=state, adds={call: 1.0}).check().accepts
    assert Model(kind, state=state, adds={1: 1.0}).check().accepts


def test_how_far_it_is_off_counts_what_it_may_be_off():
    verdict = Model(Sums, adds={3: 0.021}).check()
    assert verdict.difference == pytest.approx(10, rel=0.01) and not verdict.problem
    words = "replaying the recurrences differs from this model by 10 times what is allowed"
    assert str(verdict) == words
    assert Model(Sums, adds={3: 0.0019}).check().accepts
    assert not Model(Sums, adds={3: 0.0023}).check().accepts
    # A replay that runs projections again in half precision can be no better than that.
    assert Model(Coarse, rows=mx.float16, adds={3: 0.5}).check().accepts
    assert not Model(Coarse, rows=mx.float16, adds={3: 0.8}).check().accepts
    assert not Model(Sums, rows=mx.float16, adds={3: 0.5}).check().accepts


def test_a_tape_that_is_cut_is_tried_too(monkeypatch):
    """A cut that loses rows: going back twice ended in another state than going back once."""
    cut = Track.cut
    monkeypatch.setattr(Sums, "cut", lambda self, a, b: cut(self, max(0, a - 1), b))
    assert not Model(Sums).check().accepts
    model = Model(Sums)
    replay = Tape.replay

    def half(tape, starts, rows):
        found = replay(tape, starts, rows)
        return [[x + (rows == 2) for x in slots] for slots in found]

    monkeypatch.setattr(Sums, "cut", cut)
    monkeypatch.setattr(Tape, "replay", half)
    assert not model.check().accepts


LONG = [[[1]]] * LONG_ROWS


@pytest.mark.parametrize(
    ("kind", "options", "long"),
    [
        (Sums, {"state": mx.float16}, True),
        (Sums, {"state": mx.bfloat16}, True),
        (Kept, {"state": mx.float16}, False),
        (Sums, {"rows": mx.float16}, False),
        (Calls, {"rows": mx.bfloat16}, True),
        (Calls, {}, False),
        (Calls, {"state": mx.float16}, True),
    ],
)
def test_what_may_add_up_is_fed_row_by_row(kind, options, long):
    model = Model(kind, **options)
    assert model.check().accepts
    assert model.fed == [*SHORT, *(LONG if long else [])]
    if long:
        late = {n: 4.0 for n in range(20, 60)}
        assert not Model(kind, adds=late, **options).check().accepts
        # One slot among others.
        model = Model(Kept, Sums, kind, **options)
        assert model.check().accepts and model.fed == [*SHORT, *LONG]
        assert not Model(kind, adds={2: 9.0}, **options).check().accepts


def test_many_single_rows_are_measured_alone():
    model = Model(Sums, Sums, adds={3: 0.0016})
    assert long_error(model, model, model.caches(), 12) == pytest.approx(1, rel=0.01)
    assert model.fed == [[[1]]] * 12
    model = Model(Coarse, rows=mx.float16, adds={3: 0.48})
    assert long_error(model, model, model.caches(), 12) == pytest.approx(1, rel=0.05)


def test_rows_are_evaluated_as_they_come(monkeypatch):
    """The graph of 64 calls at once."""
    begun = []
    monkeypatch.setattr(mx, "async_eval", lambda *trees: begun.append(trees))
    model = Model(Sums, Sums)
    caches = model.caches()
    long_error(model, model, caches, 3)
    assert [len(slots) for (slots,) in begun] == [2, 2, 2]
    assert begun[-1][0] == [caches[1].caches[1].cache, caches[2].cache]


def test_a_failure_is_told_in_its_first_line():
    def fail(*words):
        model = Model(Sums)

        def recording(caches):
            raise ValueError(*words)

        model.recording = recording
        return model.check()

    verdict = fail("\n  rows are gone\nand more")
    assert verdict == Verdict(float("inf"), "ValueError: rows are gone") and not verdict.accepts
    assert str(verdict) == "replaying the recurrences fails: ValueError: rows are gone"
    assert fail().problem == "ValueError: no more is known"
    assert not Verdict(0.0, "it broke").accepts and Verdict(1.0).accepts
    assert not Verdict(1.01).accepts


def test_differences_are_in_units_of_what_is_allowed():
    """A comparison that is too weak, or refuses what rounding explains."""

    def measure(a, b, coarse=False):
        return difference([[a]], [[b]], [[coarse]])

    one = mx.array([0.5, -100.0])
    assert measure(one, one) == 0
    assert measure(one + mx.array([0.02, 0]), one) == pytest.approx(2, rel=1e-3)
    assert measure(one, one + mx.array([0.02, 0])) == pytest.approx(2, rel=1e-3)
    assert measure(one - mx.array([0.02, 0]), one, True) == pytest.approx(2 / 300, rel=1e-3)
    for half in (mx.float16, mx.bfloat16):
        a, b = mx.array([1.0, 2.0], half), mx.array([1.25, 2.0], half)
        assert measure(a, b) == pytest.approx(0.125 / 3e-2, rel=1e-3)
    tiny, none = mx.array([1e-9]), mx.array([0.0])
    assert measure(tiny, none) == pytest.approx(1e-9 / 1e-6 / 1e-4, rel=1e-3)
    whole = mx.array([3, 4], mx.int64)
    assert measure(whole, whole) == 0 and measure(whole, whole + 1) == pytest.approx(2000)
    inf = float("inf")
    assert measure(None, None) == 0 and measure(None, one) == measure(one, None) == inf
    assert measure(one, one[None]) == measure(one, one.astype(mx.float16)) == inf
    assert measure(mx.array([float("nan")]), none) == inf
    assert measure(none, mx.array([float("nan")])) == inf
    assert difference([], [], []) == 0
    rows = [[one], [one, none]]
    assert difference(rows, [[one], [one + 0.02, none]], [[True], [False, False]]) > 1
    assert difference(rows, [[one], [one + 0.02, none]], [[False], [True, False]]) < 1
    flags = [[False], [False, False]]
    for unlike in (([[one]], rows, flags), (rows, [[one]], flags), (rows, rows, [[False]])):
        with pytest.raises(ValueError):
            difference(*unlike)
