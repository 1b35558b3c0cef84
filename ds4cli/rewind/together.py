"""One model call for several timelines of one model: a block is opened on each, or on none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ds4cli.arrays import apart
from ds4cli.caches.stack import StackedSlots, stacked
from ds4cli.lanes.arm import Lanes
from ds4cli.lanes.call import Split
from ds4cli.rewind.layers import Layers
from ds4cli.rewind.timeline import Opening, Timeline
from ds4cli.tape.kept import UnlikeSlots
from ds4cli.tape.tape import Slots, Tape

Feed = list[int] | mx.array
Part = tuple[mx.array, Tape | None, list[mx.array]]  # logits rows, tape, what the taps noted


def feed_together(
    timelines: Sequence[Timeline],
    feeds: Sequence[Feed],
    lanes: Lanes,
    *,
    record: bool = True,
    last: bool = False,
) -> Split:
    """Open a block on every timeline with one model call. Returns each one's logits rows (n, V), or
    with `last`, where blocks are read that nobody goes back into, the last one only, (1, V).

    As `Timeline.feed` for each of them: nothing is published before its `commit`, and a second
    block may be opened on top, on tokens (1,) that are not known yet. If the call fails in the part
    of one, every timeline is where it was.
    """
    order = lanes.seat([timeline.caches for timeline in timelines])
    if order == [*range(len(order))]:
        ordered, fed = timelines, feeds
    else:
        ordered, fed = [timelines[i] for i in order], [feeds[i] for i in order]
    openings: list[Opening] = []
    try:
        for timeline in ordered:
            openings.append(timeline.opening())
        parts, live, whole = _call(ordered, fed, lanes, record, last)
        for timeline, opening, feed, part in zip(ordered, openings, fed, parts, strict=True):
            timeline.open(opening, feed, *part, live)
        if fed is feeds:
            return Split([part[0] for part in parts], whole)
        return Split([parts[order.index(i)][0] for i in range(len(order))])
    except BaseException:
        for timeline, opening in zip(ordered, openings, strict=False):
            timeline.undo(opening)
        raise


def _call(
    timelines: Sequence[Timeline], feeds: Sequence[Feed], lanes: Lanes, record: bool, last: bool
) -> tuple[list[Part], Any, mx.array]:
    """The model call: each timeline's part of it, what all of them left in the layers, and the
    rows of all."""
    first, sizes = timelines[0], [len(feed) for feed in feeds]
    layers: list[Layers] = []
    for timeline, rows in zip(timelines, sizes, strict=True):
        layers.append(timeline.before_call(rows, layers))
    caches = [own.caches for own in layers]
    recorder = first.recorder if record and layers[0].recurrent else None
    is_plain = not last and (recorder is None or recorder.sizes.row > 0)
    batch = lanes.batch(sizes, caches) if is_plain else None
    tapes: list[Tape | None] = [None] * len(timelines)
    noted: list[mx.array] = []
    with ExitStack() as around:
        if first.taps is not None:
            noted = around.enter_context(first.taps.noting())
        if recorder is not None and batch is not None:
            call = recorder.recording_batch(batch.states, len(sizes), sizes[0])
            tapes = [*around.enter_context(call)]
        elif recorder is not None:
            recurrent = [own.recurrent_caches for own in layers]
            tapes = [*around.enter_context(recorder.recording_lanes(recurrent, sizes))]
        if last:
            around.enter_context(first.last_rows([end - 1 for end in accumulate(sizes)]))
        logits, live = (batch or lanes).call(feeds, caches)
    tapes = [tape if t.recording else None for t, tape in zip(timelines, tapes, strict=True)]
    hidden = zip(*(apart(x, sizes) for x in noted), strict=True) if noted else ((),) * len(sizes)
    if last:
        logits, sizes = _last(logits, sizes), [1] * len(sizes)
    found = apart(logits, sizes)
    return list(zip(found, tapes, map(list, hidden), strict=True)), live, logits


def _last(logits: mx.array, sizes: Sequence[int]) -> mx.array:
    """The last row of each lane (lanes, V), where a model made those only, or all rows."""
    if len(logits) == len(sizes):
        return logits
    return logits[mx.array([*accumulate(sizes)]) - 1]


def evaluate_together(timelines: Sequence[Timeline], *arrays: mx.array, wait: bool = True) -> None:
    """Evaluate the newest open block of every timeline with `arrays` in one go; on failure all open
    blocks of all of them are undone.

    wait False only starts the work.
    """
    run = mx.eval if wait else mx.async_eval
    try:
        rows, live = zip(*[timeline.pending() for timeline in timelines], strict=True)
        run(*arrays, rows, list({id(tree): tree for tree in live}.values()))
    except BaseException:
        for timeline in timelines:
            timeline.abort()
        raise


def replay_together(timelines: Sequence[Timeline], rows: Sequence[int]) -> None:
    """Before each timeline commits so many rows of its oldest block: what is replayed for that. Of
    lanes that were a batch in one go, else of all where they are equally many."""
    due = [timeline.to_replay() for timeline in timelines]
    parts = [(t, n, *own) for t, n, own in zip(timelines, rows, due, strict=True) if own]
    cut = [(t, n, tape, starts) for t, n, tape, starts in parts if n < tape.rows]
    if not cut or (len(parts) == len(timelines) and _replay_batch(parts)):
        return
    by_rows: dict[int, list[tuple[Timeline, Tape, Slots]]] = {}
    for timeline, n, tape, starts in cut:
        by_rows.setdefault(n, []).append((timeline, tape, starts))
    for n, due_parts in by_rows.items():
        owners, tapes, starts_each = zip(*due_parts, strict=True)
        each = Tape.replay_all(tapes, starts_each, n)
        mx.async_eval(each)
        for timeline, slots in zip(owners, each, strict=True):
            timeline.replayed(n, slots)


def _replay_batch(parts: Sequence[tuple[Timeline, int, Tape, Slots]]) -> bool:
    """Whether the lanes were one batch, and their states, which lie in one stack, were moved."""
    stack, whole = parts[0][0].stack, parts[0][2].whole
    if stack is None or whole is None or len(parts) != len(stack.has_all):
        return False
    if any([t.stack is not stack or tape.whole is not whole for t, _, tape, _ in parts]):
        return False
    by_lane = sorted(parts, key=lambda part: part[2].lane)
    try:
        moved = whole.replay_each(
            stacked([own for *_, own in by_lane]), [n for _, n, *_ in by_lane]
        )
    except UnlikeSlots:
        return False
    mx.async_eval(moved)
    stack.layers = list(moved)
    for timeline, n, tape, _ in parts:
        if n < tape.rows:
            timeline.replayed(n, StackedSlots(stack.layers, tape.lane))
    return True
