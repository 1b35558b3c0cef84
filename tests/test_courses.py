"""Any course of a session is exact: a state machine over everything that a session can do.

After every step the logits are those of a fresh prefill, every layer stands where the tokens end,
the token that comes next is the one that stock caches and a new sampler give, and what is kept for
going back fits its budget. A reply is what plain decoding writes, with drafts, stop strings, ends,
repairs and limits; nothing of it that was reported is taken back.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models.cache import make_prompt_cache
from oracle import (
    FAMILIES,
    KINDS,
    ROUNDED,
    SCALE,
    Interrupt,
    Letters,
    assert_fresh,
    engine,
    failing_layer,
    fresh_logits,
)
from tiny import V, build

from ds4cli.caches.build import build_caches
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.ngram import NgramDrafter
from ds4cli.engine.engine import Engine
from ds4cli.rewind.horizon import Horizon
from ds4cli.rewind.layers import Layers
from ds4cli.rewind.timeline import Limits, Timeline
from ds4cli.sampling import Sampler
from ds4cli.tools.parse import ParsedCall
from ds4cli.tools.steps import GuardEnd, GuardStep, Instead

EOS = (5, 25, 45, 65, 85)
CALL_TOKENS = 3
DEPTHS, LENGTHS = st.integers(0, 45), st.integers(1, 12)
SEEDS = st.integers(0, 999)


@lru_cache
def model(name):
    kind, _, kv = name.partition(" ")
    return build(kind, scale=SCALE, **(dict(head_dim=64) if kv else {}))


def quantised(model):
    return build_caches(model, 0, 8, 32)


def opens(token: int) -> bool:
    """Whether a call begins with this token: behind it come CALL_TOKENS that are even."""
    return token % 11 == 0


class EvenCalls:
    """A guard whose grammar needs no text: see `opens`."""

    def __init__(self):
        self.left = [0]  # of an open call, before each token and after the last
        self.start = None

    def feed(self, pos, token, text):
        self.start = pos if self.start is None else self.start
        del self.left[pos - self.start + 1 :]
        left = self.left[-1]
        if left and token % 2:
            return GuardStep(event="left", bad_pos=pos, reason="odd")
        if token in EOS:
            return GuardStep(emit=text)
        self.left.append(left - 1 if left else CALL_TOKENS * opens(token))
        if left == 1:
            return GuardStep(event="closed", calls=(ParsedCall("even", "{}"),))
        if left:
            return GuardStep()
        return GuardStep(event="open", opened=pos) if opens(token) else GuardStep(emit=text)

    def rewind(self, pos):
        if self.start is not None:
            del self.left[pos - self.start + 1 :]

    @property
    def is_open(self):
        return self.left[-1] > 0

    @property
    def opened(self):
        end = (self.start or 0) + len(self.left) - 1
        return end - 1 - (CALL_TOKENS - self.left[-1]) if self.is_open else None

    @property
    def settled(self):
        end = (self.start or 0) + len(self.left) - 1
        return self.opened if self.is_open else end

    def allowed(self, size):
        return mx.array([i % 2 == 0 for i in range(size)]).__array__()

    def filter(self, tokens):
        left = self.left[-1]
        for i, token in enumerate(tokens):
            if left and token % 2:
                return i
            left = left - 1 if left else CALL_TOKENS * opens(token)
        return len(tokens)

    def instead(self, tokens, pick, size):
        left = self.left[-1]
        for token in tokens:
            if left and token % 2:
                return None
            left = left - 1 if left else CALL_TOKENS * opens(token)
        return Instead(self.allowed(size), "odd") if left and pick % 2 else None

    def forced(self, tokens):
        return []

    def finish(self, reason):
        return GuardEnd()


def may_follow(before: int | None, token: int) -> bool:
    """Whether `Neighbours` lets `token` stand behind `before`."""
    return before is None or (before + token) % 3 > 0


class Neighbours:
    """A guard over all of a reply, whose text is shown as it comes: see `may_follow`."""

    is_open, opened = True, None

    def __init__(self):
        self.ids = []
        self.start = None

    def feed(self, pos, token, text):
        self.start = pos if self.start is None else self.start
        del self.ids[pos - self.start :]
        if token not in EOS and not may_follow(self._last, token):
            return GuardStep(event="left", bad_pos=pos, reason="neighbours")
        self.ids.append(token)
        return GuardStep(emit=text)

    def rewind(self, pos):
        if self.start is not None:
            del self.ids[pos - self.start :]

    @property
    def _last(self):
        return self.ids[-1] if self.ids else None

    @property
    def settled(self):
        return (self.start or 0) + len(self.ids)

    def allowed(self, size, before=None):
        before = self._last if before is None else before
        return mx.array([i in EOS or may_follow(before, i) for i in range(size)]).__array__()

    def filter(self, tokens):
        pairs = list(zip([self._last, *tokens], tokens, strict=False))
        return next((i for i, pair in enumerate(pairs) if not may_follow(*pair)), len(tokens))

    def instead(self, tokens, pick, size):
        if self.filter(tokens) < len(tokens) or pick in EOS or may_follow(tokens[-1], pick):
            return None
        return Instead(self.allowed(size, tokens[-1]), "neighbours")

    def forced(self, tokens):
        return []

    def finish(self, reason):
        return GuardEnd()


GUARDS = {"even": EvenCalls, "neighbours": Neighbours}


class Guesser(Drafter):
    """Knows what comes, and is right about two of three tokens.

    It holds the session to what drafters are promised: the text that it is given is the session's,
    and below the position that it was last told of, it is the text that was given before.
    """

    name = "guesser"

    def __init__(self, session, text=()):
        self.session = session
        self.text = list(text)
        self.seen = []

    def rewind(self, pos):
        del self.seen[pos:]

    def propose(self, tokens, n):
        assert tokens[:-1] == self.session.tokens, "another text"
        assert tokens[: len(self.seen)] == self.seen, "changed, and not told"
        self.seen = tokens[:-1]
        known = self.text[len(tokens) : len(tokens) + n]
        return [t if (len(tokens) + i) % 3 else (t + 1) % V for i, t in enumerate(known)]


class Course(RuleBasedStateMachine):
    """One family; every course begins with other limits."""

    family = "llama"
    limits = None
    others = ()

    @initialize(
        horizon=st.sampled_from((16, 4, 16, 0, 64)),
        chunk=st.sampled_from((16, 4, 64)),
        kilobytes=st.sampled_from((65536, 600, 100, 0)),
        temp=st.sampled_from((0.0, 0.8, 2.0)),
        drafter=st.sampled_from(("guesser", "ngram", "none")),
        speculate=st.sampled_from(("always", "auto")),
        seed=SEEDS,
    )
    def begin(self, horizon, chunk, kilobytes, temp, drafter, speculate, seed):
        self.dice = random.Random(seed)
        # The setting counts in megabytes, which tiny models never fill.
        limits = Limits(horizon, kilobytes << 10, chunk)
        self.limits = mock.patch.object(Engine, "_limits", limits)
        self.limits.start()
        self.model = model(self.family)
        kv = dict(kv_bits=8, kv_group_size=32) if self.family.endswith(" kv") else {}
        self.make = quantised if kv else make_prompt_cache
        self.engine = engine(
            "",
            model=self.model,
            eos=EOS,
            temp=temp,
            drafter="ngram" if drafter == "ngram" else "none",
            speculate=speculate,
            **kv,
        )
        self.session = self.engine.session()
        self.guesses = drafter == "guesser"
        self.others = []
        self.draft()
        self.session.sync(self.words(9))

    def words(self, n):
        return [self.dice.randrange(V) for _ in range(n)]

    def draft(self, text=()):
        """What the drafter knows of the text that comes."""
        if self.guesses:
            self.session.drafter = Guesser(self.session, text)

    # -- what plain decoding writes ----------------------------------------------------------------

    def sampler(self):
        fresh = Sampler(self.session.sampler.settings, self.engine.token_limit)
        fresh.attempt = self.session.attempt
        return fresh

    def expected(self, n, guard="", stop=None):
        """The tokens of a reply, and how it ends."""
        guarded, neighbours = guard == "even", Neighbours()
        caches = self.make(self.model)
        text, out, left, closed = list(self.session.tokens), [], 0, None
        row, sampler = self.model(mx.array([text]), cache=caches)[0, -1], self.sampler()
        even = mx.arange(V) % 2 == 0
        while len(out) < n:
            mask = even if left else None
            if guard == "neighbours" and out:
                mask = mx.array(neighbours.allowed(V, out[-1]))
            pick = sampler.pick(row[None], len(text), text, mask).item()
            if closed == len(out) and (pick in EOS or not opens(pick)):
                return out, "tool"
            if pick in EOS:
                self.ended_by = pick
                return out, "stop"
            out.append(pick)
            text.append(pick)
            if left:
                left -= 1
                closed = len(out) if left == 0 else None
            elif guarded and opens(pick):
                left = CALL_TOKENS
            said = Letters().decode(out)
            if stop is not None and stop in said:
                return out[: said.index(stop)], "stop"
            row = self.model(mx.array([[pick]]), cache=caches)[0, -1]
        return out, "tool" if closed == len(out) else "length"

    def is_reproduced(self, before, out, expected):
        """Whether `out` is to be what was expected behind `before`.

        DeepSeek V4.1 rounds to 4 and 8 bits: where a value lies on an edge, the size of a call
        decides, in stock caches too. So do quantised rows, which decides where two tokens tie.
        """
        pairs = zip(out, expected, strict=False)
        parts = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parts is None or not self.family.endswith(" kv"):
            return self.family != "deepseek_v41"
        return not self.ties([*before, *out[:parts]], out[parts], expected[parts])

    def ties(self, text, token, other):
        """Whether rounding may lift `token` above `other` behind `text`."""
        row, ids = fresh_logits(self.model, text, self.make), mx.arange(V)
        row = row + (ids == token) * 2 * ROUNDED * mx.maximum(mx.abs(row).max(), 1)
        only = mx.where((ids == token) | (ids == other), row, -mx.inf)
        return self.sampler().pick(only[None], len(text), text).item() == token

    # -- what a session can do ---------------------------------------------------------------------

    @rule(depth=DEPTHS, n=LENGTHS)
    def sync(self, depth, n):
        tokens = self.session.tokens
        target = [*tokens[: max(0, len(tokens) - depth)], *self.words(n)]
        report = self.session.sync(target)
        assert self.session.tokens == target
        assert report.discarded <= len(tokens)

    @rule()
    def sync_to_the_same(self):
        fed = self.session.counters.fed_tokens
        self.session.sync(self.session.tokens)
        assert self.session.counters.fed_tokens == fed

    @rule(n=st.integers(1, 3))
    def sync_in_parts(self, n):
        """Cancelled between two calls."""
        target, looks = [*self.session.tokens, *self.words(30)], iter([False] * n)
        self.session.sync(target, cancel=lambda: next(looks, True))
        assert self.session.tokens == target[: self.session.pos]
        if self.session.logits is None:
            self.session.sync(target)

    @rule(depth=DEPTHS)
    def rewind(self, depth):
        """Back, or forward again to what was gone back over."""
        known = [*self.session.tokens, *self.session._timeline.redo_tokens]
        pos, calls = max(1, len(known) - depth), self.session.counters.forwards
        plan = self.session.plan(pos)
        report = self.session.rewind(pos)
        assert self.session.tokens == known[:pos]
        assert self.session.counters.forwards - calls == report.forwards == plan.forwards
        assert report.replayed == plan.replay

    @rule(off=st.sampled_from((0, -1, 1)), over=st.sampled_from((0, 3, 30)))
    def go_near_an_edge(self, off, over):
        """Where something begins or ends that leads back, or a token beside it; and write on."""
        timeline = self.session._timeline
        kept = [f.pos for f in timeline.checkpoints.kept]
        edges = [*kept, *timeline.last_block, timeline.horizon.low or 1]
        known = self.session.pos + len(timeline.redo_tokens)
        self.session.rewind(min(known, max(1, self.dice.choice(edges) + off)))
        if over:
            self.session.sync([*self.session.tokens, *self.words(over)])

    @rule(kind=st.sampled_from(("turn", "system", "tool")))
    def checkpoint(self, kind):
        self.session.checkpoint(kind)

    @rule(depth=st.sampled_from((1, 2, 1, 0, 3)), n=st.integers(1, 40), ahead=st.integers(1, 6))
    def detour(self, depth, n, ahead):
        """Mark a place, go on, back to before it, and over it with another text that is longer than
        most records."""
        marked = self.session.pos
        self.session.checkpoint("turn")
        self.session.sync([*self.session.tokens, *self.words(ahead)])
        self.rewind(ahead + depth)
        self.session.sync([*self.session.tokens, *self.words(n + 25)])
        if self.session.pos > marked:
            self.session.rewind(marked)

    @rule(right=st.integers(0, 5), wrong=st.integers(0, 3))
    def step(self, right, wrong):
        """A block of which a part is kept."""
        expected, reason = self.expected(right + 1)
        before = self.session.tokens
        end = [self.ended_by] if expected and reason == "stop" else []
        guesses = [*expected[1:], *end, *self.words(wrong)]
        step = self.session.step(drafts=guesses)
        assert self.session.tokens == [*before, *step.tokens]
        assert not {*step.tokens} & {*EOS}, "an end is no text"
        if self.is_reproduced(before, step.tokens, expected):
            assert step.tokens[: len(expected)] == expected
            assert expected or (step.finish_reason, reason) == ("stop", "stop")

    @rule(
        n=st.integers(1, 16),
        guard=st.sampled_from(("", "neighbours", "even")),
        way=st.sampled_from(("to its end", "stop", "left early", "cancelled")),
    )
    def stream(self, n, guard, way):
        expected, reason = self.expected(n, guard)
        stop = None
        if way == "stop" and guard != "even":
            stop = Letters().decode(expected[len(expected) // 2 :][:2]) or None
            expected, reason = self.expected(n, guard, stop)
        before = self.session.tokens
        self.draft([*before, *expected, *self.words(4)])
        looks = iter([False] * 2)
        cancel = (lambda: next(looks, True)) if way == "cancelled" else (lambda: False)
        stream = self.session.stream(
            max_tokens=n,
            stop=[stop] if stop else [],
            guard=GUARDS[guard]() if guard else None,
            cancel=cancel,
        )
        said, text, last = [], "", None
        for i, last in enumerate(stream):
            said += last.tokens
            text += last.text
            assert self.session.tokens[len(before) :][: len(said)] == said, "taken back"
            if way == "left early" and i == 1:
                stream.close()
        out = self.session.tokens[len(before) :]
        assert self.session.tokens[: len(before)] == before and out[: len(said)] == said
        if not self.is_reproduced(before, out, expected):
            return
        assert out == expected[: len(out)]
        if guard != "even":
            assert text == Letters().decode(out)[: len(text)]
        if last.finish_reason not in (None, "cancelled"):
            assert (out, said, last.finish_reason) == (expected, expected, reason)

    @rule(n=st.integers(2, 12), at=st.integers(1, 4), depth=st.integers(1, 20))
    def stream_and_move(self, n, at, depth):
        """Taken back between two events, a reply goes on from there, to the same end."""
        before = self.session.tokens
        expected, reason = self.expected(n)
        self.draft([*before, *expected, *self.words(4)])
        events = []
        for event in self.session.stream(max_tokens=n):
            events.append(event)
            if len(events) == at and event.finish_reason is None:
                self.session.rewind(max(len(before), self.session.pos - depth))
        if self.is_reproduced(before, self.session.tokens[len(before) :], expected):
            assert self.session.tokens == [*before, *expected]
            assert events[-1].finish_reason == reason

    @rule()
    def fork(self):
        self.others.append((self.session, self.session.tokens))
        self.session = self.session.fork()
        self.draft()

    @precondition(lambda self: self.others)
    @rule()
    def go_to_a_branch(self):
        session, tokens = self.others.pop(self.dice.randrange(len(self.others)))
        self.others.append((self.session, self.session.tokens))
        self.session = session
        assert session.tokens == tokens
        self.go_on()

    @rule()
    def go_on(self):
        """One token more: the kept logits say nothing about the layers."""
        self.session.sync([*self.session.tokens, *self.words(1)])

    @rule()
    def save_and_load(self):
        path = self.folder / "kept"
        settings, attempt = self.session.sampler.settings, self.session.attempt
        self.session.save(path)
        loaded = self.engine.load_session(path)
        assert (loaded.tokens, loaded.counters.forwards) == (self.session.tokens, 0)
        loaded.use(settings)
        loaded.attempt = attempt
        loaded._timeline.was_made_as(self.session._timeline)
        self.session = loaded
        self.draft()

    @rule(depth=st.sampled_from((0, 3, 20)))
    def retry(self, depth):
        if depth:
            self.session.rewind(max(1, self.session.pos - depth))
        self.session.attempt += 1

    @rule(temp=st.sampled_from((0.0, 0.8, 2.0)), penalty=st.sampled_from((1.0, 1.5)))
    def use(self, temp, penalty):
        was, attempt = self.session.sampler.settings, self.session.attempt
        self.session.use(replace(was, temp=temp, repetition_penalty=penalty))
        assert self.session.attempt == attempt

    @rule()
    def reset(self):
        self.session.sync([])
        self.session.sync(self.words(5))

    # -- what may go wrong -------------------------------------------------------------------------

    @rule(index=st.integers(0, 3), depth=DEPTHS, n=LENGTHS)
    def die_between_layers(self, index, depth, n):
        layers, tokens = len(self.model.layers), self.session.tokens
        kept = max(1, len(tokens) - depth)
        after = [*tokens, *self.session._timeline.redo_tokens][kept : kept + 1]
        other = [(token + 1) % V for token in after]  # or nothing would have to be read
        target = [*tokens[:kept], *other, *self.words(n)]
        with failing_layer(self.model, index % layers), pytest.raises(KeyboardInterrupt):
            self.session.sync(target)
        assert self.session.tokens == target[: self.session.pos]
        if self.session.logits is None:
            self.session.sync(target)

    @rule(nth=st.integers(0, 60), n=st.integers(1, 5))
    def interrupt_a_step(self, nth, n):
        """Ctrl-C before any line of what a block passes through."""
        places = Timeline.feed, Timeline._forget_redo, Timeline.commit, Timeline._remember
        places += Timeline._keep_checkpoint, Timeline._back, Horizon.append, Horizon._trim
        places += Horizon._merge, Layers.hold, Layers.restore, Layers.stand
        before = self.session.tokens
        with Interrupt(places, nth, KeyboardInterrupt):
            self.session.step(drafts=self.words(n))
        self.session._timeline.abort()  # as whatever comes next does
        assert self.session.tokens[: len(before)] == before

    @rule(nth=st.integers(0, 60), depth=DEPTHS)
    def interrupt_a_rewind(self, nth, depth):
        places = Timeline.rewind, Timeline._move, Timeline._replayed, Timeline._back, Layers.stand
        places += NgramDrafter.rewind, Layers.restore, Layers.restore_checkpoint, Timeline.commit
        before = self.session.tokens
        pos = max(1, len(before) - depth)
        with Interrupt(places, nth, KeyboardInterrupt):
            self.session.rewind(pos)
        assert self.session.tokens in (before, before[:pos])

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def the_state_is_that_of_the_tokens(self):
        self.holds(self.session)

    def holds(self, session):
        timeline = session._timeline
        assert all(a.pos() in (None, session.pos) for a in timeline.adapters)
        assert_fresh(self.model, timeline, self.make)
        pick = self.sampler().pick(session.logits[None], session.pos, session.tokens).item()
        assert session.next_token() == pick

    @invariant()
    def what_is_kept_fits_the_budget(self):
        kept, budget = self.session.kept_bytes(), self.session.limits.budget_bytes
        if len(self.session._timeline.horizon.segments) > 1:
            assert kept["horizon"] <= budget // 2
        assert kept["checkpoints"] <= budget

    def teardown(self):
        if self.limits is not None:
            self.limits.stop()
        for session, tokens in self.others:
            assert session.tokens == tokens
            self.session = session
            self.holds(session)
            self.go_on()
            self.holds(session)


def run(name, folder, **how):
    """A number of courses of one family."""
    course = type(f"Course of {name}", (Course,), {"family": name, "folder": folder})
    run_state_machine_as_test(
        course, settings=settings(deadline=None, suppress_health_check=list(HealthCheck), **how)
    )


COURSES = [*FAMILIES, "llama kv"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in (*KINDS, "llama kv") else pytest.mark.slow) for n in COURSES],
)
def test_any_course_is_exact(name, tmp_path):
    """Any order of what a session can do, drafted and plain, under any limits."""
    # Rounded to few bits, stock caches differ from themselves: each check reads the text anew.
    examples = 2 if name in ("llama kv", "deepseek_v41") else 4
    how = dict(max_examples=examples, stateful_step_count=20, derandomize=True)
    run(name, tmp_path, phases=[Phase.generate], **how)  # a shorter one: see the long run


@pytest.mark.slow
@pytest.mark.parametrize("name", COURSES)
def test_many_courses_are_exact(name, tmp_path):
    """The long run of the same: 10,000 steps a family."""
    run(name, tmp_path, max_examples=200, stateful_step_count=50)
