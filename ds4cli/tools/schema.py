"""JSON Schema, the part that tool declarations use: what a schema says, and what is no schema.

A subset of draft 2020-12, with the list form of `items` and `nullable` of older ones. `format` is
an annotation everywhere. Whether a value fits is `checking.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
SUBSCHEMA_MAPS = (*("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"),)
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXT_LIMITS = ("pattern", "minLength", "maxLength")
MAX_DEPTH = 200


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "number": is_number,
    "integer": lambda v: is_number(v) and float(v).is_integer(),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that `schema` can allow at its top; all of them when it does not say."""
    root = schema if root is None else root
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return frozenset(TYPES)
    allowed = frozenset(TYPES)
    declared = schema.get("type")
    if declared is not None:
        names = {declared} if isinstance(declared, str) else set(declared)
        names |= {"integer"} if "number" in names else set()
        allowed &= names | ({"null"} if schema.get("nullable") is True else set())
    for literal in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if literal is not None:
            allowed &= {t for t, is_type in TYPES.items() if any(is_type(v) for v in literal)}
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


def _not_null(schema: Any, root: Any) -> dict[str, Any]:
    """What a schema says that may be a reference, or the only alternative to null."""
    root = schema if root is None else root
    schema = followed(schema, root)
    says = schema.keys() & {"properties", "items", "prefixItems"}
    ways = () if says else schema.get("anyOf") or schema.get("oneOf") or ()
    others = [way for way in ways if types_of(way, root) != {"null"}]
    return followed(others[0], root) if len(others) == 1 else schema


def property_of(schema: Any, key: str, root: Any = None) -> Any:
    """The schema of the member `key` of an object."""
    schema = _not_null(schema, root)
    more = schema.get("additionalProperties")
    return schema.get("properties", {}).get(key, more if isinstance(more, dict) else {})


def nullable(schema: Any, root: Any = None) -> list[str]:
    """The members that an object must have and that may be null."""
    root = schema if root is None else root
    schema = _not_null(schema, root)
    names = [name for name in schema.get("required", ()) if name in schema.get("properties", {})]
    return [n for n in names if "null" in types_of(schema["properties"][n], root)]


def items_of(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of a list's first items, and that of all others."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def item_of(schema: Any, index: int, root: Any = None) -> Any:
    """The schema of an item of a list."""
    first, others = items_of(_not_null(schema, root))
    return first[index] if index < len(first) else others


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
        for word in SUBSCHEMA_MAPS:
            if isinstance(node.get(word), dict):
                children += [(f"{where}.{word}.{key}", s) for key, s in node[word].items()]
        stack.extend(reversed(children))


def lost_references(schema: Any) -> list[str]:
    """The references that lead nowhere inside `schema`: a check passes what they ask for."""
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
    if not isinstance(names, list) or not all(isinstance(n, str) and n in TYPES for n in names):
        yield "type", f"unknown type `{json.dumps(declared)}`"
    yield from ((w, "must be an object") for w in SUBSCHEMA_MAPS if not _is(dict, node, w))
    yield from ((w, "must be a list") for w in _LISTS if not _is(list, node, w))
    yield from (
        (w, "must be a number") for w in NUMBER_LIMITS if w in node and not is_number(node[w])
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
    is_whole = isinstance(value, int) or (is_number(value) and value.is_integer())
    return is_whole and is_number(value) and value >= 0


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
    for word in SUBSCHEMA_MAPS:
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
