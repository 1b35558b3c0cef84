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
    engine: Engine | None = None
    timelines: dict[int, Timeline] = {}
    while True:
        name, *rest = group.next()
        if name == "load":
            timelines.clear()
            # Drafts are made on rank 0.
            fields = {**rest[0], "speculate": "never", "draft_model": None, "corpus": None}
            engine = Engine.load(group=group, **fields)
            continue
        if name == END:
            mx.synchronize()
            return
        if name == "rename":
            old, new = (part_of(path, group.rank) for path in rest)
            if old.exists():
                old.replace(new)
            continue
        if name in works:
            works[name](group, *rest)
            return
        assert engine is not None, "rank 0 loads first"
        _do(group, engine, timelines, name, *rest)


def _do(
    group: Following,
    engine: Engine,
    timelines: dict[int, Timeline],
    name: str,
    number: int,
    *rest: Any,
) -> None:
    """One move of the timeline that rank 0 gave this number."""
    if name == "new":
        timelines[number] = engine.scratch_timeline()
    elif name == "fork":
        given, twin = rest
        limits = None if given is None else Limits(**given)
        timelines[twin] = timelines[number].fork(limits)
    elif name == "drop":
        timelines.pop(number, None)  # one of a model before this one
    else:
        answer = getattr(timelines[number], f"do_{name}")(*rest)
        if name in ANSWERED:
            group.answer(answer)
