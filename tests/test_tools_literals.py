"""Values as families spell them, read from a text: what each means, and what is refused."""

from __future__ import annotations

import pytest

from ds4cli.tools import Refused
from ds4cli.tools.literals import (
    APOSTROPHE,
    BARE,
    CALLS,
    ESCAPED,
    JSON,
    LOOSE,
    MAX_DEPTH,
    PYTHON,
    LiteralReader,
    read_literal,
)


@pytest.mark.parametrize(
    ("syntax", "text", "value"),
    [
        (PYTHON, " 'a' ", "a"),
        (PYTHON, '"it\'s"', "it's"),
        (PYTHON, r"'\'\"\\\/'", "'\"\\/"),
        (PYTHON, r"'\n\t\r\b\f'", "\n\t\r\b\f"),
        (PYTHON, "'a\\\nb'", "ab"),
        (PYTHON, r"'\x41\u00e9\U0001F642'", "Aé🙂"),
        (PYTHON, r"'\ud83d\ude42'", "🙂"),
        (PYTHON, r"'\ud83d'", "\ufffd"),
        (PYTHON, r"'\U00110000'", "\ufffd"),
        (PYTHON, r"'\U0010FFFF'", "\U0010ffff"),
        (PYTHON, r"'\d\x4'", "\\d\\x4"),
        (PYTHON, "True", True),
        (PYTHON, "false", False),
        (PYTHON, "None", None),
        (PYTHON, "-1.5e3", -1500.0),
        (PYTHON, "[1, 'a', [],]", [1, "a", []]),
        (PYTHON, "[]", []),
        (PYTHON, "{'a': 1, \"b\" : {'c': [None]},}", {"a": 1, "b": {"c": [None]}}),
        (PYTHON, "{}", {}),
        (CALLS, "'rock'n'roll'", "rock'n'roll"),
        (CALLS, "['it's', 'b']", ["it's", "b"]),
        (BARE, '{k: <|"|>a"\\n}<|"|>, l m:[1]}', {"k": 'a"\\n}', "l m": [1]}),
        (BARE, '<|"|><|"|>', ""),
        (ESCAPED, "True", True),
        (LOOSE, "New York", "New York"),
        (LOOSE, "[True, 1]", [True, 1]),
        (JSON, '"\\u00e9"', "é"),
    ],
)
def test_what_a_spelling_means(syntax, text, value):
    """A call whose arguments are other ones than its model wrote."""
    found = read_literal(text, syntax)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("syntax", "text", "said"),
    [
        (PYTHON, "'a", "a string is never closed"),
        (PYTHON, "'a\\", "a string is never closed"),
        (PYTHON, "'it's'", "unexpected text after a value: `s'`"),
        (PYTHON, "1 2", "neither quoted nor JSON"),
        (PYTHON, "", "expected a value"),
        (PYTHON, "word", "`word` is neither quoted nor JSON"),
        (PYTHON, "[1 2]", "neither quoted nor JSON"),
        (PYTHON, "['a' 'b']", "expected `,` or `]` at `'b']`"),
        (PYTHON, "[,1]", "expected a value at `,1]`"),
        (PYTHON, "['a',,]", "expected a value"),
        (PYTHON, "{'a': 'b' 'c': 1}", "expected `,` or `}` at `'c': 1}`"),
        (PYTHON, "{a: 1}", "expected an argument's name at `a: 1}`"),
        (PYTHON, "{'a' 1}", "`a` has no value"),
        (PYTHON, "{'a': 1, 'a': 2}", "`a` is given twice"),
        (PYTHON, "{'a': 1", "expected"),
        (BARE, "{a b}", "expected an argument's name"),
        (BARE, "'a'", "neither quoted nor JSON"),
        (CALLS, "'it' s'", "unexpected text after a value"),
        (JSON, "True", "neither quoted nor JSON"),
    ],
)
def test_what_spells_nothing_is_refused(syntax, text, said):
    """Damage with more than one reading is guessed at."""
    with pytest.raises(Refused) as raised:
        read_literal(text, syntax)
    assert said in str(raised.value)


def test_how_deep_a_value_may_be():
    """A text of brackets overflowed the stack."""
    for opens, closes in ("[]", ("{'a':", "}")):
        text = opens * MAX_DEPTH + "1" + closes * MAX_DEPTH
        assert read_literal(text, PYTHON)
        with pytest.raises(Refused, match="nested too deeply"):
            read_literal(opens + text + closes, PYTHON)


def calls(text, syntax=CALLS, known=()):
    reader = LiteralReader(text, syntax)
    return reader.calls(lambda name: {*known}), reader.notes, reader.rest()


def test_calls_as_code():
    """Guards: a call that is lost, and names that are cut."""
    assert calls("[f(), g.h-1$( a = 1 , b-c='x' ) ] tail") == (
        [("f", {}), ("g.h-1$", {"a": 1, "b-c": "x"})],
        [],
        " tail",
    )
    assert calls("[]") == ([], [], "")
    assert calls("[f(a='b=c')]")[0] == [("f", {"a": "b=c"})]
    assert calls("[f(a b=1, a=2, a b c=3)]", known=["a", "a b", "a b c"])[0] == [
        ("f", {"a b": 1, "a": 2, "a b c": 3})
    ]
    assert calls("[f(a='it's', b='rock'n'roll')]")[1] == [APOSTROPHE], "it is said once"
    found, notes, rest = calls("[f(a=1)  ")
    assert (found, notes, rest.strip()) == ([("f", {"a": 1})], ["the closing `]` was missing"], "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f()", "expected a list of calls at `f()`"),
        ("[f() g()]", "expected `,` or `]` at `g()]`"),
        ("[f]", "each call must be `name(key=value, ...)`, not `f]`"),
        ("[f(1)]", "expected `name=value` at `1)]`"),
        ("[f(a==1)]", "expected `name=value` at `a==1)]`"),
        ("[f(a b=1)]", "expected `name=value`"),
        ("[f(a='1' b=2)]", "expected `,` or `)` at `b=2)]`"),
        ("[f(a=1, a=2)]", "`a` is given twice"),
        ("[f(a=open('x'))]", "`open` is neither quoted nor JSON"),
    ],
)
def test_code_that_is_no_call_is_refused(text, said):
    """An expression that is run, or half a call."""
    with pytest.raises(Refused) as raised:
        calls(text)
    assert said in str(raised.value)


def test_values_inside_quotes_may_not_hold_these():
    """A text within a quoted value ended the value."""
    inner = LOOSE.inside("'")
    assert (inner.quotes, inner.never, inner.true) == (('"',), "'", PYTHON.true)
    free = ESCAPED.inside("<escape>")
    assert (free.quotes, free.never) == (PYTHON.quotes, "") and free.name != inner.name
    assert PYTHON.spellings(True) == ("True", "true") and ESCAPED.spellings(None)[0] == "null"
    assert PYTHON.spellings(False)[0] == "False"
    assert JSON.words == {"true": True, "false": False, "null": None}
