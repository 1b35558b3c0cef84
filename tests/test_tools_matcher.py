"""What a grammar says of one call, by a matcher that lets anything stand but capitals."""

from __future__ import annotations

import numpy as np
import pytest

from ds4cli.tools.matcher import Limits

A, B, X = ord("a"), ord("b"), ord("X")
MARKED = 200  # a token that holds text and the beginning of a marker
SIZE = 256


def _is_refused(token):
    return ord("A") <= token <= ord("Z")


class Live:
    """llguidance's matcher, as far as it is asked. breaks: the token that it cannot compute."""

    def __init__(self, breaks=None):
        self.ids, self.breaks, self.broken = [], breaks, False

    def try_consume_tokens(self, tokens):
        self.broken = self.breaks in tokens
        taken = next((i for i, t in enumerate(tokens) if t == self.breaks or _is_refused(t)),
                     len(tokens))  # fmt: skip
        self.ids += tokens[:taken]
        return taken

    def rollback(self, n):
        assert 0 <= n <= len(self.ids)
        del self.ids[len(self.ids) - n :]

    def validate_tokens(self, tokens):
        assert isinstance(tokens, list)
        return next((i for i, t in enumerate(tokens) if _is_refused(t)), len(tokens))

    def compute_ff_tokens(self):
        return [self.ids[-1] + 1]

    def is_accepting(self):
        return self.ids[-1] == ord("z")

    def is_error(self):
        return self.broken

    def get_error(self):
        return "\nout of room\nmore of it"


class Grammar:
    """One token a character, but for MARKED; `live`: the matcher of the last call."""

    def __init__(self, breaks=None, marked=b"xy<"):
        self.breaks, self.marked, self.made = breaks, marked, 0

    def matcher(self):
        self.made, self.live = self.made + 1, Live(self.breaks)
        return self.live

    def forcing(self):
        return [Live()]

    def bytes_of(self, token):
        return self.marked if token == MARKED else bytes([token])

    def tokens_of(self, data):
        return [*data]

    def mask(self, live, size):
        mask = np.ones(size, bool)
        if live is not None:
            mask[65:91] = False
        return mask

    def instead(self, live, tokens, pick, size):
        return live, [*tokens], pick, size


def limits(**how):
    grammar = Grammar(**how)
    return grammar, Limits(grammar)


def test_a_matcher_consumes_what_is_new():
    """Guards: a token consumed twice, or left out."""
    grammar, call = limits()
    matcher = call.matcher(10, [A], "a")
    assert grammar.live.ids == [A] and matcher.opened == 10
    assert call.matcher(10, [A], "a") is call.matcher(10, [A, B, B], "a") is matcher
    for n in (4, 5, 6):
        call.matcher(10, [A, B, B, B, A, B][:n], "a")
    assert grammar.live.ids == [A, B, B, B, A, B] and grammar.made == 1
    assert call.matcher(13, [B], "b") is not matcher and grammar.live.ids == [B]
    assert not call.matcher(13, [B], "b").is_accepting()
    assert call.matcher(13, [B, ord("z")], "b").is_accepting()


@pytest.mark.parametrize(("marked", "lead"), [(b"x<y<", [60]), (b"x<", [60]), (b"<a", [MARKED])])
def test_a_marker_may_begin_inside_a_token(marked, lead):
    """Guards: the text before a marker given to the grammar of calls."""
    grammar, call = limits(marked=marked)
    matcher = call.matcher(10, [MARKED, A], "<a" if lead == [MARKED] else "<")
    assert grammar.live.ids == [*lead, A] and matcher.refused(12) is None
    assert limits(marked=b"xy")[1].matcher(10, [MARKED], "<") is None, "it is not in it"


def test_a_token_that_was_refused_is_named():
    """Guards: a repair that goes back to another place."""
    _, call = limits()
    matcher = call.matcher(10, [A, B, X, A], "a")
    assert matcher.refused(14) == 12 and matcher.refused(12) is None
    assert call.matcher(20, [X, A], "X").refused(22) == 20
    lead = call.matcher(20, [X, A], "X")
    assert lead.rewind(21) and lead.refused(21) == 20


def test_a_matcher_goes_back():
    grammar, call = limits()
    matcher = call.matcher(10, [A, B, X], "a")
    assert matcher.rewind(13) and grammar.live.ids == [A, B], "what was refused is not in it"
    assert matcher.forced([]) == [B + 1]
    assert matcher.rewind(11) and grammar.live.ids == [A] and matcher.forced([]) == [A + 1]
    assert call.matcher(10, [A, A], "a").refused(12) is None and grammar.live.ids == [A, A]
    assert not matcher.rewind(10) and matcher.forced([ord("p")]) == [ord("q")]
    call.rewind(12)
    assert call.matcher(10, [A, A], "a") is matcher
    call.rewind(10)
    assert call.matcher(10, [A], "a") is not matcher


def test_what_fits():
    _, call = limits()
    matcher = call.matcher(10, [A], "a")
    assert matcher.fitting((A, B, X, A)) == 2
    live, *asked = call.instead(matcher, [A], X, SIZE)
    assert live is matcher.live and asked == [[A], X, SIZE]


def test_what_was_wrong_is_not_allowed_again():
    """Guards: the same wrong token picked for ever; one that was wrong elsewhere forbidden here."""
    _, call = limits()
    matcher = call.matcher(10, [A], "a")
    for pos, token in ((11, A), (11, B), (12, A), (11, SIZE)):
        call.ban(pos, token)
    mask = call.mask(matcher, 11, SIZE)
    assert (mask.shape, mask.dtype) == ((SIZE,), bool) and not mask[[A, B, X]].any()
    assert call.mask(None, 12, SIZE).sum() == SIZE - 1 and call.mask(None, 13, SIZE).all()
    call.rewind(11)
    assert call.mask(None, 11, SIZE).sum() == SIZE - 2 and call.mask(None, 12, SIZE).all()
    call.rewind(5)
    assert call.mask(None, 11, SIZE).all()


def test_a_grammar_that_gives_up_says_why():
    """Guards: a call that nobody checks any more, and nobody says so."""
    _, call = limits(breaks=B)
    assert call.matcher(10, [A], "a") is not None and call.gave_up == ""
    assert call.matcher(10, [A, B], "a") is None
    assert call.gave_up == "the grammar was given up inside a call: out of room"
    assert call.matcher(10, [A, B, A], "a") is None
    call.rewind(11)
    assert call.matcher(10, [A], "a") is None


def test_half_a_character_has_a_spelling():
    _, call = limits(marked="é".encode()[:1])
    assert call.spelled(A) == "a" and call.spelled(MARKED) == "\ufffd"
