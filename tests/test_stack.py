"""Stacked states of lanes, by hand: a slot is the number of its lane, tens are the layer's."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from ds4cli.caches.stack import Stack, StackedCache, StackedSlots, stacked


def lane(number):
    """Two recurrent caches: one of two slots, one of one."""
    made = []
    for layer, slots in ((10, 2), (20, 1)):
        cache = ArraysCache(slots)
        cache.cache = [mx.full((1, 3), layer + number + i * 0.5) for i in range(slots)]
        made.append(cache)
    return made


def values(slots):
    return [None if x is None else x[:, 0].tolist() for x in slots]


def of(layer, lanes):
    """This cache of each lane."""
    return [caches[layer] for caches in lanes]


def test_the_states_of_lanes_become_one_array_a_slot():
    """Slots of another lane or layer."""
    lanes = [lane(1), lane(2), lane(3)]
    stack = Stack(lanes)
    assert [values(layer) for layer in stack.layers] == [
        [[11, 12, 13], [11.5, 12.5, 13.5]],
        [[21, 22, 23]],
    ]
    assert all(stack.has_all) and all(type(c) is StackedCache for caches in lanes for c in caches)
    assert all(stack.has(of(layer, lanes)) for layer in (0, 1)), "nobody looked"
    stack.layers[1] = [stack.layers[1][0] + 100]
    assert values(lanes[1][1].cache) == [[122]] and values(lanes[2][0].cache) == [[13], [13.5]]
    assert type(lanes[1][1]) is ArraysCache and {*vars(lanes[1][1])} == {*vars(ArraysCache(1))}
    assert type(lanes[1][0]) is StackedCache and lanes[2][0].cache is lanes[2][0].cache


def test_who_looks_or_puts_other_slots_there_has_them_alone():
    """A call for all moved on what a lane had gone back to."""
    for touch in (
        lambda cache: cache.cache,
        lambda cache: cache[0],
        lambda cache: cache.state,
        lambda cache: copy.copy(cache).cache,
        lambda cache: setattr(cache, "cache", [mx.zeros((1, 3))]),
    ):
        lanes = [lane(1), lane(2)]
        stack = Stack(lanes)
        touch(lanes[1][1])
        assert not all(stack.has_all) and not stack.has(of(0, lanes))
    assert values(lanes[1][1].cache) == [[0]] and values(lanes[0][1].cache) == [[21]]


def test_a_stack_has_its_own_lanes_all_of_them_in_order():
    lanes = [lane(1), lane(2), lane(3)]
    stack = Stack(lanes)
    one, two, three = of(1, lanes)
    assert stack.has([one, two, three])
    for others in ([two, one, three], [one, two], [one, two, three, three], [one, one, three], []):
        assert not stack.has(others)
    other = of(1, [lane(1), lane(2), lane(3)])
    assert not stack.has(other) and not stack.has([one, two, other[2]])
    mixed = [lane(4), lane(5), lane(6)]
    Stack(mixed)
    assert not stack.has(of(1, mixed)), "they are in another one"


def test_lanes_of_unlike_layers_are_refused_as_they_were():
    short = lane(2)[:1]
    lanes = [lane(1), short]
    with pytest.raises(ValueError):
        Stack(lanes)
    ragged = [lane(1), lane(2)]
    ragged[1][0].cache = ragged[1][0].cache[:1]
    with pytest.raises(ValueError):
        Stack(ragged)
    assert all(type(c) is ArraysCache for caches in (*lanes, *ragged) for c in caches)


def test_the_slots_of_a_moment_are_cut_out_when_somebody_looks():
    """Of a later call: an undone step left the layers ahead."""
    lanes = [lane(1), lane(2)]
    stack = Stack(lanes)
    slots = StackedSlots(kept := [*stack.layers], 1)
    stack.layers[0] = [x + 100 for x in stack.layers[0]]
    kept.append([None])
    slots = StackedSlots(kept, 1)
    kept[0] = [mx.full((2, 3), n) for n in (7.0, 8.0)]
    assert len(slots) == 3
    first = slots[0]
    assert values(first) == [[7], [8]] and first[0].shape == (1, 3)
    kept[0] = []
    assert slots[0] is first and values(slots[1]) == [[22]] and slots[2] == [None]
    assert [values(layer) for layer in slots[1:]] == [[[22]], [None]] and len(slots) == 3
    assert [values(layer) for layer in slots] == [[[7], [8]], [[22]], [None]]


def test_the_slots_of_all_lanes_are_those_of_a_stack_where_they_are_its_rows():
    """When a lane had ended, the others were given the states of all there had been."""
    layers = Stack([lane(1), lane(2), lane(3)]).layers
    one, two, three = (StackedSlots(layers, row) for row in range(3))
    assert stacked([one, two, three]) is layers
    other = [cache.cache for cache in lane(5)]
    for lanes in ([one, two], [two, three], [three, two, one], [other, two, three]):
        found = stacked(lanes)
        assert [values(layer) for layer in found] == [
            [[n for x in slot for n in x[:, 0].tolist()] for slot in zip(*layer, strict=True)]
            for layer in zip(*lanes, strict=True)
        ]
    fresh = StackedSlots(layers, 0)
    assert fresh.place == (layers, 0) and fresh[0] and fresh.place is None
    assert stacked([fresh, StackedSlots(layers, 1), StackedSlots(layers, 2)]) is not layers


def test_slots_that_a_lane_has_already_are_known():
    """A lane that was cut as part of a batch fell out of the stack of all."""
    lanes = [lane(1), lane(2)]
    stack = Stack(lanes)
    assert StackedSlots(stack.layers, 1).are_in(lanes[1])
    assert not StackedSlots(stack.layers, 0).are_in(lanes[1])
    assert not StackedSlots([*stack.layers], 1).are_in(lanes[1]), "of another call"
    assert not StackedSlots(stack.layers, 1).are_in(lane(2)), "no stack"
    looked = StackedSlots(stack.layers, 1)
    assert looked[0] and not looked.are_in(lanes[1])
    assert lanes[0][0].cache and StackedSlots(stack.layers, 1).are_in(lanes[1]), "another lane's"
    assert lanes[1][1].cache and not StackedSlots(stack.layers, 1).are_in(lanes[1])


def test_lanes_that_stay_are_stacked_again_as_one(monkeypatch):
    """Whenever a line ended and another took its place, the states of all lanes were taken apart
    layer by layer, and put together again."""
    lanes = [lane(n) for n in (1, 2, 3, 4)]
    stack = Stack(lanes)
    stack.layers = [[x + 100 for x in layer] for layer in stack.layers]
    assert lanes[2][1].cache, "it ended"
    pieces, concatenate = [], mx.concatenate
    monkeypatch.setattr(mx, "concatenate", lambda x: pieces.append(len(x)) or concatenate(x))
    lanes[2] = lane(7)
    again = Stack(lanes)
    assert pieces == [3, 3, 3], "a slot each, of those before, the new one and those behind"
    assert [values(layer) for layer in again.layers] == [
        [[111, 112, 17, 114], [111.5, 112.5, 17.5, 114.5]],
        [[121, 122, 27, 124]],
    ]
    assert again.has(of(0, lanes)) and not stack.has(of(0, lanes))
    stack.layers = [[x * 0 for x in layer] for layer in stack.layers]
    assert values(lanes[3][1].cache) == [[124]], "the old one is no longer theirs"
    fewer = Stack([lanes[0], lanes[1]])
    assert values(fewer.layers[1]) == [[121, 122]] and pieces == [3] * 3 + [1] * 3
