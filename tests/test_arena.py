"""Seats in arenas, by hand: a row is the number of its token."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache

from ds4cli.caches import arena as module
from ds4cli.caches.arena import (
    Arena,
    Seat,
    SeatedKVCache,
    Seating,
    at,
    held,
    of_lanes,
    put_back,
)

STEP = 4
PLACES = [(0,), (1, 1), (3,)]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(module, "STEP", STEP)


def rows(tokens):
    """Keys (1, 2, n, 3) and values (1, 2, n, 1)."""
    column = mx.array([*tokens], mx.float32)[None, None, :, None]
    n = len([*tokens])
    return mx.broadcast_to(column, (1, 2, n, 3)) + 0, -mx.broadcast_to(column, (1, 2, n, 1))


def cache_of(*tokens):
    cache = KVCache()
    if tokens:
        cache.update_and_fetch(*rows(tokens))
    return cache


def numbers(keys, values):
    assert (keys == keys[:, :1, :, :1]).all() and (values == -keys[..., :1]).all()
    return [round(x) for x in keys[0, 0, :, 0].tolist()]


def text(cache):
    """The tokens that a cache shows."""
    assert cache.keys_and_values()[0].shape[2] == cache.offset
    return numbers(*cache.keys_and_values())


def rows_of(arena):
    """All columns of every row."""
    pairs = zip(arena.keys, arena.values, strict=True)
    return [numbers(keys[None], values[None]) for keys, values in pairs]


# --- one layer ------------------------------------------------------------------------------------


def test_a_row_is_taken_over_whole():
    """What somebody left behind the rows is still there: it reaches attention as 0 times NaN."""
    one, two = cache_of(*range(1, 4)), cache_of(*range(11, 17))
    arena = Arena(one, 3)
    assert (arena.rows, arena.columns) == (3, STEP) and arena.keys.shape == (3, 2, STEP, 3)
    assert arena.values.shape == (3, 2, STEP, 1) and arena.keys.dtype == mx.float32
    arena.keys, arena.values = arena.keys + mx.nan, arena.values + mx.nan
    seat = Seat(1)
    arena.adopt(one, seat)
    assert type(one) is SeatedKVCache and (one.arena, one.seat) == (arena, seat)
    assert text(one) == [1, 2, 3] and numbers(arena.keys[1:2], arena.values[1:2]) == [1, 2, 3, 0]
    assert mx.isnan(arena.keys[0]).all() and mx.isnan(arena.values[2]).all()
    arena.keys, arena.values = (mx.nan_to_num(x, 0) for x in (arena.keys, arena.values))
    arena.adopt(two, Seat(2))
    assert arena.columns == 2 * STEP
    assert rows_of(arena) == [[0] * 8, [1, 2, 3, *[0] * 5], [*range(11, 17), 0, 0]]
    assert text(one) == [1, 2, 3] and text(two) == [*range(11, 17)]
    half = KVCache()
    half.update_and_fetch(*(x.astype(mx.bfloat16) for x in rows([1])))
    narrow = Arena(half, 1)
    assert narrow.values.dtype == narrow.keys.dtype == mx.bfloat16
    narrow.add(2)
    assert narrow.values.dtype == narrow.keys.dtype == mx.bfloat16
    for wanted, columns in ((8, 8), (9, 12), (17, 20), (3, 20)):
        arena.reserve(wanted)
        assert arena.columns == columns and arena.values.shape[2] == columns


def test_a_seat_moves_its_layers_together_and_each_by_itself():
    """The cursor of one layer set, and those of all others with it."""
    seat, layers = Seat(0), [cache_of(1, 2, 3), cache_of(1, 2, 3)]
    arenas = [Arena(layer, 1) for layer in layers]
    assert seat.moved == 0
    seat.moved = 2
    for arena, layer in zip(arenas, layers, strict=True):
        arena.adopt(layer, seat)
    assert [layer.offset for layer in layers] == [3, 3]
    known = seat.cursors
    assert known is not Seat(0).cursors
    seat.moved += 1
    assert [layer.offset for layer in layers] == [4, 4] and seat.cursors is known
    layers[0].offset = 2
    assert [layer.offset for layer in layers] == [2, 4] and seat.cursors is not known
    known = seat.cursors
    layers[0].trim(1)
    assert layers[0].offset == 1 and seat.cursors is not known


def test_a_lane_writes_alone_as_any_cache():
    one, two = cache_of(1, 2, 3), cache_of(11, 12)
    arena = Arena(one, 2)
    arena.adopt(one, Seat(0))
    arena.adopt(two, Seat(1))
    assert numbers(*one.update_and_fetch(*rows([4, 5]))) == [1, 2, 3, 4, 5]
    assert arena.columns == 2 * STEP and (one.offset, two.offset) == (5, 2)
    one.offset = 2
    assert numbers(*one.update_and_fetch(*rows([6]))) == [1, 2, 6]
    assert numbers(*two.update_and_fetch(*rows([13]))) == [11, 12, 13]
    assert rows_of(arena) == [[1, 2, 6, 4, 5, 0, 0, 0], [11, 12, 13, *[0] * 5]]


def test_rows_of_many_lanes_are_written_at_once():
    one = cache_of(1, 2)
    arena = Arena(one, 3)
    arena.write(
        mx.array([0, 0, 2]), mx.array([1, 3, 0]), *(x[0].swapaxes(0, 1) for x in rows([5, 6, 7]))
    )
    assert rows_of(arena) == [[0, 5, 0, 6], [0] * 4, [7, 0, 0, 0]]
    keys, values = (
        mx.concatenate(x) for x in zip(*(rows([i, i + 1]) for i in (1, 3, 5)), strict=True)
    )
    arena.write_all(mx.array([[0, 1], [1, 2], [2, 3]])[:, None, :, None], keys, values)
    assert rows_of(arena) == [[1, 2, 0, 6], [0, 3, 4, 0], [7, 0, 5, 6]]


def test_rows_are_added_and_let_go():
    arena = Arena(cache_of(1), 2)
    for row in (0, 1):
        arena.adopt(cache_of(row + 1), Seat(row))
    arena.add(2)
    assert rows_of(arena) == [[1, 0, 0, 0], [2, 0, 0, 0], [0] * 4, [0] * 4]
    arena.keep([2, 1])
    assert rows_of(arena) == [[0] * 4, [2, 0, 0, 0]] and arena.keys.dtype == mx.float32


def test_a_fork_and_who_leaves_have_rows_of_their_own(monkeypatch):
    """Rows that the arena writes over next; those that are not read yet keep all of it alive."""
    begun = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: begun.append(arrays))
    one = cache_of(1, 2, 3)
    arena = Arena(one, 1)
    arena.adopt(one, Seat(0))
    twin = copy.copy(one)
    assert all(a is b for a, b in zip(begun[0], (twin.keys, twin.values), strict=True))
    assert type(twin) is KVCache and text(twin) == [1, 2, 3] and type(one) is SeatedKVCache
    one.update_and_fetch(*rows([4]))
    twin.update_and_fetch(*rows([9]))
    assert (text(one), text(twin)) == ([1, 2, 3, 4], [1, 2, 3, 9])
    one.leave()
    assert type(one) is KVCache and {*vars(one)} == {*vars(KVCache())}
    arena.keys[:] = 0
    assert text(one) == [1, 2, 3, 4] and one.update_and_fetch(*rows([5]))[0].shape[2] == 5


@pytest.mark.parametrize("was_seated", [False, True])
@pytest.mark.parametrize("is_seated", [False, True])
def test_what_was_held_is_put_back_wherever_the_rows_lie_now(was_seated, is_seated):
    cache, seat = cache_of(1, 2, 3), Seat(0)
    arena = Arena(cache, 1)
    seat.moved = 2
    if was_seated:
        arena.adopt(cache, seat)
    state, moved = held(cache), seat.moved
    assert state == ({"at": 1} if was_seated else {**vars(cache)})
    cache.offset = 2
    seat.moved += 3
    cache.offset = 1
    if was_seated and not is_seated:
        cache.leave()
    if is_seated and not was_seated:
        arena.adopt(cache, seat)
    put_back(cache, state, moved)
    assert cache.offset == 3 and isinstance(cache, SeatedKVCache) is is_seated
    if was_seated == is_seated:
        assert text(cache) == [1, 2, 3]


# --- seating --------------------------------------------------------------------------------------


def lane(*tokens):
    """The caches of a text: three with an arena."""
    second = CacheList(KVCache(), cache_of(*[t + 100 for t in tokens]))
    return [cache_of(*tokens), second, KVCache(), cache_of(*[t + 200 for t in tokens])]


def placed(caches):
    return [at(caches, place) for place in PLACES]


def seats(lanes):
    """The row of each lane; None: it has none."""
    found = []
    for caches in lanes:
        layers = placed(caches)
        assert len({type(layer) for layer in layers}) == 1 and type(caches[2]) is KVCache
        if isinstance(layers[0], SeatedKVCache):
            assert len({id(layer.seat) for layer in layers}) == 1
            assert len({id(layer.arena) for layer in layers}) == len(PLACES)
            found.append(layers[0].seat.row)
        else:
            found.append(None)
    return found


def check(lanes, texts):
    for caches, tokens in zip(lanes, texts, strict=True):
        for n, layer in enumerate(placed(caches)):
            assert text(layer) == [t + 100 * n for t in tokens]


def test_a_cache_is_at_its_place():
    lanes = [lane(1), lane(2)]
    assert at(lanes[0], (1, 0)) is lanes[0][1].caches[0] and at(lanes[0], (2,)) is lanes[0][2]
    assert of_lanes(lanes, (1, 1)) == [caches[1].caches[1] for caches in lanes]
    assert of_lanes(lanes, (0,)) == [caches[0] for caches in lanes] and of_lanes([], (0,)) == []


def test_lanes_are_seated_in_order():
    texts = [[1, 2], [3, 4, 5], [6]]
    seating, lanes = Seating(PLACES), [lane(*tokens) for tokens in texts]
    assert not seating.is_full and seating.arenas == []
    assert seating.seat(lanes) == [0, 1, 2] and seats(lanes) == [0, 1, 2] and seating.is_full
    assert [a.rows for a in seating.arenas] == [3] * 3
    check(lanes, texts)
    arenas = [*seating.arenas]
    assert seating.seat(lanes) == [0, 1, 2] and seats(lanes) == [0, 1, 2]
    mixed = [lanes[2], lanes[0], lanes[1]]
    assert seating.seat(mixed) == [1, 2, 0] and seats(mixed) == [2, 0, 1] and seating.is_full
    assert seating.seat(lanes[1:]) == [0, 1] and not seating.is_full
    assert seating.seat(lanes) == [0, 1, 2] and seating.is_full
    check(lanes, texts)
    assert all(a is b for a, b in zip(arenas, seating.arenas, strict=True))
    more = [*lanes, lane(7, 8)]
    assert seating.seat([more[3], *lanes]) == [1, 2, 3, 0] and seats(more) == [0, 1, 2, 3]
    check(more, [*texts, [7, 8]])
    assert [a.rows for a in seating.arenas] == [4] * 3 and seating.is_full


def test_lanes_that_stay_seated_are_not_looked_at_again(monkeypatch):
    """Work for every lane and token."""
    looked, lengths = [], module._lengths
    monkeypatch.setattr(module, "_lengths", lambda found: looked.append(found) or lengths(found))
    seating, lanes = Seating(PLACES), [lane(1, 2), lane(3)]
    for _ in range(3):
        assert seating.seat(lanes) == [0, 1]
    assert looked == [[1, 2]]
    lanes[0][3].leave()
    assert seating.seat(lanes) == [1, 0] and len(looked) == 2 and seats(lanes) == [2, 1]
    check(lanes, [[1, 2], [3]])
    for other in (lanes[:1], lanes[::-1], [lanes[0], lane(4)]):
        seating.seat(other)
    assert len(looked) == 5


def test_without_places_all_stays_as_it_is():
    seating, lanes = Seating([]), [lane(1), lane(2)]
    assert seating.seat(lanes) == [0, 1] and not seating.is_full and seats(lanes) == [None, None]


def test_a_lane_that_has_read_nothing_comes_last():
    seating, lanes = Seating(PLACES), [lane(), lane(1), lane(), lane(2)]
    assert seating.seat(lanes) == [1, 3, 0, 2] and seats(lanes) == [None, 0, None, 1]
    assert not seating.is_full, "a call for all rows would leave two lanes out"
    assert Seating(PLACES).seat(lanes[:1]) == [0]


def test_a_seat_that_nobody_holds_is_free():
    """A row that two lanes write to, or one that is never given again."""
    seating, lanes = Seating(PLACES), [lane(1), lane(2), lane(3)]
    seating.seat(lanes)
    del lanes[1]
    lanes.append(lane(4, 5))
    assert seating.seat(lanes) == [0, 2, 1] and seats(lanes) == [0, 2, 1] and seating.is_full
    check(lanes, [[1], [3], [4, 5]])
    assert seating.arenas[0].rows == 3
    seating.unseat(lanes[0])
    assert seats(lanes) == [None, 2, 1] and text(lanes[0][0]) == [1]
    seating.unseat(lanes[0])
    assert seating.seat(lanes) == [0, 2, 1] and seats(lanes) == [0, 2, 1]
    check(lanes, [[1], [3], [4, 5]])


def test_rows_that_are_free_are_let_go():
    """Attention runs over all rows of an arena; and while one of them was nobody's no call was a
    batch, which on CUDA took ten times as long."""
    seating, lanes = Seating(PLACES), [lane(n) for n in range(1, 6)]
    seating.seat(lanes)
    known = seating.arenas
    del lanes[0], lanes[1]
    lanes += [lane(9), lane(10)]  # others come before the next call
    assert seating.seat(lanes) == [3, 0, 4, 1, 2] and seats(lanes) == [1, 3, 4, 0, 2]
    assert seating.is_full and seating.arenas[0].rows == 5
    del lanes[4]
    seating.seat(lanes)
    assert [a.rows for a in seating.arenas] == [4] * 3 and seats(lanes) == [1, 2, 3, 0]
    assert seating.is_full and seating.arenas is known
    check(lanes, [[2], [4], [5], [9]])
    del lanes[0]
    lanes[2] = lane(8)
    assert seating.seat(lanes) == [0, 1, 2] and seating.arenas[0].rows == 3
    assert seating.is_full
    check(lanes, [[4], [5], [8]])


def test_an_arena_whose_lanes_have_all_gone_goes_with_them():
    seating, lanes = Seating(PLACES), [lane(n) for n in range(1, 6)]
    seating.seat(lanes)
    del lanes[:3]  # 2 of 5
    assert seating.seat(lanes) == [0, 1] and seats(lanes) == [0, 1] and seating.is_full
    check(lanes, [[4], [5]])
    del lanes[0]
    seating.seat(lanes)
    assert seats(lanes) == [0] and seating.is_full
    arenas = seating.arenas
    lanes.append(lane(7))
    assert seating.seat(lanes) == [0, 1] and seats(lanes) == [0, 1]
    assert [a.rows for a in seating.arenas] == [2] * 3 and seating.arenas is arenas
    lanes = [lane()]
    seating.seat(lanes)
    assert seating.arenas == [] and not seating.is_full
    lanes = [lane(8)]
    assert seating.seat(lanes) == [0] and seating.arenas[0].rows == 1 and seating.is_full


def test_a_much_longer_lane_has_no_seat():
    """Every row is as long as the longest: one long text would make all lanes slow."""
    short = 4 * 3 + 4 * STEP
    texts = [range(1, 1 + n) for n in (short + 1, 3, short, 2, 1)]
    seating, lanes = Seating(PLACES), [lane(*t) for t in texts]
    assert seating.seat(lanes) == [1, 2, 3, 4, 0] and seats(lanes) == [None, 0, 1, 2, 3]
    assert not seating.is_full
    check(lanes, texts)
    usual = [lane(*texts[1]), lane(*texts[1])]
    seating, lanes = Seating(PLACES), [lane(1, 2, 3), *usual]
    seating.seat(lanes)
    long = 8 * 3 + 8 * STEP

    def grow(n):
        for cache in placed(lanes[0]):
            shift = text(cache)[0] - 1
            cache.update_and_fetch(*rows(range(cache.offset + 1 + shift, n + 1 + shift)))

    grow(long)
    for order in ([0, 1, 2], [1, 0, 2]):
        assert seating.seat([lanes[i] for i in order]) == order, "it keeps the seat that it has"
        assert seating.is_full
    grow(long + 1)
    assert seating.seat(lanes) == [1, 2, 0] and seats(lanes) == [None, 0, 1]
    check(lanes, [range(1, long + 2), texts[1], texts[1]])
    assert seating.seat(lanes) == [1, 2, 0] and seats(lanes)[0] is None
    seating, lanes = Seating(PLACES), [lane(1, 2, 3), *usual]
    assert seating.seat(lanes) == [0, 1, 2]
    for arena in seating.arenas:
        arena.reserve(long + 1)
    usual[0][0].seat.moved += long - 2
    assert seating.seat(lanes) == [0, 2, 1], "it grew with its seat"


def test_a_lane_may_come_from_other_arenas():
    """It is written into an arena that no call here reads."""
    first, lanes = Seating(PLACES), [lane(1), lane(2)]
    first.seat(lanes)
    second = Seating(PLACES)
    assert second.seat(lanes[1:]) == [0] and seats(lanes) == [0, 0]
    check(lanes, [[1], [2]])
    assert [cache.arena for cache in placed(lanes[1])] == second.arenas
    assert first.seat(lanes) == [0, 1] and seats(lanes) == [0, 1]
    assert [cache.arena for cache in placed(lanes[1])] == first.arenas
    lanes[0][0].leave()  # half of it, as an interrupt leaves it: its last layer counts
    second.seat(lanes[:1])
    check(lanes, [[1], [2]])
