"""Tokens to text, piece by piece: characters split over tokens. No mlx.

Joined pieces equal `tokenizer.decode` of all the tokens, whatever the tokens' borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three tokens wait for its end.
MAX_WAITING_TOKENS = 3
# Decoders look at what stands before a token: so many tokens are kept for that, and up to three
# more, to begin with a whole character. Text that is no text is cut anywhere when it gets long.
CONTEXT_TOKENS = 8
LONG_TOKENS = 64


class Detokenizer:
    """Decodes a growing token list incrementally (two offsets, as TGI and vLLM do).

    decode: list of ids -> text. `before`: tokens of the same text that were shown already, so that
    a reply can go on in the middle of a character or a word.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(before[-LONG_TOKENS:])
        self._shown = settled(decode(self._tokens)) if self._tokens else ""
        self._waiting = 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._tokens.append(token)
        self._waiting += 1
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        if self._waiting <= MAX_WAITING_TOKENS:
            return ""
        return self._settle(text, held=1)  # broken bytes, but the last may still begin a character

    def flush(self) -> str:
        """What is still held, incomplete characters as U+FFFD."""
        return self._settle(self._decode(self._tokens)) if self._tokens else ""

    def _settle(self, text: str, held: int = 0) -> str:
        """Show `text` up to its last `held` characters."""
        end = len(text) - held
        piece = text[len(self._shown) : end]
        self._shown = text[:end]
        if not held:
            self._waiting = 0
        if len(self._tokens) >= 2 * CONTEXT_TOKENS:
            self._shorten(held)
        return piece

    def _shorten(self, held: int) -> None:
        for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_WAITING_TOKENS + 1):
            tail = self._tokens[-size:]
            text = self._decode(tail)
            if not text.startswith(REPLACEMENT) or len(self._tokens) > LONG_TOKENS:
                self._tokens, self._shown = tail, text[: len(text) - held]
                return


def settled(text: str) -> str:
    """`text` without an unfinished character at its end."""
    return text.rstrip(REPLACEMENT)
