"""The horizon: the last rows that were fed, kept so that going back needs no model call.

Each model call leaves a segment: its tape (inputs of the recurrences, one row a token), its logits
rows, and, at some segments, a checkpoint: the recurrent slots at the segment's start, by reference.
A position is reached from the nearest checkpoint before it by replaying tape rows. The last segment
always has a checkpoint, so the last accepted block is reached from its own start.

Segments are immutable; a fork shares them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from ds4cli.backend.memory import page_bytes, taken_bytes
from ds4cli.tape import Recorder, Slots, Tape, spans

# As many rows as a checkpoint serves, so that one-row segments are merged once, when their run is
# complete.
MERGE_SEGMENTS = 32
MERGE_ROWS = 32
# Newest rows that stay one array each where checkpoints are dense: copying a row costs as much as
# recording it, and most are never gone back to.
LINKED_ROWS = 256
# Arrays alive at most, about: Metal has room for 499,000 in all.
MAX_ARRAYS = 250_000
# Rows of a long call that one checkpoint serves.
PIECE_ROWS = 128
# Rows between checkpoints where many fit the budget: so many in a quarter of it.
DENSE_SPACING = 32
DENSE_CHECKPOINTS = 8


@dataclass
class Segment:
    """Rows `start .. start + rows` of one or more model calls.

    tape: None for models without recurrent layers. logits: consecutive arrays (m, V), together the
    last rows, as many as are kept; row i of the segment predicts the token at start + i + 1.
    checkpoint: recurrent slots at `start`, or None.
    """

    start: int
    rows: int
    tape: Tape | None
    logits: Sequence[mx.array]
    checkpoint: Slots | None

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def first_logits(self) -> int:
        """The lowest position whose logits row this segment keeps; end + 1 where it keeps none."""
        return self.end + 1 - sum(map(len, self.logits))

    def row(self, pos: int) -> mx.array:
        """The logits row (V,) that predicts the token at pos; one that is kept."""
        index = pos - self.first_logits
        (row,) = _cut(self.logits, index, index + 1)
        return row[0]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of tape, logits and checkpoint."""
        tape = 0 if self.tape is None else self.tape.nbytes
        return tape + taken_bytes(self.logits) + slots_nbytes(self.checkpoint or [])

    def head(self, rows: int) -> Segment:
        """The first `rows` rows (views)."""
        tape = None if self.tape is None else self.tape.head(rows)
        kept = max(0, self.start + rows + 1 - self.first_logits)
        return Segment(self.start, rows, tape, _cut(self.logits, 0, kept), self.checkpoint)

    def packed(self, first: int, stop: int) -> Segment:
        """With layers first .. stop of the tape in few arrays; the logits too after the last."""
        tape = None if self.tape is None else self.tape.compact(first, stop)
        logits = self.logits
        if len(logits) > 1 and (tape is None or stop >= tape.layers):
            logits = [mx.concatenate([*logits])]
            mx.async_eval(logits)
        return replace(self, tape=tape, logits=logits)

    def split(self, rows: int) -> tuple[Segment, Segment]:
        """Before and after the first `rows` rows; the second part's checkpoint is replayed."""
        assert self.tape is not None and self.checkpoint is not None
        tape, left = self.tape.tail(self.rows - rows), self.rows - rows
        checkpoint = self.tape.replay(self.checkpoint, rows)
        mx.async_eval(checkpoint)
        kept = sum(map(len, self.logits))
        logits = _cut(self.logits, max(0, kept - left), kept)
        return self.head(rows), Segment(self.start + rows, left, tape, logits, checkpoint)


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

    def advance(self, segments: list[Segment], pos: int) -> None:
        """Pack a part of the oldest run, if it ends at or before `pos`."""
        start = self.starts[0]
        i = bisect_left(segments, start, key=lambda s: s.start)
        if i == len(segments) or segments[i].start != start:
            self._next()  # it is gone
        elif segments[i].end <= pos:
            run = segments[i]
            layers = 1 if run.tape is None else run.tape.layers
            stop = self._done + -(-layers // MERGE_SEGMENTS)
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
        self.held_bytes = 0  # about `nbytes` or more: counting is dear, so only near the budget
        self._bytes_of: dict[int, int] = {}  # of a segment by its rows, once known: all are alike
        self._kept_checkpoint: int | None = None  # where the newest one is that stays; None: look
        self._packing = Packing()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint; 0 until a tape was made."""
        return 0 if self._recorder is None else self._recorder.state_bytes

    def affordable_rows(self, logits_bytes: int) -> int:
        """Rows that the budget and MAX_ARRAYS hold beside a checkpoint, were every call of one row.
        logits_bytes: of one row."""
        packed = max(1, logits_bytes + (0 if self._recorder is None else self._recorder.row_bytes))
        loose = packed + self._page_bytes
        budget = max(0, self.budget_bytes - self.checkpoint_bytes)
        rows = min(self._linked_rows, budget // loose)
        rows += (budget - rows * loose) // packed
        arrays = max(0, MAX_ARRAYS - self._linked_rows * self._segment_arrays)
        return min(rows, self._linked_rows + arrays // self._segment_arrays * MERGE_SEGMENTS)

    @property
    def _page_bytes(self) -> int:
        """What the arrays of a one-row call take beyond their bytes, at most."""
        page = page_bytes()
        return 0 if page == 1 or self._recorder is None else page * self._recorder.row_arrays

    @property
    def _stay_linked(self) -> int:
        """Newest rows that are not copied: many, but where one checkpoint serves so many that a
        replay would spend its time on joining them, or where every array takes pages."""
        return LINKED_ROWS if self.is_dense and page_bytes() == 1 else 0

    @property
    def _linked_rows(self) -> int:
        """Rows with arrays of their own, at most: those, the newest, and the run being copied."""
        return self._stay_linked + 3 * MERGE_SEGMENTS

    @property
    def _segment_arrays(self) -> int:
        recorder = self._recorder
        return 1 if recorder is None else 1 + recorder.row_arrays + recorder.state_arrays

    @property
    def is_dense(self) -> bool:
        """Whether many checkpoints fit the budget."""
        return DENSE_CHECKPOINTS * self.checkpoint_bytes <= self.budget_bytes // 4

    @property
    def spacing(self) -> int:
        """Rows between the checkpoints that stay."""
        return DENSE_SPACING if self.is_dense else self.limit

    def copy(self) -> Horizon:
        twin = Horizon(self.limit, self.budget_bytes, self._recorder)
        twin.segments, twin.start_row = list(self.segments), self.start_row
        twin.held_bytes, twin._kept_checkpoint = self.held_bytes, self._kept_checkpoint
        twin._bytes_of, twin._packing = self._bytes_of, self._packing.copy()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes kept alive, but for the newest checkpoint: it was the live state a block ago."""
        newest = self.segments[-1].checkpoint if len(self.segments) > 1 else None
        return sum(s.nbytes for s in self.segments) - slots_nbytes(newest or [])

    @property
    def low(self) -> int | None:
        return self.segments[0].start if self.segments else None

    @property
    def end(self) -> int | None:
        return self.segments[-1].end if self.segments else None

    def rows(self) -> range:
        """Positions whose logits row is kept (a range: the oldest rows go first)."""
        if not self.segments:
            return range(0)
        low, end = self.segments[0].start, self.segments[-1].end
        first = end + 1
        for s in reversed(self.segments):
            first = s.first_logits
            if first > s.start + 1:
                break
        if first == low + 1 and self.start_row is not None:
            first = low
        return range(first, end + 1)

    def row(self, pos: int) -> mx.array:
        """The kept logits row (V,) that predicts the token at pos."""
        if pos == self.low and self.start_row is not None:
            return self.start_row
        return next(s for s in reversed(self.segments) if s.start < pos).row(pos)

    def path(self, pos: int) -> tuple[Slots | None, Tape | None, int]:
        """The nearest checkpoint at or before pos, the tape from there, and its rows to replay."""
        first = max(
            i for i, s in enumerate(self.segments) if s.checkpoint is not None and s.start <= pos
        )
        start = self.segments[first].start
        tapes = [s.tape for s in self.segments[first:] if s.start < pos and s.tape is not None]
        tape = tapes[0] if len(tapes) == 1 else Tape.concat(tapes) if tapes else None
        return self.segments[first].checkpoint, tape, pos - start

    def clear(self) -> None:
        self.segments, self.start_row = [], None
        self.held_bytes, self._kept_checkpoint, self._packing = 0, None, Packing()

    def truncate(self, pos: int) -> None:
        """Forget the rows after pos."""
        self._kept_checkpoint = None
        kept = [s for s in self.segments if s.start < pos]
        if kept and kept[-1].end > pos:
            kept[-1] = kept[-1].head(pos - kept[-1].start)
        if not kept:
            self.start_row = None
        self.segments = kept

    def append(self, segment: Segment, row_before: mx.array | None) -> None:
        """Add the newest rows; `row_before` is the logits row at the segment's start."""
        if self.end != segment.start:
            self.clear()
        if not self.segments:
            self.start_row = row_before
        self._release_checkpoint()
        for piece in (segment,) if segment.rows == 1 else self._pieces(segment):
            self.segments.append(piece)
            self.held_bytes += self._bytes(piece)
        self._merge()
        self._pack()
        self._trim()

    def _bytes(self, segment: Segment) -> int:
        if segment.rows not in self._bytes_of:
            self._bytes_of[segment.rows] = segment.nbytes
        return self._bytes_of[segment.rows]

    def _pieces(self, segment: Segment) -> Iterable[Segment]:
        """A long call in parts with a checkpoint each, so that no replay from here is long."""
        size = max(self.spacing, PIECE_ROWS)
        while segment.checkpoint is not None and segment.rows > size:
            piece, segment = segment.split(size)
            yield piece
        yield segment

    def _release_checkpoint(self) -> None:
        """Keep one every `spacing` rows; the newest one was kept only for its own block."""
        if len(self.segments) < 2:
            return
        last, checkpoint = self.segments[-1], self.segments[-1].checkpoint
        if checkpoint is None:
            return
        if self._kept_checkpoint is None:
            checkpoints = (s.start for s in self.segments[-2::-1] if s.checkpoint is not None)
            self._kept_checkpoint = next(checkpoints, last.start)
        if 0 < last.start - self._kept_checkpoint < self.spacing:
            self.segments[-1] = Segment(last.start, last.rows, last.tape, last.logits, None)
            self.held_bytes -= self.checkpoint_bytes
        else:
            self.segments[-1] = replace(last, checkpoint=own_slots(checkpoint))
            self._kept_checkpoint = last.start

    def _merge(self) -> None:
        """Make one segment of many short ones, for `_pack` to copy."""
        first = stop = len(self.segments) - 1
        if stop < MERGE_SEGMENTS or self.segments[stop - MERGE_SEGMENTS].rows >= MERGE_ROWS:
            return
        while first > 0 and self.segments[first - 1].rows < MERGE_ROWS:
            first -= 1
            if self.segments[first].checkpoint is not None:
                break
        if stop - first >= MERGE_SEGMENTS:
            self.segments[first:stop] = [merged(self.segments[first:stop])]
            self._packing.starts.append(self.segments[first].start)

    def _pack(self) -> None:
        """Copy a part of a run that is old enough, so that not too many arrays stay alive."""
        if self._packing.starts:
            self._packing.advance(self.segments, self.segments[-1].end - self._stay_linked)

    def _arrays(self) -> int:
        """About how many arrays are alive, or more."""
        segments = len(self.segments) + MERGE_SEGMENTS * len(self._packing.starts)
        return segments * self._segment_arrays

    def _trim(self) -> None:
        """Drop what is beyond the limit; short of budget, logits rows go first, then old rows."""
        self._drop_before(self.segments[-1].end - self.limit)
        while self._arrays() > MAX_ARRAYS and len(self.segments) > 1:
            self._drop_first()
        if self.held_bytes <= self.budget_bytes:
            return
        if self.nbytes > self.budget_bytes:
            self._drop_logits()
        while self.nbytes > self.budget_bytes and len(self.segments) > 1:
            self._drop_first()
        self.held_bytes = self.nbytes

    def _drop_before(self, pos: int) -> None:
        """Start at the last checkpoint at or before pos."""
        if len(self.segments) < 2 or self.segments[1].start > pos:
            return
        starts = [s.start for s in self.segments if s.checkpoint is not None or s.tape is None]
        start = max((p for p in starts if p <= pos), default=self.segments[0].start)
        kept = [s for s in self.segments if s.start >= start]
        if len(kept) < len(self.segments):
            row = self.row(start) if start in self.rows() else None
            self.start_row = None  # at no time the row of another position
            self.segments = kept
            self.start_row = row

    def _drop_first(self) -> None:
        """Start one segment later; its checkpoint is replayed there if none was kept."""
        first, second = self.segments[:2]
        has_row = second.start in self.rows()
        row = self.row(second.start) if has_row else None
        if second.checkpoint is None and first.tape is not None:
            assert first.checkpoint is not None, "the oldest segment has one"
            checkpoint = first.tape.replay(first.checkpoint, first.rows)
            mx.async_eval(checkpoint)
            self.segments[1] = replace(second, checkpoint=checkpoint)
            self.held_bytes += self.checkpoint_bytes
        self.start_row = None  # at no time the row of another position
        del self.segments[0]
        self.start_row = row

    def _drop_logits(self) -> None:
        excess = self.nbytes - self.budget_bytes
        for i, s in enumerate(self.segments[:-1]):
            if excess <= 0:
                return
            if s.logits:
                excess -= taken_bytes(s.logits)
                self.segments[i] = replace(s, logits=())
                self.start_row = None


def merged(segments: list[Segment]) -> Segment:
    """One segment of consecutive ones; nothing is copied."""
    tapes = [s.tape for s in segments if s.tape is not None]
    tape = Tape.concat(tapes) if tapes else None
    logits = _merged_logits(segments)
    rows = sum(s.rows for s in segments)
    return Segment(segments[0].start, rows, tape, logits, segments[0].checkpoint)


def _merged_logits(segments: list[Segment]) -> list[mx.array]:
    """The logits of the newest segments up to the first gap."""
    first = len(segments) - 1
    while first > 0 and segments[first].first_logits == segments[first].start + 1:
        first -= 1
    return [x for s in segments[first:] for x in s.logits]


def _cut(logits: Sequence[mx.array], start: int, stop: int) -> list[mx.array]:
    """Rows start .. stop of consecutive arrays (views)."""
    return [logits[i][a:b] for i, a, b in spans(map(len, logits), start, stop)]
