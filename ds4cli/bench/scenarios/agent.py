"""An agent's session with many tool calls, whose client rewrites the end of every reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds4cli.bench import trace
from ds4cli.bench.measure import Row, Sample, timed
from ds4cli.bench.scenarios.control import fingerprint

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.session import Session


@dataclass
class Played:
    """One session, played to its end. repairs: what every boundary took; seconds: all of it."""

    repairs: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""


def agent(lab: Lab) -> Iterator[Row]:
    """The same session twice: boundaries repaired with what was kept, and as forced misses."""
    messages = trace.scaled(trace.read(lab.trace), lab.matrix.scale)
    total = trace.length(messages)
    lab.refuse_beyond(total)
    reuse, rebuild = _play(lab, messages, False), _play(lab, messages, True)
    match = reuse.output == rebuild.output if lab.is_exact else None
    yield from _rows("reuse", "rebuild", reuse, total, match)
    yield from _rows("rebuild", "", rebuild, total, None)


def _rows(way: str, against: str, played: Played, total: int, match: bool | None) -> Iterator[Row]:
    shared: dict[str, Any] = {"against": against, "context_tokens": total}  # fields of Row
    count = len(played.repairs)
    spent = sum(s.seconds for s in played.repairs)
    how = Counter(s.source for s in played.repairs if s.source)
    note = ", ".join(f"{n} x {source}" for source, n in how.items())
    case = f"one of {count} boundaries"
    yield timed(
        played.repairs, "agent", case, way, match=match, note=note, are_repeats=False, **shared
    )
    yield Row("agent", "all boundaries", way, (spent,), unit="s", **shared)
    yield Row("agent", "the whole session", way, (played.seconds,), unit="s", **shared)
    share = 100 * spent / played.seconds if played.seconds else 0.0
    yield Row("agent", "share spent at boundaries", way, (share,), unit="%", **shared)


def _play(lab: Lab, messages: list[trace.Message], miss: bool) -> Played:
    """What the client sends is read, a reply is decoded, its end comes back redrawn. `miss`: then
    nothing that was kept is used."""
    played, session = Played(), lab.session()
    target: list[int] = []
    begin = lab.clock()
    for message in messages:
        if message.role != "assistant":
            target = target + lab.text.take(message.tokens, at=len(target))
            continue
        session.sync(target)
        lab.decode(session, message.tokens)
        target = _redrawn(lab, session.tokens, message.redrawn)
        if message.redrawn:
            session, repair = lab.rebuild(target) if miss else _reuse(lab, session, target)
            played.repairs.append(repair)
    session.sync(target)
    played.seconds = lab.clock() - begin
    played.output = fingerprint(session.tokens)
    return played


def _reuse(lab: Lab, session: Session, target: list[int]) -> tuple[Session, Sample]:
    return session, lab.sample(session, lambda: session.sync(target))


def _redrawn(lab: Lab, tokens: list[int], n: int) -> list[int]:
    """`tokens` with the last n written differently."""
    start = len(tokens) - n
    return tokens[:start] + lab.text.other(n, tokens[start], at=30_000 + start) if n else tokens
