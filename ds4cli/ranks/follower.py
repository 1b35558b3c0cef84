"""What every rank but the first runs: it loads its part and does what rank 0 tells."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ds4cli import terminal
from ds4cli.engine.engine import Engine
from ds4cli.errors import DS4Error, RankError, UsageError
from ds4cli.ranks import joining
from ds4cli.ranks.group import END, LAST_WORDS_S, Following
from ds4cli.ranks.timelines import part_of
from ds4cli.rewind.timeline import Limits, Timeline

# Moves that rank 0 waits for the outcome of.
ANSWERED = ("plan", "write", "read", "stand")


# Work of another kind that rank 0 may begin: by its first word, what does it.
Works = Mapping[str, Callable[..., None]]


def run(works: Works) -> int:
    """Follow rank 0 to the end. Ctrl-C is rank 0's business. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    group = joining.follow()
    try:
        follow(group, works)
    except RankError:  # that thread of the group says why, or that all is well
        time.sleep(LAST_WORDS_S)
        return 1
    except Exception as error:  # whatever it is, rank 0 has to hear of it
        if isinstance(error, UsageError):  # rank 0 finds that too, and says it with its hint
            time.sleep(LAST_WORDS_S)
        said = error.message if isinstance(error, DS4Error) else f"{type(error).__name__}: {error}"
        group.last_words(terminal.one_line(said))
        time.sleep(LAST_WORDS_S)
        return 1
    return 0


def follow(group: Following, works: Works) -> None:
    """Load what rank 0 loads, and do its moves."""
    follower = _Follower(group)
    while True:
        name, *rest = group.next()
        if name == END:
            mx.synchronize()
            return
        if name in works:
            works[name](group, *rest)
            return
        follower.do(name, *rest)


class _Follower:
    """What rank 0 has here: its model, and timelines by the numbers that it gave them. One method a
    move, named as it is told; those of a timeline stand there."""

    def __init__(self, group: Following):
        self._group = group
        self._engine: Engine | None = None
        self._timelines: dict[int, Timeline] = {}

    def do(self, name: str, *rest: Any) -> None:
        """One move."""
        own = getattr(self, f"do_{name}", None)
        if own is not None:
            own(*rest)
            return
        number, *more = rest
        answer = getattr(self._timelines[number], f"do_{name}")(*more)
        if name in ANSWERED:
            self._group.answer(answer)

    def do_load(self, fields: dict[str, Any]) -> None:
        """This rank's part of a model."""
        self._timelines.clear()
        # Drafts are made on rank 0.
        alone = {"speculate": "never", "draft_model": None, "corpus": None}
        self._engine = Engine.load(group=self._group, **{**fields, **alone})

    def do_rename(self, path: str, new: str) -> None:
        """A kept session has another name."""
        old = part_of(path, self._group.rank)
        if old.exists():
            old.replace(part_of(new, self._group.rank))

    def do_new(self, number: int) -> None:
        """An empty timeline."""
        assert self._engine is not None, "rank 0 loads first"
        self._timelines[number] = self._engine.scratch_timeline()

    def do_fork(self, number: int, given: dict[str, int] | None, twin: int) -> None:
        """A twin of a timeline."""
        limits = None if given is None else Limits(**given)
        self._timelines[twin] = self._timelines[number].fork(limits)

    def do_drop(self, number: int) -> None:
        """Nobody has that timeline any more; or it was one of a model before this one."""
        self._timelines.pop(number, None)
