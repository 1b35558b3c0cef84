"""What is kept of earlier positions, and what goes first."""

import pytest

from ds4cli.rewind import checkpoints as module
from ds4cli.rewind.checkpoints import Checkpoint, Checkpoints, thinned


def checkpoint(pos, kind="block", nbytes=10, logits="row"):
    return Checkpoint(pos, kind, None, nbytes, logits)


def positions(checkpoints):
    return [f.pos for f in checkpoints.kept]


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
    checkpoints.drop_after(20)
    assert positions(checkpoints) == [10, 20]
    checkpoints.drop_after(15)
    assert positions(checkpoints) == [10]
    checkpoints.drop_after(9)
    checkpoints.drop_after(9)
    assert positions(checkpoints) == []


def test_a_copy_goes_its_own_way():
    """A branch whose checkpoints vanish with those of the other."""
    checkpoints = Checkpoints(25, [checkpoint(10), checkpoint(20)])
    twin = checkpoints.copy()
    twin.drop_after(10)
    assert (positions(checkpoints), positions(twin)) == ([10, 20], [10])
    for pos in (30, 40, 50):
        twin.add(checkpoint(pos), pos)
    assert twin.nbytes <= 25, "a copy has the same budget"


def test_what_is_there_is_told_by_position_and_kind():
    """A prompt's own checkpoint is made twice, or left out because of another's."""
    checkpoints = Checkpoints(100, [checkpoint(10, "system"), checkpoint(20)])
    assert checkpoints.has(10) and checkpoints.has(10, "system") and checkpoints.has(20)
    assert not checkpoints.has(10, "turn") and not checkpoints.has(15)
    assert not checkpoints.has(20, "system")


def test_what_just_fits_stays():
    """A budget, or a number, that is reached and not exceeded costs a checkpoint."""
    checkpoints = Checkpoints(30)
    for pos in (10, 20, 30):
        checkpoints.add(checkpoint(pos), 31)
    assert positions(checkpoints) == [10, 20, 30]
    near = [checkpoint(10), checkpoint(11)]
    assert positions(added(near, checkpoint(12), 30)) == [10, 11, 12]
    assert len(added(near, checkpoint(12), 29).kept) == 2
    many = [checkpoint(pos) for pos in range(1, module.MAX_CHECKPOINTS + 1)]
    assert len(added(many[:-1], many[-1], 10**6).kept) == module.MAX_CHECKPOINTS
    assert len(added(many, checkpoint(10**4), 10**6).kept) <= module.MAX_CHECKPOINTS


def added(kept, one, budget):
    checkpoints = Checkpoints(budget, kept)
    checkpoints.add(one, one.pos)
    return checkpoints


@pytest.mark.parametrize("kind", module.EVICTION_ORDER)
def test_one_that_cannot_fit_goes_whatever_it_is(kind):
    """A loop without end, or memory that was not granted, for a state larger than the budget."""
    for live in (10, 11, 12, 13, 30, 10**6):
        assert added([], checkpoint(10, kind, nbytes=50), 49).kept == []
        checkpoints = Checkpoints(49, [checkpoint(5, kind, 30), checkpoint(10, kind, 30)])
        checkpoints.thin(live)
        assert positions(checkpoints) == [10], live


def test_thinning_drops_where_neighbours_are_near_in_proportion():
    """The rule itself: kept where the older neighbour is more than `widen` times as far."""
    marks = [checkpoint(pos) for pos in (40, 50, 90)]
    assert [f.pos for f in thinned(marks, 100, ("block",), 2.0)] == [50, 90]
    assert [f.pos for f in thinned(marks, 100, ("block",), 1.9)] == [40, 50, 90]
    assert [f.pos for f in thinned(marks, 100, ("turn",), 2.0)] == [40, 50, 90]
    more = [checkpoint(30), checkpoint(40), checkpoint(60, "turn"), checkpoint(70)]
    assert [f.pos for f in thinned(more, 100, ("block",), 2.0)] == [40, 60, 70]
    assert [f.pos for f in thinned(more, 100, ("block", "turn"), 2.4)] == [40, 70]
