"""Splits a streamed reply into reasoning and answer. Pure text; no mlx.

Reasoning is a section between the tokenizer's think markers at the very start of a reply, or a
reply whose prompt already opened it. A marker later on is prose: an answer may be about markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MARKER_TOKENS = 16  # a marker and the white space behind it are no more


@dataclass(frozen=True)
class Markers:
    """What opens reasoning, what closes it, and what opens an answer without any."""

    start: str
    end: str
    answer: str | None = None


# gpt-oss thinks in one channel and answers in another; a reply may begin with the answer.
HARMONY = Markers(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
)
# Something in brackets whose name speaks of thinking.
_OPENING = re.compile(
    r"(?P<left><\|?|\[|◁|【)(?P<name>[\w:.-]*(?:think|thought|reason)[\w:.-]*)"
    r"(?P<right>\|?>|\]|▷|】)",
    re.IGNORECASE,
)
_ENDINGS = (("start", "end"), ("START", "END"), ("begin", "end"), ("BEGIN", "END"))


@dataclass(frozen=True)
class Piece:
    """Text of one kind."""

    text: str
    is_reasoning: bool


def opens_thinking(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], markers: Markers | None
) -> bool:
    """Whether a prompt ends inside a think section."""
    if markers is None:
        return False
    return decode(tokens[-MARKER_TOKENS:]).rstrip().endswith(markers.start)


def find_markers(tokenizer: Any) -> Markers | None:
    """A model's markers: those that mlx-lm knows, or a pair that its added tokens or its chat
    template spell. One that the template speaks of goes first."""
    known = getattr(tokenizer, "think_start", None)
    if known is None and "<|channel|>" in getattr(tokenizer, "get_vocab", dict)():
        return HARMONY
    found = [Markers(known, tokenizer.think_end)] if known else []
    template = template_text(tokenizer)
    added = list(getattr(tokenizer, "get_added_vocab", dict)())
    found += [*_pairs(added, {*added}), *_pairs([template], template)]
    spoken_of = [pair for pair in found if pair.start in template or pair.end in template]
    return next(iter([*spoken_of, *found]), None)


def reasoning_pair(tokenizer: Any) -> tuple[str | None, str | None]:
    """What opens and closes reasoning, where that is one marker each."""
    found = find_markers(tokenizer)
    return (None, None) if found in (None, HARMONY) else (found.start, found.end)


def template_text(tokenizer: Any, name: str = "default") -> str:
    """The text of a tokenizer's chat template; of that `name` where it has several."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get(name) or next(iter(template.values()), None)
    return template if isinstance(template, str) else ""


def _pairs(texts: Sequence[str], place: Container[str]) -> Iterator[Markers]:
    """Markers that open reasoning in `texts` and whose counterpart stands in `place`."""
    for match in (match for text in texts for match in _OPENING.finditer(text)):
        left, name, right = match["left"], match["name"], match["right"]
        ends = [f"{left}/{name}{right}"]
        ends += [left + name.replace(a, b) + right for a, b in _ENDINGS if a in name]
        yield from (Markers(match[0], end) for end in ends if end in place)


class ReasoningSplitter:
    """Push text, get pieces; holds back only what may be part of a marker.

    markers: None for a model that has none. inside: the prompt opened a section.
    """

    def __init__(self, markers: Markers | None, inside: bool = False) -> None:
        self._start = self._end = ""
        self._answer: str | None = None
        self._step = self._outside
        if markers is not None:
            self._start, self._end, self._answer = markers.start, markers.end, markers.answer
            self._step = self._inside if inside else self._before
        self._held = ""
        self._at_border = inside  # just behind a marker: newlines there are layout
        self.pushed_chars = 0
        self._answer_at: int | None = 0 if markers is None else None

    @property
    def hidden_chars(self) -> int | None:
        """How many characters at the beginning are no answer, as far as it goes; None while it is
        not known what comes first."""
        if self._step == self._before:
            return None
        return self.pushed_chars if self._answer_at is None else self._answer_at

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
        self.pushed_chars += len(text)
        pieces: list[Piece] = []
        step = None
        while self._held and step != self._step:
            step = self._step
            step(pieces)
            if self._step != step and self._step == self._outside:
                self._answer_at = self.pushed_chars - len(self._held)
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
