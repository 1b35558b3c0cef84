"""The draft-length controller, on simulated machines and texts with a simulated clock."""

import random
from functools import lru_cache
from itertools import pairwise

import pytest

from ds4cli.drafters import Drafter
from ds4cli.drafters.length import CallCosts, Chances, DraftLength
from ds4cli.settings import Settings

ROOM = 31
MACHINES = {  # cost of a call by its rows, in one-row calls
    "memory bound": lambda rows: 1 + 0.02 * (rows - 1),
    "mixed": lambda rows: 1 + 0.1 * (rows - 1),
    "compute bound": lambda rows: 1 + 0.3 * (rows - 1),
    "hopeless": lambda rows: 1 + 0.8 * (rows - 1),
}


class Guesser(Drafter):
    """Right at a position with chance `right(pos)`; which positions, only `seed` decides."""

    name = "guesser"

    def __init__(self, right, is_free=True, confidence=0, seed=0):
        self.is_free, self.confidence = is_free, confidence
        rng = random.Random(seed)
        self.knows = [rng.random() < right(pos) for pos in range(5000)]
        self.proposed = []

    def propose(self, tokens, n):
        self.proposed.append(n)
        pos = len(tokens)
        return [p if self.knows[p] else -1 for p in range(pos, pos + n)]


class Clock:
    """A decode over the text 0, 1, 2, ...: seconds per block, lengths of its drafts."""

    def __init__(self, machine, guesser, per_draft=0.0, seed=0):
        self.machine, self.guesser, self.per_draft = machine, guesser, per_draft
        self.rng = random.Random(seed)
        self.pos, self.seconds, self.lengths = 1, 0.0, []

    def run(self, until, length=None, k=None, region="prose"):
        """Go on with a controller, or with k drafts in every block."""
        while self.pos < until:
            room, tokens = min(ROOM, until - self.pos - 1), range(self.pos)
            if length is not None:
                drafts = length.draft(self.guesser, tokens, room, region)
            else:
                drafts = self.guesser.propose(tokens, min(k, room)) if k else []
            right = [p == self.pos + i for i, p in enumerate(drafts)]
            kept = 1 + (right.index(False) if False in right else len(right))
            took = self.machine(1 + len(drafts)) + self.per_draft * len(drafts)
            took *= max(0.5, self.rng.gauss(1, 0.05))
            if length is not None:
                length.observe(1 + len(drafts), kept, took)
            self.pos += kept
            self.seconds += took
            self.lengths.append(len(drafts))
        return self


def clock(machine, right, is_free=True, seed=0):
    per_draft = 0.0 if is_free else 0.12
    return Clock(MACHINES[machine], Guesser(lambda _: right, is_free, seed=seed), per_draft, seed)


def controlled(machine, right, is_free=True, seed=0, until=2000):
    return clock(machine, right, is_free, seed).run(until, DraftLength(Settings()))


@lru_cache
def fixed(machine, right, is_free, k, seed, until=2000):
    return clock(machine, right, is_free, seed).run(until, k=k).seconds


# --- what it is for ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_free", [True, False], ids=["free", "costly"])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.9, 0.98])
@pytest.mark.parametrize("machine", MACHINES)
def test_regret_is_at_most_5_percent(machine, right, is_free):
    """A controller that is worse than one fixed length is worse than a flag."""
    seeds = range(3)
    best = min(
        sum(fixed(machine, right, is_free, k, seed) for seed in seeds)
        for k in (0, 1, 2, 3, 5, 8, 12, 16, 24, 31)
    )
    ours = sum(controlled(machine, right, is_free, seed).seconds for seed in seeds)
    assert ours / best < 1.05


@pytest.mark.parametrize("is_free", [True, False], ids=["free", "costly"])
@pytest.mark.parametrize("right", [0.0, 0.12])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_below_097_of_plain(machine, right, is_free):
    """Where guesses are never or hardly ever right, trying them must cost next to nothing."""
    plain = fixed(machine, right, is_free, 0, 0)
    assert plain / controlled(machine, right, is_free).seconds > 0.97


@pytest.mark.parametrize("is_free", [True, False], ids=["free", "costly"])
def test_recovers_when_text_turns_repetitive(is_free):
    """Speculation that parked must notice that it would pay again."""
    guesser = Guesser(lambda pos: 0.0 if pos < 1500 else 0.97, is_free)
    c, length = Clock(MACHINES["mixed"], guesser, 0.0 if is_free else 0.05), DraftLength(Settings())
    c.run(1500, length)
    assert c.lengths[-50:].count(0) > 45 and length.parked > 1000
    before = c.seconds
    c.run(3500, length)
    assert 2000 / (c.seconds - before) > 2.0  # tokens per one-row call; the best length has 4.7


def test_a_costly_drafter_is_tried_ever_more_rarely():
    """Probes at a fixed interval would tax every text that cannot be guessed."""
    c = controlled("mixed", 0.0, is_free=False, until=4000)
    tries = [i for i, n in enumerate(c.lengths) if n]
    gaps = [b - a for a, b in pairwise(tries)]
    assert len(tries) < 20 and gaps[-1] > 400


def test_a_free_drafter_needs_no_probes():
    """Its guesses are compared with the text anyway: feeding hopeless ones would be waste."""
    assert sum(n > 0 for n in controlled("compute bound", 0.0, until=4000).lengths) < 5


def test_regions_are_kept_apart():
    """Prose that cannot be guessed must not park the drafts of a tool call."""
    guesser, length = Guesser(lambda pos: 0.0 if pos % 200 < 100 else 0.97), DraftLength(Settings())
    c = Clock(MACHINES["mixed"], guesser)
    for start in range(0, 2000, 200):
        c.run(start + 100, length, region="prose")
        in_prose = len(c.lengths)
        c.run(start + 200, length, region="tool")
    assert max(c.lengths[in_prose : in_prose + 3]) >= 6


def test_confidence_decides():
    """Long matches must draft although short ones never hold."""
    guesser, length = Guesser(lambda pos: 0.0 if pos % 40 < 20 else 0.98), DraftLength(Settings())
    c = Clock(MACHINES["mixed"], guesser)
    for start in range(0, 1200, 40):
        guesser.confidence = 1
        c.run(start + 20, length)
        low = len(c.lengths)
        guesser.confidence = 12
        c.run(start + 40, length)
    assert max(c.lengths[low - 20 : low]) == 0 and c.lengths[low] >= 6


def test_one_slow_block_does_not_park():
    """A hiccup of the machine must not pass for the price of a row count."""
    c, length = clock("mixed", 0.9), DraftLength(Settings())
    c.run(600, length)
    usual = c.lengths[-10:]
    length.observe(1 + usual[-1], 1, 500.0)
    c.run(900, length)
    assert min(c.lengths[-20:-3]) > 0


# --- modes ------------------------------------------------------------------------------------


def lengths(right=0.0, until=300, region="prose", **settings):
    length = DraftLength(Settings(**settings))
    return clock("hopeless", right).run(until, length, region=region).lengths


def test_never_and_tools():
    """A mode that is parsed and ignored gives the same speed for every choice."""
    assert max(lengths(0.99, speculate="never")) == 0
    assert max(lengths(0.99, speculate="tools")) == 0
    assert max(lengths(0.99, speculate="tools", region="tool")) > 0
    assert max(lengths(0.99, speculate="tools", num_draft_tokens=4)) == 0


def test_always_never_parks():
    """`always` is for measuring: a block without drafts would spoil the figures."""
    assert min(lengths(speculate="always")[:-1]) > 0


def test_a_pinned_length_is_kept():
    """`--num-draft-tokens` that adapts is no pin."""
    assert set(lengths(num_draft_tokens=5)[:-5]) == {5}


def test_no_room_no_drafts():
    """At the token limit nothing may be drafted, nor the drafter run."""
    guesser = Guesser(lambda _: 1.0)
    for settings in (Settings(), Settings(speculate="always"), Settings(num_draft_tokens=3)):
        assert DraftLength(settings).draft(guesser, range(5), 0) == []
    assert guesser.proposed == []


# --- parts ------------------------------------------------------------------------------------


def test_a_rewind_forgets_open_proposals():
    """After a rewind or a new prompt the text is no verdict on what was proposed before."""
    guesser, length = Guesser(lambda _: 1.0), DraftLength(Settings())
    length.draft(guesser, range(10), 4)
    length.draft(guesser, [*range(10), 99, 98, 97, 96, 95], 4)  # nothing was observed between
    assert all(not chances._tried for chances in length._chances.values())


def test_the_first_call_of_a_shape_is_not_counted():
    """It compiles kernels: taken at its word it would price that shape out for long."""
    costs = CallCosts()
    costs.observe(1, 1, 50.0)
    assert not costs.known
    costs.observe(1, 1, 1.0)
    assert costs.known and next(costs.extra_tokens(1)) < 0.2


def test_prices_never_fall_with_rows():
    """Noise that makes more rows cheaper would draft without end."""
    costs = CallCosts()
    for rows, seconds in ((1, 1.0), (5, 2.0), (3, 2.5), (9, 1.9)) * 3:
        costs.observe(rows, 1, seconds)
    prices = list(costs.extra_tokens(12))
    assert prices == sorted(prices) and prices[0] >= 0


def test_chances_follow_what_is_seen():
    """The estimate of each depth must be the share that was right there, not of all guesses."""
    chances, rng = Chances(0.5), random.Random(0)
    for _ in range(400):
        chances.learn(4, 0 if rng.random() < 0.5 else 4)
    survival = chances.survival()
    alive = [next(survival) for _ in range(4)]
    assert abs(alive[0] - 0.5) < 0.2 and alive[3] > 0.9 * alive[0]
