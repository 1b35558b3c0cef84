"""All layers together, on layers that note what they are asked: which of them is asked what, and
what their answers come to.
"""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache

from ds4cli.caches.arena import SeatedKVCache, Seating
from ds4cli.caches.sliding import SlidingKVCache
from ds4cli.caches.stack import Stack
from ds4cli.errors import StateError
from ds4cli.rewind.checkpoints import Checkpoint
from ds4cli.rewind.layers import Layers


class Layer:
    """An adapter that notes its calls. shares: what `leave` answers."""

    splits_long_calls = comes_with_logits = False

    def __init__(self, low=0, high=9, at=5, seekable=True, keeps=True, shares=True):
        self.seekable, self.keeps_every_row, self.shares = seekable, keeps, shares
        self._low, self._high, self._at = low, high, at
        slots = {} if seekable else {"cache": [mx.array([1.0]), None]}
        self.cache = SimpleNamespace(**slots)
        self.asked = []

    def low(self):
        return self._low

    def high(self):
        return self._high

    def pos(self):
        return self._at

    def seek(self, pos):
        self.asked.append(("seek", pos))
        self._at = pos

    def forget_redo(self):
        self.asked.append(("forget",))

    def leave(self, others, writers=()):
        self.asked.append(("leave", list(others), list(writers)))
        return self.shares

    def fork(self):
        return Layer(self._low, self._high, self._at, self.seekable, self.keeps_every_row)

    def checkpoint(self):
        return [mx.zeros(10), self._at]

    def checkpoint_arrays(self, state):
        return state[:1]

    def restore_checkpoint(self, state, pos):
        self.asked.append(("restore", state, pos))

    def restores(self, state):
        return state != "no"

    def load_state(self, arrays, meta):
        self.asked.append(("load", arrays, meta))

    def state_dict(self):
        return {"rows": self._at}, {"pos": self._at}


def layers_of(*parts) -> Layers:
    return Layers([part.cache for part in parts], list(parts))


def mixed():
    return layers_of(Layer(2, 9, 5), Layer(seekable=False, keeps=False), Layer(4, 7, 5))


def test_what_all_layers_reach():
    """Guards: the reach of one layer taken for that of all."""
    layers = mixed()
    assert (layers.low(), layers.high(99)) == (4, 7)
    only = layers_of(Layer(seekable=False, keeps=False))
    assert (only.low(), only.high(99)) == (0, 99)
    assert not layers.can_cut and layers_of(Layer(), Layer()).can_cut
    assert not layers_of(Layer(), Layer(keeps=False)).can_cut


def test_a_long_call_is_split_for_one_layer_that_needs_it():
    """Positions inside the call were out of reach."""
    layers = layers_of(Layer(), Layer())
    assert layers.splits_long_calls is False
    part = Layer()
    part.splits_long_calls = True
    assert layers_of(Layer(), part).splits_long_calls is True


def test_where_all_layers_stand():
    """Guards: a file of which one layer stands elsewhere, or lacks rows, is taken."""
    layers = mixed()
    assert layers.stand_at(5) and not layers.stand_at(6)
    layers.adapters[0]._low = 5
    assert layers.stand_at(5)
    layers.adapters[0]._low = 6
    assert not layers.stand_at(5), "it has not all rows that the next token needs"


def test_all_layers_are_moved():
    """Guards: a cursor, or slots, left behind."""
    layers = mixed()
    first, recurrent, last = layers.adapters
    slots = [[mx.array([2.0]), None]]
    layers.stand(6, slots)
    assert first.asked == last.asked == [("seek", 6)] and recurrent.asked == []
    assert recurrent.cache.cache == slots[0] and recurrent.cache.cache is not slots[0]
    layers.forget_redo()
    assert first.asked[-1] == last.asked[-1] == ("forget",)


def test_a_hold_undoes_all_that_happened_since():
    """Guards: a field of a cache or adapter that stays as the failed call left it."""
    layers = mixed()
    first, recurrent, _ = layers.adapters
    first.cache.offset, first.cache.rows = 5, "old"
    slots = [*recurrent.cache.cache]
    hold = layers.hold()
    first.cache.offset, first.cache.rows, first._at = 7, "new", 7
    recurrent.cache.cache[0] = mx.array([3.0])
    layers.restore(hold)
    assert (first.cache.offset, first.cache.rows, first._at) == (5, "old", 5)
    assert recurrent.cache.cache == slots


def test_branches_are_asked_layer_by_layer_before_a_write():
    """Rows of one branch were written by another; those of branches that share none were asked for
    at every token."""
    layers = layers_of(Layer(), Layer())
    layers.before_write()
    assert layers.adapters[0].asked == [], "there is nobody else"
    second, third = layers.fork(), None
    third = second.fork()
    layers.before_write([second])
    for i, part in enumerate(layers.adapters):
        ((_, others, writers),) = part.asked
        assert {*others} == {second.adapters[i], third.adapters[i]}
        assert writers == [second.adapters[i]]
    for part in second.adapters:
        part.shares = False
    second.before_write()
    second.before_write()
    assert [len(part.asked) for part in second.adapters] == [1, 1], "nothing is shared any more"
    layers.before_write([second, third])
    _, others, writers = layers.adapters[1].asked[-1]
    assert others == writers == [third.adapters[1]]
    third.restore(third.hold())  # as of when the rows were shared
    second.before_write()
    assert len(second.adapters[0].asked) == 2
    second.fork()
    second.before_write()
    assert len(second.adapters[0].asked) == 3, "a new branch shares them again"


def test_a_layer_that_shares_keeps_all_being_asked():
    """One that has rows of its own was taken for all."""
    layers = layers_of(Layer(), Layer())
    twin = layers.fork()
    layers.adapters[0].shares = False
    for _ in range(2):
        layers.before_write()
    assert len(layers.adapters[1].asked) == 2 and twin.adapters[0].asked == []
    twin.before_write()
    assert twin.adapters[0].asked == [("leave", [layers.adapters[0]], [])]


def test_a_checkpoint_counts_what_it_holds():
    """Guards: bytes kept beyond the budget; a row that keeps a whole call alive."""
    layers = mixed()
    rows = mx.arange(40.0).reshape(4, 10)
    bare, whole = layers.checkpoint(5, "turn", None), layers.checkpoint(5, "tool", rows[1])
    assert (bare.pos, bare.kind, bare.nbytes, bare.logits) == (5, "turn", 3 * 40, None)
    assert (whole.kind, whole.nbytes) == ("tool", 4 * 40)
    assert whole.logits.tolist() == rows[1].tolist()
    assert [state[1] for state in whole.payload] == [5, 5, 5]


def test_a_checkpoint_is_evaluated_at_once(monkeypatch):
    """Left lazy it keeps alive all that leads to it."""
    begun = []
    monkeypatch.setattr(mx, "async_eval", lambda *trees: begun.append(trees))
    layers, row = mixed(), mx.zeros(10)
    layers.checkpoint(5, "turn", None)
    layers.checkpoint(5, "turn", row)
    (arrays, nothing), (_, logits) = begun
    assert (len(arrays), nothing, logits.shape) == (3, [], (10,))


def test_checkpoints_and_states_go_layer_by_layer():
    """Guards: the state of another layer, or of one that refuses."""
    layers = layers_of(Layer(at=1), Layer(at=2))
    layers.restore_checkpoint(Checkpoint(7, "turn", ["a", "b"]))
    assert [part.asked for part in layers.adapters] == [
        [("restore", "a", 7)],
        [("restore", "b", 7)],
    ]
    assert layers.restores(Checkpoint(7, "turn", ["a", "b"]))
    assert not layers.restores(Checkpoint(7, "turn", ["a", "no"]))
    states = [{"arrays": {"rows": n}, "meta": {"pos": n}} for n in (1, 2)]
    assert layers.state() == states
    layers.load_state(states[::-1])
    assert layers.adapters[0].asked[-1] == ("load", {"rows": 2}, {"pos": 2})
    assert layers.live() == [{}, {}]


def test_states_of_another_number_of_layers_are_refused():
    """Guards: layers that are left as they were."""
    layers = layers_of(Layer(), Layer())
    for load in (
        lambda: layers.load_state([{"arrays": {}, "meta": {}}]),
        lambda: layers.restore_checkpoint(Checkpoint(7, "turn", ["a"])),
        lambda: layers.restores(Checkpoint(7, "turn", ["a"])),
        lambda: layers.stand(3, [[]]),
    ):
        with pytest.raises((ValueError, StateError)):
            load()


def test_a_twin_has_the_adapters_of_the_fork():
    """Made anew from the caches they had forgotten what adapters know."""
    layers = layers_of(Layer(low=3))
    twin = layers.fork()
    assert twin.low() == 3 and twin.caches[0] is twin.adapters[0].cache
    assert twin.caches[0] is not layers.caches[0]


# --- on caches of mlx-lm --------------------------------------------------------------------------


def read(layers, *tokens):
    """A call: every cache gets a row for each token, recurrent ones their sum."""
    rows = mx.array(tokens, mx.float32)[None, None, :, None]
    for part in layers.adapters:
        if part.seekable:
            part.cache.update_and_fetch(rows, -rows)
        else:
            part.cache.cache = [part.cache[0] + sum(tokens)]


def shown(layers):
    """What each layer holds: rows up to its cursor, or its slots."""
    found = []
    for part in layers.adapters:
        if part.seekable:
            keys, values = part.cache.keys_and_values()
            assert keys.tolist() == (-values).tolist()
            found.append([round(x) for x in keys.flatten().tolist()])
        else:
            found.append(part.cache[0].tolist())
    return found


def slots_of(total):
    cache = ArraysCache(1)
    cache[0] = mx.array([total])
    return cache


@pytest.mark.parametrize(("options", "cursor"), [({}, None), ({"before_call": True}, 3)])
@pytest.mark.parametrize("long", [1, 300])
def test_a_call_on_plain_rows_is_undone(options, cursor, long):
    """A layer behind the others, or in a buffer that has grown meanwhile."""
    layers = Layers([KVCache(), slots_of(0.0), KVCache()])
    read(layers, 1, 2, 3)
    hold, cache = layers.hold(**options), layers.caches[0]
    assert (hold.cursor, hold.moved) == (cursor, 0)
    buffers = cache.keys, cache.values
    read(layers, *[9] * long)
    layers.restore(hold)
    assert shown(layers) == [[1, 2, 3], [6.0], [1, 2, 3]]
    assert cache.keys is buffers[0] and cache.values is buffers[1]
    read(layers, 4)
    assert shown(layers) == [[1, 2, 3, 4], [10.0], [1, 2, 3, 4]]


@pytest.mark.parametrize("other", [ConcatenateKVCache, lambda: SlidingKVCache(4, 2)])
def test_layers_of_other_kinds_are_held_whole(other):
    """Fields that only they have stay as the failed call left them."""
    layers = Layers([KVCache(), other()])
    read(layers, *range(1, 10))
    hold = layers.hold(before_call=True)
    assert hold.cursor is None
    before = [{**vars(part.cache)} for part in layers.adapters]
    read(layers, *[9] * 20)
    layers.restore(hold)
    for part, fields in zip(layers.adapters, before, strict=True):
        now = vars(part.cache)
        assert {*now} == {*fields} and all(now[name] is fields[name] for name in fields)


def test_what_is_not_computed_with_the_logits_is_evaluated():
    """Left lazy, its graph grows with every token."""
    inside, slots, joined = KVCache(), ArraysCache(1), ConcatenateKVCache()
    layers = Layers([KVCache(), SlidingKVCache(4, 2), CacheList(inside, slots), joined])
    live = [id(tree) for tree in layers.live()]
    assert live == [id(vars(cache)) for cache in (inside, slots, joined)]


def test_a_call_on_seats_is_undone():
    """The seat moves all layers at once; a layer that was sought by itself stays there."""
    layers = Layers([KVCache(), slots_of(0.0), KVCache()])
    read(layers, 1, 2, 3)
    seating = Seating([(0,), (2,)])
    seating.seat([layers.caches])
    seat = layers.caches[0].seat
    seat.moved += 1  # a call for all lanes wrote a row
    hold = layers.hold(before_call=True)
    assert (hold.cursor, hold.moved) == (None, 1)
    assert layers.hold().rows is hold.rows, "nothing is asked of a layer"
    layers.caches[1].cache = [mx.array([7.0])]
    seat.moved += 2
    layers.caches[2].offset = 2
    again = layers.hold()
    assert again.rows is not hold.rows and again.moved == 3
    layers.restore(hold)
    assert [layers.caches[i].offset for i in (0, 2)] == [4, 4] and layers.caches[1][0].item() == 6
    layers.restore(again)
    assert [layers.caches[i].offset for i in (0, 2)] == [6, 2] and layers.caches[1][0].item() == 7
    kept = layers.hold()
    assert layers.hold().rows is kept.rows
    layers.forget_redo()
    assert layers.hold().rows is not kept.rows, "what adapters know is another thing now"
    layers.restore(kept)
    layers.caches[2].leave()
    half = layers.hold()
    assert layers.hold().rows is not half.rows, "one of them moves by itself"
    seat.moved += 1
    layers.caches[2].offset = 1
    layers.restore(half)
    assert [layers.caches[i].offset for i in (0, 2)] == [6, 2]


@pytest.mark.parametrize("before_call", [False, True])
@pytest.mark.parametrize("first", [KVCache, lambda: SlidingKVCache(4, 2)])
def test_a_seat_behind_a_layer_without_one_is_held(first, before_call):
    """The seat moves on, and only the first layer was asked whether it has one."""
    layers = Layers([first(), KVCache()])
    read(layers, 1, 2, 3)
    Seating([(1,)]).seat([layers.caches])
    layers.caches[1].seat.moved += 1
    hold = layers.hold(before_call)
    layers.caches[1].seat.moved += 2
    layers.restore(hold)
    assert layers.caches[1].offset == 4


def test_rows_that_got_a_seat_after_the_hold_stay_in_it():
    layers = Layers([KVCache(), KVCache()])
    read(layers, 1, 2, 3)
    for before_call in (False, True):
        hold = layers.hold(before_call)
        Seating([(0,), (1,)]).seat([layers.caches])
        layers.caches[0].seat.moved += 2
        layers.restore(hold)
        assert shown(layers) == [[1, 2, 3]] * 2 and isinstance(layers.caches[1], SeatedKVCache)
        for cache in layers.caches:
            cache.leave()


def test_stacked_slots_are_undone_without_being_looked_at():
    """States of another lane, or those that a later call left."""
    lanes = [Layers([slots_of(n)]) for n in (1.0, 2.0)]
    stack = Stack([own.recurrent_caches for own in lanes])
    holds = [own.hold() for own in lanes]
    assert all(stack.has_all)
    stack.layers = [[stack.layers[0][0] + 10]]
    later = [own.hold() for own in lanes]
    for own, hold, after in zip(lanes, holds, later, strict=True):
        for part, numbers in ((hold, (1.0, 2.0)), (after, (11.0, 12.0))):
            own.restore(part)
            assert own.caches[0][0].tolist() == [numbers[lanes.index(own)]]
    assert not all(stack.has_all)
    assert [own.hold().slots[0][0].item() for own in lanes] == [11, 12]


def test_a_lane_is_cut_with_its_seat():
    """Each layer's cursor was set by itself, for every lane and call with guesses; or a layer that
    had been moved alone was moved with the others."""
    layers = Layers([KVCache(), KVCache()])
    read(layers, 1, 2, 3, 4, 5)
    Seating([(0,), (1,)]).seat([layers.caches])
    seat, before = layers.caches[0].seat, layers.caches[0].at
    layers.hold(before_call=True)
    layers.cut(3, [])
    assert layers.caches[0].at == before and seat.moved == -2, "one number for all layers"
    assert shown(layers) == [[1, 2, 3]] * 2 and layers.high(9) == 3
    layers.stand(2, [])
    layers.forget_redo()
    layers.hold(before_call=True)
    layers.caches[1].offset = 3
    layers.cut(1, [])
    assert [c.offset for c in layers.caches] == [1, 1] and layers.high(9) == 1
