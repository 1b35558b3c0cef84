"""Who records what: modules that note in whose frame they run."""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from ds4cli.tape.frames import Frame, Recording, current, framed, recording, share
from ds4cli.tape.tracks import Track


def rows(*numbers):
    """A track of a batch with a row each."""
    return Track((mx.array(numbers)[:, None],))


class Module(nn.Module):
    """Notes the frame of its calls, and the slot that comes next; `inside` is called on the way."""

    def __init__(self, inside=lambda *args, **kwargs: None):
        super().__init__()
        self.noted, self._inside = [], inside

    def __call__(self, *args, **kwargs):
        frame = current()
        self.noted.append((frame, frame and frame.next))
        if frame is not None:
            frame.add(rows(len(self.noted)))
        self._inside(*args, **kwargs)
        return args, kwargs


def make(inside=lambda *args, **kwargs: None, **slot):
    return framed(Module, **slot)(inside)


def lists(tracks):
    return [[t.data[0].tolist() for t in slot] for slot in tracks]


def test_rows_go_to_the_slots_that_they_move():
    """The rows of a convolution in the state's place, or those of a call lost behind the next."""
    with Recording([ArraysCache(3)], 0) as (frame,):
        a, b, both, state, again = rows(1), rows(2), rows(3), rows(4), rows(5)
        frame.add(a)
        frame.add(b)
        assert frame.next == 2
        frame.add_all(both)
        frame.add_state(state)
        frame.add_state(again)
    assert frame.tracks == [(a, both), (b, both), (both, state, again)]
    assert frame.found() == frame.tracks
    frame.next = 0
    frame.add(again)
    assert frame.tracks[0] == (a, both, again)


def test_a_recording_has_a_frame_for_each_cache_and_ends():
    one, two, other = ArraysCache(2), ArraysCache(1), ArraysCache(1)
    assert not recording()
    with Recording([one, two], 16) as outer:
        assert recording() and [f.cache for f in outer] == [one, two]
        assert [f.tracks for f in outer] == [[(), ()], [()]]
        assert [f.inner_every for f in outer] == [16, 16] and Frame.inner_every == 0
        with Recording([other], 0) as (inner,):
            assert inner.inner_every == 0
            module = make()
            module(other)
            module(two)
            assert [frame for frame, _ in module.noted] == [inner, outer[1]]
        module(other)
        module(two)
        assert [frame for frame, _ in module.noted[2:]] == [None, outer[1]]
    assert not recording()
    with pytest.raises(KeyError), Recording([one], 0):
        raise KeyError
    assert not recording()


@pytest.mark.parametrize(
    "given",
    [
        lambda c: ((c,), {}),
        lambda c: ((1, c), {}),
        lambda c: ((1,), {"cache": c}),
        lambda c: ((1, c), {"mask": None}),
        lambda c: ((), {"state": c}),
        lambda c: ((c, 1), {}),
        lambda c: ((c, [1]), {}),
        lambda c: ((c, KVCache()), {}),
        lambda c: ((c, ArraysCache(1)), {}),
        lambda c: ((CacheList(KVCache(), c), None), {}),
        lambda c: ((), {"cache": CacheList(c, KVCache())}),
        lambda c: ((1,), {"state": CacheList(ArraysCache(1), c, ArraysCache(2))}),
    ],
)
def test_a_cache_is_found_however_it_is_handed_on(given):
    """Rows that no one records: a rewind without them leaves the layer where it was."""
    cache, module = ArraysCache(1), make()
    args, kwargs = given(cache)
    assert module(*args, **kwargs) == (args, kwargs)
    with Recording([ArraysCache(1)], 0):
        assert module(*args, **kwargs) == (args, kwargs)
    with Recording([ArraysCache(1), cache], 0) as (_, frame):
        assert module(*args, **kwargs) == (args, kwargs)
        assert current() is None
    assert module.noted == [(None, None)] * 2 + [(frame, 0)]
    assert lists(frame.tracks) == [[[[3]]]] and frame.next == 0 and frame.delegated


def test_of_two_recorded_caches_the_last_is_taken():
    """As mlx-lm hands it on: what is ahead of it is another layer's."""
    one, two, module = ArraysCache(1), ArraysCache(1), make()
    with Recording([one, two], 0) as (_, last):
        module(one, two, None)
    assert module.noted == [(last, 0)]


@pytest.mark.parametrize("args", [(), (1,), ([],), (ArraysCache(1),), (CacheList(KVCache()),)])
def test_a_call_without_a_recorded_cache_runs_in_the_frame_around_it(args):
    """The helpers of a recurrent module have no cache, and record what it is fed."""
    inner, cache = make(), ArraysCache(2)
    outer = make(inside=lambda _: inner(*args))
    with Recording([cache], 0) as (frame,):
        inner(*args)
        outer(cache)
    assert inner.noted == [(None, None), (frame, 1)]
    assert lists(frame.tracks) == [[[[1]]], [[[2]]]]


def test_a_module_that_hands_its_cache_on_says_so():
    """The rows of a wrapper recorded beside those of what it wraps."""
    cache, told = ArraysCache(3), []
    inner = make(slot=2)

    def inside(cache):
        told.append(frame.delegated)
        inner(cache)
        told.append((frame.delegated, frame.next, current()))

    outer = make(inside=inside)
    with Recording([cache], 0) as (frame,):
        for _ in range(2):
            outer(cache)
    assert told == [False, (True, 1, frame)] * 2
    assert [slot for _, slot in inner.noted] == [2, 2]
    assert [len(tracks) for tracks in frame.tracks] == [2, 0, 2]


def test_a_call_that_fails_leaves_the_frame():
    """The next call of the same recording began in the middle of its slots."""
    cache = ArraysCache(2)

    def fail(cache):
        raise KeyboardInterrupt

    with Recording([cache], 0) as (frame,):
        with pytest.raises(KeyboardInterrupt):
            make(inside=fail)(cache)
        assert current() is None and frame.next == 0


def test_a_class_keeps_its_name():
    made = framed(Module)
    assert made is not Module and issubclass(made, Module)
    assert (made.__name__, made.__module__) == ("Module", __name__)


def test_another_thread_records_nothing():
    cache, module = ArraysCache(1), make()
    seen = []
    with Recording([cache], 0):
        worker = threading.Thread(target=lambda: seen.append((recording(), module(cache))))
        worker.start()
        worker.join(60)
    assert seen[0][0] is False and module.noted == [(None, None)]


def test_a_batch_shares_its_rows_out():
    """Rows of another lane; those of one that nobody records, or of an earlier batch, lost."""
    lanes = [ArraysCache(2), ArraysCache(2)]
    whole, later = Frame(), Frame()
    whole.tracks = [(rows(1, 2),), (rows(3, 4), rows(5, 6))]
    later.tracks = [(rows(7, 8),), ()]
    assert lists(whole.of(1)) == [[[[2]]], [[[4]], [[6]]]]
    with Recording(lanes, 0) as (one, two):
        one.add(rows(0))
        for i, cache in enumerate(lanes):
            share(cache, whole, i)
            share(cache, later, i)
        share(ArraysCache(2), whole, 0)
    assert lists(one.found()) == [[[[0]], [[1]], [[7]]], [[[3]], [[5]]]]
    assert lists(two.found()) == [[[[2]], [[8]]], [[[4]], [[6]]]]
    assert Frame.shared == ()
