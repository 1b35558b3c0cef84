"""What a user does to a conversation, until the next token: undo, retry, edits, branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4cli.bench.measure import Row, Sample, timed

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.session import Session

# Where the turns of the conversation end, as shares of its tokens; the last reply is generated.
TURNS = (
    ("system", 0.10), ("user", 0.30), ("assistant", 0.40), ("user", 0.60), ("assistant", 0.70),
    ("user", 0.95),
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """A target the user asks for. retry: the same tokens, another attempt."""

    name: str
    target: list[int]
    retry: bool = False


def edits(lab: Lab) -> Iterator[Row]:
    """Each edit on a conversation that is put back in between, against a fresh session."""
    for context in lab.contexts(0):
        yield from _in_context(lab, context)


def _in_context(lab: Lab, context: int) -> Iterator[Row]:
    ends = [max(i + 1, int(share * context)) for i, (_, share) in enumerate(TURNS)]
    session = _conversation(lab, ends)
    lab.decode(session, max(1, context - session.pos))
    whole = session.tokens
    for edit in _edits(lab, whole, ends):
        yield from _measure(lab, session, whole, edit)
    yield from _switch(lab, session, ends[-2])


def _conversation(lab: Lab, ends: list[int]) -> Session:
    """Turn by turn, with a chat's checkpoints."""
    session = lab.session()
    for (role, _), end in zip(TURNS, ends, strict=True):
        session.sync(lab.text.take(end))
        session.checkpoint("system" if role == "system" else "turn")
    return session


def _edits(lab: Lab, whole: list[int], ends: list[int]) -> list[Edit]:
    first, previous = ends[0], ends[4]
    changed = lab.text.other(ends[5] - previous, whole[previous], at=50_000)
    earlier = lab.text.other(ends[1] - first, whole[first], at=60_000)
    return [
        Edit("undo the last turn", whole[:previous]),
        Edit("retry the last reply", whole[: ends[5]], retry=True),
        Edit("edit the last user turn", whole[:previous] + changed),
        Edit("edit the first user turn", whole[:first] + earlier),
    ]


def _measure(lab: Lab, session: Session, whole: list[int], edit: Edit) -> Iterator[Row]:
    reuse: list[Sample] = []
    rebuild: list[Sample] = []
    for trial in lab.trials():
        session.attempt += edit.retry
        back = lab.sample(session, lambda: session.sync(edit.target))
        fresh, anew = lab.rebuild(edit.target)
        if trial >= 0:
            reuse.append(back)
            rebuild.append(anew)
        if lab.is_last(trial):
            match = lab.agree(session, fresh)
        session.sync(whole)
    yield from _rows(edit.name, len(whole), len(whole) - len(edit.target), reuse, rebuild, match)


def _switch(lab: Lab, session: Session, at: int) -> Iterator[Row]:
    """Two branches, each a session of its own; going to the other one."""
    session.sync(session.tokens[:at])
    branches = [session, session.fork()]
    for i, branch in enumerate(branches):
        branch.sync(branch.tokens + lab.text.take(64, at=70_000 + 999 * i))
    reuse: list[Sample] = []
    rebuild: list[Sample] = []
    for trial in lab.trials():
        branch = branches[trial % 2]
        branch.attempt += 1  # forgets the token that was already picked here
        there = lab.sample(branch, lambda: None)
        fresh, anew = lab.rebuild(branch.tokens)
        if trial >= 0:
            reuse.append(there)
            rebuild.append(anew)
        if lab.is_last(trial):
            match = lab.agree(branch, fresh)
    yield from _rows("switch to another branch", session.pos, 64, reuse, rebuild, match)


def _rows(
    case: str, context: int, distance: int, reuse: list[Sample], rebuild: list[Sample], match: bool
) -> Iterator[Row]:
    make: Callable[..., Row] = timed
    shared = {"context_tokens": context, "distance_tokens": max(0, distance)}
    yield make(reuse, "edits", case, "reuse", against="rebuild", match=match, **shared)
    yield make(rebuild, "edits", case, "rebuild", **shared)
