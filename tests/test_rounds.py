"""How long the blocks of all lanes are in one call: while the tokens per second rise."""

import random

import pytest

from ds4cli.drafters.asking import Asking
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.rounds import SIZES, RoundCosts, best_size


def costs(row: float, lanes: int = 4, sizes=(2, 4)) -> RoundCosts:
    """Costs that were learnt where a further row on every lane costs so many plain rounds."""
    known = RoundCosts()
    for size in [1, 1, *sizes] * 40:
        known.observe(lanes, size, 1 + row * (size - 1))
    return known


def test_rounds_that_compile_say_nothing_of_prices():
    """On a GPU the first round of so many rows took ten times as long, and drafting was parked."""
    known = costs(0.1)
    for lanes in range(5, 20):
        known.observe(lanes, 1, 1.0)
        known.observe(lanes, 1, 1.0)
        known.observe(lanes, 8, 30.0)
    assert known.row == pytest.approx(0.1, abs=0.05)
    assert best_size(known, 4, [[0.9]] * 4)[0] == 2, "such a round was timed"
    assert best_size(known, 4, [[0.9**k for k in range(1, 8)]] * 4)[0] == 4, "none was longer"


def copied(rounds, first, row, lanes=8):
    """Tokens that lanes make in the time of a plain token each, where they copy what they were
    given: a guess is right 19 times of 20. The first round of each size takes `first` plain ones
    more; lanes that run ahead stop together, and miss no call."""
    rng, known, seen = random.Random(0), RoundCosts(), set()
    chances, tokens, took = [0.95**k for k in range(1, 16)], 0, 0.0
    for _ in range(rounds):
        size, _ = best_size(known, lanes, [chances] * lanes) if known.plain(lanes) else (1, 0.0)
        if size == 1:
            known.tempt()
        seconds = 1 + row * (size - 1) + first * (size not in seen)
        seen.add(size)
        known.observe(lanes, size, seconds)
        took += seconds
        for _ in range(lanes):
            tokens += 1 + next((i for i in range(size - 1) if rng.random() > 0.95), size - 1)
    return tokens / took / lanes


@pytest.mark.parametrize("first", [2.0, 10.0])
def test_guesses_pay_where_the_first_round_of_each_size_takes_ten(first):
    """On an H200 copies ran at 0.92 of lanes without guesses: the second round of so many rows was
    one of other lengths, and as dear as the first; and what that had shown was never doubted."""
    assert copied(150, first, 0.35) > 1.3


def test_what_guesses_leave_to_the_next_round_is_their_price():
    """Lanes that stopped to feed guesses do not run ahead in the next call, which made plain rounds
    look slow, and guesses cheap."""
    known = RoundCosts()
    for size, seconds in [(1, 1.0)] * 9 + [(2, 1.2), (1, 1.3)] * 40:
        known.observe(4, size, seconds)
    assert known.plain(4) == pytest.approx(1.0)
    assert known.cost(4, 2) == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize("row", [0.1, 0.5, 1.0])
def test_prices_are_learnt_from_rounds(row):
    """Prices stayed as they were assumed."""
    known = costs(row)
    assert known.row == pytest.approx(row, abs=0.05)
    assert known.cost(4, 1) == pytest.approx(1.0, abs=0.01)
    assert known.cost(4, 4) == pytest.approx(1 + 3 * row, abs=0.05)


def test_a_size_has_its_own_price_once_it_was_timed():
    """A call has costs of its own: by what one guess a lane costs, seven never paid."""
    known = costs(0.4, sizes=(2,))
    longer = known.cost(4, 8)
    assert 1.4 < longer < 1 + 7 * 0.4, "rows of a longer block are cheaper"
    for _ in range(3):  # the first says nothing
        known.observe(4, 8, 1.6)
    known.observe(4, 1, 1.0)
    assert known.cost(4, 8) == pytest.approx(1.6)
    assert known.cost(4, 2) == pytest.approx(1.4, abs=0.01)
    assert known.cost(5, 8) == pytest.approx(1.6), "next to that number of lanes"
    assert known.cost(40, 8) != pytest.approx(1.6)


def test_blocks_are_as_long_as_pays():
    """Guards: guesses at any price, a longer block than all guesses fill, or than is allowed."""
    sure = [0.95**k for k in range(1, 32)]
    assert best_size(costs(2.0), 4, [[0.9] * 5] * 4)[0] == 1
    assert best_size(RoundCosts(), 4, [[], []])[0] == best_size(RoundCosts(), 4, [])[0] == 1
    cheap = costs(0.02, sizes=SIZES)
    assert best_size(cheap, 4, [sure] * 4)[0] == SIZES[-1]
    assert best_size(cheap, 4, [sure] * 4, most=9)[0] == 8
    assert best_size(cheap, 4, [sure[:2]] * 4)[0] == 4, "the shortest that holds them"
    assert best_size(cheap, 4, [sure])[0] == SIZES[-1], (
        "one lane's are enough where rows cost little"
    )
    assert best_size(costs(0.3, sizes=SIZES), 4, [sure])[0] == 1, "three lanes pay for one"
    assert best_size(costs(0.3, sizes=SIZES), 4, [sure] * 4)[0] > 1


def test_what_making_them_took_counts():
    """Guesses that took two plain rounds to make came at the price of those that took none."""
    known, chances = costs(0.1, sizes=SIZES), [[0.9, 0.8, 0.7]] * 4
    size, rate = best_size(known, 4, chances)
    assert size == 4 and rate == pytest.approx((4 + 4 * 2.4) / 1.3, rel=0.01)
    assert best_size(known, 4, chances, 2.0) == (4, pytest.approx((4 + 4 * 2.4) / 3.3, rel=0.01))


def test_nothing_long_is_tried_before_anything_was_timed():
    """The first guesses of a process were fifteen a lane, whatever they cost."""
    known, sure = RoundCosts(), [[0.99] * 15] * 4
    assert best_size(known, 4, sure)[0] == 2
    for size in (1, 1, 2, 2, 2):
        known.observe(4, size, 1.0)
    assert not known.is_known, "the last is judged with the round behind it"
    known.observe(4, 1, 1.0)
    assert known.is_known and best_size(known, 4, sure)[0] == SIZES[-1]


def test_a_price_that_keeps_guesses_out_is_doubted_in_time():
    """One slow round parked drafting for ever."""
    known = costs(3.0, sizes=SIZES)
    rounds = 0
    while best_size(known, 4, [[0.9, 0.8, 0.7]] * 4)[0] == 1:
        known.tempt()
        known.observe(4, 1, 1.0)
        rounds += 1
        assert rounds < 2000
    assert rounds > 100


def test_a_number_of_lanes_that_was_not_timed_costs_what_the_next_one_does():
    """Whenever a line ended, guesses waited for a round without any."""
    known = costs(0.5, lanes=8)
    assert known.plain(8) == known.plain(6) == known.plain(12) == pytest.approx(1.0)
    assert known.plain(5) == known.plain(2) == known.plain(16) == 0.0
    known.observe(6, 1, 40.0)  # compiles
    known.observe(6, 1, 0.5)
    assert (known.plain(6), known.plain(5)) == (0.5, 0.5)
    assert known.plain(9) == pytest.approx(1.0)
    assert known.timed() == {8: pytest.approx(1.0)}


def tried(asking, known, chance, rounds):
    """The rounds in which `asking` asks 4 lanes whose guesses are kept so often. A draft of theirs
    takes half a plain round."""
    found, hopes = [], [[chance**k for k in range(1, 9)]] * 4
    for i in range(0, rounds, 8):
        asking.plan(known, 4, hopes, 0, 8)
        asking.plan(known, 4, hopes, 0, 0)  # lanes have to stop running ahead first
        if asking.length:
            found.append(i)
            assert asking.guesses(known, 4, hopes, 0, []) > 0
            asking.observe(4, 2, 0.5)
    return found


def test_who_takes_time_is_tried_now_and_then_and_asked_while_that_pays():
    """A head that was wrong at first was never asked again, or tried as often as before."""
    asking, known = Asking(Drafter()), costs(0.3)
    for _ in range(4):
        asking.observe(4, 2, 0.5)
    tries = tried(asking, known, 0.1, 2000)
    assert 5 < len(tries) < 40 and 1.5 * len(tries) < 0.03 * 2000
    assert tries[-1] - tries[-2] > 2 * (tries[1] - tries[0])
    assert len(tried(asking, known, 0.95, 80)) == 10


def test_prompts_that_are_still_to_be_read_are_a_part_of_the_price():
    """Short texts paid for a reading each that nothing came of."""
    asking, known = Asking(Drafter()), costs(0.3)
    hopes = [[0.8, 0.64]] * 4
    for _ in range(4):
        asking.observe(4, 2, 0.1)
    asking.observe(4, 2, 40.1, new=4)
    asking.plan(known, 4, hopes, 0, 1)
    assert asking.length
    asking.plan(known, 4, hopes, 4, 1)
    assert not asking.length
