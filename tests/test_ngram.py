"""The n-gram drafter: the longest match, found in constant time, wherever the session has gone."""

import random
import subprocess
import sys

import pytest
from counting import CountedCalls
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.links import MAX_MATCH
from ds4cli.drafters.making import make
from ds4cli.drafters.ngram import ORDERS, NgramDrafter
from ds4cli.settings import Settings


def propose(tokens, n=8, drafter=None):
    return (drafter or NgramDrafter()).propose(tokens, n)


def noise(n, seed=0, ids=5000):
    """Tokens that hardly repeat, out of the way of the small ids in the tests."""
    rng = random.Random(seed)
    return [rng.randrange(100, 100 + ids) for _ in range(n)]


def longest_match(tokens):
    """By brute force: the longest suffix that occurs before, up to MAX_MATCH."""
    size = len(tokens)
    for length in range(min(MAX_MATCH, size - 1), 0, -1):
        if any(tokens[i : i + length] == tokens[size - length :] for i in range(size - length)):
            return length
    return 0


def test_copies_what_followed():
    """The drafter must find a passage of the prompt that the reply repeats."""
    passage = noise(40)
    assert propose([*noise(99, 1), *passage, 1, 2, 3, *passage[:6]], 20) == passage[6:26]


def test_nothing_known_is_no_guess():
    """Guesses without a match are wasted rows."""
    drafter = NgramDrafter()
    assert propose([1, 2, 3, 4], drafter=drafter) == [] and drafter.confidence == 0
    assert propose([7]) == [] and propose([]) == [] and propose([1, 1], n=0) == []


def test_the_longest_match_wins_over_the_most_recent():
    """A recent match of two tokens must not hide a match of ten."""
    passage = list(range(1, 11))
    tokens = [*passage, 11, *noise(50), 9, 10, 12, *noise(50, 1), *passage]
    drafter = NgramDrafter()
    assert propose(tokens, 1, drafter) == [11] and drafter.confidence == 10


def test_frequency_breaks_ties_then_recency():
    """Of equally long matches the usual continuation is the better guess, then the newest."""
    often = [1, 2, 3, *noise(9, 1), 1, 2, 3, *noise(9, 2), 1, 2, 4, *noise(9, 3), 1, 2]
    assert propose(often, 1) == [3]
    once_each = [1, 2, 3, *noise(9, 1), 1, 2, 4, *noise(9, 2), 1, 2]
    assert propose(once_each, 1) == [4]


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_periodic_text_extends_itself(period):
    """A match that touches the end of the text must not end the draft there."""
    cycle = noise(period)
    tokens = (cycle * 20)[: 6 * period + 2]
    expected = (cycle * 40)[len(tokens) : len(tokens) + 12]
    assert propose(tokens, 12) == expected


def test_longer_matches_draft_longer():
    """Match length is the only sign of how far a copy will go."""
    passage = noise(60)
    lengths = [len(propose([*passage, 1, *passage[:n]], 32)) for n in (1, 2, 3, 10)]
    assert lengths == sorted(lengths) and lengths[0] == 2 and lengths[-1] == 32


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_confidence_is_the_match_and_drafts_fit(tokens, n):
    """A wrong length misleads the draft policy; too many drafts overrun the block."""
    drafter = NgramDrafter()
    drafts = drafter.propose(tokens, n)
    assert len(drafts) <= n and (len(drafts) > 0) == (drafter.confidence > 0)
    longest = longest_match(tokens)
    assert drafter.confidence <= longest
    assert min(drafter.confidence, ORDERS[0]) >= max(o for o in (0, *ORDERS) if o <= longest)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_history_of_moves_equals_a_fresh_drafter(data):
    """A link left behind by a rewind, or lost with it, would point at tokens that are gone."""
    drafter, tokens = NgramDrafter(), []
    for _ in range(data.draw(st.integers(1, 8))):
        pos = data.draw(st.integers(0, len(tokens)))
        tokens = tokens[:pos] + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        if data.draw(st.booleans()):
            drafter.rewind(pos)
            fresh = NgramDrafter()
            assert drafter.propose(tokens, 6) == fresh.propose(tokens, 6)
            assert drafter._links._chains == fresh._links._chains
        else:  # not announced: anything goes, as long as it is a draft
            assert len(drafter.propose(tokens, 6)) <= 6


def test_an_unannounced_edit_is_noticed():
    """Tokens that changed without a call must not be matched for ever."""
    drafter, passage = NgramDrafter(), noise(30)
    drafter.propose([*noise(200, 1), *passage], 4)
    edited = [*noise(180, 2), *passage[:6]]
    drafter.propose(edited, 4)
    assert drafter._tokens == edited


def test_a_block_costs_the_same_in_a_long_text():
    """Looking for a match must not grow with the text: every block pays for it."""
    per_block = []
    for length in (1_000, 16_000):
        drafter, tokens = NgramDrafter(), noise(length, ids=300)
        drafter.propose(tokens, 16)
        more = noise(300, 1, 150) + tokens[200:500] + [1, 2, 3] * 100
        with CountedCalls() as counted:
            for token in more:
                tokens.append(token)
                drafter.propose(tokens, 16)
        per_block.append(counted.calls / len(more))
    short, long = per_block
    assert long < 1.3 * short and long < 90


def test_no_mlx():
    """The drafter is pure: it must not wait for mlx."""
    code = "import sys, ds4cli.drafters.ngram; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_make_follows_the_settings():
    """A flag that is parsed and not passed on gives the same speed for every choice."""
    assert make(Settings(), None).name == "ngram"
    assert make(Settings(drafter="ngram"), None).name == "ngram"
    for off in (Settings(drafter="none"), Settings(speculate="never")):
        assert make(off, None).name == "none"
    assert Drafter().propose([1, 1, 1], 4) == []
