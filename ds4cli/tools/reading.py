"""The text of a call as names and arguments, one reader per style. What it means to a schema is
`parse.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import regex

from ds4cli.tools import checking
from ds4cli.tools import schema as json_schema
from ds4cli.tools.declared import Tool
from ds4cli.tools.formats import NAME, Foreign, Format, Json, Literal, Named, Pythonic, Tagged
from ds4cli.tools.literals import JSON, LiteralReader, Syntax, read_literal
from ds4cli.tools.mend import Refused, Value, members, read, strict

_ANY_TYPE = json_schema.types_of({})
_FENCE = regex.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", regex.DOTALL)
_SEPARATORS = (",", ";")


@dataclass
class Draft:
    """A call as read, before the schema has been asked. `text` is the sampled JSON of the
    arguments; `is_spelled`: texts may stand for other values.
    """

    name: str
    arguments: dict[str, Any]
    text: str | None = None
    notes: list[str] = field(default_factory=list)
    is_spelled: bool = False


def drafts_of(fmt: Format, body: str, tools: Sequence[Tool]) -> list[Draft]:
    """The calls in the text between a format's markers. Raises Refused."""
    if fmt.close:
        body = body.rstrip().removesuffix(fmt.close)
    match fmt.style:
        case Json():
            return _read_json(fmt, fmt.style, body)
        case Named():
            return _read_named(fmt, fmt.style, body)
        case Tagged():
            return _read_tagged(fmt, fmt.style, body, tools)
        case Literal():
            return _read_literal(fmt.style, body)
        case Pythonic():
            return _read_pythonic(fmt.style, body, tools)
        case Foreign():
            return _read_foreign(fmt.style, body, tools)


def object_draft(name: str, arguments: Any, text: str | None, notes: Sequence[str]) -> Draft:
    """A call of `arguments`, which some models write as a string of JSON."""
    if isinstance(arguments, str):
        inner = read(arguments)
        if inner.rest.strip():
            raise Refused("the arguments are a string that is not one JSON object")
        arguments, text = inner.value, inner.text
        notes = [*notes, "the arguments were a string of JSON", *inner.notes]
    if not isinstance(arguments, dict):
        raise Refused("the arguments must be a JSON object")
    return Draft(name, arguments, text, list(notes))


# {"name": ..., "arguments": {...}}


def _value(text: str, syntax: Syntax) -> Value:
    """The first value of a text in a syntax; JSON is mended where that has one reading only."""
    if syntax == JSON:
        return read(text)
    reader = LiteralReader(text, syntax)
    return Value(reader.value(), "", reader.rest())


def _read_json(fmt: Format, style: Json, body: str) -> list[Draft]:
    notes: list[str] = []
    fenced = _FENCE.fullmatch(body)
    if fenced:
        body = fenced.group(1)
        notes.append("a code fence was removed")
    drafts: list[Draft] = []
    while body.strip():
        value = _value(body, style.values)
        found = value.value if isinstance(value.value, list) else [value.value]
        exact = value.text if not value.notes and isinstance(value.value, dict) else None
        drafts += [_json_call(style, item, exact or None, [*notes, *value.notes]) for item in found]
        body = _behind(fmt, value.rest)
        if body.strip() and not body.strip().strip("}]"):
            drafts[-1].notes.append("a stray closing bracket was dropped")
            break
    return drafts


def _behind(fmt: Format, rest: str) -> str:
    """What follows a call: without what separates it from the next, which may repeat the marker."""
    rest = rest.lstrip()
    rest = rest[1:].lstrip() if rest[:1] in _SEPARATORS else rest
    for start in fmt.starts if not fmt.end else ():
        if rest.startswith(start.lstrip()):
            return rest[len(start.lstrip()) :]
    return rest


def _json_call(style: Json, item: Any, text: str | None, notes: list[str]) -> Draft:
    if not isinstance(item, dict):
        raise Refused("a call must be a JSON object")
    if style.keyed:
        return _keyed_call(item, text, notes)
    if isinstance(item.get("function"), dict):
        item, text = item["function"], None
        notes = [*notes, "the call was nested in `function`"]
    name = item.get(style.name)
    if not isinstance(name, str):
        raise Refused(f"the call has no `{style.name}`")
    known = [key for key in ("arguments", "parameters") if key in item]
    extra = set(item) - {style.name, "id", "type", *style.more, *known}
    if extra or len(known) > 1:
        raise Refused(f"unexpected key `{sorted(extra or known)[0]}` beside the name and arguments")
    if not known:
        return Draft(name, {}, None, [*notes, "no arguments were given"])
    if known[0] not in style.arguments:
        notes = [*notes, f"`{known[0]}` was read as `{style.arguments[0]}`"]
    sampled = dict(members(text))[known[0]] if text is not None else None
    return object_draft(name, item[known[0]], sampled, notes)


def _keyed_call(item: dict[str, Any], text: str | None, notes: list[str]) -> Draft:
    if len(item) != 1:
        raise Refused("a call must be an object with the tool's name as its only key")
    ((name, arguments),) = item.items()
    sampled = dict(members(text))[name] if text is not None else None
    return object_draft(name, arguments, sampled, notes)


# name{...}: the name outside, JSON arguments


def _read_named(fmt: Format, style: Named, body: str) -> list[Draft]:
    if style.or_list and body.lstrip()[:1] in ("[", "{"):
        return _read_json(fmt, Json(), body)
    head = regex.compile(rf"\s*(?:{style.before})(?P<name>{NAME}?)(?:{style.between})\s*")
    drafts: list[Draft] = []
    while body.strip():
        match = head.match(body)
        if not match:
            raise Refused(f"expected a tool's name and its arguments at `{body.strip()[:40]}`")
        value = _value(body[match.end() :], style.values)
        exact = value.text if not value.notes else None
        draft = object_draft(match["name"], value.value, exact, list(value.notes))
        body = _behind(fmt, _after_value(value.rest, style.after, draft))
        drafts.append(draft)
    return drafts


def _after_value(rest: str, after: str, draft: Draft) -> str:
    rest = rest.lstrip()
    if rest.startswith(after):
        return rest[len(after) :]
    if rest:
        raise Refused(f"unexpected text after the arguments: `{rest[:40]}`")
    draft.notes.append(f"`{after}` was missing")
    return ""


# One element per argument


def _read_tagged(fmt: Format, style: Tagged, body: str, tools: Sequence[Tool]) -> list[Draft]:
    drafts = []
    while body.strip():
        draft, body = _tagged_call(style, body.lstrip(), tools)
        drafts.append(draft)
    return drafts


def _tagged_call(style: Tagged, text: str, tools: Sequence[Tool]) -> tuple[Draft, str]:
    head = regex.match(
        rf"{regex.escape(style.call_open)}\s*(?P<name>{NAME})(?:{style.name_close})", text
    )
    if not head:
        raise Refused(f"expected `{style.call_open or 'a name'}` at `{text[:40]}`")
    draft, text = Draft(head["name"], {}), text[head.end() :].lstrip()
    schema = _schema_of(draft.name, tools)
    while text.startswith(style.key_open) and not _closes(style, text):
        text = _tagged_argument(style, text, schema, draft)
    if style.omits_null:
        draft.arguments = _with_nulls(draft.arguments, schema, schema)
    if _closes(style, text):
        return draft, text[len(style.call_close) :]
    if text:
        raise Refused(f"unexpected text inside the call: `{text[:40]}`")
    if style.call_close and not draft.notes:
        draft.notes.append(f"`{style.call_close}` was missing")
    return draft, ""


def _closes(style: Tagged, text: str) -> bool:
    return bool(style.call_close) and text.startswith(style.call_close)


def _tagged_argument(style: Tagged, text: str, schema: dict[str, Any], draft: Draft) -> str:
    head = regex.match(
        rf"{regex.escape(style.key_open)}\s*(?P<key>[^<>\"\n/][^<>\"\n]*?)\s*(?:{style.key_close})",
        text,
    )
    if not head:
        raise Refused(f"expected an argument's name at `{text[:40]}`")
    key = head["key"]
    if key in draft.arguments:
        raise Refused(f"`{key}` is given twice")
    others = _argument_names(schema) - {key, *draft.arguments}
    end, after = _value_end(style, text, head.end(), key, others, draft)
    raw = _trimmed(text[head.end() : end], style.trim)
    nested = _nested(style, raw, json_schema.property_of(schema, key), schema)
    draft.arguments[key] = (
        nested if nested is not None else _tagged_value(key, raw, schema, draft.notes, style.values)
    )
    return text[after:]


def _value_end(
    style: Tagged, text: str, start: int, key: str, others: Set[str], draft: Draft
) -> tuple[int, int]:
    """Where the value that begins at `start` ends, and where the text goes on.

    Not at the first closing tag but at the first one that structure follows: a value may contain
    the tag itself. Where one of the arguments `others` opens before any closing tag, that is
    missing.
    """
    if (cut := _opening(style, text, start, key, others)) is not None:
        draft.notes.append(f"`{style.closes(key)}` of `{key}` was missing")
        return cut, cut
    ends = [f"{regex.escape(style.key_open)}(?!/)", regex.escape(style.call_close)]
    close = regex.escape(style.closes(key))
    after = "|".join(end for end in ends if end)
    match = regex.compile(rf"{close}[ \t\r\n]*(?={after}|$(?!\n))").search(text, start)
    if match:
        return match.start(), match.end()
    whole = text.rstrip()
    if style.call_close and not style.many and whole.endswith(style.call_close):
        draft.notes.append(f"`{style.closes(key)}` was missing")
        end = len(whole) - len(style.call_close)
        return end, end
    raise Refused(f"the value of `{key}` is never closed")


def _opening(style: Tagged, text: str, start: int, key: str, others: Set[str]) -> int | None:
    """Where one of the arguments `others` opens before any closing tag."""
    if style.is_keyed or not others:
        return None
    names = "|".join(map(regex.escape, sorted(others)))
    head = rf"{regex.escape(style.key_open)}(?:{names})(?:{style.key_close})"
    match = regex.compile(rf"{head}|{regex.escape(style.closes(key))}").search(text, start)
    return match.start() if match and not match[0].startswith(style.closes(key)) else None


def _with_nulls(value: Any, schema: Any, root: Any) -> Any:
    """`value` with the members that its schema requires, lets be null, and that are not there."""
    if isinstance(value, list):
        return [
            _with_nulls(part, json_schema.item_of(schema, i, root), root)
            for i, part in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    found = {
        k: _with_nulls(v, json_schema.property_of(schema, k, root), root) for k, v in value.items()
    }
    return found | {n: None for n in json_schema.nullable(schema, root) if n not in found}


def _trimmed(raw: str, trim: str) -> str:
    if trim == "newline":
        return raw.removeprefix("\n").removesuffix("\n")
    if trim == "pair":
        return raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] == "\n" else raw
    if trim == "all":
        raw = raw.strip()
        cdata = regex.fullmatch(r"<!\[CDATA\[(.*?)\]\]>", raw, regex.DOTALL)
        return cdata[1] if cdata else raw
    return raw


def _nested(style: Tagged, raw: str, sub: Any, root: dict[str, Any]) -> Any:
    """A list or an object whose parts are elements of their own; None where it is not one."""
    types = json_schema.types_of(sub, root)
    if not style.is_keyed or types & {"string"}:
        return None
    if not raw.strip():
        return [] if "array" in types else {} if "object" in types else None
    if not raw.lstrip().startswith(style.key_open):
        return None
    parts = _parts(style, raw)
    if "array" in types:
        return [
            _part(style, text, json_schema.item_of(sub, i, root), root)
            for i, (_, text) in enumerate(parts)
        ]
    return {
        key: _part(style, text, json_schema.property_of(sub, key, root), root)
        for key, text in parts
    }


def _part(style: Tagged, text: str, sub: Any, root: dict[str, Any]) -> Any:
    nested = _nested(style, text, sub, root)
    return nested if nested is not None else value_of_text(text, sub, root, style.values)


def _parts(style: Tagged, raw: str) -> list[tuple[str, str]]:
    """The elements inside an element: (name, text), each closed by its own tag."""
    parts, at = [], 0
    head = regex.compile(
        rf"\s*{regex.escape(style.key_open)}(?P<key>[^<>/]+?)(?:{style.key_close})"
    )
    while raw[at:].strip():
        match = head.match(raw, at)
        if not match:
            raise Refused(f"unexpected text inside a value: `{raw[at:].strip()[:40]}`")
        end = _matching_end(style, raw, match.end(), match["key"])
        parts.append((match["key"], raw[match.end() : end]))
        at = end + len(style.closes(match["key"]))
    return parts


def _matching_end(style: Tagged, raw: str, at: int, key: str) -> int:
    """Where the element closes, past elements of the same name inside it."""
    again, close = f"{style.key_open}{key}>", style.closes(key)
    depth = 1
    while depth:
        end = raw.find(close, at)
        if end < 0:
            raise Refused(f"`{key}` is never closed")
        depth += raw.count(again, at, end) - 1
        at = end + len(close)
    return at - len(close)


def _tagged_value(
    key: str, raw: str, schema: dict[str, Any], notes: list[str], syntax: Syntax
) -> Any:
    """The value that the text of an element spells, by the type its schema asks for."""
    sub = json_schema.property_of(schema, key)
    if "string" in json_schema.types_of(sub, schema):
        return value_of_text(raw, sub, schema, syntax)
    try:
        return _loosely(raw, syntax)
    except ValueError:
        return _mended(key, raw, notes)


def value_of_text(raw: str, sub: Any, schema: dict[str, Any], syntax: Syntax) -> Any:
    """What a text without quotes stands for, where its schema may allow a text: another value only
    where the schema names its type, and that value fits."""
    types = json_schema.types_of(sub, schema)
    try:
        value = _loosely(raw, syntax)
    except ValueError:
        return raw
    if "string" not in types:
        return value
    fits = not isinstance(value, str) and checking.is_valid(value, sub, schema)
    return value if fits and (types != _ANY_TYPE or isinstance(value, (dict, list))) else raw


def _loosely(raw: str, syntax: Syntax) -> Any:
    """A value in JSON, or as the syntax spells it. Raises ValueError."""
    try:
        return strict(raw.strip())
    except ValueError:
        return read_literal(raw, syntax)


def _mended(key: str, raw: str, notes: list[str]) -> Any:
    value = read(raw)
    if value.rest.strip() or not raw.strip():
        raise Refused(f"the value of `{key}` is not JSON: `{raw.strip()[:40]}`")
    notes += [f"`{key}`: {note}" for note in value.notes]
    return value.value


# call:name{key:value} and [name(key=value)]


def _read_literal(style: Literal, body: str) -> list[Draft]:
    drafts = []
    while body.strip():
        head = regex.match(rf"\s*call:\s*(?P<name>{NAME}?)\s*(?=\{{)", body)
        if not head:
            raise Refused(f"expected `call:` and a name at `{body.strip()[:40]}`")
        reader = LiteralReader(body[head.end() :], style.values)
        drafts.append(Draft(head["name"], reader.value(), is_spelled=style.values.wraps))
        body = reader.rest().lstrip().removeprefix(",")
    return drafts


def _read_pythonic(style: Pythonic, body: str, tools: Sequence[Tool]) -> list[Draft]:
    reader = LiteralReader(body, style.values)
    calls = reader.calls(lambda name: _argument_names(_schema_of(name, tools)))
    if not calls or reader.rest().strip():
        raise Refused("expected a list of calls, `[name(key=value)]`")
    notes, wraps = reader.notes, style.values.wraps
    return [Draft(name, given, notes=[*notes], is_spelled=wraps) for name, given in calls]


def _schema_of(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    return next((t.arguments_schema for t in tools if t.name == name), {})


def _argument_names(schema: dict[str, Any]) -> set[str]:
    return set(json_schema.followed(schema).get("properties", {}))


# A format that only mlx-lm knows


def _read_foreign(style: Foreign, body: str, tools: Sequence[Tool]) -> list[Draft]:
    try:
        parsed = style.parse(body, [tool.spec for tool in tools])
    except Exception as error:  # a parser of another project may raise anything
        raise Refused(f"{type(error).__name__}: {error}") from error
    drafts = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Refused("the parser found no name")
        draft = object_draft(call["name"], call.get("arguments"), None, [])
        _check_nothing_lost(draft, body)
        drafts.append(draft)
    return drafts


def _check_nothing_lost(draft: Draft, body: str) -> None:
    """A lenient parser drops what it does not know: then much of the text is not accounted for."""
    kept = len(draft.name) + sum(
        len(key) + len(v if isinstance(v, str) else json.dumps(v))
        for key, v in draft.arguments.items()
    )
    markup = 60 * (1 + len(draft.arguments))
    if len(body) > kept + markup:
        raise Refused("the parser dropped part of the call")
