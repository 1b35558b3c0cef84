"""Reasoning and answer, split from streamed text. Pure; no model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4cli.text.reasoning import HARMONY, Markers, ReasoningSplitter, find_markers

THINK = Markers("<think>", "</think>")


def split(pieces, inside=False, markers=THINK):
    splitter = ReasoningSplitter(markers, inside)
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
    assert split(["\n", "<think>x"], markers=None) == ("", "\n<think>x")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<|channel|>final<|message|>so", ("", "so")),
        (f"{HARMONY.start}why{HARMONY.end}so", ("why", "so")),
        ("<|channel|>fin", ("", "<|channel|>fin")),
        ("so <|channel|>final<|message|>", ("", "so <|channel|>final<|message|>")),
    ],
)
def test_channels(reply, expected):
    """Guards: gpt-oss's marker shown in a reply that begins with the answer, or in `generate`."""
    tokenizer = SimpleNamespace(think_start=None, get_vocab=lambda: ["<|channel|>"])
    for pieces in ([reply], reply):
        assert split(pieces, markers=find_markers(tokenizer)) == expected


SPELLED = [
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("◁think▷", "◁/think▷"),
    ("<mm:think>", "</mm:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<inner_thoughts>", "</inner_thoughts>"),
]


def tokenizer(template="", added=(), known=(None, None)):
    return SimpleNamespace(
        think_start=known[0],
        think_end=known[1],
        chat_template=template,
        get_vocab=lambda: dict.fromkeys(added),
        get_added_vocab=lambda: dict.fromkeys(added),
    )


@pytest.mark.parametrize("pair", SPELLED)
def test_markers_are_found_where_the_model_spells_them(pair):
    """Reasoning went to stdout, and `-R` hid nothing: mlx-lm knows four pairs."""
    start, end = pair
    template = f"{{% if '{end}' in m %}}{{{{ m }}}}{{% endif %}}{start}"
    assert find_markers(tokenizer(template)) == Markers(start, end)
    assert find_markers(tokenizer(added=["<s>", end, start])) == Markers(start, end)


@pytest.mark.parametrize(
    ("template", "added", "known", "expected"),
    [
        ("{{ reasoning_content }}[thinking] <think>", (), (None, None), None),
        ("", ["<|thinking_budget|>", "<think>"], (None, None), None),
        ("[THINK][/THINK]", ["<think>", "</think>"], ("<think>", "</think>"), "[THINK]"),
        ("", ["<think>", "</think>"], ("<think>", "</think>"), "<think>"),
        ("<|channel>thought x", [], ("<|channel>thought", "<channel|>"), "<|channel>thought"),
    ],
)
def test_which_markers_count(template, added, known, expected):
    """Guards: half a pair taken for markers; the pair that the template never uses."""
    found = find_markers(tokenizer(template, added, known))
    assert (found and found.start) == expected


@pytest.mark.parametrize(
    ("pieces", "inside", "expected"),
    [
        (["<th", "ink>w", "hy</thi", "nk>", "so"], False, [None, 8, 15, 18, 18]),
        (["why", "</think>so"], True, [3, 11]),
        ([" ", "so"], False, [None, 0]),
    ],
)
def test_how_much_is_no_answer(pieces, inside, expected):
    """Guards: a stop string found in reasoning, or missed right behind it."""
    splitter = ReasoningSplitter(THINK, inside)
    found = []
    for piece in pieces:
        splitter.push(piece)
        found.append(splitter.hidden_chars)
    assert found == expected
