"""Where calls of a format open in a text, and what text its syntax is made of."""

from __future__ import annotations

import pytest
import regex

from ds4cli.tools import FORMATS
from ds4cli.tools.formats import Format, Json, Tagged

NAMES = ["now", "get.it"]


def found(fmt, text, begins=None):
    """What opens a call in the text, and how: None where nothing does."""
    match = regex.search(fmt.opening(NAMES, begins), text)
    groups = {} if match is None else match.groupdict()
    return next(((kind, groups[kind]) for kind in ("start", "kept") if groups.get(kind)), None)


def test_where_a_call_opens():
    """Prose about a marker was a call; or a call without one was prose."""
    fmt = Format("x", ("<a>", "<b.>"), "", Json(), lead="[{]", kept=(("@", "{names}!"), ("#", "")))
    assert found(fmt, "so: <a>{") == ("start", "<a>") and found(fmt, "<b.>{") == ("start", "<b.>")
    assert found(fmt, "<a> and <bx>{") is None
    assert found(fmt, "it is @now!") == ("kept", "@now!") and found(fmt, "@get.it!")
    assert found(fmt, "@getxit!") is None and found(fmt, "@later!") is None
    assert found(fmt, "a #b") == ("kept", "#")
    for begins in (True, False):
        assert found(fmt, "it is @now!", begins), "wherever it stands"
    assert found(Format("x", (), "", Json()), "anything") is None
    nobody = Format("x", (), "", Json(), kept=(("@", "{names}"),))
    assert regex.search(nobody.opening([]), "@") is None


def test_a_bare_call_opens_where_an_answer_begins():
    """A list in the middle of an answer was a call."""
    fmt = Format("x", ("<a>",), "", Json(), kept=(("[", r"\s*{names}"),), bare=True)
    assert found(fmt, " \n[ now", True) == ("kept", "[ now")
    assert found(fmt, "so [ now", True) is None and found(fmt, "so <a>", True)
    assert found(fmt, "[now", False) is None and found(fmt, "<a>", False) == ("start", "<a>")
    assert found(fmt, "so [now") == ("kept", "[now")
    assert fmt.beginnings == ["<a>"]
    kept = Format("x", ("<a>",), "", Json(), kept=(("[", ""),))
    assert kept.beginnings == ["<a>", "["] and kept.start == "<a>"
    assert Format("x", (), "", Json()).start == ""


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.starts])
def test_prose_about_a_marker_opens_no_call(name):
    """A format without what must follow its marker: an answer about markers was held back as a
    call, and reported as a broken one."""
    for start in FORMATS[name].starts:
        assert found(FORMATS[name], f"{start} begins a call") is None, start


def test_what_opens_a_call_without_a_marker():
    """Guards: a call of a model that forgets the marker is shown as text."""
    for name in ("qwen3_coder", "seed_oss"):
        assert found(FORMATS[name], "so: <function=now>") == ("kept", "<function=now>")
        assert found(FORMATS[name], "so: <function=later>") is None


def test_what_text_a_syntax_is_made_of():
    """A special token of the syntax was no text to the grammar, so no call could be written."""
    style = Tagged("<f=", r"\|>", "<k=", ">", "</k>", "</f>")
    fmt = Format("x", ("<a>", "<b>"), "<end>", style, kept=(("@", r"\(names"),), close="<close>")
    text = fmt.literals()
    for part in ("<a>", "<b>", "<end>", "<close>", "@", "(names", "<f=", "|>", "</k>", "</f>", "'"):
        assert part in text.split(" "), part
    assert "\\" not in text
    assert '<|"|>' in FORMATS["gemma4"].literals().split(" ")
