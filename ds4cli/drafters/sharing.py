"""How many guesses of which lane go into one model call for all.

Rows of a call are shared out by the chance that they are kept, while the tokens per second of all
lanes together rise. What a round costs is learnt by timing what runs: it is told in plain rounds,
those with one row a lane. In float32 no text depends on any of it. No mlx.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4cli.drafters.costs import Mean

# What further rows, of all that a plain round costs with so many lanes, and a further length of
# blocks are taken to cost before they were timed: on the low side, for that is found out.
ASSUMED_ROWS, ASSUMED_LENGTH = 0.3, 0.02
ASSUMED_WEIGHT = 0.1
# Guesses of an offer while that is so.
FIRST_GUESSES, MOST_FIRST = 1, 4
# How much a round still counts after the next one, and what is known of a price after a round in
# which nothing was fed for it: it is tried again some time.
DECAY, FORGET = 0.97, 0.995
# Numbers of lanes whose rounds are taken to cost alike, by how many times one is the other.
NEAR = 1.5
# Rounds that a price is made of which is remembered.
ENOUGH_ROUNDS = 8
# How much the first round of a shape says of what those of others take.
NEW_SHAPE = 0.3
# Rounds of a shape after which what its first one took is to be repaid.
REPAID_AFTER = 16
# Expected gain, as a share of a plain round, below which guesses are left out.
WORTHWHILE = 0.02
# A lane that runs ahead misses a call when it stops to feed guesses: they must be worth more.
MISSED = 1.0
HARDLY = 0.05


class RoundCosts:
    """Seconds of a round by its lanes, rows, and lengths of blocks.

    A round costs `plain`, and of that the share `row` for each row beyond one a lane and `length`
    for each length of blocks beyond one.
    """

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}  # by lanes
        self._met: set[tuple[int, int]] = set()  # lanes and rows of rounds that there were
        self._compiling = 0.0  # what the first round of a shape takes more, in plain ones
        # Lanes, and rows and lengths beyond plain, if the last round had guesses.
        self._fed: tuple[int, float, int] | None = None
        self._sums = [0.0] * 5  # of rows^2, rows * lengths, lengths^2, rows * over, lengths * over

    def plain(self, lanes: int) -> float:
        """Seconds of a round of one row a lane, as with the next number of lanes that was timed; 0
        while none was that is near."""
        known = self._plain.get(lanes)
        if known is None:
            near = [n for n in self._plain if lanes <= NEAR * n and n <= NEAR * lanes]
            known = self._plain.get(min(near, key=lambda n: abs(n - lanes), default=0))
        return 0.0 if known is None else known.value

    def timed(self) -> dict[int, float]:
        """Seconds of a round of one row a lane, by lanes, where enough of them were timed."""
        return {n: mean.value for n, mean in self._plain.items() if mean.weight >= ENOUGH_ROUNDS}

    def observe(self, lanes: int, rows: int, lengths: int, seconds: float) -> None:
        """A round took so long. The first of a shape may compile, which has a price of its own."""
        fed, self._fed = self._fed, None
        plain = self.plain(lanes)
        if (lanes, rows) not in self._met:
            self._fed = (lanes, 0.0, 0) if rows > lanes else None
            if rows > lanes and plain:
                over = seconds / plain - self.cost(lanes, rows, lengths)
                self._compiling += NEW_SHAPE * (max(0.0, over) - self._compiling)
            self._met.add((lanes, rows))
        elif rows == lanes and (fed is None or fed[0] != lanes):
            self._plain.setdefault(lanes, Mean(DECAY)).add(seconds)
        elif plain:
            if rows > lanes:
                more, kinds = rows / lanes - 1, lengths - 1
                self._fed = fed = lanes, more, kinds
                squares = more * more, more * kinds, kinds * kinds, 0.0, 0.0
                self._sums = [DECAY * x + new for x, new in zip(self._sums, squares, strict=True)]
            assert fed is not None, "a plain round is behind guesses here: they pay for it, too"
            over = min(seconds / plain, 10.0) - 1
            self._sums[3] += fed[1] * over
            self._sums[4] += fed[2] * over

    def forget(self) -> None:
        """There were guesses, and none was fed."""
        self._sums = [FORGET * x for x in self._sums]

    @property
    def is_known(self) -> bool:
        """Whether rounds with guesses were timed, not too long ago."""
        return self._sums[0] > ASSUMED_WEIGHT

    def prices(self) -> tuple[float, float]:
        """Of as many further rows as there are lanes, and of a further length, in plain rounds: the
        least squares of what was seen and what is assumed."""
        aa, ab, bb, ay, by = self._sums
        aa, ay = aa + ASSUMED_WEIGHT, ay + ASSUMED_WEIGHT * ASSUMED_ROWS
        bb, by = bb + ASSUMED_WEIGHT, by + ASSUMED_WEIGHT * ASSUMED_LENGTH
        by_one = aa * bb - ab * ab
        return max(0.01, (ay * bb - by * ab) / by_one), max(0.0, (by * aa - ay * ab) / by_one)

    def cost(self, lanes: int, rows: int, lengths: int) -> float:
        """Of a round, in plain ones."""
        row, length = self.prices()
        return 1 + row * (rows / lanes - 1) + length * (lengths - 1) + self.first(lanes, rows)

    def first(self, lanes: int, rows: int) -> float:
        """What a round costs more, in plain ones, because there was none of so many rows yet."""
        return 0.0 if (lanes, rows) in self._met else self._compiling / REPAID_AFTER


def share(
    costs: RoundCosts, lanes: int, chances: Sequence[Sequence[float]], spent: float = 0.0
) -> tuple[list[int], float]:
    """How many guesses of each offer to feed in a round of `lanes` lanes, and the tokens that the
    time of a plain round then makes. chances: per offer, that its first guess is kept, its first
    two, ... spent: what making them took, in plain rounds."""
    if not costs.is_known:  # where lanes are many a few rows say too little of what they cost
        most = min(MOST_FIRST, max(FIRST_GUESSES, lanes // 2))
        chances = [own[:most] for own in chances]
    fed, best = [0] * len(chances), [0] * len(chances)
    tokens, highest = float(lanes), (1 + WORTHWHILE) * lanes / (1 + spent)
    while True:
        nexts = [
            (own[k], i) for i, (own, k) in enumerate(zip(chances, fed, strict=True)) if k < len(own)
        ]
        chance, i = max(nexts, default=(0.0, 0))
        if chance < HARDLY:
            return best, highest
        tokens += chance
        fed[i] += 1
        lengths = {k + 1 for k in fed} | ({1} if len(fed) < lanes else set())
        rate = tokens / (spent + costs.cost(lanes, lanes + sum(fed), len(lengths)))
        if rate > highest:
            highest, best = rate, list(fed)


def is_worth_stopping(costs: RoundCosts, lanes: int, chances: Sequence[float]) -> bool:
    """Whether a lane that runs ahead should stop, and feed guesses with these chances."""
    row, length = costs.prices()
    gain, most = -MISSED - lanes * length, 0.0
    for k, chance in enumerate(chances, 1):
        gain += chance - row  # a row costs the round's share of what all lanes make in it
        most = max(most, gain - lanes * costs.first(lanes, lanes + k))
    return most > WORTHWHILE * lanes
