"""Deciding how to go back, and into which calls a feed is cut."""

import pytest

from ds4cli.rewind.checkpoints import Checkpoint
from ds4cli.rewind.plan import Reach, RewindPlan, call_sizes, plan, stepped_sizes


def checkpoint(pos, kind="block", nbytes=10, logits="row"):
    return Checkpoint(pos, kind, None, nbytes, logits)


def reach(
    pos=100, low=60, rows=None, last_block=(95, 100), can_cut=False, checkpoints=(), high=None
):
    """Where position 100 stands, with 40 behind it in reach; high: where one can go forward to."""
    high = pos if high is None else high
    rows = range(low, high + 1) if rows is None else rows
    return Reach(pos, low, high, rows, last_block, can_cut, checkpoints)


def planned(pos, where, chunk=512, last=512, **options):
    return plan(pos, where, calls=lambda _, n: len(call_sizes(n, chunk, last)), **options)


def test_inside_the_record_costs_no_call():
    """A stop inside an accepted block must not cost a model call."""
    for pos in range(95, 100):
        p = planned(pos, reach())
        assert (p.source, p.replay, p.forwards) == ("block", 0, 0)


def test_where_one_stands_is_nothing_to_do():
    """A plan for the own position that moves something, or that names another one."""
    assert planned(100, reach()) == RewindPlan(100, "live", 100)
    assert planned(0, reach(pos=0, low=0, rows=range(0), last_block=(0, 0))).source == "live"
    fed = planned(1, reach(pos=1, low=0, rows=range(0), last_block=(1, 1)))
    assert (fed.source, fed.forwards) == ("rebuild", 1)


def test_the_ends_of_what_is_reached_are_reached():
    """A bound that leaves out the last position costs a replay there, or a rebuild."""
    assert planned(60, reach()) == RewindPlan(60, "horizon", 60)
    assert planned(100, reach(pos=97, high=100)) == RewindPlan(100, "block", 100)
    assert planned(95, reach()) == RewindPlan(95, "block", 95)
    assert planned(94, reach()) == RewindPlan(94, "horizon", 94)
    assert planned(59, reach()).source == "rebuild"


def test_the_beginning_is_free_only_where_the_record_starts_there():
    """Going back to nothing has to free all memory; inside a first block it need not."""
    kept = range(1, 101)
    assert planned(0, reach(low=0, rows=range(101))) == RewindPlan(0, "rebuild", 0)
    assert planned(0, reach(low=0, rows=kept, last_block=(0, 100))) == RewindPlan(0, "block", 0)
    assert planned(1, reach(low=0, rows=range(3, 101))) == RewindPlan(1, "rebuild", 0, 1)
    short = reach(low=0, rows=range(3, 101), last_block=(0, 100))
    assert planned(1, short) == RewindPlan(1, "horizon", 0, 1)


def test_inside_the_horizon_costs_no_call():
    """Positions whose row is kept must not be fed again."""
    p = planned(70, reach())
    assert (p.source, p.replay, p.forwards) == ("horizon", 0, 0)


def test_a_dropped_row_costs_one_token():
    """Without its logits row a position is reached from one token before, not from a checkpoint."""
    p = planned(70, reach(rows=range(90, 101), checkpoints=[checkpoint(60)]))
    assert (p.source, p.base, p.replay, p.forwards) == ("horizon", 69, 1, 1)


def test_plain_kv_is_a_cut():
    """On models whose layers all cut, a far rewind is a cursor move and one fed token."""
    p = planned(5, reach(low=0, rows=range(60, 101), can_cut=True))
    assert (p.source, p.base, p.forwards) == ("trim", 4, 1)


def test_nearest_checkpoint_below():
    """A checkpoint beyond the target, or a farther one, must not be chosen."""
    checkpoints = [checkpoint(10), checkpoint(30), checkpoint(50, logits=None), checkpoint(55)]
    p = planned(52, reach(checkpoints=checkpoints))
    assert (p.source, p.base, p.replay) == ("frontier", 50, 2)
    assert p.checkpoint is checkpoints[2]


def test_a_checkpoint_without_its_row_does_not_serve_its_own_position():
    """Landing on a checkpoint without logits must feed at least one token."""
    p = planned(50, reach(checkpoints=[checkpoint(30), checkpoint(50, logits=None)]))
    assert (p.base, p.replay) == (30, 20)
    assert planned(50, reach(checkpoints=[checkpoint(50)])).forwards == 0


def test_no_mark_means_rebuild():
    """With nothing to start from the plan says so and counts every call."""
    p = planned(50, reach(), chunk=20, last=20)
    assert (p.source, p.base, p.forwards) == ("rebuild", 0, 3)


def test_live_position_without_its_row_is_fed():
    """A prefill that was cut short has no logits: the plan must not call it done."""
    p = planned(100, reach(rows=range(0)))
    assert (p.source, p.replay) == ("horizon", 1)
    assert planned(100, reach(rows=range(0)), needs_row=False).source == "live"


@pytest.mark.parametrize("n", [0, 1, 5, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(("chunk", "last"), [(8, 8), (8, 3), (8, 100), (1, 1)])
def test_call_sizes_add_up(n, chunk, last):
    """No token is fed twice or dropped, no call exceeds its limit, no call is empty."""
    sizes = call_sizes(n, chunk, last)
    assert sum(sizes) == n
    assert all(0 < size <= chunk for size in sizes)
    assert not sizes or sizes[-1] == min(n, chunk, last)


@pytest.mark.parametrize("start", [0, 3, 8, 21])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 15, 16, 17, 40, 63, 64, 200])
@pytest.mark.parametrize(("chunk", "last"), [(32, 32), (32, 11), (35, 5), (8, 8), (3, 3)])
def test_stepped_sizes_add_up(start, n, chunk, last):
    """No token is fed twice or dropped, no call exceeds its limit, no call is empty."""
    sizes = stepped_sizes(start, n, chunk, last, 8)
    assert sum(sizes) == n
    assert all(0 < size <= chunk for size in sizes)
    assert not sizes or sizes[-1] <= last


def test_long_feeds_go_in_whole_steps():
    """Each prompt of another length met kernels that had to be planned anew."""
    assert stepped_sizes(0, 100, 32, 32, 8) == [24, 32, 32, 12]
    assert stepped_sizes(3, 100, 32, 32, 8) == [5, 16, 32, 32, 15]
    assert stepped_sizes(0, 100, 32, 6, 8) == [32, 32, 32, 4], "fewer may be kept than a step"
    assert stepped_sizes(0, 15, 32, 32, 8) == [15]
    assert stepped_sizes(3, 17, 32, 32, 8) == [1, 16], "nothing between its ends"
