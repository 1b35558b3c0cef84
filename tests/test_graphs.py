"""Graphs of commands on CUDA: kept, unless the user says otherwise, and of few forms."""

import os
import random

import pytest
from counting import form
from oracle import OracleDrafter, engine, prompt
from test_group import said

from ds4cli.backend import graphs
from ds4cli.drafters.drafter import Drafter
from ds4cli.engine import group as groups
from ds4cli.engine.group import Group
from ds4cli.engine.guesses import Guesses
from ds4cli.rewind.timeline import Timeline
from ds4cli.settings import Settings

SIZE, CHECK = "MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_CACHE_THRASHING_CHECK"


def test_a_long_process_does_not_end_for_the_forms_that_its_calls_had(monkeypatch):
    """Guards: `Cache thrashing is happening`, after the 800th graph in the life of a process."""
    assert os.environ[CHECK] == "0" and int(os.environ[SIZE]) > 400  # by the import of the package
    monkeypatch.setenv(SIZE, "64")
    monkeypatch.delenv(CHECK)
    graphs.keep()
    assert (os.environ[SIZE], os.environ[CHECK]) == ("64", "0")


# Tokens that every prompt has at least: while it is answered an arena gets more columns.
BEGIN = 236


def asked(made, n=8):
    """Sessions on prompts of unlike lengths."""
    made_of = [made.session() for _ in range(n)]
    for i, session in enumerate(made_of):
        session.use(Settings(temp=0.8, seed=i))
        session.sync(prompt(BEGIN + 7 * i % 19, seed=i))
    return made_of


class Forms(dict):
    """Of what was submitted, by the rows of each lane's block: a list of forms."""

    def note(self, timelines, *arrays):
        """arrays: picks, and tokens that are cut out of those before, which takes no command."""
        blocks = [timeline.pending() for timeline in timelines]
        sizes = tuple(len(rows) for (rows, _), _ in blocks)
        forms, new = self.setdefault(sizes, []), form([*blocks, arrays[:1]])
        if new not in forms:
            forms.append(new)

    def check(self, most=1):
        """So many for each; of one row alone one more, as it may be what the call before picks."""
        for sizes, forms in self.items():
            assert len(forms) <= max(most, 2 if sizes == (1,) else 1), sizes


def guess_at_random(monkeypatch, texts):
    """Whatever it is worth, in blocks of any size, of which any part is kept. texts: what there
    is to say, by how it begins."""
    draw = random.Random(1)

    def make(guesses, lanes):
        size = draw.choice([1, 2, 4, 8]) if len(lanes) == len(guesses._lanes) > 1 else 1
        for lane in lanes:
            tokens = lane.session.tokens
            known = texts[tuple(tokens[:BEGIN])][len(tokens) + 1 :][: draw.randrange(size)]
            lane.guess([*known, *[0] * size][: min(size, lane.left) - 1])
            lane.fill(size)

    monkeypatch.setattr(Guesses, "make", make)
    monkeypatch.setattr(Guesses, "is_worth_stopping", lambda guesses: draw.random() < 0.6)


def write(group, waiting, limits, together=3):
    """What each session says, so many of them at a time."""
    replies, lanes = [], {}
    while waiting or group.lanes:
        while waiting and len(group.lanes) < together:
            lane = group.join(waiting.pop(0), max_tokens=limits[len(replies)])
            lanes[lane] = []
            replies.append(lanes[lane])
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            lanes[lane].append(next(lane.events))
            if lane not in group.lanes:
                lane.events.close()
                del lanes[lane]
        lane = None  # one that has ended is to give its seat back
    return [said(events) for events in replies]


@pytest.mark.parametrize(("name", "most"), [("qwen3_next", 1), ("recurrent_gemma", 3)])
def test_a_call_for_all_has_one_form_whatever_was_before_it(name, most, monkeypatch):
    """What a lane that came or went, or guesses that were kept in part, left to be done was part of
    the next call. CUDA plans each form anew: every sixth round of 16 lanes took 0.1 to 0.5 s there,
    however long they ran. most: a window's cache grows and wraps by itself."""
    made, limits = engine(name), [12 + 17 * i % 29 for i in range(8)]
    truth, texts = [], {}
    for session, n in zip(asked(made), limits, strict=True):
        truth.append(said(session.stream(max_tokens=n)))
        texts[tuple(session.tokens[:BEGIN])] = [*session.tokens]
    guess_at_random(monkeypatch, texts)
    found, evaluate = Forms(), groups._evaluate
    monkeypatch.setattr(groups, "_evaluate", lambda *call: (found.note(*call), evaluate(*call)))
    assert write(Group(made), asked(made), limits) == truth
    assert {(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8)} < found.keys()
    found.check(most)


@pytest.mark.parametrize("name", ["qwen3_next", "rwkv7"])
def test_a_block_has_one_form_whatever_was_kept_of_the_one_before(name, monkeypatch):
    """The same for a text alone: of most blocks a part is kept."""
    made = engine(name, speculate="always", num_draft_tokens=3)
    (session,) = asked(made, 1)
    session.drafter = Drafter()
    tokens, *_ = said(session.stream(max_tokens=40))
    session.rewind(session.pos - 40)
    session.drafter = OracleDrafter([*session.tokens, *tokens], 0.6)
    found, evaluate = Forms(), Timeline.evaluate

    def noted(timeline, *arrays, **how):
        found.note([timeline], *arrays)
        evaluate(timeline, *arrays, **how)

    monkeypatch.setattr(Timeline, "evaluate", noted)
    assert said(session.stream(max_tokens=40))[0] == tokens
    assert session.stats.accepted and session.stats.accepted < session.stats.proposed
    found.check()
