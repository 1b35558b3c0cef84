"""Rows of states for consecutive positions, kept by reference in the pieces they came in."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from ds4cli.tape.tracks import spans

# Pieces beyond which they are joined: a piece may hold on to a larger array it was cut from.
MAX_PIECES = 64

Piece = Sequence[mx.array]  # one (n, H) per tapped layer


class Rows:
    """Rows for the positions start .. end; rows may be put anew from any of them on."""

    def __init__(self, start: int):
        self.start = self.end = start
        self._first = start  # position of the first row of the first piece
        self._pieces: list[Piece] = []

    def __len__(self) -> int:
        return self.end - self.start

    def put(self, start: int, piece: Piece) -> None:
        """The rows from `start` on, in place of what was there and beyond. A `start` outside
        start .. end leaves these rows alone."""
        if not self.start <= start <= self.end:
            self._clear(start)
        elif start < self.end:
            self._pieces = self._between(self._first, start)
        self._pieces.append(piece)
        self.end = start + len(piece[0])
        if len(self._pieces) > MAX_PIECES:
            self._join()

    def _clear(self, start: int) -> None:
        self.start = self.end = self._first = start
        self._pieces = []

    def _join(self) -> None:
        joined = self.take(self.start, self.end)
        self._first, self._pieces = self.start, [joined]
        mx.async_eval(joined)

    def take(self, first: int, end: int) -> list[mx.array]:
        """The rows of the positions first .. end: one (end - first, H) per tapped layer."""
        pieces = self._between(first, end)
        if len(pieces) == 1:
            return list(pieces[0])
        return [mx.concatenate([*layer]) for layer in zip(*pieces, strict=True)]

    def _between(self, first: int, end: int) -> list[Piece]:
        """Rows first .. end in the pieces they lie in (views)."""
        lengths = [len(piece[0]) for piece in self._pieces]
        found = spans(lengths, first - self._first, end - self._first)
        return [_cut(self._pieces[i], low, high) for i, low, high in found]

    def drop(self, below: int) -> None:
        """Forget the rows below a position (their memory when the rest of their piece goes)."""
        while self._pieces and self._first + len(self._pieces[0][0]) <= below:
            self._first += len(self._pieces.pop(0)[0])
        self.start = min(max(self.start, below), self.end)

    def copy(self) -> Rows:
        twin = copy.copy(self)
        twin._pieces = self._pieces.copy()
        return twin


def _cut(piece: Piece, low: int, high: int) -> Piece:
    if (low, high) == (0, len(piece[0])):
        return piece
    return [layer[low:high] for layer in piece]
