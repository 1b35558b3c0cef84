"""Speculative = plain and rewound = fresh, token for token, on every cache family (float32)."""

from functools import lru_cache

import mlx.core as mx
import pytest
from oracle import (
    FAMILIES,
    KINDS,
    REAL_HEADS,
    Letters,
    OracleDrafter,
    check,
    engine,
    one_of_each,
    plain,
    prompt,
)
from tiny import build

from ds4cli.errors import StateError
from ds4cli.sampling import Sampler

LENGTH = 16
PROMPT = 11


@lru_cache
def model(name, seed=0, scale=2.0):
    return build(name, seed=seed, scale=scale)


@lru_cache
def truth(name, temp):
    """What plain decoding through stock caches gives."""
    eng = engine(name, model=model(name), temp=temp)
    sampler = Sampler(eng.settings, token_limit=len(Letters())) if temp else None
    return tuple(plain(model(name), prompt(PROMPT), LENGTH, sampler))


def make_session(name, drafter, temp, k, **settings):
    """A session with one of the drafters of the suite."""
    draft = {
        "model": lambda: model("llama", seed=3),
        "hybrid": lambda: model("qwen3_next", seed=3),
        "self": lambda: model(name),
        "scaled": lambda: model(name, scale=1.94),
    }.get(drafter)
    kind = "ngram" if drafter == "ngram" else "none"
    options = {} if draft else {"drafter": kind}
    eng = engine(
        name,
        model=model(name),
        draft=draft() if draft else None,
        temp=temp,
        num_draft_tokens=k,
        speculate="always",
        **options,
        **settings,
    )
    session = eng.session()
    if drafter == "oracle":
        whole = [*prompt(PROMPT), *truth(name, temp)]
        session.drafter = OracleDrafter(whole, right=0.7)
    return session


def generate(session, n=LENGTH):
    session.sync(prompt(PROMPT))
    return [t for event in session.stream(max_tokens=n, stop=[]) for t in event.tokens]


SIZES = {"ngram": (1, 8), "self": (1, 5), "oracle": (1, 3, 8), "model": (2, 5)}
DRAFTERS = ("none", "ngram", "model", "hybrid", "self", "scaled", "oracle")


def pairs():
    """Every family with drafts that are right in part, every drafter on two or three kinds of
    state, at one temperature or the other; the rest is slow."""
    for i, name in enumerate(FAMILIES):
        for j, drafter in enumerate(DRAFTERS):
            for k, temp in enumerate((0.0, 0.8)):
                met = drafter == "oracle" or (name in KINDS and (i + j) % 3 == 0)
                often = met and (i + j + k) % 2
                yield pytest.param(drafter, name, temp, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("drafter", "name", "temp"), [*pairs()])
def test_output_does_not_depend_on_the_drafter(name, drafter, temp):
    """A wrongly rolled back layer, a stale draft state or a stray random draw changes the text."""
    for k in SIZES.get(drafter, (5,)):
        session = make_session(name, drafter, temp, k)
        assert tuple(generate(session)) == truth(name, temp), k
        check(model(name), session)
        if drafter == "self":
            assert session.stats.accepted == session.stats.proposed > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_of_the_record_after_every_step(name):
    """Total rejection, partial acceptance, rewinds in a row, forward again, then decoding on."""
    session = make_session(name, "oracle", 0.0, 5)
    session.sync(prompt(PROMPT))
    for _ in range(4):
        start = session.pos
        session.step()
        end = session.pos
        check(model(name), session)
        for pos in [*range(end, start - 1, -1), end, start, end]:
            report = session.rewind(pos)
            assert (report.forwards, report.source) in ((0, "block"), (0, "live"))
            assert session.pos == pos
            check(model(name), session)
    rest = [t for e in session.stream(max_tokens=5) for t in e.tokens]
    done = session.tokens[PROMPT:]
    assert tuple(done) == truth(name, 0.0)[: len(done)]
    assert rest == done[-5:]


@pytest.mark.parametrize("name", FAMILIES)
def test_rewinding_anywhere_then_decoding_on(name):
    """A rewind across windows, checkpoints and the prompt, then the same text again."""
    session = make_session(name, "oracle", 0.0, 3)
    generate(session)
    whole = session.tokens
    for pos in (24, 12, 20, 3, 1, 17, PROMPT):
        session.sync(whole[:pos])
        check(model(name), session)
    assert [t for e in session.stream(max_tokens=LENGTH) for t in e.tokens] == whole[PROMPT:]


@pytest.mark.parametrize("name", REAL_HEADS)
def test_heads_of_real_sizes_in_blocks_and_back(name):
    """A kernel that only real head sizes reach is another for a block than for a row, or is wrong
    after a rewind."""
    session = make_session(name, "self", 0.0, 5)
    assert tuple(generate(session)) == truth(name, 0.0)
    whole = session.tokens
    session.sync(whole[: PROMPT + 2])
    assert [t for e in session.stream(max_tokens=LENGTH - 2) for t in e.tokens] == whole[
        PROMPT + 2 :
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_syncing_to_an_edited_list(name):
    """An edit in the middle keeps the common prefix and nothing after it."""
    session = make_session(name, "ngram", 0.0, 3)
    generate(session)
    whole = session.tokens
    for at in (len(whole) - 3, 14, 6, 1):
        edited = [*whole[:at], (whole[at] + 1) % 97, *whole[at + 1 :]]
        session.sync(edited)
        assert session.tokens == edited
        check(model(name), session)
        session.sync(whole)
        check(model(name), session)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("n", [1, 9, 40, pytest.param(8, marks=pytest.mark.slow)])
def test_prompts_of_any_length_and_chunked(name, n):
    """A one-token prompt, one that wraps the window, one that is read in several calls."""
    session = engine(name, model=model(name), prefill_step_size=8).session()
    session.sync(prompt(n, seed=5))
    check(model(name), session)
    out = [t for e in session.stream(max_tokens=6) for t in e.tokens]
    assert out == plain(model(name), prompt(n, seed=5), 6)


@pytest.mark.parametrize("name", one_of_each(FAMILIES))
def test_eos_at_each_index_of_a_block(name):
    """Tokens after an EOS in the same block must be neither shown nor in the state."""
    expected = truth(name, 0.0)
    for index in range(1, 7):
        if expected[index] in expected[:index]:
            continue
        eng = engine(name, model=model(name), eos=[expected[index]], speculate="always")
        session = eng.session()
        session.drafter = OracleDrafter([*prompt(PROMPT), *expected], right=1.0)
        session.sync(prompt(PROMPT))
        events = list(session.stream(max_tokens=20))
        assert [t for e in events for t in e.tokens] == list(expected[:index])
        assert events[-1].finish_reason == "stop"
        assert session.tokens == [*prompt(PROMPT), *expected[:index]]
        check(model(name), session)


@pytest.mark.parametrize("name", one_of_each(FAMILIES))
def test_token_limit_at_each_index(name):
    """A limit inside a block cuts text, tokens and state at the same token; -1 has no limit."""
    for limit in range(1, 8):
        session = make_session(name, "oracle", 0.0, 5)
        session.drafter.right = 1.0
        session.sync(prompt(PROMPT))
        events = list(session.stream(max_tokens=limit))
        assert tuple(t for e in events for t in e.tokens) == truth(name, 0.0)[:limit]
        assert events[-1].finish_reason == "length"
        assert session.pos == PROMPT + limit
        check(model(name), session)


# Where a stop string begins, and how many tokens are guessed: at every place of a small block, and
# around the end of a large one.
STOPS = [*((at, 2) for at in (1, 2, 3)), *((at, 7) for at in (5, 6, 7, 8))]


@pytest.mark.parametrize("name", one_of_each(FAMILIES))
def test_stop_strings_inside_and_over_blocks(name):
    """A stop string cuts text, ids and state alike, wherever the block borders fall."""
    text = Letters().decode(truth(name, 0.0))
    for at, k in STOPS:
        stop = text[at : at + 3]
        if text.index(stop) != at:
            continue
        session = make_session(name, "oracle", 0.0, k)
        session.drafter.right = 1.0
        session.sync(prompt(PROMPT))
        events = list(session.stream(max_tokens=20, stop=[stop]))
        assert "".join(e.text for e in events) == text[:at]
        assert [t for e in events for t in e.tokens] == list(truth(name, 0.0)[:at])
        assert events[-1].finish_reason == "stop"
        assert session.pos == PROMPT + at
        check(model(name), session)


def test_unlimited_generation_goes_on():
    """max_tokens -1 must neither stop at once nor crash."""
    session = engine("llama", model=model("llama")).session()
    session.sync(prompt(4))
    stream = session.stream(max_tokens=-1)
    assert sum(len(next(stream).tokens) for _ in range(40)) >= 40


def test_stepping_on_nothing_is_refused():
    """An empty session has no row to sample from: say so instead of guessing."""
    with pytest.raises(StateError):
        engine("llama", model=model("llama")).session().step()


def test_rewind_outside_is_refused_and_changes_nothing():
    """A rewind that cannot be done must not half happen."""
    session = engine("qwen3_next", model=model("qwen3_next")).session()
    session.sync(prompt(9))
    for pos in (-1, 10, 500):
        with pytest.raises(StateError):
            session.rewind(pos)
    assert session.tokens == prompt(9)
    check(model("qwen3_next"), session)


@pytest.mark.parametrize("name", FAMILIES)
def test_forks_are_independent(name):
    """Both branches write; neither may show in the other."""
    session = make_session(name, "oracle", 0.0, 3)
    session.sync(prompt(PROMPT))
    other = session.fork()
    other.sync([*prompt(PROMPT), 5, 6, 7])
    session.step()
    session.step()
    other.step()
    for s in (session, other):
        check(model(name), s)
    other.rewind(4)
    session.rewind(7)
    for s in (session, other):
        check(model(name), s)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_sessions_go_on_alike(name, tmp_path):
    """Loading costs no prefill, undo works after it, and the text is the same."""
    eng = engine(name, model=model(name), prefill_step_size=8)
    session = eng.session()
    session.sync(prompt(20))
    session.checkpoint("turn")
    session.sync([*prompt(20), 1, 2, 3])
    session.save(tmp_path / "s")
    loaded = eng.load_session(tmp_path / "s")
    assert loaded._timeline.counters.forwards == 0
    assert loaded.tokens == session.tokens
    check(model(name), loaded)
    loaded.rewind(20)
    check(model(name), loaded)
    assert loaded._timeline.counters.fed_tokens <= 1
    session.rewind(20)
    for s in (session, loaded):
        s.out = [t for e in s.stream(max_tokens=8) for t in e.tokens]
    assert session.out == loaded.out


def test_half_precision_is_within_a_margin():
    """bfloat16: each emitted token is within a stated margin of the best, by teacher forcing."""
    bf16 = build("qwen3_next", scale=2.0, dtype=mx.bfloat16)
    session = engine("qwen3_next", model=bf16, drafter="ngram").session()
    session.sync(prompt(PROMPT))
    out = [t for e in session.stream(max_tokens=16) for t in e.tokens]
    rows = bf16(mx.array(session.tokens)[None])[0, PROMPT - 1 : -1].astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(out)[:, None], axis=1)[:, 0]
    assert (rows.max(axis=1) - chosen).max().item() < 0.25
