"""Which format a model has: the one that reads what its chat template draws. No model."""

from __future__ import annotations

import json
from dataclasses import replace

import jinja2
import pytest
from test_tools_parse import BODIES
from toolkit import EOS, TOOLS, tokenizer

from ds4cli.errors import UsageError
from ds4cli.generate import check_tools
from ds4cli.text.tokenizer import Vocabulary
from ds4cli.tools import FORMATS, detect_format, require_format
from ds4cli.tools.detect import ASKED, drawn_wrongly, find_format
from ds4cli.tools.formats import SPACE, Foreign, Format

# How a format's own text of a call becomes one with the arguments of the probe.
DAYS = {
    "json": ('{"city": "Paris"}', '{"city": "Ulm", "days": 3}'),
    "python": ("{'city': 'Paris'}", "{'city': 'Ulm', 'days': 3}"),
    "call": ('(city="Paris")', '(city="Ulm", days=3)'),
    "gemma": ('<|"|>Paris<|"|>', '<|"|>Ulm<|"|>,days:3'),
    "escape": ("<escape>Paris<escape>", "<escape>Ulm<escape>,days:<escape>3<escape>"),
}


def drawn(name: str) -> str:
    """A format's call with the arguments of the probe."""
    body = BODIES[name]
    for old, new in DAYS.values():
        if old in body:
            return body.replace(old, new)
    style = FORMATS[name].style
    begin, close = body.index(style.key_open + "city"), style.closes("city")
    first = body[begin : body.index(close, begin) + len(close)].replace("Paris", "Ulm")
    second = first.replace("city", "days").replace("Ulm", "3")
    second = second.replace('"string"', '"number"').replace('"true"', '"false"')
    return body.replace(first.replace("Ulm", "Paris"), first + second)


def with_template(name: str, reply: str, fmt: str | None = None):
    """A tokenizer whose template draws calls as `reply` says."""
    wrapper = tokenizer(name)
    fast = wrapper._tokenizer
    fast.init_kwargs.pop("tool_parser_type")
    if fmt is not None:
        fast.init_kwargs["tool_parser_type"] = fmt
    fast.chat_template = (
        "{% for m in messages %}<|user|>{{ m.content }}{% if m.tool_calls %}"
        "{% raw %}" + reply + "{% endraw %}" + EOS + "{% endif %}{% endfor %}"
    )
    return wrapper


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_format_is_found_by_what_the_template_draws(name):
    """A format that is known, and is not found for want of a rule that names it."""
    fmt = FORMATS[name]
    start = "" if fmt.bare else fmt.start
    wrapper = with_template(name, start + drawn(name) + fmt.end)
    found = detect_format(wrapper)
    assert found is not None, find_format(wrapper).unreadable
    assert (found.style == fmt.style and found.starts == fmt.starts) or found.name in TWINS[name]


TWINS = {"laguna": ("glm47",), "pythonic_bare": ("pythonic",)}


def test_what_mlx_lm_names_comes_first():
    """Formats that share their marks are taken for each other."""
    wrapper = with_template("laguna", "<tool_call>" + drawn("laguna") + "</tool_call>", "laguna")
    assert detect_format(wrapper).name == "laguna"
    wrong = with_template(
        "json_tools", "<tool_call>" + drawn("glm47") + "</tool_call>", "json_tools"
    )
    assert detect_format(wrong).name == "glm47"


def test_a_call_that_cannot_be_read_is_named():
    """A format found by its marker that reads no call: said before anything is loaded."""
    wrapper = with_template("json_tools", "<tool_call>CALL get_weather WITH 3 Ulm</tool_call>")
    with pytest.raises(UsageError, match=r"cannot be read.*CALL get_weather"):
        require_format(wrapper)


def test_what_cannot_be_read_is_refused_before_the_weights(capsys):
    """A minute of loading, and then that the model takes no tools; a format nobody is told."""
    wrapper = with_template("json_tools", "<tool_call>CALL get_weather WITH 3 Ulm</tool_call>")
    with pytest.raises(UsageError, match="cannot be read"):
        check_tools(Vocabulary(wrapper), TOOLS)
    check_tools(Vocabulary(wrapper), [])
    good = with_template("json_tools", "<tool_call>" + drawn("json_tools") + "</tool_call>")
    check_tools(Vocabulary(good), TOOLS, verbose=True)
    assert "`json_tools`" in capsys.readouterr().err


def test_what_a_template_draws_wrongly_is_said(capsys):
    """A template that forgets a comma or a quote: no tools for a model that writes them, or calls
    that are flagged and nobody knows why."""
    named = "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    call = "{% for c in m.tool_calls %}[" + named + "{{ k }}='{{ v }}'{% endfor %})]{% endfor %}"
    wrapper = with_template("pythonic_bare", "{% endraw %}" + call + "{% raw %}")
    assert require_format(wrapper).name == "pythonic_bare"
    check_tools(Vocabulary(wrapper), TOOLS)
    said = capsys.readouterr().err
    assert all(word in said for word in ("several arguments", "quotes", "backslashes"))
    assert "get_weather(city='Ulm'days='3')" in said
    check_tools(Vocabulary(wrapper), TOOLS, quiet=True)
    assert not capsys.readouterr().err


def test_a_template_without_calls():
    """A hint that is not true."""
    wrapper = with_template("json_tools", "")
    wrapper._tool_call_start = None
    with pytest.raises(UsageError, match="no tool-call format"):
        require_format(wrapper)
    wrapper = with_template("json_tools", "", "json_tools")
    assert require_format(wrapper).name == "json_tools"


def test_a_template_that_raises():
    """A probe that ends in a traceback."""
    wrapper = with_template("json_tools", "", "json_tools")
    wrapper._tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(jinja2.TemplateError):
        wrapper.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert detect_format(wrapper).name == "json_tools"


def dumped(call: dict) -> str:
    """A call as most templates draw it."""
    said = json.dumps({"name": call["name"], "arguments": call["arguments"]})
    return f"<tool_call>\n{said}\n</tool_call>"


def split(text: str, tools=None) -> dict:
    """What mlx-lm's own parser of some unknown syntax returns."""
    name, _, said = text.strip("[]").partition(":")
    return {"name": name, "arguments": json.loads(said)}


class Template:
    """A tokenizer whose template draws a call as a function does; `asked`: what it was asked."""

    has_tool_calling = True
    tool_call_start, tool_call_end, tool_parser = "<c>", "</c>", staticmethod(split)
    words = ("<s>", "<end>", "<turn>")
    eos_token_ids = (1, 2)

    def __init__(self, draw, **init_kwargs):
        self.draw, self.init_kwargs, self.asked = draw, init_kwargs, []

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens, "an end that is special would not be seen"
        return self.words[ids[0]]

    def convert_tokens_to_ids(self, token):
        return self.words.index(token) if token in self.words else None

    def apply_chat_template(self, messages, **options):
        self.asked.append((messages, options))
        call = messages[1]["tool_calls"][0]["function"]
        return f"get_weather<turn>{messages[0]['content']}<end>{self.draw(call)}<turn>\n<end>"


def test_the_probe_is_a_call_as_every_template_knows_it():
    """Guards: a template that looks for a role, an id, or arguments as text raises, or draws
    nothing: the model has no tools."""

    def draw(call):
        return dumped({**call, "arguments": json.loads(call["arguments"])})  # only takes text

    template = Template(draw)
    assert detect_format(template) == FORMATS["json_tools"]
    text, number = ({"type": kind} for kind in ("string", "integer"))
    city = {**text, "description": "its name"}
    days = {**number, "description": "how many"}
    parameters = {"type": "object", "properties": {"city": city, "days": days}}
    parameters["required"] = ["city", "days"]
    about = {"name": "get_weather", "description": "the weather of a place"}
    spec = {"type": "function", "function": {**about, "parameters": parameters}}
    options = {"tools": [spec], "tokenize": False, "add_generation_prompt": False}
    for given, (messages, said) in zip(
        ({"city": "Ulm", "days": 3}, '{"city": "Ulm", "days": 3}'), template.asked[:2], strict=True
    ):
        function = {"name": "get_weather", "arguments": given}
        call = {"id": "call00000", "type": "function", "function": function}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert messages == [{"role": "user", "content": ASKED}, reply] and said == options


def test_what_was_drawn_ends_where_the_reply_does():
    """Guards: a guess at layout from what follows the reply; an end marker that never comes."""
    template = Template(dumped)
    found = find_format(template)
    whole = dumped({"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}})
    assert (found.fmt, found.drawn) == (FORMATS["json_tools"], "<end>" + whole)
    count = len(template.asked)
    assert find_format(template) is found and len(template.asked) == count, "found out once"
    again = Template(lambda call: ASKED + dumped(call) + "<turn>get_weather")
    assert find_format(again).drawn == whole
    shown = Template(lambda call: "<tool_call>{}</tool_call>" + dumped(call))
    assert detect_format(shown) == FORMATS["json_tools"], "behind an example of one"
    template = Template(dumped)
    template.words = ("<s>", "<end>", "</tool_call>")
    found = find_format(template)
    assert found.fmt == replace(FORMATS["json_tools"], end="")
    assert found.drawn == "<end>" + whole.removesuffix("</tool_call>")


def test_a_format_that_only_mlx_lm_knows():
    """Guards: calls of a new model are refused, though a parser for them is there."""

    def fmt(name, end="</c>"):
        return Format(name, ("<c>",), end, Foreign(split), SPACE + r"[^\s\w]")

    for word in ("tool_parser_type", "chat_template_type"):
        assert detect_format(Template(lambda call: "", **{word: "odd"})) == fmt("odd")
    assert detect_format(Template(lambda call: "", tool_parser_type="laguna")) is FORMATS["laguna"]
    open_ended = Template(lambda call: "")
    open_ended.tool_call_end = None
    assert detect_format(open_ended) == fmt("unknown", "")
    none = Template(lambda call: "")
    none.has_tool_calling = False
    assert detect_format(none) is None and drawn_wrongly(none) == []

    def draw(call):
        return f"<c>[[{call['name']}:{json.dumps(call['arguments'])}]]</c>"

    template = Template(draw, tool_parser_type="odd")
    assert detect_format(template) == fmt("odd") and drawn_wrongly(template) == []
    template = Template(draw)
    assert detect_format(template) == fmt("unknown")
    template = Template(draw)
    template.has_tool_calling = False
    assert find_format(template).unreadable.startswith("<end><c>[[get_weather:")
    template = Template(dumped)
    del template.init_kwargs
    assert detect_format(template) is FORMATS["json_tools"]


def test_a_template_that_cannot_draw_numbers():
    """Guards: no format for a template that reads well with texts alone; it is said what it draws
    wrongly, by the name, not with all of the prompt."""

    def draw(call):
        said = {k: v for k, v in call["arguments"].items() if isinstance(v, str)}
        return "get_weather is asked. " + dumped({**call, "arguments": said})

    template = Template(draw)
    assert detect_format(template) == FORMATS["json_tools"]
    assert drawn_wrongly(template) == [
        'several arguments, as `get_weather", "arguments": {"city": "Ulm"}} </tool_call>`',
        'null, as `get_weather", "arguments": {}} </tool_call>`',
    ]


def test_what_cannot_be_read_is_shown_short():
    """Guards: a screen full of template for one line of an error."""
    found = find_format(Template(lambda call: f"CALL\n  {call['name']} {'x' * 200}"))
    assert found.fmt is None and not found.drawn
    assert found.unreadable == ("<end>CALL get_weather " + "x" * 200)[:120]
