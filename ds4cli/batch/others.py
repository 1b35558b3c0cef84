"""Batches over several ranks that hold the whole model each: rank 0 plans all lines and writes all
results, every rank answers lines as it becomes free.

What a line is answered with does not depend on who answers it, nor does its text; so one rank and
several make the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ds4cli import generate
from ds4cli.batch.desk import Desk, PlannedJob
from ds4cli.batch.progress import BatchProgress, Tally
from ds4cli.batch.requests import Item, parse
from ds4cli.batch.runner import Planner, Runner
from ds4cli.batch.width import Width
from ds4cli.errors import UsageError
from ds4cli.ranks.group import END, Following, Leading, versions
from ds4cli.ranks.meeting import meet
from ds4cli.settings import Settings
from ds4cli.structured.asked import from_settings
from ds4cli.tools.declared import tools_of

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.tools import Tool

BEGIN = "lines"
# Lines that a rank has beyond those that it writes, so that it never waits for the next.
AHEAD = 1
WAIT_S = 0.1
COUNTS = ("prompt_tokens", "read_tokens", "generated", "failed")


class Others:
    """The other ranks, as rank 0 sees them. plain: a line is a prompt. answered: lines that they
    have answered."""

    def __init__(self, group: Leading, plain: bool):
        self._group, self._plain = group, plain
        self.answered = 0
        self._in_work: dict[int, dict[int, Item]] = {rank: {} for rank in group.others}
        self._widths = dict.fromkeys(group.others, 1)

    @classmethod
    def meet(cls, settings: Settings, plain: bool) -> Others:
        """The ranks that a launcher, or `settings`, start. UsageError if there are none."""
        group = meet(settings)
        if group is None:
            hint = "start them with `--local-ranks N`, `--hostfile FILE` or `mlx.launch`"
            raise UsageError("`--data-parallel` needs other ranks", hint)
        return cls(group, plain)

    def begin(self, settings: Settings, tools: Sequence[Tool]) -> None:
        """Let them load the model, each all of it."""
        specs = [tool.spec for tool in tools]
        self._group.tell(BEGIN, asdict(settings), specs, self._plain)
        self._group.flush()

    def check(self, engine: Engine) -> None:
        """RankError unless all have loaded one model, and compute with it alike."""
        self._group.check(facts(engine))

    @property
    def are_busy(self) -> bool:
        """Whether some line is with them."""
        return any(self._in_work.values())

    @property
    def free(self) -> int | None:
        """Who would take a line."""
        room = {rank: self._widths[rank] + AHEAD - len(w) for rank, w in self._in_work.items()}
        rank = max(room, key=lambda rank: room[rank])
        return rank if room[rank] > 0 else None

    def give(self, rank: int, step: PlannedJob) -> None:
        """Have `step` answered there."""
        item = step.job.item
        self._in_work[rank][item.number] = item
        raw = item.raw.decode("utf-8", "surrogateescape")
        self._group.tell_one(rank, [item.number, raw, step.shared, [*step.checkpoints]])

    def finished(self, wait: bool) -> Iterator[tuple[Item, bytes, dict[str, int]]]:
        """Lines that are answered: result and counts. wait: a moment, if there are none."""
        for rank in self._group.have_said(WAIT_S if wait else 0.0):
            number, line, counts, self._widths[rank] = self._group.heard(rank)
            self.answered += 1
            yield self._in_work[rank].pop(number), line.encode(), counts


def facts(engine: Engine) -> dict[str, Any]:
    """What has to be equal where one rank's answers stand for another's."""
    return {
        "model": engine.fingerprint,
        "versions": versions(),
        "type of weights": f"float32={engine.is_float32}",
    }


def answer_lines(
    group: Following, fields: dict[str, Any], specs: list[dict[str, Any]], plain: bool
) -> None:
    """What the other ranks do: answer the lines that rank 0 gives, until it ends this process."""
    settings, tools = Settings(**fields), tools_of(specs, "rank 0") if specs else []
    engine = generate.load_engine(settings, tools=tools, quiet=True, shares=False)
    group.check(facts(engine))
    planner = Planner(engine, engine.settings, tools, False, from_settings(settings))
    desk = Desk(engine, Width.of(engine), lambda text: None)
    taker = Taker(group, engine, planner, desk, plain)
    taker.take_lines()


class Given:
    """Results as they go to rank 0, which writes them."""

    resume_hint = ""

    def __init__(self, group: Following, tally: Tally):
        self._group, self._tally = group, tally
        self._told = dict.fromkeys(COUNTS, 0)
        self._made: tuple[int, str] | None = None  # not told yet

    def expect(self, item: Item) -> bool:
        """There are no earlier results here."""
        return False

    def put(self, item: Item, line: bytes) -> None:
        """The result of an item: it is told when it is counted too."""
        self._made = item.number, line.decode()

    def tell(self) -> None:
        """Tell the last result, and what was counted since the one before."""
        assert self._made is not None, "it was put"
        now = {name: getattr(self._tally, name) for name in COUNTS}
        counts = {name: now[name] - self._told[name] for name in COUNTS}
        self._told = now
        self._group.answer([*self._made, counts, self._tally.lanes])


class Taker(Runner):
    """Answers what rank 0 gives. plain: a line is a prompt."""

    def __init__(self, group: Following, engine: Engine, planner: Planner, desk: Desk, plain: bool):
        tally = Tally()
        self._given = Given(group, tally)
        super().__init__(engine, planner, self._given, lambda: False, desk)
        self.tally, self._group, self._plain = tally, group, plain

    def take_lines(self) -> None:
        """To the end."""
        self._progress, self._todo = BatchProgress(self.tally, None, False), self._told()
        choices = self._choices()
        while self._begin_some(choices) or self.desk.writing:
            self._go_on()

    def _count(self) -> None:
        super()._count()
        self._given.tell()

    def _told(self) -> Iterator[PlannedJob | None]:
        while True:
            if (self.desk.writing or self._ready) and not self._group.is_told:
                yield None
                continue
            move = self._group.next()
            if move == [END]:
                self._is_last = True
                return
            number, raw, shared, checkpoints = move
            item = parse(number, raw.encode("utf-8", "surrogateescape"), self._plain)
            yield PlannedJob(self.planner.job(item), shared, checkpoints)
