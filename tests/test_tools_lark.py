"""Which calls the grammar of each format takes, and which it does not."""

from __future__ import annotations

from functools import cache

import pytest
from llguidance import LLMatcher
from test_tools_parse import BODIES
from toolkit import TOOLS, TYPED, tokenizer

from ds4cli.tools import FORMATS, Tool
from ds4cli.tools.formats import Foreign, Format
from ds4cli.tools.grammar import vocabulary_for
from ds4cli.tools.lark import NoGrammar, Writer

M3 = "]<]minimax[>["


@cache
def vocabulary():
    return vocabulary_for(tokenizer(merged=()), "")


class Takes:
    """The grammar of a format's calls."""

    def __init__(self, name, tools=TOOLS, loose=frozenset(), drawn=""):
        self.fmt = FORMATS[name]
        writer = Writer(self.fmt, tools, loose, drawn)
        lark = writer.lark()
        self.notices = writer.notices
        self._matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not self._matcher.get_error(), self._matcher.get_error()

    def __call__(self, text):
        matcher, tokens = self._matcher.deep_copy(), vocabulary().tokenize_bytes(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def body(self, text):
        """Whether it takes this between its markers."""
        return self(self.fmt.start + text + self.fmt.end)


@cache
def usual(name):
    return Takes(name)


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_usual_call_of_a_format(name):
    """A repair of a call that was right; or none of one that was wrong."""
    takes, fmt, body = usual(name), FORMATS[name], BODIES[name]
    assert takes.body(body)
    for start in fmt.starts:
        assert takes(start + body + fmt.end)
    assert takes.body(body) and (not fmt.end or takes(fmt.start + body + fmt.end + " and so on"))
    assert not takes.body(body.replace("get_weather", "get_wether"))
    assert not takes.body(body.replace("city", "days")), "the city is required, days a number"
    assert not takes.body("") and not takes.body(body[: len(body) // 2])
    assert not fmt.starts or fmt.kept or not takes(body + fmt.end)


ALARM = {
    "json_tools": '{"name": "set_alarm", "arguments": {"on": true, "tags": ["a"]}}',
    "qwen3_coder": "<function=set_alarm><parameter=on>true</parameter><parameter=tags>"
    '["a"]</parameter></function>',
    "glm47": "set_alarm<arg_key>on</arg_key><arg_value>true</arg_value><arg_key>tags</arg_key>\n"
    '<arg_value>["a"]</arg_value>',
    "minimax_m2": '<invoke name="set_alarm"><parameter name="on">true</parameter>'
    '<parameter name="tags">["a"]</parameter></invoke>',
    "minimax_m3": f'{M3}<invoke name="set_alarm">{M3}<on>true{M3}</on>{M3}<tags>["a"]{M3}</tags>'
    f"{M3}</invoke>",
    "kimi_k2": "<|tool_call_begin|>functions.set_alarm:1<|tool_call_argument_begin|>"
    '{"on": true, "tags": ["a"]}<|tool_call_end|>',
    "mistral": 'set_alarm[ARGS]{"on": true, "tags": ["a"]}',
    "gemma4": 'call:set_alarm{on:true,tags:[<|"|>a<|"|>]}',
    "pythonic": '[set_alarm(on=True, tags=["a"])]',
    "apertus": '[{"set_alarm": {"on": true, "tags": ["a"]}}]',
    "command_r7b": '{"tool_name": "set_alarm", "parameters": {"on": true, "tags": ["a"]}}',
}
GAPS = {"kimi_k2": "\n", "minimax_m2": "\n", "minimax_m3": "\n", "gemma4": " ,\n"}


@pytest.mark.parametrize("name", list(ALARM))
def test_what_the_arguments_of_a_call_may_be(name):
    """Guards: an argument of another kind, one that is missing, and a second call."""
    takes, good = usual(name), ALARM[name]
    assert takes.body(good) and takes.body(f"\n{good}\n")
    for old, new in (("rue", "ru"), ("rue", "rue1"), ("tags", "tag"), ("set_", "sets_")):
        assert not takes.body(good.replace(old, new)), (old, new)
    assert not takes.body(good.replace('"a"', '"c"').replace(">a<", ">c<")) or name == "minimax_m3"
    several = name not in ("qwen3_coder", "glm47")
    gap = GAPS.get(name, ", ")
    both = f"{good[:-1]}{gap}{good[1:]}" if good[0] == "[" else f"{good}{gap}{good}"
    if name == "mistral":
        both = f"{good}, [TOOL_CALLS]{good}"
    assert takes.body(both) == several, both
    assert takes.body(good + good) == (name in ("kimi_k2", "minimax_m2", "minimax_m3", "gemma4",
                                               "json_tools", "command_r7b", "mistral"))  # fmt: skip


def test_json_calls_are_objects_or_lists_of_them():
    """Guards: a list of nothing, keys that mean nothing here, a name that stands twice."""
    takes = usual("json_tools")
    now = '{"name": "now", "arguments": {}}'
    for text in (
        now, f"[{now}]", f"[ {now} , {now} ]", f"{now}\n{now}", f"{now};{now}",
        '{"arguments": {}, "name": "now"}', '{"name": "now", "arguments": {}, "id": "x"}',
        '{"type": "function", "name": "now", "arguments": {}}',
        '{ "name" : "now" , "arguments" :{ } }',
    ):  # fmt: skip
        assert takes.body(text), text
    for text in (
        "[]", '{"name": "now"}', '{"arguments": {}}', '{"name": "now", "name": "now"}',
        '{"name": "now", "arguments": {}, "id": 3}', f"[{now}", f"[{now}{now}]",
        '{"name": "now", "arguments": {}, "mode": "x"}', '{"name": now, "arguments": {}}',
        '{"name": "now", "parameters": {}}',
    ):  # fmt: skip
        assert not takes.body(text), text
    assert usual("internlm2").body('{"name": "now", "arguments": {}}')
    assert usual("internlm2").body('{"name": "now", "parameters": {}}')
    extra = '{"tool_call_id": "0", "tool_name": "now", "parameters": {}}'
    assert usual("command_r7b").body(extra) and not takes.body(extra)
    assert usual("apertus").body('{"now": {}}') and not usual("apertus").body('{"now": 1}')
    assert not takes.body(f"{now}<tool_call>{now}"), "each has a section of its own, or none"
    assert not usual("xlam")(f"[{now}]{now}")
    mark = "<|tool_call|>"
    for text in (f"{mark}{now}{mark}{now}", f"{mark}{now}, {mark}{now}", f"{mark}{now}{now}"):
        assert usual("granite3")(text), text
    assert usual("mistral").body(f"[{now}, {now}]") and usual("mistral").body(now)


def test_names_that_stand_outside():
    """Guards: what stands around the name and the arguments, and a call that ends with nothing."""
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    takes = usual("kimi_k2")
    assert takes.body(f"{begin}functions.now:0{middle}{{}}{end}")
    assert takes.body(f"{begin}now:12 {middle} {{}} {end}")
    for text in (
        f"now:0{middle}{{}}{end}",
        f"{begin}now{middle}{{}}{end}",
        f"{begin}now:0{middle}{{}}",
    ):
        assert not takes.body(text), text
    assert takes(f"{begin}now:0{middle}{{}}{end}"), "without the section's markers"
    assert takes(f"{begin}now:0{middle}{{}}{end}{takes.fmt.end} tail")
    for text in ("now[ARGS]{}", "now[CALL_ID]x1[ARGS]{}", "now [ARGS] {}"):
        assert usual("mistral").body(text), text
    assert not usual("mistral").body("now{}") and not usual("mistral").body("[CALL_ID]now[ARGS]{}")
    call = "[TOOL_CALLS]now[ARGS]{}"
    assert usual("mistral")(call * 2) and not usual("mistral")(call + "{}")
    assert usual("functionary_v31").body("now>{}") and not usual("functionary_v31").body("now{}")
    assert usual("functionary_v32")("now\n{}") and usual("functionary_v32")(
        ">>>now\n{}\n>>>now\n{}"
    )


def test_calls_written_as_code():
    """Guards: arguments in one order only, names that are not declared, and an open end."""
    days = '<|"|>P<|"|>,days:3'
    assert usual("gemma4").body(f"call:get_weather{{city:{days}}}")
    assert usual("gemma4").body('call:get_weather{ days : 3 , city : <|"|>P<|"|> }')
    assert Takes("gemma4", [OPEN]).body("call:f{ x : 1,n:3}")
    assert Takes("pythonic", [OPEN]).body("[f( x =1, n=3)]")
    for text in ("x:1, n=3", "n='x', n=3", "x=1", "x=y, n=3"):
        assert not Takes("pythonic", [OPEN]).body(f"[f({text})]"), text
    anything = Tool("f", "", {"type": "object"})
    assert Takes("pythonic", [anything]).body("[f(x=1)]")
    assert Takes("qwen3_coder", [anything]).body(given("qwen3_coder", ("x", "1")))
    assert usual("gemma4").body("call:now{}call:now{}") and usual("gemma4").body(
        "call:now{},call:now{ }"
    )
    takes = usual("pythonic")
    for text in ('get_weather(days=3, city="P")', "now()", "now(), now()", "now( )",
                 "get_weather( city = 'P' )"):  # fmt: skip
        assert takes.body(f"[{text}]"), text
    for text in ("", "now", "now() now()", "get_weather('P')", "get_weather(city='P', city='P')",
                 "get_weather(city='P' days=3)", "get_weather(city='P', 2x=3)",
                 "now()]["):  # fmt: skip
        assert not takes.body(f"[{text}]"), text
    assert not takes.body("now()")
    assert usual("pythonic_bare")("[now()]") and usual("pythonic_bare")("<|python_tag|>[now()]")


NEEDED = {**TYPED.parameters, "required": ["n", "never"]}
STRICT = Tool("f", "", {**NEEDED, "additionalProperties": False})
OPEN = Tool("f", "", {**NEEDED, "additionalProperties": True})


def given(name, *arguments):
    """A call with these arguments as (name, text)."""
    style = FORMATS[name].style
    head = {"qwen3_coder": "<function=f>", "minimax_m2": '<invoke name="f">', "glm47": "f",
            "minimax_m3": f'{M3}<invoke name="f">',
            "minicpm5": '<function name="f">'}[name]  # fmt: skip
    close = {"qwen3_coder": ">", "minimax_m2": '">', "minicpm5": '">', "minimax_m3": ">",
             "glm47": "</arg_key>\n<arg_value>"}[name]  # fmt: skip
    parts = [f"{style.key_open}{k}{close}{v}{style.closes(k)}" for k, v in arguments]
    return head + "".join(parts) + style.call_close


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "glm47", "minimax_m3", "minicpm5"])
def test_every_argument_in_its_own_element(name):
    """Guards: a text for a number, an argument twice or not at all, one that is not declared."""
    takes, n = Takes(name, [STRICT]), ("n", "3")
    for arguments in (
        [n], [("n", " 3 ")], [("s", "a < b"), n], [n, ("s", "")], [n, ("e", "x y")],
        [n, ("e", "1")], [n, ("e", "None")], [n, ("e", "true")], [n, ("e", "")],
        [("w", "long text"), n],
    ):  # fmt: skip
        assert takes.body(given(name, *arguments)), arguments
    for arguments in (
        [], [("s", "a")], [("n", "x")], [n, n], [n, ("s", "a"), ("s", "b")], [n, ("e", "x")],
        [n, ("e", "2")], [n, ("z", "1")], [n, ("never", "1")],
    ):  # fmt: skip
        assert not takes.body(given(name, *arguments)), arguments
    assert {*takes.notices} == {"`maxLength` is checked when a call closes, not before"}
    around = [text for text in ("\nx y\n", " x y\n") if takes.body(given(name, n, ("e", text)))]
    assert len(around) == {"qwen3_coder": 1, "minicpm5": 2}.get(name, 0), "what is no part of it"
    more = Takes(name, [OPEN])
    assert len({*more.notices}) == (2 if name == "minimax_m3" else 1)
    assert not more.body(given(name, n, n)) and not more.body(given(name, ("n", "x")))
    assert more.body(given(name, n, ("z", "1"), ("zz", "a b")))
    assert more.body(given(name, ("z", "1"))) == (name == "minimax_m3"), "its end is not known"
    loose = Takes(name, [STRICT], loose=frozenset(["f"]))
    assert loose.body(given(name, ("z", "1"))) and loose.body(given(name))


def test_texts_in_elements():
    """A value that contains its own closing tag, or that lacks it."""
    takes, n, s = Takes("qwen3_coder", [STRICT]), "<parameter=n>3</parameter>", "<parameter=s>"
    end = "</parameter></function>"
    for text in (
        f"{n}{s}a</parameter>b{end}", f"{n}{s}a</parameter> <b>{end}", f"{n}{s}\n</param{end}",
        f"{s}a{n}</function>",  # ends where the next one opens
        f"{n}{s}a</function>",  # ends where the call does
        f"{n}{s}a</function>\n",
        f"\n{n}\n{s}\na\n</parameter>\n</function>\n",
    ):  # fmt: skip
        assert takes.body(f"<function=f>{text}"), text
    for text in (
        f"{s}a</function>",
        f"{n}{s}a",
        f"{n}{n}</function>",
        f"{n}</parameter></function>",
    ):
        assert not takes.body(f"<function=f>{text}"), text
    assert not takes.body(f"<function=f>{n}</function><function=f>{n}</function>")
    kept = f"<function=f>{n}</function>"
    assert takes(kept) and takes(f"{kept}\n</tool_call>") and takes(f"{kept}</tool_call> x")
    invoke = Takes("minimax_m2", [STRICT])
    call = given("minimax_m2", ("n", "3"))
    assert invoke.body(f"{call}\n{call}") and not invoke.body(call.replace("</invoke>", ""))
    mini = Takes("minicpm5", [STRICT])
    assert mini(given("minicpm5", ("n", "3")) + "</function> x")
    assert not mini(given("minicpm5", ("n", "3")))


def test_parts_that_are_elements_are_left_to_the_reader():
    """Lists and objects of a family that gives each part its own element."""
    takes = Takes("minimax_m3", [STRICT])
    nested = f"{M3}<k>1{M3}</k>"
    assert takes.body(given("minimax_m3", ("n", "3"), ("o", nested)))
    assert not takes.body(given("minimax_m3", ("n", nested)))
    null = Tool("f", "", {"type": "object", "required": ["a"],
                          "properties": {"a": {"type": ["integer", "null"]}}})  # fmt: skip
    assert Takes("minimax_m3", [null]).body(given("minimax_m3"))
    assert not Takes("minimax_m2", [null]).body(given("minimax_m2"))


def test_a_drawn_call_is_the_only_way():
    """Guesses of what no template would draw."""
    drawn = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "P"}}\n</tool_call>'
    takes = Takes("json_tools", drawn=drawn)
    assert takes(drawn) and takes(drawn.replace('"P"', '"P", "days": 3'))
    for old, new in (
        ('"city": "P"', '"days": 3, "city": "P"'),
        ('"name": "get_weather", ', '"id": "x", "name": "get_weather", '),
        ('"city": "P"', '"city": "P", "z": 1'),
    ):
        assert not takes(drawn.replace(old, new)), new
    kimi = Takes("kimi_k2", drawn="<|tool_call_begin|>functions.get_weather:0")
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert kimi(call) and not kimi("<|tool_calls_section_begin|>" + call)
    coder = Takes("qwen3_coder", [OPEN], drawn="<tool_call><function=get_weather>")
    s, n = ("s", "a"), ("n", "3")
    assert coder.body(given("qwen3_coder", s, n)) and not coder.body(given("qwen3_coder", n, s))
    assert not coder.body(given("qwen3_coder", n, ("z", "1")))
    assert not coder(given("qwen3_coder", n)), "templates draw its marker"
    harmony = Takes("harmony", drawn="<|channel|>commentary to=functions.get_weather")
    tail = "now<|message|>{}<|call|>"
    assert harmony(f"<|channel|>commentary to=functions.{tail}") and not harmony(f" to={tail}")


def test_what_is_left_to_the_check_is_said_of_every_tool():
    """Guards: only the last one's limits are named; a tool that no argument fits."""
    tools = [
        Tool(name, "", {"type": "object", "properties": {"x": {"type": "array", word: True}}})
        for name, word in (("a", "uniqueItems"), ("b", "contains"))
    ]
    for name in ("json_tools", "pythonic", "qwen3_coder"):
        notices = " ".join(Takes(name, tools).notices)
        assert "`uniqueItems`" in notices and "`contains`" in notices
    never = Takes("json_tools", [Tool("f", "", {"anyOf": [False]})])
    assert never.body('{"name": "f", "arguments": {}}')


def test_what_only_its_parser_knows_has_no_grammar():
    """Guards: a traceback where a new format of mlx-lm comes along."""
    foreign = Format("new", ("<x>",), "</x>", Foreign(lambda text, tools: None))
    with pytest.raises(NoGrammar, match="only its own parser knows the `new` format"):
        Writer(foreign, TOOLS).lark()


def test_arguments_that_point_elsewhere():
    """A schema whose whole is a reference took no arguments, or any."""
    schema = {"$ref": "#/$defs/a", "$defs": {"a": STRICT.parameters}}
    for name, good, bad in (
        ("json_tools", '{"name": "f", "arguments": {"n": 3}}', '{"name": "f", "arguments": {}}'),
        ("pythonic", "[f(n=3)]", "[f()]"),
        ("qwen3_coder", given("qwen3_coder", ("n", "3")), given("qwen3_coder")),
    ):
        takes = Takes(name, [Tool("f", "", schema)])
        assert takes.body(good) and not takes.body(bad), name
