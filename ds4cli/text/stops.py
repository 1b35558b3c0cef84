"""Stop strings in streamed text. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopHit:
    """A stop string was found: `kept` tokens lie wholly before it."""

    kept: int


class StopScanner:
    """Finds stop strings in streamed text, over the borders of tokens and blocks.

    Holds back only what may still be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = [s for s in stops if s]
        self._held = ""
        self._emitted = 0  # characters let through
        self._ends: list[int] = []  # text length after each token
        self._length = 0
        self._settled = 0

    def push(self, piece: str, hidden: int | None = 0) -> tuple[str, StopHit | None]:
        """Take one token's text; return what may be shown, and the hit if a stop is complete.

        hidden: how many characters from the first on are no answer, in which no stop string counts;
        None while that is not known.
        """
        self._length += len(piece)
        self._ends.append(self._length)
        if not self._stops:
            self._emitted = self._length
            return piece, None
        text = self._held + piece
        if hidden is None:
            self._held = text
            return "", None
        free, text = self._split(text, hidden)
        shown, hit = self._scan(text)
        return free + shown, hit

    def _split(self, text: str, hidden: int) -> tuple[str, str]:
        """The beginning of `text` that is let through, and what stop strings may stand in."""
        free = text[: max(0, hidden - self._emitted)]
        self._emitted += len(free)
        return free, text[len(free) :]

    def _scan(self, text: str) -> tuple[str, StopHit | None]:
        starts = [i for i in (text.find(s) for s in self._stops) if i >= 0]
        if starts:
            return self._stop_at(text, min(starts))
        held = _possible_stop(text, self._stops)
        self._held = text[len(text) - held :]
        self._emitted += len(text) - held
        return text[: len(text) - held], None

    def _stop_at(self, text: str, start: int) -> tuple[str, StopHit]:
        position = self._emitted + start
        self._held = ""
        kept = sum(end <= position for end in self._ends)
        while kept and self._starts(kept - 1) == position:
            kept -= 1  # its text, the first bytes of a character, came out with the stop string
        return text[:start], StopHit(kept)

    def _starts(self, index: int) -> int:
        """Text length before a token."""
        return self._ends[index - 1] if index else 0

    @property
    def settled(self) -> int:
        """Tokens whose text was let through whole: no stop string can take them back."""
        while self._settled < len(self._ends) and self._ends[self._settled] <= self._emitted:
            self._settled += 1
        return self._settled

    def forget(self, tokens: int) -> None:
        """Only the first `tokens` tokens stand; the others had no text that was let through."""
        del self._ends[tokens:]
        self._settled = min(self._settled, tokens)

    def flush(self) -> str:
        """The text still held when generation ends."""
        held, self._held = self._held, ""
        return held


def _possible_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-n:]) for s in stops):
            return n
    return 0
