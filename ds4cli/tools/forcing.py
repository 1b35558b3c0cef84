"""What must follow a text under its grammar, as guesses.

Where a grammar leaves one continuation, that is what comes next. White space, quotes and the order
of keys are what a grammar leaves open most, so stricter ones are asked, each of one style: a model
writes one throughout. The first that fits the text so far says what follows. A text that is written
otherwise costs a guess; nothing else depends on guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Forcing:
    """Guesses for one text. matchers: makes a matcher for each style; called with the first
    question, since compiling them takes a while."""

    def __init__(self, matchers: Callable[[], list[LLMatcher]]) -> None:
        self._matchers = matchers
        self._ways: list[_Way] | None = None
        self._text: list[int] = []

    def take(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""
        self._text += tokens

    def rewind(self, n: int) -> None:
        """Only the first `n` tokens of the text are left."""
        del self._text[n:]
        for way in self._ways or ():
            way.rewind(n)

    def after(self, coming: Sequence[int]) -> list[int]:
        """The tokens that must follow `coming`, which follows the text; [] where none must."""
        if self._ways is None:
            self._ways = [_Way(matcher) for matcher in self._matchers()]
        for way in self._ways:
            if way.follow(self._text) and (forced := way.after(coming)) is not None:
                return forced
        return []


class _Way:
    """A matcher that goes along with the text for as long as the text is of its style."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._taken = 0  # tokens of the text
        self._has_left = False  # with the token behind these

    def follow(self, text: list[int]) -> bool:
        """Stand behind `text`; False where that is of another style."""
        new = [] if self._has_left else text[self._taken :]
        if new:
            taken = self._matcher.try_consume_tokens(new)
            self._taken += taken
            self._has_left = taken < len(new)
        return not self._has_left

    def rewind(self, n: int) -> None:
        if n <= self._taken:
            self._matcher.rollback(self._taken - n)
            self._taken, self._has_left = n, False

    def after(self, coming: Sequence[int]) -> list[int] | None:
        """What must follow `coming`; None where that may not follow."""
        taken = self._matcher.try_consume_tokens(list(coming))
        forced = self._matcher.compute_ff_tokens() if taken == len(coming) else None
        self._matcher.rollback(taken)
        return forced
