"""Replies on a terminal: every character that the model wrote, coloured."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_escapes import Terminal

from ds4cli import terminal
from ds4cli.chat.markdown import MarkdownWriter, Styler
from ds4cli.console import SafeConsole
from ds4cli.escapes import visible

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

SAMPLE = """# Title of *this*
One **bold `x*y` word** and 2*3*4, a_name_b, \\*no\\*
two <div align="center"> List<T> [text](https://target.example) ![i](pic.png)

> quoted
- a

  more of a
1. one

```py
def f(x):  # why
\treturn "a" + 1

```
~~~
plain   \x20
~~~~
``` not `a` fence
| a | b |
End"""
TEXTS = st.text("ab`~#*_-1.|>\\ \t\n<", max_size=80) | st.text(max_size=80)
LANGUAGES = "py", "json", "html", "diff", "console", "nonsense", ""


def pieces_of(text: str, cuts=()) -> list[tuple[str, str]]:
    """All pieces of a reply that comes cut in these places."""
    styler, found, at = Styler(), [], 0
    for cut in (*sorted(cuts), len(text)):
        found += styler.push(text[at:cut])
        at = max(at, cut)
    return found + styler.flush()


def shown(pieces) -> str:
    return "".join(text for text, _ in pieces)


def letters(pieces) -> list[tuple[str, str]]:
    """Every character with its style."""
    return [(letter, style) for text, style in pieces for letter in text]


@given(TEXTS, st.lists(st.integers(0, 80), max_size=9))
@settings(max_examples=150, deadline=None)
def test_every_character_stands_on_the_screen_in_order(text, cuts):
    """Guards: HTML, `<T>`, link targets or backslashes that are dropped; lines joined or moved."""
    assert shown(pieces_of(text, cuts)) == text


@pytest.mark.slow
@given(TEXTS, st.lists(st.integers(0, 80), max_size=9))
@settings(max_examples=4000, deadline=None)
def test_every_character_of_many_texts_stands_on_the_screen(text, cuts):
    """The long run of the same."""
    assert shown(pieces_of(text, cuts)) == text


@pytest.mark.parametrize("language", LANGUAGES)
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_code_is_shown_as_it_stands(language, text):
    """Guards: padding, a leading space, hard wraps, or what a lexer adds or leaves out."""
    whole = f"```{language}\n{text}\n```\nbehind"
    assert shown(pieces_of(whole)) == whole


@given(st.lists(st.integers(0, len(SAMPLE)), max_size=40))
@settings(deadline=None)
def test_colours_do_not_depend_on_the_pieces(cuts):
    """Guards: a marker that is cut by the end of a token, and other colours."""
    assert letters(pieces_of(SAMPLE, cuts)) == letters(pieces_of(SAMPLE))


@given(TEXTS, st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_a_reply_that_goes_on_shows_the_rest(text, cut):
    """Guards: /continue that repeats the end of what stands there, or forgets that code is open."""
    styler = Styler()
    first = styler.push(text[:cut]) + styler.flush()
    rest = styler.push(text[cut:]) + styler.flush()
    assert (shown(first), shown(rest)) == (text[:cut], text[cut:])


def test_what_is_coloured():
    """Guards: a screen without colours, or emphasis where Markdown sees none."""
    styles = dict(pieces_of(SAMPLE))
    expected = {
        "#": "bold dim", "bold ": "bold", "return": "magenta", "# why": "dim", "```py": "dim",
    }  # fmt: skip
    assert {text: styles.get(text) for text in expected} == expected
    plain = {text for text, style in pieces_of(SAMPLE) if not style}
    assert {"3", "name"} <= plain


def test_the_screen_gets_the_reply_in_colours(monkeypatch):
    """Guards: a writer that loses what its styler gave, or ends a reply in the middle of a line."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = SafeConsole(force_terminal=True)
    monkeypatch.setattr(terminal, "out", lambda: console)
    writer = MarkdownWriter(show_reasoning=False)
    for letter in SAMPLE + "\x1b[2J":
        writer.answer(letter)
    writer.end()
    assert COLOURS.search(sys.stdout.text)
    assert COLOURS.sub("", sys.stdout.text) == visible(SAMPLE + "\x1b[2J") + "\n"
