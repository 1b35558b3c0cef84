"""Whether a value fits a JSON Schema: of each keyword what it lets pass and what it refuses."""

from __future__ import annotations

import pytest

from ds4cli.tools import checking
from ds4cli.tools.checking import Invalid, check
from ds4cli.tools.schema import MAX_DEPTH

LOOP = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}}
PAIR = {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}
NAMED = {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
OPEN = {
    "properties": {"a": {"type": "string"}},
    "patternProperties": {"^x": {}, "^y": {"type": "null"}},
    "additionalProperties": {"type": "integer"},
}
WHEN = {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 2}}


@pytest.mark.parametrize(
    ("schema", "fit", "unfit"),
    [
        (True, ["anything", None], []),
        (False, [], [1, None]),
        ({}, [1], []),
        ({"type": "integer"}, [3, 3.0], [True, 3.5, "3"]),
        ({"type": "number"}, [3.5], ["3"]),
        ({"type": ["string", "null"]}, [None, "a"], [1]),
        ({"type": "string", "nullable": True}, [None, "a"], [1]),
        ({"type": "string", "nullable": False}, ["a"], [None]),
        ({"enum": [1, "a", [1, {"b": 2}]]}, [1, 1.0, "a", [1, {"b": 2.0}]], [True, "b", [1], [2]]),
        ({"enum": [{"a": 1}]}, [{"a": 1}], [{"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {"a": True}]),
        ({"enum": [[1, 2]]}, [[1, 2]], [[1], [1, 3], [3, 2], [1, 2, 3], [True, 2]]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}, None]),
        ({"const": "ab"}, ["ab"], ["a", 1]),
        ({"properties": {"a": {"type": "string"}}}, [{"a": ""}, {"b": 1}, {}, 1], [{"a": 1}]),
        ({"properties": {"b": {}, "a": False}}, [{"b": 1}], [{"b": 1, "a": 1}]),
        (NAMED, [{"xy": 1}, {}, "z", 1], [{"xy": "a"}, {"y": 1}, {"xy": 1, "y": 1}]),
        (OPEN, [{"a": "1", "x": "1", "y": None, "z": 1}], [{"a": 1}, {"y": 1}, {"x": 1, "z": "1"}]),
        ({"additionalProperties": False}, [{}, 1], [{"a": 1}]),
        ({"required": ["a", "b"]}, [{"a": 1, "b": 1}, "a"], [{}, {"a": 1}, {"b": 1}]),
        (PAIR, [["a", 1, 2], [], ["a"], "ab"], [[1], ["a", "b"], ["a", 1, "b"]]),
        ({"prefixItems": [{"type": "null"}]}, [[None, 1]], [[1]]),
        ({"properties": {"a": {"items": {"minLength": 2}}}}, [{"a": ["ab"]}], [{"a": ["ab", "c"]}]),
        ({"uniqueItems": True}, [[1, 2, True], [], "aa"], [[1, 1], [1, 2, 1], [2, 1, 1.0]]),
        ({"uniqueItems": False}, [[1, 1]], []),
        ({"contains": {"const": 1}}, [[2, 1], [1, 1], "a"], [[2], []]),
        ({"contains": {"const": 1}, "minContains": 2}, [[1, 1]], [[1], [1, 2]]),
        ({"contains": {"const": 1}, "maxContains": 2}, [[1, 1]], [[1, 1, 1], []]),
        ({"contains": {"const": 1}, "minContains": 0}, [[], [2]], []),
        ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}, "abc", 1], [{"ab": 1, "abc": 1}]),
        ({"dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}, {"c": 1}, 1], [{"a": 1}]),
        (
            {"dependentSchemas": {"c": {}, "a": {"required": ["b"]}}},
            [{"a": 1, "b": 1}, {"c": 1}, ["a"], 1],
            [{"a": 1}, {"a": 1, "c": 1}],
        ),
        (WHEN, ["ab", 2], ["a", 1]),
        ({"if": {"type": "string"}}, ["a", 1], []),
        ({"if": {"type": "string"}, "else": False}, ["a"], [1]),
        ({"maxLength": 10**400}, ["a"], []),
        ({"minLength": 2, "maxLength": 3}, ["ab", "abc", [1]], ["a", "abcd"]),
        ({"minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3], "a"], [[1], [1, 2, 3, 4]]),
        (
            {"minProperties": 1, "maxProperties": 2},
            [{"a": 1}, {"a": 1, "b": 2}, ""],
            [{}, {"a": 1, "b": 2, "c": 3}],
        ),
        ({"minimum": 1, "maximum": 3}, [1, 3, "9", True], [0.9, 3.1]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2, 1.1, 2.9], [1, 3]),
        ({"exclusiveMinimum": True, "minimum": 1}, [1], [0]),
        ({"multipleOf": 0.1}, [0.3, 0, -0.7, "a"], [0.35]),
        ({"multipleOf": 3}, [6], [7, 1]),
        ({"multipleOf": 5e-324}, [], [1.5]),
        ({"pattern": "^a$"}, ["a", 1], ["b", "ab"]),
        ({"pattern": r"^\w\s$"}, ["a\u00a0", "é "], ["--"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ["a", 1], ["ab"]),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, ["a", None], [1]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [3, 0]),
        ({"not": {"type": "string"}}, [1], ["a"]),
        (LOOP, [{"n": {"n": {}}}], []),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, [], [1]),
        ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}}, ["a"], [1]),
        ({"anyOf": [{"$ref": "#/$defs/s"}], "$defs": {"s": {"type": "string"}}}, ["a"], [1]),
        ({"$ref": "other.json"}, [1], []),
        ({"format": "date", "unheard": 1}, ["a"], []),
    ],
)
def test_what_fits_a_schema(schema, fit, unfit):
    """A right value is refused, or a wrong one reaches the tool."""
    for value in fit:
        check(value, schema)
    for value in unfit:
        with pytest.raises(Invalid):
            check(value, schema)
    assert [checking.is_valid(v, schema, schema) for v in fit + unfit] == [True] * len(fit) + [
        False
    ] * len(unfit)


@pytest.mark.parametrize(
    ("schema", "value", "where"),
    [
        ({"items": {"minLength": 2}}, ["ab", "c"], r"^value\[1\] has length 1, minLength is 2$"),
        ({"properties": {"a": {"items": {"type": "null"}}}}, {"a": [1]}, r"^value\.a\[0\] must"),
        ({"patternProperties": {"": {"const": 1}}}, {"b": 2}, r"^value\.b must"),
        ({"additionalProperties": {"const": 1}}, {"b": 2}, r"^value\.b must"),
        ({"properties": {"a": {"allOf": [{"const": 1}]}}}, {"a": 2}, r"^value\.a must"),
        ({"properties": {"a": {"if": True, "then": {"const": 1}}}}, {"a": 2}, r"^value\.a must"),
        (
            {"properties": {"a": {"dependentSchemas": {"b": {"const": 1}}}}},
            {"a": {"b": 2}},
            "^v.+a ",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": 1}}},
            {"a": 2},
            "a ",
        ),
        ({"propertyNames": {"maxLength": 1}}, {"ab": 2}, r"^a name in value has length 2"),
    ],
)
def test_it_says_where(schema, value, where):
    """`invalid arguments` without the place."""
    with pytest.raises(Invalid, match=where):
        check(value, schema)


def test_as_deep_as_it_may_go():
    """Guards: a schema that goes round without end overflows, or one that ends is refused."""

    def nested(levels):
        return {"allOf": [nested(levels - 1)]} if levels else {"type": "object"}

    check({}, nested(MAX_DEPTH))
    with pytest.raises(Invalid, match="nested"):
        check({}, nested(MAX_DEPTH + 1))


def test_the_only_values_a_schema_allows():
    """A constant that the rest of the schema rules out is offered, or one with parts."""
    root = {"$defs": {"e": {"enum": ["a", 1, None], "type": ["string", "null"]}}}
    assert checking.plain_constants({"$ref": "#/$defs/e"}, root) == ["a", None]
    assert checking.plain_constants({"const": 3, "enum": [1]}, {}) == [3]
    assert checking.plain_constants({"enum": ["a", ["b"]]}, {}) == []
    assert checking.plain_constants({"enum": ["a", {}]}, {}) == []
    assert checking.plain_constants({"type": "string"}, {}) == []
    texts = {"enum": ["a", 1], "$ref": "#/$defs/s", "properties": {}}
    assert checking.plain_constants(texts, {"$defs": {"s": {"type": "string"}}}) == ["a"]


def test_what_nobody_checks_is_named():
    """Guards: a keyword is ignored and nobody says so."""
    schema = {
        "title": "t",
        "minLength": 1,
        "unevaluatedItems": False,
        "properties": {"a": {"contentSchema": {}, "if": {}, "then": {}, "minContains": 1}},
        "$defs": {},
    }
    assert checking.unchecked(schema) == ["unevaluatedItems", "properties.a.contentSchema"]
    words = ("pattern", "then", "maxContains", "unevaluatedItems", "title")
    assert [checking.is_checked(word) for word in words] == [True, True, True, False, False]
