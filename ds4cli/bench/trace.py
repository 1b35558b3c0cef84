"""The agent's conversation: sizes of messages from a file, one JSON object a line.

role, tokens: who speaks, how much. redrawn (on an assistant's line): so many tokens at the reply's
end come back from the client written differently, so the session must go back before them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4cli.bench.files import read_text
from ds4cli.errors import UsageError

# In an installed package the file lies beside this one, in a checkout among the examples.
_PLACES = (Path(__file__).parent, Path(__file__).parents[2] / "examples")
NAME = "agent-trace.jsonl"


@dataclass(frozen=True)
class Message:
    """One message; redrawn: 0 where nothing goes back."""

    role: str
    tokens: int
    redrawn: int = 0


def read(path: Path | None = None) -> list[Message]:
    """The messages of `path`, or of the trace that ships with the program."""
    path = path or next((p / NAME for p in _PLACES if (p / NAME).exists()), _PLACES[0] / NAME)
    lines = read_text(path).splitlines()
    return [_message(line, f"line {i} of `{path}`") for i, line in enumerate(lines, 1) if line]


def _message(line: str, where: str) -> Message:
    try:
        message = Message(**json.loads(line))
        assert message.role in ("system", "user", "assistant", "tool")
        assert message.tokens > 0 and 0 <= message.redrawn <= message.tokens
    except (AssertionError, TypeError, ValueError):
        hint = 'write {"role": "assistant", "tokens": 150, "redrawn": 5}'
        raise UsageError(f"{where} is no message of a trace", hint) from None
    return message


def scaled(messages: Sequence[Message], scale: float) -> list[Message]:
    """Every size times `scale`, at least 1; what is redrawn keeps its size where it fits."""
    sizes = [max(1, round(m.tokens * scale)) for m in messages]
    return [Message(m.role, n, min(m.redrawn, n)) for m, n in zip(messages, sizes, strict=True)]


def length(messages: Sequence[Message]) -> int:
    """Tokens of the whole conversation."""
    return sum(m.tokens for m in messages)
