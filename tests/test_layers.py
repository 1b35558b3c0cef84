"""All layers together, on layers that note what they are asked: which of them is asked what, and
what their answers come to.
"""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

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
