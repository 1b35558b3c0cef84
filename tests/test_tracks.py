"""Tracks and tapes by hand: a row is the number of its token, so a slot is a list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx
import pytest

from ds4cli.backend.memory import taken_bytes
from ds4cli.errors import ModelError
from ds4cli.tape.kept import Kept, UnlikeSlots
from ds4cli.tape.tape import Tape
from ds4cli.tape.tracks import CallRows, States, Tail, Track, batched, spans

TEXT = [*range(1, 11)]
BOUNDS = [*pairwise((0, 1, 3, 4, 8, 9, 10))]  # of the calls that read it


def column(numbers, dtype=mx.float32):
    """(1, n, 2): a row for each number."""
    return mx.broadcast_to(mx.array([*numbers], dtype)[None, :, None], (1, len([*numbers]), 2))


def numbers(slot, time_axis=1):
    slot = slot if time_axis == 1 else slot.swapaxes(1, time_axis)
    assert slot.shape[0] == 1 and slot.shape[2] == 2
    assert slot[..., 0].tolist() == slot[..., 1].tolist()
    return slot[0, :, 0].tolist()


@dataclass
class Sums(Track):
    """A slot that adds its rows up; those that begin somewhere run as a batch."""

    def key(self, start):
        return self.data[0].dtype if start is not None else super().key(start)

    def inner_rows(self):
        return range(2, self.rows + 1, 2)

    @classmethod
    def replay(cls, tracks, starts, rows):
        CALLS.append(len(tracks))
        (x,) = cls.stack(tracks, rows)
        sums, start = x.sum(axis=1), batched(starts)
        sums = sums if start is None else sums + start
        return [sums[i : i + 1] for i in range(len(tracks))]


CALLS: list[int] = []


def lists(tree):
    return [lists(x) for x in tree] if isinstance(tree, list) else tree.tolist()


def sums_of(data):
    return Tape([[[Sums((data,))]]])


# --- pieces ---------------------------------------------------------------------------------------


def test_which_rows_of_which_pieces():
    lengths = [3, 1, 4, 2]
    for start in range(11):
        for stop in range(start, 11):
            rows = [(i, r) for i, n in enumerate(lengths) for r in range(n)][start:stop]
            found = [(i, r) for i, a, b in spans(lengths, start, stop) for r in range(a, b)]
            assert found == rows
            assert start == stop or all(a < b for _, a, b in spans(lengths, start, stop))


def test_starts_of_a_batch_are_all_there_or_none_is():
    one, two = mx.ones((1, 2)), mx.zeros((1, 2))
    assert batched([None, None]) is None
    assert batched([one, two]).tolist() == [[1, 1], [0, 0]]
    assert batched([one, two], axis=1).shape == (1, 4)


# --- the last rows --------------------------------------------------------------------------------


def tail(begin, end, keep, lead, grows, time_axis):
    """The track of one call on TEXT[begin:end], with up to `lead` rows of history in front."""
    lead = min(lead, begin) if grows else lead
    rows = [TEXT[i] if i >= 0 else 0 for i in range(begin - lead, end)]
    return Tail((column(rows),), keep, grows, time_axis, lead=lead)


def slot(pos, keep, grows):
    """What a slot holds behind TEXT[:pos]."""
    rows = [*([] if grows else [0] * keep), *TEXT[:pos]]
    return rows[max(0, len(rows) - keep) :]


@pytest.mark.parametrize("time_axis", [1, 2])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("lead", [0, 2, 3])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_slot_of_the_last_rows(keep, lead, grows, time_axis):
    """Rows of the call before, of zeros, or too few; from each start to each position, whole, cut,
    and joined."""

    def is_right(tape, begin, rows):
        start = slot(begin, keep, grows)
        start = column(start) if start else None
        if start is not None and time_axis == 2:
            start = start.swapaxes(1, 2)
        for known in (start,) if begin else (start, None):  # a new cache has none
            ((got,),) = tape.replay([[known]], rows)
            assert numbers(got, time_axis) == slot(begin + rows, keep, grows)

    calls = [tail(begin, end, keep, lead, grows, time_axis) for begin, end in BOUNDS]
    tape = Tape.concat([Tape([[[t]]]) for t in calls])
    assert tape.rows == len(TEXT) == sum(t.rows for t in calls)
    assert tape.has_inner_states and tape.inner_rows() == []
    for begin in range(len(TEXT)):
        rest = tape.last(len(TEXT) - begin)
        for rows in range(1, len(TEXT) - begin + 1):
            is_right(rest, begin, rows)
            is_right(rest.first(rows), begin, rows)
        is_right(rest.compact(), begin, rest.rows)
    if not grows or lead == 0:
        held = sum(t.data[0].shape[1] for t in tape._layers[0][0])
        assert held <= len(TEXT) + lead, "each row is held once"
    for call, (begin, end) in zip(calls, BOUNDS, strict=True):
        for rows in range(1, end - begin + 1):
            is_right(Tape([[[call]]]), begin, rows)


@pytest.mark.parametrize("time_axis", [1, 2])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("lead", [0, 2, 3])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_slots_of_the_last_rows_of_each_lane(keep, lead, grows, time_axis):
    """From a slot, or none, to fewer rows than it holds, as many, and more."""

    def turned(x):
        return x if time_axis == 1 else x.swapaxes(1, 2)

    for begins in ((3, 4, 6), (0, 0, 0)):
        calls = [tail(begin, begin + 4, keep, lead, grows, time_axis) for begin in begins]
        tape = Tape([[[replace(calls[0], data=(mx.concatenate([c.data[0] for c in calls]),))]]])
        start = None
        if begins[0] or not grows:
            start = turned(mx.concatenate([column(slot(b, keep, grows)) for b in begins]))
        for known in (start,) if begins[0] else (start, None):
            for rows in ((1, 4, 2), (3, 3, 3), (4, 1, 1)):
                want = [slot(b + n, keep, grows) for b, n in zip(begins, rows, strict=True)]
                if len({len(one) for one in want}) > 1:
                    with pytest.raises(UnlikeSlots):
                        tape.replay_each([[known]], rows)
                    continue
                ((got,),) = tape.replay_each([[known]], rows)
                assert [numbers(x[None], time_axis) for x in got] == want


def test_the_newest_array_alone_is_read_where_it_has_enough():
    """Going back joined all rows of a convolution to take the last three."""
    calls = [tail(begin, end, 3, 3, False, 1) for begin, end in BOUNDS]
    gathered = Tail.gather(calls, len(TEXT))
    assert gathered.data[0] is calls[-1].data[0] and gathered.rows == len(TEXT)
    short = [tail(0, 1, 3, 0, False, 1), tail(1, 2, 3, 0, False, 1)]
    assert numbers(Tail.gather(short, 2).data[0]) == [1, 2]
    bare = [tail(begin, end, 3, 0, False, 1) for begin, end in pairwise(range(11))]
    gathered = Tail.gather(bare, len(TEXT))
    assert numbers(gathered.data[0]) == TEXT[-3:] and gathered.rows == len(TEXT)
    long = [tail(0, 1, 3, 3, False, 1), tail(1, 2, 3, 3, False, 1)]
    assert Tail.gather(long, 2).data[0] is not long[-1].data[0]  # two rows, the start has the third


def test_a_call_that_is_kept_whole_is_kept_as_it_is():
    track = tail(4, 8, 3, 3, False, 1)
    assert track.cut(0, 4) is track
    cut = track.cut(1, 3)
    assert numbers(cut.data[0]) == [6, 7] and cut.lead == 0 and cut.viewed_bytes == track.nbytes
    assert cut.nbytes == track.nbytes == taken_bytes(track.data)
    (needed,) = Tail.needed([track])
    assert numbers(needed.data[0]) == TEXT[4:8] and needed.viewed_bytes == track.nbytes
    (needed,) = Tail.needed([bare := tail(4, 8, 3, 0, False, 1)])
    assert needed.data[0] is bare.data[0] and needed.viewed_bytes == 0
    first, second = Tail.needed([tail(0, 4, 2, 2, False, 1), track])
    assert second.data[0] is track.data[0] and numbers(first.data[0]) == TEXT[:1]
    assert first.viewed_bytes == taken_bytes(tail(0, 4, 2, 2, False, 1).data)
    assert (first.keep, first.grows, first.time_axis) == (2, False, 1)


# --- other tracks ---------------------------------------------------------------------------------


def test_rows_of_any_recurrence_are_cut_joined_and_stacked():
    one, other = Sums((column(TEXT[:4]),)), Sums((column(TEXT[4:]),))
    assert one.cut(0, 4) is one and one.rows == 4 and one.nbytes == taken_bytes(one.data)
    assert not one.in_half and Sums((column([1], mx.bfloat16),)).in_half
    assert Sums((column([1]), column([1], mx.float16))).in_half
    cut = one.cut(1, 3)
    assert numbers(cut.data[0]) == [2, 3] and cut.viewed_bytes == one.nbytes == cut.nbytes
    assert numbers(one.cut(0, 3).data[0]) == [1, 2, 3] and numbers(one.cut(1, 4).data[0]) == [
        2,
        3,
        4,
    ]
    joined = Sums.join([cut, other])
    assert numbers(joined.data[0]) == [2, 3, *TEXT[4:]]
    assert joined.viewed_bytes == 0 and joined.nbytes == taken_bytes(joined.data)
    assert Sums.needed([one, other]) == [one, other]
    both = Sums((mx.concatenate([column([1, 2]), column([3, 4])]),))
    assert [numbers(both.of(i).data[0]) for i in (0, 1)] == [[1, 2], [3, 4]]
    (stacked,) = Sums.stack([one, other], 4, start=1)
    assert stacked[..., 0].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert Track.inner_rows(one) == () and not Track.recomputes and not one.has_inner_states
    assert Track.key(one, None) != Track.key(other, None)
    with pytest.raises(NotImplementedError):
        Track.replay([one], [None], 1)


def test_rows_that_are_states():
    track = States((column(TEXT),))
    assert track.has_inner_states and track.inner_rows() is None
    for rows in (1, 4, 10):
        (state,) = States.replay([track], [None], rows)
        assert state.tolist() == [[rows, rows]]
    both = States((mx.concatenate([column(TEXT), column(TEXT[::-1])]),))
    (state,) = States.replay_each([both], [None], Kept([3, 3], 10))
    assert state.tolist() == [[3, 3], [8, 8]]


def test_rows_know_the_calls_that_they_were_fed_in():
    one = CallRows((column(TEXT[:6]),), calls=(1, 3, 2))
    other = CallRows((column(TEXT[6:]),), calls=(4,))
    assert one.cut(2, 5).calls == (2, 1) and one.cut(0, 1).calls == (1,)
    assert numbers(one.cut(2, 5).data[0]) == [3, 4, 5]
    joined = CallRows.join([one.cut(2, 6), other])
    assert joined.calls == (2, 2, 4) and joined.slices(8) == [slice(0, 2), slice(2, 4), slice(4, 8)]
    assert joined.slices(5) == [slice(0, 2), slice(2, 4), slice(4, 5)]


# --- tapes ----------------------------------------------------------------------------------------


def two_layers():
    """A tape of two caches: one of two slots, one of one."""
    last, sums = tail(0, 6, 2, 0, False, 1), Sums((column(TEXT[:6]),))
    return Tape([[[last], [sums]], [[Sums((column(TEXT[1:7]),))]]])


def test_slots_are_replayed_in_batches_and_land_in_their_places():
    tape, row = two_layers(), lambda n: mx.full((1, 2), float(n))
    CALLS.clear()
    got = tape.replay([[None, row(100)], [row(200)]], 3)
    assert CALLS == [2]
    assert numbers(got[0][0]) == [2, 3]
    assert (got[0][1].tolist(), got[1][0].tolist()) == ([[106, 106]], [[209, 209]])
    CALLS.clear()
    got = tape.replay([[None, None], [None]], 6)
    assert CALLS == [1, 1] and got[1][0].tolist() == [[27, 27]]
    for rows in (0, 7):
        with pytest.raises(AssertionError):
            tape.replay([[None, None], [None]], rows)


def test_lanes_of_a_batch_are_replayed_one_by_one_where_nothing_else_is_known():
    """Guards: a slot in another's place, one call taken for all, starts of another lane."""
    rows = mx.concatenate([column(TEXT[:5]), column(TEXT[5:])])
    calls = Sums((rows[:, :3],)), Sums((rows[:, 3:],))
    tape = Tape([[[Sums((10 * rows,))], [*calls]]])
    starts = [[None, mx.array([[100.0, 100.0], [200.0, 200.0]])]]
    ((tens, ones),) = tape.replay_each(starts, [4, 2])
    assert tens.tolist() == [[100, 100], [130, 130]]
    assert ones.tolist() == [[110, 110], [213, 213]]
    for wrong in ((0, 1), (1, 6)):
        with pytest.raises(AssertionError):
            tape.replay_each(starts, wrong)


def test_rows_beyond_those_kept_may_be_no_numbers():
    kept, x = Kept([1, 3], 3), mx.array([[1.0, mx.nan, mx.nan], [1, 2, 3]])
    assert kept.only(x).tolist() == [[1, 0, 0], [1, 2, 3]]
    twice = mx.concatenate([x, x])[..., None].astype(mx.bfloat16)
    only = kept.only(twice, 1)
    assert only.dtype == mx.bfloat16 and only[..., 0].tolist() == 2 * [[1, 1, 1], [1, 2, 3]]
    rows = mx.arange(12).reshape(2, 3, 2)
    for more in (rows, rows[..., :1]):
        assert kept.last(more, 1).tolist() == [[more[0, 0].tolist()], [more[1, 2].tolist()]]
    assert kept.mask(2, 3) is kept.mask(2, 3) and kept.mask().tolist() == [[1, 0, 0], [1, 1, 1]]


def test_what_a_tape_says_of_itself():
    tape, empty = two_layers(), Tape()
    assert (tape.rows, tape.layers, len(tape.arrays())) == (6, 2, 3)
    assert tape.row_bytes == 3 * 8 and tape.history_bytes == 0
    assert tape.nbytes == sum(t.nbytes for t in tape._tracks())
    assert not tape.has_inner_states and tape.inner_rows() == [2, 4, 6]
    parts = [tape.first(3), tape.last(3)]
    assert Tape.concat(parts).inner_rows() == [2, 4, 6], "of all calls together"
    assert tape.slots_that(lambda t: isinstance(t, Tail)) == [[True, False], [False]]
    led = Tape([[[tail(4, 6, 3, 3, False, 1)]], [[tail(4, 6, 3, 2, False, 1)]]])
    assert led.history_bytes == 5 * 8 and led.row_bytes == 2 * 8 and led.has_inner_states
    assert (empty.rows, empty.layers, empty.arrays(), empty.nbytes, empty.row_bytes) == (
        0,
        0,
        [],
        0,
        0,
    )
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(AssertionError):
            tape._cut(start, stop)
    assert tape.first(2).rows == tape.last(2).rows == 2 and tape.first(0).rows == 0
    assert numbers(tape.last(2)._layers[1][0][0].data[0]) == [6, 7]


def test_recordings_become_tapes_of_equal_rows():
    """A cache that recorded less than another; calls that run a hook for every token."""
    tape = Tape()
    tape.fill([[(sums := Sums((column([1, 2]),)),)], [(States((column([5, 6]),)),)]])
    assert tape.rows == 2 and tape._layers[0][0][0] is sums
    for wrong in ([[(sums,)], [(Sums((column([1]),)),)]], [[(sums,)], [()]]):
        with pytest.raises(ModelError, match="different numbers of rows"):
            Tape().fill(wrong)
    for nothing in ([[()], [()]], []):
        tape.fill(nothing)
        assert (tape.rows, tape.layers) == (0, 0)
    tape.fill([[(sums, Sums((column([3]),)))], [(States((column([7, 8, 9]),)),)]])
    assert tape.rows == 3 and numbers(tape._layers[0][0][0].data[0]) == [1, 2, 3]


def test_history_in_front_of_a_call_is_no_row_of_it():
    """A convolution beside a recurrence: nothing was recorded of either."""
    tape = Tape()
    tape.fill([[(tail(4, 6, 3, 3, False, 1),)], [(Sums((column([1, 2]),)),)]])
    assert (tape.rows, tape.layers) == (2, 2)


def test_tracks_of_two_kinds_are_not_replayed_together():
    class Twice(Sums):
        @classmethod
        def replay(cls, tracks, starts, rows):
            return [2 * x for x in super().replay(tracks, starts, rows)]

    rows, start = (column([1, 2]),), mx.zeros((1, 2))
    ((one, two),) = Tape([[[Sums(rows)], [Twice(rows)]]]).replay([[start, start]], 2)
    assert (one.tolist(), two.tolist()) == ([[3, 3]], [[6, 6]])


def test_what_is_made_compact_is_evaluated_at_once(monkeypatch):
    """Left lazy it keeps the longer arrays that it was copied from."""
    begun = []
    monkeypatch.setattr(mx, "async_eval", lambda *trees: begun.append(trees))
    part = two_layers().first(3).compact(1)
    ((arrays,),) = begun
    assert len(arrays) == 1 and arrays[0] is part._layers[1][0][0].data[0]


def test_what_is_found_later_is_looked_for_once():
    found = []

    def find():
        found.append(1)
        return [[(Sums((column([1, 2]),)),)]]

    tape = Tape()
    tape.fill_later(2, find)
    whole = Tape.concat([sums_of(column([9])), tape])
    assert (tape.rows, whole.rows, found) == (2, 3, [])
    assert whole.replay([[None]], 3)[0][0].tolist() == [[12, 12]] and found == [1]
    assert whole.replay([[None]], 2)[0][0].tolist() == [[10, 10]] and tape.layers == 1
    assert found == [1]
    lanes = [Tape(), Tape()]
    both = Tape()
    both.fill_later(3, lambda: found.append(2) or [[(Sums((column([1, 2, 3]),)),)]])
    for i, lane in enumerate(lanes):
        lane.fill_as_part(both, i)
    part = lanes[0].first(2)
    assert part.rows == 2 and found == [1] and part.whole is None
    assert part.replay([[None]], 2)[0][0].tolist() == [[3, 3]] and found == [1, 2]
    assert Tape.concat([Tape(), sums_of(column([9]))]).rows == 1


def test_a_part_of_a_tape_is_made_compact():
    tape = Tape.concat([two_layers().first(2), two_layers().first(3)])
    part = tape.compact(0, 1)
    assert [[len(tracks) for tracks in slots] for slots in part._layers] == [[1, 1], [2]]
    whole = tape.compact()
    assert [[len(tracks) for tracks in slots] for slots in whole._layers] == [[1, 1], [1]]
    assert numbers(whole._layers[1][0][0].data[0]) == [2, 3, 2, 3, 4] and whole.rows == 5


def test_several_tapes_are_replayed_as_one_batch(monkeypatch):
    tapes = [two_layers(), two_layers()]
    starts = [[[None, mx.full((1, 2), n)], [mx.full((1, 2), 2 * n)]] for n in (10.0, 20.0)]
    alone = [tape.replay(own, 4) for tape, own in zip(tapes, starts, strict=True)]
    for batches, recomputes in (([4], False), ([2, 2], True)):
        monkeypatch.setattr(Sums, "recomputes", recomputes)
        CALLS.clear()
        got = Tape.replay_all(tapes, starts, 4)
        assert batches == CALLS and len(got) == 2
        for one, other in zip(got, alone, strict=True):
            assert [[a.tolist() for a in s] for s in one] == [
                [a.tolist() for a in s] for s in other
            ]


def test_consecutive_tapes_are_replayed_without_being_joined():
    calls = [tail(begin, end, 3, 3, False, 1) for begin, end in BOUNDS]
    tapes = [
        Tape([[[t], [Sums((column(TEXT[a:b]),))]]]) for t, (a, b) in zip(calls, BOUNDS, strict=True)
    ]
    assert Tape.along([], 0) is None and Tape.along(tapes[:1], 1) is tapes[0]
    for n, rows in ((2, 2), (2, 3), (4, 5), (4, 8), (6, 10)):
        tape = Tape.along(tapes[:n], rows)
        assert tape.rows == rows
        last, total = tape.replay([[None, None]], rows)[0]
        assert numbers(last) == slot(rows, 3, False)
        assert total.tolist() == [[sum(TEXT[:rows])] * 2]
        assert tape._layers[0][1][0] is tapes[0]._layers[0][1][0]
