"""How far a batch is, as a user reads it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ds4cli import terminal
from ds4cli.batch import progress as p
from ds4cli.batch.progress import BatchProgress, Tally

GONE = "\x1b[1A\x1b[2K"  # a line up, and that is empty


@pytest.fixture
def clock(monkeypatch):
    """Seconds since a progress began."""
    now = [100.0]
    monkeypatch.setattr(p.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def said(monkeypatch):
    """The lines that are said, nothing being a terminal."""
    lines: list[str] = []
    monkeypatch.setattr(terminal, "is_animated", lambda: False)
    monkeypatch.setattr(terminal, "note", lines.append)
    return lines


def shown(tally, total, done, show=True) -> list[int]:
    """At which of the numbers `done` of lines that are done something is said."""
    lines, at = [], []
    with BatchProgress(tally, total, show) as progress:
        for tally.answered in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(terminal, "note", lines.append)
                progress.update()
            at += [tally.answered] * (len(lines) > len(at))
    return at


def test_a_line_per_tenth(said):
    """Guards: a log with a line per request; the end said twice, here and in the summary."""
    assert shown(Tally(), 40, range(1, 41)) == list(range(4, 40, 4))
    assert shown(Tally(), 7, range(1, 8)) == [1, 2, 3, 4, 5, 6]
    assert shown(Tally(), 1000, [250, 260, 301]) == [250, 301]
    assert shown(Tally(kept=40), 100, [9, 10, 15, 20]) == [9, 10, 20]
    assert shown(Tally(), 40, range(1, 41), show=False) == []


def test_a_pipe_has_a_line_per_hundred(said):
    assert shown(Tally(), None, range(1, 301)) == [100, 200, 300]


def test_what_a_tally_says(clock):
    """Guards: rates and shares of what was never made; earlier lines counted as this run's."""
    tally = Tally()
    progress = BatchProgress(tally, None, True)
    clock[0] += 10
    assert progress.words() == "0 done" and progress.seconds == 10
    tally.kept, tally.answered, tally.failed, tally.lanes = 1000, 200, 34, 8
    tally.prompt_tokens, tally.read_tokens, tally.generated = 400, 100, 999
    words = "1,234 done, 34 failed, 8 at a time, 99.9 tok/s, 75% of prompts cached"
    assert progress.words() == words
    assert (tally.made, tally.done) == (234, 1234)
    tally.lanes, tally.failed, tally.prompt_tokens, tally.generated = 1, 0, 0, 1000
    assert progress.words() == "1,200 done, 100 tok/s"
    tally.generated = 12_340
    of = BatchProgress(tally, 5000, True)
    clock[0] += 1
    assert of.words() == "1,200/5,000 done, 12,340 tok/s"
    assert of.summary() == "1,200/5,000 done, 12,340 tok/s, in 0:00:01"


@pytest.mark.parametrize(
    ("tally", "total", "seconds", "left"),
    [
        (Tally(answered=9, failed=1), 40, 100, "0:05:00"),
        (Tally(kept=20, answered=10), 40, 3661, "1:01:01"),
        (Tally(kept=10), 40, 5, "?"),
        (Tally(answered=100), None, 5, "?"),
        (Tally(answered=1), 2, 3599.6, "1:00:00"),
    ],
)
def test_what_is_left_takes_as_long_as_what_this_run_made(clock, said, tally, total, seconds, left):
    """Guards: lines of an earlier run make this one look fast."""
    progress = BatchProgress(tally, total, True)
    clock[0] += seconds
    progress.update()
    (line,) = said
    assert line.endswith(f"{progress.words()}, {left} to go")


def test_a_terminal_has_a_bar_that_goes_away(clock, monkeypatch):
    """Guards: a bar on stdout; lines besides it; one that stays when the run is over."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    monkeypatch.setattr(terminal, "err", lambda: console)
    monkeypatch.setattr(terminal, "is_animated", lambda: True)
    monkeypatch.setattr(terminal, "note", lambda line: pytest.fail(line))
    tally = Tally()
    with BatchProgress(tally, 4, True) as progress:
        assert "0/4 done \x1b" in screen.getvalue(), "before the first answer, which may take long"
        tally.answered = 3
        progress.update()
        (task,) = progress._bar.tasks
        assert (task.completed, task.total) == (3, 4)
    drawn = screen.getvalue()
    assert "3/4 done \x1b" in drawn and "━" in drawn and "%" not in drawn and drawn.endswith(GONE)
    with BatchProgress(tally, 4, False) as quiet:
        quiet.update()
    assert screen.getvalue() == drawn
