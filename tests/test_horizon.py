"""The horizon on a recurrence that can be checked by hand: the state at a position is the sum of
the tokens before it, and the logits row there is the position itself.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import mlx.core as mx
from by_hand import Sums
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4cli.rewind import horizon as module
from ds4cli.rewind import room
from ds4cli.rewind.horizon import Horizon, Packing, Segment, merged, slots_nbytes
from ds4cli.tape.recorder import Sizes
from ds4cli.tape.tape import Tape

WIDE = 8  # columns of a row of tape, of a state and of a logits row: 32 bytes each
ROW_BYTES = WIDE * 4
LAYERS = 2
POSITION_BYTES = (LAYERS + 1) * ROW_BYTES  # tape and logits
RUN = room.RUN_ROWS[0]
SIZES = Sizes(LAYERS * ROW_BYTES, 0, LAYERS * ROW_BYTES, LAYERS, LAYERS)
RECORDER = SimpleNamespace(sizes=SIZES)


def wide(values) -> mx.array:
    """Rows (n, WIDE) with these values."""
    return mx.broadcast_to(mx.array(list(values), mx.float32)[:, None], (len(values), WIDE)) + 0


def state(text: list[int]) -> list:
    """The slots of all layers after `text`."""
    return [[wide([sum(text) * (i + 1)])] for i in range(LAYERS)]


def tape_of(tokens: list[int]) -> Tape:
    tape = Tape()
    rows = [wide(tokens)[None] * (i + 1) for i in range(LAYERS)]
    tape.fill([[[Sums((x,))]] for x in rows])
    return tape


def segment_of(text: list[int], start: int, rows: int | None = None) -> Segment:
    """The segment of the call that fed text[start:], of which `rows` stay."""
    logits = wide(range(start + 1, len(text) + 1))
    made = Segment(start, len(text), tape_of(text[start:]), (logits,), state(text[:start]))
    return made if rows is None else made.first(rows)


class Fed:
    """A text, and its horizon."""

    def __init__(self, limit: int, budget_bytes: int = 1 << 20, at: int = 0):
        self.horizon = Horizon(limit, budget_bytes, RECORDER)
        self.text = [7] * at
        self.dice = random.Random(3)

    def feed(self, n: int = 1, kept: int | None = None) -> Fed:
        """A call of n tokens, of which `kept` stay."""
        start, kept = len(self.text), n if kept is None else kept
        self.text += [self.dice.randrange(9) for _ in range(n)]
        before = wide([start])[0] if start else None
        self.horizon.append(segment_of(self.text, start, None if kept == n else kept), before)
        del self.text[start + kept :]
        return self

    def singles(self, n: int) -> Fed:
        for _ in range(n):
            self.feed()
        return self

    def back(self, pos: int) -> Fed:
        del self.text[pos:]
        self.horizon.truncate(pos)
        return self

    def fork(self) -> Fed:
        twin = Fed(0)
        twin.horizon, twin.text = self.horizon.copy(), list(self.text)
        return twin

    def check(self) -> None:
        """Every position that is reached has its state, and its row where that is kept."""
        horizon = self.horizon
        if not horizon.segments:
            return
        assert horizon.end == len(self.text)
        for pos in range(horizon.low, horizon.end + 1):
            slots, tape, rows = horizon.path(pos)
            got = tape.replay(slots, rows) if rows else slots
            for have, want in zip(got, state(self.text[:pos]), strict=True):
                assert have[0].tolist() == want[0].tolist(), pos
        for pos in horizon.rows():
            assert horizon.row(pos).tolist() == [pos] * WIDE
        assert horizon.rows().stop == horizon.end + 1

    def longest_replay(self) -> int:
        horizon = self.horizon
        return max(horizon.path(p)[2] for p in range(horizon.low, horizon.end + 1))


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 7), st.integers(1, 7)),
        st.tuples(st.just("singles"), st.integers(1, 70)),
        st.tuples(st.just("back"), st.integers(0, 30)),
        st.tuples(st.just("fork")),
    ),
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(MOVES, st.integers(1, 60), st.integers(200, 20_000))
def test_any_course_of_calls_and_ways_back(moves, limit, budget):
    """A state, or a row, of another position; more than was granted; a branch that hears of what
    the other does."""
    fed, left = Fed(limit, budget), []
    for kind, *numbers in moves:
        if kind == "fork":
            left.append(fed.fork())
        elif kind == "feed":
            fed.feed(numbers[0], min(numbers))
        elif kind == "back":
            fed.back(max(1, len(fed.text) - numbers[0]) if fed.text else 0)
        else:
            fed.singles(*numbers)
        horizon = fed.horizon
        fed.check()
        if kind in ("feed", "singles"):
            assert horizon.nbytes <= budget or len(horizon.segments) == 1
            assert horizon.about_bytes >= horizon.nbytes
    for twin in left:
        twin.check()


def test_the_last_rows_are_reached_and_no_more_than_a_run_beyond():
    """Rows that were promised are dropped one early, or rows that nobody asked for are kept."""
    for limit in (1, 5, 32, 40):
        fed = Fed(limit).singles(200)
        fed.check()
        assert 200 - limit - room.DENSE_SPACING <= fed.horizon.low <= 200 - limit
        assert fed.longest_replay() <= room.DENSE_SPACING
        assert fed.horizon.rows() == range(fed.horizon.low, 201), "the row at its start too"


def test_it_begins_at_the_last_checkpoint_that_is_far_enough_back():
    """Rows beyond the limit stay for ever, or the oldest that was promised goes."""
    lows = {n: Fed(n).singles(200).horizon.low for n in (1, 5, 8, 9, 40, 41)}
    assert lows == {1: 199, 5: 192, 8: 192, 9: 160, 40: 160, 41: 128}
    assert Fed(1).feed(3).feed(3).horizon.low == 3
    assert Fed(3).feed(3).feed(3).horizon.low == 3
    assert Fed(4).feed(3).feed(3).horizon.low == 0


def test_the_first_row_is_what_came_before():
    """The logits row at the very start belongs to the call before: a bare state has none."""
    fed = Fed(50, at=4).feed(3)
    assert fed.horizon.rows() == range(4, 8)
    assert Fed(50).feed(3).horizon.rows() == range(1, 4)
    assert Horizon(5, 100, None).rows() == range(0)
    fed = Fed(50).feed(3)
    assert (fed.horizon.low, fed.horizon.end) == (0, 3)
    assert (Horizon(5, 100, None).low, Horizon(5, 100, None).end) == (None, None)
    assert Horizon(5, 100, None).copy().rows() == range(0)


def test_positions_that_a_state_is_kept_of():
    """Guards: a way back to where no state is, or none to the live one of an empty horizon."""
    assert Horizon(5, 100, None).states(7) == range(7, 8)
    horizon = Fed(50, at=4).feed(3).horizon
    assert horizon.states(7) == horizon.states(4) == range(4, 8)
    assert horizon.states(3) == range(3, 4), "a state before it is somebody else's"


def test_rows_that_do_not_follow_begin_anew():
    """A gap between segments serves the state of another position."""
    fed = Fed(50).singles(9)
    text = [*fed.text, 1, 2, 3]
    fed.horizon.append(segment_of(text, 11), wide([11])[0])
    fed.text = text
    assert (fed.horizon.low, fed.horizon.end, len(fed.horizon.segments)) == (11, 12, 1)
    assert fed.horizon.rows() == range(11, 13)
    fed.check()


def test_cut_to_nothing_it_is_empty():
    """The row of a start that is gone would be served for the next one."""
    fed = Fed(50, at=4).singles(9)
    fed.horizon.truncate(4)
    assert (fed.horizon.segments, fed.horizon.start_row) == ([], None)
    fed.text = fed.text[:4]
    fed.singles(3).check()
    fed.back(6).check()
    assert fed.horizon.rows() == range(4, 7)
    fed.horizon.clear()
    assert (fed.horizon.segments, fed.horizon.start_row, fed.horizon.about_bytes) == ([], None, 0)


def test_short_of_budget_the_oldest_positions_go():
    """Tape was kept where no logits row was, and rows where no tape led: memory that freed no
    position."""
    whole = Fed(40).singles(40).horizon.nbytes
    fed = Fed(40, whole - 3 * POSITION_BYTES).singles(40)
    horizon = fed.horizon
    assert horizon.low > 0 and horizon.nbytes <= horizon.budget_bytes
    assert horizon.rows() == range(horizon.low, 41)
    assert 40 - horizon.low >= min(40, horizon.room.free_rows)
    fed.check()


def test_no_more_goes_than_a_run():
    """A whole prompt went with the first token that was too much."""
    fed = Fed(100, 60 * POSITION_BYTES).feed(56)
    assert [s.rows for s in fed.horizon.segments] == [56]
    fed.singles(12)
    run = fed.horizon.room.run_rows
    assert 60 - run - 4 <= len(fed.horizon.rows()) <= 60
    fed.check()


def test_a_budget_of_nothing_keeps_the_last_call():
    """The last block is what a stop string goes back in: it stays whatever it takes."""
    fed = Fed(40, budget_bytes=0).singles(3).feed(5, 3)
    assert [(s.start, s.rows) for s in fed.horizon.segments] == [(3, 3)]
    fed.check()


def test_bytes_are_those_of_tape_rows_and_checkpoints():
    """Bytes that are not counted are taken beyond the budget."""
    one = segment_of([1, 2, 3], 1)
    assert one.nbytes == 2 * LAYERS * ROW_BYTES + 2 * ROW_BYTES + LAYERS * ROW_BYTES
    assert one.first(1).packed().nbytes == LAYERS * ROW_BYTES + ROW_BYTES + LAYERS * ROW_BYTES
    assert slots_nbytes([[None, wide([1])], []]) == ROW_BYTES
    fed = Fed(40).feed(2)
    assert fed.horizon.nbytes == segment_of(fed.text, 0).nbytes
    fed.feed(1)  # the newest checkpoint was the live state a call ago
    assert fed.horizon.nbytes == (2 + 1) * (LAYERS + 1) * ROW_BYTES + LAYERS * ROW_BYTES


def test_bytes_are_followed_without_counting():
    """A sum that drifts away from what is kept: nothing is dropped, or everything."""
    fed = Fed(300).singles(100)
    assert fed.horizon.about_bytes == fed.horizon.nbytes + SIZES.state
    assert Fed(300).horizon.about_bytes == 0
    behind = Fed(300, at=5).feed()
    assert behind.horizon.about_bytes >= behind.horizon.nbytes, "with the row at its start"


def test_a_copy_is_all_of_it():
    """A branch with another limit, budget or recorder than its session."""
    horizon = Fed(40, 5000).singles(50).horizon
    twin = horizon.copy()
    assert {**vars(twin), "_packing": 0} == {**vars(horizon), "_packing": 0}
    assert twin.segments is not horizon.segments and twin._packing is not horizon._packing
    assert list(twin._packing.starts) == list(horizon._packing.starts)


def test_one_checkpoint_serves_a_run_of_rows(monkeypatch):
    """One for every row takes the memory; too few, and going back replays the whole horizon."""
    fed = Fed(300).singles(200)
    starts = [s.start for s in fed.horizon.segments if s.checkpoint is not None]
    assert starts == [*range(0, 193, room.DENSE_SPACING), 199]
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 10**9)
    for limit, spacing, kept in ((30, 30, [150, 180, 199]), (70, 32, [128, 160, 192, 199])):
        fed = Fed(limit).singles(200)
        assert fed.horizon.room.spacing == spacing
        assert [s.start for s in fed.horizon.segments if s.checkpoint is not None] == kept
        fed.check()


def test_a_second_checkpoint_does_not_push_rows_out(monkeypatch):
    """One was kept every `limit` rows whatever it took: all rows before it went, and a few tokens
    were left to go back over."""
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 10**9)
    fed = Fed(40, 60 * POSITION_BYTES)
    for _ in range(200):
        fed.feed()
        assert sum(s.checkpoint is not None for s in fed.horizon.segments) <= 2
        assert len(fed.text) - fed.horizon.low >= min(40, len(fed.text))
    assert fed.horizon.room.spacing is None
    fed.check()
    calls = Fed(40, 70 * POSITION_BYTES).feed(25).feed(40)
    assert (calls.horizon.low, calls.horizon.room.spacing) == (25, None)
    assert calls.horizon.nbytes + 25 * POSITION_BYTES < calls.horizon.budget_bytes


def test_checkpoints_keep_their_distance_after_a_way_back():
    """After a rewind the last one was looked for where it no longer stood."""
    fed = Fed(300).singles(100)
    fed.back(70).singles(60)
    starts = [s.start for s in fed.horizon.segments if s.checkpoint is not None]
    assert starts == [0, 32, 64, 96, 128, 129]
    fed.check()
    fed = Fed(300).singles(95).back(90).singles(40)
    assert [s.start for s in fed.horizon.segments if s.checkpoint is not None] == starts
    fed.check()
    fed = Fed(300).feed(3).feed(3).back(5).feed(3)
    assert [s.start for s in fed.horizon.segments if s.checkpoint is not None] == [0, 5]


def test_a_checkpoint_that_stays_is_its_own():
    """Guards: the states of all lanes stay alive with the one of which a checkpoint is a view."""
    fed = Fed(300).feed(3)
    given = fed.horizon.segments[0].checkpoint
    kept = fed.feed(3).horizon.segments[0].checkpoint
    assert all(a is not b for a, b in zip(given[0] + given[1], kept[0] + kept[1], strict=True))
    fed.check()


def test_where_replays_read_rows_in_place_no_run_is_copied(monkeypatch):
    """Guards: on a card that reads rows where they are, recording pays for copies all the same."""
    monkeypatch.setattr(module.switch, "is_on", lambda: True)
    sizes = 300, 1 << 20, SIZES, ROW_BYTES, module.page_bytes()
    assert Fed(300).horizon.room_for(ROW_BYTES) == room.Room.of(*sizes, in_place=True)
    assert room.Room.of(*sizes, in_place=True) != room.Room.of(*sizes)


def test_a_long_call_comes_in_pieces():
    """Right after a prompt a rewind by one replayed all of it."""
    fed = Fed(2000).feed(300)
    sizes = [s.rows for s in fed.horizon.segments]
    assert sizes == [module.PIECE_ROWS, module.PIECE_ROWS, 300 - 2 * module.PIECE_ROWS]
    assert all(s.checkpoint is not None for s in fed.horizon.segments)
    fed.check()
    assert [s.rows for s in Fed(2000).feed(module.PIECE_ROWS).horizon.segments] == [128]
    kept = Segment(0, 300, None, [wide(range(1, 301))], None)
    plain = Horizon(2000, 1 << 20, None)
    plain.append(kept, None)
    assert [s.rows for s in plain.segments] == [300], "nothing to replay, nothing to cut"


def test_parts_of_a_segment_hold_all_of_it():
    """The rows of a long block of which one was kept stay alive, and were counted as one."""
    whole = segment_of([3, 1, 4, 1, 5, 9], 0)
    part, rest = whole.first(2), whole.last(4, None)
    assert part.nbytes == whole.nbytes and rest.nbytes == whole.nbytes - LAYERS * ROW_BYTES
    assert (part.start, part.end, rest.start, rest.end) == (0, 2, 2, 6)
    assert part.row(2)[0].item() == 2 and rest.row(3)[0].item() == 3
    assert part.first(1).nbytes == whole.nbytes and not part.is_packed
    own = part.packed()
    assert own.nbytes == 2 * POSITION_BYTES + LAYERS * ROW_BYTES and own.is_packed
    assert own.row(1)[0].item() == 1
    before, after = whole.split(2)
    assert (before.nbytes, after.nbytes) == (own.nbytes, 4 * POSITION_BYTES)
    assert whole.packed().logits is whole.logits, "one array that holds no more is not copied"
    assert before.after()[1][0].tolist() == state([3, 1])[1][0].tolist()
    assert after.after() is None and Segment(0, 1, None, (), state([])).after() is None


def test_what_was_cut_is_copied_where_a_promise_needs_it():
    """Blocks of 8 rows of which one was kept took the room of 8, and fewer positions were free."""
    fed = Fed(200, 100 * POSITION_BYTES)
    for _ in range(150):
        fed.feed(8, 1)
        free = fed.horizon.room.free_rows
        assert len(fed.text) - fed.horizon.low >= min(free, len(fed.text))
        assert fed.horizon.nbytes <= fed.horizon.budget_bytes
    fed.check()


def test_what_may_hold_more_than_its_rows_is_copied_but_not_the_last_rows():
    """Guards: rows that were promised leave, while others take a page each."""
    fed = Fed(200, 50 * POSITION_BYTES).singles(5).feed(30).feed(8, 1).feed(8, 1)
    assert all(s.is_packed for s in fed.horizon.segments) and fed.horizon.low == 0
    fed.feed()
    assert not fed.horizon.segments[-1].is_packed
    fed.check()


def test_runs_of_single_rows_become_few_arrays():
    """An array for every row, layer and input: hundreds of thousands of them."""
    fed = Fed(4000).singles(700)
    linked = [s for s in fed.horizon.segments if len(s.tape.arrays()) > LAYERS]
    rows = sum(s.rows for s in linked)
    assert room.LINKED_ROWS <= rows <= room.LINKED_ROWS + 3 * RUN
    packed = [s for s in fed.horizon.segments if s.rows == RUN and s not in linked]
    assert packed and all(len(s.logits) == 1 for s in packed)
    fed.check()


def test_a_run_is_merged_when_it_is_complete():
    """Merged one by one, a row is copied again for every later one."""
    sizes = {n: [s.rows for s in Fed(4000).singles(n).horizon.segments] for n in (32, 33, 66)}
    assert sizes == {32: [1] * 32, 33: [32, 1], 66: [32, 32, 1, 1]}
    mixed = Fed(4000).feed(40).singles(34)
    assert [s.rows for s in mixed.horizon.segments] == [40, 32, 1, 1]
    mixed.check()


def test_a_run_is_copied_layer_by_layer():
    """A wait for thousands of copies at once, or a run of which a part is never copied."""
    text = [1] * 4
    run = merged([segment_of(text[: i + 1], i) for i in range(4)])
    assert (run.start, run.rows, len(run.logits), len(run.tape.arrays())) == (0, 4, 4, 4 * LAYERS)
    half = run.packed(0, 1)
    assert len(half.tape.arrays()) == 1 + 4 and len(half.logits) == 4
    done = half.packed(1, 2)
    assert len(done.tape.arrays()) == LAYERS and len(done.logits) == 1
    assert done.row(3)[0].item() == 3 and run.row(3)[0].item() == 3


def test_packing_waits_for_its_rows_to_be_old_and_skips_what_is_gone():
    """A run that was cut away is packed for ever, or one that is new at once."""
    segments = [segment_of([1] * 6, 4)]
    packing = Packing([2, 4])
    twin = packing.copy()
    packing.advance(segments, 9, 1)
    assert list(packing.starts) == [4] and list(twin.starts) == [2, 4]
    before = segments[0]
    packing.advance(segments, 5, 1)
    assert segments[0] is before and list(packing.starts) == [4]
    packing.advance(segments, 6, 1)
    assert segments[0] is not before and not packing.starts
    packing = Packing([4])
    packing.advance(segments, 6, LAYERS)
    twin = packing.copy()
    twin.advance(segments, 6, LAYERS)
    assert packing.starts and not twin.starts, "a copy begins where it was"
    segments = [Segment(4, 6, None, (wide([5]), wide([6])), None)]
    twin = Packing([4])
    twin.advance(segments, 6, 3)
    assert not twin.starts and len(segments[0].logits) == 1, "without layers it is one step"


def test_the_number_of_arrays_is_bounded(monkeypatch):
    """Metal has room for 499,000 arrays in all."""
    monkeypatch.setattr(room, "MAX_ARRAYS", 300)
    monkeypatch.setattr(room, "LINKED_ROWS", 20)
    fed = Fed(4000).singles(600)
    arrays = sum(len(s.tape.arrays()) + len(s.logits) for s in fed.horizon.segments)
    assert arrays <= 300
    fed.check()


def test_the_arrays_of_runs_that_wait_are_counted(monkeypatch):
    """A run that is to be copied is still as many arrays as it has rows."""
    each = 1 + SIZES.row_arrays + SIZES.state_arrays
    monkeypatch.setattr(room, "MAX_ARRAYS", (1 + 8 + RUN) * each)
    assert Fed(4000).singles(40).horizon.low == 0
    assert Fed(4000).singles(41).horizon.low > 0


def test_what_is_about_to_leave_is_not_copied(monkeypatch):
    """Guards: copies of rows that go a few calls later, at every token of a long reply."""
    copies = []
    monkeypatch.setattr(Segment, "packed", lambda self, *args: copies.append(self.start) or self)
    monkeypatch.setattr(room, "LINKED_ROWS", 40)
    for limit, copied in ((40, False), (200, True)):
        copies.clear()
        horizon = Horizon(limit, 1 << 20, None)
        for pos in range(160):
            horizon.append(Segment(pos, pos + 1, None, (mx.zeros((1, 4)),), None), None)
        assert bool(copies) is copied
