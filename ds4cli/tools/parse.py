"""The text of a call becomes a valid call, a repaired one with a note, or a refusal with a reason.

Never a silent `{}`, never a cut value, never arguments that are a bare string. What the model wrote
is kept as it was written (`arguments` is the sampled text wherever the format has JSON arguments).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4cli.tools import checking
from ds4cli.tools import schema as json_schema
from ds4cli.tools.declared import Tool
from ds4cli.tools.formats import FORMATS, Format, Json, Named, Tagged
from ds4cli.tools.literals import PYTHON
from ds4cli.tools.mend import Refused, strict
from ds4cli.tools.reading import Draft, drafts_of, value_of_text


@dataclass(frozen=True)
class ParsedCall:
    """A call of a declared tool whose arguments satisfy its schema."""

    name: str
    arguments: str  # JSON object, as sampled where the format writes JSON
    notes: tuple[str, ...] = ()  # what had to be changed; empty: valid as it was
    id: str = ""

    @property
    def outcome(self) -> str:
        return "repaired" if self.notes else "valid"

    def openai(self) -> dict[str, Any]:
        """The OpenAI shape: {"id", "type", "function": {"name", "arguments"}}."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def parse_calls(fmt: Format, body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """The calls in `body`, the text between a format's markers. Raises Refused."""
    try:
        drafts = drafts_of(fmt, body, tools)
    except Refused as error:
        drafts = _other_dialect(fmt, body, tools)
        if not drafts:
            raise error
    if not drafts:
        raise Refused("there is no call between the markers")
    return [_settle(draft, tools) for draft in drafts]


def _other_dialect(fmt: Format, body: str, tools: Sequence[Tool]) -> list[Draft]:
    """Models trained on several formats mix them; a body that another format reads whole is
    unambiguous.
    """
    if not isinstance(fmt.style, (Json, Named, Tagged)):
        return []
    for other in FORMATS.values():
        if not other.sign or other.sign not in body or other.name == fmt.name:
            continue
        try:
            drafts = drafts_of(other, body, tools)
        except Refused:
            continue
        for draft in drafts:
            draft.notes.append(f"written in the `{other.name}` format, not `{fmt.name}`")
        return drafts
    return []


# The schema has the last word


def _settle(draft: Draft, tools: Sequence[Tool]) -> ParsedCall:
    notes = list(draft.notes)
    tool = _tool(draft.name, tools, notes)
    arguments, schema = draft.arguments, tool.arguments_schema
    if draft.is_spelled:
        arguments = _unspelled(arguments, schema)
    try:
        checking.check(arguments, schema, where="arguments")
    except checking.Invalid as error:
        arguments = _coerced(arguments, schema, notes)
        if not checking.is_valid(arguments, schema, schema):
            raise Refused(f"`{tool.name}`: {error}") from error
    except RecursionError as error:
        raise Refused("the arguments are nested too deeply") from error
    text = draft.text
    if text is None or arguments is not draft.arguments:
        text = json.dumps(arguments, ensure_ascii=False)
    return ParsedCall(tool.name, _storable(text), tuple(notes))


def _storable(text: str) -> str:
    """Halves of characters, which `\\u` escapes can spell, stay escapes: they are no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text))
    return text


def _tool(name: Any, tools: Sequence[Tool], notes: list[str]) -> Tool:
    names = {tool.name: tool for tool in tools}
    if name in names:
        return names[name]
    loose = [
        t for t in tools if t.name.lower() == str(name).strip().removeprefix("functions.").lower()
    ]
    if len(loose) == 1:
        notes.append(f"the name `{name}` was read as `{loose[0].name}`")
        return loose[0]
    near = difflib.get_close_matches(str(name), names, 1)
    raise Refused(f"no tool `{name}` is declared" + (f"; `{near[0]}` is" if near else ""))


def _unspelled(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with what their texts stand for, in a syntax that puts quotes around all."""
    return {
        key: value_of_text(value, json_schema.property_of(schema, key), schema, PYTHON)
        if isinstance(value, str)
        else value
        for key, value in arguments.items()
    }


def _coerced(arguments: dict[str, Any], schema: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """`arguments` with each string that stands where no string may stand read as what it spells."""
    result = dict(arguments)
    for key, value in arguments.items():
        sub = json_schema.property_of(schema, key)
        if not isinstance(value, str) or "string" in json_schema.types_of(sub, schema):
            continue
        try:
            result[key] = strict(value)
        except ValueError:
            continue
        notes.append(f"`{key}` was a string, read as JSON")
    return result
