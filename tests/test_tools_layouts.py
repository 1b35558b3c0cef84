"""The white space of a template's own calls, and what a grammar leaves open with no other."""

from __future__ import annotations

import pytest

from ds4cli.tools import FORMATS
from ds4cli.tools.lark import ANY_TEXT
from ds4cli.tools.layouts import Layout, layouts
from ds4cli.tools.values import SPACE

JSON = (
    '<tool_call> \n{"name": "get_weather", "arguments": '
    '{"city"\t:  "Ulm" ,\n"days":3}}\n\n</tool_call>'
)
COMPACT = '[{"name":"get_weather","arguments":{"city":"Ulm","days":3}}]'
OF_JSON = Layout((" ", "\n"), ("\t", "  "), " \n", "\n\n")
QWEN = (
    "<tool_call>\n\n<function=get_weather>\n<parameter=city>\t Ulm\n</parameter>\n  "
    "<parameter=days>\n3\n</parameter>\n</function>\r\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n\n<arg_value>Ulm</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "drawn", "found"),
    [
        ("json_tools", JSON, OF_JSON),
        ("json_tools", 'get_weather {"city": "Ulm", "days": 3}', Layout()),
        ("xlam", COMPACT, Layout(("", ""), ("", ""))),
        ("pythonic", "[get_weather(city='Ulm',  days=3)]<|tool_call_end|>", Layout(("", "  "))),
        ("qwen3_coder", QWEN, Layout(lead="\n\n", gap="\r\n", tag="\n  ", pad="\t ")),
        ("glm47", GLM, Layout(gap="\n", tag="\n", between="\n\n")),
    ],
)
def test_a_template_lays_out_its_calls(name, drawn, found):
    """Guesses in a layout that is not the template's are wrong from the first white space on."""
    assert Layout.of(FORMATS[name], drawn) == found


def test_what_stands_before_the_call_is_no_layout_of_it():
    """The declared tools, or an earlier call, are written otherwise."""
    fmt = FORMATS["json_tools"]
    before = '<tool_call>{"city":"Ulm","days":3}</tool_call>'
    assert Layout.of(fmt, before + "." * 80 + JSON) == OF_JSON
    behind = JSON.replace(" ,", ",").replace("<tool_call> \n", "<tool_call>" + " " * 55)
    assert Layout.of(fmt, behind).lead == " " * 55, "a marker is some way before the name"


def test_first_its_own_layout_and_then_without_white_space():
    """Guards: guesses for a model that writes compact JSON, whatever its template does."""
    fmt = FORMATS["json_tools"]
    assert layouts(fmt, JSON) == [OF_JSON, Layout(("", ""), ("", ""), " \n", "\n\n")]
    tagged = FORMATS["qwen3_coder"]
    tight = Layout(("", ""), ("", ""), "\n\n", "\r\n", "\n  ", "\t ")
    assert layouts(tagged, QWEN) == [Layout.of(tagged, QWEN), tight]
    keyed = layouts(FORMATS["glm47"], GLM)
    assert [x.between for x in keyed] == ["\n\n"] * 2
    assert layouts(fmt, COMPACT) == [Layout(("", ""), ("", ""))]


@pytest.mark.parametrize(
    ("lark", "exact"),
    [
        ('a WS? "," WS? b', 'a " ,\\n" b'),
        ('a WS? ":" WS? b', 'a "\\t:  " b'),
        ("WS? a", '"\\r" a'),
        ("a GAP? b", 'a "\\n\\n" b'),
        ("a LEAD? b", 'a " \\n" b'),
        (f"/({SPACE})?x/", r"/\x0ax/"),
        (r"/a[ \t\r\n]{0,4}b/", r"/a\x0a\x20b/"),
        (f"/{ANY_TEXT}x/", rf"/\x0d{ANY_TEXT}x/"),
        ("a // b", "a b"),
    ],
)
def test_a_grammar_with_one_layout(lark, exact):
    """White space of which a grammar leaves a choice is never guessed."""
    own = Layout((" ", "\n"), ("\t", "  "), " \n", "\n\n", tag="\n", pad="\r", between="\n ")
    assert own.applied(lark) == exact
