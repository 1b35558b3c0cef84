"""Damaged JSON: what it is read as and what is said of that, and what is refused."""

from __future__ import annotations

import pytest

from ds4cli.tools.mend import Refused, Unclosed, members, read, strict

COMMA, SINGLE = "a trailing comma was dropped", "single quotes were read as double quotes"
RAW = "a raw control character in a string was escaped"
DOUBLED = "a backslash that begins no JSON escape was doubled"


@pytest.mark.parametrize(
    ("text", "value", "notes"),
    [
        (' {"a": [1, 2]} tail', {"a": [1, 2]}, []),
        ('{"a": [1, 2 , ] , } tail', {"a": [1, 2]}, [COMMA]),
        ('{"a":1,"b":[2,"c"],} tail', {"a": 1, "b": [2, "c"]}, [COMMA]),
        ("[1, [2,],] tail", [1, [2]], [COMMA]),
        ('[1, "a,]" ,] tail', [1, "a,]"], [COMMA]),
        ("{'a': 'b\"c'} tail", {"a": 'b"c'}, [SINGLE]),
        ("{'a': 'it\\'s'} tail", {"a": "it's"}, [SINGLE]),
        ('{\'a\': "it\'s"} tail', {"a": "it's"}, [SINGLE]),
        ('{"a": "1\n2\r3\t4\x015"} tail', {"a": "1\n2\r3\t4\x015"}, [RAW]),
        (r'{"a": "C:\dir\file\x"} tail', {"a": "C:\\dir\file\\x"}, [DOUBLED]),
        (r'{"a": "\u00e9\u12", "b": 1,} tail', {"a": "é\\u12", "b": 1}, [DOUBLED, COMMA]),
        (r'{"a": "\"\\\/\b\f\n\r\t\u0041",} tail', {"a": '"\\/\b\f\n\r\tA'}, [COMMA]),
        (r'{"a": "\u00E9\u00g0",} tail', {"a": "é\\u00g0"}, [DOUBLED, COMMA]),
        (
            '{"a": True, "b": None, "c": [False]} tail',
            {"a": True, "b": None, "c": [False]},
            [f"`{a}` was read as `{b}`" for a, b in
             (("True", "true"), ("None", "null"), ("False", "false"))],
        ),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}, ["3 missing closing bracket(s) were added"]),
    ],
)  # fmt: skip
def test_what_has_one_reading_is_read(text, value, notes):
    """A call that is lost for a comma, or one that is changed without a word."""
    found = read(text)
    assert (found.value, found.notes) == (value, notes)
    assert found.rest == (" tail" if text.endswith("tail") else "")
    assert strict(found.text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "`a` is given twice"),
        ('{"b": 1, "a": 2, "a": 3,}', "`a` is given twice"),
        ('{"a": NaN}', "`NaN` is not JSON"),
        ('{"a": 1]', "not JSON: `]` closes nothing"),
        ("}", "not JSON: `}` closes nothing"),
        ("word", "not JSON: "),
        ('{"a" 1}', "not JSON: "),
        ("[" * 100_000, "nested too deeply to read"),
    ],
)
def test_what_has_none_or_several_is_refused(text, said):
    """Guards: a guess at what was meant."""
    with pytest.raises(Refused) as raised:
        read(text)
    assert str(raised.value).startswith(said) and not isinstance(raised.value, Unclosed)


@pytest.mark.parametrize("text", ['{"a": "b', "['it\\'s", '["a\\"'])
def test_a_string_that_does_not_end_is_no_damage(text):
    """Nobody knows where it was to end."""
    with pytest.raises(Unclosed, match="a string is never closed"):
        read(text)


def test_members_of_an_object():
    """Guards: the text of another member, or an end that is taken for one."""
    text = ' {"a" : [1,  2] ,\n"b\\"":{"c": "}"},"d": "x" }'
    assert list(members(text)) == [("a", "[1,  2]"), ('b"', '{"c": "}"}'), ("d", '"x"')]
    assert list(members("{}")) == list(members("{ }")) == []
