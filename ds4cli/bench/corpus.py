"""The text that measurements read and edit: the program's own source, in the model's tokens.

Real text, always at hand, longer than most contexts. Random tokens would make ties, and routes
through experts, that no text has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


PIECE_LINES = 100  # tokenizers warn about texts that are longer than the model's context


class Corpus:
    """encode: text -> token ids, perhaps with special tokens in front."""

    def __init__(self, encode: Callable[[str], list[int]]):
        self._encode = encode

    @cached_property
    def _tokens(self) -> list[int]:
        specials = self._encode("")
        text = "\n".join(p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py")))
        lines = text.splitlines(keepends=True)
        pieces = ["".join(lines[i : i + PIECE_LINES]) for i in range(0, len(lines), PIECE_LINES)]
        return specials + [t for piece in pieces for t in self._encode(piece)[len(specials) :]]

    def take(self, n: int, at: int = 0) -> list[int]:
        """n tokens from place `at` on; beyond its end the text begins again."""
        start = at % len(self._tokens)
        piece = self._tokens[start : start + n]
        while len(piece) < n:
            piece += self._tokens[: n - len(piece)]
        return piece

    def other(self, n: int, first: int, at: int = 0) -> list[int]:
        """n tokens from place `at` on, of which the first is not `first`."""
        while self.take(1, at) == [first]:
            at += 1
        return self.take(n, at)
