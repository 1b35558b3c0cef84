"""Rows of one call shared out among lanes: by chance, while the tokens per second rise."""

import random
from itertools import product

import pytest

from ds4cli.drafters.asking import Asking
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.sharing import RoundCosts, is_worth_stopping, share


def costs(row: float, length: float, lanes: int = 4) -> RoundCosts:
    """Costs that were learnt where so many further rows, and further lengths, cost so much."""
    known, dear = RoundCosts(), product((lanes + 3, 2 * lanes, 4 * lanes), (1, 2, 3))
    for rows, lengths in [(lanes, 1), (lanes, 1), *dear] * 40:
        known.observe(lanes, rows, lengths, 1 + row * (rows / lanes - 1) + length * (lengths - 1))
    return known


def test_rounds_that_compile_say_nothing_of_prices():
    """On a GPU the first round of so many rows took ten times as long, and drafting was parked."""
    known = costs(0.1, 0.0)
    for rows in range(17, 40):
        known.observe(4, rows, 2, 30.0)
    assert known.prices() == pytest.approx((0.1, 0.0), abs=0.05)
    assert share(known, 4, [[0.9]])[0] == [0]  # 5 rows in all: there was no such round
    assert share(known, 4, [[0.9]] * 4)[0] == [1] * 4


def copied(rounds, first, row, lanes=8):
    """Tokens that lanes make in the time of a plain token each, where they copy what they were
    given: a guess is right 19 times of 20. The first round of each shape takes `first` plain ones
    more; lanes that fed nothing run ahead, and are asked now and then whether to stop."""
    rng, known, seen = random.Random(0), RoundCosts(), set()
    chances, stopped, tokens, took = [0.95**k for k in range(1, 9)], set(range(lanes)), 0, 0.0
    for turn in range(rounds):
        offers = sorted(stopped) if known.plain(lanes) else []
        fed, _ = share(known, lanes, [chances] * len(offers))
        if offers and not any(fed):
            known.tempt()
        sizes = [1] * (lanes - len(fed)) + [1 + k for k in fed]
        shape = tuple(sorted({*sizes})), sum(sizes)
        seconds = 1 + row * (sum(sizes) / lanes - 1) + first * (shape not in seen)
        seen.add(shape)
        known.observe(lanes, sum(sizes), len({*sizes}), seconds)
        took += seconds
        kept = [next((i for i in range(k) if rng.random() > 0.95), k) for k in fed]
        tokens += lanes + sum(kept)
        ahead = {*range(lanes)} - {i for i, k in zip(offers, fed, strict=True) if k}
        wanted = known.plain(lanes) and is_worth_stopping(known, lanes, chances)
        if not wanted:
            known.tempt()
        missed = {i for i in ahead if wanted and (turn + i) % 4 == 0}
        tokens -= len(missed)
        stopped = ({*range(lanes)} - ahead) | missed
    return tokens / took / lanes


@pytest.mark.parametrize("first", [2.0, 10.0])
def test_guesses_pay_where_the_first_round_of_each_shape_takes_ten(first):
    """On an H200 copies ran at 0.92 of lanes without guesses: the second round of so many rows was
    one of other lengths, and as dear as the first; and lanes that ran ahead by what that had shown
    never doubted it."""
    assert copied(150, first, 0.35) > 1.3


def test_what_guesses_leave_to_the_next_round_is_their_price():
    """States that lie one by one after a call with guesses are stacked again in the next call,
    which made plain rounds look slow, and guesses cheap."""
    known = RoundCosts()
    for rows, seconds in [(4, 1.0)] * 9 + [(8, 1.2), (4, 1.3)] * 40:
        known.observe(4, rows, 1, seconds)
    assert known.plain(4) == pytest.approx(1.0)
    assert known.prices()[0] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("row", "length"), [(0.1, 0.0), (0.5, 0.05), (1.0, 0.2)])
def test_prices_are_learnt_from_rounds(row, length):
    """Prices stayed as they were assumed."""
    assert costs(row, length).prices() == pytest.approx((row, length), abs=0.05)


def test_likely_guesses_come_first_and_unlikely_ones_stay_out():
    """Every lane was given as many rows as the others."""
    fed, _ = share(costs(0.5, 0.0), 4, [[0.9, 0.8, 0.7], [0.2], [0.7, 0.1]])
    assert fed[0] == 3 and fed[1] == 0 and fed[2] == 1
    assert share(costs(0.1, 0.0), 4, [[0.9, 0.8], [0.2], [0.6, 0.1]])[0] == [2, 1, 1]


def test_nothing_is_fed_that_does_not_pay():
    """Lanes with guesses were slower than lanes without."""
    assert share(costs(2.0, 0.0), 4, [[0.9] * 5] * 4)[0] == [0] * 4
    assert share(RoundCosts(), 4, [[], []])[0] == [0, 0]
    assert not is_worth_stopping(costs(0.5, 0.0), 4, [0.9])
    assert is_worth_stopping(costs(0.2, 0.0), 4, [0.95, 0.9, 0.9, 0.9])


def test_lengths_that_cost_are_kept_alike():
    """One guess of a single lane cost all of them a second batch of every recurrence."""
    dear = costs(0.2, 0.5)
    assert share(dear, 4, [[0.9]])[0] == [0]
    assert share(dear, 4, [[0.9] * 2] * 4)[0] == [2] * 4


def test_a_price_that_keeps_guesses_out_is_doubted_in_time():
    """One slow round parked drafting for ever."""
    known = costs(3.0, 0.0)
    rounds = 0
    while not is_worth_stopping(known, 4, [0.9, 0.8, 0.7]):
        known.tempt()
        known.observe(4, 4, 1, 1.0)
        rounds += 1
        assert rounds < 2000
    assert rounds > 100


def test_a_number_of_lanes_that_was_not_timed_costs_what_the_next_one_does():
    """Whenever a line ended, guesses waited for a round without any."""
    known = costs(0.5, 0.0, lanes=8)
    assert known.plain(8) == known.plain(6) == known.plain(12) == 1.0
    assert known.plain(5) == known.plain(2) == known.plain(16) == 0.0
    known.observe(6, 6, 1, 40.0)  # compiles
    known.observe(6, 6, 1, 0.5)
    assert (known.plain(6), known.plain(5), known.plain(9)) == (0.5, 0.5, 1.0)
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
    asking, known = Asking(Drafter()), costs(0.3, 0.0)
    for _ in range(4):
        asking.observe(4, 2, 0.5)
    tries = tried(asking, known, 0.1, 2000)
    assert 5 < len(tries) < 40 and 1.5 * len(tries) < 0.03 * 2000
    assert tries[-1] - tries[-2] > 2 * (tries[1] - tries[0])
    assert len(tried(asking, known, 0.95, 80)) == 10


def test_prompts_that_are_still_to_be_read_are_a_part_of_the_price():
    """Short texts paid for a reading each that nothing came of."""
    asking, known = Asking(Drafter()), costs(0.3, 0.0)
    hopes = [[0.8, 0.64]] * 4
    for _ in range(4):
        asking.observe(4, 2, 0.1)
    asking.observe(4, 2, 40.1, new=4)
    asking.plan(known, 4, hopes, 0, 1)
    assert asking.length
    asking.plan(known, 4, hopes, 4, 1)
    assert not asking.length
