"""Batches on tiny models: the same answers in any order, prefixes read once, kills, the command."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from batch_zygote import Zygote
from folder import TEMPLATE, VOCAB_SIZE, save_folder
from tiny import CFG
from typer.testing import CliRunner

from ds4cli import batch, generate, signals
from ds4cli.batch.desk import Desk
from ds4cli.batch.requests import derived_seed
from ds4cli.batch.results import FileResults
from ds4cli.caches.arena import SeatedKVCache, Seating
from ds4cli.cli import app
from ds4cli.drafters.costs import PriceList
from ds4cli.drafters.drafter import Drafter
from ds4cli.engine.engine import Engine
from ds4cli.engine.group import Group, Lane
from ds4cli.errors import DS4Error
from ds4cli.lanes.arm import Lanes
from ds4cli.lanes.batch import Batch
from ds4cli.lanes.call import Call
from ds4cli.rewind.timeline import Timeline
from ds4cli.settings import Settings

FAMILIES = ("llama", "lfm2", "gemma3_text")
# Both others have layers of plain rows, too; what is more of a kind is slow.
MIXED = [*FAMILIES[1:], *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "qwen3_next"))]


class Shared(Engine):
    """An engine whose weights were loaded, and tried with lanes, before; it keeps the sessions that
    it makes."""

    sources: dict[str, Engine]
    tried: dict[tuple, Lanes]
    sessions: list
    reads: list  # tokens that branches read together

    @classmethod
    def load(cls, model="builtin", *, before_weights=None, **settings):
        one = cls.sources.get(model) or Engine.load(model)
        cls.sources[model] = one
        return cls(
            one.model, one.tokenizer, Settings(model=model, **settings),
            context_tokens=one.context_tokens, fingerprint=one.fingerprint,
        )  # fmt: skip

    def session(self):
        self.sessions.append(super().session())
        return self.sessions[-1]

    def lanes(self):
        key = id(self.model), self._limits.slack_tokens
        self._lanes = self.tried.get(key)
        self.tried[key] = super().lanes()
        return self.tried[key]


Shared.sources, Shared.tried = {}, {}


@pytest.fixture
def shared(monkeypatch):
    """Loading takes no time, and what was read can be counted."""
    monkeypatch.setattr(Shared, "sessions", [], raising=False)
    monkeypatch.setattr(Shared, "reads", [], raising=False)
    read = Group.read

    def noted(*args):
        Shared.reads.append(read(*args))
        return Shared.reads[-1]

    monkeypatch.setattr(Group, "read", noted)
    monkeypatch.setattr(generate, "_engine_class", lambda: Shared)
    return Shared


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Tiny models of three cache families that read long prompts."""
    root = tmp_path_factory.mktemp("long")
    names = (*FAMILIES, "qwen3_next")
    return {n: str(save_folder(root / n, n, max_position_embeddings=8192)) for n in names}


def write_jsonl(path: str, requests) -> str:
    text = "".join(json.dumps(request) + "\n" for request in requests)
    Path(path).write_text(text, encoding="utf-8")
    return path


def read_jsonl(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def answers(path: str) -> dict:
    """custom_id -> its choices."""
    return {r["custom_id"]: r["response"]["body"]["choices"] for r in read_jsonl(path)}


def words(rng: random.Random, n: int) -> str:
    return "".join(rng.choice("abcdefgh ") for _ in range(n))


def mixed_requests(n: int, seed: int = 0) -> list[dict]:
    """Requests over two system texts and three documents, with settings of their own."""
    rng = random.Random(seed)
    systems, documents = ([words(rng, size) for _ in range(k)] for k, size in ((2, 60), (3, 90)))
    requests = []
    for i in range(n):
        messages = [
            {"role": "system", "content": rng.choice(systems)},
            {"role": "user", "content": rng.choice(documents) + words(rng, rng.randrange(3, 30))},
        ]
        body = {"messages": messages, "temperature": rng.choice([0, 0.9]), "n": 1 + (i % 5 == 0)}
        requests.append({"custom_id": f"r{i}", "body": body})
    return requests


def run(source: str, output: str, folder: str, settings=None, **request) -> int:
    chosen = Settings(model=folder, **{"max_tokens": 6, "drafter": "none", **(settings or {})})
    return batch.run(batch.BatchRequest(source, output, quiet=True, **request), chosen)


# --- the same answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", MIXED)
def test_answers_do_not_depend_on_order_grouping_or_drafter(shared, folders, family):
    """Guards: a state that another request left behind reaches an answer; seeds by line number."""
    requests, folder = mixed_requests(6), folders[family]
    source = write_jsonl("in", requests)
    assert run(source, "plain", folder) == 0
    mixed = write_jsonl("mixed", random.Random(3).sample(requests, 6))
    assert run(mixed, "shuffled", folder) == 0
    assert run(source, "grouped", folder, group=True) == 0
    assert run(source, "drafted", folder, {"drafter": "ngram", "speculate": "always"}) == 0
    assert run(source, "poor", folder, {"rewind_mb": 0, "horizon_tokens": 0}, group=True) == 0
    expected = answers("plain")
    for name in ("shuffled", "grouped", "drafted", "poor"):
        assert answers(name) == expected, name
    assert [r["custom_id"] for r in read_jsonl("grouped")] == [r["custom_id"] for r in requests]
    assert answers("plain") == alone(folder, requests)


def test_reproducible_answers_come_from_the_same_calls(shared, folders, monkeypatch):
    """Guards: calls of other sizes in another order, or after a resume: other kernels on a GPU, so
    that `--reproducible` is a word."""
    requests, sizes = mixed_requests(6), []
    feed, begin = Timeline.feed, Desk.begin
    monkeypatch.setattr(
        Timeline,
        "feed",
        lambda t, tokens, **how: (sizes.append(len(tokens)), feed(t, tokens, **how))[1],
    )

    def calls(source: str, output: str, **how) -> dict:
        found = {}

        def noted(desk, choice, *args):
            nonlocal sizes
            sizes = found.setdefault(choice.answer.item.custom_id, [])
            return begin(desk, choice, *args)

        monkeypatch.setattr(Desk, "begin", noted)
        how["settings"] = {
            "drafter": "ngram", "speculate": "always", "reproducible": True, "max_tokens": 30,
        }  # fmt: skip
        assert run(source, output, folders["lfm2"], **how) == 0
        return found

    source = write_jsonl("in", requests)
    first = calls(source, "first")
    shuffled = write_jsonl("mixed", random.Random(3).sample(requests, 6))
    assert calls(shuffled, "shuffled", group=True) == first and answers("first")
    usages = {
        row["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for row in read_jsonl("shuffled")
    }
    assert usages == {0} and any(1 < n < 6 for each in first.values() for n in each)


def alone(folder: str, requests) -> dict:
    """Each request answered by a session of its own."""
    found = {}
    for request in requests:
        name, body = request["custom_id"], request["body"]
        seed = derived_seed(0, name)
        engine = Shared.load(folder, drafter="none", temp=body["temperature"], seed=seed)
        found[name] = [one_choice(engine, body["messages"], i) for i in range(body["n"])]
    return found


def one_choice(engine, messages, attempt: int) -> dict:
    session = engine.session()
    session.attempt = attempt
    session.sync(engine.render(messages))
    events = list(session.stream(max_tokens=6))
    message = {"role": "assistant", "content": "".join(event.text for event in events)}
    return {"index": attempt, "message": message, "finish_reason": events[-1].finish_reason}


@pytest.mark.parametrize("group", [False, True])
def test_a_run_that_was_cut_ends_in_the_same_bytes(shared, folders, group):
    """Guards: a count, a seed or an order that differs after a resume."""
    source = write_jsonl("in", [*mixed_requests(8), {"custom_id": "bad"}])
    assert run(source, "whole", folders["lfm2"], group=group) == 1
    whole = Path("whole").read_bytes()
    for size in random.Random(1).sample(range(len(whole)), 4):
        Path("cut").write_bytes(whole[:size])
        assert run(source, "cut", folders["lfm2"], group=group, resume=True) == 1
        assert Path("cut").read_bytes() == whole


# --- several at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", MIXED)
def test_the_bytes_are_those_of_one_at_a_time(shared, folders, family):
    """A lane's neighbours reached its answer; a line that ended first was written first."""
    lines = [*mixed_requests(6), {"prompt": "x" * 50, "max_tokens": 20}, {"custom_id": "bad"}]
    lines += [{"prompt": "y", "max_tokens": 2}, {"prompt": "yz", "stop": ["a", "e"]}]
    source, folder = write_jsonl("in", lines), folders[family]
    assert run(source, "one", folder, {"parallel": 1}) == 1
    one = Path("one").read_bytes()
    assert sum(r["error"] is None for r in read_jsonl("one")) == 9
    guesses = {"drafter": "ngram", "speculate": "always"}
    for i, more in enumerate([{"parallel": 3}, {"parallel": 20}, guesses]):
        assert run(source, f"out{i}", folder, more) == 1
        assert Path(f"out{i}").read_bytes() == one
    Path("cut").write_bytes(one[: len(one) // 2])
    assert run(source, "cut", folder, {"parallel": 5}, resume=True) == 1
    assert Path("cut").read_bytes() == one


def test_lines_are_written_in_few_calls(shared, folders, monkeypatch):
    """Several at a time, and each with a call of its own."""
    calls: list[int] = []
    for way in (Lanes, Batch):  # two to read the prompts, then token by token
        call = way.call
        monkeypatch.setattr(
            way, "call", lambda s, f, c, call=call: (calls.append(len(f)), call(s, f, c))[1]
        )
    source = write_jsonl("in", [{"prompt": "abc"[:i]} for i in (1, 2, 3, 1, 2, 3, 1, 2)])
    assert run(source, "out", folders["llama"], {"parallel": 4, "max_tokens": 10}) == 0
    assert [n for n in calls if n != 3] == [4] * (2 + 20)  # a model is tried on three


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_line_that_is_done_is_let_go_of_at_once(shared, folders, monkeypatch, family):
    """What lines that were long done had read lay in circles until Python looked for them: every
    call computed attention over their rows, and states of each call stayed in memory."""
    rows, seat = [], Seating.seat

    def noted(seating, lanes):
        order = seat(seating, lanes)
        rows.append(len(seating._seats))
        return order

    monkeypatch.setattr(Seating, "seat", noted)
    lines = [{"prompt": "ab", "max_tokens": 3 + i % 4, "stop": ["zq"][: i % 2]} for i in range(9)]
    lines[2]["logprobs"] = 1
    lines[4]["response_format"] = {"type": "json_object"}
    lines[6]["n"] = 2
    gc.collect()
    gc.disable()
    try:
        settings = {"parallel": 3, "drafter": "ngram"}
        assert run(write_jsonl("in", lines), "out", folders[family], settings) == 0
        found = {type(each) for each in gc.get_objects()}
    finally:
        gc.enable()
    assert max(rows) == 3
    assert not {Call, Lane, SeatedKVCache} & found


def told(monkeypatch, folder: str, settings, n: int = 3, **request) -> str:
    """What a batch of n lines says on stderr."""
    said = []
    monkeypatch.setattr(batch.terminal, "note", said.append)
    source = write_jsonl("in", [{"prompt": "ab"} for _ in range(n)])
    chosen = Settings(model=folder, **{"max_tokens": 3, "drafter": "none", **settings})
    assert batch.run(batch.BatchRequest(source, "out", force=True, **request), chosen) == 0
    return "\n".join(said)


def test_why_lines_are_answered_one_at_a_time_is_said(shared, folders, tmp_path, monkeypatch):
    """Eight were asked for, and one was made, without a word."""
    text = {**CFG["llama4"]["text_config"], "vocab_size": VOCAB_SIZE}
    refused = str(save_folder(tmp_path / "refused", "llama4", text_config=text))
    assert "one at a time: `mlx_lm.models.llama4` cannot" in told(monkeypatch, refused, {})
    assert len(read_jsonl("out")) == 3
    assert "at a time" not in told(monkeypatch, refused, {"parallel": 1})
    folder = folders["llama"]
    said = told(monkeypatch, folder, {"reproducible": True, "parallel": 4})
    assert "one at a time: with `reproducible`" in said
    assert said.count("at a time") == 1
    said = told(monkeypatch, folder, {"parallel": 4})
    assert "3/3 done, 4 at a time, " in said and "ties" not in said
    monkeypatch.setattr(Shared, "is_float32", False)
    assert told(monkeypatch, folder, {"parallel": 4}).count("ties may fall otherwise") == 1


def test_one_line_is_tried_first_where_a_drafter_takes_time(shared, folders, monkeypatch):
    """A draft model that writes one line faster than four was never given the chance."""

    class Slow(Drafter):
        name, is_free = "slow", False

    widths, round_ = [], Desk.round
    monkeypatch.setattr(
        Desk, "round", lambda desk: (widths.append(len(desk.writing)), round_(desk))[1]
    )
    monkeypatch.setattr("ds4cli.engine.engine.make", lambda *_, **__: Slow())
    told(monkeypatch, folders["llama"], {"max_tokens": 8})
    assert widths[0] == 1 and max(widths) > 1
    widths.clear()
    told(monkeypatch, folders["llama"], {"parallel": 3})
    assert widths[0] == 3


def test_what_calls_for_several_lines_cost_is_remembered(shared, folders, monkeypatch):
    """The next batch began as if nobody had ever written several lines here."""
    remembered = []
    monkeypatch.setattr(PriceList, "remember", lambda prices, rounds: remembered.append(rounds))
    source = write_jsonl("in", [{"prompt": c, "max_tokens": 12} for c in "abc"])
    assert run(source, "out", folders["llama"], {"parallel": 3}) == 0
    assert remembered[-1].keys() == {3} and remembered[-1][3] > 0


def test_a_failure_ends_what_is_begun_before_it_stops_a_fail_fast_run(shared, folders):
    """The neighbours of a line that failed were thrown away half done."""
    lines = [{"prompt": "a", "max_tokens": 30}, {"prompt": "b"}, {}, *[{"prompt": "c"}] * 5]
    with pytest.raises(batch.Interrupted.__base__, match="line 3"):
        run(write_jsonl("in", lines), "out", folders["llama"], {"parallel": 4}, fail_fast=True)
    assert [r["error"] is None for r in read_jsonl("out")] == [True, True, False]


def test_a_joint_reading_that_fails_is_made_one_by_one(shared, folders, monkeypatch):
    """Four lines had no answer because their prompts could not be read together."""
    source = write_jsonl("in", [{"prompt": f"a{i}"} for i in range(5)])
    assert run(source, "whole", folders["lfm2"]) == 0
    monkeypatch.setattr(Group, "read", lambda *_: 1 / 0)
    assert run(source, "out", folders["lfm2"]) == 0
    assert Path("out").read_bytes() == Path("whole").read_bytes()


def test_lanes_are_as_many_as_there_is_memory_for(shared, folders, monkeypatch):
    """`auto` filled the memory of a small machine with the texts of 32 lines."""
    begun = []
    round_ = Desk.round
    monkeypatch.setattr(
        Desk, "round", lambda desk: (begun.append(len(desk.writing)), round_(desk))[1]
    )
    source = write_jsonl("in", [{"prompt": "ab"} for _ in range(6)])
    assert run(source, "all", folders["llama"]) == 0
    assert max(begun) == 4
    begun.clear()
    monkeypatch.setattr("ds4cli.backend.memory.free_bytes", lambda: 40_000)
    assert run(source, "few", folders["llama"]) == 0
    assert 1 <= max(begun) < 4
    begun.clear()
    assert run(source, "given", folders["llama"], {"parallel": 6}) == 0
    assert max(begun) == 6
    assert Path("all").read_bytes() == Path("few").read_bytes() == Path("given").read_bytes()


def test_the_seed_of_a_line_is_its_own(shared, folders):
    """Guards: equal prompts get equal samples, or `seed` in a body is ignored."""
    lines = [{"prompt": "x", "temperature": 1, "custom_id": c} for c in "ab"]
    lines += [{**line, "custom_id": line["custom_id"] * 2, "seed": 5} for line in lines]
    assert run(write_jsonl("in", lines), "out", folders["llama"], {"max_tokens": 12}) == 0
    found = answers("out")
    assert found["a"] != found["b"] and found["aa"] == found["bb"]


def test_prompts_that_begin_together_are_read_in_one_call(shared, folders):
    """Eight prompts were read one after the other; or each read again what all have in common."""
    system, rng = {"role": "system", "content": "s" * 200}, random.Random(4)
    texts = [words(rng, 20 + i) for i in range(4)]
    lines = [{"messages": [system, {"role": "user", "content": text}]} for text in texts]
    two = [f"{side * 100}{i}" for side in "ab" for i in range(2)]
    lines += [{"messages": [{"role": "user", "content": text}]} for text in two]
    source, outputs = write_jsonl("in", lines), []
    for parallel in (4, 1):
        assert run(source, f"out{parallel}", folders["lfm2"], {"parallel": parallel}) == 0
        outputs.append(Path(f"out{parallel}").read_bytes())
    assert outputs[0] == outputs[1]
    assert len(shared.reads) == 1 and shared.reads[0] < 4 * 60
    assert shared.sessions[0].counters.fed_tokens > 200


# --- prefixes are read once ---------------------------------------------------------------------


def over_one_document(n: int, prefix: int) -> list[dict]:
    rng = random.Random(2)
    document = words(rng, prefix - 20)
    system = {"role": "system", "content": document}
    questions = [f"{words(rng, 12)} {i}" for i in range(n)]
    return [{"messages": [system, {"role": "user", "content": q}]} for q in questions]


def check_read_once(shared, folder: str, n: int, prefix: int, **settings) -> list:
    """Run n prompts over one prefix; what the model was fed is the prefix once and the rest."""
    source = write_jsonl("in", over_one_document(n, prefix))
    assert run(source, "out", folder, {"max_tokens": 2, **settings}) == 0
    usages = [r["response"]["body"]["usage"] for r in read_jsonl("out")]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    assert cached[0] == 0 and min(cached[1:]) >= prefix - 20
    unique = sum(u["prompt_tokens"] for u in usages) - sum(cached)
    (session,) = shared.sessions  # its branches write
    fed = session.counters.fed_tokens + sum(shared.reads)
    assert unique <= fed <= 1.02 * unique
    return [session, fed, unique]


@pytest.mark.parametrize("family", MIXED)
def test_a_shared_prefix_is_read_once(shared, folders, family):
    """Guards: on hybrids and windows the common prefix is read again for every prompt."""
    check_read_once(shared, folders[family], 40, 700)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_prompts_over_one_prefix(shared, folders, family):
    """Guards: the cost of a batch grows with the prefix; memory grows with the batch."""
    session, fed, unique = check_read_once(shared, folders[family], 1000, 2000)
    engine, read_s = session.engine, session.stats.prompt_s
    prompts = [engine.render(r["messages"]) for r in over_one_document(5, 2000)]
    alone_s = sum(seconds_to_read(engine, prompt) for prompt in prompts) / 5
    print(f"{family}: fed {fed:,} of {unique:,}; {1000 * alone_s / read_s:.0f} times less time")
    assert 1000 * alone_s > 10 * read_s


def seconds_to_read(engine, prompt) -> float:
    session = engine.session()
    session.sync(prompt)
    return session.stats.prompt_s


@pytest.mark.parametrize("parallel", [1, 3])
def test_several_completions_read_the_prompt_once(shared, folders, parallel):
    """Guards: `n` reads the prompt n times, or gives one text n times."""
    body, settings = {"prompt": "x" * 300, "n": 4, "temperature": 1}, {"max_tokens": 5}
    settings["parallel"] = parallel
    assert run(write_jsonl("in", [body]), "out", folders["lfm2"], settings) == 0
    (result,) = read_jsonl("out")
    choices = result["response"]["body"]["choices"]
    assert len({c["message"]["content"] for c in choices}) == 4
    usage = result["response"]["body"]["usage"]
    assert usage["completion_tokens"] == 20
    (session,) = shared.sessions
    written = 20 if parallel == 1 else 0
    assert session.counters.fed_tokens == usage["prompt_tokens"] + written


@pytest.mark.parametrize(
    ("family", "n"),
    [("lfm2", 80), *(pytest.param(f, 1000, marks=pytest.mark.slow) for f in FAMILIES)],
)
def test_memory_is_flat(shared, folders, monkeypatch, family, n):
    """Guards: states, checkpoints or results of finished requests stay alive."""
    source = write_jsonl("in", over_one_document(n, 300))
    held = []
    update = batch.progress.BatchProgress.update

    def look(self):
        update(self)
        if self._tally.done in (n // 4, n):
            gc.collect()
            held.append((mx.get_active_memory(), len(gc.get_objects())))

    monkeypatch.setattr(batch.progress.BatchProgress, "update", look)
    # As many lines at a time early and late: `auto` goes on trying more.
    assert run(source, "out", folders[family], {"max_tokens": 3, "parallel": 4}) == 0
    (early, objects), (late, more) = held
    assert late < 1.1 * early + 1e6 and more < objects + 2 * n


# --- errors, one line at a time -----------------------------------------------------------------


def test_a_bad_line_becomes_an_error_and_the_run_goes_on(shared, folders, monkeypatch):
    """Guards: one bad line of thousands ends the run, or spoils the session for the others."""
    lines = [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b" * 9000}, {"prompt": "c"}]
    source = write_jsonl("in", [*lines, {"prompt": "a", "logit_bias": {"99999": 1}}])
    assert run(source, "out", folders["lfm2"]) == 1
    errors = [r["error"] and r["error"]["message"] for r in read_jsonl("out")]
    assert errors[0] is errors[3] is None
    assert "line 2: `prompt` wants text" in errors[1] and "`8192`" in errors[2]
    assert "`logit_bias` names token `99999`" in errors[4]


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("lines", [["not json"], ["not json"] * 257, ["{}"] * 256 + ['"prompt"']])
def test_a_block_of_bad_lines_is_answered_with_errors(shared, folders, lines, group):
    """Planning assumed a good line in every block: the run ended with an empty output."""
    good = '{"prompt": "a", "max_tokens": 2}'
    Path("in").write_text("\n".join([*lines, good]), encoding="utf-8")
    assert run("in", "out", folders["llama"], group=group) == 1
    assert [r["error"] is None for r in read_jsonl("out")] == [False] * len(lines) + [True]
    Path("in").write_text("\n".join(lines), encoding="utf-8")
    assert run("in", "bad", folders["llama"], group=group) == 1
    assert len(read_jsonl("bad")) == len(lines)


def test_an_endless_line_is_refused_by_its_length(shared, folders, monkeypatch):
    """Guards: a line of 20 MB takes 3 GB, only to be told that it has too many tokens."""
    encode, lengths = Shared.encode, []
    monkeypatch.setattr(
        Shared, "encode", lambda self, text: lengths.append(len(text)) or encode(self, text)
    )
    lines = [{"prompt": "b" * 2_000_000}, {"messages": [{"role": "user", "content": "b" * 10**6}]}]
    assert run(write_jsonl("in", [*lines, {"prompt": "a"}]), "out", folders["llama"]) == 1
    errors = [r["error"] and r["error"]["message"] for r in read_jsonl("out")]
    assert "`2000000` characters" in errors[0] and "`1000000`" in errors[1] and errors[2] is None
    assert max(lengths, default=0) < 1000


def test_a_prompt_that_fails_in_any_way_costs_one_line(shared, folders, monkeypatch):
    """Guards: what a tokenizer or template raises while lines are planned ends the batch."""
    encode = Shared.encode

    def failing(self, text):
        if text == "b":
            raise OverflowError("too large to convert")
        return encode(self, text)

    monkeypatch.setattr(Shared, "encode", failing)
    lines = [{"url": "/v1/completions", "body": {"prompt": text}} for text in "abc"]
    assert run(write_jsonl("in", lines), "out", folders["llama"]) == 1
    errors = [r["error"] and r["error"]["message"] for r in read_jsonl("out")]
    assert errors[0] is errors[2] is None and "OverflowError: too large" in errors[1]


def test_an_unexpected_failure_costs_one_line(shared, folders, monkeypatch):
    """Guards: a bug or a lack of memory in one request takes the whole batch along."""
    take, calls = generate.take, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("out of memory")
        return take(*args, **kwargs)

    source = write_jsonl("in", mixed_requests(4))
    run(source, "whole", folders["lfm2"])
    monkeypatch.setattr(generate, "take", failing)
    assert run(source, "out", folders["lfm2"]) == 1
    codes = [r["error"] and r["error"]["code"] for r in read_jsonl("out")]
    assert codes.count("internal_error") == 1
    assert run(source, "out", folders["lfm2"], resume=True) == 0
    assert Path("out").read_bytes() == Path("whole").read_bytes()


def test_fail_fast_stops_at_the_first_failure(shared, folders):
    """Guards: hours of work after a mistake that spoils every line."""
    source = write_jsonl("in", [{"prompt": "a"}, {}, {"prompt": "b"}])
    with pytest.raises(batch.Interrupted.__base__, match="line 2"):
        run(source, "out", folders["llama"], fail_fast=True)
    assert [r["error"] is None for r in read_jsonl("out")] == [True, False]


def test_tools_of_a_line(shared, tmp_path):
    """Guards: the tools of a body do not reach the template, or stay for the next line."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [{**body, "tools": [tool]}, {**body, "tools": [tool], "tool_choice": "none"}, body]
    # mlx-lm looks for these words to tell how a model writes calls.
    template = TEMPLATE + "{# <tool_call> tool_call.name #}"
    folder = str(save_folder(tmp_path / "tools", template=template))
    assert run(write_jsonl("in", lines), "out", folder) == 0
    tokens = [r["response"]["body"]["usage"]["prompt_tokens"] for r in read_jsonl("out")]
    assert tokens[0] > tokens[1] + 30 and tokens[1] == tokens[2]


# --- the command --------------------------------------------------------------------------------


def command(*args, stdin=""):
    return CliRunner().invoke(app, ["generate", *map(str, args)], input=stdin)


BAD_USE = [
    (["hi", "--batch", "in"], "`--batch` and `--prompt` contradict"),
    (["-f", "in", "--batch", "in"], "`--batch` and `--file` contradict"),
    (["hi", "-o", "out"], "`--output` needs `--batch`"),
    (["hi", "--resume"], "`--resume` needs `--batch`"),
    (["--batch", "missing"], "`missing`"),
    (["--batch", "in", "--resume"], "nothing to resume on standard output"),
    (["--batch", "in", "-o", "in"], "`in` is the input"),
    (["--batch", "in", "-o", "hard", "--force"], "`hard` is the input"),
    (["--batch", "o.waiting", "-o", "o", "--force"], "`o.waiting` is the input"),
    (["--batch", "in", "-o", "no/out"], "cannot write `no/out`"),
    (["--batch", "in", "-o", "x" * 250], "file name too long"),
    (["--batch", "in", "-o", "a\0b"], "embedded null"),
    (["--batch", "in", "-o", "in/out"], "not a directory"),
    (["--batch", "in", "-o", "old"], "`old` has results already"),
    (["--batch", "twice"], "line 3: `custom_id` `a` is taken"),
    (["--batch", "-"], "line 2: `custom_id` `a` is taken"),
]


@pytest.mark.parametrize(("args", "message"), BAD_USE)
def test_bad_use_is_one_line_exit_2_and_loads_nothing(shared, args, message):
    """Guards: a mistake in the input shows after an hour, or after the model was loaded."""
    write_jsonl("in", [{"prompt": "a"}])
    twice = [{"prompt": "a", "custom_id": "a"}, {"prompt": "b"}, {"prompt": "c", "custom_id": "a"}]
    write_jsonl("twice", twice)
    Path("old").write_text("{}\n")
    os.link("in", "hard")
    os.link("in", "o.waiting")
    stdin = "".join(json.dumps(twice[i]) + "\n" for i in (0, 2))
    result = command(*args, stdin=stdin)
    assert result.exit_code == 2, result.stderr
    assert result.stderr.splitlines()[0].startswith("error: ") and message in result.stderr
    assert result.stdout == "" and shared.sessions == []


def test_output_on_stdout_is_json_lines_and_nothing_else(shared, folders):
    """Guards: progress or warnings in the middle of the data."""
    lines = [{"prompt": "a", "user": "me"}, {"prompt": "b"}]
    stdin = "".join(json.dumps(line) + "\n" for line in lines)
    result = command("--batch", "-", "-m", folders["llama"], "-n", 2, stdin=stdin)
    assert result.exit_code == 0
    assert [json.loads(x)["custom_id"] for x in result.stdout.splitlines()] == ["line-1", "line-2"]
    assert "nothing reads `user`" in result.stderr and "2/2 done" in result.stderr


def test_plain_lines(shared, folders):
    """Guards: `--lines` answers empty lines, or takes text for JSON."""
    result = command("--batch", "-", "--lines", "-m", folders["llama"], "-n", 2, stdin="a\n\n{b\n")
    found = [json.loads(line)["custom_id"] for line in result.stdout.splitlines()]
    assert (result.exit_code, found) == (0, ["line-1", "line-3"])


def test_nothing_to_do(shared):
    """Guards: an empty input loads a model, or is an error."""
    assert command("--batch", "-", stdin="\n").exit_code == 0
    assert shared.sessions == []


def test_progress_is_a_line_per_tenth(shared, folders):
    """Guards: a log with a line per request, or none at all."""
    source = write_jsonl("in", [{"prompt": f"{i}"} for i in range(40)])
    result = command("--batch", source, "-o", "out", "-m", folders["llama"], "-n", 1)
    lines = [line for line in result.stderr.splitlines() if "done" in line]
    assert len(lines) == 10 and lines[-1].startswith("40/40 done")
    assert (
        command("--batch", source, "-o", "o2", "-m", folders["llama"], "-n", 1, "-q").stderr == ""
    )


def test_an_interrupted_run_says_how_to_go_on(shared, folders, monkeypatch):
    """Guards: Ctrl-C writes half an answer as a whole one, or leaves the user without a way on."""
    monkeypatch.setattr(signals.Interrupts, "__call__", lambda self: os.path.exists("stop"))
    update = batch.progress.BatchProgress.update

    def stop_at_two(self):
        update(self)
        if self._tally.done == 2:
            Path("stop").touch()  # those that end in the same round are done, too

    monkeypatch.setattr(batch.progress.BatchProgress, "update", stop_at_two)
    source = write_jsonl("in", mixed_requests(5))
    args = ["--batch", source, "-o", "out", "-m", folders["llama"], "-n", 3]
    result = command(*args)
    assert result.exit_code == 130
    done = size_of(Path("out"), lines=True)
    assert 2 <= done < 5
    assert f"stopped: {done}/5 done" in result.stderr and "`--resume`" in result.stderr
    os.remove("stop")
    monkeypatch.setattr(batch.progress.BatchProgress, "update", update)
    assert command(*args, "--resume").exit_code == 0
    command("--batch", source, "-o", "whole", "-m", folders["llama"], "-n", 3)
    assert Path("out").read_bytes() == Path("whole").read_bytes()
    monkeypatch.setattr(batch.generate, "load_engine", None)
    assert "nothing to do: 5 of 5 are done already" in command(*args, "--resume").stderr


def test_what_cannot_be_written_is_not_done(shared, folders, monkeypatch):
    """Guards: the progress counts a line that a full disk then refuses."""
    put, leave, said = FileResults.put, batch.progress.BatchProgress.__exit__, []

    def full_after_two(self, item, line):
        if item.number > 2:
            raise DS4Error("the disk is full")
        put(self, item, line)

    def look(self, *exception):
        said.append((self._tally.done, self._tally.generated))
        leave(self, *exception)

    monkeypatch.setattr(FileResults, "put", full_after_two)
    monkeypatch.setattr(batch.progress.BatchProgress, "__exit__", look)
    source = write_jsonl("in", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    with pytest.raises(DS4Error):
        run(source, "out", folders["llama"], {"max_tokens": 3, "parallel": 1})
    assert said == [(2, 6)]


# --- real processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parent():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def zygote(parent):
    yield parent
    parent.stop()


def size_of(path: Path, lines: bool = False) -> int:
    """Bytes, or lines, of results, those that wait for their turn included."""
    names = (path, path.with_name(path.name + ".waiting"))
    found = [p.read_bytes() for p in names if p.exists()]
    return sum(data.count(b"\n") if lines else len(data) for data in found)


def kill_when_grown(pid: int, path: Path, size: int, rng: random.Random) -> None:
    """Kill -9 a little after the output has `size` bytes; or when the process is at its end."""
    end = time.monotonic() + 30
    while size_of(path) < size and time.monotonic() < end and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)
    time.sleep(rng.random() * 0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="watches processes in /proc")
@pytest.mark.parametrize(
    ("group", "kills"),
    [(True, 4)] + [pytest.param(g, 50, marks=pytest.mark.slow) for g in (False, True)],
)
def test_killed_runs_end_in_the_same_bytes(zygote, folders, tmp_path, group, kills):
    """Guards: work lost or spoilt by kill -9, whenever it comes."""
    rng = random.Random(group)
    source = write_jsonl("in", mixed_requests(3 * kills))
    args = ["generate", "-q", "--batch", source, "-m", folders["lfm2"], "-n", 5]
    args += ["--group"] if group else []
    zygote.start([*args, "-o", "whole"], tmp_path)
    assert zygote.wait() == 0
    whole, out = (tmp_path / "whole").read_bytes(), tmp_path / "out"
    sizes = sorted(rng.randrange(len(whole)) for _ in range(kills))
    codes = []
    for size in sizes:
        pid = zygote.start([*args, "-o", "out", "--resume"], tmp_path)
        kill_when_grown(pid, out, size, rng)
        codes.append(zygote.wait())
    assert set(codes) <= {0, -signal.SIGKILL} and codes.count(0) <= kills // 4
    zygote.start([*args, "-o", "out", "--resume"], tmp_path)
    assert zygote.wait() == 0
    assert out.read_bytes() == whole
    assert not out.with_name("out.waiting").exists()


def test_a_full_disk_is_one_line_and_costs_one_answer(zygote, folders, tmp_path):
    """Guards: a traceback, or half a line that the next run stumbles over."""
    source = write_jsonl("in", mixed_requests(6))
    args = ["generate", "-q", "--batch", source, "-m", folders["llama"], "-n", 5, "-o", "out"]
    zygote.start(args, tmp_path, fsize=2500)
    assert zygote.wait() == 1
    error, hint = (tmp_path / "stderr").read_text().splitlines()
    assert error == "error: cannot write `out`: file too large" and "--resume" in hint
    done = (tmp_path / "out").read_bytes()
    assert done.endswith(b"\n") and 0 < done.count(b"\n") < 6
    zygote.start([*args, "--resume"], tmp_path)
    assert zygote.wait() == 0
    assert (tmp_path / "out").read_bytes().startswith(done)


@pytest.mark.parametrize("more", [["-o", "in", "--force"], []])
def test_the_input_is_known_by_any_name(zygote, tmp_path, more):
    """Guards: standard input is emptied as the output, or standard output read as the input."""
    text = '{"prompt": "x"}\n'
    (tmp_path / "in").write_text(text)
    names = {"stdin": "in"} if more else {"stdin": "in", "stdout": "in"}
    zygote.start(["generate", "--batch", "-", *more], tmp_path, **names)
    assert zygote.wait() == 2
    assert (tmp_path / "in").read_text() == text
    assert "is the input" in (tmp_path / "stderr").read_text()


def test_answers_come_while_the_input_is_open(zygote, folders, tmp_path):
    """Guards: a producer that waits for the first answer waits forever; Ctrl-C while nothing comes
    has no effect."""
    os.mkfifo(tmp_path / "fifo")
    args = ["generate", "--batch", "-", "-m", folders["llama"], "-n", 2]
    pid = zygote.start(args, tmp_path, stdin="fifo")
    writer = os.open(tmp_path / "fifo", os.O_WRONLY)
    for number in (1, 2):
        os.write(writer, b'{"prompt": "x"}\n')
        wait_for(lambda n=number: (tmp_path / "stdout").read_text().count("\n") == n)
    os.kill(pid, signal.SIGINT)
    assert zygote.wait() == 130
    os.close(writer)
    assert "stopped: 2 done" in (tmp_path / "stderr").read_text()


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- examples -----------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_requests_are_answered(shared, folders):
    """Guards: the first batch that a reader tries has a field that nothing reads, or fails."""
    source = EXAMPLES / "batch.jsonl"
    result = command("--batch", source, "-m", folders["llama"], "-n", 2)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 5 and "ignored" not in result.stderr


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_example_script_runs(folders, tmp_path, monkeypatch):
    """Guards: the shell example is out of date."""
    script = f'#!/bin/sh\nexec "{sys.executable}" -m ds4cli "$@"\n'
    (tmp_path / "ds4cli").write_text(script)
    (tmp_path / "ds4cli").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES.parent}{os.pathsep}{os.environ['PYTHONPATH']}")
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n")
    args = ["sh", EXAMPLES / "batch.sh", tmp_path, "What is it?", "-m", folders["llama"], "-n", "2"]
    done = subprocess.run(args, capture_output=True, text=True, check=True, timeout=300)
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert found == [f"{tmp_path}/one.txt", f"{tmp_path}/two.txt"]
