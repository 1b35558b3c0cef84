"""Whether a value fits a JSON schema, and which keywords nobody checks.

One rule a keyword. `unchecked()` names every keyword that has none and is no mere annotation, so
that nothing is ignored silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import regex

from ds4cli.tools.schema import (
    ANNOTATIONS,
    MAX_DEPTH,
    SUBSCHEMA_MAPS,
    TYPES,
    followed,
    is_number,
    items_of,
    resolve,
    walk,
)

# Read by the rule of the keyword they stand beside.
_BESIDE = frozenset(["then", "else", "additionalItems", "minContains", "maxContains"])


class Invalid(ValueError):
    """The value does not satisfy the schema; the text says where and why."""


@dataclass(frozen=True)
class Place:
    """Where a check stands. root: what references point into. where: the path of the value."""

    schema: Any
    root: Any
    where: str
    depth: int

    def check(self, value: Any, schema: Any, where: str) -> None:
        """Raise Invalid at the first place where `value`, found at `where`, breaks `schema`."""
        if schema is True or schema == {}:
            return
        if schema is False:
            raise Invalid(f"{where} is not allowed")
        if self.depth > MAX_DEPTH:
            raise Invalid(f"{where} is nested more than {MAX_DEPTH} levels deep")
        inside = Place(schema, self.root, where, self.depth + 1)
        for word, expected in schema.items():
            rule = _RULES.get(word)
            if rule is not None:
                rule(value, expected, inside)

    def is_valid(self, value: Any, schema: Any) -> bool:
        try:
            self.check(value, schema, self.where)
        except Invalid:
            return False
        return True


Rule = Callable[[Any, Any, Place], None]


def check(value: Any, schema: Any, where: str = "value") -> None:
    """Raise Invalid at the first place where `value` breaks `schema`."""
    Place(schema, schema, where, 0).check(value, schema, where)


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """Whether `value` fits `schema`, whose references point into `root`."""
    return Place(schema, root, "value", 0).is_valid(value, schema)


def plain_constants(schema: Any, root: Any) -> list[Any]:
    """The only values that `schema` allows, if it lists them and none has parts."""
    schema = followed(schema, root)
    words = [schema["const"]] if "const" in schema else schema.get("enum", [])
    has_parts = any(isinstance(word, (dict, list)) for word in words)
    rest = {word: rule for word, rule in schema.items() if word not in ("enum", "const")}
    return [] if has_parts else [word for word in words if is_valid(word, rest, root)]


def unchecked(schema: Any) -> list[str]:
    """Paths of the keywords that `check` ignores and that are not annotations."""
    known = ANNOTATIONS | set(_RULES) | set(SUBSCHEMA_MAPS) | _BESIDE
    return [f"{where}.{word}".lstrip(".") for where, node in walk(schema) for word in node
            if word not in known]  # fmt: skip


def is_checked(word: str) -> bool:
    """Whether `check` knows this keyword."""
    return word in _RULES or word in _BESIDE


def _matches(pattern: str, text: str) -> bool:
    """Expressions are ECMA's here and in grammars, where `\\w` is ASCII and `\\s` is not: either
    reading will do."""
    return any(regex.search(pattern, text, flag) for flag in (regex.ASCII, regex.UNICODE))


def _same(a: Any, b: Any) -> bool:
    """JSON equality: 1 is 1.0, true is not 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _type(value: Any, expected: Any, at: Place) -> None:
    names = [expected] if isinstance(expected, str) else expected
    if not any(TYPES[name](value) for name in names) and not (
        value is None and at.schema.get("nullable") is True
    ):
        raise Invalid(f"{at.where} must be {' or '.join(names)}, got {_short(value)}")


def _enum(value: Any, expected: Any, at: Place) -> None:
    known = value in expected if isinstance(value, str) else any(_same(value, o) for o in expected)
    if not known:
        raise Invalid(f"{at.where} must be one of {_short(expected)}, got {_short(value)}")


def _const(value: Any, expected: Any, at: Place) -> None:
    _enum(value, [expected], at)


def _properties(value: Any, expected: Any, at: Place) -> None:
    if isinstance(value, dict):
        for key, sub in expected.items():
            if key in value:
                at.check(value[key], sub, f"{at.where}.{key}")


def _pattern_properties(value: Any, expected: Any, at: Place) -> None:
    for key in value if isinstance(value, dict) else ():
        for pattern, sub in expected.items():
            if _matches(pattern, key):
                at.check(value[key], sub, f"{at.where}.{key}")


def _additional(value: Any, expected: Any, at: Place) -> None:
    for key in value if isinstance(value, dict) else ():
        named = key in at.schema.get("properties", {}) or any(
            _matches(p, key) for p in at.schema.get("patternProperties", {})
        )
        if named:
            continue
        if expected is False:
            raise Invalid(f"{at.where} has no `{key}` in its schema")
        at.check(value[key], expected, f"{at.where}.{key}")


def _required(value: Any, expected: Any, at: Place) -> None:
    missing = [key for key in expected if key not in value] if isinstance(value, dict) else []
    if missing:
        raise Invalid(f"{at.where} lacks {', '.join(f'`{key}`' for key in missing)}")


def _items(value: Any, expected: Any, at: Place) -> None:
    if isinstance(value, list):
        first, others = items_of(at.schema)
        for i, item in enumerate(value):
            at.check(item, first[i] if i < len(first) else others, f"{at.where}[{i}]")


def _unique(value: Any, expected: Any, at: Place) -> None:
    items = value if expected and isinstance(value, list) else []
    if any(_same(item, other) for i, item in enumerate(items) for other in items[:i]):
        raise Invalid(f"{at.where} repeats an item")


def _contains(value: Any, expected: Any, at: Place) -> None:
    least, most = at.schema.get("minContains", 1), at.schema.get("maxContains", math.inf)
    if isinstance(value, list):
        count = sum(at.is_valid(item, expected) for item in value)
        if not least <= count <= most:
            raise Invalid(f"{at.where} has {count} items of the kind it must contain")


def _size(kind: type[Sized], word: str, is_ok: Callable[[Any, Any], bool]) -> Rule:
    def rule(value: Any, expected: Any, at: Place) -> None:
        if isinstance(value, kind) and not is_ok(len(value), expected):
            raise Invalid(f"{at.where} has length {len(value)}, {word} is {expected}")

    return rule


def _bound(word: str, is_ok: Callable[[Any, Any], bool]) -> Rule:
    def rule(value: Any, expected: Any, at: Place) -> None:
        if is_number(value) and is_number(expected) and not is_ok(value, expected):
            raise Invalid(f"{at.where} is {_short(value)}, {word} is {expected}")

    return rule


def _multiple(value: float, expected: float) -> bool:
    quotient = value / expected
    return math.isfinite(quotient) and abs(quotient - round(quotient)) < 1e-9


def _pattern(value: Any, expected: Any, at: Place) -> None:
    if isinstance(value, str) and not _matches(expected, value):
        raise Invalid(f"{at.where} does not match `{expected}`")


def _names(value: Any, expected: Any, at: Place) -> None:
    for key in value if isinstance(value, dict) else ():
        at.check(key, expected, f"a name in {at.where}")


def _dependent_required(value: Any, expected: Any, at: Place) -> None:
    for key, needed in expected.items() if isinstance(value, dict) else ():
        if key in value:
            _required(value, needed, at)


def _dependent_schemas(value: Any, expected: Any, at: Place) -> None:
    for key, sub in expected.items() if isinstance(value, dict) else ():
        if key in value:
            at.check(value, sub, at.where)


def _if(value: Any, expected: Any, at: Place) -> None:
    word = "then" if at.is_valid(value, expected) else "else"
    at.check(value, at.schema.get(word, True), at.where)


def _any_of(value: Any, expected: Any, at: Place) -> None:
    if not any(at.is_valid(value, sub) for sub in expected):
        raise Invalid(f"{at.where} fits none of the {len(expected)} alternatives")


def _one_of(value: Any, expected: Any, at: Place) -> None:
    count = sum(at.is_valid(value, sub) for sub in expected)
    if count != 1:
        raise Invalid(f"{at.where} fits {count} of the alternatives, must fit exactly one")


def _all_of(value: Any, expected: Any, at: Place) -> None:
    for sub in expected:
        at.check(value, sub, at.where)


def _not(value: Any, expected: Any, at: Place) -> None:
    if at.is_valid(value, expected):
        raise Invalid(f"{at.where} is of a kind that is ruled out")


def _ref(value: Any, expected: Any, at: Place) -> None:
    target = resolve(at.root, expected)
    if target is not None:
        at.check(value, target, at.where)


_RULES: dict[str, Rule] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "required": _required,
    "items": _items,
    "prefixItems": _items,
    "uniqueItems": _unique,
    "contains": _contains,
    "propertyNames": _names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "if": _if,
    "minLength": _size(str, "minLength", lambda n, limit: n >= limit),
    "maxLength": _size(str, "maxLength", lambda n, limit: n <= limit),
    "minItems": _size(list, "minItems", lambda n, limit: n >= limit),
    "maxItems": _size(list, "maxItems", lambda n, limit: n <= limit),
    "minProperties": _size(dict, "minProperties", lambda n, limit: n >= limit),
    "maxProperties": _size(dict, "maxProperties", lambda n, limit: n <= limit),
    "minimum": _bound("minimum", lambda v, limit: v >= limit),
    "maximum": _bound("maximum", lambda v, limit: v <= limit),
    "exclusiveMinimum": _bound("exclusiveMinimum", lambda v, limit: v > limit),
    "exclusiveMaximum": _bound("exclusiveMaximum", lambda v, limit: v < limit),
    "multipleOf": _bound("multipleOf", _multiple),
    "pattern": _pattern,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "allOf": _all_of,
    "not": _not,
    "$ref": _ref,
}
