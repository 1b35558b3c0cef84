"""What a tape holds: one track per slot of a recurrent cache.

A track is the rows that moved this slot, one per token, time on axis 1, batch 1; `Track.replay`
says what the slot becomes after some of them. Convolution histories, token shifts and token ids are
all `Tail`; every other recurrence has its own file in `families/`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx

from ds4cli.backend.memory import taken_bytes
from ds4cli.hooks.cuda.rows import joined
from ds4cli.tape.kept import Kept, UnlikeSlots

if TYPE_CHECKING:
    from typing_extensions import Self

HALF = (mx.float16, mx.bfloat16)


def spans(lengths: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Which rows of which of consecutive pieces lie in start .. stop: (piece, first, end)."""
    end = 0
    for i, rows in enumerate(lengths):
        begin, end = end, end + rows
        if begin < stop and start < end:
            yield i, max(0, start - begin), min(rows, stop - begin)


def by_kernels(
    tracks: Sequence[Track], starts: Sequence[mx.array | None], kept: mx.array | None = None
) -> list[mx.array]:
    """`Track.by_kernel` of each from its own start, a launch a track."""
    return [t.by_kernel(start, kept) for t, start in zip(tracks, starts, strict=True)]


def batched(starts: Sequence[mx.array | None], axis: int = 0) -> mx.array | None:
    """The start slots of tracks that are replayed as one batch: all are None, or none is."""
    known = [start for start in starts if start is not None]
    return mx.concatenate(known, axis=axis) if known else None


@dataclass
class Track:
    """Rows of one slot. data: arrays (1, rows, ...), one per input of the recurrence.

    viewed_bytes: of the longer arrays that ours are views of, if they are.
    has_inner_states: a long call can leave what the slot was in the middle of it, see `inner_rows`.
    recomputes: a replay runs projections of the model again, as precise as the type of its rows.
    """

    data: tuple[mx.array, ...]
    viewed_bytes: int = field(default=0, kw_only=True)
    has_inner_states: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    lead = 0  # see `Tail`

    @property
    def rows(self) -> int:
        return self.data[0].shape[1]

    @property
    def nbytes(self) -> int:
        """What is held alive."""
        return self.viewed_bytes or taken_bytes(self.data)

    @property
    def in_half(self) -> bool:
        """Whether some of the rows are in half precision."""
        return any(x.dtype in HALF for x in self.data)

    def cut(self, start: int, stop: int) -> Self:
        """Rows start .. stop (views)."""
        if start == 0 and stop == self.rows:
            return self
        data = tuple(x[:, start:stop] for x in self.data)
        return replace(self, data=data, viewed_bytes=self.nbytes)

    def of(self, i: int) -> Self:
        """The rows of one cache, where those of a batch were recorded (views)."""
        return replace(self, data=tuple(x[i : i + 1] for x in self.data))

    @classmethod
    def needed(cls, tracks: Sequence[Self]) -> list[Self]:
        """Consecutive tracks of one slot in as few arrays as hold their rows; copies nothing."""
        return list(tracks)

    @classmethod
    def join(cls, tracks: Sequence[Self]) -> Self:
        """Consecutive tracks of one slot as one; a copy that keeps no longer buffer alive."""
        columns = zip(*(t.data for t in tracks), strict=True)
        data = tuple(joined(column) for column in columns)
        return replace(tracks[0], data=data, viewed_bytes=0)

    @classmethod
    def gather(cls, tracks: Sequence[Self], rows: int) -> Track:
        """Consecutive tracks of one slot, with so many rows, as one that is replayed to its last
        row, and no more."""
        return cls.join(tracks)

    def key(self, start: mx.array | None) -> Hashable:
        """Tracks with equal keys are replayed as one batch. Default: alone."""
        return id(self)

    def inner_rows(self) -> Sequence[int] | None:
        """Numbers of rows that need no computing to replay; None: any."""
        return ()

    @classmethod
    def stack(cls, tracks: Sequence[Self], rows: int, start: int = 0) -> list[mx.array]:
        """Rows start .. rows of several tracks as one batch: each input (tracks, rows, ...)."""
        columns = zip(*(t.data for t in tracks), strict=True)
        return [mx.concatenate([x[:, start:rows] for x in column]) for column in columns]

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        """The slot of each track after its first `rows` rows, from the slots `starts`."""
        raise NotImplementedError

    def by_kernel(self, start: mx.array | None, kept: mx.array | None = None) -> mx.array:
        """The slot after all rows, from `start`, by a kernel; kept: after so many rows of each
        lane, int32 (lanes,). For those that have one."""
        raise NotImplementedError

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        """The same of a batch, of data and slots (lanes, ...): each lane after the rows it keeps.

        Default: lane by lane. UnlikeSlots where they become of unlike lengths.
        """
        lanes = []
        for i, rows in enumerate(kept.rows):
            own = [None if start is None else start[i : i + 1] for start in starts]
            lanes.append(cls.replay([t.of(i) for t in tracks], own, rows))
        found = [*zip(*lanes, strict=True)]
        if any([x.shape != slots[0].shape for slots in found for x in slots]):
            raise UnlikeSlots
        return [mx.concatenate([*slots]) for slots in found]


@dataclass
class CallRows(Track):
    """Rows of which the model rounds something in each of its calls, where they are in half
    precision: a replay that does not moves away from the model call by call.

    calls: the rows of each call.
    """

    calls: tuple[int, ...]

    def cut(self, start: int, stop: int) -> Self:
        calls = tuple(b - a for _, a, b in spans(self.calls, start, stop))
        return replace(super().cut(start, stop), calls=calls)

    @classmethod
    def join(cls, tracks: Sequence[Self]) -> Self:
        calls = tuple(rows for t in tracks for rows in t.calls)
        return replace(super().join(tracks), calls=calls)

    def slices(self, rows: int) -> list[slice]:
        """The first `rows` rows call by call."""
        ends = [0, *accumulate(b - a for _, a, b in spans(self.calls, 0, rows))]
        return [slice(a, b) for a, b in pairwise(ends)]


@dataclass
class Tail(Track):
    """A slot that holds the last `keep` rows it has seen.

    grows: before `keep` rows were seen the slot is shorter, instead of filled up with zeros.
    time_axis: where the slot (not the track) has its rows.
    lead: rows of history that stand in front of ours in `data`, which the model call computes then:
    cutting them off while recording would be an operation per layer and call. Below 0: so many of
    our first rows are not in `data`.
    """

    keep: int
    grows: bool = False
    time_axis: int = 1
    lead: int = 0

    has_inner_states = True

    @property
    def rows(self) -> int:
        return self.data[0].shape[1] - self.lead

    def cut(self, start: int, stop: int) -> Self:
        if start == 0 and stop == self.rows:
            return self
        x = self._rows(start, stop)
        return replace(self, data=(x,), lead=0, viewed_bytes=self.nbytes)

    @classmethod
    def needed(cls, tracks: Sequence[Self]) -> list[Self]:
        """The history in front of a track is the rows of those before it, so few are needed."""
        parts: list[Self] = []
        left = end = sum([t.data[0].shape[1] - t.lead for t in tracks])
        for t in tracks[::-1]:
            start = end - t.data[0].shape[1] + t.lead
            if start < left:
                first = max(-t.lead, -start)
                x = t._rows(first, left - start)
                held = 0 if x is t.data[0] else t.nbytes
                parts.append(cls((x,), t.keep, t.grows, t.time_axis, viewed_bytes=held))
                left = start + first
            end = start
        return parts[::-1]

    @classmethod
    def join(cls, tracks: Sequence[Self]) -> Self:
        return super().join(cls.needed(tracks))

    @classmethod
    def gather(cls, tracks: Sequence[Self], rows: int) -> Track:
        """Only the last `keep` rows count: often the newest array alone has them."""
        last, first = tracks[-1], len(tracks) - 1
        if last.data[0].shape[1] >= last.keep <= rows:
            return replace(last, lead=last.data[0].shape[1] - rows)
        held = last.rows
        while held < last.keep and first:
            first -= 1
            held += tracks[first].rows
        return replace(cls.join(tracks[first:]), lead=held - rows)

    def _rows(self, start: int, stop: int) -> mx.array:
        """Rows start .. stop; -lead .. 0 are the history."""
        (x,) = self.data
        start, stop = self.lead + start, self.lead + stop
        return x if (start, stop) == (0, x.shape[1]) else x[:, start:stop]

    def key(self, start: mx.array | None) -> Hashable:
        return None  # they only share the calls that lead here

    def inner_rows(self) -> None:
        return None

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        return [t._after(start, rows) for t, start in zip(tracks, starts, strict=True)]

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        pairs = [*zip(tracks, starts, strict=True)]
        if any([t.grows and not t._is_full(start) for t, start in pairs]):
            return super().replay_each(tracks, starts, kept)
        return [t._after_each(start, kept) for t, start in pairs]

    def _is_full(self, start: mx.array | None) -> bool:
        """Whether a slot that grows holds as many rows as it ever will."""
        return start is not None and start.shape[self.time_axis] == self.keep

    def _after(self, start: mx.array | None, rows: int) -> mx.array:
        if rows >= self.keep:
            return self._turned(mx.contiguous(self._rows(rows - self.keep, rows)))
        x = self._behind(start, rows)
        return self._turned(mx.contiguous(x[:, max(0, x.shape[1] - self.keep) :]))

    def _after_each(self, start: mx.array | None, kept: Kept) -> mx.array:
        # A lane keeps one row or more.
        has_enough = self.lead + 1 >= self.keep
        x = self.data[0] if has_enough else self._behind(start, kept.total)
        return self._turned(kept.last(x, self.keep))

    def _behind(self, start: mx.array | None, rows: int) -> mx.array:
        """The first `rows` rows behind those of the slot, or what stands for one that is None."""
        x = self._rows(0, rows)
        if start is not None:
            return mx.concatenate([self._turned(start), x], axis=1)
        return x if self.grows else mx.pad(x, [(0, 0), (self.keep, 0)] + [(0, 0)] * (x.ndim - 2))

    def _turned(self, x: mx.array) -> mx.array:
        return x if self.time_axis == 1 else x.swapaxes(1, self.time_axis)


@dataclass
class States(Track):
    """Rows that are the states themselves: the slot after n rows is row n - 1."""

    has_inner_states = True

    def inner_rows(self) -> None:
        return None

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        return [mx.contiguous(t.data[0][:, rows - 1]) for t in tracks]

    @classmethod
    def replay_each(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], kept: Kept
    ) -> list[mx.array]:
        return [kept.last(t.data[0], 1).squeeze(1) for t in tracks]
