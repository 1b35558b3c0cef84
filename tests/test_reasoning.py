"""Reasoning and answer, split from streamed text. Pure; no model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4cli.text.reasoning import HARMONY, ReasoningSplitter, markers


def split(pieces, inside=False, start="<think>", end="</think>"):
    splitter = ReasoningSplitter(start, end, inside)
    found = [piece for text in pieces for piece in splitter.push(text)] + splitter.flush()
    texts = {
        kind: "".join(p.text for p in found if p.is_reasoning is kind) for kind in (True, False)
    }
    return texts[True], texts[False]


@pytest.mark.parametrize(
    ("reply", "inside", "reasoning", "answer"),
    [
        ("plain <b> text", False, "", "plain <b> text"),
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\n <think>why</think>so", False, "why", "so"),
        ("why</think>\nso", True, "why", "so"),
        ("never closed", True, "never closed", ""),
        ("use <think> and </think>", False, "", "use <think> and </think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("  spaced", False, "", "  spaced"),
        ("<thi", False, "", "<thi"),
        ("<think>a</thi", False, "a</thi", ""),
        ("", False, "", ""),
    ],
)
def test_split(reply, inside, reasoning, answer):
    """Guards: a marker shown as text, text taken for a marker, layout newlines in the answer."""
    assert split([reply], inside) == (reasoning, answer)
    assert split(list(reply), inside) == (reasoning, answer)


@given(st.lists(st.text(alphabet="<think>/ \nab", max_size=9), max_size=9), st.booleans())
def test_split_does_not_depend_on_the_pieces(pieces, inside):
    """Guards: a marker over the border of two pieces is missed, or text is lost or repeated."""
    assert split(pieces, inside) == split(["".join(pieces)], inside)


def test_without_markers_nothing_is_held_back():
    """Guards: a model that does not think has its text delayed or trimmed."""
    assert split(["\n", "<think>x"], start=None, end=None) == ("", "\n<think>x")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<|channel|>final<|message|>so", ("", "so")),
        (f"{HARMONY[0]}why{HARMONY[1]}so", ("why", "so")),
        ("<|channel|>fin", ("", "<|channel|>fin")),
        ("so <|channel|>final<|message|>", ("", "so <|channel|>final<|message|>")),
    ],
)
def test_channels(reply, expected):
    """Guards: gpt-oss's marker shown in a reply that begins with the answer, or in `generate`."""
    tokenizer = SimpleNamespace(think_start=None, think_end=None, get_vocab=lambda: ["<|channel|>"])
    start, end, answer = markers(tokenizer)
    for pieces in ([reply], reply):
        splitter = ReasoningSplitter(start, end, False, answer)
        found = [piece for text in pieces for piece in splitter.push(text)] + splitter.flush()
        texts = ["".join(p.text for p in found if p.is_reasoning is kind) for kind in (True, False)]
        assert tuple(texts) == expected
