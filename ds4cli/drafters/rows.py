"""Rows of states for consecutive positions, kept by reference in the pieces they came in."""

from __future__ import annotations

import copy
from bisect import bisect_right

import mlx.core as mx

# Pieces beyond which they are joined: a piece may hold on to a larger array it was cut from.
MAX_PIECES = 64


class Rows:
    """Rows (H,) for the positions start .. end; rows may be put anew from any of them on."""

    def __init__(self, start: int):
        self.start = self.end = start
        self._pieces: list[mx.array] = []
        self._starts: list[int] = []

    def put(self, start: int, rows: mx.array) -> None:
        """rows (n, H): the ones from `start` on, in place of what was there and beyond. A `start`
        outside start .. end leaves these rows alone."""
        if not self.start <= start <= self.end:
            self._clear(start)
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            self._pieces.pop()
        if start < self.end and self._starts:
            self._pieces[-1] = self._pieces[-1][: start - self._starts[-1]]
        self._starts.append(start)
        self._pieces.append(rows)
        self.end = start + len(rows)
        if len(self._pieces) > MAX_PIECES:
            self._join()

    def _clear(self, start: int) -> None:
        self.start = self.end = start
        self._pieces, self._starts = [], []

    def _join(self) -> None:
        self._pieces = [self.take(self.start, self.end)]
        self._starts = [self.start]
        mx.async_eval(self._pieces)

    def take(self, first: int, end: int) -> mx.array:
        """The rows of the positions first .. end, (end - first, H)."""
        at, stop = self._piece(first), self._piece(end - 1) + 1
        pieces = self._pieces[at:stop]
        pieces[-1] = pieces[-1][: end - self._starts[stop - 1]]
        pieces[0] = pieces[0][first - self._starts[at] :]
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _piece(self, pos: int) -> int:
        return bisect_right(self._starts, pos) - 1

    def drop(self, below: int) -> None:
        """Forget the rows below a position (their memory when the rest of their piece goes)."""
        while len(self._starts) > 1 and self._starts[1] <= below:
            del self._starts[0], self._pieces[0]
        self.start = min(max(self.start, below), self.end)

    def copy(self) -> Rows:
        twin = copy.copy(self)
        twin._pieces, twin._starts = self._pieces.copy(), self._starts.copy()
        return twin
