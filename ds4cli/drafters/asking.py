"""Drafters of lanes that take time to ask, heads and draft models: when all are asked at once.

One draft for all lanes costs every one of them the same wait, so it is made where what all are
expected to guess is worth that. No mlx.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4cli.drafters.costs import DraftTimes, Mean
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.policy import LEAST_PROBING, LESS_PROBING, MOST_PROBING
from ds4cli.drafters.rounds import RoundCosts, best_size, sizes_for

# Rounds after which the reading of a prompt is to be repaid, and how much one still counts after
# the next.
REPAID_AFTER, READING_DECAY = 16, 0.9
# Rounds that a draft which is only tried is waited for, and what they cost: lanes that run ahead
# stop.
PATIENCE, MISSED = 4, 1.0
# Tokens of the longest block to ask for before any was timed: one guess seldom pays for asking.
FIRST_SIZE = 4
# Per lane, the chance that its first guess is kept, its first two, ...
Chances = Sequence[Sequence[float]]


class Asking:
    """When to ask the parts of one kind, and for how many guesses.

    length: guesses to ask for in this round; 0 while that does not pay. Then a draft is made now
    and then, ever more rarely: what it guessed is compared with the text, fed or not.
    """

    def __init__(self, part: Drafter):
        self.length = 0
        self._worth_trying, self._at_once = part.worth_trying, part.drafts_at_once
        self._times: dict[int, DraftTimes] = {}  # by lanes
        self._reading = Mean(READING_DECAY)  # seconds of a prompt
        self._credit, self._share = 0.0, MOST_PROBING
        self._is_probe, self._waits = False, 0

    def observe(self, lanes: int, guesses: int, seconds: float, new: int = 0) -> None:
        """A draft of so many guesses, for so many lanes, was made. new: how many of these were
        asked for the first time, and read their prompts."""
        expected = self.seconds(lanes, guesses)
        if not new:
            times = self._times.setdefault(lanes, DraftTimes(at_once=self._at_once))
            times.observe(guesses, seconds)
        elif expected:
            self._reading.add(max(0.0, seconds - expected) / new)
        if self._is_probe:
            self.length, self._is_probe = 0, False

    def seconds(self, lanes: int, guesses: int) -> float:
        """What that is expected to take: as for the number of lanes next to it that was seen."""
        known = [n for n, times in self._times.items() if any(times.line)]
        nearest = min(known, key=lambda n: abs(n - lanes), default=None)
        return 0.0 if nearest is None else self._times[nearest].seconds(guesses)

    def plan(self, costs: RoundCosts, lanes: int, hopes: Chances, new: int, rounds: int) -> None:
        """Decide for the next rounds. new: how many of these lanes were never asked; rounds: that
        went by since it was last decided."""
        if self._is_probe and self._waits:  # lanes that run ahead have to stop first
            self._waits -= 1
            return
        self.length, self._is_probe = self._best(costs, lanes, hopes, new, ()), False
        if self.length:
            self._share = MOST_PROBING
            return
        self._credit += rounds * self._share
        takes = self.seconds(len(hopes), self._worth_trying) + new * self._reading.value
        price = MISSED + takes / costs.plain(lanes)
        if self._credit >= price:
            self._credit, self._share = 0.0, max(LEAST_PROBING, LESS_PROBING * self._share)
            self.length, self._is_probe, self._waits = self._worth_trying, True, PATIENCE

    def guesses(
        self, costs: RoundCosts, lanes: int, hopes: Chances, new: int, free: Chances
    ) -> int:
        """How many to ask for now. hopes: of the lanes that may be asked; free: of the others, what
        they have to feed already."""
        return self._worth_trying if self._is_probe else self._best(costs, lanes, hopes, new, free)

    def _best(self, costs: RoundCosts, lanes: int, hopes: Chances, new: int, free: Chances) -> int:
        """Of the guesses that make more tokens in the same time than none; 0 if there are none."""
        found, (_, best) = 0, best_size(costs, lanes, free)
        most, reading = max(map(len, hopes), default=0), new * self._reading.value / REPAID_AFTER
        for size in sizes_for(costs, most, FIRST_SIZE):
            n = min(size - 1, most)
            tokens = lanes + sum([sum(own[:n]) for own in (*hopes, *free)])
            spent = (self.seconds(len(hopes), n) + reading) / costs.plain(lanes)
            rate = tokens / (spent + costs.cost(lanes, size))
            if rate > best:
                found, best = n, rate
        return found
