"""Recurrences that no file knows: the module is called again."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from ds4cli.errors import ModelError
from ds4cli.hooks.rebind import Swaps
from ds4cli.tape.families import leaf
from ds4cli.tape.frames import Recording
from ds4cli.tape.tape import Tape


def noise(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def near(a, b):
    return mx.allclose(a, b, atol=1e-5).item()


def arm(module):
    leaf.arm(module, Swaps())
    return module


class Leaf(nn.Module):
    """Adds its rows up in two slots; notes how it is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __call__(self, x, *args, cache=None, **named):
        self.calls.append((args, named))
        more = [a for a in (*args, *named.values()) if isinstance(a, mx.array) and a.ndim > 1]
        for slot, sign in ((0, 1), (1, -1)):
            known = mx.zeros((1, 4)) if cache[slot] is None else cache[slot]
            cache[slot] = known + sign * x.sum(axis=1) + sum(a.sum(axis=1) for a in more)
        return x


def call(module, cache, *args, **named):
    with Recording([cache], 0) as (frame,):
        module(*args, cache=cache, **named)
    tape = Tape()
    tape.fill([frame.found()])
    return tape


def test_a_leaf_is_called_again_as_it_was_called():
    """Rows of one argument given to another, or a slot that another call moves."""
    module, cache = arm(Leaf()), ArraysCache(2)
    x, more, last = noise(1, 1, 5, 4), noise(2, 1, 5, 4), noise(3, 1, 5)
    tape = call(module, cache, x, None, more, True, "causal", named=last, mask="causal", flag=False)
    assert tape.rows == 5 and tape.replay([[None, None]], 5)[0][0].tolist() == cache[0].tolist()
    assert module.calls[0][0][3] == "causal"
    args, named = module.calls[1]
    assert (args[0], args[2], args[3]) == (None, True, None)
    assert named["mask"] is None and named["flag"] is False
    assert args[1].tolist() == more.tolist() and named["named"].tolist() == last.tolist()
    module.calls.clear()
    one, two = tape.replay([[mx.ones((1, 4)), mx.zeros((1, 4))]], 3)[0]
    assert len(module.calls) == 1, "one call moves all slots"
    sums = [a[:, :3].sum(axis=1) for a in (x, more, last)]
    assert near(one, 1 + sum(sums)) and near(two, -sums[0] + sums[1] + sums[2])
    assert tape.slots_that(lambda track: track.recomputes) == [[True, True]]


def test_a_cache_is_handed_on_in_its_place():
    module, cache = arm(Outer(nn.Linear(4, 4), own=True)), ArraysCache(1)
    x = noise(1, 1, 5, 4)
    with Recording([cache], 0) as (frame,):
        module(x, cache)
    tape = Tape()
    tape.fill([frame.found()])
    assert near(tape.replay([[None]], 5)[0][0], cache[0])


def test_leaves_are_joined_where_their_calls_are_alike():
    module, cache = arm(Leaf()), ArraysCache(2)
    x = noise(1, 1, 5, 4)
    parts = [call(module, cache, x[:, a:b], flag=True) for a, b in ((0, 2), (2, 5))]
    joined = Tape.concat(parts)
    assert joined.rows == 5 and near(joined.replay([[None, None]], 4)[0][0], x[:, :4].sum(axis=1))
    other = call(module, cache, x[:, :2], flag=False)
    for unlike in (other, call(arm(Leaf()), cache, x[:, :2], flag=True)):
        with pytest.raises(ModelError, match="calls of `Leaf` can't be joined"):
            Tape.concat([parts[0], unlike]).replay([[None, None]], 3)
    again = call(arm(Leaf()), cache, x)
    assert next(iter(again._tracks())).key(None) != next(iter(joined._tracks())).key(None)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ((3,), "int"),
        ((noise(1, 5),), "array"),
        ((noise(1, 1, 4, 4),), "array"),
        (([1],), "list"),
        ((KVCache(),), "KVCache"),
    ],
)
def test_a_leaf_that_takes_something_else_is_refused(given, kind):
    """It may depend on the position, which is another one in a replay."""
    for args, named in ((given, {}), ((), {"offset": given[0]})):
        with pytest.raises(ModelError, match=f"`Leaf` takes a `{kind}` with its rows"):
            call(arm(Leaf()), ArraysCache(2), noise(1, 1, 5, 4), *args, **named)


class Outer(nn.Module):
    """Hands its cache on, or takes it itself."""

    def __init__(self, inner, own=False):
        super().__init__()
        self.inner, self._own = inner, own

    def __call__(self, x, cache=None):
        if not self._own:
            return self.inner(x, cache=cache)
        cache[0] = self.inner(x).sum(axis=1)
        return x


class Rows(nn.Module):
    def __call__(self, x, cache=None):
        return cache.update_and_fetch(x, x)


def test_leaves_are_the_innermost_modules_with_a_cache():
    """A wrapper replayed beside what it wraps, or attention taken for a recurrence."""
    known = Outer(Leaf())
    model = nn.Sequential(known, Outer(Leaf()), Outer(nn.Linear(4, 4), own=True), Rows(), Leaf())
    found = leaf.candidates(model, [known])
    layers = model.layers
    wanted = [layers[1], layers[1].inner, layers[2], layers[4]]
    assert {id(m) for m in found} == {id(m) for m in wanted}
    inner = {id(m) for m in leaf.innermost(found)}
    assert inner == {id(layers[1].inner), id(layers[2]), id(layers[4])}
    assert not leaf.owns(layers[3]) and not leaf.owns(nn.Linear(4, 4))
    wrapper = layers[1]
    for part in (wrapper, wrapper.inner):
        arm(part)
    cache = ArraysCache(2)
    tape = call(wrapper, cache, noise(1, 1, 5, 4))
    assert tape.rows == 5 and [t.module for t in tape._tracks()] == [wrapper.inner] * 2
    # In the frame of a cache that it is not handed itself.
    inside = arm(Outer(arm(Outer(nn.Linear(4, 4), own=True))))
    other = ArraysCache(1)
    with Recording([other], 0) as (frame,):
        inside(noise(1, 1, 5, 4), cache=other)
    assert len(frame.tracks[0]) == 1
