"""Scenarios and checks of `rewind-bench` on tiny models, and the command itself."""

from __future__ import annotations

import itertools
import json
from functools import cache

import mlx.core as mx
import pytest
from oracle import FAMILIES, KINDS, SCALE, Letters, engine
from tiny import V, build
from typer.testing import CliRunner

from ds4cli import bench
from ds4cli.bench import check, corpus
from ds4cli.bench.lab import Lab, gap
from ds4cli.bench.matrix import Matrix
from ds4cli.bench.measure import Row
from ds4cli.bench.reference import Reference, stock
from ds4cli.bench.scenarios import SCENARIOS, scenario
from ds4cli.cli import app
from ds4cli.errors import UsageError
from ds4cli.tape.check import Verdict
from ds4cli.tape.tape import Tape

SMALL = Matrix(
    contexts=(48,),
    distances=(8, 20, 40),
    block=4,
    num_trials=2,
    generate=8,
    pairs=2,
    match_tokens=3,
    scale=0.002,
)


@pytest.fixture(autouse=True)
def short_corpus(monkeypatch):
    """A part of the program's source: to tokenize all of it takes a second."""
    monkeypatch.setattr(corpus, "PACKAGE", corpus.PACKAGE / "rewind")


@cache
def ids_of(text):
    return [ord(c) % V for c in text]


class AnyLetters(Letters):
    """Encodes every text, so that the program's own source can be read."""

    def encode(self, text, **options):
        return ids_of(text)


def lab_of(name, *, clock=None, matrix=SMALL, dtype=mx.float32, **settings):
    """A lab over a tiny model; `clock` as in `fake_clock`."""
    made = engine(
        name,
        model=build(name, scale=SCALE, dtype=dtype),
        horizon_tokens=16,
        prefill_step_size=16,
        **settings,
    )
    made.tokenizer = AnyLetters()
    return Lab(made, matrix, **({"clock": clock} if clock else {}))


def fake_clock():
    """A second passes with every look, so that each sample takes exactly one."""
    return itertools.count().__next__


def rows_of(lab, name):
    return list(scenario(name)(lab))


@cache
def rows_by_fake_clock(name, scenario):
    """The rows of a scenario on a lab that nothing was changed in."""
    return rows_of(lab_of(name, clock=fake_clock()), scenario)


# --- scenarios ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        *(("lfm2", scenario) for scenario in SCENARIOS),
        ("llama", "rewind"),
        ("gemma3_text", "edits"),
        ("deepseek_v41", "acceptance"),
        pytest.param("deepseek_v41", "rewind", marks=pytest.mark.slow),
    ],
)
def test_scenarios_run_and_nothing_changes(name, scenario):
    """Guards: a scenario that breaks on a kind of layer, or text that going back changes."""
    rows = rows_by_fake_clock(name, scenario)
    assert rows and all(
        isinstance(r, Row) and r.scenario in (scenario, "plain decoding") for r in rows
    )
    assert all(r.match is not False for r in rows)
    keys = [r.key for r in rows]
    assert len(keys) == len(set(keys)), "a row would overwrite another in a comparison"
    for r in rows:
        assert not r.against or any(o.key == (*r.key[:3], r.against) for o in rows)


def test_the_clock_alone_decides_the_times():
    """Guards: warm-up that is counted, trials that are lost, seconds printed as ms."""
    for r in rows_by_fake_clock("lfm2", "rewind"):
        assert r.samples == (1000.0,) * SMALL.num_trials


def test_back_inside_the_block_takes_no_call_and_a_rebuild_takes_all():
    """Guards: a rewind that reads again and says it did not; a rebuild that reuses something."""
    rows = rows_by_fake_clock("lfm2", "rewind")
    end = SMALL.contexts[0] + SMALL.tail
    for r in rows:
        if r.way == "reuse" and r.distance_tokens <= SMALL.block:
            assert (r.forwards, r.fed_tokens, r.source) == (0, 0, "block")
        if r.way == "rebuild":
            assert r.fed_tokens == end - max(r.distance_tokens, SMALL.block)
    deep = [r for r in rows if r.way == "reuse" and r.distance_tokens == 40]
    assert deep[0].source in ("horizon", "frontier")


def test_partial_acceptance_takes_one_call_with_the_tape():
    """Guards: the two ways measure the same thing, or the tape calls the model again."""
    rows = rows_by_fake_clock("lfm2", "acceptance")
    calls = {(r.case, r.way): r.forwards for r in rows}
    assert len(calls) == 2 * SMALL.block
    for kept in range(1, SMALL.block + 1):
        case = f"{kept} of {SMALL.block} rows kept"
        assert calls[case, "tape"] == 2  # the block, and the step after it
        assert calls[case, "model call"] == (2 if kept == SMALL.block else 3)


def test_the_agent_repairs_every_boundary():
    """Guards: boundaries that are skipped; a forced miss that reuses something."""
    rows = {(r.case, r.way): r for r in rows_by_fake_clock("lfm2", "agent")}
    reuse, rebuild = (rows["one of 25 boundaries", way] for way in ("reuse", "rebuild"))
    assert len(reuse.samples) == len(rebuild.samples) == 25
    assert reuse.fed_tokens < rebuild.fed_tokens and "rebuild" not in reuse.note
    spent = rows["all boundaries", "reuse"].median
    assert spent == pytest.approx(sum(reuse.samples) / 1e3)


def test_memory_is_counted_in_bytes():
    """Guards: a model that keeps something says that it keeps nothing, or the other way round."""
    kept = {r.way: r.median for r in rows_of(lab_of("lfm2"), "memory") if r.case != "peak"}
    assert kept["horizon"] >= kept["last_block"] > 0 and kept["checkpoints"] > 0
    plain = {r.way: r.median for r in rows_of(lab_of("llama"), "memory") if r.case != "peak"}
    assert plain["checkpoints"] == 0


def test_a_mismatch_in_the_control_is_found(monkeypatch):
    """Guards: recording that changes the text passes the control."""
    lab = lab_of("lfm2", clock=fake_clock())
    decode = lab.decode

    def other_text(session, n):
        return decode(session, n if session.recording else n - 1)

    monkeypatch.setattr(lab, "decode", other_text)
    found = [r.match for r in rows_of(lab, "control") if r.scenario == "control"]
    assert [match for match in found if match is not None] == [False, True]


@pytest.mark.parametrize("name", ["lfm2", "gemma3_text"])
def test_plain_decoding_stands_beside_mlx_lm(name):
    """Guards: a ratio of two different texts, or a loop that is timed with its prompt."""
    found = rows_by_fake_clock(name, "control")
    ours, theirs = (r for r in found if r.scenario == "plain decoding")
    assert ours.match and ours.forwards == theirs.forwards == SMALL.generate
    assert len(ours.samples) == len(theirs.samples) == SMALL.pairs
    assert ours.note == "1.00 ± 0.00 of mlx-lm's speed" and ours.against == theirs.way


def test_a_context_that_does_not_fit_is_refused():
    """Guards: an exception in the middle of a long measurement."""
    lab = lab_of("llama")
    lab.engine.context_tokens = 50
    for name in ("rewind", "agent"):
        with pytest.raises(UsageError, match="at most `50`"):
            rows_of(lab, name)


# --- the check ------------------------------------------------------------------------------------


# Lines of rows, recurrences and windows; each family is proved in other ways too.
SHOWN = ("llama", "lfm2", "gemma3_text")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SHOWN else pytest.mark.slow) for n in FAMILIES]
)
def test_the_check_holds_on_every_family(name):
    """Guards: a family whose rewinds are wrong, or a check that fails a family that is right."""
    findings = list(check.examine(lab_of(name), [19]))
    assert {f.check for f in findings} == set(check.CHECKS)
    assert [f for f in findings if not f.is_ok] == []


def test_the_check_holds_where_replay_is_refused(monkeypatch):
    """Where tokens are fed again instead, nothing can be gone forward to without feeding."""
    monkeypatch.setattr("ds4cli.engine.engine.self_check", lambda *args: Verdict(float("inf")))
    lab = lab_of("lfm2")
    assert lab.engine.capabilities.recurrences == []
    findings = list(check.examine(lab, [19]))
    assert [f for f in findings if not f.is_ok] == []


def test_a_text_that_the_sizes_of_calls_change_is_no_mismatch():
    """Guards: a false alarm where the stock model differs from itself, or none where we differ."""
    lab = lab_of("plamo3")
    exam = check.Examiner(lab, Reference(lab.engine.model), 19)
    for case in ("ngram:0.8", "half-wrong:0.8"):
        (found,) = check.examine(lab, (), f"speculative:19:{case}")
        assert found.is_ok and found.detail.startswith("as the stock model says in ")
    course = exam.course()
    course.decode(19 + check.LENGTH)
    assert exam.judge(course)[0]
    course.session.rewind(25)
    course.session.sync([*course.session.tokens, (course.session.next_token() + 1) % V])
    assert not exam.judge(course)[0]


def test_limits_do_not_grow_where_the_stock_model_differs_from_itself():
    """Guards: a fault as large as what the sizes of calls change there passes as rounding."""
    lab = lab_of("plamo3")
    exam = check.Examiner(lab, Reference(lab.engine.model), 40)
    whole = [*exam.prompt, *range(1, 9)]
    course, single = exam.course(), exam.single_rows(whole)
    course.session.sync(whole)
    assert check.difference(course.session.logits, single[-1]) > check.EXACT_LIMIT == exam.limit
    worst, detail = exam.compare(course, whole, single, onward=0)
    assert worst == 0 and detail.startswith("as the stock model says in ")
    wrong = course.session.logits + check.EXACT_LIMIT * 100
    worst, detail = exam.nearest(course, single, lambda rows: check.difference(wrong, rows[-1]))
    assert worst > exam.limit and not detail


def test_a_course_knows_the_calls_of_its_tokens():
    """Guards: a reference fed in other calls than the session was."""
    lab = lab_of("qwen3_next")
    course = check.Examiner(lab, Reference(lab.engine.model), 19).course()
    session, read = course.session, sum(kept for kept, _ in course.calls)
    assert read == 19
    before, wrong = course.calls, [0, 0, 0]
    session.step(drafts=wrong)
    assert course.calls[:-1] == before and course.calls[-1] == (session.pos - 19, 4)
    twin = course.fork()
    twin.session.sync([*twin.session.tokens, 1, 2])
    session.rewind(3)
    assert sum(kept for kept, _ in course.calls) == 3 and course.calls[0][0] == 3
    assert twin.calls[-1] == (2, 2)


def test_the_reference_has_none_of_our_code():
    """Guards: a fault in a recording subclass is in the reference too, and cancels out."""
    armed = lab_of("qwen3_next").engine.model
    twin = stock(armed)
    assert not {id(m) for m in armed.modules()} & {id(m) for m in twin.modules()}
    assert any(type(a) is not type(b) for a, b in zip(armed.modules(), twin.modules(), strict=True))
    for module in twin.modules():
        kind = type(module)
        bases = [b for b in kind.__mro__[1:] if b.__name__ == kind.__name__]
        assert not bases, f"{kind} is derived from a class of its own name"
    rows = Reference(armed).rows([1, 2, 3], [2, 1])
    assert rows.shape == (3, V)


@pytest.mark.parametrize(
    ("name", "contexts"),
    [("lfm2", [19]), *(pytest.param(n, [19, 22], marks=pytest.mark.slow) for n in KINDS[1:3])],
)
def test_a_planted_off_by_one_is_found(monkeypatch, name, contexts):
    """Guards: a tape that replays one row too few passes the check."""
    lab = lab_of(name)
    replay = Tape.replay
    monkeypatch.setattr(
        Tape, "replay", lambda self, starts, rows: replay(self, starts, max(1, rows - 1))
    )
    findings = list(check.examine(lab, contexts))
    bad = check.smallest(findings)
    assert bad is not None and bad.context == 19
    (again,) = check.examine(lab, (), bad.case)
    assert not again.is_ok
    monkeypatch.undo()
    (again,) = check.examine(lab, (), bad.case)
    assert again.is_ok


def test_half_precision_is_judged_by_a_margin():
    """Guards: rounding fails the check, or everything passes it."""
    lab = lab_of("lfm2", dtype=mx.bfloat16)
    assert not lab.is_exact
    findings = list(check.examine(lab, [19]))
    assert all(f.is_ok and f.limit < 0.2 for f in findings)
    assert gap(mx.array([1.0, 4.0, 2.0]), 2) == 0.5 and gap(mx.array([1.0, 4.0]), 1) == 0


@pytest.mark.parametrize("case", ["rows:16:1", "row", "row:x", "row:0:1", ""])
def test_a_case_that_is_none(case):
    """Guards: a mistyped case runs nothing and holds."""
    with pytest.raises(UsageError):
        list(check.examine(lab_of("llama"), [16], case))


def test_windows_are_longer_than_the_longest_context_checked():
    """Guards: a check that never leaves the window proves nothing about windows."""
    assert max(check.contexts(lab_of("gemma3_text"))) > 8 + 16
    short = lab_of("llama")
    short.engine.context_tokens = 64
    assert max(check.contexts(short)) + check.LENGTH + check.ONWARD <= 64


# --- the command ----------------------------------------------------------------------------------

TINY = [
    "--context", "40", "--depth", "8,20", "-r", "1", "--scale", "0.002", "--horizon-tokens", "16",
    "--prefill-step-size", "16",
]  # fmt: skip


def run(*args):
    return CliRunner().invoke(app, ["rewind-bench", *map(str, args)])


def test_a_run_is_written_compared_and_drawn(hybrid_folder, tmp_path):
    """Guards: output that no later run can be compared with; a comparison that always passes."""
    old, again = tmp_path / "old.json", ["-m", hybrid_folder, "rewind", *TINY]
    first = run(*again, "-o", "json", "--output", old)
    assert first.exit_code == 0, first.stderr
    data = json.loads(old.read_text())
    assert data["environment"]["cache_kinds"] and data["rows"][0]["samples"]
    same = run(*again, "--compare", old, "--tolerance", 1000, "--plot", tmp_path / "x.svg")
    assert same.exit_code == 0, same.stderr
    assert "\n\n| scenario | case" in same.stdout and "### rewind, context 40" in same.stdout
    for r in data["rows"]:
        r["samples"] = [s / 1e6 for s in r["samples"]]
    old.write_text(json.dumps(data))
    worse = run(*again, "--compare", old)
    assert worse.exit_code == 1 and "**worse**" in worse.stdout


def test_a_mismatch_exits_with_1(hybrid_folder, monkeypatch):
    """Guards: wrong text after going back looks like success."""
    monkeypatch.setattr(Lab, "agree", lambda *_: False)
    result = run("-m", hybrid_folder, "rewind", "-q", *TINY)
    assert result.exit_code == 1 and "other text" in result.stderr and "**no**" in result.stdout


def test_a_failing_check_prints_the_command_that_repeats_it(hybrid_folder, monkeypatch):
    """Guards: a check that fails without telling what to run, or that exits with 0."""
    replay = Tape.replay

    def settle(engine, request):
        off_by_one = lambda tape, starts, rows: replay(tape, starts, max(1, rows - 1))  # noqa: E731
        monkeypatch.setattr(Tape, "replay", off_by_one)
        return checked(engine, request)

    checked = bench.run
    monkeypatch.setattr(bench, "run", settle)
    bad = run("-m", hybrid_folder, "--check", "--context", 19, "--horizon-tokens", 64, "-q")
    assert bad.exit_code == 1 and "**no**" in bad.stdout
    command = bad.stderr.partition("the smallest: ds4cli rewind-bench ")[2].split()
    assert "--horizon-tokens" in command and "row:19:2:back:" in " ".join(command)
    monkeypatch.undo()
    assert run(*command).exit_code == 0


def test_plain_models_are_told_that_a_cut_is_all(model_folder):
    """Guards: a dense model's rewinds are sold as an achievement."""
    result = run("-m", model_folder, "rewind", "-q", *TINY)
    assert result.exit_code == 0 and "a cut is all there is" in result.stdout.replace("\n", " ")


def test_ctrl_c_ends_a_run_with_130(hybrid_folder, monkeypatch):
    """Guards: a long measurement that is stopped ends in a traceback, or looks complete."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "agree", stop)
    result = run("-m", hybrid_folder, "rewind", "-q", *TINY)
    assert (result.exit_code, result.stdout) == (130, "") and "stopped" in result.stderr


def test_where_output_goes_is_tried_and_stays(tmp_path):
    """Guards: an earlier report that is gone when a run is stopped; an empty one in its place."""
    old, new = tmp_path / "old.md", tmp_path / "new.md"
    old.write_text("earlier")
    bench.BenchRequest(output=old, plot=tmp_path / "x.svg")
    bench.BenchRequest(output=new)
    assert [path.name for path in tmp_path.iterdir()] == ["old.md"]
    assert old.read_text() == "earlier"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rewnd"], "did you mean `rewind`"),
        (["-o", "xml"], "`--format` cannot be `xml`"),
        (["--plot", "x.gif"], "--plot"),
        (["--plot", "./missing/x.svg"], "cannot write `missing/x.svg`"),
        (["--output", "./missing/x.md"], "cannot write `missing/x.md`: no such file"),
        (["--compare", "missing.json"], "cannot read `missing.json`"),
        (["--trace", "missing.jsonl"], "cannot read `missing.jsonl`"),
        (["--context", "a"], "--context"),
        (["--context", "8,0"], "`--context` cannot be `8, 0`"),
        (["-r", "0"], "`--num-trials` cannot be `0`"),
        (["--context", "20,50", "--depth", "8,50"], "`--depth` cannot be `50`"),
        (["--matrix", "missing.toml"], "cannot read `missing.toml`"),
        (["--temp", "1"], "unknown option `--temp`"),
    ],
)
def test_bad_usage_is_found_before_anything_is_loaded(args, message):
    """Guards: minutes of loading before a typing mistake is found, or of measuring, and the result
    is lost; flags without effect, as a depth that no context has."""
    result = run("-m", "./missing", *args)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
