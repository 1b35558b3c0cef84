"""A small model as drafter: its guesses, and that none of them is waited for."""

import pytest
from oracle import SCALE, engine, prompt
from tiny import build

from ds4cli.rewind.timeline import Timeline
from ds4cli.settings import Settings

KINDS = {
    "greedy": {},
    "noise": {"temp": 0.8, "seed": 3},
    "penalty": {"temp": 0.8, "seed": 3, "repetition_penalty": 1.3},
}


def drafter(name="qwen3_next", **sampling):
    e = engine("llama", draft=build(name, scale=SCALE))
    part = e.session().drafter
    part.use(e.sampler(Settings(**sampling).filled()))
    return part


def one_by_one(part, text, n):
    """What the draft model says, each token read by a call of its own and picked from its row."""
    timeline, said = part.timeline.fork(), []
    while len(said) < n:
        timeline.sync([*text, *said])
        row = timeline.logits[None]
        said += part.sampler.pick(row, timeline.pos, [*text, *said]).tolist()
    return said


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_guesses_are_those_that_are_waited_for(sampling):
    """Calls that are built ahead, on picks of another position or history, guess another text. The
    text then goes on with some of the guesses, all of them, or none."""
    part, text = drafter(**sampling), prompt(20)
    for kept, n in ((2, 5), (5, 5), (0, 1), (1, 6)):
        expected = one_by_one(part, text, n)
        assert part.propose(text, n) == expected
        text = [*text, *expected[:kept], 7]
    assert part.propose(text, 0) == []


@pytest.mark.parametrize("sampling", [KINDS["greedy"], KINDS["noise"]], ids=["greedy", "noise"])
def test_no_guess_is_waited_for_before_the_last(monkeypatch, sampling):
    """On a GPU each guess took a step and a wait for it: a model that is small waits most."""
    part, text, waits = drafter(**sampling), prompt(20), []
    part.propose(text, 2)
    true = Timeline.evaluate

    def evaluate(self, *arrays, wait=True):
        waits.append(wait)
        true(self, *arrays, wait=wait)

    monkeypatch.setattr(Timeline, "evaluate", evaluate)
    before = part.timeline.counters.forwards
    assert len(part.propose([*text, 3], 6)) == 6
    assert waits == [False] * 6 and part.timeline.counters.forwards == before + 6


def test_what_was_written_meanwhile_is_read_in_calls_of_few_sizes():
    """On an H200 every trial of a draft model read some 60 tokens in a call of a size of its own,
    which was planned for 40 ms: five trials were a tenth of a reply."""
    part, sizes = drafter(), []
    model = part.timeline.model
    true = type(model).__call__

    class Sized(type(model)):
        def __call__(self, ids, *args, **how):
            sizes.append(ids.shape[1])
            return true(self, ids, *args, **how)

    model.__class__ = Sized
    for pos in (50, 51, 53, 64, 137):
        assert part.propose(prompt(pos), 2) == one_by_one(part, prompt(pos), 2)
    assert {*sizes} <= {1, 2, 4, 8, 16, 32, 64} and len(sizes) < 80


def test_a_call_that_fails_leaves_no_half_guess(monkeypatch):
    """A Ctrl-C among the guesses left blocks open, on which the next proposal stood."""
    part, text = drafter(), prompt(20)
    expected = one_by_one(part, text, 4)
    true, calls = Timeline.feed, []

    def feed(self, *args, **how):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return true(self, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Timeline, "feed", feed)
        with pytest.raises(KeyboardInterrupt):
            part.propose(text, 4)
    assert part.timeline.open_blocks == 0
    assert part.propose(text, 4) == expected
