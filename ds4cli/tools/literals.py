"""Lark rules for values that are written like JSON but are not JSON: Gemma's own quotes, Python
literals.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds4cli.tools import schema as json_schema

_MAX_DEPTH = 12
_SCALARS = ("integer", "number", "boolean", "null")


class NoGrammar(Exception):
    """No grammar can be built; the text says why. Calls are then parsed when they close."""


@dataclass(frozen=True)
class Syntax:
    """What differs between the two. `text` is the Lark expression of any string."""

    text: str
    spelled: Callable[[Any], str]  # one constant
    key: Callable[[str], str]  # a key of a nested object, with what separates it from its value
    comma: str


def quoted(text: str) -> str:
    """A Lark string literal; "" for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def given(required: list[int]) -> str:
    """`%if` every key with these numbers has been given; nothing when none has to be."""
    condition = ""
    for i in required:
        condition = f"and({condition}, bit_set({i}))" if condition else f"bit_set({i})"
    return f" %if {condition}" if condition else ""


def gemma(quote: str) -> Syntax:
    def spelled(value: Any) -> str:
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    return Syntax(f"{quoted(quote)} quoted_text", spelled, lambda key: f"{key}:", '","')


def python() -> Syntax:
    def spelled(value: Any) -> str:
        words = {True: "True", False: "False", None: "None"}
        return words[value] if value is None or isinstance(value, bool) else json.dumps(value)

    return Syntax("PY_TEXT", spelled, lambda key: f"{json.dumps(key)}: ", '"," " "?')


class Literals:
    """Writes the rules of one tool's values.

    `rule(name, body)` adds a rule and returns its name, `notice(schema)` takes note of what a text
    is not held to.
    """

    def __init__(
        self,
        rule: Callable[[str, str], str],
        notice: Callable[[dict], None],
        root: dict,
        syntax: Syntax,
        name: str,
    ) -> None:
        self.rule, self.notice = rule, notice
        self.root, self.syntax, self.name = root, syntax, name
        self.count = 0

    def value(self, schema: Any, depth: int = 0) -> str:
        """The rule of a value of `schema`, as far as its type, constants and parts go."""
        if depth > _MAX_DEPTH:
            raise NoGrammar(
                f"values are nested more than {_MAX_DEPTH} levels deep, or refer to themselves"
            )
        schema = {} if schema is True else schema
        if "$ref" in schema:
            return self.value(json_schema.resolve(self.root, schema["$ref"]), depth + 1)
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if constants:
            return self._new(" | ".join(quoted(self.syntax.spelled(c)) for c in constants))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._new(" | ".join(self.value(s, depth + 1) for s in schema[word]))
        if "allOf" in schema:
            raise NoGrammar("`allOf` is not written in this format")
        types = json_schema.types_of(schema, self.root)
        return self._new(" | ".join(self._of_type(t, schema, depth) for t in sorted(types)))

    def _new(self, body: str) -> str:
        self.count += 1
        return self.rule(f"{self.name}_{self.count}", body)

    def _of_type(self, kind: str, schema: dict, depth: int) -> str:
        if kind == "string":
            self.notice(schema)
            return self.syntax.text
        if kind in ("boolean", "null"):
            words = {"boolean": [True, False], "null": [None]}[kind]
            return " | ".join(quoted(self.syntax.spelled(w)) for w in words)
        if kind in _SCALARS:
            limits = {k: v for k, v in schema.items() if k in json_schema.NUMBER_LIMITS}
            return f"%json {json.dumps({'type': kind, **limits})}"
        if kind == "array":
            item = self.value(schema.get("items", {}), depth + 1)
            return f'"[" ({item} ({self.syntax.comma} {item})*)? "]"'
        return self._object(schema, depth)

    def _object(self, schema: dict, depth: int) -> str:
        keys = schema.get("properties", {})
        if not keys:
            return '"{" "}"'
        pairs = [(self.syntax.key(key), sub) for key, sub in keys.items()]
        required = [i for i, key in enumerate(keys) if key in schema.get("required", ())]
        return f'"{{" {self.members(pairs, required, quoted("}"), depth)}'

    def members(
        self, pairs: list[tuple[str, Any]], required: list[int], close: str, depth: int
    ) -> str:
        """`pairs` of (what stands before a value, its schema): each at most once, in any order."""
        self.count += 1
        first, more = f"{self.name}_k{self.count}", f"{self.name}_r{self.count}"
        lines = [
            f"{quoted(head)} {self.value(sub, depth + 1)} {more}::set_bit({i}) %if bit_clear({i})"
            for i, (head, sub) in enumerate(pairs)
        ]
        self.rule(f"{first}::_", "\n  | ".join(lines))
        again = f"{self.syntax.comma} {first}::_ %if bit_count_lt(_, {len(pairs)})"
        self.rule(f"{more}::_", f"{close}{given(required)}\n  | {again}")
        empty = "" if required else f"| {close}"
        return f"({first}::0x0 {empty})"
