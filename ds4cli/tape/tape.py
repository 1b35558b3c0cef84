"""The tape: rows of one or more consecutive model calls, for every recurrent cache of a model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ds4cli.errors import ModelError
from ds4cli.tape.tracks import Track

Slots = list[list[mx.array | None]]


class Tape:
    """Rows of consecutive model calls: layers[i][j] is the track of slot j of cache i."""

    def __init__(self, layers: Sequence[Sequence[Track]] = ()):
        self._layers = [list(tracks) for tracks in layers]

    def fill(self, found: Sequence[Sequence[list[Track]]]) -> None:
        """Take over a finished recording: tracks per cache and slot, in the order of the call.

        Every slot of every cache must have the same rows.
        """
        layers = [[_merge(tracks) for tracks in slots] for slots in found]
        rows = {0 if t is None else t.rows for tracks in layers for t in tracks}
        if len(rows) > 1:
            raise ModelError(f"recurrent caches recorded different numbers of rows: {sorted(rows)}")
        self._layers = [] if rows == {0} else layers

    @property
    def rows(self) -> int:
        return self._layers[0][0].rows if self._layers else 0

    def arrays(self) -> list[mx.array]:
        """All arrays of the tape."""
        return [x for tracks in self._layers for t in tracks for x in t.data]

    def pending(self) -> list[mx.array]:
        """What must be evaluated with the step, so as not to keep more alive than its rows; the
        rest is evaluated by the step anyway, and fewer outputs are less work."""
        tracks = (t for tracks in self._layers for t in tracks if not t.comes_with_step)
        return [x for t in tracks for x in t.data]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all layers, 0 on an empty tape."""
        return sum(x.nbytes // max(1, x.shape[1]) for x in self.arrays())

    @property
    def has_stops(self) -> bool:
        """Whether all layers can leave their states inside a long call."""
        return all(t.has_stops for tracks in self._layers for t in tracks)

    def stops(self) -> list[int]:
        """Rows after which every state is on the tape, so that `replay` computes none."""
        tracks = [t.stops() for tracks in self._layers for t in tracks]
        known = [set(stops) for stops in tracks if stops is not None]
        return sorted(set.intersection(*known)) if known else []

    def head(self, n: int) -> Tape:
        """The first `n` rows (views)."""
        return self._cut(0, n)

    def tail(self, n: int) -> Tape:
        """The last `n` rows (views)."""
        return self._cut(self.rows - n, self.rows)

    def _cut(self, start: int, stop: int) -> Tape:
        assert 0 <= start <= stop <= self.rows, (start, stop, self.rows)
        return Tape([[t.cut(start, stop) for t in tracks] for tracks in self._layers])

    @staticmethod
    def concat(tapes: Sequence[Tape]) -> Tape:
        """One tape of consecutive ones: compact copies, so that no parent stays alive."""
        layers = zip(*(t._layers for t in tapes if t._layers), strict=True)
        return Tape([_join(tracks) for tracks in layers])

    def replay(self, starts: Slots, rows: int) -> list[list[mx.array]]:
        """The slots of every cache after `rows` rows (1 .. self.rows), from the slots `starts`.

        Recurrence only: no projection, attention or feed-forward of the model runs. Lazy: the
        caller evaluates. A start slot may be None, as in a new cache.
        """
        assert 0 < rows <= self.rows, (rows, self.rows)
        out: list[list] = [[None] * len(tracks) for tracks in self._layers]
        for places in self._groups(starts):
            tracks = [self._layers[i][j] for i, j in places]
            slots = [starts[i][j] for i, j in places]
            for (i, j), slot in zip(places, tracks[0].replay(tracks, slots, rows), strict=True):
                out[i][j] = slot
        return out

    def _groups(self, starts: Slots) -> list[list[tuple[int, int]]]:
        """Places (cache, slot) that replay as one batch."""
        groups: dict = {}
        for i, tracks in enumerate(self._layers):
            for j, track in enumerate(tracks):
                groups.setdefault((type(track), track.key(starts[i][j])), []).append((i, j))
        return list(groups.values())


def _join(parts: Sequence[Sequence[Track]]) -> list[Track]:
    """The tracks of one cache over consecutive tapes."""
    return [tracks[0].join(tracks) for tracks in zip(*parts, strict=True)]


def _merge(tracks: list[Track]) -> Track | None:
    if len(tracks) < 2:
        return tracks[0] if tracks else None
    return tracks[0].join(tracks)
