"""The desk on a model that talks by rule, and with a group that steps its lanes one by one: what is
read of each prompt, where a choice is written and how far back it keeps, what is taken and dropped.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from by_hand import WORDS, Talking
from oracle import engine

from ds4cli.backend import memory
from ds4cli.batch.desk import MOST_MORE, Answer, Choice, Desk, Job, PlannedJob
from ds4cli.batch.requests import parse
from ds4cli.batch.width import Width
from ds4cli.errors import Interrupted, ModelError
from ds4cli.settings import MAX_BLOCK_TOKENS, Settings

MODEL = Talking("plain", "window")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Lanes:
    """Stands where `Group` does: its lanes are sessions that stream by themselves."""

    made: list[Lanes]

    def __init__(self, engine, warn):
        self.calls, self.left, self.joined, self.is_apart, self.is_open = 0, [], [], False, True
        self.guesses = SimpleNamespace(timed=lambda: {2: 0.5})
        self.warn = warn
        self.made.append(self)

    def join(self, session, **limits):
        self.joined.append((session, limits))
        return SimpleNamespace(events=session.stream(**limits), has_step=True)

    def read(self, branches, prompts):
        for branch, prompt in zip(branches, prompts, strict=True):
            branch.sync(prompt)
        return sum(map(len, prompts))

    def call(self):
        self.calls += 1

    def leave(self, lane):
        self.left.append(lane)

    def close(self):
        self.is_open = False


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """What stands where groups do."""
    Lanes.made = []
    monkeypatch.setattr("ds4cli.engine.group.Group", Lanes)
    return Lanes.made


def desk_of(wide=1, said=None, **settings) -> Desk:
    made = engine("by hand", model=MODEL, **settings)
    ticks = iter(range(10**6))
    return Desk(made, Width(wide), (said if said is not None else []).append, lambda: next(ticks))


def answer(prompt=PROMPT, checkpoints=(), settings=None, **fields) -> Answer:
    item = parse(1, json.dumps({"prompt": "x", "custom_id": "a", **fields}).encode() + b"\n")
    made = Answer(PlannedJob(Job(item, prompt), 0, checkpoints))
    made.settings = Settings(**{"max_tokens": 5, **(settings or {})}).filled()
    made.is_raw = True
    return made


def begin(desk, of, index=0, cancel=lambda: False):
    choice = Choice(of, index)
    return choice, desk.begin(choice, None, cancel)


def finish(desk):
    """Rounds until nothing is written; how many choices each had."""
    sizes = []
    while desk.writing:
        sizes.append(0)
        for choice in desk.round():
            desk.take(choice)
            sizes[-1] += 1
    return sizes


def spelled(tokens):
    return "".join(map(chr, (32 + t for t in tokens)))


def test_one_at_a_time_is_written_by_the_reader(lanes):
    """A branch for each line, and a group, where one is written at a time."""
    desk = desk_of()
    assert (desk.lanes, lanes) == (1, [])
    choice, read = begin(desk, answer(checkpoints=[4]))
    assert read == len(PROMPT) and desk.writing == [choice] and choice.lane is None
    assert not desk.has_room([]) and choice.tokens == 0
    assert len(finish(desk)) == 5
    assert choice.completion.text == spelled(MODEL.goes_on(PROMPT, 5))
    assert (choice.completion.finish_reason, choice.answer.generated) == ("length", 5)
    other, read = begin(desk, answer([*PROMPT[:6], 7, 7]))
    assert read == 2 and other.session is choice.session, "what both have in common is there"
    assert choice.session.timeline.checkpoints.has(4, "system")
    desk.drop(other.answer)
    assert desk.writing == []


def test_further_choices_go_back_to_the_prompt():
    """The prompt was read again for each choice, or a choice went on with another one's noise."""
    desk, of = desk_of(), answer(n=2, settings={"temp": 2.0, "seed": 5})
    texts = []
    for index in range(2):
        choice, read = begin(desk, of, index)
        assert choice.session.attempt == index and read == (0 if index else len(PROMPT))
        finish(desk)
        texts.append(choice.completion.text)
    assert texts[0] != texts[1] and of.generated == 10
    assert choice.session.timeline.checkpoints.has(len(PROMPT), "prompt")
    begin(desk, answer([*PROMPT, 1]))
    assert not choice.session.timeline.checkpoints.has(len(PROMPT) + 1)


def test_reproducible_lines_are_read_anew():
    """What was read before shaped the calls, and with them the last digits."""
    said = []
    desk = desk_of(8, said, reproducible=True)
    assert desk.lanes == 1 and "no call may depend on other lines" in said[0]
    first, _ = begin(desk, answer(settings={"reproducible": True}))
    finish(desk)
    second, read = begin(desk, answer(settings={"reproducible": True}))
    assert read == len(PROMPT) and second.session is not first.session
    finish(desk)
    third, read = begin(desk, answer(n=2, settings={"reproducible": True}), 1)
    assert read == 0 and third.session is second.session


def test_a_stop_while_a_prompt_is_read():
    """A line that was half read was written, and counted."""
    desk = desk_of(prefill_step_size=2)
    left = iter([False, True, True])
    with pytest.raises(Interrupted):
        begin(desk, answer(), cancel=lambda: next(left))
    assert desk.writing == []


def test_several_at_a_time_are_branches(lanes):
    """Guards: lines that write over each other; more at a time than wanted; a call too many."""
    said = []
    desk = desk_of(3, said)
    (group,) = lanes
    group.warn("as it came")
    assert said == ["as it came"]
    assert desk.lanes == 3
    choices = [begin(desk, answer([*PROMPT, i]))[0] for i in range(2)]
    assert desk.has_room([]) and not desk.has_room(choices[:1])
    assert len({id(choice.session) for choice in choices} | {id(desk._reader)}) == 3
    assert [limits["max_tokens"] for _, limits in group.joined] == [5, 5]
    assert finish(desk) == [2] * 5 and group.calls == 5
    for i, choice in enumerate(choices):
        assert choice.completion.text == spelled(MODEL.goes_on([*PROMPT, i], 5))
    waiting, _ = begin(desk, answer())
    waiting.lane.has_step = False
    assert list(desk.round()) == [], "its call still runs"
    desk.drop(answer())
    assert desk.writing == [waiting]
    desk.drop(waiting.answer)
    assert desk.writing == [] and group.left == [waiting.lane]
    desk.close()
    assert not group.is_open and desk._engine.prices.rounds == {2: 0.5}


def test_why_fewer_are_written_at_a_time(lanes, monkeypatch):
    """A batch that is slow, and does not say why."""
    said = []
    monkeypatch.setattr(
        "ds4cli.engine.group.Group", lambda *_: (_ for _ in ()).throw(ModelError("no way"))
    )
    desk = desk_of(4, said)
    assert (desk.lanes, said) == (1, ["one at a time: no way"])
    choice, _ = begin(desk, answer())
    finish(desk)
    assert choice.completion.finish_reason == "length"
    desk.close()


def test_how_far_back_a_branch_keeps():
    """As much as any session for each of many; or too little for a stop string to be taken back."""
    desk = desk_of(4, horizon_tokens=200, rewind_mb=8)
    plain, _ = begin(desk, answer())
    stopped, _ = begin(desk, answer(settings={"stop": ("é" * 4, "x")}))
    watched = answer()
    watched.is_guarded = True
    guarded, _ = begin(desk, watched)
    rows = [c.session.limits.horizon_tokens for c in (plain, stopped, guarded)]
    assert rows == [MAX_BLOCK_TOKENS, MAX_BLOCK_TOKENS + 8, 200]
    assert {c.session.limits.budget_bytes for c in (plain, stopped, guarded)} == {2 << 20}
    assert [c.session.recording for c in (plain, stopped, guarded)] == [False, True, True]
    marks = [c.session.timeline.checkpoints.has(8, "prompt") for c in (plain, stopped, guarded)]
    assert marks == [False, False, True]


def test_memory_bounds_how_many_are_begun(monkeypatch):
    """Guards: lines begun that do not fit, or none at all."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * 1000)
    desk = desk_of(None, rewind_mb=1)
    desk._width.now = 8
    desk._engine.capabilities = SimpleNamespace(cache_bytes_per_token=10)
    choices = [Choice(answer(settings={"max_tokens": n}), 0) for n in (42, 42, 43, -1)]
    first, second, third, endless = choices
    assert desk.fits(endless, []), "one always does"
    assert desk.fits(first, [second]) and not desk.fits(first, [third])
    desk.writing = [second]
    assert desk.fits(first, []) and not desk.fits(first, [second])
    desk._room = 10**9
    begin(desk, answer())
    desk.writing = [second]
    desk._reader.horizon_bytes = lambda limits: 1 << 19
    assert desk.fits(first, []) and not desk.fits(first, [third]), "what going back keeps"
    desk._width.is_given = True
    assert desk.fits(first, choices), "as the user says"


def test_prompts_are_read_together_where_that_is_little_more():
    """Guards: rows padded to twice the work; a prompt that is read again by its line."""
    desk = desk_of(4)
    alike = [answer([*PROMPT, i, 1]) for i in range(3)]
    assert desk.read_together(alike[:1]) == 0
    read = desk.read_together(alike)
    assert read == len(PROMPT) + sum(len(of.prompt) for of in alike)
    for of in alike:
        assert of.session.tokens == list(of.prompt)
        choice, again = begin(desk, of)
        assert again == 0 and of.session is None
    finish(desk)
    assert choice.completion.text == spelled(MODEL.goes_on(choice.answer.prompt, 5))
    several = [answer(n=2), answer(n=2)]
    assert desk.read_together(several) == 0 and several[0].session is None
    assert MOST_MORE < 1.5
    unlike = [answer(prompt) for prompt in ([1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5])]
    assert desk.read_together(unlike) == 0, "one after the other shares more"
    desk._reader.limits.__dict__["chunk_tokens"] = 3
    assert desk.read_together([answer([5, i]) for i in range(4)]) == 0, "more than a call"
    desk._group.is_apart = True
    assert desk.read_together(alike) == 0


def test_what_is_read_together():
    """Guards: a prompt of which no token is left to read; what lines have in common read twice."""
    desk = desk_of(4)
    equal = [answer(checkpoints=[4]) for _ in range(2)]
    assert desk.read_together(equal) and desk._reader.tokens == PROMPT[:-1]
    assert desk._reader.timeline.checkpoints.has(4, "system")
    assert desk.read_together([answer([*PROMPT, i]) for i in range(3)]), "it is there already"
    # What the last two share beyond that is read once, one after the other.
    tails = ([1], [2] * 8, [*[2] * 7, 3])
    assert desk_of(4).read_together([answer([*PROMPT, *tail]) for tail in tails]) == 0
    assert desk_of(4).read_together([answer([*PROMPT, *tail]) for tail in tails[:2]])


def test_a_width_is_judged_by_the_tokens_of_its_rounds():
    """Guards: tokens counted for another round, or those of the prompts."""
    desk, seen = desk_of(2), []
    desk._width.observe = lambda *told: seen.append(told)
    first, _ = begin(desk, answer())
    assert first.answer.finished == {}
    begin(desk, answer(settings={"max_tokens": 3}))
    finish(desk)
    assert seen == [(2, 2, 1), (2, 2, 1), (1, 2, 1), (1, 1, 1), (0, 1, 1)], "left, made, s"


def test_a_line_that_breaks_a_joint_reading_does_not_break_the_others():
    """One bad id ended the batch."""
    desk = desk_of(4)
    desk._engine.id_limit = WORDS
    lines = [answer([*PROMPT, 1]), answer([*PROMPT, 10**6])]
    assert desk.read_together(lines) == 0
    assert [of.session for of in lines] == [None, None]


def test_scores_of_a_line_that_asks_for_them():
    """Guards: log-probabilities of the prompt, of another line, or of none."""
    desk = desk_of()
    choice, _ = begin(desk, answer(logprobs=2))
    finish(desk)
    said = [entry["token"] for entry in choice.completion.logprobs]
    assert "".join(said) == choice.completion.text and len(said) == 5
    plain, _ = begin(desk, answer())
    finish(desk)
    assert plain.completion.logprobs is None


def test_what_is_read_again_counts():
    """A prompt that had to be read from its beginning was counted as if it had been kept."""
    desk, long = (
        desk_of(horizon_tokens=0, prefill_step_size=50),
        [*PROMPT, *[i % WORDS for i in range(400)]],
    )
    begin(desk, answer(long))
    before = len(MODEL._calls)
    _, read = begin(desk, answer([*long[:20], 7]))
    assert read == sum(MODEL._calls[before:]) > 10, "more than the one token that is new"
    desk = desk_of(4, horizon_tokens=0, prefill_step_size=50)
    desk._reader.sync(long)
    before = len(MODEL._calls)
    alike = [answer([*long[:20], i]) for i in range(3)]
    common = desk.read_together(alike) - sum(len(of.prompt) for of in alike)
    assert common == MODEL._calls[before] > 10
