"""Parsing a call has three outcomes: valid, repaired with a note, refused with a reason."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import mlx_lm
import pytest
from toolkit import TOOLS, TYPED

from ds4cli.tools import FORMATS, Refused, Tool, parse_calls
from ds4cli.tools.formats import BAR
from ds4cli.tools.mend import members, read
from ds4cli.tools.parse import ParsedCall

PARSERS = Path(mlx_lm.__file__).parent / "tool_parsers"

# One good call of every format: get_weather with city "Paris".
BODIES = {
    "json_tools": '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n',
    "qwen3_coder": "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n",
    "glm47": "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
    "laguna": "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
    "longcat": "get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>Paris</longcat_arg_value>\n",
    "minimax_m2": '\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    "</invoke>\n",
    "muse_spark": '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris'
    "</atem:parameter>\n</atem:invoke>\n",
    "deepseek_v32": '\n<|DSML|invoke name="get_weather">\n<|DSML|parameter name="city" '
    'string="true">Paris</|DSML|parameter>\n</|DSML|invoke>\n'.replace("|", BAR),
    "seed_oss": "\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n",
    "hunyuan3": "\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
    "</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
    "</tool_call:opensource>\n",
    "deepseek_v4": '\n<|DSML|invoke name="get_weather">\n<|DSML|parameter name="city" '
    'string="true">Paris</|DSML|parameter>\n</|DSML|invoke>\n'.replace("|", BAR),
    "deepseek_v41": '\n<|DSML| invoke name="get_weather">\n<|DSML| parameter name="city" '
    'string="true">Paris</|DSML| parameter>\n</|DSML| invoke>\n'.replace("|", BAR),
    "minimax_m3": '\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>['
    "</city>]<]minimax[>[</invoke>\n",
    "minicpm5": '<function name="get_weather"><param name="city">Paris</param>',
    "kimi_k3": '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|>',
    "kimi_k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|>',
    "deepseek_v31": '<|tool▁call▁begin|>get_weather<|tool▁sep|>{"city": "Paris"}'
    "<|tool▁call▁end|>".replace("|", BAR),
    "deepseek_v3": '<|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n{"city": "Paris"}'
    "\n```<|tool▁call▁end|>".replace("|", BAR),
    "solar": "<|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>"
    '{"city": "Paris"}<|tool_call:end|>',
    "functionary_v31": 'get_weather>{"city": "Paris"}',
    "functionary_v32": 'get_weather\n{"city": "Paris"}',
    "tool_calls": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "nemotron_nano": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "granite3": '[\n    {\n        "name": "get_weather",\n        "arguments": {"city": "Paris"}'
    "\n    }\n]",
    "granite_20b": ' {"name": "get_weather", "arguments": {"city": "Paris"}}',
    "gigachat3": '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "gigachat3_role": '\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "internlm2": '\n{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "command_r7b": '[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"city": "Paris"}}\n]',
    "apertus": '[{"get_weather": {"city": "Paris"}}]',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "xlam": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "phi4_mini": '{"name": "get_weather", "arguments": {\'city\': \'Paris\'}}',
    "pythonic_bare": '[get_weather(city="Paris")]',
    "mistral": 'get_weather[ARGS]{"city": "Paris"}',
    "harmony": 'get_weather <|constrain|>json<|message|>{"city": "Paris"}',
    "gemma4": 'call:get_weather{city:<|"|>Paris<|"|>}',
    "function_gemma": "call:get_weather{city:<escape>Paris<escape>}",
    "pythonic": '[get_weather(city="Paris")]',
}
OWN = set(BODIES) - {path.stem for path in PARSERS.glob("*.py")}  # mlx-lm has no parser for these


def parse(name, body, tools=TOOLS):
    return parse_calls(FORMATS[name], body, tools)


def test_every_format_has_a_sample():
    """A format added without a test."""
    assert set(BODIES) == set(FORMATS)


@pytest.mark.parametrize("name", list(BODIES))
def test_a_good_call_is_valid_and_kept_as_written(name):
    """A correct call reported as repaired, refused, or re-serialised."""
    (call,) = parse(name, BODIES[name])
    assert (call.name, call.arguments, call.outcome) == (
        "get_weather",
        '{"city": "Paris"}',
        "valid",
    )


@pytest.mark.parametrize("name", [n for n in BODIES if n not in OWN])
def test_agrees_with_the_parser_of_mlx_lm(name):
    """A format written from memory: mlx-lm's parser must read the same name and arguments."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    start, end = FORMATS[name].beginnings[0], FORMATS[name].end
    assert (module.tool_call_start, module.tool_call_end) == (start, end)
    theirs = module.parse_tool_call(BODIES[name], [tool.spec for tool in TOOLS])
    theirs = theirs[0] if isinstance(theirs, list) else theirs
    assert (theirs["name"], theirs["arguments"]) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.parametrize("keep", [0.55, 0.8, 0.95])
def test_a_cut_call_is_never_half_a_call(name, keep):
    """A call cut anywhere that comes back with `{}` or half a value."""
    body = BODIES[name].rstrip()
    try:
        (call,) = parse(name, body[: int(len(body) * keep)])
    except Refused:
        return
    assert call.outcome == "repaired" or name in ("mistral", "harmony")
    assert json.loads(call.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("name", list(BODIES))
def test_undeclared_names_and_arguments_are_refused(name):
    """A tool or an argument that nobody declared is executed, or dropped in silence."""
    with pytest.raises(Refused, match="declared"):
        parse(name, BODIES[name].replace("get_weather", "get_wether"))
    with pytest.raises(Refused, match="town"):
        parse(name, BODIES[name].replace("city", "town"))


CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
JSON_REPAIRS = {
    "trailing comma": (CALL.replace('"}}', '",}}'), "trailing comma"),
    "single quotes": (CALL.replace('"', "'"), "single quotes"),
    "missing brace": (CALL[:-1], "missing closing"),
    "code fence": (f"```json\n{CALL}\n```", "fence"),
    "arguments as a string": (
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
        "string of JSON",
    ),
    "parameters": (CALL.replace("arguments", "parameters"), "parameters"),
    "nested in function": ('{"type": "function", "function": ' + CALL + "}", "nested"),
    "case of the name": (CALL.replace("get_w", "Get_W"), "was read as"),
    "stray bracket": (CALL + "}", "stray"),
    "another dialect": (BODIES["qwen3_coder"], "qwen3_coder"),
    "arg pairs": (BODIES["glm47"], "glm47"),
}


@pytest.mark.parametrize("case", list(JSON_REPAIRS))
def test_json_repairs_say_what_changed(case):
    """The request dies with JSONDecodeError on damage that has one reading only."""
    body, note = JSON_REPAIRS[case]
    (call,) = parse("json_tools", body)
    assert call.outcome == "repaired" and note in " ".join(call.notes)
    assert json.loads(call.arguments) == {"city": "Paris"}


def test_strings_damaged_inside():
    """`C:\\dir` and raw newlines, the two commonest ways to break a JSON string."""
    (call,) = parse("json_tools", CALL.replace("Paris", "C:\\dir\nx"))
    assert json.loads(call.arguments) == {"city": "C:\\dir\nx"}
    assert len(call.notes) == 2


def test_lists_and_sequences_are_several_calls():
    """A bare list, or two objects in one section, of which only the first survives."""
    for body in (f"[{CALL}, {CALL}]", f"{CALL}\n{CALL}", f"{CALL}, {CALL}"):
        assert [c.name for c in parse("json_tools", body)] == ["get_weather"] * 2


@pytest.mark.parametrize("name", ["json_tools", "internlm2", "mistral", "kimi_k2", "granite_20b"])
def test_arguments_are_kept_as_they_were_sampled(name):
    """What the model reads in the next turn is not what it wrote."""
    odd = '{ "city"  :"Paris" }'
    (call,) = parse(name, BODIES[name].replace('{"city": "Paris"}', odd))
    assert (call.arguments, call.outcome) == (odd, "valid")
    keyed = parse("apertus", f'{{"get_weather": {odd}}}')[0]
    assert (keyed.arguments, keyed.outcome) == (odd, "valid")


def test_calls_may_be_separated_by_their_marker():
    """The second call was text behind the first one."""
    call = BODIES["granite_20b"]
    for gap in ("<function_call>", ", <function_call>", " ;\n<function_call>", ",\n"):
        assert len(parse("granite_20b", call + gap + call)) == 2
    closed = BODIES["phi4_mini"] + "<|/tool_call|>"
    assert parse("phi4_mini", closed) == parse("phi4_mini", closed + "\n")
    assert len(parse("mistral", f"[{CALL}, {CALL}]")) == 2, "a list, where names stand outside"
    assert [c.name for c in parse("kimi_k2", BODIES["kimi_k2"] * 2)] == ["get_weather"] * 2


JSON_REFUSED = {
    "open string": CALL[:48],
    "no name": '{"arguments": {"city": "Paris"}}',
    "arguments a number": '{"name": "get_weather", "arguments": 3}',
    "arguments a plain string": '{"name": "get_weather", "arguments": "Paris"}',
    "duplicate key": CALL.replace('"Paris"', '"Rome", "city": "Paris"'),
    "empty arguments": '{"name": "get_weather", "arguments": {}}',
    "no arguments": '{"name": "get_weather"}',
    "arguments under two names": CALL[:-1] + ', "parameters": {"city": "Rome"}}',
    "a key beside them": CALL[:-1] + ', "mode": "fast"}',
    "NaN": '{"name": "get_weather", "arguments": {"city": NaN}}',
    "prose": "I would call get_weather here",
    "text behind": CALL + " and so on",
    "nothing": "  \n",
    "deep": '{"name": "get_weather", "arguments": ' + '{"city":' * 5000 + "1" + "}" * 5000 + "}",
}


@pytest.mark.parametrize("case", list(JSON_REFUSED))
def test_json_refusals(case):
    """Damage with more than one reading is guessed at."""
    with pytest.raises(Refused):
        parse("json_tools", JSON_REFUSED[case])


def test_a_value_that_contains_its_own_closing_tag_is_whole():
    """`</parameter>` inside a value cuts it."""
    body = BODIES["qwen3_coder"].replace("Paris", "a </parameter> b\n</parameter>c")
    (call,) = parse("qwen3_coder", body)
    assert json.loads(call.arguments) == {"city": "a </parameter> b\n</parameter>c"}


@pytest.mark.parametrize("name", ["glm47", "minimax_m2", "deepseek_v32", "minicpm5"])
def test_an_unclosed_value_is_refused(name):
    """An unclosed parameter silently gives `{}`."""
    style = FORMATS[name].style
    body = BODIES[name].replace(style.value_close, "")
    with pytest.raises(Refused, match="never closed"):
        parse(name, body)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47"])
def test_an_argument_that_is_given_twice_is_refused(name):
    """The later of two cities, or the earlier, was taken without a word."""
    body = BODIES[name]
    start, stop = {"qwen3_coder": ("<parameter", "</function"), "glm47": ("<arg_key", None)}[name]
    given = body[body.index(start) : stop and body.index(stop)]
    assert parse(name, body.replace(given, given))[0].outcome == "valid"
    with pytest.raises(Refused, match="`city` is given twice"):
        parse(name, body.replace(given, given + given.replace("Paris", "Rome")))


def test_a_last_value_without_its_tag_ends_where_the_call_does():
    """The value swallows the closing tags of the call."""
    body = BODIES["qwen3_coder"].replace("</parameter>\n", "")
    (call,) = parse("qwen3_coder", body)
    assert json.loads(call.arguments) == {"city": "Paris"} and "</parameter>" in call.notes[0]
    with pytest.raises(Refused, match="never closed"):
        parse("qwen3_coder", body.replace("</function>", ""))


def test_an_argument_ends_where_another_one_opens():
    """Two arguments became one text; or a text that shows an argument was cut there."""

    def given(inner):
        (call,) = parse("qwen3_coder", f"<function=typed>{inner}</function>", [TYPED])
        return json.loads(call.arguments), call.notes

    n, end = "<parameter=n>3</parameter>", "</parameter>"
    assert given(f"<parameter=s>one{n}") == (
        {"s": "one", "n": 3},
        ("`</parameter>` of `s` was missing",),
    )
    assert given(f"<parameter=s>one{end}{n}")[1] == ()
    for shown in ("<parameter=s>", "<parameter=other>", "<parameter=n"):
        assert given(f"<parameter=s>one {shown} two{end}{n}") == (
            {"s": f"one {shown} two", "n": 3},
            (),
        )
    assert given(f"{n}<parameter=s>one <parameter=n> two{end}")[0]["s"] == "one <parameter=n> two"
    value, (note,) = given("<parameter=l>[1, 2</parameter>")
    assert value == {"l": [1, 2]} and note.startswith("`l`: ") and "missing" in note


PAIR = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "y": {"type": ["string", "null"]},
        "next": {"$ref": "#/$defs/pair"},
    },
    "required": ["x", "y"],
}
PARTS = Tool(
    "parts",
    "",
    {
        "type": "object",
        "properties": {
            "pair": {"anyOf": [{"$ref": "#/$defs/pair"}, {"type": "null"}]},
            "pairs": {"type": "array", "items": {"$ref": "#/$defs/pair"}},
            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            "mixed": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
            "maybe": {"oneOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
            "counts": {"type": "array", "items": {"$ref": "#/$defs/count"}},
            "any": {"type": ["object", "array"]},
            "o": {"type": "object"},
            "loose": {"type": ["object", "string"]},
        },
        "$defs": {"pair": PAIR, "count": {"type": "integer"}},
    },
)


def element(name, *inner):
    return f"]<]minimax[>[<{name}>{''.join(map(str, inner))}]<]minimax[>[</{name}>"


def parts(*elements):
    body = f']<]minimax[>[<invoke name="parts">{"".join(elements)}]<]minimax[>[</invoke>'
    (call,) = parse("minimax_m3", body, [PARTS])
    assert call.outcome == "valid"
    return json.loads(call.arguments)


def test_elements_inside_elements():
    """An object that is declared elsewhere, or that may be null, had texts for numbers."""
    one, two = element("x", 3), element("y", "null")
    full, lacking = {"x": 3, "y": "7"}, {"x": 3, "y": None}
    assert parts(element("pair", one, element("y", 7))) == {"pair": full}
    assert parts(element("pair", one)) == parts(element("pair", one, two)) == {"pair": lacking}
    pairs = element("item", one), element("item", element("y", 7), one)
    assert parts(element("pairs", *pairs)) == {"pairs": [lacking, full]}
    assert parts(element("pairs", *(f"\n {pair}" for pair in pairs), "\n"))
    row = element("item", element("item", 1), element("item", 2.5))
    assert parts(element("rows", row, row)) == {"rows": [[1, 2.5]] * 2}
    counts = element("item", 5), element("item", 6)
    assert parts(element("counts", *counts)) == {"counts": [5, 6]}
    assert parts(element("pair", one, element("next", one))) == {
        "pair": lacking | {"next": lacking}
    }
    assert parts(element("mixed", element("item", 1), element("item", 2))) == {"mixed": ["1", 2]}
    assert parts(element("maybe", element("item", 4))) == {"maybe": [4]}
    assert parts(element("any"), element("o"), element("maybe", "null")) == {
        "any": [],
        "o": {},
        "maybe": None,
    }
    assert parts(element("loose", one)) == {"loose": one}, "it may be a text"
    assert parts(element("maybe", "[1, 2]")) == {"maybe": [1, 2]}
    for wrong, why in (
        (element("rows", row, "x"), "unexpected text inside a value: `x`"),
        (element("rows", "]<]minimax[>[<item>1"), "`item` is never closed"),
        (element("pairs", element("item", element("x", "three"))), "x must be integer"),
    ):
        with pytest.raises(Refused, match=why):
            parts(wrong)


def test_a_missing_closing_element_is_noted():
    """A complete call is thrown away for want of `</function>`."""
    (call,) = parse("qwen3_coder", BODIES["qwen3_coder"].replace("</function>", ""))
    assert call.outcome == "repaired" and "</function>" in call.notes[0]


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("n", "3", 3),
        ("s", "3", "3"),
        ("s", "null", "null"),
        ("s", " two  spaces ", " two  spaces "),
        ("maybe", "null", None),
        ("maybe", "nul", "nul"),
        ("b", "true", True),
        ("b", "True", True),
        ("l", "[1, 2.5]", [1, 2.5]),
        ("e", "1", 1),
        ("e", "x y", "x y"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "12", "12"),
    ],
)
def test_values_in_elements_follow_their_schema(key, raw, value):
    """A string `null` becomes None, a number stays a string: types by guess, not by schema."""
    body = f"<function=typed>\n<parameter={key}>\n{raw}\n</parameter>\n</function>"
    (call,) = parse("qwen3_coder", body, [TYPED])
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize(
    ("key", "raw"),
    [("n", "abc"), ("n", ""), ("n", "3.5"), ("b", "yes"), ("l", "1, 2"), ("l", "")],
)
def test_values_of_the_wrong_type_are_refused(key, raw):
    """A bad integer raises out of the parser, or an unparsed string is passed on as if it were a
    list.
    """
    with pytest.raises(Refused):
        parse(
            "qwen3_coder",
            f"<function=typed>\n<parameter={key}>\n{raw}\n</parameter>\n</function>",
            [TYPED],
        )


def test_a_string_where_a_number_belongs_is_read_and_noted():
    """`"days": "3"` loses the whole call although it can mean only one thing."""
    (call,) = parse("json_tools", CALL.replace("Paris", 'Paris", "days": "3'))
    assert json.loads(call.arguments)["days"] == 3 and "days" in call.notes[0]


def test_what_else_is_text_stays_text_when_one_value_is_read():
    """After the first string that may be one, no other was looked at."""
    (call,) = parse("json_tools", call_of(s="12", n="3", b="true"), [TYPED])
    assert json.loads(call.arguments) == {"s": "12", "n": 3, "b": True} and len(call.notes) == 2
    with pytest.raises(Refused, match="`typed`"):
        parse("json_tools", call_of(n="x", b="true"), [TYPED])


def call_of(**arguments):
    return json.dumps({"name": "typed", "arguments": arguments})


def test_letters_stay_letters_and_halves_of_them_escapes():
    """`Z\\u00fcrich` for a sampled `Zürich`; or half a character that no file can hold."""
    tagged = "<function=typed>\n<parameter=s>\nZürich 🙂\n</parameter>\n</function>"
    assert parse("qwen3_coder", tagged, [TYPED])[0].arguments == '{"s": "Zürich 🙂"}'
    (call,) = parse("json_tools", call_of(s="\ud800", n="3"), [TYPED])
    assert call.arguments == '{"s": "\\ud800", "n": 3}'


def test_names_that_are_nearly_declared():
    """A call lost for `functions.` in front of its name; or a refusal that names no tool."""
    (call,) = parse("json_tools", CALL.replace("get_w", "functions.get_w"))
    assert call.name == "get_weather" and "was read as `get_weather`" in call.notes[0]
    with pytest.raises(Refused, match="no tool `get_wether` is declared; `get_weather` is"):
        parse("json_tools", CALL.replace("get_weather", "get_wether"))
    twins = [Tool("Now", "", {"type": "object"}), Tool("now", "", {"type": "object"})]
    with pytest.raises(Refused, match="no tool `NOW`"):
        parse("json_tools", '{"name": "NOW", "arguments": {}}', twins)


def test_the_form_that_clients_know():
    """Guards: a key that no client reads."""
    call = ParsedCall("f", '{"a": 1}', id="call_1")
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert call.openai() == {"id": "call_1", "type": "function", "function": function}
    assert (call.outcome, ParsedCall("f", "{}", ("n",)).outcome) == ("valid", "repaired")


def test_gemma_nesting_and_quotes():
    """Braces, commas and quotes inside Gemma's quoted strings end the value early."""
    (call,) = parse(
        "gemma4", 'call:typed{s:<|"|>a}, "b": {<|"|>,l:[1,2],any:{k:<|"|>v<|"|>}}', [TYPED]
    )
    assert json.loads(call.arguments) == {"s": 'a}, "b": {', "l": [1, 2], "any": {"k": "v"}}


def test_pythonic_never_runs_anything():
    """A call's value that is an expression rather than a literal."""
    for body in (
        "[get_weather(city=open('/etc/passwd'))]",
        "[get_weather('Paris')]",
        "get_weather",
    ):
        with pytest.raises(Refused):
            parse("pythonic", body)


def test_arguments_of_code_may_have_any_name():
    """A tool whose arguments are no identifiers could not be called."""
    odd = Tool("odd", "", {"type": "object", "properties": {"a b": {}, "a b-c": {}}})
    (call,) = parse("pythonic", "[odd(a b=1, a b-c=2)]", [*TOOLS, odd])
    assert json.loads(call.arguments) == {"a b": 1, "a b-c": 2}


def test_members_keep_the_source_text():
    """Arguments re-serialised with other spaces or key order."""
    text = '{"b" : [1,  2], "a":{"x":"\\u00e9\\"" }}'
    assert list(members(text)) == [("b", "[1,  2]"), ("a", '{"x":"\\u00e9\\"" }')]


def test_read_says_what_is_left():
    """Text behind a value disappears."""
    value = read(' {"a": 1} tail')
    assert (value.value, value.rest, value.notes) == ({"a": 1}, " tail", [])


def test_a_foreign_parser_cannot_lose_a_call():
    """A future parser of mlx-lm that answers `{}` to what it does not understand."""
    from dataclasses import replace

    from ds4cli.tools.formats import Foreign

    lenient = Foreign(lambda text, tools: {"name": "now", "arguments": {}})
    fmt = replace(FORMATS["json_tools"], name="new", style=lenient)
    assert parse_calls(fmt, "now()", TOOLS)[0].arguments == "{}"
    with pytest.raises(Refused, match="dropped"):
        parse_calls(fmt, "now " + "something that matters " * 10, TOOLS)
    long = {"text": "x" * 300, "list": ["y"] * 60}
    eager = replace(fmt, style=Foreign(lambda text, tools: {"name": "now", "arguments": long}))
    kept = len("nowtextlist") + 300 + len(json.dumps(long["list"]))
    anything = [Tool("now", "", {"type": "object"})]
    assert parse_calls(eager, "." * (kept + 180), anything)
    with pytest.raises(Refused, match="dropped"):
        parse_calls(eager, "." * (kept + 181), anything)
    crash = replace(fmt, style=Foreign(lambda text, tools: 1 / 0))
    with pytest.raises(Refused, match="ZeroDivisionError"):
        parse_calls(crash, "x", TOOLS)
