"""The white space of a template's own calls, and what a grammar leaves open with no other."""

from __future__ import annotations

import pytest
import regex
from test_tools_detect import with_template
from toolkit import encode

from ds4cli.tools import FORMATS, require_format
from ds4cli.tools.detect import PROBE
from ds4cli.tools.grammar import Grammar
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
    "<tool_call>get_weather\t\n<arg_key>city</arg_key>\n\n<arg_value>Ulm</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
BAR = "\uff5c"
NEWLINES = {
    "glm47": GLM.replace("\t", "").replace("\n\n", "\n"),
    "hunyuan3": (
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>Ulm</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>"
    ),
    "deepseek_v3": (
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>"
        'get_weather\n```json\n{"city": "Ulm", "days": 3}\n```'
        f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>"
    ),
}
NEWLINES["laguna"] = NEWLINES["glm47"]
NEWLINES["longcat"] = regex.sub("(tool_call|arg_)", r"longcat_\1", NEWLINES["glm47"])


def within(name, *spaces):
    """The white space in a format's own patterns, one place each."""
    style = FORMATS[name].style
    return tuple(zip((style.key_close, style.name_close), ((s,) for s in spaces), strict=False))


FENCE = ((FORMATS["deepseek_v3"].style.between, ("\n", "\n")),)


@pytest.mark.parametrize(
    ("name", "drawn", "found"),
    [
        ("json_tools", JSON, OF_JSON),
        ("json_tools", 'get_weather {"city": "Ulm", "days": 3}', Layout()),
        ("xlam", COMPACT, Layout(("", ""), ("", ""))),
        ("pythonic", "[get_weather(city='Ulm',  days=3)]<|tool_call_end|>", Layout(("", "  "))),
        ("qwen3_coder", QWEN, Layout(lead="\n\n", gap="\r\n", tag="\n  ", pad="\t ")),
        ("glm47", GLM, Layout(gap="\n", tag="\n", within=within("glm47", "\n\n", "\t"))),
        ("deepseek_v3", NEWLINES["deepseek_v3"], Layout(tag="\n", within=FENCE)),
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
    assert [x.within for x in keyed] == [within("glm47", "\n\n", "\t")] * 2
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
        (r"/a[ \t\r\n]{0,4}<\/b[ \t\r\n]{1,4}c/", r"/a\x0a\x20<\/b\x09c/"),
        (r"/a[ \t\r\n]{0,4}c/", r"/a[ \t\r\n]{0,4}c/"),
        (f"/{ANY_TEXT}x/", rf"/\x0d{ANY_TEXT}x/"),
        ("a // b", "a b"),
    ],
)
def test_a_grammar_with_one_layout(lark, exact):
    """White space of which a grammar leaves a choice is never guessed."""
    own = Layout(
        (" ", "\n"),
        ("\t", "  "),
        " \n",
        "\n\n",
        tag="\n",
        pad="\r",
        within=((r"a[ \t\r\n]{0,4}</b[ \t\r\n]{1,4}c", ("\n ", "\t")),),
    )
    assert own.applied(lark) == exact


@pytest.mark.parametrize("name", NEWLINES)
def test_a_template_that_breaks_lines_is_guessed_to_the_end(name):
    """Guards: a newline between tags, behind a name or before a fence that is guessed twice, or not
    at all: every guess behind it is wrong."""
    call = NEWLINES[name]
    wrapper = with_template(name, call, name)
    grammar = Grammar(wrapper, require_format(wrapper), [PROBE])
    own, ids = grammar.forcing()[0], encode(wrapper, call)
    at = guessed = 0
    while at < len(ids):
        guesses = own.compute_ff_tokens()
        assert guesses == ids[at : at + len(guesses)], wrapper.decode(ids[:at])
        guessed, taken = guessed + len(guesses), guesses or ids[at : at + 1]
        assert own.try_consume_tokens(taken) == len(taken), wrapper.decode(ids[:at])
        at += len(taken)
    assert guessed > 0.8 * len(ids)
