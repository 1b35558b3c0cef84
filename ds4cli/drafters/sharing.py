"""How many guesses of which lane go into one model call for all.

Rows of a call are shared out by the chance that they are kept, while the tokens per second of all
lanes together rise. What a round costs is learnt by timing what runs: it is told in plain rounds,
those with one row a lane. In float32 no text depends on any of it. No mlx.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4cli.drafters.costs import Mean, Warm

# What further rows, of all that a plain round costs with so many lanes, and a further length of
# blocks are taken to cost before they were timed: on the low side, for that is found out.
ASSUMED_ROWS, ASSUMED_LENGTH = 0.3, 0.02
ASSUMED_WEIGHT = 1.0
# Guesses of an offer while that is so.
FIRST_GUESSES, MOST_FIRST = 1, 4
# How much a round still counts after the next one, and what is known of a price after a round in
# which nothing was fed for it: it is tried again some time.
DECAY, FORGET = 0.97, 0.995
# Numbers of lanes whose rounds are taken to cost alike, by how many times one is the other.
NEAR = 1.5
# Rounds that a price is made of which is remembered.
ENOUGH_ROUNDS = 8
# Guesses of a round in all, so that shapes of rounds come again: on CUDA each new one is planned.
TOTALS = frozenset((1, 2, 3, *(n << k for n in (4, 6) for k in range(12))))
# How many times what is expected a round may take, and count as that.
FAR_OUT = 2.0
# How much the first round of a shape says of what those of others take.
NEW_SHAPE = 0.3
# Rounds of a shape after which what its first one took is to be repaid.
REPAID_AFTER = 16
# Expected gain, as a share of a plain round, below which guesses are left out.
WORTHWHILE = 0.02
# A lane that runs ahead misses a call when it stops to feed guesses: they must be worth more.
MISSED = 1.0
HARDLY = 0.05
# Lanes, rows, and lengths of blocks.
Shape = tuple[int, int, int]


class RoundCosts:
    """Seconds of a round by its lanes, rows, and lengths of blocks.

    A round costs `plain`, and of that the share `row` for each row beyond one a lane and `length`
    for each length of blocks beyond one.
    """

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}  # by lanes
        self._warm = Warm()
        self._planning = 0.0  # what the first round of a shape takes more, in plain ones
        # Shape of the last round, if it had guesses, and the rows and lengths that it counted for.
        self._fed: tuple[Shape, float, int] | None = None
        self._sums = [0.0] * 5  # of rows^2, rows * lengths, lengths^2, rows * over, lengths * over
        self._is_tempted = False

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
        """A round took so long. What the first of a shape takes more has a price of its own."""
        fed, self._fed = self._fed, None
        shape, plain = (lanes, rows, lengths), self.plain(lanes)
        if rows > lanes:
            self._fed = self._count(shape, seconds / plain) if plain else (shape, 0.0, 0)
        elif fed is None or fed[0][0] != lanes:
            warm = self._warm.of(shape, seconds)
            if warm is not None:
                self._plain.setdefault(lanes, Mean(DECAY)).add(warm)
        elif plain:  # behind guesses, which pay for it, too
            warm = self._warm.of(("behind", fed[0]), seconds / plain)
            self._add(fed[1], fed[2], 1.0 if warm is None else warm)
        if self._is_tempted and rows == lanes:  # what keeps guesses out is doubted in time
            self._sums = [FORGET * x for x in self._sums]
        self._is_tempted = False

    def _count(self, shape: Shape, took: float) -> tuple[Shape, float, int]:
        """A round of this shape, with guesses, took so many plain ones."""
        lanes, rows, lengths = shape
        expected, warm = self.cost(*shape), self._warm.of(shape, took)
        if warm is None:
            self._planning += NEW_SHAPE * (max(0.0, took - expected) - self._planning)
            return shape, 0.0, 0
        more, kinds = rows / lanes - 1, lengths - 1
        squares = more * more, more * kinds, kinds * kinds, 0.0, 0.0
        self._sums = [DECAY * x + new for x, new in zip(self._sums, squares, strict=True)]
        self._add(more, kinds, min(warm, FAR_OUT * expected))
        return shape, more, kinds

    def _add(self, more: float, kinds: int, took: float) -> None:
        self._sums[3] += more * (took - 1)
        self._sums[4] += kinds * (took - 1)

    def tempt(self) -> None:
        """There were guesses, and they are not fed."""
        self._is_tempted = True

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
        first = 0.0 if (lanes, rows, lengths) in self._warm else self._planning / REPAID_AFTER
        return 1 + row * (rows / lanes - 1) + length * (lengths - 1) + first


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
        if sum(fed) not in TOTALS:
            continue
        lengths = {k + 1 for k in fed} | ({1} if len(fed) < lanes else set())
        rate = tokens / (spent + costs.cost(lanes, lanes + sum(fed), len(lengths)))
        if rate > highest:
            highest, best = rate, list(fed)


def is_worth_stopping(costs: RoundCosts, lanes: int, chances: Sequence[float]) -> bool:
    """Whether a lane that runs ahead should stop, and feed guesses with these chances."""
    row, length = costs.prices()
    gain = most = -MISSED - lanes * length
    for chance in chances:
        gain += chance - row  # a row costs the round's share of what all lanes make in it
        most = max(most, gain)
    return most > WORTHWHILE * lanes
