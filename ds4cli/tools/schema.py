"""JSON Schema, the part that tool declarations use: checks a value, names what it does not check.

A subset of draft 2020-12, with the list form of `items` and `nullable` of older ones. `format` is
an annotation everywhere. `unchecked()` names every keyword that is neither checked nor a mere
annotation, so that nothing is ignored silently; `problems()` what is no schema at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import regex

ANNOTATIONS = frozenset(
    [
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "format",
        "nullable",
        "example",
        "strict",
        "x-guidance",
        "contentEncoding",
        "contentMediaType",
    ]
)
_SUBSCHEMA = (
    *("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames"),
    *("if", "then", "else"),
)
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_LISTS = (*_SUBSCHEMA_LISTS, "enum", "required")
_SUBSCHEMA_MAPS = (
    *("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"),
)
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
# Read by the rule of the keyword they stand beside.
_BESIDE = frozenset(["then", "else", "additionalItems", "minContains", "maxContains"])
NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXT_LIMITS = ("pattern", "minLength", "maxLength")
MAX_DEPTH = 200


class Invalid(ValueError):
    """The value does not satisfy the schema; the text says where and why."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "number": _is_number,
    "integer": lambda v: _is_number(v) and float(v).is_integer(),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that `schema` can allow at its top; all of them when it does not say."""
    root = schema if root is None else root
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return frozenset(_TYPES)
    allowed = frozenset(_TYPES)
    declared = schema.get("type")
    if declared is not None:
        names = {declared} if isinstance(declared, str) else set(declared)
        names |= {"integer"} if "number" in names else set()
        allowed &= names | ({"null"} if schema.get("nullable") is True else set())
    for literal in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if literal is not None:
            allowed &= {t for t, is_type in _TYPES.items() if any(is_type(v) for v in literal)}
    if "$ref" in schema and (target := resolve(root, schema["$ref"])) is not None:
        allowed &= types_of(target, root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            allowed &= frozenset().union(*(types_of(s, root, depth + 1) for s in schema[word]))
    for part in schema.get("allOf", ()):
        allowed &= types_of(part, root, depth + 1)
    return allowed


def resolve(root: Any, ref: str) -> Any:
    """What a local `#/...` reference points at, None when it points nowhere or outside."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node = root
    for part in filter(None, ref[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            return None
    return node


def followed(schema: Any, root: Any = None) -> dict[str, Any]:
    """What a schema that may be a mere reference says; {} where it is none."""
    root, seen = schema if root is None else root, set()
    while isinstance(schema, dict) and "$ref" in schema and "properties" not in schema:
        if schema["$ref"] in seen:
            return {}
        seen.add(schema["$ref"])
        schema = resolve(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def property_of(schema: Any, key: str, root: Any = None) -> Any:
    """The schema of the member `key` of an object."""
    schema = followed(schema, root)
    more = schema.get("additionalProperties")
    return schema.get("properties", {}).get(key, more if isinstance(more, dict) else {})


def nullable(schema: Any, root: Any = None) -> list[str]:
    """The members that an object must have and that may be null."""
    schema = followed(schema, root)
    root = schema if root is None else root
    names = [name for name in schema.get("required", ()) if name in schema.get("properties", {})]
    return [n for n in names if "null" in types_of(schema["properties"][n], root)]


def items_of(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of a list's first items, and that of all others."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def plain_constants(schema: Any, root: Any) -> list[Any]:
    """The only values that `schema` allows, if it lists them and none has parts."""
    schema = followed(schema, root)
    words = [schema["const"]] if "const" in schema else schema.get("enum", [])
    has_parts = any(isinstance(word, (dict, list)) for word in words)
    rest = {word: rule for word, rule in schema.items() if word not in ("enum", "const")}
    return [] if has_parts else [word for word in words if is_valid(word, rest, root)]


def walk(schema: Any, path: str = "") -> Iterator[tuple[str, dict]]:
    """Every sub-schema with its path, without following references."""
    stack = [(path, schema)]
    while stack:
        where, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield where, node
        children = [(f"{where}.{w}", node[w]) for w in _SUBSCHEMA if w in node]
        for word in (*_SUBSCHEMA_LISTS, "items"):
            if isinstance(node.get(word), list):
                children += [(f"{where}.{word}[{i}]", s) for i, s in enumerate(node[word])]
        for word in _SUBSCHEMA_MAPS:
            if isinstance(node.get(word), dict):
                children += [(f"{where}.{word}.{key}", s) for key, s in node[word].items()]
        stack.extend(reversed(children))


def unchecked(schema: Any) -> list[str]:
    """Paths of the keywords that `check` ignores and that are not annotations."""
    known = ANNOTATIONS | set(_RULES) | set(_SUBSCHEMA_MAPS) | _BESIDE
    return [f"{where}.{word}".lstrip(".") for where, node in walk(schema) for word in node
            if word not in known]  # fmt: skip


def is_checked(word: str) -> bool:
    """Whether `check` knows this keyword."""
    return word in _RULES or word in _BESIDE


def lost_references(schema: Any) -> list[str]:
    """The references that lead nowhere inside `schema`: `check` passes what they ask for."""
    refs = [node["$ref"] for _, node in walk(schema) if isinstance(node.get("$ref"), str)]
    return [ref for ref in refs if resolve(schema, ref) is None]


def problems(schema: Any) -> list[tuple[str, str]]:
    """(path, what is wrong) for each part of `schema` that is no schema at all."""
    found = []
    for where, node in walk(schema):
        found += [(f"{where}.{word}", what) for word, what in _wrong(node)]
        if "$ref" in node and resolve(schema, node["$ref"]) is None:
            found.append((f"{where}.$ref", f"`{node['$ref']}` points nowhere in this schema"))
    return found


def _wrong(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(keyword, what is wrong with it) in one schema, not in its parts."""
    declared = node.get("type", [])
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(n, str) and n in _TYPES for n in names):
        yield "type", f"unknown type `{json.dumps(declared)}`"
    yield from ((w, "must be an object") for w in _SUBSCHEMA_MAPS if not _is(dict, node, w))
    yield from ((w, "must be a list") for w in _LISTS if not _is(list, node, w))
    yield from (
        (w, "must be a number") for w in NUMBER_LIMITS if w in node and not _is_number(node[w])
    )
    yield from ((w, "must be a count") for w in _COUNTS if w in node and not _is_count(node[w]))
    if node.get("multipleOf") in (0, 0.0):
        yield "multipleOf", "must be more than 0"
    if any(not isinstance(key, str) for key in _listed(node, "required")):
        yield "required", "must be a list of names"
    for word, part in _parts(node):
        if not isinstance(part, (dict, bool)):
            yield word, "must be a schema"
    for word, pattern in _patterns(node):
        if not _compiles(pattern):
            yield word, "is not a regular expression"


def _is(kind: type, node: dict[str, Any], word: str) -> bool:
    return isinstance(node.get(word, kind()), kind)


def _is_count(value: Any) -> bool:
    # A whole number may have more digits than a float can hold.
    is_whole = isinstance(value, int) or (_is_number(value) and value.is_integer())
    return is_whole and _is_number(value) and value >= 0


def _listed(node: dict[str, Any], word: str) -> list[Any]:
    found = node.get(word)
    return found if isinstance(found, list) else []


def _parts(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything in a schema that must be a schema."""
    for word in _SUBSCHEMA:
        if word in node and not (word == "items" and isinstance(node[word], list)):
            yield word, node[word]
    for word in (*_SUBSCHEMA_LISTS, "items"):
        yield from ((f"{word}[{i}]", part) for i, part in enumerate(_listed(node, word)))
    for word in _SUBSCHEMA_MAPS:
        found = node.get(word)
        if isinstance(found, dict):
            yield from ((f"{word}.{key}", part) for key, part in found.items())


def _patterns(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if "pattern" in node:
        yield "pattern", node["pattern"]
    if isinstance(node.get("patternProperties"), dict):
        yield from ((f"patternProperties.{p}", p) for p in node["patternProperties"])


def _compiles(pattern: Any) -> bool:
    try:
        regex.compile(pattern)
    except (regex.error, TypeError):
        return False
    return True


def check(value: Any, schema: Any, root: Any = None, where: str = "", depth: int = 0) -> None:
    """Raise Invalid at the first place where `value` breaks `schema`."""
    root = schema if root is None else root
    if schema is True or schema == {}:
        return
    if schema is False:
        raise Invalid(f"{where or 'value'} is not allowed")
    if depth > MAX_DEPTH:
        raise Invalid(f"{where or 'value'} is nested more than {MAX_DEPTH} levels deep")
    for word, expected in schema.items():
        rule = _RULES.get(word)
        if rule is not None:
            rule(value, expected, schema, root, where or "value", depth + 1)


def is_valid(value: Any, schema: Any, root: Any, depth: int = 0) -> bool:
    try:
        check(value, schema, root, depth=depth)
    except Invalid:
        return False
    return True


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


def _type(value, expected, schema, root, where, depth):
    names = [expected] if isinstance(expected, str) else expected
    if not any(_TYPES[name](value) for name in names) and not (
        value is None and schema.get("nullable") is True
    ):
        raise Invalid(f"{where} must be {' or '.join(names)}, got {_short(value)}")


def _enum(value, expected, schema, root, where, depth):
    known = value in expected if isinstance(value, str) else any(_same(value, o) for o in expected)
    if not known:
        raise Invalid(f"{where} must be one of {_short(expected)}, got {_short(value)}")


def _const(value, expected, schema, root, where, depth):
    _enum(value, [expected], schema, root, where, depth)


def _properties(value, expected, schema, root, where, depth):
    if isinstance(value, dict):
        for key, sub in expected.items():
            if key in value:
                check(value[key], sub, root, f"{where}.{key}", depth)


def _pattern_properties(value, expected, schema, root, where, depth):
    for key in value if isinstance(value, dict) else ():
        for pattern, sub in expected.items():
            if _matches(pattern, key):
                check(value[key], sub, root, f"{where}.{key}", depth)


def _additional(value, expected, schema, root, where, depth):
    for key in value if isinstance(value, dict) else ():
        named = key in schema.get("properties", {}) or any(
            _matches(p, key) for p in schema.get("patternProperties", {})
        )
        if named:
            continue
        if expected is False:
            raise Invalid(f"{where} has no `{key}` in its schema")
        check(value[key], expected, root, f"{where}.{key}", depth)


def _required(value, expected, schema, root, where, depth):
    missing = [key for key in expected if key not in value] if isinstance(value, dict) else []
    if missing:
        raise Invalid(f"{where} lacks {', '.join(f'`{key}`' for key in missing)}")


def _items(value, expected, schema, root, where, depth):
    if isinstance(value, list):
        first, others = items_of(schema)
        for i, item in enumerate(value):
            check(item, first[i] if i < len(first) else others, root, f"{where}[{i}]", depth)


def _unique(value, expected, schema, root, where, depth):
    items = value if expected and isinstance(value, list) else []
    if any(_same(item, other) for i, item in enumerate(items) for other in items[:i]):
        raise Invalid(f"{where} repeats an item")


def _contains(value, expected, schema, root, where, depth):
    least, most = schema.get("minContains", 1), schema.get("maxContains", math.inf)
    if isinstance(value, list):
        count = sum(is_valid(item, expected, root, depth) for item in value)
        if not least <= count <= most:
            raise Invalid(f"{where} has {count} items of the kind it must contain")


def _size(kind, word, is_ok):
    def rule(value, expected, schema, root, where, depth):
        if isinstance(value, kind) and not is_ok(len(value), expected):
            raise Invalid(f"{where} has length {len(value)}, {word} is {expected}")

    return rule


def _bound(word, is_ok):
    def rule(value, expected, schema, root, where, depth):
        if _is_number(value) and _is_number(expected) and not is_ok(value, expected):
            raise Invalid(f"{where} is {_short(value)}, {word} is {expected}")

    return rule


def _multiple(value, expected):
    quotient = value / expected
    return math.isfinite(quotient) and abs(quotient - round(quotient)) < 1e-9


def _pattern(value, expected, schema, root, where, depth):
    if isinstance(value, str) and not _matches(expected, value):
        raise Invalid(f"{where} does not match `{expected}`")


def _names(value, expected, schema, root, where, depth):
    for key in value if isinstance(value, dict) else ():
        check(key, expected, root, f"a name in {where}", depth)


def _dependent_required(value, expected, schema, root, where, depth):
    for key, needed in expected.items() if isinstance(value, dict) else ():
        if key in value:
            _required(value, needed, schema, root, where, depth)


def _dependent_schemas(value, expected, schema, root, where, depth):
    for key, sub in expected.items() if isinstance(value, dict) else ():
        if key in value:
            check(value, sub, root, where, depth)


def _if(value, expected, schema, root, where, depth):
    word = "then" if is_valid(value, expected, root, depth) else "else"
    check(value, schema.get(word, True), root, where, depth)


def _any_of(value, expected, schema, root, where, depth):
    if not any(is_valid(value, sub, root, depth) for sub in expected):
        raise Invalid(f"{where} fits none of the {len(expected)} alternatives")


def _one_of(value, expected, schema, root, where, depth):
    count = sum(is_valid(value, sub, root, depth) for sub in expected)
    if count != 1:
        raise Invalid(f"{where} fits {count} of the alternatives, must fit exactly one")


def _all_of(value, expected, schema, root, where, depth):
    for sub in expected:
        check(value, sub, root, where, depth)


def _not(value, expected, schema, root, where, depth):
    if is_valid(value, expected, root, depth):
        raise Invalid(f"{where} is of a kind that is ruled out")


def _ref(value, expected, schema, root, where, depth):
    target = resolve(root, expected)
    if target is not None:
        check(value, target, root, where, depth)


_RULES = {
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
