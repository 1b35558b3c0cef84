"""Drafts copied from the session's own tokens: the longest recent match of what was just written.

Prompt, replies and tool results are one text here. For every position an index links to the
previous position that ends with the same few tokens, for several lengths, as in LZ77 compressors:
a new token costs a constant, going back undoes the links, and nothing but positions is kept. A
stale index can only cost a guess. No mlx.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4cli.drafters.corpus import ORDER, Corpus
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.links import MAX_MATCH, Links, longest
from ds4cli.tokens import common_prefix

# Lengths that are indexed. A match is as long as it turns out to be; these only find candidates.
ORDERS = (6, 2, 1)
MAX_CANDIDATES = 8
# The end of what is indexed is compared with the tokens given, to notice a change nobody announced.
CHECKED_TAIL = 16
# Tokens of a text from which on it is worth adding to the corpus.
LEAST_TAUGHT = 8


class NgramDrafter(Drafter):
    """Guesses by copying what followed the longest match; `confidence` is the match's length.

    corpus: texts of other sessions, where one of them matches longer.
    """

    name = "ngram"

    def __init__(self, corpus: Corpus | None = None):
        self._corpus = corpus
        self._taught = 0  # tokens that the corpus has
        self._clear()
        if corpus is not None:
            corpus.join(self)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most n tokens that followed the longest match; fewer after a short one."""
        self._index(tokens)
        end, self.confidence = self._match(tokens)
        if self._corpus is not None and self.confidence < MAX_MATCH:
            ends, length = self._corpus.match(tokens)
            if length > self.confidence:
                self.confidence = length
                return self._corpus.continued(ends, n, self.row_price)
        # Over real text a chance match of one token rarely goes on for two, one of three often for
        # ten and more.
        return _copy(tokens, end, min(n, 2 * self.confidence**2)) if end else []

    def teach(self) -> None:
        """Add to the corpus what is new in this text."""
        new = len(self._tokens) - self._taught
        if self._corpus is not None and new >= LEAST_TAUGHT:
            self._corpus.add(self._tokens[max(0, self._taught - ORDER) :])
            self._taught = len(self._tokens)

    def rewind(self, pos: int) -> None:
        self.teach()
        self._taught = min(self._taught, pos)
        if pos < len(self._tokens) // 2:
            self._clear()  # what is left is indexed again, which is less work than undoing the rest
            return
        self._links.drop(self._tokens, pos)
        del self._tokens[pos:]

    def forget(self) -> None:
        self._clear()

    def fork(self) -> NgramDrafter:
        return NgramDrafter(self._corpus)  # indexed again when first asked

    def _clear(self) -> None:
        self._tokens: list[int] = []  # indexed so far
        self._links = Links(ORDERS, MAX_CANDIDATES)

    def _index(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        tail = known - CHECKED_TAIL if known > CHECKED_TAIL else 0
        if tokens[tail:known] != self._tokens[tail:]:
            self.rewind(common_prefix(self._tokens, list(tokens)))
            known = len(self._tokens)
        self._tokens += tokens[known:]
        self._links.extend(self._tokens, known)

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the best match ends (the position after it) and how long it is; (0, 0) for none.

        The longest wins, then the continuation that most candidates share, then the most recent.
        """
        if not tokens:
            return 0, 0
        ends, length, most = self._links.earlier()
        if not ends:
            return 0, 0
        ends, length = longest(tokens, ends, tokens, length, most)
        return _most_shared(tokens, ends), length


def _most_shared(tokens: Sequence[int], ends: list[int]) -> int:
    """The first of `ends` whose next token is the most frequent one after all of them."""
    if len(ends) == 1:
        return ends[0]
    following = [tokens[end] for end in ends]
    return ends[following.index(max(following, key=following.count))]


def _copy(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """n tokens from `start` on; past the end of the text the copy goes on with itself."""
    copied = list(tokens[start : start + n])
    period = len(copied)
    while len(copied) < n:
        copied.append(copied[-period])
    return copied
