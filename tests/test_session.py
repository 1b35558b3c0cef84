"""The speculative loop from outside: streams left, moved, forked; checkpoints; counters."""

from functools import lru_cache

import pytest
from oracle import (
    FAMILIES,
    Letters,
    check,
    engine,
    interrupts,
    one_of_each,
    plain,
    prompt,
)
from tiny import V, build

from ds4cli.drafters.links import Links
from ds4cli.drafters.ngram import NgramDrafter
from ds4cli.errors import ModelError
from ds4cli.settings import Settings

MORE_FAMILIES = (
    "qwen3_5",
    "kimi_linear",
    "jamba",
    "mamba",
    "plamo2",
    "recurrent_gemma",
    "baichuan_m1",
    "gear",
    "llama4",
    "deepseek_v32",
    "longcat_flash_ngram",
    "exaone4",
)


@lru_cache
def model(name):
    return build(name, scale=2.0)


def session_of(name, tokens, **settings):
    session = engine(name, model=model(name), **settings).session()
    session.sync(tokens)
    return session


def drain(stream):
    return [t for event in stream for t in event.tokens]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("qwen3_next", "gemma3_text") else pytest.mark.slow)
        for n in FAMILIES
    ],
)
def test_marks_of_plain_decoding_hold_the_state_of_their_position(name):
    """Plain decoding runs one call ahead: a checkpoint then held the state of the next token."""
    session = session_of(name, prompt(10), horizon_tokens=4)
    drain(session.stream(max_tokens=140))
    checkpoints = [f.pos for f in session._timeline.checkpoints.kept]
    assert len(checkpoints) >= 2 or session._timeline.can_cut
    for pos in [*reversed(checkpoints), *checkpoints]:
        session.rewind(pos)
        check(model(name), session)
        twin = session.fork()
        twin.sync([*twin.tokens, 5, 6])
        check(model(name), twin)


@pytest.mark.parametrize("name", FAMILIES)
def test_forks_stream_side_by_side(name):
    """Branches that shared the list of open blocks committed each other's tokens."""
    session = session_of(name, prompt(10))
    twin = session.fork()
    streams = session.stream(max_tokens=8), twin.stream(max_tokens=6)
    said = [[], []]
    for _ in range(5):
        for tokens, stream in zip(said, streams, strict=True):
            tokens += next(stream).tokens
    assert said == [plain(model(name), prompt(10), 5)] * 2
    for s, stream in zip((session, twin), streams, strict=True):
        stream.close()
        check(model(name), s)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_a_session_that_is_moved_while_it_streams(name, drafter):
    """Steps, rewinds and other streams between two events met the call that runs ahead."""
    truth = plain(model(name), prompt(10), 30)

    def begin():
        return session_of(name, prompt(10), drafter=drafter, speculate="always")

    session = begin()
    streams = session.stream(max_tokens=12), session.stream(max_tokens=9)
    for i in (0, 1, 0, 1, 1, 0):
        next(streams[i])
    session.step()
    for stream in streams:
        drain(stream)
    assert session.tokens[10:] == truth[: session.pos - 10]
    check(model(name), session)

    text = Letters().decode(truth)
    session = begin()
    for i, _ in enumerate(session.stream(max_tokens=30, stop=[text[9:13]])):
        if i == 3:
            session.rewind(11)
    assert session.tokens[10:] == truth[: text.index(text[9:13])]
    check(model(name), session)


def test_a_stream_ends_at_its_limit_when_the_session_was_moved_past_it():
    """The limit was not looked at again after an event."""
    session = session_of("llama", prompt(10))
    stream = session.stream(max_tokens=5)
    next(stream)
    session.sync(prompt(30))
    assert [(e.tokens, e.text, e.finish_reason) for e in stream] == [([], "", "length")]
    assert session.tokens == prompt(30)


@pytest.mark.parametrize("place", ["_drop_before", "append", "_merge", "_trim"])
def test_an_error_while_a_block_is_remembered_undoes_the_block(place, monkeypatch):
    """A step that raised had committed its tokens already, and nobody had seen them."""
    session = session_of("qwen3_next", prompt(20), horizon_tokens=16)
    drain(session.stream(max_tokens=40))

    def fail(*_):
        raise MemoryError("planted")

    for _ in range(70):
        before, record, row = session.tokens, session._timeline.last_block, session.logits
        with monkeypatch.context() as patch:
            patch.setattr(f"ds4cli.rewind.horizon.Horizon.{place}", fail)
            try:
                session.step(drafts=[1])
            except MemoryError:
                break
    assert (session.tokens, session._timeline.last_block) == (before, record)
    assert session.logits is row and not session._timeline.open_blocks
    for pos in (session.pos, session.pos - 3, session.pos - 1):
        session.rewind(pos)
        check(model("qwen3_next"), session)
    drain(session.stream(max_tokens=3))
    check(model("qwen3_next"), session)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_sync_cut_short_at_the_same_position_forgets_what_followed_there(drafter):
    """What was picked for, and drafted from, the old text was taken for the new one's."""
    session = session_of("llama", prompt(8), prefill_step_size=4, drafter=drafter)
    session.step()
    session.rewind(8)
    old = session.next_token()
    seeds = (s for s in range(2, 99) if plain(model("llama"), prompt(8, seed=s), 1) != [old])
    other = prompt(20, seed=next(seeds))
    calls = iter([False, False])  # and no third time
    with pytest.raises(StopIteration):
        session.sync(other, cancel=lambda: next(calls))
    assert session.tokens == other[:8]
    assert session.next_token() == plain(model("llama"), other[:8], 1)[0]
    assert drain(session.stream(max_tokens=6)) == plain(model("llama"), other[:8], 6)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_not_a_number_is_said_and_undone(drafter):
    """Plain decoding wrote token 0 for ever; a block stayed open and the next one was misread."""
    broken = build("llama", scale=2.0)
    session = engine("llama", model=broken, drafter=drafter, speculate="always").session()
    session.sync(prompt(10))
    good = broken.model.norm.weight
    broken.model.norm.weight = good * float("nan")
    with pytest.raises(ModelError):
        drain(session.stream(max_tokens=8))
    assert session.tokens == prompt(10)
    broken.model.norm.weight = good
    assert drain(session.stream(max_tokens=5)) == plain(broken, prompt(10), 5)
    broken.model.norm.weight = good * float("nan")
    session.sync([1, 2, 3])
    with pytest.raises(ModelError):
        session.next_token()


def test_another_attempt_or_other_settings_pick_anew():
    """/retry wrote the first token of the reply that it was to replace; `use` began with the first
    attempt again."""
    session = session_of("llama", prompt(10), temp=2.0)

    def picks():
        found = []
        for session.attempt in range(12):
            found.append(session.next_token())
        return found

    def expected(**settings):
        sampler = session.engine.sampler(Settings(**settings).filled())
        found = []
        for sampler.attempt in range(12):
            found.append(sampler.pick(session.logits[None], 10, ()).item())
        return found

    first = picks()
    assert first == expected(temp=2.0) and len(set(first)) > 1
    session.use(Settings(temp=2.0, seed=7))
    assert session.attempt == 11
    assert session.next_token() == expected(temp=2.0, seed=7)[11]
    assert picks() == expected(temp=2.0, seed=7) != first


@pytest.mark.parametrize("name", [*one_of_each(FAMILIES), *MORE_FAMILIES])
def test_forks_of_forks_write_and_go_back(name):
    """deepseek_v32 replaces its keys after each call: its values were still shared, and written."""
    session = session_of(name, prompt(18))
    session.checkpoint("turn")
    forks = [session.fork(), session.fork().fork()]
    session.step()
    session.rewind(9)
    session.step(drafts=[1, 2])
    forks[1].rewind(12)
    forks[1].step()
    for s in (*forks, session, session.fork()):
        s.sync([*s.tokens, 3, 4])
        check(model(name), s)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v32"])
def test_branches_that_share_rows_again_after_an_undo(name):
    """A branch that has rows of its own is not asked any more; what undoes the call in which it got
    them gives it the shared ones back, and its next write went into them."""
    first = session_of(name, prompt(18))
    second, third = first.fork(), first.fork()
    first.step(drafts=[1])
    for _ in range(2):  # the second call finds that nothing is shared
        second._timeline.feed([3])
        second._timeline.evaluate()
    third._timeline.feed([4])
    third._timeline.evaluate()
    second._timeline.abort()
    third._timeline.commit(1)
    for s in (second, first, third):
        s.sync([*s.tokens, 5, 6])
        check(model(name), s)
    check(model(name), first)
    check(model(name), third)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_at_any_line_of_the_index_leaves_a_usable_session(error):
    """Links half undone made every later move fail with a `KeyError`."""
    work = NgramDrafter.rewind, NgramDrafter._index, Links.extend, Links.drop
    whole, struck = session_of("llama", prompt(9), drafter="ngram", speculate="always"), 0
    whole.step(max_tokens=3)
    for interrupt in interrupts(*work, error=error):
        session = whole.fork()
        with interrupt:
            session.rewind(7)
            session.step(max_tokens=3)
        struck += interrupt.struck
        for pos in (6, 3):
            session.rewind(pos)
            session.step(max_tokens=3)
        assert not [n for n in session.engine.notices if "planted" not in n and "anew" in n]
        text = [*session.tokens, 2]
        assert session.drafter.propose(text, 8) == NgramDrafter().propose(text, 8)
    assert struck > 20
    check(model("llama"), session)


# -- what is counted and told ---------------------------------------------------------------------


def test_what_a_session_counts():
    """Guards: statistics that add up to something else than what was done."""
    session = session_of("qwen3_next", prompt(20), horizon_tokens=4, prefill_step_size=8)
    stats, before = session.stats, session.counters.forwards
    assert (stats.prompt_tokens, stats.cached_tokens, stats.forwards) == (20, 0, before)
    drain(session.stream(max_tokens=6))
    assert (stats.generated_tokens, stats.blocks, stats.accept_counts) == (6, 6, [6])
    assert stats.forwards == session.counters.forwards == before + 6
    report = session.rewind(9)
    assert (report.discarded, report.replayed > 0) == (17, True)
    assert (stats.rewinds, stats.discarded_tokens) == (1, 17)
    assert stats.replayed_tokens == report.replayed and stats.back_s == report.back_s > 0
    session.rewind(9)
    assert (stats.rewinds, stats.discarded_tokens) == (1, 17), "it stood there"
    session.sync(prompt(15))
    assert (stats.prompt_tokens, stats.cached_tokens) == (15, 9)
    assert stats.forwards == session.counters.forwards
    session.sync(prompt(12))
    assert (stats.rewinds, stats.discarded_tokens) == (2, 20)
    truth = plain(model("qwen3_next"), prompt(12), 3)
    step = session.step(drafts=[*truth[1:], (plain(model("qwen3_next"), prompt(12), 4)[3] + 1) % V])
    assert step.tokens == truth and stats.generated_tokens == 9
    assert (stats.proposed, stats.accepted, stats.by_drafter) == (3, 2, {"given": [3, 2]})
    assert stats.accept_counts == [6, 0, 1] and stats.forwards == session.counters.forwards
