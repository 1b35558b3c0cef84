"""The text of a call becomes a valid call, a repaired one with a note, or a refusal with a reason.

Never a silent `{}`, never a cut value, never arguments that are a bare string. What the model wrote
is kept as it was written (`arguments` is the sampled text wherever the format has JSON arguments).
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import regex

from ds4cli.tools import schema as json_schema
from ds4cli.tools.declared import Tool
from ds4cli.tools.formats import FORMATS, Foreign, Format, Json, Literal, Named, Pythonic, Tagged
from ds4cli.tools.mend import Refused, members, read, strict

_ANY_TYPE = json_schema.types_of({})
_FENCE = regex.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", regex.DOTALL)


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

    def openai(self) -> dict:
        """The OpenAI shape: {"id", "type", "function": {"name", "arguments"}}."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class _Draft:
    """A call as read, before the schema has been asked. `text` is the sampled JSON of the
    arguments.
    """

    name: str
    arguments: dict
    text: str | None = None
    notes: list[str] = field(default_factory=list)


def parse_calls(fmt: Format, body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """The calls in `body`, the text between a format's markers. Raises Refused."""
    try:
        drafts = _read(fmt, body, tools)
    except Refused as error:
        drafts = _other_dialect(fmt, body, tools)
        if not drafts:
            raise error
    if not drafts:
        raise Refused("there is no call between the markers")
    return [_settle(draft, tools) for draft in drafts]


def _read(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    readers: dict[type, Callable] = {
        Json: _read_json,
        Named: _read_named,
        Tagged: _read_tagged,
        Literal: _read_literal,
        Pythonic: _read_pythonic,
        Foreign: _read_foreign,
    }
    return readers[type(fmt.style)](fmt, body, tools)


def _other_dialect(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    """Models trained on several formats mix them; a body that another format reads whole is
    unambiguous.
    """
    signs = {"json_tools": "{", "qwen3_coder": "<function=", "glm47": "<arg_key>"}
    for other in (FORMATS[name] for name, sign in signs.items() if sign in body):
        if other.name == fmt.name or isinstance(fmt.style, (Literal, Pythonic, Foreign)):
            continue
        try:
            drafts = _read(other, body, tools)
        except Refused:
            continue
        for draft in drafts:
            draft.notes.append(f"written in the `{other.name}` format, not `{fmt.name}`")
        return drafts
    return []


# The schema has the last word


def _settle(draft: _Draft, tools: Sequence[Tool]) -> ParsedCall:
    notes = list(draft.notes)
    tool = _tool(draft.name, tools, notes)
    arguments, schema = draft.arguments, tool.arguments_schema
    try:
        json_schema.check(arguments, schema, where="arguments")
    except json_schema.Invalid as error:
        arguments = _coerced(arguments, schema, notes)
        if not json_schema.is_valid(arguments, schema, schema):
            raise Refused(f"`{tool.name}`: {error}") from error
    except RecursionError as error:
        raise Refused("the arguments are nested too deeply") from error
    text = draft.text
    if text is None or arguments is not draft.arguments:
        text = json.dumps(arguments, ensure_ascii=False)
    return ParsedCall(tool.name, text, tuple(notes))


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


def _coerced(arguments: dict, schema: dict, notes: list[str]) -> dict:
    """`arguments` with each string that stands where no string may stand read as what it spells."""
    result = dict(arguments)
    for key, value in arguments.items():
        sub = schema.get("properties", {}).get(key)
        if (
            sub is None
            or not isinstance(value, str)
            or "string" in json_schema.types_of(sub, schema)
        ):
            continue
        try:
            result[key] = strict(value)
        except ValueError:
            continue
        notes.append(f"`{key}` was a string, read as JSON")
    return result


# {"name": ..., "arguments": {...}}


def _read_json(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    notes: list[str] = []
    fenced = _FENCE.fullmatch(body)
    if fenced:
        body = fenced.group(1)
        notes.append("a code fence was removed")
    drafts: list[_Draft] = []
    while body.strip():
        value = read(body)
        found = value.value if isinstance(value.value, list) else [value.value]
        exact = value.text if not value.notes and isinstance(value.value, dict) else None
        drafts += [_json_call(item, exact, [*notes, *value.notes]) for item in found]
        body = value.rest.lstrip().removeprefix(",")
        if body.strip() and not body.strip().strip("}]"):
            drafts[-1].notes.append("a stray closing bracket was dropped")
            break
    return drafts


def _json_call(item: Any, text: str | None, notes: list[str]) -> _Draft:
    if not isinstance(item, dict):
        raise Refused("a call must be a JSON object")
    if isinstance(item.get("function"), dict):
        item, text = item["function"], None
        notes = [*notes, "the call was nested in `function`"]
    name = item.get("name")
    if not isinstance(name, str):
        raise Refused("the call has no `name`")
    known = [key for key in ("arguments", "parameters") if key in item]
    extra = set(item) - {"name", "id", "type", "arguments", "parameters"}
    if extra or len(known) > 1:
        raise Refused(f"unexpected key `{sorted(extra or known)[0]}` beside `name` and `arguments`")
    if not known:
        return _Draft(name, {}, None, [*notes, "no arguments were given"])
    if known == ["parameters"]:
        notes = [*notes, "`parameters` was read as `arguments`"]
    sampled = dict(members(text))[known[0]] if text is not None else None
    return _object_draft(name, item[known[0]], sampled, notes)


def _object_draft(name: str, arguments: Any, text: str | None, notes: list[str]) -> _Draft:
    if isinstance(arguments, str):
        inner = read(arguments)
        if inner.rest.strip():
            raise Refused("the arguments are a string that is not one JSON object")
        arguments, text = inner.value, inner.text
        notes = [*notes, "the arguments were a string of JSON", *inner.notes]
    if not isinstance(arguments, dict):
        raise Refused("the arguments must be a JSON object")
    return _Draft(name, arguments, text, list(notes))


# name{...}: the name outside, JSON arguments


def _read_named(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    style = fmt.style
    if body.lstrip()[:1] in ("[", "{"):
        return _read_json(fmt, body, tools)
    head = regex.compile(
        rf"\s*(?:{regex.escape(style.before)})(?P<name>[\w.\-]+?)(?:{style.between})\s*"
    )
    drafts: list[_Draft] = []
    while body.strip():
        match = head.match(body)
        if not match:
            raise Refused(f"expected a tool's name and its arguments at `{body.strip()[:40]}`")
        value = read(body[match.end() :])
        exact = value.text if not value.notes else None
        draft = _object_draft(match["name"], value.value, exact, list(value.notes))
        body = _after_value(value.rest, style.after, draft)
        body = body.lstrip().removeprefix(fmt.start) if not fmt.end else body
        drafts.append(draft)
    return drafts


def _after_value(rest: str, after: str, draft: _Draft) -> str:
    rest = rest.lstrip()
    if rest.startswith(after):
        return rest[len(after) :]
    if rest:
        raise Refused(f"unexpected text after the arguments: `{rest[:40]}`")
    draft.notes.append(f"`{after}` was missing")
    return ""


# One element per argument


def _read_tagged(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    style, drafts = fmt.style, []
    if fmt.keep_start:
        body = fmt.start + body
    while body.strip():
        draft, body = _tagged_call(style, body.lstrip(), tools)
        drafts.append(draft)
    return drafts


def _tagged_call(style: Tagged, text: str, tools: Sequence[Tool]) -> tuple[_Draft, str]:
    head = regex.match(
        rf"{regex.escape(style.call_open)}\s*(?P<name>[\w.:\-]+)(?:{style.name_close})", text
    )
    if not head:
        raise Refused(f"expected `{style.call_open or 'a name'}` at `{text[:40]}`")
    draft, text = _Draft(head["name"], {}), text[head.end() :].lstrip()
    schema = next((t.arguments_schema for t in tools if t.name == draft.name), {})
    while text.startswith(style.key_open):
        text = _tagged_argument(style, text, schema, draft)
    if style.call_close and text.startswith(style.call_close):
        return draft, text[len(style.call_close) :]
    if text:
        raise Refused(f"unexpected text inside the call: `{text[:40]}`")
    if style.call_close:
        draft.notes.append(f"`{style.call_close}` was missing")
    return draft, ""


def _tagged_argument(style: Tagged, text: str, schema: dict, draft: _Draft) -> str:
    head = regex.match(
        rf"{regex.escape(style.key_open)}\s*(?P<key>[^\s<>\"]+?)\s*(?:{style.key_close})", text
    )
    if not head:
        raise Refused(f"expected an argument's name at `{text[:40]}`")
    key = head["key"]
    ends = "|".join(regex.escape(e) for e in (style.key_open, style.call_close) if e)
    # Not the first closing tag but the first one that structure follows: a value may contain the
    # tag itself.
    close = regex.compile(rf"{regex.escape(style.value_close)}\s*(?={ends}|$(?!\n))")
    match = close.search(text, head.end())
    if not match:
        raise Refused(f"the value of `{key}` is never closed")
    if key in draft.arguments:
        raise Refused(f"`{key}` is given twice")
    raw = _trimmed(text[head.end() : match.start()], style.trim)
    draft.arguments[key] = _tagged_value(key, raw, schema, draft.notes)
    return text[match.end() :]


def _trimmed(raw: str, trim: str) -> str:
    if trim == "newline":
        return raw.removeprefix("\n").removesuffix("\n")
    if trim == "all":
        raw = raw.strip()
        cdata = regex.fullmatch(r"<!\[CDATA\[(.*?)\]\]>", raw, regex.DOTALL)
        return cdata[1] if cdata else raw
    return raw


def _tagged_value(key: str, raw: str, schema: dict, notes: list[str]) -> Any:
    """The value that the text of an element spells, by the type its schema asks for."""
    sub = schema.get("properties", {}).get(key, {})
    types = json_schema.types_of(sub, schema)
    try:
        value = strict(raw.strip())
    except ValueError:
        return raw if "string" in types else _loose_value(key, raw, notes)
    if "string" not in types:
        return value
    is_other = not isinstance(value, str) and json_schema.is_valid(value, sub, schema)
    return value if is_other and (types != _ANY_TYPE or isinstance(value, (dict, list))) else raw


def _loose_value(key: str, raw: str, notes: list[str]) -> Any:
    value = read(raw)
    if value.rest.strip() or not raw.strip():
        raise Refused(f"the value of `{key}` is not JSON: `{raw.strip()[:40]}`")
    notes += [f"`{key}`: {note}" for note in value.notes]
    return value.value


# call:name{key:value} with its own string quotes


def _read_literal(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    drafts = []
    while body.strip():
        head = regex.match(r"\s*call:\s*(?P<name>[\w.\-]+)\s*(?=\{)", body)
        if not head:
            raise Refused(f"expected `call:` and a name at `{body.strip()[:40]}`")
        reader = _LiteralReader(body[head.end() :], fmt.style.quote)
        drafts.append(_Draft(head["name"], reader.value()))
        body = reader.rest().lstrip().removeprefix(",")
    return drafts


class _LiteralReader:
    """Bare keys, strings between a special quote, the rest as JSON writes it."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote, self.at = text, quote, 0

    def rest(self) -> str:
        return self.text[self.at :]

    def value(self, depth: int = 0) -> Any:
        if depth > json_schema.MAX_DEPTH:
            raise Refused("nested too deeply to read")
        if self._take(self.quote):
            return self._until(self.quote)
        if self._take("{"):
            return self._object(depth + 1)
        if self._take("["):
            return self._list(depth + 1)
        match = regex.compile(r"[^,{}\[\]]+").match(self.text, self.at)
        if not match:
            raise Refused(f"expected a value at `{self.rest()[:40]}`")
        self.at = match.end()
        try:
            return strict(match[0].strip())
        except ValueError as error:
            raise Refused(f"`{match[0].strip()[:40]}` is neither quoted nor JSON") from error

    def _take(self, what: str) -> bool:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if not self.text.startswith(what, self.at):
            return False
        self.at += len(what)
        return True

    def _until(self, what: str) -> str:
        end = self.text.find(what, self.at)
        if end < 0:
            raise Refused("a string is never closed")
        found, self.at = self.text[self.at : end], end + len(what)
        return found

    def _object(self, depth: int) -> dict:
        result: dict[str, Any] = {}
        while not self._take("}"):
            if result and not self._take(","):
                raise Refused(f"expected `,` or `}}` at `{self.rest()[:40]}`")
            key = self._until(self.quote) if self._take(self.quote) else self._bare_key()
            if not self._take(":"):
                raise Refused(f"`{key}` has no value")
            if key in result:
                raise Refused(f"`{key}` is given twice")
            result[key] = self.value(depth)
        return result

    def _bare_key(self) -> str:
        match = regex.compile(r"\s*([\w.\-]+)").match(self.text, self.at)
        if not match:
            raise Refused(f"expected an argument's name at `{self.rest()[:40]}`")
        self.at = match.end()
        return match[1]

    def _list(self, depth: int) -> list:
        result: list[Any] = []
        while not self._take("]"):
            if result and not self._take(","):
                raise Refused(f"expected `,` or `]` at `{self.rest()[:40]}`")
            result.append(self.value(depth))
        return result


# [name(key=value)]


class _JsonWords(ast.NodeTransformer):
    """Templates render nested values as JSON, so true, false and null stand for Python's words."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _read_pythonic(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    text, notes = body.strip(), []
    try:
        tree = _python(text)
    except Refused:
        text, notes = f"{text}]", ["the closing `]` was missing"]
        tree = _python(text)
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Refused("expected a list of calls, `[name(key=value)]`")
    return [replace(_python_call(node), notes=list(notes)) for node in tree.elts]


def _python(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"not a list of calls: {error}") from error


def _python_call(node: ast.expr) -> _Draft:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise Refused("each call must be `name(key=value, ...)`")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg in arguments:
            raise Refused(f"`{keyword.arg}` is given twice")
        try:
            arguments[keyword.arg] = ast.literal_eval(_JsonWords().visit(keyword.value))
            json.dumps(arguments[keyword.arg], allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError) as error:
            raise Refused(f"the value of `{keyword.arg}` is not a literal") from error
    return _Draft(ast.unparse(node.func), arguments)


# A format that only mlx-lm knows


def _read_foreign(fmt: Format, body: str, tools: Sequence[Tool]) -> list[_Draft]:
    try:
        parsed = fmt.style.parse(body, [tool.spec for tool in tools])
    except Exception as error:  # a parser of another project may raise anything
        raise Refused(f"{type(error).__name__}: {error}") from error
    drafts = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Refused("the parser found no name")
        draft = _object_draft(call["name"], call.get("arguments"), None, [])
        _check_nothing_lost(draft, body)
        drafts.append(draft)
    return drafts


def _check_nothing_lost(draft: _Draft, body: str) -> None:
    """A lenient parser drops what it does not know: then much of the text is not accounted for."""
    kept = len(draft.name) + sum(
        len(key) + len(v if isinstance(v, str) else json.dumps(v))
        for key, v in draft.arguments.items()
    )
    markup = 60 * (1 + len(draft.arguments))
    if len(body) > kept + markup:
        raise Refused("the parser dropped part of the call")
