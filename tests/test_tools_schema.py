"""What a JSON Schema says: types, references, parts, and what of it is none."""

from __future__ import annotations

import pytest

from ds4cli.tools import schema as s

ALL = set(s.TYPES)
ROOT = {
    "$defs": {
        "n": {"type": "integer"},
        "a/b~c": {"type": "null"},
        "loop": {"$ref": "#/$defs/loop"},
        "pair": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "list": [{"type": "string"}, {"type": "boolean"}],
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL),
        (True, ALL),
        (False, set()),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "nullable": False}, {"string"}),
        ({"enum": [1, "a", 2.5]}, {"integer", "number", "string"}),
        ({"enum": [1, "a"], "type": "string"}, {"string"}),
        ({"const": None}, {"null"}),
        ({"const": True, "enum": [True, 1]}, {"boolean"}),
        ({"$ref": "#/$defs/n"}, {"integer"}),
        ({"$ref": "#/nowhere"}, ALL),
        ({"$ref": "#/$defs/loop"}, ALL),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "string"}, False]}, {"string"}),
        ({"anyOf": [{}], "type": "null"}, {"null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, {"integer"}),
    ],
)
def test_types_that_a_schema_allows(schema, types):
    """A text that stood for a number, or a number that was a text."""
    assert s.types_of(schema, ROOT) == types


def test_a_schema_that_goes_round_has_an_end():
    """A stack that overflowed on a schema that refers to itself in all ways."""
    for word in ("anyOf", "oneOf", "allOf"):
        root = {"$defs": {"x": {word: [{"$ref": "#/$defs/x"}]}}}
        assert s.types_of({"$ref": "#/$defs/x"}, root) == ALL
    assert s.followed({"$ref": "#/$defs/loop"}, ROOT) == {}


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("#", ROOT),
        ("#/$defs/n", {"type": "integer"}),
        ("#/$defs/a~1b~0c", {"type": "null"}),
        ("#/$defs/list/1", {"type": "boolean"}),
        ("#/$defs/list/2", None),
        ("#/$defs/list/x", None),
        ("#/$defs/none", None),
        ("#/$defs/n/type/x", None),
        ("other#/$defs/n", None),
        (3, None),
    ],
)
def test_where_a_reference_leads(ref, found):
    assert s.resolve(ROOT, ref) == found


def test_parts_of_a_schema():
    """Guards: the schema of another member or item, and what is said behind a reference or null."""
    typed = {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "string"}}
    assert s.property_of(typed, "a") == {"type": "null"}
    assert s.property_of(typed, "b") == {"type": "string"}
    assert s.property_of({"additionalProperties": True}, "b") == {}
    pair = {"$ref": "#/$defs/pair"}
    for schema in (pair, {"anyOf": [{"type": "null"}, pair]}, {"oneOf": [pair]}):
        assert s.property_of(schema, "x", ROOT) == {"type": "integer"}
    several = {"anyOf": [pair, {"type": "object", "properties": {}}]}
    assert s.property_of(several, "x", ROOT) == {}, "it may be another one"
    own = {"properties": {"x": {"type": "string"}}, "anyOf": [pair]}
    assert s.property_of(own, "x", ROOT) == {"type": "string"}
    texts = {"items": {"type": "string"}, "anyOf": [{"items": {"type": "null"}}]}
    assert s.item_of(texts, 0) == {"type": "string"}
    first = {"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}}
    assert [s.item_of(first, i) for i in range(3)] == [{"const": 1}, {"const": 2}, {"const": 3}]
    old = {"items": [{"const": 1}], "additionalItems": {"const": 2}}
    assert [s.item_of(old, i) for i in range(2)] == [{"const": 1}, {"const": 2}]
    assert s.items_of({"items": [{}]}) == ([{}], True) and s.items_of({}) == ([], True)
    must = {
        "properties": {"a": {"type": ["null", "string"]}, "b": {"type": "string"}, "c": {}},
        "required": ["a", "b", "c", "d"],
    }
    assert s.nullable(must) == ["a", "c"] and s.nullable({"required": ["a"]}) == []
    assert s.nullable({"$ref": "#/$defs/m"}, {"$defs": {"m": must}}) == ["a", "c"]
    inner = {**ROOT, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    assert s.nullable(inner) == [] and s.nullable({"anyOf": [inner]}, ROOT) == []


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}, []),
        ({"minItems": 0, "maxItems": 10**400, "minLength": 2.0, "multipleOf": 0.5}, []),
        ({"items": [{}, True], "anyOf": [{}], "not": False, "pattern": "a+", "$ref": "#"}, []),
        ({"type": "text"}, ["type"]),
        ({"type": {}}, ["type"]),
        ({"type": ["string", 3]}, ["type"]),
        ({"properties": []}, ["properties"]),
        ({"anyOf": {}}, ["anyOf"]),
        ({"enum": "a"}, ["enum"]),
        ({"minimum": "3"}, ["minimum"]),
        ({"minimum": True}, ["minimum"]),
        ({"maxItems": -1}, ["maxItems"]),
        ({"maxItems": 1.5}, ["maxItems"]),
        ({"multipleOf": 0}, ["multipleOf"]),
        ({"multipleOf": 0.0}, ["multipleOf"]),
        ({"required": ["a", 3]}, ["required"]),
        ({"not": 3}, ["not"]),
        ({"items": 3}, ["items"]),
        ({"items": [3]}, ["items[0]"]),
        ({"allOf": [{}, "x"]}, ["allOf[1]"]),
        ({"properties": {"a": 3}}, ["properties.a"]),
        ({"pattern": "("}, ["pattern"]),
        ({"pattern": 3}, ["pattern"]),
        ({"patternProperties": {"(": {}}}, ["patternProperties.("]),
        ({"$ref": "#/x"}, ["$ref"]),
        ({"properties": {"a": {"items": [{"type": "x"}]}}}, ["properties.a.items[0].type"]),
    ],
)
def test_what_is_no_schema_is_named_by_its_place(schema, where):
    """A declaration with a mistake ended in a traceback, or was taken as it stood."""
    assert [path.lstrip(".") for path, _ in s.problems(schema)] == where


def test_references_that_lead_nowhere():
    """Guards: a check that passes what a lost reference asks for, in silence."""
    schema = {"a": 1, "properties": {"x": {"$ref": "#/a"}, "y": {"$ref": "other"}}, "$ref": "#/b"}
    assert sorted(s.lost_references(schema)) == ["#/b", "other"]
