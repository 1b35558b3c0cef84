"""Which format a model's tool calls have: the one that reads what its own template draws.

A probe call is drawn through the chat template, which needs no weights, and every format is tried
on it. What cannot be read is said, and refused before anything long begins. Some templates draw
some values so that nobody can read them back; which ones is said, too.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import regex

from ds4cli.errors import DS4Error, UsageError
from ds4cli.text import template_limits
from ds4cli.tools.declared import Tool
from ds4cli.tools.formats import FORMATS, SPACE, Foreign, Format
from ds4cli.tools.mend import Refused
from ds4cli.tools.parse import parse_calls

ASKED = "xQ7zThisIsTheQuestionZ7qX"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


PROBE = Tool(
    "get_weather",
    "the weather of a place",
    _object(
        city={"type": "string", "description": "its name"},
        days={"type": "integer", "description": "how many"},
    ),
)
ARGUMENTS = {"city": "Ulm", "days": 3}
TEXT_ONLY = Tool(PROBE.name, PROBE.description, _object(city={"type": "string"}))
MAYBE = Tool(PROBE.name, PROBE.description, _object(city={"type": ["string", "null"]}))
# Values that a template may draw as what is no call, or another one.
HARD: tuple[tuple[str, Tool, dict[str, Any]], ...] = (
    ("several arguments", PROBE, ARGUMENTS),
    ("texts with quotes", TEXT_ONLY, {"city": 'it\'s "so"'}),
    ("texts with backslashes", TEXT_ONLY, {"city": "C:\\new"}),
    ("texts of several lines", TEXT_ONLY, {"city": "if a:\n    b"}),
    ("null", MAYBE, {"city": None}),
)


@dataclass(frozen=True)
class Found:
    """fmt: the format, None where there is none. unreadable: a call as the template draws it, where
    no format can read that. drawn: a call as the template draws it; "" where it draws none."""

    fmt: Format | None = None
    drawn: str = ""
    unreadable: str = ""


_found: weakref.WeakKeyDictionary[Any, Found] = weakref.WeakKeyDictionary()


def find_format(tokenizer: Any) -> Found:
    """The format of an mlx-lm TokenizerWrapper; found out once.

    A format whose end marker is one of the model's stop tokens (it never becomes text) gets an
    empty `end`.
    """
    if tokenizer not in _found:
        found = _find(tokenizer)
        if found.fmt is not None and found.fmt.end and _is_stop(tokenizer, found.fmt.end):
            found = replace(found, fmt=replace(found.fmt, end=""))
        _found[tokenizer] = found
    return _found[tokenizer]


def detect_format(tokenizer: Any) -> Format | None:
    """The format of the model's calls, None where it has none that can be read."""
    return find_format(tokenizer).fmt


def require_format(tokenizer: Any) -> Format:
    """The format, or UsageError that says what is wrong."""
    found = find_format(tokenizer)
    if found.fmt is not None:
        return found.fmt
    if found.unreadable:
        raise UsageError(
            f"tool calls of this model cannot be read: its template draws `{found.unreadable}`",
            "leave out `--tools`, or use another chat template",
        )
    raise UsageError(
        "this model has no tool-call format", "its chat template draws no calls: use another model"
    )


def drawn_wrongly(tokenizer: Any) -> list[str]:
    """What the template draws so that its own format cannot read it back, with how it does."""
    fmt = detect_format(tokenizer)
    if fmt is None:
        return []
    found = []
    for what, tool, arguments in HARD:
        drawn = _drawn(tokenizer, tool, arguments)
        if drawn is not None and not _reads(fmt, drawn, tool, arguments):
            found.append(f"{what}, as `{_short(drawn[drawn.rindex(tool.name) :])}`")
    return found


def _is_stop(tokenizer: Any, marker: str) -> bool:
    return tokenizer.convert_tokens_to_ids(marker) in tokenizer.eos_token_ids


def _find(tokenizer: Any) -> Found:
    config = getattr(tokenizer, "init_kwargs", {})
    named = config.get("tool_parser_type") or config.get("chat_template_type")
    first = _drawn(tokenizer, PROBE, ARGUMENTS)
    if first is None:
        return Found(_by_name(tokenizer, named))
    for tool, arguments in ((PROBE, ARGUMENTS), (TEXT_ONLY, {"city": "Ulm"})):
        drawn = _drawn(tokenizer, tool, arguments) or ""
        for fmt in _candidates(tokenizer, named):
            if _reads(fmt, drawn, tool, arguments):
                return Found(fmt, drawn)
    return Found(unreadable=_short(first))


def _short(drawn: str) -> str:
    return " ".join(drawn.split())[:120]


def _by_name(tokenizer: Any, named: str | None) -> Format | None:
    """The format that mlx-lm names, for a template that draws no calls."""
    if named in FORMATS:
        return FORMATS[named]
    if tokenizer.has_tool_calling:
        return _foreign(tokenizer, named or "unknown")
    return None


def _candidates(tokenizer: Any, named: str | None) -> Iterator[Format]:
    if named in FORMATS:
        yield FORMATS[named]
    yield from FORMATS.values()
    if tokenizer.has_tool_calling:
        yield _foreign(tokenizer, named or "unknown")


def _foreign(tokenizer: Any, name: str) -> Format:
    return Format(
        name,
        (tokenizer.tool_call_start,),
        tokenizer.tool_call_end or "",
        Foreign(tokenizer.tool_parser),
        SPACE + r"[^\s\w]",
    )


def _drawn(tokenizer: Any, tool: Tool, arguments: dict[str, Any]) -> str | None:
    """The reply with a call of `tool`, up to its end; None for a template that draws none."""
    for given in (arguments, json.dumps(arguments)):
        function = {"name": tool.name, "arguments": given}
        call = {"id": "call00000", "type": "function", "function": function}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        draw = partial(
            tokenizer.apply_chat_template,
            [{"role": "user", "content": ASKED}, reply],
            tools=[tool.spec],
            tokenize=False,
            add_generation_prompt=False,
        )
        try:
            text = template_limits.render(draw, tool.spec)
        except DS4Error:  # it runs for too long
            raise
        except Exception:  # templates raise whatever they like
            continue
        text = text.rpartition(ASKED)[2]
        if tool.name in text:
            return _up_to_stop(tokenizer, text)
    return None


def _up_to_stop(tokenizer: Any, text: str) -> str:
    """A reply without the token that ends it; one before the call ends the user's turn."""
    call = text.index(PROBE.name)
    stops = [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_token_ids]
    ends = [at for stop in stops if stop and (at := text.find(stop, call)) >= 0]
    return text[: min(ends, default=len(text))]


def _reads(fmt: Format, drawn: str, tool: Tool, arguments: dict[str, Any]) -> bool:
    """Whether the format finds the call and reads it without having to mend anything."""
    for match in regex.finditer(fmt.opening([tool.name]), drawn):
        marker = match.end("start") if match.groupdict().get("start") else match.start("kept")
        body = drawn[marker:]
        if fmt.end and fmt.end in body:
            body = body[: body.rindex(fmt.end)]
        try:
            calls = parse_calls(fmt, body, [tool])
        except Refused:
            continue
        if [(c.notes, json.loads(c.arguments)) for c in calls] == [((), arguments)]:
            return True
    return False
