"""Guesses from the grammar: where it leaves one continuation, that is what comes next.

White space is what a grammar leaves open most, so keys would hardly ever be forced. A model writes
one style throughout; the grammar is compiled for the two common ones, and the one that fits the
text so far says what follows. A text in neither style is guessed where even white space is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tokens import common_prefix

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ds4cli.structured.grammar import Form


class ForcedDrafts:
    """Guesses for one reply."""

    def __init__(self, form: Form):
        self._ways = [_Way(matcher) for matcher in form.forcing()]

    def after(self, ids: Sequence[int]) -> list[int]:
        """The tokens that must follow `ids`, all tokens of the text so far; [] where none must."""
        for way in self._ways:
            if way.follow(ids):
                return way.forced()
        return []


class _Way:
    """A matcher that goes along with the text for as long as the text is of its style."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher
        self._ids: list[int] = []
        self._refused: int | None = None  # the token that may not follow them

    def follow(self, ids: Sequence[int]) -> bool:
        """Stand behind `ids`; False where they are not of this style."""
        same = common_prefix(self._ids, ids)
        if same < len(self._ids):
            self._matcher.rollback(len(self._ids) - same)
            del self._ids[same:]
            self._refused = None
        new = list(ids[same:])
        if not new or new[0] == self._refused:
            return not new
        taken = self._matcher.try_consume_tokens(new)
        self._ids += new[:taken]
        self._refused = new[taken] if taken < len(new) else None
        return self._refused is None

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()[: MAX_BLOCK_TOKENS - 1]
