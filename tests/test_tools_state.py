"""Tokens that a guard has not shown, cut at a character."""

from __future__ import annotations

import pytest

from ds4cli.tools import FORMATS
from ds4cli.tools.state import State, split, without

HELD = ((5, "ab"), (6, ""), (7, "cde"), (8, "f"))


@pytest.mark.parametrize(
    ("at", "shown", "rest"),
    [(0, "", 0), (1, "", 0), (2, "ab", 2), (4, "ab", 2), (5, "abcde", 3), (6, "abcdef", 4)],
)
def test_tokens_are_shown_whole(at, shown, rest):
    """Guards: half a token shown, or one held that ends where the cut is."""
    assert split(HELD, at) == (shown, HELD[rest:])


@pytest.mark.parametrize(
    ("n", "left"),
    [(0, HELD), (1, ((5, "b"), *HELD[1:])), (2, HELD[2:]), (4, ((7, "e"), HELD[3])), (6, ())],
)
def test_characters_go_from_the_front(n, left):
    """Guards: text shown twice, or never; a token at the position of another."""
    assert without(HELD, n) == left


def test_a_call_is_known_by_its_first_token():
    state = State("call", held=((5, "ab<tool"), (6, "_call>")), before="ab")
    assert (state.opened, state.first_text) == (5, "<tool")


def test_where_only_markers_open_calls():
    """Guards: a sentence that holds a call without a marker, taken for one."""
    marked, bare = FORMATS["json_tools"], FORMATS["pythonic_bare"]
    assert State().is_settled(marked) and not State().is_settled(bare)
    assert State(begun=True).is_settled(bare) and State(mode="code").is_settled(bare)
