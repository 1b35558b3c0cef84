"""How far a batch is: a bar on a terminal, a line per tenth otherwise. All of it on stderr."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4cli import terminal

if TYPE_CHECKING:
    from rich.progress import Progress

# Of a pipe nobody knows what a tenth is.
LINES_PER_NOTE = 100


@dataclass
class Tally:
    """What was done so far.

    kept: lines answered by earlier runs. answered, failed: lines of this one. prompt_tokens: of
    their prompts; read_tokens: those that the model had to read. generated: tokens of answers.
    lanes: how many are written at a time.
    """

    kept: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0
    generated: int = 0
    lanes: int = 1

    @property
    def made(self) -> int:
        """Lines that this run has finished."""
        return self.answered + self.failed

    @property
    def done(self) -> int:
        return self.kept + self.made

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that were not read again."""
        return 1 - self.read_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class BatchProgress:
    """Shows a tally. total: lines to do, None where the input is a pipe."""

    def __init__(self, tally: Tally, total: int | None, show: bool):
        self._tally, self._total, self._show = tally, total, show
        self._begin = time.monotonic()
        self._bar: Progress | None = None
        self._noted = 0

    def __enter__(self) -> BatchProgress:
        if self._show and terminal.is_animated():
            self._bar = _bar()
            self._bar.add_task(self.words(), total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        """Show the tally as it stands."""
        if self._bar is not None:
            words = self.words()
            self._bar.update(self._bar.task_ids[0], completed=self._tally.done, description=words)
        elif self._show and self._is_tenth() and self._tally.done != self._total:
            terminal.note(f"{self.words()}, {_clock(self._remaining_s())} to go")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def _is_tenth(self) -> bool:
        done, total = self._tally.done, self._total
        tenth = done // LINES_PER_NOTE if total is None else 10 * done // total
        is_new, self._noted = tenth > self._noted, max(tenth, self._noted)
        return is_new

    def words(self) -> str:
        """The tally in one line."""
        tally = self._tally
        of = "" if self._total is None else f"/{self._total:,}"
        parts = [
            f"{tally.done:,}{of} done",
            f"{tally.failed:,} failed" if tally.failed else "",
            f"{tally.lanes} at a time" if tally.lanes > 1 else "",
            f"{_rate(tally.generated / self.seconds)} tok/s" if tally.generated else "",
            f"{tally.cached_share:.0%} of prompts cached" if tally.prompt_tokens else "",
        ]
        return ", ".join(part for part in parts if part)

    def summary(self) -> str:
        """The tally at the end, with the time it took."""
        return f"{self.words()}, in {_clock(self.seconds)}"

    def _remaining_s(self) -> float | None:
        if self._total is None or not self._tally.made:
            return None
        return self.seconds / self._tally.made * (self._total - self._tally.done)


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    return Progress(*columns, console=terminal.err(), transient=True)
