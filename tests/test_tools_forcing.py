"""Guesses from a call's own syntax: right in the template's layout, harmless elsewhere."""

from __future__ import annotations

import pytest
from test_repair import run, session_for
from test_tools_detect import drawn, with_template
from test_tools_guard import BODIES, text_of
from toolkit import EOS, TOOLS, encode, pieces

from ds4cli.engine.session import Session
from ds4cli.tools import FORMATS, Guard
from ds4cli.tools.forcing import Forcing

# Formats whose own text in the tests is laid out as the probe call is.
NAMES = ["json_tools", "qwen3_coder", "minimax_m2", "deepseek_v32", "kimi_k2", "gemma4", "pythonic"]


def drawing(name):
    fmt = FORMATS[name]
    return with_template(name, fmt.start + drawn(name) + fmt.end)


def replay(wrapper, text):
    """(model calls, tokens) of the calls in a text where each right guess saves one."""
    guard, ids = Guard(wrapper, TOOLS), encode(wrapper, text)
    texts = [piece for _, piece in pieces(wrapper, ids)]
    at = calls = tokens = 0
    while at < len(ids) and ids[at] not in wrapper.eos_token_ids:
        guesses = guard.forced([ids[at]])
        kept = next((i for i, t in enumerate(guesses) if ids[at + 1 + i : at + 2 + i] != [t]), None)
        kept = len(guesses) if kept is None else kept
        calls, tokens = calls + guard.is_open, tokens + (1 + kept) * guard.is_open
        for i in range(at, at + 1 + kept):
            assert guard.feed(i, ids[i], texts[i]).event in (None, "open", "closed")
        at += 1 + kept
    return calls, tokens


@pytest.mark.parametrize("name", NAMES)
def test_what_the_syntax_leaves_no_choice_about_is_guessed(name):
    """One model call for every token of a call's markup."""
    calls, tokens = replay(drawing(name), "Well. " + text_of(name))
    assert calls < 0.8 * tokens


def test_another_layout_costs_a_guess_only():
    """A model that writes its calls otherwise than its template gets no guesses, or wrong ones."""
    wrapper = drawing("json_tools")
    compact = text_of("json_tools").replace(": ", ":").replace(", ", ",")
    calls, tokens = replay(wrapper, compact)
    assert calls < 0.8 * tokens
    turned = text_of("json_tools").replace('"city": "Paris"', '"days": 3, "city": "Paris"')
    calls, tokens = replay(wrapper, turned + text_of("json_tools"))
    assert calls < tokens


def test_asking_for_guesses_changes_nothing():
    """A guess that the matcher keeps; guesses outside calls."""
    wrapper = drawing("json_tools")
    guard, ids = Guard(wrapper, TOOLS), encode(wrapper, "Well. " + text_of("json_tools"))
    for i, (token, piece) in enumerate(pieces(wrapper, ids)):
        guesses = guard.forced([token])
        assert guesses == guard.forced([token]) and (guard.is_open or not guesses)
        assert guard.forced([token, *guesses]) == []
        assert guard.filter([token, *guesses]) == 1 + len(guesses)
        step = guard.feed(i, token, piece)
    assert step.event == "closed"


def test_a_rewind_takes_the_guesses_along():
    """Guesses that follow a text which was taken back."""
    wrapper = drawing("json_tools")
    guard, ids = Guard(wrapper, TOOLS), encode(wrapper, text_of("json_tools"))
    fed = list(pieces(wrapper, ids))
    seen = []
    for i, (token, piece) in enumerate(fed[:-1]):
        seen.append(guard.forced([token]))
        guard.feed(i, token, piece)
    guard.rewind(len(fed) // 2)
    for i, (token, piece) in list(enumerate(fed[:-1]))[len(fed) // 2 :]:
        assert guard.forced([token]) == seen[i]
        guard.feed(i, token, piece)


class OneText:
    """A matcher whose grammar is one text."""

    def __init__(self, *text):
        self.text, self.at, self.asked = list(text), 0, 0

    def try_consume_tokens(self, tokens):
        self.asked += 1
        rest = self.text[self.at :]
        pairs = zip([*rest, None], [*tokens, None], strict=False)
        taken = next(i for i, (a, b) in enumerate(pairs) if a != b or b is None)
        self.at += taken
        return taken

    def rollback(self, n):
        assert 0 <= n <= self.at
        self.at -= n

    def compute_ff_tokens(self):
        return self.text[self.at : self.at + 2]


def test_the_first_style_that_fits_the_text_says_what_follows():
    """A style that the text has left; one that was left behind a place that was gone back to."""
    one, other = OneText(1, 2, 3, 4, 5), OneText(1, 2, 7, 8, 9)
    forcing = Forcing(lambda: [one, other])
    assert forcing.after([1]) == [2, 3]
    forcing.take([1])
    assert forcing.after([]) == [2, 3]
    forcing.take([2])
    assert forcing.after([]) == [3, 4]
    assert forcing.after([7]) == [8, 9] and forcing.after([6]) == []
    forcing.take([7])
    assert forcing.after([8]) == [9]
    asked = one.asked
    forcing.take([8])
    assert forcing.after([]) == [9] and one.asked == asked
    forcing.rewind(2)
    assert forcing.after([3]) == [4, 5] and forcing.after([]) == [3, 4]
    forcing.rewind(1)
    assert forcing.after([2, 7]) == [8, 9]


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_text_does_not_depend_on_guesses(name, monkeypatch):
    """Guesses of the grammar that change what is written, or that save nothing."""
    script = "Well. " + FORMATS[name].start + BODIES[name] + FORMATS[name].end + EOS
    found = {}
    monkeypatch.setattr("test_repair.tokenizer", drawing)
    for guesses in (True, False):
        session, wrapper, _ = session_for(name, script, 1, chaos=0.0, drafter="ngram")
        if not guesses:
            monkeypatch.setattr(Session, "forced", lambda self, tokens, room: [])
        tokens, last, _ = run(session, wrapper)
        found[guesses] = tokens, last.calls, session.stats.by_drafter.get("grammar", [0, 0])
    assert found[True][:2] == found[False][:2]
    assert found[True][2][1] > 5 and found[False][2] == [0, 0]
