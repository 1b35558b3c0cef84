"""Which texts the rules of a value take: by schema, and by how a family spells values."""

from __future__ import annotations

import json
from functools import cache

import pytest
from llguidance import LLMatcher
from toolkit import tokenizer

from ds4cli.tools.grammar import vocabulary_for
from ds4cli.tools.literals import BARE, CALLS, ESCAPED, JSON, LOOSE, PYTHON
from ds4cli.tools.values import MAX_BITS, MAX_DEPTH, MAX_REPEATS, SPACE, Rules, Values


@cache
def vocabulary():
    return vocabulary_for(tokenizer(merged=()), "")


class Takes:
    """The rule of a schema's values. drawn: see `Rules`."""

    def __init__(self, schema, syntax=JSON, drawn=""):
        rules = Rules(drawn)
        self.values = Values(rules, syntax, schema, "x")
        rules.define("start", self.values.value(schema))
        rules.define("WS", f"/{SPACE}/")
        self.lines = rules.lines
        lark = '%llguidance {"no_forcing": true}\n' + "\n".join(rules.lines.values())
        self._matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not self._matcher.get_error(), self._matcher.get_error()

    def __call__(self, text):
        matcher, tokens = self._matcher.deep_copy(), vocabulary().tokenize_bytes(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def kinds(*names, **rest):
    return {"type": list(names) if len(names) > 1 else names[0], **rest}


ANY = ["null", "true", "-1.5e3", '"t"', "[]", '[1,"a",[{}]]', "{}", '{"a":1,"b":{"c":[null]}}']
INTEGER, TEXT, FLAG = kinds("integer"), kinds("string"), kinds("boolean")
TWO = {"x": INTEGER, "y": TEXT}
SCHEMAS = [
    ({}, ANY, ["", "nul", "[1,]", "{a:1}", "'t'", "[1 2]", '{"a" 1}', "01", "1.", ".5", "+1"]),
    (True, ANY, ["x"]),
    (TEXT, ['""', '"a b"', r'"\n\"\\"', '"é"', r'"\ud83d\ude00"', r'"\u00e9"'],
     ["a", "1", "null", '"', '"a', r'"\x"', '"\n"', r'"\ud83d"', r'"\ude00"', r'"\u00"']),
    (INTEGER, ["0", "-7", "10", "3.0", "3.00"], ["3.5", "1e3", "01", '"1"', "true", "--1"]),
    (kinds("number"), ["0", "3.5", "-1e9", "2E-3"], ["1.", '"1"', "null", "0x1"]),
    (kinds("integer", "number"), ["3.5"], ['"3"']),
    (FLAG, ["true", "false"], ["True", "null", "1"]),
    (kinds("null"), ["null"], ["None", "false", "nullnull"]),
    (kinds("integer", "null"), ["1", "null"], ["1.5", "true"]),
    (kinds("string", minLength=2, maxLength=3),
     ['"ab"', '"abc"'], ['"a"', '"abcd"', "ab", "12", "null"]),
    (kinds("string", pattern="^a+$"), ['"aa"'], ['"ab"', '""']),
    (kinds("integer", minimum=3, maximum=12), ["3", "12"], ["2", "13", "3.5"]),
    (kinds("number", exclusiveMinimum=0), ["0.5"], ["0", "-1"]),
    ({"const": "a b"}, ['"a b"'], ['"a"', "a b"]),
    ({"const": 3}, ["3", "3.0"], ["4", "3.5"]),
    ({"const": 3.0}, ["3", "3.0"], ["4"]),
    ({"const": 2.5}, ["2.5"], ["2", "2.50"]),
    ({"enum": ["é", None, True, 1]}, ['"é"', r'"\u00e9"', "null", "true", "1"], ['"e"', "false"]),
    # A constant with parts is left to the check.
    ({"enum": [[1]], "type": "array"}, ["[1]", "[2]"], ["1", "{}"]),
    ({"enum": [1, {}]}, ["1", "{}"], ["[]", "null", '"1"']),
    ({"anyOf": [INTEGER, {"const": "all"}]}, ["1", '"all"'], ['"some"', "1.5"]),
    ({"oneOf": [INTEGER, False]}, ["1"], ["null"]),
    ({"type": "object", "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
     ['{"x":1}', '{"y":1}'], ["[]"]),
    ({"type": "integer", "anyOf": [{"const": 3}, {"const": "a"}]}, ["3"], ["4"]),
    ({"type": "array", "items": INTEGER, "anyOf": [{"minItems": 1}]}, ["[1]"], ['["a"]']),
    ({"anyOf": [TEXT], "type": "string", "const": "a"}, ['"a"'], ['"b"']),
    ({"allOf": [INTEGER]}, ["1"], ['"a"']),
    ({"allOf": [kinds("number"), kinds("number", maximum=3)]}, ["3"], ["4"]),
    ({"allOf": [True]}, ANY, []),
    ({"not": TEXT}, ANY[:2], []),
    # Lists.
    (kinds("array"), ["[]", '[1, "a"]', "[ 1 ,2 ]"], ["[1,]", "[,1]", "{}", "[1"]),
    (kinds("array", items=INTEGER), ["[]", "[1]", "[1, 2, 3]"], ['["a"]', "[1, null]"]),
    (kinds("array", items=INTEGER, minItems=2), ["[1,2]", "[1,2,3]"], ["[]", "[1]"]),
    (kinds("array", items=INTEGER, maxItems=2), ["[]", "[1]", "[1,2]"], ["[1,2,3]"]),
    (kinds("array", items=INTEGER, minItems=1, maxItems=1), ["[1]"], ["[]", "[1,2]"]),
    (kinds("array", items=INTEGER, minItems=2, maxItems=3), ["[1,2]", "[1,2,3]"],
     ["[1]", "[1,2,3,4]"]),
    (kinds("array", items=INTEGER, maxItems=0), ["[]", "[ ]"], ["[1]"]),
    (kinds("array", items=False), ["[]"], ["[1]"]),
    (kinds("array", items=INTEGER, minItems=MAX_REPEATS + 2), ["[1]"], ["[]", '["a"]']),
    (kinds("array", items=INTEGER, maxItems=MAX_REPEATS + 2), [f"[{','.join('1' * 60)}]"], []),
    (kinds("array", items=INTEGER, minItems=MAX_REPEATS), [f"[{','.join('1' * 50)}]"],
     [f"[{','.join('1' * 49)}]"]),
    (kinds("array", prefixItems=[INTEGER, TEXT]), ["[]", "[1]", '[1,"a"]', '[1 , "a",null]'],
     ['["a"]', "[1,2]", '[,"a"]']),
    (kinds("array", prefixItems=[INTEGER, TEXT], items=False), ['[1,"a"]'], ['[1,"a",2]']),
    (kinds("array", prefixItems=[INTEGER, TEXT], items=FLAG), ['[1,"a",true]'], ['[1,"a",2]']),
    (kinds("array", prefixItems=[INTEGER, False]), ["[]", "[1]"], ["[1,2]"]),
    (kinds("array", items=[INTEGER], additionalItems=False), ["[1]"], ["[1,1]", '["a"]']),
    # Objects.
    (kinds("object"), ["{}", '{"a":1}', '{ "a" : 1 , "b" :2 }'], ["[]", "{a:1}", '{"a":1,}']),
    (kinds("object", properties=TWO),
     ["{}", '{"x":1}', '{"y":"a","x":1}', '{"z":[],"x":1,"w":2}', '{"xx":"a"}'],
     ['{"x":"a"}', '{"x":1,"x":2}', '{"y":1}', '{"z":}']),
    (kinds("object", properties=TWO, required=["y"]),
     ['{"y":"a"}', '{"x":1,"y":"a"}', '{"z":1,"y":"a"}'], ["{}", '{"x":1}', '{"z":1}']),
    (kinds("object", properties=TWO, required=["x", "y"], additionalProperties=False),
     ['{"x":1,"y":"a"}', '{"y":"a","x":1}'], ['{"x":1}', '{"y":"a"}', '{"x":1,"y":"a","z":1}']),
    (kinds("object", properties=TWO, additionalProperties=INTEGER), ['{"z":1}'], ['{"z":"a"}']),
    (kinds("object", patternProperties={"^a": INTEGER}, additionalProperties=False),
     ['{"a":1}'], ["[]"]),
    (kinds("object", properties={"x": False}), ['{"y":1}', "{}"], []),
    (kinds("object", properties={"x": False}, additionalProperties=False), ["{}"], ['{"x":1}']),
    (kinds("object", properties={}, additionalProperties=False), ["{}", "{ }"], ['{"x":1}']),
    (kinds("object", properties={'a"\\é': INTEGER}, additionalProperties=False),
     [r'{"a\"\\é":1}', r'{"a\"\\\u00e9":1}'], ['{"a":1}']),
    # References.
    ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, ["1"], ['"a"']),
    ({"$ref": "#/$defs/l", "$defs": {"l": kinds("array", items={"$ref": "#/$defs/l"})}},
     ["[]", "[[],[[]]]"], ["[1]", "1"]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ANY, []),
    (kinds("array", prefixItems=[{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/t"},
                                 {"$ref": "#/$defs/n"}], **{"$defs": {"n": INTEGER, "t": TEXT}}),
     ['[1,"a",2]'], ["[1,2]", '[1,"a","b"]', '["a"]']),
    ({"$ref": "#/$defs/never", "$defs": {"never": False}}, ANY, []),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(SCHEMAS)))
def test_json_of_a_schema(case):
    """A value that its schema allows is taken back, or one that it does not is let through."""
    schema, good, bad = SCHEMAS[case]
    takes = Takes(schema)
    assert [text for text in good if not takes(text)] == []
    assert [text for text in bad if takes(text)] == []


NESTED = kinds("object", properties={"k": {}, "a b": {}}, additionalProperties=False)
SPELLED = [
    (PYTHON, {}, ["True", "true", "None", "null", "'a'", '"a"', r"'\''", r"'it\'s'", "{'a': 1}"],
     ["a", "'it's'", "{a: 1}", "TRUE"]),
    (PYTHON, {"const": "it's"}, ['"it\'s"'], ["it's", "'it's'"]),
    (PYTHON, {"const": "a"}, ["'a'", '"a"'], ["a"]),
    (PYTHON, {"const": None}, ["None", "null"], ["none"]),
    (PYTHON, NESTED, ["{'k': 1}", '{"k": 1, \'a b\': 2}'], ["{k: 1}", "{'b': 1}"]),
    (PYTHON, TEXT, ["'a\nb'"], ["3"]),
    (PYTHON, kinds("string", maxLength=1), ["'ab'"], ["3"]),
    (PYTHON, kinds("object", properties=TWO), ["{'z': 1, 'x': 1}"], ["{'x': 'a'}"]),
    (CALLS, TEXT, ["'it's'", "'rock'n'roll'", '"it\'s"'], ["'it' s'", "a"]),
    (LOOSE, TEXT, ["'a'", "a", "New York", "it's"], ["", "a,b", "a=b", "a\nb", " a"]),
    (LOOSE, {"const": "a b"}, ["'a b'", '"a b"', "a b"], ["a"]),
    (LOOSE, {"const": "a,b"}, ["'a,b'"], ["a,b"]),
    (CALLS, {"const": "a"}, ["'a'"], ["a"]),
    (BARE, {}, ['<|"|>a"b<|"|>', "true", "{k:1}", '{k:<|"|>a<|"|>,<|"|>l<|"|>:[1]}', "null"],
     ['"a"', "a", '{"k":1}', "True"]),
    (BARE, {"const": "a"}, ['<|"|>a<|"|>'], ["a", '"a"']),
    (BARE, NESTED, ["{k:1}", '{<|"|>k<|"|>: 1,<|"|>a b<|"|>:2}'], ["{a b:1}", "{b:1}", "{'k':1}"]),
    (BARE, kinds("object", properties=TWO), ["{x:1,z:2}"], ["{x:z}"]),
    (ESCAPED, {"const": True}, ["true", "True"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(SPELLED)))
def test_other_spellings(case):
    """A family's own way to write a value is taken back as if it were wrong."""
    syntax, schema, good, bad = SPELLED[case]
    takes = Takes(schema, syntax)
    assert [text for text in good if not takes(text)] == []
    assert [text for text in bad if takes(text)] == []


def test_what_is_left_to_the_check_is_said_once():
    """Guards: a limit that nobody holds a value to until its call closes, in silence."""
    for schema, *said in (
        (kinds("array", uniqueItems=True, contains=INTEGER), "`uniqueItems` is", "`contains` is"),
        (kinds("array", uniqueItems=False),),
        (kinds("object", minProperties=1), "`minProperties` is"),
        (kinds("object", required=["x"]), "`required` of what is not declared is"),
        (kinds("object", properties=TWO, required=["x"]),),
        (kinds("object", maxProperties=1), "`maxProperties` is"),
        (kinds("object", propertyNames={}), "`propertyNames` is"),
        (kinds("object", patternProperties={"^a": INTEGER}), "`patternProperties` is"),
        (kinds("string", pattern="^(?=a)"), "`pattern` is"),
        (kinds("integer", minimum=5, maximum=3), "`maximum` is"),
        ({"allOf": [INTEGER, kinds("number")]}, "`allOf` is"),
        ({"allOf": [INTEGER]},),
        ({"type": "integer", "not": {"const": 1}}, "`not` is"),
        ({"type": "integer", "if": {"const": 1}}, "`if` is"),
        (kinds("object", properties=TWO, anyOf=[{}]), "`anyOf` is"),
        (kinds("object", properties=TWO, oneOf=[{}]), "`oneOf` is"),
        (kinds("object", properties=TWO, allOf=[{}]), "`allOf` is"),
        (kinds("integer", anyOf=[{"const": 3}]),),
        ({"const": 1, "type": "integer"},),
    ):
        assert Takes(schema).values.notes == [
            f"{what} checked when a call closes, not before" for what in said
        ]
    twice = {"anyOf": [kinds("object", minProperties=1), kinds("object", minProperties=2)]}
    assert len(Takes(twice).values.notes) == 1
    (note,) = Takes(kinds("string", maxLength=1), PYTHON).values.notes
    assert note.startswith("`maxLength` is")


def test_what_is_too_deep_is_any_value():
    """A schema that overflows the stack, or takes for ever to compile."""

    def nested(levels):
        schema = INTEGER
        for _ in range(levels):
            schema = kinds("array", items=schema)
        return Takes(schema), "[" * levels + "%s" + "]" * levels

    takes, text = nested(MAX_DEPTH)
    assert takes(text % "1") and not takes(text % '"a"') and takes.values.notes == []
    takes, text = nested(MAX_DEPTH + 1)
    assert takes(text % '"a"')
    assert takes.values.notes == [
        "values more than 40 levels deep are checked when a call closes, not before"
    ]


def test_members_beyond_the_bits_are_not_counted():
    """Guards: a tool with many arguments that no call fits."""
    many = {f"k{i}": INTEGER for i in range(MAX_BITS + 2)}
    takes = Takes(kinds("object", properties=many, required=["k61"], additionalProperties=False))
    assert takes('{"k61":1}') and takes('{"k0":1,"k61":1}') and not takes('{"k0":1}')
    assert not takes('{"k61":1,"k61":1}') and takes('{"k60":1,"k60":1,"k61":1}')


def test_values_between_quotes():
    """Values of a family that puts quotes around all of them."""
    listed = kinds("object", properties={"n": INTEGER, "l": kinds("array"), "s": TEXT, "d": NESTED})
    takes = Takes(listed, LOOSE)
    for text in ("'n': 1", "'n': '1'", "'n': \"1\"", "'l': '[1, \"a\"]'", "'s': '1'"):
        assert takes(f"{{{text}}}"), text
    for text in ("'n': '1\"", "'n': 'a'", "'n': '1.5'"):
        assert not takes(f"{{{text}}}"), text
    plain = Takes(listed, PYTHON)
    assert plain("{'n': 1}") and not plain("{'n': '1'}")


def test_a_drawn_call_has_one_spelling():
    """Guesses of what a template would not draw."""
    takes = Takes(kinds("object", properties=TWO, required=["y"]), PYTHON, drawn='{"city": "P"}')
    assert takes('{"x": 1, "y": "a"}') and takes('{"y": "a"}')
    for text in ('{"y": "a", "x": 1}', "{'y': \"a\"}", '{"x": 1}', '{"z": 1, "y": "a"}'):
        assert not takes(text), text
    single = Takes(kinds("object", properties=TWO), PYTHON, drawn="{'city': 'P'}")
    assert single("{'x': 1}") and single("{}") and not single('{"x": 1}')
    bare = Takes(NESTED, BARE, drawn="{city:1}")
    assert bare('{k:1,<|"|>a b<|"|>:2}') and not bare('{<|"|>k<|"|>:1}')
    rules = Rules(json.dumps({"city": 1}))
    assert rules.usual(["'city'", '"city"', "city"]) == ['"city"']
    assert rules.usual(["a", "b"]) == ["a"] and Rules().usual(["a", "b"]) == ["a", "b"]


def test_a_rule_is_written_once():
    """A grammar that grows with every use of the same value."""
    rules = Rules()
    assert rules.shared("a | b") == rules.shared("a | b") != rules.shared("c")
    assert rules.define("text[lazy]", "/a/") == "text" and rules.define("r::_", "a") == "r"
    assert rules.lines["text"] == "text[lazy]: /a/" and rules.lines["r"] == "r::_: a"
    one = Takes(kinds("array", items={}))
    several = Takes(kinds("array", prefixItems=[{}, {}, {}], items={}))
    assert len(one.lines) == len(several.lines)
