"""The real `ds4cli chat` in a terminal and between pipes, with a tiny random hybrid on disk."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest
import talk
from folder import save_folder

from ds4cli.chat import journal

READY = "\x1b[?2004h"  # the prompt asks the terminal for bracketed paste
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny hybrid with room for a long chat."""
    path = tmp_path_factory.mktemp("pty") / "model"
    return save_folder(path, "lfm2", max_position_embeddings=8192)


def environment(**more: str) -> dict[str, str]:
    """A terminal that answers no questions about its cursor."""
    names = "TERM", "COLUMNS", "LINES"
    clean = {k: v for k, v in os.environ.items() if k not in names}
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {
        **clean,
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "PYTHONPATH": paths,
        **more,
    }


def arguments(folder: Path, *more: str) -> list[str]:
    bias = [f"--logit-bias={i}={b}" for i, b in talk.LETTERS_ONLY.items()]
    return ["-m", "ds4cli", "chat", "-m", str(folder), "-n", "12", "--temp", "0", *bias, *more]


class Terminal:
    """A chat in a pty."""

    def __init__(self, folder: Path, *more: str, size=(24, 80), **variables: str):
        self.child = pexpect.spawn(
            sys.executable,
            arguments(folder, *more),
            env=environment(**variables),
            dimensions=size,
            encoding="utf-8",
            timeout=60,
        )
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.close(force=True)

    def ready(self) -> str:
        """Wait for the prompt; what was shown before it, without escapes."""
        self.child.expect_exact(READY)
        self.shown = ESCAPES.sub("", self.child.before)
        return self.shown

    def say(self, text: str) -> str:
        """Type a line; what the program shows up to its next prompt."""
        self.child.send(text + "\r")
        return self.ready()

    def leave(self) -> int:
        """Press Ctrl-D; the exit code."""
        self.child.sendcontrol("d")
        return self.ended()

    def ended(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -1


def state_folder() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "ds4cli"


def stored_line(name: str):
    return journal.read(state_folder() / "sessions" / f"{name}.jsonl").transcript.line


def check_stored(folder: Path, name: str) -> list[str]:
    """The file's replies are what a fresh engine gives; its turns' texts."""
    line = stored_line(name)
    engine = talk.load(folder, logit_bias={**talk.LETTERS_ONLY, talk.END: -1000.0})
    for number, turn in enumerate(line.turns, 1):
        if turn.is_reply and turn.tokens:
            start, end = line.span(number)
            session = engine.session()
            session.sync(line.tokens[:start])
            list(session.stream(max_tokens=end - start))
            assert session.tokens[start:] == list(turn.tokens), f"turn {number}"
    return [turn.content for turn in line.turns]


# -- a terminal ----------------------------------------------------------------------------------


def test_a_conversation(folder):
    """Guards: the whole path from keys to a stored session."""
    with Terminal(folder, "--session", "a") as term:
        term.ready()
        assert "tok/s" in term.say("hello")
        assert "dropped" in term.say("/undo")
        term.say("again")
        assert "again" in term.say("/turns")
        assert "did you mean `/undo`" in term.say("/undp")
        assert term.leave() == 0
    assert check_stored(folder, "a")[0] == "again"
    modes = {p.name: p.stat().st_mode & 0o777 for p in state_folder().rglob("*") if p.is_file()}
    assert set(modes.values()) == {0o600} and "history.jsonl" in modes


def test_pastes_wide_characters_and_several_lines(folder):
    """Guards: a paste sent line by line, or characters of two columns or four bytes torn apart."""
    with Terminal(folder, "--session", "a") as term:
        term.ready()
        term.say("\x1b[200~def f():\r\n    return 1\n\n# 漢字 🙂\x1b[201~")
        term.child.send("first\\\r")
        term.say("second")
        term.child.send("one\x1b\r")
        term.say("two")
        term.child.send('"""a\r')
        term.say('b"""')
        assert term.leave() == 0
    said = [turn.content for turn in stored_line("a").turns if turn.role == "user"]
    assert said == ["def f():\n    return 1\n\n# 漢字 🙂", "first\nsecond", "one\ntwo", "a\nb"]


@pytest.mark.slow
def test_history_search_and_completion(folder):
    """Guards: Up, Ctrl-R and Tab doing nothing, or history lost between two runs."""
    with Terminal(folder, "--session", "a") as term:
        term.ready()
        term.say("a message to find")
        term.leave()
    with Terminal(folder, "--session", "a") as term:
        term.ready()
        term.say("\x12to find\r")
        time.sleep(0.2)
        term.child.send("/tu\t")
        time.sleep(0.5)
        assert "a message to find" in term.say("")
        term.leave()
    said = [turn.content for turn in stored_line("a").turns if turn.role == "user"]
    assert said == ["a message to find", "a message to find"]


@pytest.mark.slow
def test_no_history(folder):
    """Guards: typed lines written to disk against the user's wish."""
    with Terminal(folder, "--no-history", "--no-save") as term:
        term.ready()
        term.say("/help")
        term.leave()
    assert not list(state_folder().rglob("*.jsonl"))


def test_ctrl_c_at_the_prompt(folder):
    """Guards: Ctrl-C on a typed line leaving the chat, or losing the line."""
    with Terminal(folder) as term:
        term.ready()
        term.child.send("half a line")
        time.sleep(0.3)
        term.child.sendcontrol("c")
        assert "again" in term.ready()
        time.sleep(1.1)
        term.child.sendcontrol("c")
        assert "again" in term.ready()
        term.child.sendcontrol("c")
        assert term.ended() == 130
    assert "half a line" in (state_folder() / "history.jsonl").read_text()


def test_ctrl_c_typing_ctrl_c_does_not_leave(folder):
    """Guards: a second Ctrl-C that was meant for what was typed after the first, sent or not."""
    with Terminal(folder) as term:
        term.ready()
        term.child.sendcontrol("c")
        term.ready()
        term.child.send("x")
        term.child.expect("x")
        term.child.sendcontrol("c")
        assert "again" in term.ready()
        term.say("/turns")
        term.child.sendcontrol("c")
        assert "again" in term.ready()
        assert term.leave() == 0


def test_keys_typed_while_the_model_writes_wait_unseen(folder):
    """Guards: typed keys in the middle of a reply, or keys that are lost."""
    endless = f"--logit-bias={talk.END}=-1000"
    with Terminal(folder, "-n", "9000", endless) as term:
        term.ready()
        term.child.send("go\r")
        term.child.expect_exact("\x1b[?2004l")
        term.child.expect("[a-z ]{40}")
        term.child.send("7531")
        term.child.expect("[a-z ]{40}")
        term.child.sendintr()
        assert "stopped" in term.ready() and "7531" not in term.shown
        term.child.expect_exact("7531")
        term.child.sendcontrol("c")
        term.ready()
        term.leave()


def test_what_is_typed_while_a_message_is_read_comes_before_it(folder, tmp_path):
    """Guards: a command typed meanwhile glued to the message that comes back, and both sent."""
    (tmp_path / "long").write_text("word " * 1500)
    with Terminal(folder) as term:
        term.ready()
        term.say(f"/file {tmp_path / 'long'}")
        term.child.send("last\r")
        term.child.expect_exact("\x1b[?2004l")
        term.child.send("/set temp\r")
        term.child.sendintr()
        assert "waits for the next prompt" in term.ready()
        assert "temp" in term.ready()  # the command has run
        term.child.expect_exact("last")
        term.child.sendcontrol("c")
        term.ready()
        term.leave()
    assert not list((state_folder() / "sessions").glob("*"))


@pytest.mark.slow
def test_a_window_that_changes_its_size(folder):
    """Guards: a crash or a torn reply when the window is resized while the model writes."""
    with Terminal(folder, "--session", "a", size=(8, 30)) as term:
        term.ready()
        term.child.send("x" * 70 + "\r")
        for columns in (20, 90, 12, 50):
            term.child.setwinsize(10, columns)
            term.child.kill(signal.SIGWINCH)
            time.sleep(0.05)
        term.child.expect("tok/s")
        term.child.send("/turns\r")
        term.child.expect("assistant")
        assert term.leave() == 0
    check_stored(folder, "a")


@pytest.mark.slow
def test_a_storm_of_window_sizes(folder):
    """Guards: a crash, a lost key or a lost turn while a tiling window manager plays."""
    dice = random.Random(7)
    with Terminal(folder, "--session", "a", size=(24, 80)) as term:
        term.ready()
        for text in ("x" * 70, "second"):
            for key in [*text, "\r", *[""] * 100]:
                term.child.send(key)
                term.child.setwinsize(dice.choice((1, 2, 24, 60)), dice.choice((1, 7, 40, 80, 300)))
                time.sleep(0.005)
        term.child.setwinsize(24, 80)
        term.child.send("/turns\r")
        for _ in range(2):
            term.child.expect("assistant")
        assert term.leave() == 0
    assert check_stored(folder, "a")[::2] == ["x" * 70, "second"]


@pytest.mark.slow
def test_stopped_and_continued(folder):
    """Guards: a reply that is cut or torn, or a prompt that is dead, after SIGSTOP and SIGCONT."""
    with Terminal(folder, "--session", "a") as term:
        term.ready()
        for text in ("first", "second"):
            for key in [*text, "\r", *[""] * 20]:
                term.child.kill(signal.SIGSTOP)
                time.sleep(0.01)
                term.child.send(key)
                term.child.kill(signal.SIGCONT)
                time.sleep(0.02)
            term.child.expect("tok/s")
        assert "assistant" in term.say("/turns") + term.say("")
        assert term.leave() == 0
    assert check_stored(folder, "a")[::2] == ["first", "second"]


@pytest.mark.slow
def test_the_editor(folder, tmp_path):
    """Guards: /edit hanging, or the terminal left in a state where nothing can be typed."""
    script = tmp_path / "ed.py"
    script.write_text("import sys; p = sys.argv[1]; open(p, 'w').write('edited text')")
    with Terminal(folder, "--session", "a", EDITOR=f"{sys.executable} {script}", VISUAL="") as term:
        term.ready()
        term.say("the original")
        term.say("/edit")
        assert "edited text" in term.say("/turns")
        term.leave()
    assert check_stored(folder, "a")[0] == "edited text"


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_plain_terminals(folder, variables):
    """Guards: colours with NO_COLOR, or escapes on a terminal that cannot show them."""
    with Terminal(folder, **variables) as term:
        dumb = "TERM" in variables
        term.child.expect_exact(">>> " if dumb else READY)
        term.child.send("hello\r")
        term.child.expect("tok/s")
        shown = term.child.before
        reply = shown[shown.rindex("hello") + 5 :]
        assert not re.search(r"\x1b\[[0-9;]*m", re.sub(r"\x1b\[0?;?[02]?m", "", reply))
        if dumb:
            assert "\x1b" not in shown
        term.child.expect_exact(">>> " if dumb else READY)
        assert term.leave() == 0


@pytest.mark.slow
def test_stdout_to_a_file_still_prompts(folder, tmp_path):
    """Guards: a prompt written into the file that was meant for replies; no echo after it."""
    out = tmp_path / "out.txt"
    command = " ".join([sys.executable, *arguments(folder)]) + f" > {out}; stty -a"
    child = pexpect.spawn(
        "/bin/sh", ["-c", command], env=environment(), encoding="utf-8", timeout=60
    )
    child.expect_exact(READY)
    child.send("hello\r")
    child.expect("tok/s")
    child.expect_exact(READY)
    child.sendcontrol("d")
    child.expect(pexpect.EOF)
    assert {"icanon", "echo", "icrnl", "iexten"} <= set(child.before.split())
    child.close()
    assert re.fullmatch(r"[a-z ]*\n", out.read_text())


def test_interrupts_at_many_moments(folder):
    """Guards: a state torn by Ctrl-C: every reply stored must be what a fresh engine gives."""
    moments = random.Random(5)
    endless = f"--logit-bias={talk.END}=-1000"
    options = "--session", "a", "--prefill-step-size", "16", "-n", "900", endless
    with Terminal(folder, *options) as term:
        term.ready()
        for i in range(4):
            term.child.send(f"message {i} " + "and more of it " * 4 + "\r")
            term.child.expect_exact("\x1b[?2004l")
            time.sleep(moments.random() * 0.6)
            term.child.sendintr()
            if "not sent" in term.ready():
                term.child.sendcontrol("c")  # clear the line that came back
                term.ready()
                time.sleep(1.1)
        term.say("/set max_tokens 5")
        term.say("the last one")
        assert term.leave() == 0
    assert len(check_stored(folder, "a")) >= 2


@pytest.mark.parametrize("delay_s", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_kill(folder, delay_s):
    """Guards: a kill losing more than the open turn, or a session that cannot be opened again."""
    with Terminal(folder, "--session", "a", "-n", "2000") as term:
        term.ready()
        term.say("/set max_tokens 5")
        term.say("the first")
        term.say("/set max_tokens 2000")
        term.child.send("the second\r")
        term.child.expect_exact("\x1b[?2004l")
        time.sleep(delay_s)
        term.child.kill(signal.SIGKILL)
        term.ended()
    assert check_stored(folder, "a")[0] == "the first"
    with Terminal(folder, "--session", "a") as term:
        shown = term.ready()
        assert "session `a`" in shown
        term.say("" if "not sent" in shown else "the third")
        assert term.leave() == 0
    check_stored(folder, "a")


@pytest.mark.slow
def test_one_session_in_two_terminals(folder):
    """Guards: two chats writing into one file."""
    with Terminal(folder, "--session", "a") as term:
        term.ready()
        term.say("hello")
        done = piped(folder, "more\n", "--session", "a")
        assert done.returncode == 1 and "another chat" in done.stderr
        term.leave()


# -- pipes ---------------------------------------------------------------------------------------


def piped(folder: Path, text: str | bytes, *more: str, **variables: str):
    data = text.encode() if isinstance(text, str) else text
    done = subprocess.run(
        [sys.executable, *arguments(folder, *more)],
        input=data,
        capture_output=True,
        env=environment(**variables),
        timeout=120,
    )
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def test_a_pipe_is_plain(folder):
    """Guards: escapes, prompts or statistics in piped output (mlx_lm.chat prints control bytes)."""
    done = piped(folder, "hello\nand again\n")
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr
    assert re.fullmatch(r"[a-z ]*\n[a-z ]*\n", done.stdout)
    assert "tok/s" not in done.stderr
    assert not (state_folder() / "sessions").exists()


@pytest.mark.slow
def test_single(folder):
    """Guards: a piped file answered line by line."""
    done = piped(folder, "hello\nand again\n", "--single")
    assert done.returncode == 0 and done.stdout.count("\n") == 1


@pytest.mark.slow
def test_nothing_piped(folder):
    """Guards: an error for an empty input."""
    assert piped(folder, "").returncode == 0


@pytest.mark.slow
def test_a_failed_command_shows_in_the_exit_code(folder):
    """Guards: a script that cannot see that a message was refused; or that stops there."""
    done = piped(folder, "/undo\nhello\n")
    assert done.returncode == 1 and done.stdout.count("\n") == 1 and "error:" in done.stderr


@pytest.mark.slow
def test_forced_colour_reaches_no_pipe_as_animation(folder):
    """Guards: FORCE_COLOR making a piped chat draw a spinner or Markdown."""
    done = piped(folder, "hello\n", FORCE_COLOR="1")
    assert "\x1b[?25l" not in done.stderr and "\x1b" not in done.stdout


@pytest.mark.slow
def test_a_reader_that_goes_away(folder):
    """Guards: a traceback when the reader of the pipe ends first."""
    command = " ".join(arguments(folder))
    done = subprocess.run(
        ["/bin/sh", "-c", f"yes hello | head -50 | {sys.executable} {command} | head -1"],
        capture_output=True,
        env=environment(),
        timeout=120,
    )
    assert b"Traceback" not in done.stderr and done.stdout.count(b"\n") == 1


@pytest.mark.slow
def test_continue_in_a_pipe(folder):
    """Guards: -c in a script beginning a new chat, or another model than the stored one."""
    piped(folder, "hello\n", "--session", "a")
    command = [sys.executable, "-m", "ds4cli", "chat", "-c", "-n", "4"]
    done = subprocess.run(
        command, input=b"more\n", capture_output=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [turn.role for turn in stored_line("a").turns] == ["user", "assistant"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("<&-", 2, b"it is closed"),
        ("</dev/null", 0, b""),
        (">/dev/full <<E\nhello\nE", 1, b"cannot write the output"),
    ],
)
def test_odd_streams(folder, redirection, code, message):
    """Guards: a traceback for a closed input, or success with a full disk."""
    command = " ".join([sys.executable, *arguments(folder), redirection])
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, env=environment(), timeout=300
    )
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


@pytest.mark.slow
def test_a_state_folder_that_cannot_be_made(folder):
    """Guards: a model being loaded for a chat that cannot be kept."""
    done = piped(folder, "hello\n", "--session", "a", XDG_STATE_HOME="/proc/none")
    assert done.returncode == 2 and "XDG_STATE_HOME" in done.stderr


@pytest.mark.slow
def test_usage_errors_load_nothing(folder):
    """Guards: a model being loaded before a mistake is reported."""
    done = piped(folder, "", "-c")
    assert done.returncode == 2 and "no session" in done.stderr
    done = piped(folder, "", "--session", "../x")
    assert done.returncode == 2 and "cannot name" in done.stderr


@pytest.mark.slow
def test_the_file_can_be_read_with_jq(folder):
    """Guards: a session format that only this program reads."""
    piped(folder, "hello\n", "--session", "a")
    path = state_folder() / "sessions" / "a.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["format"] == 1 and records[0]["model"] == str(folder)
    changes = [record for r in records for record in (r if isinstance(r, list) else [r])]
    assert [r["role"] for r in changes if "role" in r] == ["user", "assistant"]
