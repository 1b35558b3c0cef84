"""The speculative loop from outside: streams that are left, moved, forked; marks; counters."""

from functools import lru_cache

import pytest
from oracle import FAMILIES, check, engine, plain, prompt
from tiny import build


@lru_cache
def model(name):
    return build(name, scale=2.0)


def session_of(name, tokens, **settings):
    session = engine(name, model=model(name), **settings).session()
    session.sync(tokens)
    return session


def drain(stream):
    return [t for event in stream for t in event.tokens]


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_of_plain_decoding_hold_the_state_of_their_position(name):
    """Plain decoding runs one call ahead: a mark taken then held the state of the next token."""
    session = session_of(name, prompt(10), horizon_tokens=4)
    drain(session.stream(max_tokens=140))
    marks = [f.pos for f in session._timeline.ladder.frontiers]
    assert len(marks) >= 2 or session._timeline.can_cut
    for pos in [*reversed(marks), *marks]:
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
