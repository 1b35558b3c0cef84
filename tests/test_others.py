"""Lines that go to other ranks and come back, each side at a wire that is a list."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from test_runner import TOOL, Desk, item, planner

from ds4cli import terminal
from ds4cli.batch import others as o
from ds4cli.batch.desk import Job, PlannedJob
from ds4cli.batch.others import Given, Others, Taker
from ds4cli.batch.progress import Tally
from ds4cli.errors import UsageError
from ds4cli.ranks.group import END
from ds4cli.settings import Settings

COUNTS = {"prompt_tokens": 1, "read_tokens": 2, "generated": 3, "failed": 0}


class Leading:
    """Two other ranks. sent: what they were told; says: what each has to say."""

    def __init__(self):
        self.others, self.sent, self.waits, self.checked = [3, 5], [], [], []
        self.says = {3: [], 5: []}

    def tell(self, *move):
        self.sent.append(("all", *move))

    def flush(self):
        self.sent.append("flush")

    def tell_one(self, rank, what):
        self.sent.append((rank, what))

    def have_said(self, wait_s):
        self.waits.append(wait_s)
        return [rank for rank in self.others if self.says[rank]]

    def heard(self, rank):
        return self.says[rank].pop(0)

    def check(self, facts):
        self.checked.append(facts)


class Following:
    """moves: what rank 0 tells; None: for a look, nothing has come."""

    def __init__(self, *moves):
        self.moves, self.answers, self.checked, self.looks = list(moves), [], [], 0

    @property
    def is_told(self):
        self.looks += 1
        if self.moves[0] is None:
            del self.moves[0]
            return False
        return True

    def next(self):
        assert self.moves[0] is not None, "it was not asked whether it would wait"
        return self.moves.pop(0)

    def answer(self, value):
        self.answers.append(value)

    def check(self, facts):
        self.checked.append(facts)


def step(number, **fields):
    return PlannedJob(Job(item("a", number)), **fields)


def test_a_rank_has_one_line_more_than_it_writes():
    """Guards: a rank that waits for its next line; lines that pile up with one of them."""
    group = Leading()
    others = Others(group, False)
    assert not others.are_busy
    for number, rank in enumerate((3, 5, 3, 5)):
        assert others.free == rank
        others.give(rank, step(number))
    assert others.free is None and others.are_busy
    group.says[5] = [[1, "x", COUNTS, 3]]
    ((got, line, counts),) = others.finished(wait=False)
    assert (got.number, line, counts, others.answered) == (1, b"x", COUNTS, 1)
    for number in (4, 5, 6):
        assert others.free == 5, "it writes three at a time now"
        others.give(5, step(number))
    assert others.free is None
    for rank, numbers in ((3, (0, 2)), (5, (3, 4, 5, 6))):
        group.says[rank] = [[number, "y", COUNTS, 1] for number in numbers]
    done = [got.number for _ in range(4) for got, *_ in others.finished(wait=True)]
    assert sorted(done) == [0, 2, 3, 4, 5, 6] and not others.are_busy and others.answered == 7
    assert group.waits == [0.0] + 4 * [o.WAIT_S]


def test_a_line_travels_as_it_came():
    """Guards: bytes that are no UTF-8 become other bytes, and the line another one."""
    group, raw = Leading(), b'{"prompt": "\xff\xc3\xa9"}\n'
    given = SimpleNamespace(number=4, raw=raw)
    plan = PlannedJob(SimpleNamespace(item=given), shared=2, checkpoints=(1, 2))
    Others(group, True).give(5, plan)
    ((rank, (number, text, shared, checkpoints)),) = group.sent
    assert (rank, number, shared, checkpoints) == (5, 4, 2, [1, 2])
    assert json.loads(json.dumps(text)).encode("utf-8", "surrogateescape") == raw


def test_all_ranks_load_one_model():
    group, settings = Leading(), Settings(model="m")
    others = Others(group, True)
    others.begin(settings, [TOOL])
    assert group.sent == [("all", "lines", asdict(settings), [TOOL.spec], True), "flush"]
    others.check(SimpleNamespace(fingerprint="f", is_float32=False))
    (facts,) = group.checked
    assert facts["model"] == "f" and "False" in facts["type of weights"] and facts["versions"]


def test_without_other_ranks_nothing_is_shared_out(monkeypatch):
    met = {"one": Leading(), "none": None}
    monkeypatch.setattr(o, "meet", lambda settings: met[settings.model])
    with pytest.raises(UsageError, match="needs other ranks"):
        Others.meet(Settings(model="none"), False)
    others = Others.meet(Settings(model="one"), True)
    others.begin(Settings(), [])
    assert met["one"].sent[0][-1] is True


def test_a_result_goes_with_what_was_counted_since_the_last():
    """Guards: tokens counted twice on rank 0."""
    group, tally = Following(), Tally(generated=5, prompt_tokens=7, read_tokens=4, lanes=2)
    given = Given(group, tally)
    assert not given.expect(item("a"))
    given.put(item("a", 8), "é".encode())
    assert group.answers == [], "it is not counted yet"
    given.tell()
    given.put(item("b", 9), b"x")
    tally.generated, tally.failed, tally.lanes = 9, 1, 4
    given.tell()
    first = {"prompt_tokens": 7, "read_tokens": 4, "generated": 5, "failed": 0}
    then = {"prompt_tokens": 0, "read_tokens": 0, "generated": 4, "failed": 1}
    assert group.answers == [[8, "é", first, 2], [9, "x", then, 4]]


ENGINE = SimpleNamespace(
    settings=Settings(model="m"), held_fingerprint="f" * 40, decode=lambda ids: "",
    markers=SimpleNamespace(starts=(), end=""), fingerprint="f", is_float32=True,
    prices=SimpleNamespace(rounds={8: 1.0, 16: 9.0}, seconds={}),
)  # fmt: skip


def taken(*moves, wide=1, plain=False):
    """The answers of a rank that is told `moves`."""
    group = Following(*moves, [END])
    Taker(group, ENGINE, planner(), Desk(wide), plain).take_lines()
    assert group.moves == [] and (group.looks == 0 or wide > 1), "it has nothing else to do"
    return group.answers


def move(number, text):
    return [number, json.dumps({"prompt": text}), 0, []]


def counts_of(answers):
    """(line, tokens of its prompt, of its answer, whether it failed) of each answer."""
    keys = ("prompt_tokens", "generated", "failed")
    return [(number, *(counts[key] for key in keys)) for number, _, counts, _ in answers]


def test_a_rank_answers_what_it_is_given_to_the_end():
    """Guards: a line left at the end; one that waits for the next, which waits for its answer."""
    answers = taken(move(4, "ab"), None, move(9, "c"), None, move(7, "long"), wide=2)
    assert counts_of(answers) == [(4, 2, 2, 0), (9, 1, 2, 0), (7, 0, 0, 1)]
    answers = taken(move(1, "a"), move(2, "b"), move(3, "c"), wide=2)
    assert sorted(answer[0] for answer in answers) == [1, 2, 3] and answers[0][3] == 2
    assert counts_of(taken(move(1, "a"), plain=True)) == [(1, len('{"prompt": "a"}'), 2, 0)]


def test_what_a_line_counts_is_told_with_it():
    """What a line counted was told with the next one: rank 0 took a failure for an answer and the
    line behind it for the failure, where a run stopped too late, and never heard of the last."""
    answers = taken(move(1, "long"), move(2, "abc"), move(3, "none"))
    assert counts_of(answers) == [(1, 0, 0, 1), (2, 3, 2, 0), (3, 0, 0, 1)]


def test_a_line_is_read_as_rank_0_has_read_it():
    """Guards: a byte that is no UTF-8 ends the rank, not the line."""
    ((number, line, counts, _),) = taken([1, "a\udcff", 0, []])
    assert (number, counts["failed"]) == (1, 1) and "not UTF-8: byte 1" in line


@pytest.mark.parametrize("specs", [[], [TOOL.spec]])
def test_another_rank_loads_what_rank_0_has(monkeypatch, specs):
    """Guards: lines that are answered with other settings, tools or forms than rank 0's."""
    given, desk = {}, Desk(2)

    def load(settings, **how):
        given.update(asked=settings, how=how)
        return ENGINE

    def plan(*all_of_it):
        given["plan"] = all_of_it
        return planner()

    def sit(engine, width, note):
        assert engine is ENGINE and width.now == 8 and note("x") is None
        return desk

    monkeypatch.setattr(o.generate, "load_engine", load)
    monkeypatch.setattr(o, "Planner", plan)
    monkeypatch.setattr(o, "Desk", sit)
    begun, begin = [], desk.begin
    monkeypatch.setattr(
        desk, "begin", lambda c, *rest: begun.append(c.answer.step) or begin(c, *rest)
    )
    settings = Settings(model="n", json_object=True)
    group = Following([5, "a line\n", 3, [1, 2]], [END])
    o.answer_lines(group, asdict(settings), specs, True)
    tools = given["how"].pop("tools")
    assert given["asked"] == settings and [tool.spec for tool in tools] == specs
    assert given["how"] == {"quiet": True, "shares": False}
    assert group.checked == [o.facts(ENGINE)]
    engine, by, these, is_grouped, wanted = given["plan"]
    assert (engine, by, these, is_grouped) == (ENGINE, ENGINE.settings, tools, False)
    assert wanted == o.from_settings(settings) is not None
    assert (begun[0].shared, begun[0].checkpoints, begun[0].job.item.prompt) == (
        3,
        [1, 2],
        "a line",
    )


def test_one_rank_says_how_far_a_batch_is(monkeypatch):
    """Guards: lines of progress from every rank, each of its own part."""
    monkeypatch.setattr(terminal, "is_animated", lambda: False)
    monkeypatch.setattr(terminal, "note", pytest.fail)
    assert len(taken(*(move(n, "a") for n in range(1, 102)))) == 101
