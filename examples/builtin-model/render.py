"""A dialogue as the text the model reads, split at the borders of what it has to learn.

This is `chat_template.jinja` in Python, a hundred times faster; `tests/test_builtin.py` compares
the two. What the template redraws is redrawn here as well: think sections of earlier turns vanish.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from corpus import Message, Sample

TOOL_INTRO = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOL_OUTRO = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
Piece = tuple[str, bool]  # text, and whether the model learns to write it


def to_json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False)


def pieces(sample: Sample, thinking: bool, keep_thoughts: bool = False) -> Iterator[Piece]:
    """Text pieces in order. `keep_thoughts` leaves earlier turns as they were written.

    Only the last turn is learned, because the template shows earlier ones without their think
    section; with `keep_thoughts` every assistant turn is.
    """
    yield head(sample), False
    messages = sample.messages[1:] if sample.messages[0]["role"] == "system" else sample.messages
    last_query = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            yield tool_turn(messages, i), False
        elif role == "user":
            yield f"<|im_start|>user\n{message['content']}<|im_end|>\n", False
        elif i == len(messages) - 1 or keep_thoughts:
            yield from learned_turn(message, thinking)
        else:
            shown = thinking and i > last_query
            yield f"<|im_start|>assistant\n{body(message, shown)}<|im_end|>\n", False


def head(sample: Sample) -> str:
    first = sample.messages[0]
    system = first["content"] if first["role"] == "system" else ""
    if not sample.tools:
        return f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    declared = "".join("\n" + to_json(tool) for tool in sample.tools)
    opening = f"{system}\n\n" if system else ""
    return f"<|im_start|>system\n{opening}{TOOL_INTRO}{declared}{TOOL_OUTRO}<|im_end|>\n"


def tool_turn(messages: list[Message], i: int) -> str:
    opening = "" if i and messages[i - 1]["role"] == "tool" else "<|im_start|>user"
    closing = "" if i + 1 < len(messages) and messages[i + 1]["role"] == "tool" else "<|im_end|>\n"
    return f"{opening}\n<tool_response>\n{messages[i]['content']}\n</tool_response>{closing}"


def learned_turn(message: Message, thinking: bool) -> Iterator[Piece]:
    if thinking:
        yield "<|im_start|>assistant\n", False
    else:
        yield "<|im_start|>assistant\n<think>\n\n</think>\n\n", False
    yield f"{body(message, thinking)}<|im_end|>", True
    yield "\n", False


def body(message: Message, thinking: bool) -> str:
    thought = message.get("reasoning_content") or ""
    text = f"<think>\n{thought}\n</think>\n\n" if thinking and thought else ""
    text += message["content"]
    for n, call in enumerate(message.get("tool_calls", ())):
        separator = "\n" if n or message["content"] else ""
        name, arguments = call["function"]["name"], to_json(call["function"]["arguments"])
        inner = f'{{"name": "{name}", "arguments": {arguments}}}'
        text += f"{separator}<tool_call>\n{inner}\n</tool_call>"
    return text
