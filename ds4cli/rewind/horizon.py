"""The horizon: the last rows that were fed, kept so that going back needs no model call.

Each model call leaves a segment: its tape (inputs of the recurrences, one row a token), its logits
rows, and, at some segments, a base: the recurrent slots at the segment's start, by reference.
A position is reached from the nearest base before it by replaying tape rows. The last segment
always has a base, so the last accepted block is reached from its own start.

Segments are immutable; a fork shares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from ds4cli.tape import Recorder, Tape, spans

# As many as a base serves, so that one-row segments are merged once, when their run is complete.
MERGE_SEGMENTS = 32
MERGE_ROWS = 32
# Rows of a long call that one base serves.
PIECE_ROWS = 128
# Rows between bases where many fit the budget: so many in a quarter of it.
DENSE_SPACING = 32
DENSE_BASES = 8


@dataclass
class Segment:
    """Rows `start .. start + rows` of one or more model calls.

    tape: None for models without recurrent layers. logits: consecutive arrays (m, V), together the
    last rows, as many as are kept; row i of the segment predicts the token at start + i + 1. base:
    recurrent slots at `start`, or None.
    """

    start: int
    rows: int
    tape: Tape | None
    logits: Sequence[mx.array]
    base: list[list[mx.array | None]] | None

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
        """Bytes of tape, logits and base."""
        tape = 0 if self.tape is None else self.tape.nbytes
        return tape + sum(x.nbytes for x in self.logits) + slots_nbytes(self.base or [])

    def head(self, rows: int) -> Segment:
        """The first `rows` rows (views)."""
        tape = None if self.tape is None else self.tape.head(rows)
        kept = max(0, self.start + rows + 1 - self.first_logits)
        return Segment(self.start, rows, tape, _cut(self.logits, 0, kept), self.base)

    def split(self, rows: int) -> tuple[Segment, Segment]:
        """Before and after the first `rows` rows; the second part's base is replayed."""
        tape, left = self.tape.tail(self.rows - rows), self.rows - rows
        base = self.tape.replay(self.base, rows)
        mx.async_eval(base)
        kept = sum(map(len, self.logits))
        logits = _cut(self.logits, max(0, kept - left), kept)
        return self.head(rows), Segment(self.start + rows, left, tape, logits, base)


def slots_nbytes(slots: list[list[mx.array | None]]) -> int:
    """Bytes of the recurrent slots of all layers."""
    return sum(a.nbytes for layer in slots for a in layer if a is not None)


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
        self._kept_base: int | None = None  # where the newest base is that stays; None: look

    @property
    def base_bytes(self) -> int:
        """Bytes of a base; 0 until a tape was made."""
        return 0 if self._recorder is None else self._recorder.state_bytes

    @property
    def is_dense(self) -> bool:
        """Whether many bases fit the budget."""
        return DENSE_BASES * self.base_bytes <= self.budget_bytes // 4

    @property
    def spacing(self) -> int:
        """Rows between the bases that stay."""
        return DENSE_SPACING if self.is_dense else self.limit

    def copy(self) -> Horizon:
        twin = Horizon(self.limit, self.budget_bytes, self._recorder)
        twin.segments, twin.start_row = list(self.segments), self.start_row
        twin.held_bytes, twin._kept_base = self.held_bytes, self._kept_base
        twin._bytes_of = self._bytes_of
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes kept alive; the newest base is not counted, it was the live state a block ago."""
        newest = self.segments[-1].base if len(self.segments) > 1 else None
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
        first = self.end + 1
        for s in reversed(self.segments):
            first = s.first_logits
            if first > s.start + 1:
                break
        if first == self.low + 1 and self.start_row is not None:
            first = self.low
        return range(first, self.end + 1)

    def row(self, pos: int) -> mx.array:
        """The kept logits row (V,) that predicts the token at pos."""
        if pos == self.low and self.start_row is not None:
            return self.start_row
        return next(s for s in reversed(self.segments) if s.start < pos).row(pos)

    def path(self, pos: int) -> tuple[list, Tape | None, int]:
        """The nearest base at or before pos, the tape from there, and its rows to replay."""
        first = max(i for i, s in enumerate(self.segments) if s.base is not None and s.start <= pos)
        start = self.segments[first].start
        tapes = [s.tape for s in self.segments[first:] if s.start < pos]
        tape = tapes[0] if len(tapes) == 1 else Tape.concat(tapes) if tapes else None
        return self.segments[first].base, tape, pos - start

    def clear(self) -> None:
        self.segments, self.start_row = [], None
        self.held_bytes, self._kept_base = 0, None

    def truncate(self, pos: int) -> None:
        """Forget the rows after pos."""
        self._kept_base = None
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
        self._release_base()
        for piece in self._pieces(segment):
            self.segments.append(piece)
            self.held_bytes += self._bytes(piece)
        self._merge()
        self._trim()

    def _bytes(self, segment: Segment) -> int:
        if segment.rows not in self._bytes_of:
            self._bytes_of[segment.rows] = segment.nbytes
        return self._bytes_of[segment.rows]

    def _pieces(self, segment: Segment) -> Iterable[Segment]:
        """A long call in parts with a base each, so that no replay from here is long."""
        size = max(self.spacing, PIECE_ROWS)
        while segment.base is not None and segment.rows > size:
            piece, segment = segment.split(size)
            yield piece
        yield segment

    def _release_base(self) -> None:
        """Keep a base every `spacing` rows; the newest one was kept only for its own block."""
        if len(self.segments) < 2 or self.segments[-1].base is None:
            return
        last = self.segments[-1]
        if self._kept_base is None:
            bases = (s.start for s in self.segments[-2::-1] if s.base is not None)
            self._kept_base = next(bases, last.start)
        if 0 < last.start - self._kept_base < self.spacing:
            self.segments[-1] = Segment(last.start, last.rows, last.tape, last.logits, None)
            self.held_bytes -= self.base_bytes
        else:
            self._kept_base = last.start

    def _merge(self) -> None:
        """Make one segment of many short ones.

        Copying every row costs as much as recording it, so rows are copied only where a base serves
        so many that a replay would spend its time on joining them.
        """
        first = stop = len(self.segments) - 1
        if stop < MERGE_SEGMENTS or self.segments[stop - MERGE_SEGMENTS].rows >= MERGE_ROWS:
            return
        while first > 0 and self.segments[first - 1].rows < MERGE_ROWS:
            first -= 1
            if self.segments[first].base is not None:
                break
        if stop - first >= MERGE_SEGMENTS:
            run = merged(self.segments[first:stop], compact=not self.is_dense)
            self.segments[first:stop] = [run]

    def _trim(self) -> None:
        """Drop what is beyond the limit; short of budget, logits rows go first, then old rows."""
        self._drop_before(self.end - self.limit)
        if self.held_bytes <= self.budget_bytes:
            return
        if self.nbytes > self.budget_bytes:
            self._drop_logits()
        while self.nbytes > self.budget_bytes and len(self.segments) > 1:
            self._drop_first()
        self.held_bytes = self.nbytes

    def _drop_before(self, pos: int) -> None:
        """Start at the last base at or before pos."""
        if len(self.segments) < 2 or self.segments[1].start > pos:
            return
        starts = [s.start for s in self.segments if s.base is not None or s.tape is None]
        start = max((p for p in starts if p <= pos), default=self.low)
        while self.low < start:
            self._drop_first()

    def _drop_first(self) -> None:
        """Start one segment later; its base is replayed there if none was kept."""
        first, second = self.segments[:2]
        has_row = second.start in self.rows()
        row = self.row(second.start) if has_row else None
        if second.base is None and first.tape is not None:
            base = first.tape.replay(first.base, first.rows)
            mx.async_eval(base)
            self.segments[1] = replace(second, base=base)
            self.held_bytes += self.base_bytes
        self.start_row = row
        del self.segments[0]

    def _drop_logits(self) -> None:
        excess = self.nbytes - self.budget_bytes
        for i, s in enumerate(self.segments[:-1]):
            if excess <= 0:
                return
            if s.logits:
                excess -= sum(x.nbytes for x in s.logits)
                self.segments[i] = replace(s, logits=())
                self.start_row = None


def merged(segments: list[Segment], *, compact: bool) -> Segment:
    """One segment of consecutive ones; `compact` copies it into few arrays, without waiting."""
    tape = None if segments[0].tape is None else Tape.concat([s.tape for s in segments])
    logits = _merged_logits(segments)
    if compact:
        tape = None if tape is None else tape.compact()
        logits = [mx.concatenate(logits)] if logits else []
        mx.async_eval(logits, [] if tape is None else tape.arrays())
    rows = sum(s.rows for s in segments)
    return Segment(segments[0].start, rows, tape, logits, segments[0].base)


def _merged_logits(segments: list[Segment]) -> list[mx.array]:
    """The logits of the newest segments up to the first gap."""
    first = len(segments) - 1
    while first > 0 and segments[first].first_logits == segments[first].start + 1:
        first -= 1
    return [x for s in segments[first:] for x in s.logits]


def _cut(logits: Sequence[mx.array], start: int, stop: int) -> list[mx.array]:
    """Rows start .. stop of consecutive arrays (views)."""
    return [logits[i][a:b] for i, a, b in spans(map(len, logits), start, stop)]
