"""Batches without a model: input lines, working order, output lines, and what a kill leaves."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4cli.batch import grouping, lines, replies
from ds4cli.batch.requests import (
    Names,
    Warnings,
    conversation,
    derived_seed,
    is_blank,
    name_key,
    parse,
)
from ds4cli.batch.results import FileResults, StreamResults, _Log, open_results
from ds4cli.batch.width import Width, promises
from ds4cli.errors import DS4Error, UsageError
from ds4cli.settings import Settings
from ds4cli.tokens import common_prefix


def line(**fields) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def openai(body, **fields) -> bytes:
    return line(custom_id="a", method="POST", url="/v1/chat/completions", body=body, **fields)


USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


# --- input lines --------------------------------------------------------------------------------


def test_the_three_forms_of_a_line():
    """Guards: a form of input that README promises is refused, or loses its name."""
    assert parse(1, openai({"messages": [USER]})).messages == (USER,)
    assert parse(2, line(prompt="hi")).custom_id == "line-2"
    assert parse(3, line(messages=[USER], custom_id="x")).custom_id == "x"
    plain = parse(1, '\ufeff{"not": json\r\n'.encode(), plain=True)
    assert (plain.prompt, plain.error) == ('{"not": json', "")
    completion = parse(1, line(url="/v1/completions", body={"prompt": "hi"}))
    assert not completion.is_chat and not completion.error


def test_fields_become_settings():
    """Guards: a limit or a sampling field of a body has no effect, or another line's."""
    body = {
        "messages": [USER], "max_tokens": 3, "max_completion_tokens": 7, "temperature": 1,
        "top_p": 0.5, "seed": 9, "stop": "x", "logit_bias": {"5": -1}, "n": 2, "top_k": None,
    }  # fmt: skip
    item = parse(1, openai(body))
    settings = item.settings(Settings(seed=4, min_p=0.1))
    assert (settings.max_tokens, settings.temp, settings.top_p, settings.seed) == (7, 1.0, 0.5, 9)
    assert (settings.stop, settings.logit_bias, settings.min_p) == (("x",), {5: -1.0}, 0.1)
    assert (item.n, item.unknown) == (2, ())


def said(arguments) -> dict:
    """An assistant's message with a call of `f`."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


BAD_LINES = {
    b"oops": "not JSON: Expecting value, at character 1",
    b'{"prompt": "a"\n': "not JSON: Expecting ',' delimiter, at character 16",
    b"[1]": "not a JSON object",
    b"\xff": "not UTF-8",
    b"[" * 100_000: "not JSON",
    b'{"prompt": "\\ud800"}': "surrogate",
    line(): "`messages` or `prompt`",
    line(prompt="a", messages=[USER]): "not both",
    line(prompt=" "): "`prompt` wants text",
    line(prompt=["a"]): "`prompt` wants text",
    line(messages=[]): "`messages` wants a list",
    line(messages=[{"content": "a"}]): "`messages[0]`",
    line(messages=[USER, {"role": "user"}]): "`messages[1].content`",
    line(messages=[{"role": "user", "content": [{"type": "image_url"}]}]): "text parts only",
    line(prompt="a", custom_id=7): "`custom_id` wants text",
    line(prompt="a", temperature="hot"): "`temperature` wants a number",
    line(prompt="a", top_p=2): "`top_p` cannot be",
    line(prompt="a", max_tokens=0): "`max_tokens` cannot be",
    line(prompt="a", n=0): "`n` cannot be",
    line(prompt="a", n="3"): "`n` wants a number, not the text `3`",
    line(prompt="a", max_tokens="4"): "`max_tokens` wants a number, not the text `4`",
    line(prompt="a", stop=[3]): "`stop`",
    line(prompt="a", temperature=10**400): "`temperature` wants a number",
    line(messages=[{"role": "assistant", "content": "a", "tool_calls": 5}]): "`messages[0].tool",
    line(messages=[said("[1]")]): "the arguments of `f` are no object",
    line(messages=[said("{")]): "the arguments of `f` are no object",
    line(messages=[said("[" * 100_000)]): "the arguments of `f` are no object",
    line(messages=[{"role": "assistant", "content": None, "tool_calls": [{}]}]): "OpenAI's form",
    line(messages=[{"role": "user", "content": [{"type": "text"}]}]): "text parts only",
    line(prompt="a", tools=[{"function": {}}]): "`tools`: `[0].function.name`",
    line(prompt="a", tool_choice="required"): "`tool_choice`",
    line(url="/v1/embeddings", body={"input": "a"}): "`url` is `/v1/embeddings`",
    line(url="/v1/completions", body={"messages": [USER]}): "wants a `prompt`",
    line(method="GET", body={"prompt": "a"}): "`method`",
    line(body=3): "`body` is not an object",
}


def test_a_bad_line_keeps_its_name():
    """Guards: an error that cannot be joined to its input."""
    assert parse(3, b'{"custom_id": "mine", "prompt": "\\ud800"}').custom_id == "mine"
    assert parse(3, b'{"custom_id": "\\ud800", "prompt": "a"}').custom_id == "line-3"


def test_a_line_may_be_as_deep_as_it_likes():
    """Guards: one that is just not too deep to be read, and too deep to be written again."""
    said = set()
    for depth in range(500, sys.getrecursionlimit() + 10):
        raw = b'{"custom_id": "mine", "prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}"
        said.add((parse(3, raw).error or "")[:8])
    assert said == {"", "not JSON"}


@pytest.mark.parametrize(("raw", "message"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_says_what_is_wrong(raw, message):
    """Guards: one bad line ends the run, or fails without a reason."""
    item = parse(4, raw)
    assert message in item.error and item.custom_id == "line-4"


def test_messages_as_templates_take_them():
    """Guards: parts, null contents or arguments in text reach a chat template that fails on them;
    a line's own system text is doubled."""
    item = parse(1, line(messages=[{"role": "user", "content": PARTS}, said('{"x": 1}')]))
    assert item.messages[0]["content"] == "ab"
    assert item.messages[1]["content"] == ""
    assert item.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert conversation(item, "be brief")[0] == "be brief"
    own = parse(1, line(messages=[{"role": "developer", "content": "s"}, USER]))
    assert conversation(own, "be brief") == ("s", [USER])


@pytest.mark.parametrize("arguments", ["", " \n", None, "{}", {}])
def test_a_call_without_arguments_has_none(arguments):
    """Clients write nothing, a blank or null where a function has no parameters: refused."""
    assert parse(1, line(messages=[USER, said(arguments)])).error == ""
    message = parse(1, line(messages=[USER, said(arguments)])).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {}


# What clients send, and the settings that it makes.
TAKEN = {
    line(prompt="a", stop=""): {"stop": ()},
    line(prompt="a", stop=["", "x"]): {"stop": ("x",)},
    line(prompt="a", max_tokens=3.0): {"max_tokens": 3},
    line(prompt="a", max_tokens=5, max_completion_tokens=4): {"max_tokens": 4},
    line(prompt="a", top_k=-1): {"top_k": 0},
    line(prompt="a", seed=-1): {},
    line(prompt="a", n=1.0, seed=7.0, temperature=1): {"seed": 7, "temp": 1.0},
    line(prompt="a", **dict.fromkeys(["stop", "seed", "tools", "n", "user", "model"])): {},
    line(custom_id=None, method=None, url=None, body={"prompt": "a"}): {},
    line(messages=[USER, {"role": "assistant", "content": None, "tool_calls": None}]): {},
}


@pytest.mark.parametrize(("raw", "overrides"), TAKEN.items(), ids=range(len(TAKEN)))
def test_bodies_as_clients_send_them(raw, overrides):
    """Guards: a batch made for another server is refused for a null, a 3.0 or a -1."""
    item = parse(4, raw)
    assert (item.error, item.unknown, item.overrides) == ("", (), overrides)
    assert item.custom_id == "line-4"


def test_unknown_fields_warn_once_a_name():
    """Guards: ten thousand lines with `user` print ten thousand warnings, or none."""
    said = []
    warnings = Warnings(said.append, "m")
    for number in (1, 2):
        raw = openai({"messages": [USER], "user": "u", "model": "gpt", "stream": False}, extra=1)
        warnings.look_at(parse(number, raw))
    assert len(said) == 3 and all("line 1: " in text for text in said)


def test_seeds_depend_on_name_and_seed_only():
    """Guards: answers change with the order of lines, or between machines."""
    assert derived_seed(0, "a") == 6841154156042874738
    assert len({derived_seed(s, c) for s in range(3) for c in "abc"}) == 9
    assert derived_seed(7, "x") < 2**63


def test_names():
    """Guards: a name used twice, of which one answer is lost."""
    names = Names()
    items = [parse(i, line(prompt="p", custom_id=c)) for i, c in enumerate("aba", 1)]
    assert [names.add(item) for item in items] == [True, True, False]


# --- reading ------------------------------------------------------------------------------------


def never() -> bool:
    return False


def test_a_file_is_looked_through_and_read_in_blocks(tmp_path):
    """Guards: the second reading of a file misses lines, or begins before where stdin stood."""
    (tmp_path / "in").write_bytes(b"header\n" + b"".join(b"%d\n" % i for i in range(600)))
    with open(tmp_path / "in", "rb") as stream:
        stream.readline()
        source = lines.FileLines(stream)
        assert [n for n, _ in source.preview()] == list(range(1, 601))
        blocks = [lines.take_block(source, False, never) for _ in range(4)]
    assert [len(block) for block in blocks] == [256, 256, 88, 0]
    assert blocks[0][0] == (1, b"0\n") and blocks[2][-1] == (600, b"599\n")


def test_a_block_ends_by_bytes_too(monkeypatch):
    """Guards: a block of very long lines fills the memory."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 10)
    source = lines.FileLines(io.BytesIO(b"1234\n" * 5))
    assert [len(lines.take_block(source, True, never)) for _ in range(4)] == [2, 2, 1, 0]
    monkeypatch.setattr(lines, "BLOCK_BYTES", 11)
    assert len(lines.take_block(lines.FileLines(io.BytesIO(b"1234\n" * 5)), True, never)) == 3


def test_a_pipe_gives_lines_when_they_come():
    """Guards: the first answer waits for the last line; a line in two writes is torn apart."""
    read, write = os.pipe()
    with open(read, "rb") as stream:
        source = lines.PipeLines(stream)
        os.write(write, b"one\ntw")
        assert list(source.preview()) == [(1, b"one\n")]
        assert lines.take_block(source, False, never) == [(1, b"one\n")]
        assert source.next(False, never) is None
        os.write(write, b"o\nthree")
        os.close(write)
        assert lines.take_block(source, True, never) == [(2, b"two\n"), (3, b"three")]
        assert lines.take_block(source, False, never) == []


def test_a_line_of_a_pipe_may_come_in_pieces(monkeypatch):
    """Guards: the beginning of a long line is lost; a line ends at a space, or at the first break
    between two writes; what has arrived is not all looked at."""
    monkeypatch.setattr(lines, "READ_BYTES", 4)
    read, write = os.pipe()
    with open(read, "rb") as stream:
        source = lines.PipeLines(stream)
        os.write(write, b"a long line\r\nb c\nlast")
        os.close(write)
        both = [(1, b"a long line\r\n"), (2, b"b c\n"), (3, b"last")]
        assert list(source.preview()) == both
        assert lines.take_block(source, True, never) == both


def test_how_long_a_pipe_is_waited_for(monkeypatch):
    """Guards: a look that waits, while others are written; a wait that ends before a line came."""
    read, write = os.pipe()
    waits = []

    def select(reading, writing, failed, timeout):
        waits.append(timeout)
        if len(waits) < 3:
            return [], [], []
        return reading, writing, failed

    monkeypatch.setattr(lines.select, "select", select)
    os.write(write, b"x\n")
    with open(read, "rb") as stream:
        source = lines.PipeLines(stream)
        assert source.next(False, never) is None and waits == [0]
        assert source.next(True, never) == (1, b"x\n") and waits == [0] + 2 * [lines.POLL_S]
    os.close(write)


def test_a_file_is_known_by_what_it_is(tmp_path):
    """Guards: results written over the requests under another name; a pipe taken for a file."""
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    known = lines.file_id(tmp_path / "a")
    assert known == lines.file_id(str(tmp_path / "link")) != lines.file_id(tmp_path / "b")
    with open(tmp_path / "a") as stream:
        assert known == lines.file_id(stream.fileno()) is not None
    for other in (tmp_path, tmp_path / "none", "a\0b"):
        assert lines.file_id(other) is None


def test_where_lines_come_from(tmp_path, monkeypatch):
    """Guards: standard input closed for whatever runs next; a file that stays open."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\n")))
    source = lines.open_lines("-")
    source.close()
    assert source.next(True, never) == (1, b"a\n")
    (tmp_path / "in").write_bytes(b"b\n")
    file = lines.open_lines(str(tmp_path / "in"))
    assert file.next(True, never) == (1, b"b\n")
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.next(True, never)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="it is closed"):
        lines.open_lines("-")
    unread = lines.open_lines(str(tmp_path / "in"))
    unread.close()
    for name in (str(tmp_path / "none"), "a\0b"):
        with pytest.raises(UsageError, match="cannot read"):
            lines.open_lines(name)


def test_a_wait_for_a_pipe_ends_when_the_user_stops():
    """Guards: Ctrl-C has no effect while nothing comes."""
    read, write = os.pipe()
    asked = iter([False, False, True])
    with open(read, "rb") as stream:
        source = lines.PipeLines(stream)
        assert lines.take_block(source, True, lambda: next(asked, True)) == []
    os.close(write)


# --- working order ------------------------------------------------------------------------------


def random_prompts(rng: random.Random, n: int) -> list[list[int]]:
    return [[rng.randrange(2) for _ in range(rng.randrange(1, 9))] for _ in range(n)]


def trie_edges(prompts) -> int:
    return len({tuple(p[:i]) for p in prompts for i in range(1, len(p) + 1)})


def test_grouped_prompts_read_every_prefix_once():
    """Guards: grouping that reads a shared prefix twice, or loses a prompt."""
    rng = random.Random(0)
    for _ in range(300):
        prompts = random_prompts(rng, rng.randrange(1, 12))
        order = grouping.trie_order(prompts)
        assert sorted(order) == list(range(len(prompts))) and order[0] <= max(order)
        ordered = [prompts[i] for i in order]
        shared = grouping.shared_lengths(ordered, ())
        assert sum(map(len, ordered)) - sum(shared) == trie_edges(prompts)


def test_groups_come_in_order_of_appearance():
    """Guards: the first line waits for the last group."""
    assert grouping.trie_order([[5, 1], [2, 1], [5, 2], [2, 2], [5]]) == [4, 0, 2, 1, 3]


def test_marks_where_they_pay():
    """Guards: a checkpoint for three tokens costs a model call per prompt; the common prefix of a
    thousand prompts has none and is read again and again."""
    shared = [0, *[2000] * 50, 1990, *[2000] * 50]
    assert grouping.branch_points(shared, 0) == [1990, 2000]
    assert grouping.branch_points([0, 2003, 2001, 2000, 2000, 2000], 0) == [2000]
    assert grouping.branch_points([0, 5, 0, 700], 0) == []
    assert grouping.branch_points([300], 0) == [300]
    assert grouping.WORTHWHILE_TOKENS == 16
    for shared, marks in (([16], [16]), ([15], []), ([8], []), ([0, 16], [16]), ([0, 8], []),
                          ([8, 8], [8]), ([16, 1, 1], [16]), ([0, 20, 1, 20], [20])):  # fmt: skip
        assert grouping.branch_points(shared, 0) == marks, shared


def test_marks_bound_what_is_read_twice():
    """Guards: deep trees whose inner branching points are forgotten."""
    rng = random.Random(1)
    for _ in range(50):
        stems = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
        prompts = [(rng.choice(stems) + rng.choice(stems) + [i]) for i in range(20)]
        order = grouping.trie_order(prompts)
        prompts = [prompts[i] for i in order]
        shared = grouping.shared_lengths(prompts, ())
        checkpoints: set[int] = set()
        read_again = 0
        for i, length in enumerate(shared):
            checkpoints = {m for m in checkpoints if m <= length}
            read_again += length - max(checkpoints, default=0)
            checkpoints |= set(grouping.branch_points(shared, i))
        assert read_again <= len(prompts) * grouping.WORTHWHILE_TOKENS


# --- output -------------------------------------------------------------------------------------

SETTINGS = {"temp": 0.5}


def items_of(n: int):
    return [parse(i, line(prompt=f"prompt {i}", custom_id=f"id-{i}é")) for i in range(1, n + 1)]


def answer(item, settings=SETTINGS, fingerprint="fp_1", text=None) -> bytes:
    body = {"text": text or "ä\n" * item.number, "settings": settings}
    return replies.success(item, {**body, "system_fingerprint": fingerprint})


class Killed(Exception):
    pass


def run_batch(path, items, *, order=None, resume=False, force=False, kill_after=None, bad=()):
    """One run over `items`, worked through in `order` (indices); the ids that it answered."""
    results, made = FileResults(path, resume, force), []
    try:
        for item in items:
            results.check(item)
        results.begin(SETTINGS)
        results.check_model("fp_1")
        todo = [i for i, item in enumerate(items) if not results.expect(item)]
        for i in order or range(len(items)):
            if i not in todo:
                continue
            if kill_after is not None and len(made) == kill_after:
                raise Killed
            made.append(items[i].custom_id)
            failed = replies.failure(items[i], "failed", "why")
            results.put(items[i], failed if i in bad else answer(items[i]))
        assert results.finish() == 0
    finally:
        results.close()
    return made


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def test_a_file_cut_at_any_byte_is_completed(tmp_path):
    """Guards: a torn last line is kept, spoils the next one, or costs a good one."""
    items, path = items_of(4), tmp_path / "out"
    run_batch(path, items)
    whole = path.read_bytes()
    assert whole == b"".join(map(answer, items))
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        made = run_batch(path, items, resume=True)
        assert path.read_bytes() == whole
        assert len(made) == 4 - whole[:size].count(b"\n")
        assert not path.with_name("out.waiting").exists()


def test_results_out_of_order_survive_a_cut_at_any_byte(tmp_path):
    """Guards: grouped results that wait for their turn are lost by a kill, or written twice."""
    items, path, order = items_of(6), tmp_path / "out", [3, 0, 5, 1, 4, 2]
    waiting = path.with_name("out.waiting")
    whole = b"".join(map(answer, items))
    for kills in range(6):
        path.unlink(missing_ok=True)
        with pytest.raises(Killed):
            run_batch(path, items, order=order, kill_after=kills)
        left, aside = path.read_bytes(), waiting.read_bytes() if waiting.exists() else b""
        assert left.count(b"\n") + aside.count(b"\n") >= kills
        for size in range(0, len(aside) + 1, 7):
            path.write_bytes(left)
            waiting.write_bytes(aside[:size])
            run_batch(path, items, order=order, resume=True)
            assert path.read_bytes() == whole and not waiting.exists()


@pytest.mark.parametrize("seed", range(30))
def test_any_history_of_kills_and_failures_ends_in_the_same_file(tmp_path, seed):
    """Guards: some interleaving of kills, failed lines and orders loses or repeats a result."""
    rng = random.Random(seed)
    items, path = items_of(8), tmp_path / "out"
    path.write_bytes(b"")
    for _ in range(rng.randrange(1, 6)):
        order = rng.sample(range(8), 8)
        kill_after, bad = rng.choice([None, rng.randrange(9)]), rng.sample(range(8), 2)
        try:
            run_batch(path, items, order=order, resume=True, kill_after=kill_after, bad=bad)
        except Killed:
            for log in (path, path.with_name("out.waiting")):
                if log.exists() and log.stat().st_size and rng.random() < 0.5:
                    cut(log, log.stat().st_size - rng.randrange(1, 20))
    run_batch(path, items, order=rng.sample(range(8), 8), resume=True)
    assert path.read_bytes() == b"".join(map(answer, items))
    assert os.listdir(tmp_path) == ["out"]


def test_only_failed_lines_are_made_again(tmp_path):
    """Guards: resuming answers everything again, or leaves an error in the file."""
    items, path = items_of(5), tmp_path / "out"
    run_batch(path, items, bad=[1, 3])
    assert run_batch(path, items, resume=True) == [items[1].custom_id, items[3].custom_id]
    assert path.read_bytes() == b"".join(map(answer, items))


def test_input_in_another_order_keeps_all_results(tmp_path):
    """Guards: sorting the input before a resume throws results away."""
    items, path = items_of(5), tmp_path / "out"
    run_batch(path, items)
    assert run_batch(path, items[::-1], resume=True) == []
    assert path.read_bytes() == b"".join(map(answer, items[::-1]))


def test_results_without_a_line_are_kept_aside(tmp_path):
    """Guards: resuming with a shorter input deletes results."""
    items, path = items_of(5), tmp_path / "out"
    run_batch(path, items)
    results = FileResults(path, resume=True, force=False)
    results.begin(SETTINGS)
    assert [results.expect(item) for item in items[:2]] == [True, True]
    assert results.finish() == 3
    results.close()
    aside = path.with_name("out.waiting").read_bytes()
    assert aside == b"".join(map(answer, items[2:]))
    assert run_batch(path, items, resume=True) == []


def test_what_made_the_results_has_to_be_the_same(tmp_path):
    """Guards: one file with answers of two models, or of two temperatures."""
    items, path = items_of(2), tmp_path / "out"
    path.write_bytes(answer(items[0], {"temp": 0.7, "seed": 3}, "fp_2"))
    results = FileResults(path, resume=True, force=False)
    with pytest.raises(UsageError, match=r"`seed = 3` \(now `0`\), `temp = 0.7` \(now `0.5`\)"):
        results.begin(SETTINGS)
    with pytest.raises(UsageError, match="another model"):
        results.check_model("fp_1")
    results.close()
    assert run_batch(path, items, resume=True, force=True) == [items[1].custom_id]


def test_another_request_of_the_same_name_is_refused(tmp_path):
    """Guards: an edited prompt keeps the answer to the old one."""
    items, path = items_of(2), tmp_path / "out"
    run_batch(path, items)
    edited = [items[0], parse(2, line(prompt="other", custom_id=items[1].custom_id))]
    with pytest.raises(UsageError, match=r"line 2: .* answers another request"):
        run_batch(path, edited, resume=True)


def test_files_that_must_not_be_touched(tmp_path):
    """Guards: a wrong `-o` overwrites results or a file of the user's."""
    items, path = items_of(2), tmp_path / "out"
    run_batch(path, items)
    with pytest.raises(UsageError, match="has results already"):
        FileResults(path, resume=False, force=False)
    (tmp_path / "notes").write_text("my notes\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is no result"):
        FileResults(tmp_path / "notes", resume=True, force=False)
    (tmp_path / "notes").write_text("one line without an end")
    with pytest.raises(UsageError, match=r"line 1 of .* is no result"):
        FileResults(tmp_path / "notes", resume=True, force=False)
    assert (tmp_path / "notes").read_text() == "one line without an end"
    held = FileResults(path, resume=True, force=False)
    with pytest.raises(UsageError, match="another run is writing"):
        FileResults(path, resume=True, force=False)
    held.close()
    assert path.read_bytes() == b"".join(map(answer, items))


def test_a_line_that_cannot_be_written_leaves_whole_lines(tmp_path, monkeypatch):
    """Guards: a full disk leaves half a line in front of what is written next."""
    items, path = items_of(3), tmp_path / "out"
    results = FileResults(path, resume=False, force=False)
    results.begin(SETTINGS)
    for item in items:
        results.expect(item)
    results.put(items[0], answer(items[0]))
    write, calls = os.write, []

    def full(fd, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(fd, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DS4Error, match=r"cannot write .*: no space left on device") as caught:
        results.put(items[1], answer(items[1]))
    monkeypatch.undo()
    results.close()
    assert "--resume" in caught.value.hint and path.read_bytes() == answer(items[0])


@pytest.mark.parametrize("call", ["fsync", "ftruncate"])
def test_a_file_that_cannot_be_synced_or_cut_is_one_line(tmp_path, monkeypatch, call):
    """Guards: a bare OSError when a file is opened or a torn end is cut off."""
    items, path = items_of(2), tmp_path / "out"
    run_batch(path, items)
    cut(path, path.stat().st_size - 1)
    left = path.read_bytes()

    def failing(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(DS4Error, match=r"cannot write .*: input/output error") as caught:
        run_batch(path, items, resume=True)
    with pytest.raises(DS4Error, match=r"cannot write .*: input/output error"):
        run_batch(tmp_path / "new", items)
    monkeypatch.undo()
    assert "--resume" in caught.value.hint and left.startswith(path.read_bytes())
    assert run_batch(path, items, resume=True) == [items[1].custom_id]


def test_zeros_at_the_end_are_torn(tmp_path):
    """Guards: what a power cut leaves of a line needs an editor before the run can go on."""
    items, path = items_of(2), tmp_path / "out"
    path.write_bytes(answer(items[0]) + bytes(100))
    assert run_batch(path, items, resume=True) == [items[1].custom_id]


def test_where_results_go(tmp_path):
    """A pipe that is waited on as if it were a file; the input, written over; results in a folder
    that nobody named."""
    assert isinstance(open_results("-", resume=False, force=False), StreamResults)
    with pytest.raises(UsageError, match="nothing to resume on standard output"):
        open_results("-", resume=True, force=False)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    pipe = open_results(str(tmp_path / "pipe"), resume=False, force=False)
    assert isinstance(pipe, StreamResults)
    pipe._stream.write(b"x\n")
    assert os.read(reader, 9) == b"x\n", "at once"
    os.close(reader)
    pipe._stream.close()
    path = tmp_path / "out.jsonl"
    assert open_results(str(path), resume=False, force=False)._out.path == path
    path.write_text("")
    for source, name in ((path, path), (path, tmp_path / "." / "out.jsonl")):
        with pytest.raises(UsageError, match="is the input"):
            open_results(str(name), False, False, source=lines.file_id(source))
    with pytest.raises(UsageError, match="cannot write"):
        open_results(str(tmp_path / ("n" * 300)), resume=False, force=False)


def test_a_long_line_that_waited_is_whole(tmp_path):
    """A result of more than one block that came before its turn."""
    log = _Log(tmp_path / "log")
    log.open(create=True)
    long = json.dumps({"text": "x" * 200_000}).encode() + b"\n"
    starts = [log.append(line) for line in (b"{}\n", long, b"[]\n")]
    assert [log.line_at(start) for start in starts] == [b"{}\n", long, b"[]\n"]
    with pytest.raises(DS4Error, match="was changed"):
        log.line_at(10**6)
    log.close()


def test_a_stream_gets_lines_in_input_order():
    """Guards: grouping changes the order on a pipe; a partial write loses the rest."""

    class Slow(io.BytesIO):
        def write(self, data):
            return super().write(bytes(data[:7]))

    items, out = items_of(3), Slow()
    results = StreamResults(out)
    assert results.resume_hint == "", "a pipe cannot be gone on with"
    assert [results.expect(item) for item in items] == [False] * 3
    for i in (2, 0, 1):
        results.put(items[i], answer(items[i]))
    assert out.getvalue() == b"".join(map(answer, items))


def test_a_terminal_is_not_steered_by_a_result():
    """An escape in an answer was obeyed; bytes that are no text ended the run."""

    class Screen(io.BytesIO):
        def isatty(self):
            return True

    (item,), out = items_of(1), Screen()
    results = StreamResults(out)
    results.expect(item)
    results.put(item, "é\x1b[2J".encode() + b"\xff\n")
    shown = out.getvalue().decode()
    assert shown.startswith("é") and "\x1b" not in shown and "xff" in shown and shown.endswith("\n")
    results.close()
    assert out.closed


def test_whether_anything_is_left_to_make(tmp_path):
    """A model was loaded for nothing; or a file that lacks a line, or holds them in another order,
    was taken for done."""
    items, path = items_of(3), tmp_path / "out"
    keys = [name_key(item.custom_id) for item in items]
    run_batch(path, items)

    def are_all(keys):
        results = FileResults(path, resume=True, force=False)
        try:
            return results.are_all(keys)
        finally:
            results.close()

    assert are_all(keys) and not are_all(keys[:2]) and not are_all(keys[::-1])
    run_batch(path, items, force=True, bad=[1])
    assert not are_all(keys)
    run_batch(path, items, resume=True)
    waiting = path.with_name("out.waiting")
    waiting.write_bytes(answer(items[0]))
    assert are_all(keys), "the same result twice"
    path.write_bytes(b"".join(map(answer, items[:2])))
    waiting.write_bytes(answer(items[2]))
    assert not are_all(keys), "one waits for its place"
    stream = StreamResults(io.BytesIO())
    assert stream.are_all([]) and not stream.are_all([1]) and stream.finish() == 0


def test_forced_results_go_on_with_what_differs(tmp_path):
    """Guards: `--force` that is refused all the same, or that drops what is good."""
    items, path = items_of(3), tmp_path / "out"
    path.write_bytes(b"not ours\n" + answer(items[0], {"temp": 9}, "fp_9") + answer(items[2]))
    assert run_batch(path, items, resume=True, force=True) == [items[1].custom_id]
    assert path.read_bytes().splitlines()[0] == answer(items[0], {"temp": 9}, "fp_9").strip()
    run_batch(path, items, force=True)
    assert path.read_bytes() == b"".join(map(answer, items))


@pytest.mark.parametrize(
    "raw",
    [
        b"[1]\n",
        b'{"custom_id": 3, "response": {}, "error": null}\n',
        b'{"custom_id": "a", "response": {}}\n',
        b'{"custom_id": "a", "error": null}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_lines_that_are_no_results(tmp_path, raw):
    """A file of the user's that happens to be JSON was taken for results, and cut."""
    (tmp_path / "out").write_bytes(raw)
    with pytest.raises(UsageError, match=r"line 1 of .* is no result"):
        FileResults(tmp_path / "out", resume=True, force=False)
    assert (tmp_path / "out").read_bytes() == raw


@pytest.mark.parametrize("response", [None, [], {}, {"status_code": 200}])
def test_results_without_an_answer_are_made_again(tmp_path, response):
    """A line of another program's form was counted as done."""
    (item,), path = items_of(1), tmp_path / "out"
    line = {"id": "x", "custom_id": item.custom_id, "response": response, "error": None}
    path.write_bytes(json.dumps(line).encode() + b"\n")
    assert run_batch(path, [item], resume=True) == [item.custom_id]
    assert path.read_bytes() == answer(item)


def test_what_made_a_result_is_short_and_has_no_speed_in_it():
    """Guards: a resume is refused because the drafter changed, or accepted with another system."""
    settings = Settings(system="x" * 500, temp=1, drafter="none", rewind_mb=9, stop=("a",))
    then = replies.made_with(settings, [])
    assert then["temp"] == 1 and then["stop"] == ["a"] and len(then["system"]) < 30
    assert set(then) == {"temp", "stop", "system"}
    strict = Settings(temp=1, drafter="none", rewind_mb=9, reproducible=True)
    assert set(replies.made_with(strict, [])) == {"temp", "drafter", "rewind_mb", "reproducible"}
    other = replies.made_with(Settings(system="y" * 500, temp=1, stop=("a",)), [])
    assert [d.split()[0] for d in replies.differences(then, other)] == ["`system"]
    assert (
        replies.made_with(Settings(temp=0), []) == replies.made_with(Settings().filled(), []) == {}
    )


def test_blank_lines_and_common_prefix():
    """Guards: a trailing empty line becomes a failed request; arrays and lists compare wrongly."""
    assert is_blank(b" \r\n") and not is_blank(b"x")
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2


# --- how many at a time --------------------------------------------------------------------------


def widths(wanted, rate, rounds=200, promised=None) -> list[int]:
    """The widths that are tried where `rate(width)` tokens a second are made."""
    width, found = Width(wanted, promised), []
    for _ in range(rounds):
        found.append(width.now)
        width.observe(width.now, width.now, width.now / rate(width.now))
    return [n for i, n in enumerate(found) if i == 0 or n != found[i - 1]]


def test_as_many_at_a_time_as_pay():
    """A width that was too large stayed; a number that was given was not kept to."""
    assert widths(None, lambda n: 100 * n) == [4, 8, 16, 32]
    assert widths(None, lambda n: min(n, 8)) == [4, 8, 16, 8]
    assert widths(None, lambda n: 100) == [4, 8, 4]
    assert widths(None, lambda n: n / 100) == [4, 8, 16, 32], "no rate is too small"
    assert widths(5, lambda n: 100) == widths(5, lambda n: n) == [5]


def test_the_first_width_is_the_one_that_prices_promise():
    """Every batch began with four lines, whatever earlier ones had found out."""
    assert widths(None, lambda n: 100 * n, promised={4: 400, 8: 800, 16: 1600}) == [16, 32]
    assert widths(None, lambda n: min(n, 8), promised={4: 4, 8: 8, 16: 8.1}) == [8, 16, 8]
    assert widths(None, lambda n: min(n, 4), promised={4: 9, 8: 18, 16: 36}) == [16, 8, 4]
    assert widths(None, lambda n: min(n, 8), promised={4: 9, 8: 18, 16: 36}) == [16, 8, 4, 8]
    assert widths(None, lambda n: n, promised={8: 50}) == [8, 4, 8]
    assert widths(None, lambda n: n, promised={32: 32}) == [32]
    assert widths(5, lambda n: n, promised={4: 4, 8: 8}) == [5]


def test_prices_promise_what_batches_or_else_calls_have_shown():
    """A width was begun with that nobody had any price of."""
    calls = {0: 1.0, 1: 1.0, 8: 2.0, 16: 4.0}
    assert promises({}, calls) == {4: 4 / (1 + 3 / 7), 8: 4.0, 16: 4.0}
    assert promises({8: 2.0}, calls) == promises({}, calls)
    assert promises({6: 1.0, 16: 2.0}, calls) == {8: 8 / 1.2, 16: 8.0}
    assert promises({4: 1.0, 16: 2.0}, {}) == {4: 4.0, 8: 8 / (1 + 1 / 3), 16: 8.0}
    assert promises({}, {}) == promises({5: 1.0}, {1: 1.0}) == {}


def test_one_line_is_tried_where_guesses_are_made_for_one_only():
    """A draft model that wrote one line faster than four lines go without it was never asked."""

    def found(rates, promised=None):
        width, tried = Width(None, promised), []
        width.begin_alone()
        for i in range(200):
            tried.append(width.now)
            # guesses come in blocks: a round makes one token, or four
            tokens = width.now if width.now > 1 else (1, 4)[i % 2]
            width.observe(width.now, tokens, tokens / rates[width.now] + (i % 9 == 4))
        return [n for i, n in enumerate(tried) if i == 0 or n != tried[i - 1]]

    assert found({1: 100.0, 4: 60.0}) == [1, 4, 1]
    assert found({1: 100.0, 4: 200.0, 8: 201.0}) == [1, 4, 8, 4]
    assert found({1: 100.0, 16: 200.0, 32: 201.0}, {8: 8, 16: 16}) == [1, 16, 32, 16]
    given = Width(8)
    given.begin_alone()
    assert given.now == 8


def test_only_full_rounds_judge_a_width():
    """The last lines of a batch, few at a time, made the width of the next ones small."""
    width = Width(None)
    for lines_in_work, tokens in [(2, 2), (4, 0)] * 50:
        width.observe(lines_in_work, tokens, 1.0)
        assert width.now == 4


def test_a_width_by_settings_and_prices():
    """Guards: prices of earlier batches, or of calls, that nobody asks."""
    rounds, calls = {4: 1.0, 8: 1.1}, {1: 1.0, 16: 1.1}
    for wanted, shown, now in ((0, rounds, 8), (0, {}, 16), (5, rounds, 5)):
        prices = SimpleNamespace(rounds=shown, seconds=calls)
        settings = Settings(parallel=wanted)
        assert Width.of(SimpleNamespace(prices=prices, settings=settings)).now == now
