"""How many lines are answered at a time. No mlx; what it measures never shows in an answer.

What a width gains depends on the model, the machine, the length of the texts and on what guesses
gain. What calls for several lines cost is remembered from batch to batch, so the first width is the
one that this promises; from there widths are tried on the lines themselves. A width costs `ROUNDS`
calls to judge, and the first wider one that gains too little ends the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds4cli.drafters.costs import between

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine

# Widths that are tried, one after the other, while the next one is worth it.
ALONE, LADDER = 1, (4, 8, 16, 32)
# Rounds that a width is judged by; the slowest of them are left out, as something else was at work
# there. What the next width must be faster by, and what share of a promise is kept at least.
ROUNDS, HICCUPS = 12, 2
WORTHWHILE, KEPT = 1.08, 0.8


def promises(rounds: Mapping[int, float], calls: Mapping[int, float]) -> dict[int, float]:
    """Tokens a second by width. rounds: seconds of a call for so many lines, as batches have seen
    them; calls: where there are none, seconds of a call by its rows, which is a little less."""
    known = rounds if len(rounds) > 1 else {rows: s for rows, s in calls.items() if rows}
    if len(known) < 2:
        return {}
    return {n: n / between(known, n) for n in LADDER if min(known) <= n <= max(known)}


class Width:
    """So many lines as the user wants, or, in place of None, as many as pay here: `now` moves until
    more lines at a time make no more tokens a second. promised: see `promises`."""

    def __init__(self, wanted: int | None, promised: Mapping[int, float] | None = None):
        self._promised = promised or {}
        self._ladder: tuple[int, ...] = LADDER
        self._rates: dict[int, float] = {}  # tokens a second of the widths that were judged
        self.now = self._first() if wanted is None else wanted
        self.is_given = wanted is not None
        self._is_settled = self.is_given
        self._rounds: list[tuple[int, float]] = []  # tokens and seconds, at this width

    @classmethod
    def of(cls, engine: Engine) -> Width:
        """The width that its settings and prices say."""
        prices = engine.prices
        return cls(engine.settings.parallel or None, promises(prices.rounds, prices.seconds))

    def _first(self) -> int:
        """The width from which the next one promises too little."""
        first, *others = sorted(self._promised) or LADDER[:1]
        for n in others:
            if self._promised[n] < WORTHWHILE * self._promised[first]:
                break
            first = n
        return first

    def begin_alone(self) -> None:
        """One line at a time is the first width that is tried: guesses may gain more there."""
        if not self.is_given:
            self._ladder = (ALONE, *(n for n in LADDER if n >= self.now))
            self.now = ALONE

    def observe(self, lines: int, tokens: int, seconds: float) -> None:
        """A round with `lines` in work made so many tokens."""
        if self._is_settled or lines < self.now or not tokens:
            return
        self._rounds.append((tokens, seconds))
        if len(self._rounds) == ROUNDS:
            usual = sorted(self._rounds, key=lambda r: r[0] / r[1])[HICCUPS:]
            self._judge(sum(n for n, _ in usual) / sum(took for _, took in usual))
            self._rounds = []

    def _judge(self, rate: float) -> None:
        self._rates[self.now] = rate
        ladder = (0, *self._ladder, 0)  # 0: there is none
        at = ladder.index(self.now)
        narrower, wider = ladder[at - 1], ladder[at + 1]
        below, above = self._rates.get(narrower), self._rates.get(wider)
        is_less = rate < KEPT * self._promised.get(self.now, 0.0)
        if below is not None and rate < WORTHWHILE * below:
            self._settle(narrower)
        elif above is not None and above >= WORTHWHILE * rate:
            self._settle(wider)
        elif above is None and wider and not is_less:
            self.now = wider
        elif below is None and narrower and (above is not None or is_less):
            self.now = narrower
        else:
            self._settle(self.now)

    def _settle(self, width: int) -> None:
        self.now, self._is_settled = width, True
