"""The command, with a scripted engine: what it reads, what it prints where, how it exits."""

from __future__ import annotations

import ast
import errno
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_engine
import pytest
import rich.table
import tomli
from fake_engine import FakeEngine, FakeSession
from rich.console import Console
from typer.testing import CliRunner

from ds4cli import generate, terminal
from ds4cli.cli import app, explain
from ds4cli.console import SafeConsole
from ds4cli.settings import OPTIONS, Settings


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """The scripted engine in the real one's place; also the list of what was loaded."""
    monkeypatch.setattr(FakeEngine, "loaded", [], raising=False)
    monkeypatch.setattr(FakeEngine, "pieces", FakeEngine.pieces)
    monkeypatch.setattr(generate, "_engine_class", lambda: FakeEngine)
    monkeypatch.setattr(generate, "peak_bytes", lambda: 2_000_000_000)
    monkeypatch.setenv("DS4CLI_MODEL", "scripted")
    return FakeEngine


def run(*args, stdin="", command="generate"):
    return CliRunner().invoke(app, [command, *args], input=stdin)


def test_the_demo_model_says_what_it_is():
    """Somebody who judges ds4cli by the built-in model must know that it is a demonstration."""
    assert "built-in demo model; -m" in run("Hi", "-m", "builtin").stderr
    assert run("Hi", "-m", "builtin", "-q").stderr == ""
    assert "demo" not in run("Hi").stderr


def test_a_reply_that_was_cut_says_so(engine, monkeypatch):
    """Guards: an empty line for an answer, where its reasoning took all the tokens there were."""
    written = len(engine.pieces)
    assert "cut" not in run("Hi").stderr
    monkeypatch.setattr(FakeSession, "ended_by", "length")
    assert run("Hi", "-n", f"{written}").stderr.endswith(f"cut at `--max-tokens {written}`\n")
    for most in (written + 1, -1):
        assert run("Hi", "-n", f"{most}").stderr.endswith("cut: the context is full\n")
    for silent in ("-q", "--json"):
        assert "cut" not in run("Hi", "-n", "1", silent).stderr
    assert not run("Hi", "-n", "1", "--stats").stderr.endswith("`\n"), "statistics come last"


def test_template_args_that_are_ignored_are_said():
    """Guards: `--template-args` with a mistyped name."""
    args = ("Hi", "--template-args", '{"level": 1, "levl": 2}')
    assert "does not read `levl`; it is ignored" in run(*args).stderr
    assert "`level`" not in run(*args).stderr and run(*args, "-q").stderr == ""


def test_the_collector_of_cycles_does_not_walk_what_is_kept_for_going_back():
    """It ran every dozen tokens, for nothing, as soon as a reply was recorded."""
    before = gc.get_threshold()
    try:
        run("Hi")
        # a token of a hybrid with 48 recurrent layers leaves about 250 containers for 64 tokens
        assert gc.get_threshold()[0] > 64 * 250 and gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_what_prints_errors_is_there_before_a_model(monkeypatch):
    """Guards: memory that ran out leaves no room for the line that says so."""
    held = []

    def at_load():
        held.append(terminal.err.cache_info().currsize)
        return FakeEngine

    monkeypatch.setattr(generate, "_engine_class", at_load)
    terminal.err.cache_clear()
    run("Hi", "-q")
    assert held == [1]


def prompt_of(engine):
    return engine.last_render["messages"][-1]["content"]


# --- the prompt ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["hi"], "", "hi"),
        (["-p", "hi"], "", "hi"),
        (["-"], "piped\n", "piped"),
        (["-p", "-"], "piped", "piped"),
        ([], "piped\r\nlines\n", "piped\nlines"),
        (["hi"], "piped\n", "piped\n\nhi"),
        (["-f", "a", "-f", "b"], "", "A\n\nB"),
        (["-f", "a", "hi"], "piped", "piped\n\nA\n\nhi"),
        (["-f", "-", "hi"], "piped", "piped\n\nhi"),
        (["--", "--not-a-flag"], "", "--not-a-flag"),
        (["regex \\n \\t"], "", "regex \\n \\t"),
        (["-f", "bom"], "", "é🎉"),
    ],
)
def test_prompt_sources_and_their_order(engine, args, stdin, prompt):
    """Guards: a source is dropped, the order changes, escapes in a prompt are rewritten."""
    Path("a").write_text("A\n")
    Path("b").write_text("B\n")
    Path("bom").write_bytes("\ufeffé🎉".encode())
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert prompt_of(engine) == prompt


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


BAD_INPUT = [
    ([], "the prompt is empty"),
    ([""], "the prompt is empty"),
    (["  \n"], "the prompt is empty"),
    (["a", "-p", "b"], "given twice"),
    (["-p", "a", "-p", "b"], "given twice"),
    (["-f", "missing"], "`missing`"),
    (["-f", "."], "`.`"),
    (["-f", "binary"], "not UTF-8"),
    (["hi", "--temp", "hot"], "`--temp` wants a number, not `hot`"),
    (["hi", "--temp", "-1"], "`--temp` cannot be `-1`"),
    (["hi", "--max-tokens", "0"], "`--max-tokens`"),
    (["hi", "--tempp", "1"], "unknown option `--tempp`"),
    (["hi", "--temp"], "`--temp` wants a value"),
    (["hi", "--json=1"], "`--json` takes no value"),
    (["hi", "--logprobs", "1.5"], "`--logprobs` wants a whole number"),
    (["hi", "extra"], "nothing takes `extra`"),
    (["hi", "--raw", "--system", "x"], "contradict"),
    (["hi", "--raw", "--think"], "contradict"),
    (["hi", "--drafter", "none", "--draft-model", "x"], "contradict"),
    (["hi", "--drafter", "model"], "draft model"),
    (["hi", "-q", "-v"], "contradict"),
    (["hi", "--config", "missing.toml"], "missing.toml"),
    (["hi", "--config", "broken.toml"], "line 1"),
    (["hi", "--config", "typo.toml"], "unknown key `tempp`"),
    (["hi", "--config", "broken.toml", "--no-config"], "contradict"),
    (["hi", "--profile", "x"], "profile `x`"),
    (["hi", "--logit-bias", "a=b"], "`--logit-bias`"),
    (["hi", "--stop", ""], "`--stop`"),
    (["hi", "--tools", "missing.json"], "missing.json"),
    (["hi", "--tools", "broken.toml"], "not JSON"),
]


@pytest.mark.parametrize(("args", "message"), BAD_INPUT)
def test_bad_input_is_one_line_exit_2_and_loads_nothing(engine, args, message):
    """Guards: a traceback, a wrong exit code, or a model loaded before the input is checked."""
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("broken.toml").write_text("temp = ")
    Path("typo.toml").write_text("tempp = 1")
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == "" and engine.loaded == []
    error, *hints = result.stderr.splitlines()
    assert error.startswith("error: ") and message in error
    assert len(hints) <= 1 and all(hint.startswith("hint: ") for hint in hints)


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["generate", "hi", "there", "you"], "nothing takes `there you`", "stands in quotes"),
        (["chat", "hi"], "nothing takes `hi`", "`ds4cli generate` takes one here"),
        (["models", "x"], "nothing takes `x`", "see `ds4cli models --help`"),
        (["genrate"], "there is no command `genrate`", "generate"),
        (["gen"], "there is no command `gen`", "generate"),
        (["bench"], "there is no command `bench`", "rewind-bench"),
        (["zzz"], "there is no command `zzz`", "--help"),
        (["rewind-bench", "--tolerance", "x"], "`--tolerance` wants a number", "--help"),
        (["rewind-bench", "-r", "x"], "`--num-trials` wants a whole number", "--help"),
    ],
)
def test_what_typer_says_of_usage_is_in_our_words(words, error, hint):
    """Guards: `Input should be a valid number, unable to parse string as a number`."""
    result = CliRunner().invoke(app, words, prog_name="ds4cli")
    first, second = result.stderr.splitlines()
    assert result.exit_code == 2 and first == f"error: {error}" and hint in second


def test_no_prompt_on_a_terminal(engine):
    """Guards: the command waits for a prompt that nobody knows it wants."""
    with pytest.raises(generate.UsageError, match="no prompt"):
        generate.gather_prompt((), (), Terminal())
    with pytest.raises(generate.UsageError, match="no prompt"):
        generate.gather_prompt((), (), None)


def test_a_prompt_that_is_not_text_is_refused():
    """Guards: an argument with bytes that are not UTF-8 ends in a traceback inside a tokenizer."""
    with pytest.raises(generate.UsageError, match="not UTF-8"):
        generate.gather_prompt(["a\udcff"], (), Terminal())


@pytest.mark.parametrize("args", [["hé"], ["hi", "-s", "é"]])
def test_text_is_utf_8_in_any_locale(engine, monkeypatch, args):
    """A prompt with an é was refused where the locale is ASCII: Python hands over its bytes."""
    monkeypatch.setattr(os, "fsencode", lambda word: word.encode("ascii", "surrogateescape"))
    words = [word.encode().decode("ascii", "surrogateescape") for word in args]
    assert run(*words).exit_code == 0
    assert "é" in engine.last_text and "\udcc3" not in engine.last_text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("json_too", [False, True])
def test_standard_output_in_another_encoding(monkeypatch, engine, encoding, json_too):
    """A traceback at the first character that it lacks, and a reply cut there."""
    monkeypatch.setattr(engine, "pieces", ("é ", "€", "🙂 end"))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with pytest.raises(SystemExit) as end:
        app(["generate", "hi", *["--json"] * json_too])
    shown, said = (stream.buffer.getvalue().decode(encoding) for stream in (out, err))
    assert end.value.code == 0
    if json_too:
        assert json.loads(shown)["text"] == "é €🙂 end"
    else:
        assert shown == ("é" if encoding == "latin-1" else "?") + " ?? end\n"
        assert said.count("`?` stands for what it lacks") == 1


def test_raw_keeps_every_byte_of_a_file(engine):
    """Guards: `--raw` trims or wraps the text that it promises to leave alone."""
    Path("a").write_text("  A\n\n")
    assert run("--raw", "-f", "a").exit_code == 0
    assert engine.last_text == "  A\n\n"


def test_system_text_tools_and_thinking_reach_the_template(engine, monkeypatch):
    """Guards: a flag that is accepted and then ignored."""
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    Path("tools.json").write_text(json.dumps(tools))
    monkeypatch.setattr(generate, "check_tools", lambda *args: None)
    monkeypatch.setattr(generate, "make_guard", lambda *args: None)
    assert run("hi", "-s", "be brief", "--no-think", "--tools", "tools.json").exit_code == 0
    assert engine.last_render["messages"][0] == {"role": "system", "content": "be brief"}
    assert engine.last_render["think"] is False and engine.last_render["tools"] == tools


# --- settings -----------------------------------------------------------------------------------

VALUES = {
    "model": "m", "system": "s", "tools": None, "dtype": "stored", "temp": 0.5, "top_p": 0.9,
    "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "repetition_context_size": 20,
    "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": 7, "max_tokens": -1,
    "drafter": "model", "draft_model": "d", "num_draft_tokens": 4, "speculate": "always",
    "rewind_mb": 9, "horizon_tokens": 8, "prefill_step_size": 64, "kv_bits": 4,
    "kv_group_size": 32, "max_repairs": 1, "xtc_probability": 0.2, "xtc_threshold": 0.3,
}  # fmt: skip


def test_every_flag_reaches_its_setting(engine):
    """Guards: an option that is parsed and lost."""
    given = {name: value for name, value in VALUES.items() if value is not None}
    args = [word for n, v in given.items() for word in ("--" + n.replace("_", "-"), str(v))]
    args += ["--stop", "a", "--stop", "b", "--logit-bias", "3=1", "--logit-bias", "4=-2.5"]
    result = run("hi", "--offline", "-R", "--stats", *args)
    assert result.exit_code == 0, result.stderr
    expected = {**given, "stop": ("a", "b"), "logit_bias": {3: 1.0, 4: -2.5}, "offline": True}
    assert engine.loaded == [Settings(**expected, hide_reasoning=True, stats=True)]


def test_short_flags(engine):
    """Guards: `-m`, `-n` or `-s` changes its meaning."""
    assert run("hi", "-m", "x", "-n", "5", "-s", "y").exit_code == 0
    assert engine.loaded == [Settings(model="x", max_tokens=5, system="y")]


def test_files_profiles_and_the_environment_reach_the_engine(engine, monkeypatch):
    """Guards: a layer that the command forgets to read."""
    Path("ds4cli.toml").write_text("temp = 0.5\ntop_k = 1\n[profiles.p]\ntop_k = 2\n")
    monkeypatch.setenv("DS4CLI_SEED", "5")
    run("hi", "--profile", "p")
    run("hi", "--no-config")
    ours = {"model": "scripted", "seed": 5}
    assert engine.loaded == [Settings(temp=0.5, top_k=2, **ours), Settings(**ours)]


def test_a_model_that_the_current_folder_names_is_said():
    """A settings file that came with somebody else's folder chooses the model, and nobody sees."""
    Path("ds4cli.toml").write_text("model = 'evil'\n[profiles.p]\ndraft_model = 'bad'")
    del os.environ["DS4CLI_MODEL"]
    said = "./ds4cli.toml sets model = `evil`; --no-config ignores it\n"
    assert run("hi").stderr == said
    assert "sets draft_model = `bad`" in run("hi", "--profile", "p").stderr
    for args in (["-m", "mine"], ["--config", "ds4cli.toml"], ["-q"], ["--no-config", "-m", "m"]):
        assert "ds4cli.toml sets" not in run("hi", *args).stderr


def shown(*args, command="chat") -> dict[str, str]:
    """The sampling lines of `--show-config`."""
    lines = run("--show-config", *args, command=command).stdout.splitlines()
    pairs = [line.split(" = ") for line in lines]
    return {name: rest for name, rest in pairs if name in ("temp", "top_p", "top_k")}


def test_chat_samples_as_the_model_recommends(engine, monkeypatch):
    """Replies in chat were greedy whatever the model recommends: `/retry` repeated itself."""
    from ds4cli.chat import loop

    talked = []
    monkeypatch.setattr(loop, "run", lambda engine, request, chosen, tools: talked.append(chosen))
    run("--no-save", command="chat")
    run("--no-save", "--top-p", "0.5", "--temp", "0", command="chat")
    found = [(chosen.temp, chosen.top_p, chosen.top_k) for chosen in talked]
    assert found == [(0.7, 0.95, 0), (0.0, 0.5, 0)]


def test_show_config_says_where_sampling_comes_from():
    """Guards: values of the model's that nobody can see before they act."""
    Path("m").mkdir()
    Path("m/generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    assert shown("-m", "m", "--top-k", "5") == {
        "temp": "0.6  # generation_config.json of the model",
        "top_p": "1.0  # default",
        "top_k": "5  # flag",
    }
    assert shown("-m", "m", command="generate")["temp"] == "0.0  # default"
    assert shown("-m", "./none")["temp"] == "0.7  # default for chat"


def test_show_config_is_toml_with_origins_and_loads_nothing(engine):
    """Guards: `--show-config` needs a prompt or a model, or lies about where a value is from."""
    Path("ds4cli.toml").write_text("temp = 0.5")
    result = run("--show-config", "--seed", "3")
    assert result.exit_code == 0 and engine.loaded == []
    assert tomli.loads(result.stdout)["temp"] == 0.5
    lines = result.stdout.splitlines()
    assert "temp = 0.5  # file ds4cli.toml" in lines and "seed = 3  # flag" in lines
    assert {line.strip("# ").split(" ")[0] for line in lines} == set(OPTIONS)


# --- what is printed where ----------------------------------------------------------------------


def test_a_pipe_gets_the_reply_and_one_newline():
    """Guards: stats, notices, styles or wrapping in what a script reads."""
    FakeEngine.pieces = ("long " * 60, "\x1b[31mred", " é🎉\n")
    result = run("hi", "--stats", "-v")
    assert result.stdout == "long " * 60 + "\x1b[31mred é🎉\n" + "\n"
    assert "a notice" in result.stderr and "a capability" in result.stderr


def test_quiet_prints_the_reply_only():
    """Guards: `-q` leaks notices or stats."""
    FakeEngine.pieces = ("<think>why</think>", "so")
    result = run("hi", "-q")
    assert (result.stdout, result.stderr) == ("so\n", "")


def test_by_default_nothing_but_the_reply():
    """Guards: notices without `-v`, stats without `--stats`."""
    result = run("hi")
    assert (result.stdout, result.stderr) == ("Hello world\n", "")


def test_a_refused_replay_is_said_without_being_asked(monkeypatch):
    """Guards: going back is slow on this model, and only `-v` says so."""
    monkeypatch.setattr(FakeEngine, "refusal", "going back feeds tokens again")
    assert run("hi").stderr == "going back feeds tokens again\n"
    assert run("hi", "-q").stderr == ""
    found = json.loads(run("hi", "--json", "-q").stdout)
    assert found["rewind"]["replay_refused"] == "going back feeds tokens again"


def test_no_stream_prints_the_same():
    """Guards: `--no-stream` loses or repeats text."""
    FakeEngine.pieces = ("<think>why</think>", "so")
    assert run("hi", "--no-stream").stdout == "so\n"


def test_reasoning_goes_to_stderr():
    """Guards: reasoning in a pipe, or shown with `--hide-reasoning`."""
    FakeEngine.pieces = ("<thi", "nk>why", " not</think>\n\n", "so")
    result = run("hi")
    assert result.stdout == "so\n" and result.stderr.strip() == "why not"
    assert run("hi", "-R").stderr == ""


def test_reasoning_that_the_prompt_opened():
    """Guards: the reasoning of a template that ends with a think marker is taken for the answer."""
    FakeEngine.pieces = ("why</think>", "so")
    assert run("hi <think>\n").stdout == "so\n"
    assert run("--raw", "hi <think>\n").stdout == "why</think>so\n"


def test_stats_line():
    """Guards: the line loses a number, or shows parts that say nothing."""
    line = run("hi", "--stats").stderr.strip()
    words = "8.0 tok/s · 2.5 tokens a call (drafts 75 % right) · prompt 2, 2 kept · 2.0 GB"
    assert line == words


@pytest.mark.parametrize("width", [200, 80, 60, 40, 30])
def test_the_stats_line_fits_its_screen(width):
    """Guards: a line that wraps, or one that says less than there is room for."""
    stats = SimpleNamespace(
        prompt_tokens=73, cached_tokens=51, generated_tokens=810, decode_s=10, blocks=280,
        proposed=600, accepted=532, discarded_tokens=78, back_s=0.002,
    )  # fmt: skip
    shown = {
        200: "81 tok/s · 2.9 tokens a call (drafts 89 % right) · prompt 73, 51 kept"
        " · back 78 tokens in 2 ms · 9.8 GB",
        80: "81 tok/s · 2.9 a call · prompt 73, 51 kept · back 78 tokens in 2 ms",
        60: "81 tok/s · 2.9 a call · prompt 73, 51 kept · back 78 in 2 ms",
        40: "81 tok/s · 2.9 a call · back 78 in 2 ms",
        30: "81 tok/s · back 78 in 2 ms",
    }
    line = terminal.stats_line(stats, 9_800_000_000, width)
    assert line == shown[width] and len(line) <= width


@pytest.mark.parametrize(
    ("reply", "printed"),
    [
        ("Here:\n```py\na = 1\n\nb\n```\nand\n```\nc\n```", "a = 1\n\nb\n"),
        ("~~~\nx\n```\ny\n~~~\n", "x\n```\ny\n"),
        ("```\nopen", "open\n"),
        ("none", "none\n"),
    ],
)
def test_extract_prints_the_first_code_block(reply, printed):
    """Guards: fences or prose in a script; a reply without code that is silently nothing."""
    FakeEngine.pieces = tuple(reply)
    result = run("hi", "--extract")
    assert result.stdout == printed
    assert ("no code block" in result.stderr) is (reply == "none")


def test_json_is_one_object_with_the_promised_fields():
    """Guards: a script's field is renamed, or something else is printed beside the object."""
    FakeEngine.pieces = ("<think>why</think>", "é🎉")
    result = run("prompt", "--json", "--seed", "3")
    found = json.loads(result.stdout)
    assert (found["text"], found["reasoning"], found["finish_reason"]) == ("é🎉", "why", "stop")
    assert found["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert found["timings"]["predicted_per_second"] == 8.0 and found["timings"]["prompt_n"] == 4
    assert (found["timings"]["draft_n"], found["timings"]["draft_n_accepted"]) == (4, 3)
    assert found["speculative"]["accept_counts"] == [1, 0, 1]
    rewind = {"count", "discarded_tokens", "replayed_tokens", "tape_bytes", "replay_refused"}
    assert set(found["rewind"]) == rewind
    assert found["rewind"]["tape_bytes"] == 7
    assert found["seed"] == 3 and set(found["settings"]) == set(OPTIONS)
    assert result.stderr == ""


def test_calls_are_json_lines(monkeypatch):
    """Guards: a call is lost in plain output, or the object of `--json` lacks it."""
    call = SimpleNamespace(openai=lambda: {"id": "call_1"})
    monkeypatch.setitem(fake_engine.ENDED, "calls", (call,))
    assert run("hi").stdout == 'Hello world\n{"id": "call_1"}\n'
    assert run("hi", "--no-stream").stdout == 'Hello world\n{"id": "call_1"}\n'
    assert json.loads(run("hi", "--json").stdout)["tool_calls"] == [{"id": "call_1"}]
    FakeEngine.pieces = ()
    assert run("hi").stdout == '{"id": "call_1"}\n'


def test_a_terminal_gets_no_control_characters():
    """Guards: a reply moves the cursor or changes the title of the user's terminal."""
    shown = "a\\x1b[2Jb\\x07\\x0d\tc\n\\x9b"
    assert terminal.printable("a\x1b[2Jb\x07\r\tc\n\x9b", Terminal()) == shown
    assert terminal.printable("a\x1b[2J", io.StringIO()) == "a\x1b[2J"


@pytest.mark.parametrize("animated", [True, False])
def test_prefill_progress_on_a_terminal_only(monkeypatch, animated):
    """Guards: a long prompt looks like a hang, or a log fills with bars."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    monkeypatch.setattr(terminal, "err", lambda: console)
    monkeypatch.setattr(terminal, "is_animated", lambda: animated)
    monkeypatch.setattr(terminal.PrefillBar, "DELAY_S", 0)
    with terminal.PrefillBar(show=True) as bar:
        for done in (64, 128, 256):
            bar(done, 256)
    assert ("256/256" in stream.getvalue()) is animated


class Screen(io.StringIO):
    """A terminal that both streams write to."""

    def isatty(self):
        return True


@pytest.mark.parametrize("say", [terminal.note, terminal.fail])
def test_what_is_said_in_the_middle_of_a_reply_has_its_own_line(monkeypatch, say):
    """Guards: `The answer iserror: rank 1 is gone`, or an empty line behind a reply that ended."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    console = SafeConsole(file=screen, width=80)
    monkeypatch.setattr(terminal, "err", lambda: console)
    terminal.write("The answer is")
    say("gone")
    terminal.write_styled([("so", ""), (" it is\n", "bold")])
    say("gone")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).replace("error: ", "")
    assert shown.splitlines() == ["The answer is", "gone", "so it is", "gone"]


def test_a_pipe_gets_no_newline_of_ours(monkeypatch):
    """Guards: a reply in a file with a line break that the model never wrote."""
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    terminal.write("The answer is")
    terminal.note("gone")
    assert pipe.getvalue() == "The answer is"


def test_a_table_in_a_pipe_has_a_line_a_row():
    """Guards: `/turns | grep` that finds halves of rows."""
    pipe = io.StringIO()
    table = rich.table.Table.grid()
    table.add_row("word " * 60, "end")
    SafeConsole(file=pipe).print(table)
    assert pipe.getvalue() == "word " * 60 + "end\n"
    assert SafeConsole(file=Screen()).options.max_width < 1000


# --- how it ends --------------------------------------------------------------------------------


def press_ctrl_c_after(monkeypatch, pieces):
    """Send SIGINT to this process when the session is asked for its next piece."""
    original = FakeSession.stream

    def stream(self, *, cancel, guard=None):
        for number, event in enumerate(original(self, cancel=cancel)):
            yield event
            if number + 1 == pieces:
                os.kill(os.getpid(), signal.SIGINT)
                while not cancel():
                    pass

    monkeypatch.setattr(FakeSession, "stream", stream)


def test_ctrl_c_prints_what_there_is_and_exits_130(monkeypatch):
    """Guards: an interrupt loses the text, prints a traceback, or looks like success."""
    press_ctrl_c_after(monkeypatch, pieces=1)
    result = run("hi")
    assert (result.stdout, result.exit_code) == ("Hello\n", 130)


def test_ctrl_c_with_json(monkeypatch):
    """Guards: an interrupted script gets half an object, or no reason."""
    press_ctrl_c_after(monkeypatch, pieces=1)
    result = run("hi", "--json")
    found = json.loads(result.stdout)
    assert (found["text"], found["finish_reason"], result.exit_code) == ("Hello", "cancelled", 130)


def test_ctrl_c_while_the_prompt_is_read(monkeypatch):
    """Guards: an interrupt during prefill starts to generate from half a prompt."""

    def sync(self, tokens, *, cancel, progress):
        os.kill(os.getpid(), signal.SIGINT)
        while not cancel():
            pass

    monkeypatch.setattr(FakeSession, "sync", sync)
    result = run("hi")
    assert (result.stdout, result.exit_code) == ("\n", 130)


def test_ctrl_c_while_loading(monkeypatch):
    """Guards: a load cannot be interrupted, or ends in a traceback."""

    def load(**settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "load", load)
    result = run("hi")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 130)


def test_the_handler_of_ctrl_c_is_put_back():
    """Guards: after a reply, Ctrl-C no longer raises KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    run("hi")
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_prompt_too_long_says_both_numbers(monkeypatch):
    """Guards: a prompt longer than the context is cut in silence."""
    result = run("x" * 101)
    assert result.exit_code == 2 and "`101`" in result.stderr and "`100`" in result.stderr


def fail_with(monkeypatch, error):
    def load(**settings):
        raise error

    monkeypatch.setattr(FakeEngine, "load", load)


def test_an_unexpected_error_is_one_line_without_debug(monkeypatch):
    """Guards: a user sees a traceback, or a bug report has none."""
    fail_with(monkeypatch, ValueError("boom"))
    result = run("hi")
    assert result.exit_code == 1 and "boom" in result.stderr and "Traceback" not in result.stderr
    assert "Traceback" in run("hi", "--debug").stderr


def test_a_missing_backend_names_the_extra(monkeypatch):
    """Guards: an installation without a backend ends in a message about a shared library."""

    def missing():
        raise ImportError("libmlx.so: cannot open shared object file", name="mlx.core")

    monkeypatch.undo()
    monkeypatch.setattr(generate, "_import_engine", missing)
    result = run("hi")
    assert result.exit_code == 2 and 'pip install "ds4cli[cpu]"' in result.stderr


def test_a_closed_pipe_and_a_full_disk_have_no_traceback(monkeypatch):
    """Guards: `| head -1` prints a traceback; a full disk looks like success."""
    for number, message in ((errno.EPIPE, ""), (errno.ENOSPC, "error: cannot write the output")):
        monkeypatch.setattr("ds4cli.cli._close_stdout", lambda: None)
        monkeypatch.setattr(terminal.ReplyWriter, "end", raiser(OSError(number, "No space left")))
        result = run("hi")
        assert result.exit_code == 1
        assert result.stderr.startswith(message) and "Traceback" not in result.stderr


def raiser(error):
    def fail(*args):
        raise error

    return fail


# --- the rest -----------------------------------------------------------------------------------


def test_version_names_the_three_packages():
    """Guards: a bug report cannot say which MLX it is about."""
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert [part.split()[0] for part in result.stdout.split(", ")] == ["ds4cli", "mlx", "mlx-lm"]


@pytest.mark.parametrize(
    ("args", "pair"),
    [
        (["generate", "--batch", "in", "--json"], "`--batch` and `--json`"),
        (["generate", "--batch", "in", "--no-stream"], "`--batch` and `--no-stream`"),
        (["generate", "-q", "--stats", "hi"], "`--quiet` and `--stats`"),
        (["chat", "--no-save", "--with-cache"], "`--no-save` and `--with-cache`"),
    ],
)
def test_flags_that_exclude_each_other(args, pair):
    """Guards: one of two flags silently without effect."""
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and pair in result.stderr and not FakeEngine.loaded


def test_empty_input_loads_nothing():
    """Guards: a model loaded for a chat without a message."""
    result = subprocess.run(
        [sys.executable, "-m", "ds4cli", "chat", "-m", "no/such-model"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2 and "standard input is empty" in result.stderr


def test_completion_is_for_the_shell_that_was_named():
    """Guards: another shell's completion than the one asked for, or none for scenarios."""
    shown = CliRunner().invoke(app, ["--show-completion", "fish"])
    assert shown.exit_code == 0 and "complete --command" in shown.stdout
    wrong = CliRunner().invoke(app, ["--show-completion", "tcsh"])
    assert wrong.exit_code == 2 and "`tcsh`" in wrong.stderr
    variables = {
        **os.environ, "_DS4CLI_COMPLETE": "complete_bash", "COMP_WORDS": "ds4cli rewind-bench me",
        "COMP_CWORD": "2",
    }  # fmt: skip
    code = "import sys; sys.argv = ['ds4cli']; from ds4cli.cli import app; app()"
    found = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60
    )
    assert "memory" in found.stdout.split()


def test_an_unknown_command_names_the_nearest():
    """Guards: a typo prints a page of help instead of a line."""
    result = CliRunner().invoke(app, ["generat"])
    assert result.exit_code == 2 and "generate" in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat", "rewind-bench"])
def test_help_is_readable_at_80_columns(command):
    """Guards: `<bool>` behind every switch; names of options or choices broken in two or cut."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "<" not in shown and "…" not in shown
    words = set(shown.replace("│", " ").split())
    names = ["--dtype", "stored.", "rewind-bench" if command == "rewind-bench" else "--top-p"]
    assert {*names[:2]} <= words
    assert not any(len(word) > 30 for word in words if not set(word) & set("─╭╰"))


def test_help_lists_every_setting():
    """Guards: a setting without a word of help, or markup shown as text."""
    result = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"})
    for name, option in OPTIONS.items():
        assert "--" + name.replace("_", "-") in result.stdout
        assert option.help.split()[0] in result.stdout
    assert "[dim]" not in result.stdout and "[profiles.NAME]" in result.stdout


def test_help_stands_in_groups():
    """Guards: an option under another's title, a title twice, what commands do cut short."""
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "80"}).stdout
    groups = re.split(r"\n\n(.+):\n", shown)
    titles, texts = groups[1::2], groups[2::2]
    assert titles[:2] == ["Arguments", "Options"] and len(set(titles)) == len(titles)
    found = dict(zip(titles, texts, strict=True))
    for name, option in OPTIONS.items():
        assert re.search(rf"^  .*--{name.replace('_', '-')}\b", found[option.panel], re.MULTILINE)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    assert "Commands:\n  generate " in shown and "Looking around:\n  models " in shown
    assert "..." not in shown.partition("ARGS]...")[2]


def test_no_arguments_ask_for_help():
    """Guards: a page of help as one line of error."""
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and result.stderr == ""
    assert result.stdout == CliRunner().invoke(app, ["--help"]).stdout


def test_the_command_module_does_not_import_the_engine():
    """Guards: bad input waits seconds for MLX before it is refused."""
    tree = ast.parse(Path(generate.__file__).read_text())
    top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not any(node.module and "engine" in node.module for node in top)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[malloc] Unable to allocate 1000000000000 bytes."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("Resource temporarily unavailable"),
    ],
)
def test_short_memory_is_said_in_one_line(error, capsys):
    """Guards: `unexpected RuntimeError` for what the user can do something about."""
    assert explain(error) == 1
    assert capsys.readouterr().err.splitlines()[0] == "error: memory ran out"
