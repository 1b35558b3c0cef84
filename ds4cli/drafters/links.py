"""Places in a text linked to the previous one that ends with the same few tokens, as in LZ77."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Longer matches are not told apart.
MAX_MATCH = 32


class Links:
    """The links for one length. A place is the index after the tokens that end there."""

    def __init__(self, order: int, max_candidates: int):
        self.order = order
        self._max = max_candidates
        self._heads: dict[int, int] = {}
        self._previous = array("i")

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Link the tokens from index `start` on."""
        heads, order, link = self._heads, self.order, self._previous.append
        for end in range(start + 1, len(tokens) + 1):
            key = hash(tuple(tokens[end - order if end > order else 0 : end]))
            link(heads.get(key, 0))
            heads[key] = end

    def drop(self, tokens: Sequence[int], pos: int) -> None:
        """Unlink the tokens from index `pos` on."""
        heads, order = self._heads, self.order
        for end in range(len(tokens), pos, -1):
            key = hash(tuple(tokens[max(0, end - order) : end]))
            previous = self._previous.pop()
            if previous:
                heads[key] = previous
            else:
                del heads[key]

    def candidates(self, tokens: Sequence[int]) -> list[int]:
        """Places that end like `tokens`, the most recent first."""
        return self._back_from(self._heads.get(hash(tuple(tokens[-self.order :])), 0))

    def earlier(self) -> list[int]:
        """Places that end like the text that is linked does, the most recent first."""
        end = self._previous[-1]
        return self._back_from(end) if end else []

    def _back_from(self, end: int) -> list[int]:
        found: list[int] = []
        while end and len(found) < self._max:
            found.append(end)
            end = self._previous[end - 1]
        return found


def longest(
    ours: Sequence[int], ends: list[int], tokens: Sequence[int], length: int, most: int
) -> tuple[list[int], int]:
    """Those of the places `ends` in `ours` that end most like `tokens` does, and in how many tokens:
    all do in `length`, and none is looked at beyond `most`."""
    while length < most:
        token = tokens[-1 - length]
        longer = [end for end in ends if end > length and ours[end - 1 - length] == token]
        if not longer:
            break
        ends, length = longer, length + 1
    return ends, length
