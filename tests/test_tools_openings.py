"""Where calls, thoughts, code and quotations begin and end in text."""

from __future__ import annotations

import pytest

from ds4cli.tools import FORMATS
from ds4cli.tools.openings import Openings, is_call, place

THINK = ("[think]", "[/think]")


def openings(name="qwen3_coder", think=THINK):
    return Openings(FORMATS[name], ["now"], think)


def begun(text, where=None, begins=False):
    """What begins in a text; "" where nothing does, whatever may follow its last character."""
    match = (where or openings()).find(text, begins)
    return "" if match is None or match.partial else match.lastgroup


@pytest.mark.parametrize(
    ("text", "kind", "at"),
    [
        ("a <tool_call>\n{", "start", (2, 11)),
        ("a <function=now>", "kept", (2, 0)),
        ("a <function=then>", "", None),
        ("a ```", "code", None),
        ("a `<tool_call>", "quote", None),
        ("a `x` <tool_call>{", "start", (6, 11)),
        ("[think] <tool_call>{", "think", None),
        ("nothing", "", None),
    ],
)
def test_what_begins_first(text, kind, at):
    assert begun(text) == kind
    if kind:
        match = openings().find(text, begins=False)
        assert is_call(match) == (at is not None) and (at is None or place(match) == at)


def test_half_a_marker_may_be_one():
    """Guards: the beginning of a marker is shown, and the call behind it is prose."""
    for text in ("a <", "a <tool_call>", "a <function=n", "a `<tool", "a [thi", "``"):
        assert openings().find(text, begins=False).partial, text
    for mode, text in (("think", "so [/thi"), ("code", "x ``")):
        assert openings().find_end(text, mode).partial


@pytest.mark.parametrize(
    ("mode", "text", "end"),
    [
        ("think", "so [/think] x", 11),
        ("code", "x ` ``` x", 7),
        ("quote", "<tool_call>` x`", 12),
    ],
)
def test_where_a_section_ends(mode, text, end):
    assert openings().find_end(text, mode).end() == end


@pytest.mark.parametrize(
    ("mode", "matters", "plain"),
    [
        ("text", ["a <t", "a <f", "a <", "a [t", "a [", "a `"], ["a < b", "[/think", "a [x", "x"]),
        ("think", ["[/", "a ["], ["a <tool_call>", "[t", "```"]),
        ("code", ["``", "a `"], ["<tool_call>", "`x", "[t"]),
        ("quote", ["a `", "`x"], ["<tool_call>", "[t"]),
    ],
)
def test_what_a_token_must_hold_to_matter(mode, matters, plain):
    """Guards: a marker that goes by unseen; every token taken the long way."""
    assert all(openings().may_matter(mode, text) for text in matters)
    assert not any(openings().may_matter(mode, text) for text in plain)


def test_a_model_that_does_not_think_begins_no_thoughts():
    without = openings(think=("", ""))
    assert begun("[think] x", without) == "" and not without.may_matter("text", "[t")
    assert not without.may_matter("think", "[/think]")


def test_a_call_without_a_marker_begins_an_answer_only():
    """Guards: brackets in the middle of a sentence taken for a call."""
    bare, call = openings("pythonic_bare"), "[now(a="
    assert begun(f"\n{call}", bare, begins=True) == "kept" and begun(call, bare) == ""
    assert place(bare.find(f" {call}", begins=True)) == (1, 0)
    assert begun(f"so {call}", bare, begins=True) == ""
    assert not [*bare.calls(call)], "it is not known whether an answer begins there"


def test_all_calls_of_a_text():
    text = "<tool_call>{ ``` <tool_call> x [think] <function=now> <function=then>"
    assert [place(match) for match in openings().calls(text)] == [(0, 11), (39, 0)]
