"""Plans and runs of a batch, at a desk that writes what it is told to: what is begun when, what a
failure costs, and what each result says.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ds4cli import generate
from ds4cli.batch.progress import BatchProgress
from ds4cli.batch.requests import derived_seed, parse
from ds4cli.batch.runner import Planner, Runner, model_fingerprint
from ds4cli.errors import DS4Error, Interrupted, UsageError
from ds4cli.settings import Settings
from ds4cli.structured import guards
from ds4cli.structured.wanted import Wanted
from ds4cli.text.reasoning import Markers
from ds4cli.tools import Tool

TOOL = Tool("now", "", {"type": "object", "properties": {}})


class Template:
    def __init__(self, specs):
        self.names = "".join(spec["function"]["name"] for spec in specs)

    def dropped_system(self, messages):
        return [i for i, m in enumerate(messages) if m["role"] == "system" and i]

    def opening(self, system, messages):
        return map(ord, f"{system or ''}{self.names}<{messages[-1]['content']}")

    def continuing(self, system, messages):
        return map(ord, f"{system or ''}{self.names}~{messages[-1]['content']}")


class Words:
    """A vocabulary of letters. `long` is a text that is too long, a context holds 99."""

    templates = 0

    def encode(self, text):
        if text == "odd":
            raise ZeroDivisionError("odd")
        return [] if text == "none" else list(map(ord, text))

    def check_length(self, text):
        if text == "long":
            raise UsageError("too long")

    def check_context(self, n):
        if n > 99:
            raise UsageError("beyond the context")

    def template(self, settings, specs):
        assert isinstance(settings, Settings)
        self.templates += 1
        return Template(specs)


def item(text, number=1, **fields):
    return parse(number, json.dumps({"prompt": text, **fields}).encode() + b"\n")


def chat(text, number=1, **fields):
    messages = [{"role": "user", "content": text}]
    return parse(number, json.dumps({"messages": messages, **fields}).encode() + b"\n")


def planner(settings=None, tools=(), group=False, **rest):
    return Planner(Words(), settings or Settings(raw=True).filled(), list(tools), group, **rest)


def spelled(job):
    return "".join(map(chr, job.prompt))


def test_a_prompt_is_encoded_or_drawn_by_the_template():
    """Guards: a template around a raw prompt, the tools of another line, a reply begun anew."""
    plain, drawn = planner(), planner(Settings(system="S").filled(), [TOOL])
    assert spelled(plain.job(item("ab"))) == "ab" and plain.is_raw(item("ab"))
    generate.check_tools, kept = lambda vocabulary, tools: None, generate.check_tools
    try:
        assert spelled(drawn.job(chat("ab"))) == "Snow<ab"
        assert spelled(drawn.job(chat("ab", tool_choice="none"))) == "S<ab"
        assert spelled(drawn.job(chat("b"))) == "Snow<b" and drawn.vocabulary.templates == 2
        ends = {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        }
        open_ended = parse(1, json.dumps(ends).encode() + b"\n")
        assert spelled(drawn.job(open_ended)) == "Snow~y"
    finally:
        generate.check_tools = kept
    assert not drawn.is_raw(chat("ab")) and not drawn.is_raw(item("ab"))
    completion = b'{"url": "/v1/completions", "custom_id": "a", "body": {"prompt": "x"}}\n'
    assert drawn.is_raw(parse(1, completion)), "the shape that is asked for"


def test_tools_and_forms_of_a_line():
    """Guards: a line that is watched for the tools of all, though it brings none."""
    form, own = Wanted("json", {}, "it"), chat("x", tool_choice="none")
    raw = planner(tools=[TOOL])
    assert raw.tools_of(item("x")) == () and not raw.is_guarded(item("x"))
    both = planner(Settings().filled(), [TOOL])
    assert both.tools_of(chat("x")) == [TOOL] and both.is_guarded(chat("x"))
    assert both.tools_of(own) == () and not both.is_guarded(own)
    formed = planner(Settings().filled(), wanted=form)
    assert formed.form_of(chat("x")) is form and formed.is_guarded(chat("x"))
    text = chat("x", response_format={"type": "text"})
    assert formed.form_of(text) is None and not formed.is_guarded(text)
    json_of_own = planner(Settings().filled()).form_of(
        chat("x", response_format={"type": "json_object"})
    )
    assert json_of_own is not None and json_of_own.kind == "json"


def test_tools_that_cannot_be_read_are_a_lines_error(monkeypatch):
    """Guards: calls that nobody reads, of tools that a line brings itself."""
    asked = []
    monkeypatch.setattr(generate, "check_tools", lambda v, tools: asked.append(list(tools)))
    made = planner(Settings().filled(), [TOOL])
    made.job(chat("x"))
    made.job(chat("x", tool_choice="none"))
    assert asked == [[TOOL], []]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("long", "too long"),
        ("x" * 100, "beyond the context"),
        ("none", "the prompt became no tokens at all"),
        ("odd", "the prompt cannot be read: ZeroDivisionError: odd"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_its_lines_error(text, said):
    """A line that cannot be read ended the batch."""
    job = planner().job(item(text))
    assert job.error == said and list(job.prompt) == []


def test_a_bad_line_is_its_own_error():
    job = planner().job(parse(4, b"{"))
    assert job.error == job.item.error != ""


def test_a_template_that_drops_a_system_text_is_named_once():
    """Guards: a warning a line, or none."""
    said = []
    made = planner(Settings().filled(), warn=said.append)
    assert not made.job(chat("x", 2)).error and said == []
    for number in (3, 4):
        messages = [{"role": role, "content": "x"} for role in ("user", "system", "user")]
        job = made.job(parse(number, json.dumps({"messages": messages}).encode() + b"\n"))
        assert not job.error
    assert said == ["line 3: the chat template leaves out a later system text"]


def order(steps):
    return [step.job.item.number for step in steps]


LINES = [item("a" * 40 + "b", 1), parse(2, b"{"), item("c", 3), item("a" * 40 + "d", 4)]


def test_steps_stand_in_working_order():
    """Guards: bad lines that are lost, what a prompt shares counted for another one."""
    plain, grouped = planner(), planner(group=True)
    steps = plain.steps(LINES)
    assert order(steps) == [1, 2, 3, 4]
    assert [step.shared for step in steps] == [0, 0, 0, 0]
    steps = grouped.steps(LINES)
    assert order(steps) == [2, 1, 4, 3], "what cannot be answered first"
    assert [step.shared for step in steps] == [0, 0, 40, 0]
    assert [list(step.checkpoints) for step in steps] == [[], [40], [40], []]
    (after,) = grouped.steps([item("cc", 5)])
    assert after.shared == 1, "with the last one of the block before"
    (again,) = grouped.steps([item("cc", 6)])
    assert again.shared == 2 and grouped.steps([parse(7, b"{")])[0].shared == 0
    assert grouped.steps([item("cc", 8)])[0].shared == 2, "which had a prompt"
    exact = planner(Settings(raw=True, reproducible=True).filled(), group=True)
    assert [step.shared for step in exact.steps(LINES)] == [0, 0, 0, 0]


def test_lines_that_an_earlier_run_answered_count_as_read():
    """`cached_tokens` of a run that was cut were other ones."""
    made = planner()
    made.skip([item("abc", 1)])
    (step,) = made.steps([item("abd", 2)])
    assert step.shared == 2
    assert made.steps([item("abc", 3)])[0].shared == 2, "but once"


class Desk:
    """Writes two letters of each choice, or what `plan` says of a text: an exception, or a reason.
    wide: so many at a time. log: what was asked of it."""

    def __init__(self, wide=1, plan=None, room=None):
        self.lanes, self.plan, self.room = wide, plan or {}, room
        self.writing, self.log, self.is_open, self.rounds = [], [], True, 0

    def has_room(self, waiting):
        return len(self.writing) + len(waiting) < self.lanes

    def fits(self, choice, waiting):
        return self.room is None or len(self.writing) + len(waiting) < self.room

    def read_together(self, answers):
        self.log.append(("together", [a.item.number for a in answers]))
        return 100 * (len(answers) > 1)

    def begin(self, choice, guard, cancel):
        self.log.append(("begin", choice.answer.item.number, choice.index, guard))
        assert choice.answer.is_guarded == (guard is not None)
        plan = self.plan.get(choice.answer.item.prompt)
        if plan == "begin":
            raise DS4Error("not begun")
        choice.left = 1 if plan is None else plan if isinstance(plan, int) else 2
        self.writing.append(choice)
        return len(choice.answer.prompt)

    def round(self):
        self.rounds += 1
        yield from list(self.writing)

    def take(self, choice):
        plan = self.plan.get(choice.answer.item.prompt)
        if isinstance(plan, Exception):
            raise plan
        choice.completion.text += "[1]"[len(choice.completion.text) :]
        choice.completion.reasoning = "thought"
        choice.left -= 1
        if choice.left <= 0:
            choice.completion.finish_reason = plan if isinstance(plan, str) else "stop"
            choice.answer.generated += 2
            self.writing.remove(choice)

    def drop(self, answer):
        self.log.append(("drop", answer.item.number))
        self.writing = [c for c in self.writing if c.answer is not answer]

    def begin_anew(self):
        self.log.append("anew")

    def close(self):
        self.is_open = False


class Results:
    """done: numbers that an earlier run has answered."""

    resume_hint = "so it goes on"

    def __init__(self, done=()):
        self.done, self.lines = set(done), {}

    def expect(self, item):
        return item.number in self.done

    def put(self, item, line):
        assert item.number not in self.lines
        self.lines[item.number] = json.loads(line)


class Blocks:
    def __init__(self, *blocks):
        self.blocks, self.waits = list(blocks), []

    def take(self, wait):
        self.waits.append(wait)
        return self.blocks.pop(0) if self.blocks else None


ENGINE = SimpleNamespace(
    settings=Settings(model="m"), markers=Markers(("<t>",), "</t>"), held_fingerprint="f" * 40,
    decode=lambda ids: "".join(map(chr, ids)),
)  # fmt: skip


def runner(desk, blocks, results=None, made=None, cancel=lambda: False, **rest):
    results, made = results or Results(), made or planner()
    running = Runner(ENGINE, made, results, cancel, desk, **rest)
    shown = []
    progress = BatchProgress(running.tally, None, False)
    progress.update = lambda: shown.append((running.tally.done, running.tally.lanes))
    running.run(blocks, progress)
    return results.lines, running.tally, shown


def test_every_line_is_answered():
    """Guards: a line that is lost or counted twice, and what its answer says of it."""
    desk = Desk(2)
    lines, tally, shown = runner(desk, Blocks([item("abc", 1), item("abd", 2)], [item("x", 3)]))
    assert sorted(lines) == [1, 2, 3] and not desk.is_open
    assert (tally.answered, tally.failed, tally.kept) == (3, 0, 0)
    assert (tally.prompt_tokens, tally.generated) == (7, 6)
    assert tally.read_tokens == 7 + 100 and shown == [(1, 2), (2, 2), (3, 2)]
    body = lines[2]["response"]["body"]
    assert body["model"] == "m" and body["system_fingerprint"] == "fp_" + "f" * 16
    assert body["choices"][0]["text"] == "[1]" and body["object"] == "text_completion"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    again = runner(Desk(), Blocks([item("abc", 1), item("abc", 2)]))[0]
    cached = again[2]["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 2, "the last token of a prompt is never counted"
    assert model_fingerprint(ENGINE) == "fp_" + "f" * 16


def test_settings_of_a_line_and_of_the_run():
    """Guards: the seed or the limit of another line, and reasoning that was to be hidden."""
    seen = {}
    desk = Desk()
    begin = desk.begin
    desk.begin = lambda choice, *rest: (
        seen.update({choice.answer.item.number: choice.answer}) or begin(choice, *rest)
    )
    settings = Settings(hide_reasoning=True, seed=5, temp=0.5).filled()
    lines, *_ = runner(
        desk,
        Blocks([chat("abc", 1, max_tokens=7, custom_id="one"), chat("x", 2)]),
        made=planner(settings),
    )
    assert seen[1].settings.max_tokens == 7 and seen[2].settings.max_tokens == settings.max_tokens
    assert seen[1].settings.seed == derived_seed(5, "one") != seen[2].settings.seed
    assert not seen[1].is_raw and not seen[1].is_guarded
    body = lines[1]["response"]["body"]
    assert "reasoning" not in body["choices"][0]["message"]
    assert body["settings"] == {"hide_reasoning": True, "seed": 5, "temp": 0.5}
    body = runner(Desk(), Blocks([chat("abc")]), made=planner(Settings().filled()))[0][1]
    message = body["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "[1]", "reasoning": "thought"}


def test_several_completions_of_a_line():
    """Guards: choices out of order, a prompt counted for each of them."""
    desk = Desk(3)
    lines, tally, _ = runner(desk, Blocks([item("abc", 1, n=3, temperature=1.0)]))
    body = lines[1]["response"]["body"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 6 == tally.generated
    assert (tally.prompt_tokens, tally.answered) == (3, 1)
    assert [begun[1:3] for begun in desk.log if begun[0] == "begin"] == [(1, 0), (1, 1), (1, 2)]


def test_where_a_prompt_opens_a_thought_the_reply_begins_with_it(monkeypatch):
    """Reasoning came as the answer."""
    asked = []
    monkeypatch.setattr(generate, "splitter", lambda engine, inside: asked.append(inside))
    desk, made = Desk(), planner(Settings().filled())
    runner(desk, Blocks([chat("x", 1), chat("<t>", 2), item("<t>", 3)]), made=made)
    assert asked == [False, True, True]
    runner(Desk(), Blocks([item("<t>", 1)]))
    assert len(asked) == 3, "a raw prompt has no parts"


def test_who_watches_a_line(monkeypatch):
    """Guards: the guard of another line, or with the tools of all."""
    asked = []

    def guard_of(engine, tools, form, *, thinks, max_repairs):
        asked.append((list(tools), form, thinks, max_repairs))
        return "guard"

    monkeypatch.setattr(guards, "make_guard", guard_of)
    monkeypatch.setattr(generate, "check_tools", lambda *_: None)
    form, desk = Wanted("json", {}, "it"), Desk()
    text = chat("x", 2, tool_choice="none", response_format={"type": "text"})
    made = planner(Settings(max_repairs=7).filled(), [TOOL], wanted=form)
    lines, *_ = runner(
        desk,
        Blocks([chat("<t>", 1), text]),
        made=made,
    )  # fmt: skip
    assert asked == [([TOOL], form, True, 7)]
    assert [entry[3] for entry in desk.log if entry[0] == "begin"] == ["guard", None]
    first, second = (lines[n]["response"]["body"]["choices"][0]["message"] for n in (1, 2))
    assert first["parsed"] == [1] and "parsed" not in second


@pytest.mark.parametrize(("reason", "text"), [("length", "[1]"), ("stop", "[1")])
def test_only_a_finished_value_is_parsed(reason, text):
    """Half a value was given as a whole one; or a text that is none ended the batch."""
    made = planner(Settings().filled(), wanted=Wanted("json", {}, "it"))
    made.is_guarded = lambda item: False
    desk = Desk(plan={None: reason})
    take = desk.take

    def cut(choice):
        take(choice)
        choice.completion.text = text

    desk.take = cut
    lines, *_ = runner(desk, Blocks([chat("x", 1)]), made=made)
    assert "parsed" not in lines[1]["response"]["body"]["choices"][0]["message"]


def test_bad_lines_cost_nothing_but_themselves():
    """Guards: a failure that ends others, is lost, or leaves its session in use."""
    plan = {"begin": "begin", "bug": ZeroDivisionError("x"), "model": DS4Error("no"), "a": 3}
    desk = Desk(3, plan)
    lines, tally, shown = runner(
        desk,
        Blocks([item("a", 1), item("long", 2), item("begin", 3), item("bug", 4), item("model", 5),
                item("z", 6)]),
    )  # fmt: skip
    errors = {n: line["error"] and line["error"]["code"] for n, line in lines.items()}
    assert errors == {
        1: None, 2: "invalid_request", 3: "failed", 4: "internal_error", 5: "failed", 6: None,
    }  # fmt: skip
    assert lines[4]["error"]["message"] == "line 4: ZeroDivisionError: x"
    assert lines[2]["error"]["message"] == "line 2: too long"
    assert lines[5]["error"]["message"] == "line 5: no"
    assert (tally.answered, tally.failed) == (2, 4) and len(shown) == 6
    assert desk.log.count("anew") == 1, "after what nobody foresaw"
    assert [entry[1] for entry in desk.log if entry[0] == "drop"] == [3, 4, 5]


def test_a_line_that_failed_is_written_no_further():
    """Its other completions went on, and a second result was put for it."""
    desk = Desk(2, {"bug": ZeroDivisionError("x")})
    lines, tally, _ = runner(desk, Blocks([item("bug", 1, n=4, temperature=1.0), item("z", 2)]))
    assert lines[1]["error"] and lines[2]["response"] and tally.failed == 1
    assert len([entry for entry in desk.log if entry[:2] == ("begin", 1)]) == 2


def test_a_line_that_fails_at_its_end_has_one_result():
    """Its answer was put behind its error."""
    desk = Desk()
    take = desk.take

    def fail(choice):
        take(choice)
        raise DS4Error("late")

    desk.take = fail
    lines, tally, _ = runner(desk, Blocks([item("a", 1)]))
    assert lines[1]["error"]["message"] == "line 1: late" and tally.answered == 0


def test_fail_fast_begins_no_line_after_a_failure():
    """Guards: lines that are begun all the same, and those in work that are thrown away."""
    desk = Desk(2, {"bug": ZeroDivisionError("x"), "a": 3})
    results = Results()
    blocks = Blocks([item("a", 1), item("bug", 2), item("z", 3)], [item("z", 4)])
    with pytest.raises(DS4Error) as raised:
        runner(desk, blocks, results, fail_fast=True)
    assert raised.value.message == "stopped at line 2, which failed"
    assert raised.value.hint == "so it goes on"
    assert sorted(results.lines) == [1, 2] and not desk.is_open


def test_what_there_is_no_memory_for_waits():
    """Guards: a line that does not fit begun all the same, or forgotten."""
    desk = Desk(4, {"a": 2}, room=2)
    lines, *_ = runner(desk, Blocks([item("a", n) for n in range(1, 6)]))
    assert sorted(lines) == [1, 2, 3, 4, 5]
    together = [entry[1] for entry in desk.log if entry[0] == "together"]
    assert together[0] == [1, 2] and max(map(len, together)) == 2


def test_lines_that_are_done_are_kept():
    """Guards: a line that is made twice, and prompts that count as read by nobody."""
    desk = Desk()
    blocks = Blocks([item("abc", 1), item("abd", 2)], [item("abe", 3), item("abf", 4)])
    lines, tally, _ = runner(desk, blocks, Results([1, 2, 3]))
    assert list(lines) == [4] and (tally.kept, tally.answered) == (3, 1)
    usage = lines[4]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    lines, tally, _ = runner(Desk(), Blocks([item("abc", 1)], [item("abd", 2)]), Results([1]))
    assert lines[2]["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_what_has_not_come_yet_is_waited_for_only_where_nothing_is_written():
    """Lines in work stood still until the next one was typed."""
    desk, blocks = Desk(2, {"a": 3}), Blocks([item("a", 1)], [], [item("b", 2)])
    lines, *_ = runner(desk, blocks)
    assert sorted(lines) == [1, 2]
    assert blocks.waits[:3] == [True, False, False] and desk.rounds == 3


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_a_stop_ends_the_run_between_two_rounds(after):
    """A batch that cannot be stopped, or that calls itself done."""
    asked, desk, results = iter([False] * after), Desk(2, {"a": 9}), Results()
    with pytest.raises(Interrupted):
        runner(
            desk, Blocks([item("a", 1), item("a", 2)]), results, cancel=lambda: next(asked, True)
        )
    assert not desk.is_open and results.lines == {}


def test_a_reply_that_was_cancelled_is_no_result():
    """Half an answer stood in the results."""
    desk, results = Desk(plan={"a": "cancelled"}), Results()
    with pytest.raises(Interrupted):
        runner(desk, Blocks([item("a", 1)]), results)
    assert results.lines == {} and not desk.is_open
    desk = Desk(plan={"a": Interrupted("x")})
    with pytest.raises(Interrupted):
        runner(desk, Blocks([item("a", 1)]), results)
    assert results.lines == {}


class Rank:
    """Another rank, which answers `room` lines at a time, each after one look."""

    def __init__(self, room=1, fails=()):
        self.room, self.fails, self.work, self.waits = room, fails, [], []

    @property
    def are_busy(self):
        return bool(self.work)

    @property
    def free(self):
        return 7 if len(self.work) < self.room else None

    def give(self, rank, step):
        assert rank == 7
        self.work.append(step.job.item)

    def finished(self, wait):
        self.waits.append(wait)
        work, self.work = self.work, []
        for item in work:
            failed = int(item.number in self.fails)
            counts = {"prompt_tokens": 2, "read_tokens": 1, "generated": 3, "failed": failed}
            yield item, b'{"by": "another"}', counts


def test_other_ranks_answer_lines_too():
    """Guards: a line that two answer, or none; what they counted; a failure of theirs."""
    others, desk = Rank(), Desk()
    blocks = Blocks([item(t, i) for i, t in enumerate(("a", "long", "b", "c", "d"), 1)])
    lines, tally, shown = runner(desk, blocks, others=others)
    assert sorted(lines) == [1, 2, 3, 4, 5] and len(shown) == 5
    theirs = [n for n, line in lines.items() if line == {"by": "another"}]
    assert theirs and len(theirs) < 4 and lines[2]["error"]["message"].endswith("too long")
    here = 4 - len(theirs)
    assert (tally.answered, tally.failed) == (4, 1)
    assert tally.prompt_tokens == 2 * len(theirs) + here
    assert tally.read_tokens == len(theirs) + here
    assert tally.generated == 3 * len(theirs) + 2 * here
    with pytest.raises(DS4Error, match="stopped at line 1"):
        runner(Desk(), Blocks([item("a", 1), item("b", 2)], [item("c", 3)]),
               others=Rank(fails=[1]), fail_fast=True)  # fmt: skip
    only = Rank(5)
    lines, *_ = runner(Desk(), Blocks([item("a", 1), item("b", 2)]), others=only)
    assert all(line == {"by": "another"} for line in lines.values()) and only.waits[0]
