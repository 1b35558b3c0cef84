"""How many guesses of each lane go into one model call for all.

Blocks with guesses are equally long on all lanes, so that rounds have few shapes and run as a
batch: on CUDA a call of a new shape is planned anew, and blocks of unlike lengths cost more than
the rows that fill them up. A length is taken where it makes more tokens in the same time. What a
round costs is learnt by timing what runs: it is told in plain rounds, those with one row a lane. In
float32 no text depends on any of it. No mlx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds4cli.drafters.costs import Mean, Warm

# Tokens of a block with guesses, on all lanes alike.
SIZES = (2, 4, 8, 16)
# The longest before any was timed, and what the rows of a longer one that was not timed yet cost,
# of those of a shorter one: a call has costs of its own.
FIRST_SIZE, FURTHER_ROW = 2, 0.5
# What a further row on every lane is taken to cost before it was timed, in plain rounds: on the low
# side, for that is found out.
ASSUMED_ROW, ASSUMED_WEIGHT = 0.3, 1.0
# How much a round still counts after the next one, and what is known of a price after a round in
# which nothing was fed for it: it is tried again some time.
DECAY, FORGET = 0.97, 0.995
# Times that a length was timed, as they still count, after which its price is its own.
ENOUGH_TIMES = 1.9
# Numbers of lanes whose rounds are taken to cost alike, by how many times one is the other.
NEAR = 1.5
# Rounds that a price is made of which is remembered.
ENOUGH_ROUNDS = 8
# How many times what is expected a round may take, and count as that.
FAR_OUT = 2.0
# How much the first round of a shape says of what those of others take.
NEW_SHAPE = 0.3
# Rounds of a shape after which what its first one took is to be repaid.
REPAID_AFTER = 16
# Expected gain, as a share of a plain round, below which guesses are left out.
WORTHWHILE = 0.05


class _Fed(NamedTuple):
    """The last round, if it had guesses. took: in plain rounds; None where that says nothing."""

    lanes: int
    size: int
    took: float | None


class RoundCosts:
    """Seconds of a round by its lanes and the tokens of their blocks.

    A round costs what its lanes and size took of late, else the share `row` of a plain one for each
    row beyond one a lane.
    """

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}  # seconds by lanes
        self._blocks: dict[int, dict[int, Mean]] = {}  # plain rounds by size and lanes
        self._warm = Warm()
        self._planning = 0.0  # what the first round of a shape takes more, in plain ones
        self._fed: _Fed | None = None
        self._row = Mean(DECAY)
        self._tempted = 0  # rounds

    def plain(self, lanes: int) -> float:
        """Seconds of a round of one row a lane, as with the next number of lanes that was timed; 0
        while none was that is near."""
        known = _near(self._plain, lanes)
        return 0.0 if known is None else known.value

    def timed(self) -> dict[int, float]:
        """Seconds of a round of one row a lane, by lanes, where enough of them were timed."""
        return {n: mean.value for n, mean in self._plain.items() if mean.weight >= ENOUGH_ROUNDS}

    def observe(self, lanes: int, size: int, seconds: float) -> None:
        """A round with so many tokens a lane took so long. What the first of a shape takes more has
        a price of its own."""
        fed, self._fed = self._fed, None
        plain, behind = self.plain(lanes), 0.0
        if size == 1 and (fed is None or fed.lanes != lanes):
            warm = self._warm.of((lanes, size), seconds)
            if warm is not None:
                self._plain.setdefault(lanes, Mean(DECAY)).add(warm)
        elif size == 1 and fed is not None and plain:  # behind guesses, which pay for it, too
            warm = self._warm.of(("behind", fed[:2]), seconds / plain)
            behind = 0.0 if warm is None else warm - 1
        if fed is not None and fed.took is not None:
            self._add(fed.lanes, fed.size, fed.took + behind)
        if size > 1:
            self._fed = self._count(lanes, size, seconds / plain if plain else None)
        if self._tempted and size == 1:
            self._forget(self._tempted)
        self._tempted = 0

    def _count(self, lanes: int, size: int, took: float | None) -> _Fed:
        """A round with guesses took so many plain ones."""
        expected, warm = self.cost(lanes, size), None
        if took is not None:
            warm = self._warm.of((lanes, size), took)
            if warm is None:
                self._planning += NEW_SHAPE * (max(0.0, took - expected) - self._planning)
        return _Fed(lanes, size, None if warm is None else min(warm, FAR_OUT * expected))

    def _add(self, lanes: int, size: int, took: float) -> None:
        self._blocks.setdefault(size, {}).setdefault(lanes, Mean(DECAY)).add(took)
        self._row.add((took - 1) / (size - 1))

    def _forget(self, rounds: int) -> None:
        """What keeps guesses out is doubted in time."""
        blocks = [mean for means in self._blocks.values() for mean in means.values()]
        for mean in (self._row, *blocks):
            mean.weight *= FORGET**rounds

    def tempt(self, rounds: int = 1) -> None:
        """There were guesses, and they are not fed; this stands for so many rounds."""
        self._tempted = rounds

    @property
    def is_known(self) -> bool:
        """Whether rounds with guesses were timed, not too long ago."""
        return self._row.weight > ASSUMED_WEIGHT

    @property
    def row(self) -> float:
        """The price of a further row on every lane, in plain rounds: the mean of what was seen and
        what is assumed."""
        seen = self._row
        whole = seen.weight * seen.value + ASSUMED_WEIGHT * ASSUMED_ROW
        return max(0.01, whole / (seen.weight + ASSUMED_WEIGHT))

    def cost(self, lanes: int, size: int) -> float:
        """Of a round with so many tokens a lane, in plain ones."""
        known = self._known(lanes, size)
        if known:
            return known
        first = 0.0 if (lanes, size) in self._warm else self._planning / REPAID_AFTER
        for shorter in [n for n in SIZES[::-1] if n < size]:
            known = self._known(lanes, shorter)
            if known:
                return known + FURTHER_ROW * self.row * (size - shorter) + first
        return 1 + self.row * (size - 1) + first

    def _known(self, lanes: int, size: int) -> float:
        """What rounds of this shape took, if enough were timed; else 0."""
        known = _near(self._blocks.get(size, {}), lanes)
        return known.value if known is not None and known.weight >= ENOUGH_TIMES else 0.0


def _near(known: dict[int, Mean], lanes: int) -> Mean | None:
    """What is known for so many lanes, or for the next number that is near."""
    if lanes in known:  # nearly always, and asked for each lane's token
        return known[lanes]
    near = [n for n in known if lanes <= NEAR * n and n <= NEAR * lanes]
    return known[min(near, key=lambda n: abs(n - lanes))] if near else None


def sizes_for(
    costs: RoundCosts, guesses: int, first: int = FIRST_SIZE, most: int = SIZES[-1]
) -> list[int]:
    """Lengths to choose from for up to so many guesses a lane: of two that hold all of them the
    shorter one, none over `most`, nor over `first` before any was timed."""
    if not costs.is_known:
        most = min(first, most)
    return [size for size in SIZES if size <= most and size < 2 * (1 + guesses)]


def best_size(
    costs: RoundCosts,
    lanes: int,
    chances: Sequence[Sequence[float]],
    spent: float = 0.0,
    most: int = SIZES[-1],
) -> tuple[int, float]:
    """How many tokens the block of every lane is to have, 1 for no guesses, and the tokens that the
    time of a plain round then makes. chances: per lane with guesses, that its first is kept, its
    first two, ... spent: what making them took, in plain rounds. most: tokens of a block."""
    best, highest = 1, (1 + WORTHWHILE) * lanes / (1 + spent)
    longest = max(map(len, chances), default=0)
    for size in sizes_for(costs, longest, most=most):
        tokens = lanes + sum([sum(own[: size - 1]) for own in chances])
        rate = tokens / (spent + costs.cost(lanes, size))
        if rate > highest:
            best, highest = size, rate
    return best, highest
