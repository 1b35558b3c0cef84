"""What a generated dialogue is, and the text forms that requests share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass
class Sample:
    """One dialogue that ends with the assistant turn to learn.

    `messages` follow the chat template: `role`, `content`, and for the assistant optionally
    `reasoning_content` and `tool_calls`. `family` names the task in the evaluation.
    `contains`, when set, relaxes the check from the exact answer to "all of these occur".
    """

    messages: list[Message]
    family: str
    tools: list[dict] | None = None
    contains: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> Message:
        return self.messages[-1]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str = "", think: str = "", calls: list[dict] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text, "reasoning_content": think}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


def tool_result(text: str) -> Message:
    return {"role": "tool", "content": text}


def dialogue(family: str, request: str, reply: str, think: str = "", **more: Any) -> Sample:
    """The common shape: one question, one answer."""
    return Sample([user(request), assistant(reply, think)], family, **more)


def join_and(items: list[str], rng: random.Random) -> str:
    """`a, b and c`, in one of the ways people write it."""
    if len(items) < 2:
        return "".join(items)
    style = rng.random()
    if style < 0.5:
        return ", ".join(items[:-1]) + " and " + items[-1]
    if style < 0.7:
        return ", ".join(items[:-1]) + ", and " + items[-1]
    return ", ".join(items)


POLITE = (
    "Please ",
    "Can you ",
    "Could you ",
    "Would you please ",
    "Hi, please ",
    "Hey, can you ",
    "Hello! Please ",
)


def casual(text: str, rng: random.Random) -> str:
    """Vary how carefully a request is typed, without touching any value in it."""
    roll = rng.random()
    if roll < 0.12 and text[:2].istitle():
        text = text[0].lower() + text[1:]
    elif roll < 0.2:
        text = rng.choice(("Hi! ", "Hello, ", "Hey, ", "OK, ", "Thanks. ", "Now: ")) + text
    if rng.random() < 0.15 and text[-1] in ".?" and not text[-2:-1].isdigit():
        text = text[:-1]
    return text


QUESTION_WORDS = (
    "what",
    "which",
    "how",
    "is",
    "does",
    "who",
    "where",
    "i",
    "with",
    "in",
    "a",
    "at",
)


def polite(text: str, rng: random.Random) -> str:
    """Put a polite opening before an imperative sentence, sometimes."""
    if rng.random() < 0.25 and text.split()[0].lower() not in QUESTION_WORDS:
        opening = rng.choice(POLITE)
        text = opening + text[0].lower() + text[1:]
        if opening.lower().endswith("you ") and text.endswith("."):
            text = text[:-1] + "?"
    return casual(text, rng)
