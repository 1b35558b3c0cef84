"""Signals: however the process ends, the terminal is as it was and files are whole."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from ds4cli import signals

LIMIT_S = 60


class OnTerminal:
    """A process of `python ARGS` on a terminal of its own, and all that it has written."""

    def __init__(self, *args: object, **environment: str):
        self.ours, theirs = pty.openpty()
        self.modes = termios.tcgetattr(self.ours)
        words = [sys.executable, *map(str, args)]
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
            env={**os.environ, "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(theirs)
        self.shown = b""

    def read(self, until: bytes) -> None:
        """Read on until this was shown, or to the end."""
        end = time.monotonic() + LIMIT_S
        while until not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.ours], [], [], 1)[0] and not self._take():
                return

    def _take(self) -> bool:
        try:
            data = os.read(self.ours, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.shown += data
        return bool(data)

    def end(self, number: int) -> int:
        """Send a signal; minus the signal that ended the process, or its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(LIMIT_S)
        while select.select([self.ours], [], [], 0)[0] and self._take():
            pass
        os.close(self.ours)
        return code


GENERATE = "generate", "hi", "-m"
CHAT = "-m", "ds4cli", "chat", "-m"


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in signals.DEADLY[1:])],
)
def test_a_prompt_is_left_as_it_was_found(model_folder, number):
    """Guards: a shell without echo, cursor or usable paste after `kill`; an exit code that hides
    the signal."""
    chat = OnTerminal(*CHAT, model_folder)
    chat.read(b">>>")
    ours = os.dup(chat.ours)
    assert termios.tcgetattr(ours) != chat.modes
    assert chat.end(number) == -number
    assert termios.tcgetattr(ours) == chat.modes
    os.close(ours)
    assert chat.shown.rindex(signals.SHOW_CURSOR) > chat.shown.rfind(b"\x1b[?25l")
    assert chat.shown.rindex(signals.END_PASTE) > chat.shown.rindex(b"\x1b[?2004h")


WRITING = """
import os, sys, time
from ds4cli.signals import Interrupts, Program, Whole
with Program(), Interrupts():
    with Whole():
        print("ready", flush=True)
        time.sleep(1)
        print("written", flush=True)
    time.sleep(60)
"""


def test_what_is_being_written_is_written_whole():
    """Guards: SIGTERM between the two halves of a line, or before its sync."""
    process = subprocess.Popen([sys.executable, "-c", WRITING], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.stdout.read() == b"written\n"
    assert process.wait(LIMIT_S) == -signal.SIGTERM
    process.stdout.close()


def test_the_tests_run_where_ctrl_c_is_ignored():
    """Guards: `pytest &` in a script waits for ever for processes that ignore our SIGINT."""
    words = [sys.executable, "-c", "import conftest, signal; print(signal.getsignal(2))"]
    done = subprocess.run(
        words, cwd=os.path.dirname(__file__), capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        timeout=300,
    )  # fmt: skip
    assert "default_int_handler" in done.stdout, done.stderr


def test_an_ignored_signal_stays_ignored():
    """Guards: `nohup` has no effect."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.Program():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signals.die
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("begin_s", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_while_it_starts(model_folder, begin_s):
    """Guards: a traceback, or a terminal without a cursor, from an impatient Ctrl-C."""
    for tenth in range(0, 8, 2 - begin_s):
        started = OnTerminal("-c", STARTED, *GENERATE, model_folder)
        started.read(b"begin")
        time.sleep(begin_s + tenth / 8)
        assert started.end(signal.SIGINT) in (130, -signal.SIGINT)
        assert b"Traceback" not in started.shown and b"Exception" not in started.shown
        hidden = started.shown.rfind(b"\x1b[?25l")
        assert started.shown.rfind(signals.SHOW_CURSOR) >= hidden


# As the console script does, which imports the package before anything of it runs.
STARTED = """
import sys
sys.argv[0] = "ds4cli"
import ds4cli
print("begin", flush=True)
from ds4cli.cli import app
app()
"""


def test_a_failure_says_what_is_kept(monkeypatch, capsys):
    """Guards: a chat that is ended by a lost rank, and nothing said about where it is."""
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(signals.Whole, "no_more", lambda: None)
    with signals.hinting(lambda: None), signals.hinting(lambda: "it is kept"):
        signals.fail_now("rank 1 is gone")
    signals.fail_now("rank 2 is gone")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["error: rank 1 is gone", "hint: it is kept", "error: rank 2 is gone"]
