"""The pure half of going back: plans, call sizes, the checkpoints."""

import random

import pytest

from ds4cli.rewind.checkpoints import Checkpoint, Checkpoints
from ds4cli.rewind.plan import Reach, call_sizes, plan
from ds4cli.tokens import common_prefix


def checkpoint(pos, kind="block", nbytes=10, logits="row"):
    return Checkpoint(pos, kind, None, nbytes, logits)


def reach(pos=100, low=60, rows=None, last_block=(95, 100), can_cut=False, checkpoints=()):
    rows = range(low, pos + 1) if rows is None else rows
    return Reach(pos, low, pos, rows, last_block, can_cut, checkpoints)


def planned(pos, where, chunk=512, last=512, **options):
    return plan(pos, where, calls=lambda n: len(call_sizes(n, chunk, last)), **options)


def test_inside_the_record_costs_no_call():
    """A stop inside an accepted block must not cost a model call."""
    for pos in range(95, 100):
        p = planned(pos, reach())
        assert (p.source, p.replay, p.forwards) == ("block", 0, 0)


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


def test_common_prefix_against_the_plain_loop():
    """A bisection off by one would re-read, or worse keep, a differing token."""
    rng = random.Random(0)
    for _ in range(300):
        a = [rng.randrange(2) for _ in range(rng.randrange(12))]
        b = a[: rng.randrange(len(a) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(4))]
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        assert common_prefix(a, b) == n


def test_thinning_keeps_the_promise():
    """Going back d tokens replays at most d plus one block, with about 2 log2(pos) checkpoints."""
    checkpoints = Checkpoints(31 * 10)
    for pos in range(16, 20_001, 16):
        checkpoints.add(checkpoint(pos), pos)
    live = 20_000
    assert len(checkpoints.kept) <= 2 * 15 + 1
    for depth in range(1, live):
        nearest = max((f.pos for f in checkpoints.kept if f.pos <= live - depth), default=0)
        assert live - depth - nearest <= depth + 16


def test_with_room_nothing_is_thinned_and_their_number_is_bounded():
    """Memory that was granted must be used; arrays must not pile up all the same."""
    checkpoints = Checkpoints(10**9)
    for pos in range(16, 3_001, 16):
        checkpoints.add(checkpoint(pos), pos)
    assert len(checkpoints.kept) == 3_000 // 16
    for pos in range(3_016, 20_001, 16):
        checkpoints.add(checkpoint(pos), pos)
    assert len(checkpoints.kept) <= 256


def test_budget_evicts_blocks_then_chunks_then_turns():
    """The checkpoints that people go back to must outlive the automatic ones."""
    checkpoints = Checkpoints(40)
    for pos, kind in [(10, "system"), (20, "chunk"), (30, "turn"), (40, "tool"), (50, "block")]:
        checkpoints.add(checkpoint(pos, kind), 51)
    assert checkpoints.nbytes <= 40
    assert [f.kind for f in checkpoints.kept if f.kind in ("block", "chunk")] != ["block", "chunk"]
    checkpoints.thin(51, 10)
    assert [f.kind for f in checkpoints.kept] == ["system"]
    checkpoints.thin(51, 0)
    assert checkpoints.kept == []


def test_a_strong_mark_is_not_replaced_by_a_weak_one():
    """A block checkpoint on the system text's end must not make it evictable."""
    checkpoints = Checkpoints(100)
    checkpoints.add(checkpoint(10, "system"), 10)
    checkpoints.add(checkpoint(10, "block"), 10)
    assert [f.kind for f in checkpoints.kept] == ["system"]


def test_marks_beyond_an_edit_are_forgotten():
    """A checkpoint keyed to tokens that were overwritten must not come back."""
    checkpoints = Checkpoints(100, [checkpoint(10), checkpoint(20)])
    checkpoints.drop_after(15)
    assert [f.pos for f in checkpoints.kept] == [10]
