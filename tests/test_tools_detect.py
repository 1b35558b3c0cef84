"""Which format a model has: the one that reads what its chat template draws. No model."""

from __future__ import annotations

import jinja2
import pytest
from test_tools_parse import BODIES
from toolkit import EOS, TOOLS, tokenizer

from ds4cli.errors import UsageError
from ds4cli.generate import check_tools
from ds4cli.text.tokenizer import Vocabulary
from ds4cli.tools import FORMATS, detect_format, require_format
from ds4cli.tools.detect import find_format

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
