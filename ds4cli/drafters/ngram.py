"""Drafts copied from the session's own tokens: the longest recent match of what was just written.

Prompt, replies and tool results are one text here. For every position an index links to the
previous position that ends with the same few tokens, for several lengths, as in LZ77 compressors:
a new token costs a constant, going back undoes the links, and nothing but positions is kept. Every
candidate is checked against the tokens themselves, so a stale index can only cost a guess. No mlx.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ds4cli.drafters.drafter import Drafter
from ds4cli.tokens import common_prefix

# Lengths that are indexed. A match is as long as it turns out to be; these only find candidates.
ORDERS = (6, 2, 1)
MAX_CANDIDATES = 8
# Longer matches are not told apart.
MAX_MATCH = 32
# The end of what is indexed is compared with the tokens given, to notice a change nobody announced.
CHECKED_TAIL = 16


class NgramDrafter(Drafter):
    """Guesses by copying what followed the longest match; `confidence` is the match's length."""

    name = "ngram"

    def __init__(self):
        self._clear()

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most n tokens that followed the longest match; fewer after a short one."""
        self._index(tokens)
        end, self.confidence = self._match(tokens)
        # Over real text a chance match of one token rarely goes on for two, one of three often for
        # ten and more.
        return _copy(tokens, end, min(n, 2 * self.confidence**2))

    def rewind(self, pos: int) -> None:
        if pos < len(self._tokens) // 2:
            self._clear()  # what is left is indexed again, which is less work than undoing the rest
            return
        for chain in self._chains:
            chain.drop(self._tokens, pos)
        del self._tokens[pos:]

    def forget(self) -> None:
        self._clear()

    def fork(self) -> NgramDrafter:
        return NgramDrafter()  # indexed again when first asked

    def _clear(self) -> None:
        self._tokens: list[int] = []  # indexed so far
        self._chains = [_Chain(order) for order in ORDERS]

    def _index(self, tokens: Sequence[int]) -> None:
        """Index all of `tokens` but the last: a match must have something after it."""
        known, size = len(self._tokens), max(0, len(tokens) - 1)
        tail = max(0, known - CHECKED_TAIL)
        if known > size or list(tokens[tail:known]) != self._tokens[tail:]:
            self.rewind(min(size, common_prefix(self._tokens, list(tokens))))
            known = len(self._tokens)
        self._tokens += tokens[known:size]
        for chain in self._chains:
            chain.extend(self._tokens, known)

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the best match ends (the position after it) and how long it is; (0, 0) for none.

        The longest wins, then the continuation that most candidates share, then the most recent.
        """
        for chain in self._chains:
            ends = chain.candidates(tokens)
            matches = [(_match_length(tokens, end), end) for end in ends]
            longest = max(matches, default=(0, 0))[0]
            if longest >= chain.order:
                best = [end for length, end in matches if length == longest]
                return _most_shared(tokens, best), longest
        return 0, 0


class _Chain:
    """Positions linked to the previous one that ends with the same `order` tokens.

    A position here is the index after the tokens that end there.
    """

    def __init__(self, order: int):
        self.order = order
        self._heads: dict[int, int] = {}
        self._previous = array("i")

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Link the tokens from index `start` on."""
        heads, order = self._heads, self.order
        for end in range(start + 1, len(tokens) + 1):
            key = hash(tuple(tokens[max(0, end - order) : end]))
            self._previous.append(heads.get(key, 0))
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
        """Positions that end like `tokens`, the most recent first."""
        end = self._heads.get(hash(tuple(tokens[-self.order :])), 0)
        found = []
        while end and len(found) < MAX_CANDIDATES:
            found.append(end)
            end = self._previous[end - 1]
        return found


def _match_length(tokens: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal those at the end of `tokens`, up to MAX_MATCH."""
    size, most = len(tokens), min(end, MAX_MATCH)
    if tokens[end - most : end] == tokens[size - most :]:
        return most
    length = 0
    while tokens[end - 1 - length] == tokens[size - 1 - length]:
        length += 1
    return length


def _most_shared(tokens: Sequence[int], ends: list[int]) -> int:
    """The first of `ends` whose next token is the most frequent one after all of them."""
    following = [tokens[end] for end in ends]
    return max(zip(ends, following, strict=True), key=lambda pair: following.count(pair[1]))[0]


def _copy(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """n tokens from `start` on; past the end of the text the copy goes on with itself."""
    copied = list(tokens[start : start + n])
    period = len(copied)
    while len(copied) < n:
        copied.append(copied[-period])
    return copied
