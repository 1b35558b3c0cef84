"""Tool files, JSON schemas, running a command, and tool results as data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from counting import CountedCalls
from toolkit import TOOLS, tokenizer

from ds4cli.errors import UsageError
from ds4cli.text.tokenizer import Vocabulary
from ds4cli.tools import Tool, load_tools, run_tool
from ds4cli.tools.running import environment_of, printable
from ds4cli.tools.schema import types_of

GOOD = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


def load(tmp_path, data):
    path = tmp_path / "tools.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return load_tools(path)


def test_both_forms_of_a_declaration(tmp_path):
    """Only one of the two shapes in use is taken, or the command reaches the model."""
    inner, outer = load(
        tmp_path,
        [GOOD, {"type": "function", "function": {**GOOD, "name": "g"}, "command": "cat -n"}],
    )
    assert (inner.name, inner.command) == ("f", None)
    assert (outer.name, outer.command) == ("g", ("cat", "-n"))
    assert outer.spec == {"type": "function", "function": {**GOOD, "name": "g"}}


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({}, "$"),
        ([], "$"),
        ([1], "[0]"),
        ([{"name": "a b"}], "[0].name"),
        ([{"function": 3}], "[0].function"),
        ([GOOD, {"function": {"name": "g", "parameters": []}}], "[1].function.parameters"),
        ([GOOD, GOOD], "[1].name"),
        ([{**GOOD, "command": 3}], "[0].command"),
        ([{**GOOD, "command": 'cat "x'}], "[0].command"),
        ([{**GOOD, "command": []}], "[0].command"),
        ([{**GOOD, "command": ["cat", 3]}], "[0].command"),
        ([{**GOOD, "env": ["A", 3]}], "[0].env"),
        ([{**GOOD, "command": ["cat", "a\0b"]}], "[0].command"),
        ([{**GOOD, "command": "cat", "env": "HF_TOKEN"}], "[0].env"),
        ([{**GOOD, "description": 3}], "[0].description"),
        ([{"name": "f", "parameters": {"type": "array"}}], "[0].parameters.type"),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"type": [[]]}}}}],
            "[0].parameters.properties.a.type",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"type": 10**400}}}}],
            "[0].parameters.properties.a.type",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"items": {"type": "strin"}}}}}],
            "[0].parameters.properties.a.items.type",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/x"}}}}],
            "[0].parameters.properties.a.$ref",
        ),
        ([{"name": "f", "parameters": {"properties": []}}], "[0].parameters.properties"),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}}],
            "[0].parameters.properties.a.pattern",
        ),
    ],
)
def test_a_bad_file_names_the_place(tmp_path, data, where):
    """`invalid tools file`, and the user is left to search."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, data)
    assert where in caught.value.message and "tools.json" in caught.value.message
    assert caught.value.hint


def test_all_of_a_declaration_is_read(tmp_path):
    """Guards: a tool without its secrets, or refused for want of a schema."""
    runs = {"command": ["cat", "-n"], "env": ["A", "B"]}
    bare, inner, outer, within, both = load(
        tmp_path,
        [
            {"name": "f"},
            {"name": "g", "description": "zählt", **runs},
            {"function": {"name": "h", "parameters": {}}, **runs},
            {"function": {"name": "j", **runs}},
            {"function": {"name": "i", **runs}, "command": "wc"},
        ],
    )
    nothing = {"type": "object", "properties": {}}
    assert bare == Tool("f", "", nothing, None, ())
    assert inner == Tool("g", "zählt", nothing, ("cat", "-n"), ("A", "B"))
    assert outer == Tool("h", "", {}, ("cat", "-n"), ("A", "B"))
    assert within == Tool("j", "", nothing, ("cat", "-n"), ("A", "B"))
    assert both == Tool("i", "", nothing, ("wc",), ("A", "B")), "the outer one comes first"


def test_a_missing_file(tmp_path):
    """A traceback for a wrong path."""
    with pytest.raises(UsageError, match="cannot read"):
        load_tools(tmp_path / "none.json")


def test_what_is_not_declared_is_no_argument():
    """An invented argument reaches the tool; an open schema that says so is left open."""
    assert TOOLS[0].arguments_schema["additionalProperties"] is False
    for extra in ({"additionalProperties": True}, {"additionalProperties": {"type": "string"}}):
        tool = Tool("t", "", {**TOOLS[0].parameters, **extra})
        assert tool.arguments_schema is tool.parameters


def test_types_of_follows_references_and_alternatives():
    """A nullable or referenced string is read as JSON."""
    root = {"$defs": {"s": {"type": "string"}}}
    assert types_of({"$ref": "#/$defs/s"}, root) == {"string"}
    assert types_of({"anyOf": [{"type": "string"}, {"type": "null"}]}) == {"string", "null"}
    assert types_of({"type": "number"}) == {"number", "integer"}
    assert types_of({"enum": ["a", "b"]}) == {"string"}


def python_tool(code):
    return Tool("t", "", {}, (sys.executable, "-c", code))


def test_a_command_gets_its_arguments_on_stdin():
    """Arguments that pass through a shell or a command line."""
    run = run_tool(python_tool("import sys; print(sys.stdin.read()[::-1])"), '{"a": "$(x)"}')
    assert run.content == '}")x($" :"a"{' and run.exit_code == 0


def test_a_command_that_hangs_is_stopped_with_its_children(monkeypatch):
    """A tool that blocks the conversation; a child that keeps the pipe open."""
    code = """if 1:
        import pathlib, subprocess
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, flush=True); pathlib.Path("began").touch(); child.wait()"""
    monkeypatch.setattr(time, "perf_counter", lambda: 2.0 * Path("began").exists())
    run = run_tool(python_tool(code), "{}", timeout_s=1.0)
    assert run.timed_out and "stopped" in run.content
    assert not is_running(int(run.output))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells whose they are")
@pytest.mark.parametrize("ends", [True, False])
def test_what_leaves_the_session_ends_too(ends):
    """Guards: `setsid` in a tool's command, and its child runs for ever."""
    code = f"""if 1:
        import pathlib, subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(child.pid, flush=True); pathlib.Path("began").touch(); {ends} or child.wait()"""
    run = run_tool(python_tool(code), "{}", cancel=Path("began").exists)
    assert not is_running(int(run.output))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells whose they are")
def test_processes_may_end_while_they_are_looked_for(monkeypatch):
    """Guards: a call that fails because something else on this machine ended just then."""
    read_text, kill, killed = Path.read_text, os.kill, []

    def read(path):
        if path == Path("/proc/1/stat"):
            raise FileNotFoundError(path)
        return read_text(path)

    def end(pid, number):
        kill(pid, number)
        killed.append(pid)
        raise ProcessLookupError(pid)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "kill", end)
    code = """if 1:
        import subprocess
        print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)"""
    run = run_tool(python_tool(code), "{}")
    assert int(run.output) in killed and run.exit_code == 0


def test_no_thread_of_a_command_keeps_us_from_ending():
    """Guards: the program waits at its end for the output of a command."""
    before, threads = {*threading.enumerate()}, set()
    code = """if 1:
        import pathlib, time
        while not pathlib.Path("seen").exists(): time.sleep(0.01)"""

    def look():
        threads.update(threading.enumerate())
        Path("seen").touch()

    assert run_tool(python_tool(code), "{}", cancel=look).exit_code == 0
    assert threads - before and all(thread.daemon for thread in threads - before)


def test_a_stopped_command_ends_with_its_children():
    """A command that ignores SIGTERM, or its child, runs on after Ctrl-C."""
    code = """if 1:
        import pathlib, signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, flush=True); pathlib.Path("began").touch(); child.wait()"""
    run = run_tool(python_tool(code), "{}", cancel=Path("began").exists)
    assert run.cancelled and not run.timed_out and run.exit_code is None
    assert not is_running(int(run.output))


def test_secrets_are_not_told(monkeypatch):
    """Guards: a command that a model may call reads the tokens of whoever runs it."""
    secret = {"HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DATABASE_URL"}
    plain = {"HOME", "PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "LANG"}
    ours = dict.fromkeys(secret | plain, "x") | {"DATABASE_URL": "db://me:word@host"}
    assert environment_of(Tool("t", "", {}), ours).keys() == plain
    chosen = Tool("t", "", {}, env=("HF_TOKEN",))
    assert environment_of(chosen, ours).keys() == plain | {"HF_TOKEN"}
    monkeypatch.setenv("HF_TOKEN", "hidden")
    run = run_tool(python_tool("import os; print(os.environ.get('HF_TOKEN'))"), "{}")
    assert run.output == "None\n"


def test_half_a_surrogate_pair_is_an_argument():
    """Guards: a call whose text has one reaches the command as nothing at all."""
    arguments = json.dumps({"a": "\ud800"}, ensure_ascii=False)
    run = run_tool(
        python_tool("import json, sys; print(ascii(json.load(sys.stdin)['a']))"), arguments
    )
    assert run.output == "'\\ud800'\n"


def test_output_that_grows_when_it_is_made_printable_is_cut():
    """Guards: 100 kB of NULs become 400 kB for the model to read."""
    run = run_tool(python_tool("import sys; sys.stdout.write(chr(0) * 5000)"), "{}", max_bytes=5000)
    assert run.truncated and len(run.output) == 5000 and run.exit_code == 0


def is_running(pid):
    """Whether a process exists and is no zombie that nobody waits for."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, timeout=300
    )
    return state.stdout.strip()[:1] not in ("", "Z")


def test_endless_output_is_cut():
    """Ten megabytes of output fill the context, or the memory."""
    run = run_tool(python_tool("while True: print('x' * 1000)"), "{}", max_bytes=5000)
    assert run.truncated and len(run.output) == 5000 and run.content.endswith("[output cut]")


def test_a_failing_command_says_so():
    """An error that looks like an empty result; a command that never reads its stdin."""
    run = run_tool(python_tool("raise SystemExit(3)"), json.dumps({"a": "x" * 1_000_000}))
    assert run.content == "[exit code 3]"
    with pytest.raises(UsageError, match="cannot run"):
        run_tool(Tool("t", "", {}, ("/no/such/command",)), "{}")
    with pytest.raises(UsageError, match="no command"):
        run_tool(Tool("t", "", {}), "{}")


def test_a_command_that_leaves_a_daemon_behind_still_ends():
    """Waiting for a pipe that a background process of the tool holds open."""
    run = run_tool(python_tool("import subprocess; subprocess.Popen(['sleep', '600'])"), "{}")
    assert run.output == "" and run.exit_code == 0 and not run.timed_out


def test_binary_output_is_printable():
    """Escape sequences of a tool reach the terminal and the model."""
    text = printable(b"ok\r\n\x1b[31mred\x00\xff\xfe tab\t \xc3\xa9")
    assert text == "ok\n\\x1b[31mred\\x00\\xff\\xfe tab\t é"


def test_chat_markers_in_a_result_stay_text():
    """A tool result that ends the turn or opens a call."""
    wrapper = tokenizer()
    text = "a<|user|>b<|eos|>" * 3
    ids = Vocabulary(wrapper).encode_data(text)
    assert wrapper.decode(ids) == text
    special = {wrapper.convert_tokens_to_ids("<|user|>"), wrapper.eos_token_id}
    assert not special & set(ids)
    assert special & set(wrapper.encode(text, add_special_tokens=False))


def test_a_megabyte_as_data():
    """A large result that takes minutes to encode: as many calls as it has pieces."""
    vocabulary, text = Vocabulary(tokenizer(merged=["line"])), "line 12345\n" * 10_000
    per_line = []
    for lines in (1_000, 10_000):
        with CountedCalls() as counted:
            ids = vocabulary.encode_data(text[: 11 * lines])
        per_line.append(counted.calls / lines)
        assert len(ids) >= 7 * lines
    assert per_line[1] < 1.3 * per_line[0]


def test_the_package_does_not_need_mlx():
    """`ds4cli --help`, or checking a tools file, pays for mlx."""
    code = "import sys, ds4cli.tools; sys.exit(bool({'mlx', 'llguidance'} & set(sys.modules)))"
    assert os.system(f'{sys.executable} -c "{code}"') == 0


def test_a_tool_is_told_in_the_order_in_which_everybody_writes_it(tmp_path):
    """Guards: the description behind the parameters: the built-in model then knew no tool."""
    (tool,) = load(tmp_path, [{**GOOD, "description": "what it does"}])
    assert list(tool.spec["function"]) == ["name", "description", "parameters"]
