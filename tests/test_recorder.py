"""Which modules record, and what their tapes say, on recurrences that are computed by hand."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from ds4cli.errors import ModelError
from ds4cli.tape.recorder import Recorder, Sizes, arrays_caches
from ds4cli.tape.tape import Tape


class Adder(nn.Module):
    """Adds its rows up: a module that no family knows."""

    def __call__(self, x, cache=None):
        y = mx.cumsum(x, axis=1) + (0 if cache[0] is None else cache[0][:, None])
        cache[0] = y[:, -1]
        return y


class Shift(nn.Module):
    """A convolution of three rows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, groups=2, bias=False)
        self.conv.weight = mx.ones((2, 3, 1))

    def __call__(self, x, cache=None):
        x = mx.concatenate([mx.zeros((1, 2, 2)) if cache[0] is None else cache[0], x], axis=1)
        cache[0] = x[:, -2:]
        return self.conv(x)


class Model(nn.Module):
    """These layers, one after the other; caches: more of them that nobody fills."""

    def __init__(self, *layers, caches=0):
        super().__init__()
        self.layers, self._caches = list(layers), caches

    def make_cache(self):
        made = [ArraysCache(1) for _ in (*self.layers, *range(self._caches))]
        return [KVCache(), *made]

    def __call__(self, ids, cache):
        x = mx.broadcast_to(ids[..., None], (*ids.shape, 2)).astype(mx.float32)
        for layer, own in zip(self.layers, cache[1:], strict=False):
            x = layer(x, cache=own)
        return x


def feed(model, recorder, caches, *numbers, **options):
    with recorder.recording(arrays_caches(caches), **options) as tape:
        model(mx.array([numbers]), caches)
    return tape


def slots(caches):
    return [[s[0].tolist() for s in c.cache] for c in arrays_caches(caches)]


def test_recurrent_caches_are_found_in_order():
    one, two, three = ArraysCache(1), ArraysCache(2), ArraysCache(3)
    nested = CacheList(KVCache(), one, CacheList(two, RotatingKVCache(4)))
    assert arrays_caches([KVCache(), nested, three]) == [one, two, three]
    assert arrays_caches([KVCache()]) == []


def test_modules_of_known_and_of_unknown_kinds_record():
    model = Model(Shift(), Adder(), Shift(), Adder())
    before = [type(m) for m in model.modules()]
    recorder = Recorder.arm(model)
    assert recorder.families == ["short convolution", "leaf (Adder)"]
    assert all(type(layer) is not was for layer in model.layers for was in (Shift, Adder))
    caches = model.make_cache()
    tape = feed(model, recorder, caches, 1, 2, 3)
    starts = [[c] for c in (None, mx.zeros((1, 2)), None, mx.zeros((1, 2)))]
    assert [[s[0].tolist() for s in layer] for layer in tape.replay(starts, 3)] == slots(caches)
    for rows in (1, 2):
        fresh = model.make_cache()
        model(mx.array([[1, 2, 3][:rows]]), fresh)
        got = [[s[0].tolist() for s in layer] for layer in tape.replay(starts, rows)]
        assert got == slots(fresh)
    recorder.disarm()
    assert [type(m) for m in model.modules()] == before and recorder.families == []


def test_modules_are_armed_only_where_caches_need_them():
    """A convolution beside the text's, of an encoder, say; a known recurrence run again whole."""

    class Encoder(Model):
        def make_cache(self):
            return [KVCache()]

    encoder = Encoder(Shift(), Adder())
    recorder = Recorder.arm(encoder)
    assert recorder.families == [] and [type(m) for m in encoder.layers] == [Shift, Adder]

    class Known(Model):
        def make_cache(self):
            return [ArraysCache(1)]

    known = Known(Shift(), Adder())
    assert Recorder.arm(known).families == ["short convolution"]
    assert type(known.layers[1]) is Adder


def test_a_cache_without_a_module_is_refused_before_anything_is_armed():
    """Armed by halves: the layer that records nothing stays where it was in every rewind."""
    for layers in ((Shift(), Adder()), (Shift(),), (Adder(),)):
        model = Model(*layers, caches=1)
        before = [type(m) for m in model.modules()]
        with pytest.raises(ModelError) as error:
            Recorder.arm(model)
        n = len(layers)
        assert f"has {n + 1} recurrent caches, but only {n} modules" in str(error.value)
        assert [type(m) for m in model.modules()] == before


def test_a_wrapper_around_a_leaf_is_no_cache_of_its_own():
    """It hides a cache that nobody records."""

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Adder()

        def __call__(self, x, cache=None):
            return self.inner(x, cache=cache)

    model = Model(Wrapper())
    recorder = Recorder.arm(model)
    assert recorder.families == ["leaf (Adder)"]
    caches = model.make_cache()
    tape = feed(model, recorder, caches, 1, 2)
    assert tape.rows == 2 and tape.replay([[mx.zeros((1, 2))]], 2)[0][0].tolist() == [[3, 3]]
    with pytest.raises(ModelError):
        Recorder.arm(Model(Wrapper(), caches=1))


def test_sizes_are_those_of_the_first_tape():
    """What is kept for going back counted wrongly: the budget of memory is not held."""
    model = Model(Shift(), Adder())
    recorder = Recorder.arm(model)
    assert recorder.sizes == Sizes(0, 0, 0, 0, 0) and not recorder.has_inner_states
    caches = model.make_cache()
    with recorder.recording(arrays_caches(caches)):
        pass
    assert recorder.sizes == Sizes()
    feed(model, recorder, caches, 1, 2)
    row = 2 * 4
    sizes = Sizes(2 * row, 2 * row, 3 * row, row_arrays=2, state_arrays=2)
    assert recorder.sizes == sizes
    feed(model, recorder, caches, 3)
    assert recorder.sizes == sizes


def test_whether_all_recurrences_leave_states_inside_a_call():
    for layers, all_do in (((Shift(),), True), ((Shift(), Adder()), False)):
        model = Model(*layers)
        recorder = Recorder.arm(model)
        feed(model, recorder, model.make_cache(), 1, 2)
        assert recorder.has_inner_states is all_do


def test_states_that_are_not_there_take_nothing():
    """A slot of a cache that the model has not filled yet."""

    class Two(Model):
        def make_cache(self):
            return [KVCache(), ArraysCache(2)]

    model = Two(Adder())
    recorder = Recorder.arm(model)
    feed(model, recorder, model.make_cache(), 1, 2)
    assert (recorder.sizes.state, recorder.sizes.state_arrays) == (2 * 4, 1)


def test_lanes_have_a_tape_each():
    """Rows of one text in the tape of another."""
    model = Model(Shift(), Adder())
    recorder = Recorder.arm(model)
    texts, starts = ([1, 2], [3, 4, 5]), [[None], [mx.zeros((1, 2))]]
    for known in (False, True):
        lanes = [model.make_cache() for _ in texts]
        recurrent = [arrays_caches(caches) for caches in lanes]
        with recorder.recording_lanes(recurrent, [2, 3]) as tapes:
            for caches, text in zip(lanes, texts, strict=True):
                model(mx.array([text]), caches)
        assert [tape.rows for tape in tapes] == [2, 3] and (recorder.sizes.row > 0)
        for tape, caches, text in zip(tapes, lanes, texts, strict=True):
            got = [[s[0].tolist() for s in x] for x in tape.replay(starts, len(text))]
            assert got == slots(caches), known


def test_lanes_of_a_batch_have_a_tape_each():
    model = Model(Adder())
    recorder = Recorder.arm(model)
    caches = model.make_cache()
    with recorder.recording_batch(arrays_caches(caches), 2, 3) as tapes:
        model(mx.array([[3, 1, 1], [4, 2, 2]]), caches)
    assert [tape.rows for tape in tapes] == [3, 3]
    got = [tape.replay([[mx.zeros((1, 2))]], 3)[0][0].tolist() for tape in tapes]
    assert got == [[[5, 5]], [[8, 8]]] and caches[1][0].tolist() == [[5, 5], [8, 8]]


def test_a_lane_of_a_batch_knows_the_tape_of_all():
    """What is cut or joined of it would keep the rows of all lanes, and answer for others."""
    model = Model(Adder())
    recorder = Recorder.arm(model)
    caches = model.make_cache()
    with recorder.recording_batch(arrays_caches(caches), 2, 3) as tapes:
        model(mx.array([[3, 1, 1], [4, 2, 2]]), caches)
    one, two = tapes
    assert one.whole is two.whole and (one.lane, two.lane) == (0, 1)
    starts = [[mx.array([[10.0, 10.0], [20.0, 20.0]])]]
    assert one.whole.replay_each(starts, [1, 3])[0][0].tolist() == [[13, 13], [28, 28]]
    parts = one.first(2), one.last(1), one.compact(), Tape.concat([one, one]), Tape()
    assert all(part.whole is None for part in parts) and one.first(3) is one
