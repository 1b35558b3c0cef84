"""The horizon: the last rows that were fed, kept so that going back needs no model call.

Each model call leaves a segment: its tape (inputs of the recurrences, one row a token), its logits
rows, and, at some segments, a checkpoint: the recurrent slots at the segment's start, by reference.
A position is reached from the nearest checkpoint before it by replaying tape rows. The last segment
always has a checkpoint, so the last accepted block is reached from its own start.

A position is free where its tape and its logits row are kept, so both go together, oldest first,
and what is counted is what the arrays hold. Segments are immutable; a fork shares them.

Why its checkpoints do not stand among `Checkpoints`: they are good only while the rows behind them
are here, and go with these; so they are slots by reference, and no window is copied. Those bring
every layer back alone, and are thinned with distance. Counted after 900 tokens on five families,
ten each: no array is in both, so one list would save none, and make those of a hybrid with windows
larger by two fifths.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from ds4cli.backend.memory import page_bytes, taken_bytes
from ds4cli.hooks.cuda import switch
from ds4cli.rewind.room import Room
from ds4cli.tape.recorder import Recorder, Sizes
from ds4cli.tape.tape import Slots, Tape
from ds4cli.tape.tracks import spans

# Rows of a long call that one checkpoint serves.
PIECE_ROWS = 128


@dataclass
class Segment:
    """Rows start .. end of one or more model calls.

    tape: None for models without recurrent layers. logits: consecutive arrays (m, V), a row for
    each of ours; row i predicts the token at start + i + 1. checkpoint: recurrent slots at `start`,
    or None. cut_bytes: what the arrays of `logits` hold beside these rows, which are views of them.
    is_packed: whether it was copied, so that its arrays hold nothing else.
    """

    start: int
    end: int
    tape: Tape | None
    logits: Sequence[mx.array]
    checkpoint: Slots | None
    cut_bytes: int = 0
    is_packed: bool = False

    @property
    def rows(self) -> int:
        return self.end - self.start

    def row(self, pos: int) -> mx.array:
        """The logits row (V,) that predicts the token at pos."""
        index = pos - self.start - 1
        for rows in self.logits:
            if index < len(rows):
                break
            index -= len(rows)
        return rows[index]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of tape, logits and checkpoint."""
        tape = 0 if self.tape is None else self.tape.nbytes
        logits = taken_bytes(self.logits) + self.cut_bytes
        return tape + logits + slots_nbytes(self.checkpoint or [])

    def first(self, rows: int) -> Segment:
        """The first `rows` rows (views)."""
        tape = None if self.tape is None else self.tape.first(rows)
        return self._part(0, rows, tape, self.checkpoint)

    def last(self, rows: int, checkpoint: Slots | None) -> Segment:
        """The last `rows` rows (views); checkpoint: where they start."""
        tape = None if self.tape is None else self.tape.last(rows)
        return self._part(self.rows - rows, self.rows, tape, checkpoint)

    def _part(self, first: int, stop: int, tape: Tape | None, slots: Slots | None) -> Segment:
        logits = _cut(self.logits, first, stop)
        cut = taken_bytes(self.logits) + self.cut_bytes - taken_bytes(logits)
        return Segment(self.start + first, self.start + stop, tape, logits, slots, cut)

    def packed(self, first: int = 0, stop: int | None = None) -> Segment:
        """With layers first .. stop of the tape in few arrays; the logits too after the last."""
        tape = None if self.tape is None else self.tape.compact(first, stop)
        if tape is not None and stop is not None and stop < tape.layers:
            return replace(self, tape=tape)
        logits = self.logits
        if len(logits) > 1 or self.cut_bytes:
            logits = [mx.contiguous(logits[0]) if len(logits) == 1 else mx.concatenate([*logits])]
            mx.async_eval(logits)
        return Segment(self.start, self.end, tape, logits, self.checkpoint, is_packed=True)

    def split(self, rows: int) -> tuple[Segment, Segment]:
        """Before and after the first `rows` rows, in arrays of their own."""
        return self.first(rows).packed(), self.last(self.rows - rows, None).packed()

    def after(self) -> Slots | None:
        """The recurrent slots at the end, computed from those at the start."""
        if self.tape is None or self.checkpoint is None:
            return None
        slots = self.tape.replay(self.checkpoint, self.rows)
        mx.async_eval(slots)
        return slots


def slots_nbytes(slots: Slots) -> int:
    """Bytes of the recurrent slots of all layers."""
    return taken_bytes(a for layer in slots for a in layer if a is not None)


def own_slots(slots: Slots) -> Slots:
    """The same, but for those that are views of much more, as a lane's are of the states of all:
    these are copied, without waiting."""
    own = [[None if x is None else mx.contiguous(x) for x in layer] for layer in slots]
    mx.async_eval(own)
    return own


class Packing:
    """Runs of one-row segments that are to be copied into few arrays: of each a part at every
    append, so that no token waits for thousands of copies."""

    def __init__(self, starts: Iterable[int] = (), done: int = 0):
        self.starts = deque(starts)
        self._done = done  # layers of the first run

    def copy(self) -> Packing:
        return Packing(self.starts, self._done)

    def advance(self, segments: list[Segment], pos: int, steps: int) -> None:
        """Pack one of `steps` parts of the oldest run, if it ends at or before `pos`."""
        start = self.starts[0]
        i = bisect_left(segments, start, key=lambda s: s.start)
        if i == len(segments) or segments[i].start != start:
            self._next()  # it is gone
        elif segments[i].end <= pos:
            run = segments[i]
            layers = 1 if run.tape is None else run.tape.layers
            stop = self._done + -(-layers // steps)
            segments[i] = run.packed(self._done, stop)
            self._done = stop
            if stop >= layers:
                self._next()

    def _next(self) -> None:
        self.starts.popleft()
        self._done = 0


class Horizon:
    """The segments of the last `limit` positions, without gaps, newest last.

    `start_row` is the logits row at the very start (the last row of what came before).
    """

    def __init__(self, limit: int, budget_bytes: int, recorder: Recorder | None):
        self.limit = limit
        self.budget_bytes = budget_bytes
        self._recorder = recorder
        self.segments: list[Segment] = []
        self.start_row: mx.array | None = None
        self.about_bytes = 0  # about `nbytes` or more: counting is dear, so only near the budget
        self._bytes_of: dict[int, int] = {}  # of a call by its rows, once known: all are alike
        self._kept_checkpoint: int | None = None  # where the newest one is that stays; None: look
        self._packing = Packing()
        self.room = self.room_for(0)

    def room_for(self, logits_bytes: int) -> Room:
        """How rows are kept, and how many; logits_bytes: of one row. Right once a tape was made."""
        sizes = Sizes() if self._recorder is None else self._recorder.sizes
        kept = self.limit, self.budget_bytes, sizes, logits_bytes, page_bytes()
        return Room.of(*kept, in_place=switch.is_on())

    def copy(self) -> Horizon:
        twin = copy.copy(self)
        twin.segments, twin._packing = list(self.segments), self._packing.copy()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes kept alive, but for the newest checkpoint: it was the live state a block ago."""
        newest = self.segments[-1].checkpoint if len(self.segments) > 1 else None
        row = [] if self.start_row is None else [self.start_row]
        return sum(s.nbytes for s in self.segments) - slots_nbytes(newest or []) + taken_bytes(row)

    @property
    def low(self) -> int | None:
        """The lowest position that is reached."""
        return self.segments[0].start if self.segments else None

    @property
    def end(self) -> int | None:
        return self.segments[-1].end if self.segments else None

    def states(self, pos: int) -> range:
        """Positions that tape and checkpoints reach; only `pos`, the live one, where it is not one
        of them."""
        if not self.segments or self.segments[0].start > pos:
            return range(pos, pos + 1)
        return range(self.segments[0].start, self.segments[-1].end + 1)

    def rows(self) -> range:
        """Positions whose logits row is kept."""
        if not self.segments:
            return range(0)
        return range(self.segments[0].start + (self.start_row is None), self.segments[-1].end + 1)

    def row(self, pos: int) -> mx.array | None:
        """The logits row (V,) that predicts the token at pos, if it is kept."""
        if not self.segments or not self.segments[0].start <= pos <= self.segments[-1].end:
            return None
        if pos == self.segments[0].start:
            return self.start_row
        return next(s for s in reversed(self.segments) if s.start < pos).row(pos)

    def path(self, pos: int) -> tuple[Slots | None, Tape | None, int]:
        """The nearest checkpoint at or before pos, the tape from there, and its rows to replay."""
        first = max(
            i for i, s in enumerate(self.segments) if s.checkpoint is not None and s.start <= pos
        )
        start = self.segments[first].start
        tapes = [s.tape for s in self.segments[first:] if s.start < pos and s.tape is not None]
        return self.segments[first].checkpoint, Tape.along(tapes, pos - start), pos - start

    def clear(self) -> None:
        self.segments, self.start_row = [], None
        self.about_bytes, self._kept_checkpoint, self._packing = 0, None, Packing()

    def truncate(self, pos: int) -> None:
        """Forget the rows after pos."""
        self._kept_checkpoint = None
        kept = [s for s in self.segments if s.start < pos]
        if kept and kept[-1].end > pos:
            kept[-1] = kept[-1].first(pos - kept[-1].start)
        if not kept:
            self.start_row = None
        self.segments = kept

    def append(self, segment: Segment, row_before: mx.array | None) -> None:
        """Add the newest rows; `row_before` is the logits row at the segment's start."""
        if not self.segments or self.segments[-1].end != segment.start:
            self._begin(segment, row_before)
        else:
            self._release_checkpoint()
        for piece in (segment,) if segment.end - segment.start == 1 else self._pieces(segment):
            self.segments.append(piece)
            self.about_bytes += self._bytes(piece) + self.room.state_bytes
        self._merge()
        if self._packing.starts:
            linked = self.room.linked_rows
            # A copy at the far end would be dropped with its rows, a few calls later.
            pos = segment.end - linked if linked < self.limit else -1
            self._packing.advance(self.segments, pos, self.room.run_rows)
        self._trim()

    def _begin(self, segment: Segment, row_before: mx.array | None) -> None:
        self.clear()
        self.room = self.room_for(taken_bytes(segment.logits) // segment.rows)
        if row_before is not None:  # not all rows of its call with it
            self.start_row = mx.contiguous(row_before)
            self.about_bytes += self.start_row.nbytes

    def _bytes(self, segment: Segment) -> int:
        """Bytes of its rows, counted once for calls of as many."""
        if segment.cut_bytes:
            return replace(segment, checkpoint=None).nbytes
        if segment.rows not in self._bytes_of:
            self._bytes_of[segment.rows] = replace(segment, checkpoint=None).nbytes
        return self._bytes_of[segment.rows]

    def _pieces(self, segment: Segment) -> Iterable[Segment]:
        """A long call in parts with a checkpoint each, so that no replay from here is long."""
        spacing = self.room.spacing
        while segment.checkpoint is not None and spacing is not None:
            size = max(spacing, PIECE_ROWS)
            if segment.rows <= size:
                break
            piece, rest = segment.split(size)
            segment = replace(rest, checkpoint=piece.after())
            yield piece
        yield segment

    def _release_checkpoint(self) -> None:
        """Keep one every `spacing` rows; the newest one was kept only for its own block."""
        last, checkpoint = self.segments[-1], self.segments[-1].checkpoint
        if checkpoint is None:
            return
        if self._kept_checkpoint is None:
            checkpoints = (s.start for s in self.segments[-2::-1] if s.checkpoint is not None)
            self._kept_checkpoint = next(checkpoints, last.start)
        rows, spacing = last.start - self._kept_checkpoint, self.room.spacing
        if rows > 0 and (spacing is None or rows < spacing):
            self.segments[-1] = replace(last, checkpoint=None)
            self.about_bytes -= self.room.state_bytes
        else:
            self.segments[-1] = replace(last, checkpoint=own_slots(checkpoint))
            self._kept_checkpoint = last.start

    def _merge(self) -> None:
        """Make a run of short segments, when it is complete, for `Packing` to copy: what their
        tapes repeat of each other goes."""
        segments, run = self.segments, self.room.run_rows
        first = stop = len(segments) - 1
        while first > 0 and segments[first - 1].end - segments[first - 1].start < run:
            first -= 1
            if segments[first].checkpoint is not None:
                break
        if segments[stop].start - segments[first].start >= run:
            segments[first:stop] = [merged(segments[first:stop])]
            self._packing.starts.append(segments[first].start)

    def _trim(self) -> None:
        """Drop what is beyond the limit, and what there is no room for, oldest first."""
        segments, room = self.segments, self.room
        if len(segments) > 1 and segments[1].start <= segments[-1].end - self.limit:
            self._drop_before(segments[-1].end - self.limit)
        alive = len(self.segments) + room.run_rows * len(self._packing.starts)  # or fewer
        if self.about_bytes > self.budget_bytes or alive > room.most_segments:
            self._shrink()

    def _shrink(self) -> None:
        """Drop what there is no room for; where that would be rows that were promised, copy first
        what holds more than its own."""
        runs, most = self.room.run_rows * len(self._packing.starts), self.room.most_segments
        while self.nbytes > self.budget_bytes or len(self.segments) + runs > most:
            first, last = self.segments[0], self.segments[-1]
            if last.end - first.end < self.room.free_rows and self._tighten():
                continue
            if first is last:
                break
            self._drop_oldest()
        self.about_bytes = self.nbytes + self.room.state_bytes

    def _tighten(self) -> bool:
        """Copy what may hold more than its rows, at once; whether there was any."""
        newest = self.segments[-1].end - self.room.run_rows  # calls of one row: what these take
        loose = [  # beyond it was never promised
            i
            for i, s in enumerate(self.segments)
            if not s.is_packed and (s.end <= newest or s.rows > 1 or s.cut_bytes)
        ]
        for i in loose:
            self.segments[i] = self.segments[i].packed()
        return bool(loose)

    def _drop_oldest(self) -> None:
        """Drop a run's worth of rows at most, so that no more go than have to."""
        first = self.segments[0]
        if first.rows > self.room.run_rows:
            self.segments[:1] = first.split(first.rows // 2)
        else:
            self._drop_first()

    def _drop_before(self, pos: int) -> None:
        """Start at the last checkpoint at or before pos; where there is but one, it moves."""
        if self.room.spacing is None:
            while len(self.segments) > 1 and self.segments[1].start <= pos:
                self._drop_first()
            return
        starts = [s.start for s in self.segments if s.checkpoint is not None or s.tape is None]
        start = max((p for p in starts if p <= pos), default=self.segments[0].start)
        kept = [s for s in self.segments if s.start >= start]
        if len(kept) < len(self.segments):
            self._start_with(kept)

    def _drop_first(self) -> None:
        """Start one segment later; its checkpoint is replayed there if none was kept."""
        first, second = self.segments[:2]
        if second.checkpoint is None:
            second = self.segments[1] = replace(second, checkpoint=first.after())
        self._start_with(self.segments[1:])

    def _start_with(self, kept: list[Segment]) -> None:
        row = self.row(kept[0].start)
        if row is not None:
            row = mx.contiguous(row)  # not all rows of its run with it
            mx.async_eval(row)
        self._kept_checkpoint = None
        self.start_row = None  # at no time the row of another position
        self.segments = kept
        self.start_row = row


def merged(segments: list[Segment]) -> Segment:
    """One segment of consecutive ones; nothing is copied."""
    tapes = [s.tape for s in segments if s.tape is not None]
    tape = Tape.concat(tapes) if tapes else None
    logits = [x for s in segments for x in s.logits]
    cut = sum([s.cut_bytes for s in segments])
    first, last = segments[0], segments[-1]
    return Segment(first.start, last.end, tape, logits, first.checkpoint, cut)


def _cut(logits: Sequence[mx.array], start: int, stop: int) -> list[mx.array]:
    """Rows start .. stop of consecutive arrays (views)."""
    return [logits[i][a:b] for i, a, b in spans(map(len, logits), start, stop)]
