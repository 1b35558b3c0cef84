"""How many lines are answered at a time. No mlx; what it measures never shows in an answer.

What a width gains depends on the model, the machine, the length of the texts and on what guesses
gain without neighbours, and a list of prices is not known for all of that. So widths are tried on
the lines themselves, from narrow to wide: a width costs `ROUNDS` calls to judge, and the first one
that gains too little ends the search.
"""

from __future__ import annotations

# Widths that are tried, one after the other, while the next one is worth it.
ALONE, LADDER = 1, (4, 8, 16, 32)
# Rounds that a width is judged by; the slowest of them are left out, as something else was at work
# there. What the next width must be faster by.
ROUNDS, HICCUPS = 12, 2
WORTHWHILE = 1.08


class Width:
    """So many lines as the user wants, or, in place of None, as many as pay here: `now` grows until
    more lines at a time make no more tokens a second."""

    def __init__(self, wanted: int | None):
        self.now = LADDER[0] if wanted is None else wanted
        self.is_given = wanted is not None
        self._is_settled = self.is_given
        self._rounds: list[tuple[int, float]] = []  # tokens and seconds, at this width
        self._before = 0.0, self.now  # what the width before this one made, and that width

    def begin_alone(self) -> None:
        """One line at a time is the first width that is tried: it has what others have not."""
        if not self.is_given:
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
        before, narrower = self._before
        wider = next((n for n in LADDER if n > self.now), None)
        if rate < WORTHWHILE * before:
            self.now, self._is_settled = narrower, True
        elif wider is None:
            self._is_settled = True
        else:
            self._before, self.now = (rate, self.now), wider
