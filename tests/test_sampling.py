"""Picks are exact samples, keyed by position, and pure functions of each row's own history."""

import math
from collections import Counter
from functools import lru_cache

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
)

from ds4cli.errors import ModelError, UsageError
from ds4cli.sampling import Asked, Sampler, pick_together, position_key, refuse_nan
from ds4cli.settings import Settings

V = 61
PADDED = 64
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def sampler(limit=V, **settings):
    return Sampler(Settings(**settings), token_limit=limit)


def logits(k, width=PADDED, seed=0, scale=2.0):
    return mx.random.normal((k, width), key=mx.random.key(seed)) * scale


def history(n, seed=9):
    return mx.random.randint(0, V, (n,), key=mx.random.key(seed)).tolist()


@lru_cache
def draws(k, n=4200, **settings):
    """n picks at temperature 1 from one row over 12 ids, k positions per call."""
    s = sampler(12, temp=1.0, **settings)
    rows = mx.broadcast_to(logits(1, 12, scale=1.0), (k, 12))
    return [p for pos in range(0, n, k) for p in s.pick(rows, pos, []).tolist()]


# --- exactness --------------------------------------------------------------------------------


def test_picks_follow_the_softmax():
    """Noise that is not Gumbel, or that repeats over positions, would bend the distribution."""
    picks = draws(1)
    expected = (mx.softmax(logits(1, 12, scale=1.0)[0]) * len(picks)).tolist()
    chi2 = sum((picks.count(i) - e) ** 2 / e for i, e in enumerate(expected))
    assert chi2 < 31.3  # 11 degrees of freedom, p = 0.001


def test_a_block_picks_what_single_rows_pick():
    """Drafted text differs from plain text if a row's noise depends on the block's size."""
    assert draws(5) == draws(1)


def test_neighbouring_positions_are_independent():
    """Correlated keys would make a token depend on the one before it."""
    n, pairs = 12, 2160
    picks = sampler(n, temp=1.0).pick(mx.zeros((2 * pairs, n)), 0, []).tolist()
    seen = Counter(zip(picks[::2], picks[1::2], strict=True))
    expected = pairs / n**2
    chi2 = sum((seen[i, j] - expected) ** 2 / expected for i in range(n) for j in range(n))
    assert chi2 < 199  # 143 degrees of freedom, p = 0.001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temp": 0.8},
        {"temp": 1.3, "top_p": 0.9, "min_p": 0.02, "top_k": 20},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temp": 0.8, "frequency_penalty": 0.7, "repetition_context_size": 7},
        {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01, "top_k": 40},
    ],
    ids=str,
)
def test_rows_do_not_depend_on_their_block(settings, dtype):
    """A pick must be the same alone, in a block, and in any other block."""
    s, rows, tokens = sampler(**settings), logits(8).astype(dtype), history(30)
    block = s.pick(rows, 20, tokens).tolist()
    alone = [s.pick(rows[i : i + 1], 20 + i, tokens).item() for i in range(8)]
    assert block == alone
    assert s.pick(rows[3:], 23, tokens).tolist() == block[3:]


def test_seed_attempt_and_position_decide():
    """A retry must draw anew, and the same (seed, attempt, position) must draw the same."""
    rows = mx.zeros((40, V))
    s = sampler(temp=1.0, seed=7)
    first = s.pick(rows, 0, []).tolist()
    assert s.pick(rows, 0, []).tolist() == first
    assert sampler(temp=1.0, seed=7).pick(rows, 0, []).tolist() == first
    others = [sampler(temp=1.0, seed=8).pick(rows, 0, []).tolist(), s.pick(rows, 40, []).tolist()]
    s.attempt = 1
    others.append(s.pick(rows, 0, []).tolist())
    s.attempt = 0
    assert s.pick(rows, 0, []).tolist() == first
    for other in others:
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 8


def test_keys_are_stable():
    """A saved session must go on with the same text on another machine or Python."""
    assert position_key(0, 0, 0) == 0x238275BC38FCBE91
    assert position_key(2**63 - 1, 1, 10**6) == 0xA80FBA782A21E8FE
    assert (
        len({position_key(s, a, p) for s in range(9) for a in range(9) for p in range(99)}) == 8019
    )


def test_greedy_takes_the_first_of_ties_and_ignores_the_seed():
    """Ties broken by chance or by block size make greedy text irreproducible."""
    rows = mx.zeros((3, PADDED)).at[:, mx.array([5, 9])].add(2.0)
    for seed in (0, 1):
        assert sampler(seed=seed).pick(rows, 4, []).tolist() == [5, 5, 5]


# --- padded vocabularies ----------------------------------------------------------------------


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_padding_is_never_picked(temp):
    """Untrained rows beyond the tokenizer crash the detokeniser."""
    rows = mx.zeros((50, PADDED)).at[:, V:].add(100.0)
    assert max(sampler(temp=temp).pick(rows, 0, []).tolist()) < V


@pytest.mark.parametrize("width", [V, PADDED, 2 * PADDED])
def test_padding_does_not_move_the_noise(width):
    """A draft model with other padding must see the target's noise, or its guesses are chance."""
    rows = logits(6)[:, :V]
    padded = mx.pad(rows, [(0, 0), (0, width - V)])
    s = sampler(temp=1.0)
    assert s.pick(padded, 3, []).tolist() == s.pick(rows, 3, []).tolist()


def test_noise_is_drawn_for_many_positions_at_once(monkeypatch):
    """A draw traced for every token: 0.2 ms of it, with the device waiting."""
    traced, vmap = [], mx.vmap
    monkeypatch.setattr(mx, "vmap", lambda f: traced.append(f) or vmap(f))
    s, row = sampler(temp=1.0), logits(1)
    for pos in range(7, 7 + 64):
        s.pick(row, pos, [])
    assert len(traced) == 2


def test_noise_depends_on_position_and_attempt_only():
    """Noise that was drawn with others differs from noise drawn alone, or outlives its attempt."""
    rows, ahead = logits(40), sampler(temp=1.0)
    order = [(0, 20), (20, 1), (19, 5), (31, 2), (3, 1), (0, 40), (38, 2), (30, 9)]
    for attempt in (0, 1, 0):
        for pos, k in order:
            alone = sampler(temp=1.0)
            ahead.attempt = alone.attempt = attempt
            part = rows[pos : pos + k]
            want = [alone.pick(part[i : i + 1], pos + i, []).item() for i in range(k)]
            assert ahead.pick(part, pos, []).tolist() == want


def test_a_head_narrower_than_the_tokenizer_works():
    """Some tokenizers have ids that the model has no row for."""
    s = sampler(V, temp=1.0, repetition_penalty=1.2)
    assert max(s.pick(logits(4, V - 9), 8, [*history(8), V - 1, V - 2, V - 3]).tolist()) < V - 9


# --- filters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_k": V},
        {"top_p": 0.9, "min_p": 0.05, "top_k": 6},
    ],
    ids=str,
)
def test_filters_keep_what_mlx_lm_keeps(settings):
    """Another order or threshold than mlx-lm's changes what a known setting means."""
    row = logits(1, V, scale=1.5)
    s = sampler(temp=1e4, **settings)  # all that is kept is as good as equally likely
    picks = s.pick(mx.broadcast_to(row, (3000, V)), 0, []).tolist()
    kept = row - mx.logsumexp(row)
    kept = apply_top_p(kept, settings["top_p"]) if "top_p" in settings else kept
    kept = apply_min_p(kept, settings["min_p"]) if "min_p" in settings else kept
    kept = apply_top_k(kept, settings["top_k"]) if settings.get("top_k", V) < V else kept
    assert set(picks) == {i for i, x in enumerate(kept[0].tolist()) if x > -math.inf}


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 3}], ids=str)
def test_xtc_drops_what_mlx_lm_drops(more):
    """Guards: another threshold, order or sparing than mlx-lm's."""
    row, spared = logits(1, V, scale=3), [int(mx.argmax(logits(1, V, scale=3)))]
    s = Sampler(Settings(temp=1e4, xtc_probability=1.0, **more), V, spared)
    picks = s.pick(mx.broadcast_to(row, (3000, V)), 0, []).tolist()
    kept = row - mx.logsumexp(row)
    kept = apply_top_p(kept, more["top_p"]) if "top_p" in more else kept
    kept = apply_min_p(kept, more["min_p"]) if "min_p" in more else kept
    cut = apply_xtc(kept, 1.0, 0.1, spared)
    assert not mx.array_equal(cut, kept)
    cut = apply_top_k(cut, more["top_k"]) if "top_k" in more else cut
    assert set(picks) == {i for i, x in enumerate(cut[0].tolist()) if x > -math.inf}
    assert spared[0] in picks


def test_the_chance_of_xtc_belongs_to_the_position():
    """Guards: a chance that is drawn once for all rows, too often, or anew for a drafted token."""
    rows = mx.broadcast_to(mx.array([[5.0, 4.0, 0.0]]), (2000, 3))
    s = Sampler(Settings(temp=0.01, xtc_probability=0.3), 3)  # the best token, or the second
    picks = s.pick(rows, 0, []).tolist()
    assert 500 < sum(picks) < 700 and set(picks) == {0, 1}
    assert s.pick(rows[:9], 700, []).tolist() == picks[700:709]
    s.attempt = 1
    assert s.pick(rows, 0, []).tolist() != picks
    assert Sampler(Settings(xtc_probability=0.0), 3).kind is not None and s.kind is None


def test_temperature_sharpens_after_the_filters():
    """mlx-lm filters at temperature 1: a hot sampler must not widen the nucleus."""
    row = mx.array([[math.log(0.6), math.log(0.3), math.log(0.1)]])
    picks = sampler(3, temp=50.0, top_p=0.85).pick(mx.broadcast_to(row, (300, 3)), 0, [])
    assert set(picks.tolist()) == {0, 1}


# --- penalties --------------------------------------------------------------------------------

PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"logit_bias": {3: 4.0, 17: -9.0}},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.5},
    },
]


def reference(row, tokens, settings, context):
    """mlx-lm's processors on one row with its own history."""
    names = ("repetition", "presence", "frequency")
    sizes = {f"{name}_context_size": len(tokens) if context < 0 else context for name in names}
    row = row[:, :V].astype(mx.float32)
    for process in make_logits_processors(**settings, **sizes):
        row = process(mx.array(tokens), row)
    return row


@pytest.mark.parametrize("context", [-1, 1, 10, 200])
@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_penalties_equal_mlx_lm_row_by_row(settings, context):
    """A row that misses the prompt, its block's drafts, or counts a rejected draft changes text."""
    s = sampler(repetition_context_size=context, **settings)
    tokens, rows = history(40), logits(6)
    for pos in (30, 31, 12, 34, 1):  # forward, back, far forward
        got = s._penalise(rows[:, :V], pos, tokens)
        for i in range(6):
            expected = reference(rows[i : i + 1], tokens[: pos + i], settings, context)
            assert mx.allclose(got[i], expected[0], atol=1e-5).item()


def test_penalties_follow_edits_of_the_past():
    """Counts kept for an older history must not survive an edit of the same length."""
    s, rows = sampler(repetition_penalty=3.0, frequency_penalty=1.0), logits(1)
    for seed in (1, 2, 1, 3):
        tokens = history(25, seed)
        fresh = sampler(repetition_penalty=3.0, frequency_penalty=1.0)
        assert s.pick(rows, 25, tokens).item() == fresh.pick(rows, 25, tokens).item()
        assert mx.array_equal(s._counts._base, fresh._counts._base).item()


def test_a_context_of_zero_looks_at_nothing():
    """`tokens[-0:]` is the whole history: the smallest context must not become the largest."""
    s = sampler(repetition_penalty=5.0, repetition_context_size=0)
    assert not s.needs_history
    assert s.pick(logits(1), 9, history(9)).item() == sampler().pick(logits(1), 9, []).item()


def test_history_is_needed_only_by_penalties():
    """Plain decoding must not wait for tokens on the host."""
    assert not sampler(temp=0.7, top_p=0.9, logit_bias={1: 2.0}).needs_history
    assert all(sampler(**s).needs_history for s in PENALTIES[:4])


def test_a_bias_beyond_the_vocabulary_is_refused():
    """A bias on a padded id would silently do nothing."""
    with pytest.raises(UsageError, match=f"`{V}`"):
        sampler(logit_bias={V: 1.0})


# --- masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_mask_that_allows_the_pick_changes_nothing(temp):
    """Masking only from the first bad token on must give the text of masking throughout."""
    s, rows = sampler(temp=temp, top_p=0.8), logits(40)
    free = s.pick(rows, 0, []).tolist()
    for width in (V, PADDED):
        mask = mx.random.bernoulli(0.5, (width,), key=mx.random.key(width))
        masked = s.pick(rows, 0, [], mask).tolist()
        allowed = mask.tolist()
        assert all(allowed[pick] for pick in masked)
        assert all(m == f for m, f in zip(masked, free, strict=True) if allowed[f])


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_a_mask_comes_after_the_filters(temp):
    """A filter applied to the masked row would let ids in that the settings exclude."""
    row = mx.array([[5.0, 4.0, 3.9, 1.0]])
    s = sampler(4, temp=temp, top_k=2)
    mask = mx.array([False, True, True, True])
    picks = s.pick(mx.broadcast_to(row, (60, 4)), 0, [], mask).tolist()
    assert set(picks) == {1}


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_without_an_allowed_id_the_whole_row_counts(temp):
    """A filter and a mask with nothing in common must not leave an arbitrary id."""
    rows = mx.broadcast_to(mx.array([[9.0, 1.0, 2.0, 8.0]]), (60, 4))
    s = sampler(4, temp=temp, top_k=1)
    picks = s.pick(rows, 0, [], mx.array([False, True, True, False])).tolist()
    assert set(picks) == ({2} if temp == 0 else {1, 2})


def test_each_row_has_its_own_mask():
    """A grammar's state differs from position to position inside a block."""
    mask = mx.eye(V, dtype=mx.bool_)[:5]
    assert sampler(temp=1.0).pick(logits(5), 0, [], mask).tolist() == [0, 1, 2, 3, 4]


# --- bad numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"temp": 1.0, "top_k": 4, "min_p": 0.1}, {"presence_penalty": 1.0}], ids=str
)
def test_a_row_of_nan_is_refused(settings):
    """A model that overflows must say so, not print one token for ever."""
    rows = mx.concatenate([logits(2), mx.full((1, PADDED), mx.nan)])
    picks = sampler(**settings).pick(rows, 0, [0, 1, 2]).tolist()
    refuse_nan(rows[:2], [0, picks[1]])
    with pytest.raises(ModelError, match="not a number"):
        refuse_nan(rows, picks)


# --- several samplers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds",
    [
        [{"temp": 0.8, "seed": 1}, {"temp": 0.8, "seed": 2}],
        [{"temp": 0.0}, {"temp": 0.0, "top_k": 3}],
        [{"temp": 0.8}, {"temp": 0.0}],
        [{"temp": 0.8}, {"temp": 0.8, "top_k": 3}],
        [{"temp": 0.8}, {"temp": 0.8, "repetition_penalty": 1.5}],
        [{"temp": 0.8}, {"temp": 0.8, "logit_bias": {3: 9.0}}],
        [{"temp": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.01}] * 2,
    ],
    ids=str,
)
def test_several_samplers_pick_what_each_picks_alone(kinds):
    """A lane's noise, settings or history taken for another's."""
    tokens = history(30)
    asked = [Asked(sampler(**kind), 2 + i, 20 + 3 * i, tokens) for i, kind in enumerate(kinds)]
    own = [logits(2 + i, seed=i) for i in range(len(kinds))]
    pairs = zip(asked, own, strict=True)
    alone = [p for a, rows in pairs for p in a.sampler.pick(rows, a.pos, tokens).tolist()]
    assert pick_together(mx.concatenate(own), asked).tolist() == alone
    assert pick_together(own[0], asked[:1]).tolist() == alone[:2]


def test_a_row_without_an_allowed_id_leaves_the_others_their_filters():
    """One row's fallback to all it has was every row's."""
    s = sampler(12, temp=1.0, top_k=1)
    rows, mask = mx.zeros((40, 12)), mx.arange(12) == 5
    rows[:, 5] = 1.0
    rows[0, 3] = 2.0
    assert s.pick(rows, 0, [], mask).tolist() == [5] * 40
    masks = mx.concatenate([mask[None], mx.ones((39, 12), mx.bool_)])
    assert s.pick(rows, 0, [], masks).tolist() == [5] * 40


def test_a_mask_that_ends_early_allows_nothing_behind_its_end():
    """A grammar of a smaller vocabulary than the head's."""
    rows = mx.zeros((2, 12))
    rows[:, 9] = 5.0
    for mask in (mx.ones(6, mx.bool_), mx.ones((2, 6), mx.bool_), mx.ones(12, mx.bool_)):
        picks = sampler(12).pick(rows, 0, [], mask).tolist()
        assert picks == ([9, 9] if mask.shape[-1] == 12 else [0, 0])
