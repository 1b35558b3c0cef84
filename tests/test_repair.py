"""Tool calls in a real session: repairs inside the record, ends of replies, what is counted."""

import json
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache
from test_tools_exact import BAD, GOOD, LENGTH, FakeModel, Loop, copying
from toolkit import TOOLS, tokenizer

from ds4cli.drafters.drafter import Drafter
from ds4cli.engine.engine import Engine
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings
from ds4cli.tools import FORMATS, Guard

PROMPT = [1, 2, 3]


class ScriptedModel(nn.Module):
    """Serves `FakeModel` rows. The tokens it has seen stand in its KV rows, and nowhere else: a
    wrong rewind shows as other logits."""

    def __init__(self, fake: FakeModel):
        super().__init__()
        self.fake = fake
        self.layers = []

    def make_cache(self):
        return [KVCache()]

    def __call__(self, tokens, cache):
        rows = tokens[:, None, :, None].astype(mx.float32)
        seen, _ = cache[0].update_and_fetch(rows, rows)
        seen = [int(t) for t in seen[0, 0, :, 0].tolist()]
        first = len(seen) - tokens.shape[1]
        return mx.stack([self._row(seen[: i + 1]) for i in range(first, len(seen))])[None]

    def _row(self, seen):
        return mx.array(self.fake.row(seen[len(PROMPT) :]).astype("float32"))


class Scripted(Loop):
    """The masked reference, with the session's own sampler."""

    def __init__(self, wrapper, model, temp):
        super().__init__(wrapper, model, temp)
        self.sampler = Sampler(Settings(temp=temp), token_limit=len(wrapper))

    def pick(self, tokens, mask=None):
        row = mx.array(self.model.row(tokens).astype("float32"))[None]
        mask = None if mask is None else mx.array(mask)
        return self.sampler.pick(row, len(PROMPT) + len(tokens), tokens, mask).item()


class Copying(Drafter):
    """Guesses what the reference says next, with some errors."""

    name = "copying"

    def __init__(self, expected, seed):
        self._propose = copying(expected, seed)

    def propose(self, tokens, n):
        return self._propose(tokens[len(PROMPT) : -1], tokens[-1])[:n]


def session_for(name, script, seed=0, temp=0.0, chaos=0.05, **settings):
    wrapper = tokenizer(name)
    fake = FakeModel(wrapper, script, seed, chaos)
    options = {"temp": temp, "drafter": "none", "speculate": "always", **settings}
    session = Engine(ScriptedModel(fake), wrapper, Settings(**options)).session()
    session.sync(PROMPT)
    return session, wrapper, fake


def run(session, wrapper, **options):
    guard = Guard(wrapper, TOOLS, **options)
    events = list(session.stream(max_tokens=LENGTH, guard=guard))
    return [t for e in events for t in e.tokens], events[-1], events


# Every format at one temperature or the other; `test_tools_exact.py` has all, without a session.
WARM = [
    pytest.param(name, temp, marks=() if i % 2 == temp else pytest.mark.slow)
    for i, name in enumerate(BAD)
    for temp in (0.0, 1.0)
]


@pytest.mark.parametrize(("name", "temp"), WARM)
def test_repaired_calls_equal_constrained_decoding(name, temp):
    """A repair must give the very text of decoding under the grammar, drafts or not, and no model
    call must be spent on it."""
    repaired = 0
    for seed in range(3):
        session, wrapper, fake = session_for(name, BAD[name], seed, temp)
        expected = Scripted(wrapper, fake, temp).masked(FORMATS[name])
        for drafter in (Drafter(), Copying(expected, seed)):
            session.sync(PROMPT)
            session.drafter = drafter
            repairs, calls = len(session.stats.repairs), session.counters.forwards
            tokens, _last, _ = run(session, wrapper)
            assert tokens == expected[: len(tokens)]
            assert session.tokens == PROMPT + tokens
            made = session.stats.repairs[repairs:]
            repaired += len(made)
            if drafter.name == "none":
                wasted = sum(r.dropped_tokens for r in made)
                look_ahead = 4 + len(expected)
                assert session.counters.forwards - calls <= len(tokens) + wasted + look_ahead
    assert repaired > 3


@pytest.mark.parametrize("name", list(GOOD))
def test_a_reply_ends_exactly_where_its_call_ends(name):
    """Tokens of the same block beyond the call are neither shown nor in the state."""
    script = "Well. " + GOOD[name] + " and then some prose"
    session, wrapper, _ = session_for(name, script, 1, chaos=0.0)
    text = wrapper.encode(script)
    session.drafter = Copying(text, 0)
    tokens, last, events = run(session, wrapper)
    assert wrapper.decode(tokens) == "Well. " + GOOD[name]
    assert session.tokens == PROMPT + tokens
    assert "".join(e.text for e in events) == "Well. "
    assert last.finish_reason == "tool"
    assert [c.outcome for c in last.calls] == ["valid"]
    assert session.stats.generated_tokens == len(tokens)


def test_several_calls_in_one_reply():
    """A second call right behind the first belongs to the same reply."""
    script = GOOD["json_tools"] + "\n" + GOOD["json_tools"]
    session, wrapper, _ = session_for("json_tools", script, 1, chaos=0.0)
    tokens, last, _ = run(session, wrapper)
    assert wrapper.decode(tokens) == script
    assert (last.finish_reason, len(last.calls)) == ("tool", 2)
    assert len({c.id for c in last.calls}) == 2


def test_a_call_cut_by_the_limit_can_go_on():
    """A call cut by the token limit is reported as length, and continuing completes it."""
    session, wrapper, _ = session_for("json_tools", GOOD["json_tools"], 1, chaos=0.0)
    guard = Guard(wrapper, TOOLS)
    last = list(session.stream(max_tokens=6, guard=guard))[-1]
    assert (last.finish_reason, last.calls) == ("length", ())
    assert last.note
    last = list(session.stream(max_tokens=LENGTH, guard=guard, since=len(PROMPT)))[-1]
    assert last.finish_reason == "tool"
    assert json.loads(last.calls[0].openai()["function"]["arguments"]) == {"city": "Paris"}


def test_without_a_grammar_a_broken_call_is_tried_again_then_given_up_aloud():
    """Parse-only guarding: back to the opening, another attempt, at most `max_repairs` times."""
    session, wrapper, _ = session_for("json_tools", BAD["json_tools"], 1, chaos=0.0)
    attempt = session.attempt
    _tokens, last, events = run(session, wrapper, use_grammar=False, max_repairs=2)
    assert len(session.stats.repairs) == 2
    assert last.finish_reason == "stop"
    assert "get_weathr" in "".join(e.text for e in events)
    assert session.attempt == attempt


def test_text_that_only_mentions_a_marker_is_shown_whole():
    """Prose with `<tool` in it must not be swallowed or held for ever."""
    script = "Write <tool_call> tags, then <tool. Done"
    session, wrapper, _ = session_for("json_tools", script, 1, chaos=0.0)
    _tokens, last, events = run(session, wrapper)
    assert "".join(e.text for e in events) == script
    assert (last.finish_reason, last.calls) == ("stop", ())


def test_an_interrupt_inside_a_call_keeps_the_session_usable():
    """Cancelling between blocks of an open call leaves tokens and state in step."""
    session, wrapper, _ = session_for("json_tools", GOOD["json_tools"], 1, chaos=0.0)
    flags = iter([False] * 5 + [True] * 99)
    guard = Guard(wrapper, TOOLS)
    last = list(session.stream(max_tokens=LENGTH, guard=guard, cancel=lambda: next(flags)))[-1]
    assert last.finish_reason == "cancelled"
    last = list(session.stream(max_tokens=LENGTH, guard=guard, since=len(PROMPT)))[-1]
    assert last.finish_reason == "tool"


@pytest.mark.parametrize("name", list(BAD))
def test_a_cut_call_goes_on_under_a_new_guard(name):
    """Guards: a call that was cut, and goes on after its session was opened again, unwatched."""
    session, wrapper, _ = session_for(name, BAD[name], 1)
    whole, last, _ = run(session, wrapper)
    for cut in range(1, len(whole), 19):
        session.sync(PROMPT)
        guard = Guard(wrapper, TOOLS)
        begun = list(session.stream(max_tokens=cut, guard=guard))
        tokens = session.tokens[len(PROMPT) :]
        guard = Guard(wrapper, TOOLS)
        assert guard.catch_up(len(PROMPT), tokens, wrapper.decode)
        if begun[-1].finish_reason != "length":
            continue
        left = LENGTH - len(tokens)
        events = list(session.stream(max_tokens=left, guard=guard, since=len(PROMPT)))
        assert session.tokens == PROMPT + whole
        assert events[-1].calls == last.calls


def test_what_a_reply_forbade_is_allowed_when_it_was_left():
    """After a stream that was left right behind a repair the next token was still the grammar's."""
    session, wrapper, _ = session_for("json_tools", BAD["json_tools"])
    stream = session.stream(max_tokens=LENGTH, guard=Guard(wrapper, TOOLS))
    while not session.stats.repairs:
        next(stream)
    row, pos = session.logits[None], session.pos
    held, free = session.next_token(), session.sampler.pick(row, pos, session.tokens).item()
    assert session.stats.repairs[0].pos == pos and held != free
    stream.close()
    assert session.next_token() == free


def test_an_end_of_text_inside_a_call_is_picked_again():
    """The session stands where the end was picked, so nothing is taken back, and the pick that was
    known there was the end again, for ever."""
    script = GOOD["json_tools"].partition("ris")[0]
    session, wrapper, fake = session_for("json_tools", script, 1, chaos=0.0)
    expected = Scripted(wrapper, fake, 0.0).masked(FORMATS["json_tools"])
    end = len(wrapper.encode(script)) + 4
    list(islice(session.stream(max_tokens=end, guard=Guard(wrapper, TOOLS)), 2 * end))
    assert session.tokens == PROMPT + expected[:end]
    assert "would end inside the call" in session.stats.repairs[0].reason


@pytest.mark.parametrize("name", list(GOOD))
def test_a_reply_cut_inside_a_marker_shows_no_half_of_it(name):
    """Guards: `<tool_` on the screen, or prose like it lost, when a cut reply goes on; with the
    guard that it had and with a new one."""
    marker = FORMATS[name].start
    for script, shown in (
        ("Well. " + GOOD[name], "Well. "),
        (f"A {marker[:3]} b. No", f"A {marker[:3]} b. No"),
    ):
        session, wrapper, _ = session_for(name, script, 1, chaos=0.0)
        for cut in range(1, 6 + len(wrapper.encode(marker))):
            session.sync(PROMPT)
            guard = Guard(wrapper, TOOLS, resumable=True)
            begun = list(session.stream(max_tokens=cut, guard=guard))
            if begun[-1].finish_reason != "length":
                continue
            first = "".join(e.text for e in begun)
            assert not first.rstrip().endswith((marker[:2], marker[:5]))
            if cut % 2:
                guard = Guard(wrapper, TOOLS, resumable=True)
                assert guard.catch_up(len(PROMPT), session.tokens[len(PROMPT) :], wrapper.decode)
            rest = session.stream(max_tokens=LENGTH, guard=guard, since=len(PROMPT))
            assert first + "".join(e.text for e in rest) == shown


def test_a_call_of_other_tools_cannot_be_watched():
    """Guards: a guard that takes up a call which its tools do not allow, and repairs the past."""
    wrapper = tokenizer("json_tools")
    tokens = wrapper.encode(FORMATS["json_tools"].start + '{"name": "gone", "arguments": {')
    assert not Guard(wrapper, TOOLS).catch_up(3, tokens, wrapper.decode)
