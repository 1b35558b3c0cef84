"""Splits a streamed reply into reasoning and answer. Pure text; no mlx.

Reasoning is a section between the tokenizer's think markers at the very start of a reply, or a
reply whose prompt already opened it. A marker later on is prose: an answer may be about markers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MARKER_TOKENS = 16  # a marker and the white space behind it are no more

# gpt-oss thinks in one channel and answers in another; a reply may begin with the answer.
HARMONY = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
)


@dataclass(frozen=True)
class Piece:
    """Text of one kind."""

    text: str
    is_reasoning: bool


def opens_thinking(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], start: str | None
) -> bool:
    """Whether a prompt ends inside a think section: with `start`, the marker that opens one."""
    return start is not None and decode(tokens[-MARKER_TOKENS:]).rstrip().endswith(start)


def markers(tokenizer: Any) -> tuple[str | None, str | None, str | None]:
    """What opens reasoning, what closes it, and what opens an answer without any; None: nothing."""
    if tokenizer.think_start is None and "<|channel|>" in tokenizer.get_vocab():
        return HARMONY
    return tokenizer.think_start, tokenizer.think_end, None


class ReasoningSplitter:
    """Push text, get pieces; holds back only what may be part of a marker.

    start, end: the markers, or None for a model that has none. inside: the prompt opened a section.
    answer: a marker that opens an answer without reasoning in front of it.
    """

    def __init__(
        self, start: str | None, end: str | None, inside: bool = False, answer: str | None = None
    ) -> None:
        self._start, self._end, self._answer = start, end, answer
        self._step = self._outside if start is None else self._inside if inside else self._before
        self._held = ""
        self._at_border = inside  # just behind a marker: newlines there are layout

    @property
    def is_inside(self) -> bool:
        """Whether reasoning is open."""
        return self._step == self._inside

    @property
    def is_waiting(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` settles."""
        self._held += text
        pieces: list[Piece] = []
        step = None
        while self._held and step != self._step:
            step = self._step
            step(pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """What is still held when the reply ends."""
        is_reasoning = self._step == self._inside
        text, self._held = self._held, ""
        return [Piece(text, is_reasoning)] if text else []

    def _before(self, pieces: list[Piece]) -> None:
        """Nothing but space so far: a section may open here."""
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._held = text[len(self._start) :]
            self._step, self._at_border = self._inside, True
        elif self._answer and text.startswith(self._answer):
            self._held, self._step = text[len(self._answer) :], self._outside
        elif not any(marker.startswith(text) for marker in (self._start, self._answer) if marker):
            self._step = self._outside

    def _inside(self, pieces: list[Piece]) -> None:
        body, marker, rest = self._held.partition(self._end)
        if marker:
            self._emit(pieces, body.rstrip("\n"), True)
            self._held, self._step, self._at_border = rest, self._outside, True
            return
        # Newlines in front of a marker are layout as well, so they wait for what follows.
        shown = body[: len(body) - _overlap(body, self._end)].rstrip("\n")
        self._emit(pieces, shown, True)
        self._held = body[len(shown) :]

    def _outside(self, pieces: list[Piece]) -> None:
        self._emit(pieces, self._held, False)
        self._held = ""

    def _emit(self, pieces: list[Piece], text: str, is_reasoning: bool) -> None:
        if self._at_border:
            text = text.lstrip("\n")
        if text:
            self._at_border = False
            pieces.append(Piece(text, is_reasoning))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
