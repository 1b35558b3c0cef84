"""How many positions a budget holds: numbers only, without a model."""

from __future__ import annotations

import pytest

from ds4cli.rewind import room
from ds4cli.rewind.room import Room
from ds4cli.tape.recorder import Sizes

# A row is 64 bytes of tape and 32 of logits, beside states of 64.
SIZES = Sizes(row=64, history=0, state=64, row_arrays=2, state_arrays=2)
LOGITS = 32
PAGE = 16384


def rooms(budget, limit=10**6, sizes=SIZES, page=1):
    return Room.of(limit, budget, sizes, LOGITS, page)


def test_many_checkpoints_only_where_they_are_cheap():
    """Eight of them in a quarter of the budget are many."""
    cheap = 4 * 8 * SIZES.state
    assert rooms(cheap).is_dense and not rooms(cheap - 4).is_dense
    assert rooms(cheap).spacing == room.DENSE_SPACING
    assert rooms(0, sizes=Sizes()).is_dense


@pytest.mark.parametrize(("spacing", "wider"), [(32, 64), (64, 128), (128, 500), (500, None)])
@pytest.mark.parametrize("page", [1, PAGE])
def test_more_checkpoints_only_where_they_take_no_row(monkeypatch, spacing, wider, page):
    """They took the room of rows that were promised; too few, and a way back replays them all."""
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 10**9)
    monkeypatch.setattr(room, "RUN_ROWS", (32,))
    sizes = SIZES._replace(state=10**6)
    pages = 3 * 32 * 2 * PAGE if page > 1 else 0  # of the rows that are not in a run yet
    states = (1 + 500 // spacing) * (10**6 + 32)
    needed = states + (500 + spacing + 32) * 96 + pages
    found = rooms(needed, limit=500, sizes=sizes, page=page)
    assert found.spacing == spacing
    assert found.free_rows == 500 or spacing == 500, "checkpoints have the rest"
    assert rooms(needed - 1, limit=500, sizes=sizes, page=page).spacing == wider


def test_runs_are_as_long_as_leaves_room_for_close_checkpoints(monkeypatch):
    """Histories of rows that are not in a run yet took the room of three checkpoints."""
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 10**9)
    sizes = SIZES._replace(history=1000)
    close = (1 + 500 // 32) * 96 + (500 + 32 + 16) * 96 + 16 * 1000
    found = rooms(close, limit=500, sizes=sizes)
    assert (found.spacing, found.run_rows) == (32, 16)


@pytest.mark.parametrize(
    ("budget", "arrays", "rows"),
    [
        (20_000, 10**9, (20_000 - 96) // 98 - 15),
        (1 << 20, 10**9, ((1 << 20) - 96) // 98 - 31),
        (1 << 20, 3003, 352 + (3003 - 352 * 5) // 5 * 32 - 31),
        (1 << 20, 1700, 304 + (1700 - 304 * 5) // 5 * 16 - 15),
        (96 + 95, 10**9, 0),
        (96 + 4 * 96 - 1, 10**9, 0),
        (96 + 4 * 96, 10**9, 1),
    ],
)
def test_the_rows_that_a_budget_holds(monkeypatch, budget, arrays, rows):
    """What a front end is promised is this number: rows go by runs, so a run less one."""
    monkeypatch.setattr(room, "MAX_ARRAYS", arrays)
    found = rooms(budget)
    assert (found.free_rows, found.most_segments) == (rows, arrays // 5)
    assert found.state_bytes == SIZES.state


def test_histories_that_calls_repeat_are_counted():
    """A row fed alone takes those before it too: nearly three times what was counted."""
    sizes = SIZES._replace(history=150)
    for budget in (3_000, 10_000, 60_000):
        counted = rooms(budget, sizes=sizes)
        assert counted.free_rows < rooms(budget).free_rows
        rows = counted.free_rows + counted.run_rows - 1
        assert 96 + counted.run_rows * 150 + rows * 98 <= budget


def test_runs_are_short_where_the_budget_is(monkeypatch):
    """Whole runs go: with long ones nothing could be promised; short ones take more replays."""
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 10**9)
    sizes = SIZES._replace(history=150)
    runs = [rooms(n * 96, limit=256, sizes=sizes).run_rows for n in (40, 100, 200, 300, 500)]
    assert runs == sorted(runs) and (runs[0], runs[-1]) == (4, 32)
    for rows in (40, 100, 200, 256):
        assert rooms(rows * 96, limit=256, sizes=sizes).free_rows >= 0.85 * (rows - 12)


def test_where_every_array_takes_pages_rows_are_copied_at_once(monkeypatch):
    """On Metal an array of 4 bytes takes 16 kB."""
    monkeypatch.setattr(room, "DENSE_CHECKPOINTS", 0)
    assert rooms(1 << 20, page=PAGE).linked_rows == 0 and rooms(1 << 20).linked_rows == 256
    loose, packed = 98 + 2 * PAGE, 98
    for budget in (20 * loose, 200 * loose):
        found = rooms(budget, page=PAGE)
        linked = min(3 * found.run_rows, (budget - 96) // loose)
        more = (budget - 96 - linked * loose) // packed
        assert found.free_rows == linked + more - (found.run_rows - 1)


def test_rows_that_are_read_where_they_stand_are_not_copied(monkeypatch):
    """Guards: copies on CUDA, most of what recording cost there; or so many arrays that the oldest
    rows go to make room for them."""
    args = 10**6, SIZES, LOGITS, 1

    def linked(limit):
        return Room.of(limit, *args, in_place=True).linked_rows

    assert linked(2000) == 2000
    monkeypatch.setattr(room, "MAX_ARRAYS", 1007)
    assert linked(2000) == 1007 // 2 // 5
    assert Room.of(50, *args, in_place=True).most_segments >= 100
