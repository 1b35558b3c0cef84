"""How many lines are answered at a time. No mlx; what it measures never shows in an answer."""

from __future__ import annotations

import statistics

# Widths that are tried, one after the other, while one more is worth it.
LADDER = (4, 8, 16, 32)
# Rounds that a width is judged by, and what the next one must be faster by.
ROUNDS = 12
WORTHWHILE = 1.08


class Width:
    """So many lines as the user wants, or, in place of None, as many as pay here: `now` grows until
    more lines at a time make no more tokens a second."""

    def __init__(self, wanted: int | None):
        self.now = LADDER[0] if wanted is None else wanted
        self.is_given = wanted is not None
        self._is_settled = self.is_given
        self._rates: list[float] = []  # tokens a second, of rounds at this width
        self._before = 0.0, self.now  # what the width before this one made, and that width

    def observe(self, lines: int, tokens: int, seconds: float) -> None:
        """A round with `lines` in work made so many tokens."""
        if self._is_settled or lines < self.now or not tokens:
            return
        self._rates.append(tokens / seconds)
        if len(self._rates) == ROUNDS:
            self._judge(statistics.median(self._rates))
            self._rates = []

    def _judge(self, rate: float) -> None:
        before, narrower = self._before
        wider = next((n for n in LADDER if n > self.now), None)
        if rate < WORTHWHILE * before:
            self.now, self._is_settled = narrower, True
        elif wider is None:
            self._is_settled = True
        else:
            self._before, self.now = (rate, self.now), wider
