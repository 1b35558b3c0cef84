"""The tape: rows of one or more consecutive model calls, for every recurrent cache of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, chain

import mlx.core as mx

from ds4cli.errors import ModelError
from ds4cli.tape.kept import Kept
from ds4cli.tape.tracks import Track, spans

Slots = Sequence[list[mx.array | None]]
Layers = Sequence[Sequence[Sequence[Track]]]


class Tape:
    """Rows of consecutive model calls: layers[i][j] are the consecutive tracks of slot j of cache
    i, most often one a call. They are joined when they are replayed.

    What is recorded are arrays that the call computes on the way to its logits, or views of them:
    nothing has to be evaluated for it.

    whole: where it is one lane's part of a call on a batch, the tape of all lanes, whose data are
    (lanes, rows, ...); lane: which of them it is. What is cut or joined of it is part of none.
    """

    whole: Tape | None = None
    lane = 0

    def __init__(self, layers: Layers = ()):
        self._known = layers
        self._find: Callable[[], Layers] | None = None
        self.rows = sum(t.rows for t in layers[0][0]) if layers else 0

    @property
    def _layers(self) -> Layers:
        if self._find is not None:
            self._known, self._find = self._find(), None
        return self._known

    def fill(self, found: Layers) -> None:
        """Take over a finished recording: tracks per cache and slot, in the order of the call.

        Every slot of every cache must have the same rows.
        """
        self.rows, self._known = _checked(found)

    def fill_later(self, rows: int, find: Callable[[], Layers]) -> None:
        """The same, of so many rows, once somebody looks: most tapes are never replayed, and to
        take one lane's part out of many is work."""
        self.rows, self._find = rows, lambda: _checked(find())[1]

    def fill_as_part(self, whole: Tape, lane: int) -> None:
        """The same with one lane's rows of the tape of a batch (views)."""
        self.whole, self.lane, self.rows = whole, lane, whole.rows
        self._find = lambda: [[[t.of(lane) for t in x] for x in slots] for slots in whole._layers]

    def _tracks(self) -> Iterator[Track]:
        return (t for slots in self._layers for tracks in slots for t in tracks)

    def arrays(self) -> list[mx.array]:
        """All arrays of the tape."""
        return [x for t in self._tracks() for x in t.data]

    @property
    def nbytes(self) -> int:
        """Bytes that are held alive."""
        return sum(t.nbytes for t in self._tracks())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all layers, 0 on an empty tape."""
        first = (tracks[0] for slots in self._layers for tracks in slots)
        return sum(x.nbytes // max(1, x.shape[1]) for t in first for x in t.data)

    @property
    def history_bytes(self) -> int:
        """Bytes of what stands in front of the rows, as in every call."""
        lead = ((t.data[0], t.lead) for t in self._tracks())
        return sum(max(0, n) * (x.nbytes // x.shape[1]) for x, n in lead)

    @property
    def has_inner_states(self) -> bool:
        """Whether all layers can leave their states inside a long call."""
        return all(t.has_inner_states for t in self._tracks())

    def slots_that(self, are: Callable[[Track], bool]) -> list[list[bool]]:
        """Per cache and slot, whether its tracks are so."""
        return [[are(tracks[0]) for tracks in slots] for slots in self._layers]

    def inner_rows(self) -> list[int]:
        """Rows after which every state is on the tape, so that `replay` computes none."""
        some = (_joined(tracks).inner_rows() for slots in self._layers for tracks in slots)
        known = [set(rows) for rows in some if rows is not None]
        return sorted(set.intersection(*known)) if known else []

    def first(self, n: int) -> Tape:
        """The first `n` rows (views)."""
        return self._cut(0, n)

    def last(self, n: int) -> Tape:
        """The last `n` rows (views)."""
        return self._cut(self.rows - n, self.rows)

    def _cut(self, start: int, stop: int) -> Tape:
        assert 0 <= start <= stop <= self.rows, (start, stop, self.rows)
        if stop - start == self.rows:
            return self
        if self.whole is None:
            return Tape(_cut_all(self._layers, start, stop))
        part = Tape()  # of a lane, which nobody may have looked at
        part.rows, part._find = stop - start, lambda: _cut_all(self._layers, start, stop)
        return part

    @staticmethod
    def concat(tapes: Sequence[Tape]) -> Tape:
        """One tape of consecutive ones. Nothing is copied; what only repeats rows is let go."""
        if any(t._find is not None for t in tapes):
            whole = Tape()
            whole.rows, whole._find = sum(t.rows for t in tapes), lambda: _concatenated(tapes)
            return whole
        return Tape(_concatenated(tapes))

    @staticmethod
    def along(tapes: Sequence[Tape], rows: int) -> Tape | None:
        """A tape of the first `rows` rows of consecutive ones, the last of which has some of them,
        to be replayed. Nothing is joined."""
        if len(tapes) < 2:
            return tapes[0] if tapes else None
        *whole, last = tapes
        parts = [t._layers for t in (*whole, last.first(rows - sum(t.rows for t in whole)))]
        tape = Tape()
        tape.rows = rows
        tape._known = [
            [[*chain.from_iterable(tracks)] for tracks in zip(*slots, strict=True)]
            for slots in zip(*parts, strict=True)
        ]
        return tape

    @property
    def layers(self) -> int:
        return len(self._layers)

    def compact(self, first: int = 0, stop: int | None = None) -> Tape:
        """With one array per input of a slot in layers first .. stop, copied without waiting, so
        that no longer array stays alive."""
        layers = list(self._layers)
        layers[first:stop] = [[[t[0].join(t)] for t in slots] for slots in layers[first:stop]]
        mx.async_eval(Tape(layers[first:stop]).arrays())
        return Tape(layers)

    def replay(self, starts: Slots, rows: int) -> Slots:
        """The slots of every cache after `rows` rows (1 .. self.rows), from the slots `starts`.

        Recurrence only: no projection, attention or feed-forward of the model runs. Lazy: the
        caller evaluates. A start slot may be None, as in a new cache.
        """
        assert 0 < rows <= self.rows, (rows, self.rows)
        cut = rows < self.rows
        gathered = [[_gathered(tracks, rows, cut) for tracks in slots] for slots in self._layers]
        return _moved(gathered, starts, lambda tracks, own: tracks[0].replay(tracks, own, rows))

    def replay_each(self, starts: Slots, rows: Sequence[int]) -> Slots:
        """`replay` of a tape of a batch, data and slots (lanes, ...): lane i after rows[i] rows.

        For families with a form of their own the graph is the same whatever `rows`.
        """
        assert all(0 < n <= self.rows for n in rows), (rows, self.rows)
        kept = Kept(rows, self.rows)
        joined = [[_joined(tracks) for tracks in slots] for slots in self._layers]
        return _moved(joined, starts, lambda tracks, own: tracks[0].replay_each(tracks, own, kept))

    @staticmethod
    def replay_all(tapes: Sequence[Tape], starts: Sequence[Slots], rows: int) -> list[Slots]:
        """`replay` of each from its own start, all as one batch where that is possible."""
        if any(t.recomputes for tape in tapes for t in tape._tracks()):
            return [tape.replay(own, rows) for tape, own in zip(tapes, starts, strict=True)]
        layers = [slots for tape in tapes for slots in tape.first(rows)._layers]
        out, ends = Tape(layers).replay([*chain(*starts)], rows), [*accumulate(map(len, starts))]
        return [out[end - len(own) : end] for own, end in zip(starts, ends, strict=True)]


def _checked(found: Layers) -> tuple[int, Layers]:
    """Rows and tracks of a recording; no tracks where nothing was recorded."""
    if [True for slots in found for tracks in slots if tracks[1:]]:
        found = [[_single(tracks) for tracks in slots] for slots in found]
    rows = {t.data[0].shape[1] - t.lead for slots in found for tracks in slots for t in tracks}
    if [True for slots in found for tracks in slots if not tracks]:
        rows = {0, *rows}
    if len(rows) > 1:
        raise ModelError(f"recurrent caches recorded different numbers of rows: {sorted(rows)}")
    if not rows or rows == {0}:
        return 0, ()
    return rows.pop(), found


def _concatenated(tapes: Sequence[Tape]) -> Layers:
    layers = zip(*(t._layers for t in tapes if t._layers), strict=True)
    return [[_needed(parts) for parts in zip(*slots, strict=True)] for slots in layers]


def _moved(
    layers: Sequence[Sequence[Track]],
    starts: Slots,
    replay: Callable[[list[Track], list[mx.array | None]], list[mx.array]],
) -> Slots:
    """The slots that `replay` makes of tracks and their start slots, batch by batch."""
    out: Slots = [[None] * len(tracks) for tracks in layers]
    for places in _groups(layers, starts):
        slots = replay([layers[i][j] for i, j in places], [starts[i][j] for i, j in places])
        for (i, j), slot in zip(places, slots, strict=True):
            out[i][j] = slot
    return out


def _groups(layers: Sequence[Sequence[Track]], starts: Slots) -> list[list[tuple[int, int]]]:
    """Places (cache, slot) that replay as one batch."""
    groups: dict[tuple[type[Track], Hashable], list[tuple[int, int]]] = {}
    for i, tracks in enumerate(layers):
        for j, track in enumerate(tracks):
            groups.setdefault((type(track), track.key(starts[i][j])), []).append((i, j))
    return list(groups.values())


def _single(tracks: Sequence[Track]) -> Sequence[Track]:
    """The tracks of one call: a hook that ran for every token leaves one for each."""
    return tracks if len(tracks) < 2 else [tracks[0].join(tracks)]


def _needed(parts: Sequence[Sequence[Track]]) -> list[Track]:
    tracks = [t for part in parts for t in part]
    return tracks[0].needed(tracks)


def _joined(tracks: Sequence[Track]) -> Track:
    return tracks[0] if len(tracks) == 1 else tracks[0].join(tracks)


def _gathered(tracks: Sequence[Track], rows: int, cut: bool) -> Track:
    """One track to replay the first `rows` rows of; cut: there are more."""
    if len(tracks) == 1:
        return tracks[0]
    return tracks[0].gather(_cut(tracks, 0, rows) if cut else tracks, rows)


def _cut_all(layers: Layers, start: int, stop: int) -> Layers:
    return [[_cut(tracks, start, stop) for tracks in slots] for slots in layers]


def _cut(tracks: Sequence[Track], start: int, stop: int) -> list[Track]:
    """Rows start .. stop of consecutive tracks (views)."""
    if len(tracks) == 1:
        return [tracks[0].cut(start, stop)]
    return [tracks[i].cut(a, b) for i, a, b in spans((t.rows for t in tracks), start, stop)]
