"""Tokens to text, piece by piece: characters split over tokens, and stop strings. No mlx.

Joined pieces equal `tokenizer.decode` of all the tokens, whatever the tokens' borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A UTF-8 character has at most four bytes; more pending tokens than this are no character.
MAX_PENDING_TOKENS = 16
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing token list incrementally (two offsets, as TGI and vLLM do).

    decode: list of ids -> text. `before`: tokens of the same text that were shown already, so that
    a reply can go on in the middle of a character or a word.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(before[-MAX_PENDING_TOKENS:])
        self._shown = ""
        if self._tokens:
            self._shown = _settled(self._decode(self._tokens))

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT) and len(self._tokens) < 2 * MAX_PENDING_TOKENS:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """What is still held, incomplete characters as U+FFFD."""
        return self._settle(self._decode(self._tokens)) if self._tokens else ""

    def _settle(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._shown = text
        if len(self._tokens) > MAX_PENDING_TOKENS:
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Keep a few tokens of context: decoders look at what stands before a token."""
        tail = self._tokens[-MAX_PENDING_TOKENS // 2 :]
        shown = self._decode(tail)
        if not shown.startswith(REPLACEMENT):
            self._tokens, self._shown = tail, shown


def _settled(text: str) -> str:
    return text.rstrip(REPLACEMENT)


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

    def push(self, piece: str) -> tuple[str, StopHit | None]:
        """Take one token's text; return what may be shown, and the hit if a stop is complete."""
        self._length += len(piece)
        self._ends.append(self._length)
        text = self._held + piece
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
        return text[:start], StopHit(sum(end <= position for end in self._ends))

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
