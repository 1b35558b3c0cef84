"""Places in a text linked to the previous one that ends with the same few tokens, as in LZ77."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Longer matches are not told apart.
MAX_MATCH = 32


class Links:
    """The links for some lengths, `orders`, the longest first. A place is the index after the
    tokens that end there. Two endings of one hash count as one: at worst that costs a guess."""

    def __init__(self, orders: Sequence[int], max_candidates: int):
        self._max = max_candidates
        # The last place by the hash of its ending, and by place the one before that ends so.
        self._chains: list[tuple[int, dict[int, int], array[int]]] = [
            (order, {}, array("i")) for order in orders
        ]

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Link the tokens from index `start` on."""
        for end in range(start + 1, len(tokens) + 1):
            for order, heads, previous in self._chains:
                key = hash(tuple(tokens[end - order if end > order else 0 : end]))
                previous.append(heads.get(key, 0))
                heads[key] = end

    def drop(self, tokens: Sequence[int], pos: int) -> None:
        """Unlink the tokens from index `pos` on."""
        for order, heads, previous in self._chains:
            for end in range(len(tokens), pos, -1):
                key = hash(tuple(tokens[max(0, end - order) : end]))
                before = previous.pop()
                if before:
                    heads[key] = before
                else:
                    del heads[key]

    def candidates(self, tokens: Sequence[int]) -> list[int]:
        """Places that end like `tokens`, by the longest of the lengths, the most recent first."""
        order, heads, previous = self._chains[0]
        return self._back_from(heads.get(hash(tuple(tokens[-order:])), 0), previous)

    def earlier(self) -> tuple[list[int], int, int]:
        """Places that end like the text that is linked does, by the longest length that has any,
        the most recent first; that length, and the longest that they may share."""
        most = MAX_MATCH
        for order, _, previous in self._chains:
            end = previous[-1]
            if end:
                return self._back_from(end, previous), order, most
            most = order - 1
        return [], 0, 0

    def _back_from(self, end: int, previous: array[int]) -> list[int]:
        found: list[int] = []
        for _ in range(self._max):
            if not end:
                break
            found.append(end)
            end = previous[end - 1]
        return found


def longest(
    ours: Sequence[int], ends: list[int], tokens: Sequence[int], length: int, most: int
) -> tuple[list[int], int]:
    """Those of the places `ends` in `ours` that end most like `tokens` does, and in how many
    tokens: all do in `length`, and none is looked at beyond `most`."""
    while length < most:
        token = tokens[-1 - length]
        longer = [end for end in ends if end > length and ours[end - 1 - length] == token]
        if not longer:
            break
        ends, length = longer, length + 1
    return ends, length
