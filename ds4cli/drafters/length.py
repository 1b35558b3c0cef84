"""How many guesses to feed: as many as pay, here and now.

A guess pays when the chance that it is kept is worth more tokens than its row costs in time at the
rate the session runs at anyway (the rule that maximises tokens per second in the long run). Chances
are learnt by comparing every proposal with the text that followed, whether it was fed or not; costs
by timing the blocks. Output never depends on any of it. No mlx, no clock: only numbers come in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds4cli.drafters import Drafter
from ds4cli.rewind import common_prefix
from ds4cli.settings import Settings

# Assumed cost of one more row, as a share of a one-row call, until it is measured. Low: a guessed
# price must not keep the true one from being found out.
ASSUMED_SLOPE = 0.05
# How much a measurement still counts after one more block.
COST_DECAY = 0.99
CHANCE_DECAY = 0.97
# Blocks until a costly drafter that did not pay is tried again; doubled while it does not.
FIRST_PATIENCE, LAST_PATIENCE = 32, 512
# Chance that a first guess is kept, before any was seen, by the bit length of the confidence.
ASSUMED_CHANCE = (0.6, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9)
ASSUMED_WEIGHT = 2.0
LATER_WEIGHT = 16.0
# Expected gain, in tokens a block, below which plain decoding is kept: less is within the noise.
WORTHWHILE = 0.02
FIRST_REACH = 2
ENOUGH_TRIES = 6
MAX_OPEN = 8


class DraftLength:
    """Asks a drafter for guesses and decides how many of them to feed.

    parked: blocks where guesses were to be had and none was worth its row.
    """

    def __init__(self, settings: Settings):
        self.parked = 0
        self._mode = settings.speculate
        self._pinned = settings.num_draft_tokens
        self._costs = CallCosts()
        self._chances: dict[tuple[str, int], Chances] = {}
        self._open: list[_Proposal] = []
        self._next_size = 0
        self._waited, self._patience = 0, FIRST_PATIENCE

    def draft(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str = "prose"
    ) -> list[int]:
        """The guesses to feed after `tokens`, at most `room`. Call it once a block, then `observe`.

        region: what kind of text this is ("tool" inside a tool call); chances are kept apart.
        """
        self._compare(tokens)
        if room <= 0 or self._mode == "never" or (self._mode == "tools" and region != "tool"):
            return []
        if self._pinned is not None:
            return drafter.propose(tokens, min(room, self._pinned))
        if drafter.is_free:
            return self._cut(drafter, tokens, room, region)
        chances = self._chance(region, 0)
        k = self._length(chances, room) or self._probe(chances, room)
        return self._propose(drafter, tokens, k, chances) if k else []

    def observe(self, rows: int, kept: int, seconds: float) -> None:
        """A block fed `rows` tokens and committed `kept`, in `seconds` with its drafting."""
        self._next_size += kept
        self._costs.observe(rows, kept, seconds)

    def _cut(self, drafter: Drafter, tokens: Sequence[int], room: int, region: str) -> list[int]:
        """What pays of a free proposal; the rest is only compared with what follows."""
        drafts = drafter.propose(tokens, room)
        if not drafts:
            return []
        chances = self._chance(region, drafter.confidence)
        self._watch(tokens, drafts, chances)
        return drafts[: self._length(chances, len(drafts))]

    def _propose(
        self, drafter: Drafter, tokens: Sequence[int], k: int, chances: Chances
    ) -> list[int]:
        drafts = drafter.propose(tokens, k)
        self._watch(tokens, drafts, chances)
        return drafts

    def _probe(self, chances: Chances, room: int) -> int:
        """Now and then two guesses from a costly drafter that did not pay, ever more rarely.

        While they turn out right more follow at once, until their chances are known anew.
        """
        self._waited += 1
        if not self._costs.known:
            return 0
        if not chances.is_promising:
            if self._waited < self._patience:
                return 0
            self._waited, self._patience = 0, min(2 * self._patience, LAST_PATIENCE)
            chances.fade()
        return min(FIRST_REACH, room)

    def _length(self, chances: Chances, most: int) -> int:
        """How many of `most` guesses pay."""
        if self._mode == "always":
            return max(1, self._best(chances, most))
        best = self._best(chances, most) if self._costs.known else 0
        self.parked += best == 0
        if best:
            self._waited, self._patience = 0, FIRST_PATIENCE
        return best

    def _best(self, chances: Chances, most: int) -> int:
        """The number of guesses with the largest expected gain, in tokens, over a one-row call."""
        most = min(most, chances.reach)
        best, best_gain, kept = 0, WORTHWHILE, 0.0
        steps = zip(chances.survival(), self._costs.extra_tokens(most), strict=False)
        for k, (alive, price) in enumerate(steps, 1):
            kept += alive
            if kept - price > best_gain:
                best, best_gain = k, kept - price
            if kept - price + alive * (most - k) <= best_gain:
                break  # not even if all the others were kept and free
        return best

    def _chance(self, region: str, confidence: int) -> Chances:
        bucket = min(confidence.bit_length(), len(ASSUMED_CHANCE) - 1)
        if (region, bucket) not in self._chances:
            self._chances[region, bucket] = Chances(ASSUMED_CHANCE[bucket])
        return self._chances[region, bucket]

    # -- learning from what followed ---------------------------------------------------------------

    def _watch(self, tokens: Sequence[int], drafts: list[int], chances: Chances) -> None:
        if drafts and len(self._open) < MAX_OPEN:
            self._open.append(_Proposal(len(tokens), drafts, chances))

    def _compare(self, tokens: Sequence[int]) -> None:
        """Learn from the proposals whose outcome `tokens` shows."""
        if len(tokens) != self._next_size:
            self._open = []  # the session went elsewhere: what follows here is not their outcome
        self._next_size = len(tokens)
        self._open = [proposal for proposal in self._open if not proposal.settle(tokens)]


@dataclass(frozen=True)
class _Proposal:
    """Guesses for position `pos` on, and the chances that their outcome will tell about."""

    pos: int
    drafts: list[int]
    chances: Chances

    def settle(self, tokens: Sequence[int]) -> bool:
        """Learn the outcome; False while `tokens` do not show it."""
        followed = list(tokens[self.pos : self.pos + len(self.drafts)])
        right = common_prefix(self.drafts, followed)
        if right == len(followed) < len(self.drafts):
            self.chances.extend(right)
            return False
        self.chances.learn(len(self.drafts), right)
        return True


class Chances:
    """How often the first, second, ... guess is right when all before it were: moving averages.

    reach: how many guesses are worth trying yet; twice what was ever right, so that a bad drafter
    is found out cheaply.
    """

    def __init__(self, assumed: float):
        self._assumed = assumed
        self._right: list[float] = []
        self._tried: list[float] = []
        self._last_right = 0
        self.reach = FIRST_REACH

    @property
    def is_promising(self) -> bool:
        """Whether the last outcome was good and there were few others of late."""
        return self._last_right > 0 and self._tried[0] < ENOUGH_TRIES

    def learn(self, proposed: int, right: int) -> None:
        """Of `proposed` guesses the first `right` were right."""
        tried = min(right + 1, proposed)
        missing = tried - len(self._tried)
        if missing > 0:
            self._tried += [0.0] * missing
            self._right += [0.0] * missing
        for i in range(tried):
            self._tried[i] = self._tried[i] * CHANCE_DECAY + 1
            self._right[i] = self._right[i] * CHANCE_DECAY + (i < right)
        self._last_right = right
        self.extend(right)

    def extend(self, right: int) -> None:
        """`right` guesses in a row were right; what comes after them is not known yet."""
        self.reach = max(self.reach, FIRST_REACH + 2 * right)

    def fade(self) -> None:
        """Keep the estimates and let the next outcomes count for much: what is known is old."""
        self._assumed = next(self.survival())
        share = 1 / max([1.0, *self._tried[:1]])
        self._tried = [tried * share for tried in self._tried]
        self._right = [right * share for right in self._right]
        self.reach = FIRST_REACH

    def survival(self) -> Iterator[float]:
        """Chance that guess 1 is kept, guesses 1 and 2, ...; without end.

        What was seen of a guess is mixed with what was seen of all later ones: they are alike, and
        a product of many noisy numbers would be noisier than any.
        """
        chance, alive = self._assumed, 1.0
        right, tried = sum(self._right), sum(self._tried)
        for i, (own_right, own_tried) in enumerate(zip(self._right, self._tried, strict=True)):
            if i:
                chance = (right + ASSUMED_WEIGHT * chance) / (tried + ASSUMED_WEIGHT)
            weight = LATER_WEIGHT if i else ASSUMED_WEIGHT
            chance = (own_right + weight * chance) / (own_tried + weight)
            right, tried = right - own_right, tried - own_tried
            alive *= chance
            yield alive
        while True:
            alive *= chance
            yield alive


class CallCosts:
    """Seconds per block by its rows, and the rate at which the session runs.

    Each row count has its moving average; counts seen rarely or long ago lean on a straight line
    through all of them, and that line leans on `ASSUMED_SLOPE`.
    """

    def __init__(self):
        self._seen: dict[int, _Mean] = {}
        self._blocks = 0
        self._tokens = self._seconds = 0.0

    @property
    def known(self) -> bool:
        """Whether plain decoding was timed: nothing can be said to pay before."""
        return 1 in self._seen and self._seen[1].weight > 0

    def observe(self, rows: int, kept: int, seconds: float) -> None:
        """A block of `rows` rows took `seconds` and committed `kept` tokens."""
        self._blocks += 1
        if rows not in self._seen:
            self._seen[rows] = _Mean()  # the first call of a shape pays for compiling it
            return
        seconds = self._seen[rows].add(seconds, self._blocks)
        self._tokens = self._tokens * COST_DECAY + kept
        self._seconds = self._seconds * COST_DECAY + seconds

    def extra_tokens(self, most: int) -> Iterator[float]:
        """For 1, 2, ..., `most` further rows: their time over a one-row call, in tokens.

        Time is worth the rate of late, and never less than plain decoding. Nothing is known before
        the first measurement: then rows cost nothing.
        """
        if not self._seconds:
            yield from [0.0] * most
            return
        line = self._line()
        one = self._cost(1, line)
        rate = max(self._tokens / self._seconds, 1 / one)
        highest = one
        for rows in range(2, most + 2):
            highest = max(highest, self._cost(rows, line))
            yield rate * (highest - one)

    def _cost(self, rows: int, line: tuple[float, float]) -> float:
        start, slope = line
        assumed = start + slope * rows
        if rows not in self._seen:
            return assumed
        mean = self._seen[rows]
        weight = mean.weight_at(self._blocks)
        return (weight * mean.value + assumed) / (weight + 1)

    def _line(self) -> tuple[float, float]:
        """Start and slope of the line through what was seen, by weighted least squares."""
        points = [(r, m.value, m.weight_at(self._blocks)) for r, m in self._seen.items()]
        total = sum(w for _, _, w in points)
        x = sum(w * r for r, _, w in points) / total
        y = sum(w * v for _, v, w in points) / total
        assumed = ASSUMED_SLOPE * y / (1 + ASSUMED_SLOPE * (x - 1))
        covariance = sum(w * (r - x) * (v - y) for r, v, w in points) + assumed
        variance = sum(w * (r - x) ** 2 for r, _, w in points) + 1
        slope = max(0.0, covariance / variance)
        return y - slope * x, slope


class _Mean:
    """A moving average whose weight fades while it is not fed."""

    def __init__(self):
        self.value = self.weight = 0.0
        self._at = 0

    def weight_at(self, block: int) -> float:
        return self.weight * COST_DECAY ** (block - self._at)

    def add(self, value: float, block: int) -> float:
        """Take in `value`, cut where it is far out; returns what was taken."""
        self.weight = self.weight_at(block) + 1
        self._at = block
        if self.weight > 3:
            value = min(value, 2 * self.value)
        self.value += (value - self.value) / self.weight
        return value
