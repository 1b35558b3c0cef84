"""Does replaying give what the model itself computes? Cheap enough to ask at every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.arrays import number
from ds4cli.tape.recorder import Recorder, arrays_caches
from ds4cli.tape.tape import Slots, Tape
from ds4cli.tape.tracks import HALF, CallRows, Track

# Largest accepted difference, relative to the slot's largest entry.
_TOLERANCE = 1e-4
_TOLERANCE_HALF = 3e-2
# Rows fed one by one where what is rounded at each of them could add up.
LONG_ROWS = 64


@dataclass(frozen=True)
class Verdict:
    """How far replayed slots are from those that the model leaves, in units of what is allowed;
    problem: why nothing could be compared."""

    difference: float = 0.0
    problem: str = ""

    @property
    def accepts(self) -> bool:
        """Whether the tape may be used."""
        return self.difference <= 1 and not self.problem

    def __str__(self) -> str:
        if self.problem:
            return f"replaying the recurrences fails: {self.problem}"
        return (
            f"replaying the recurrences differs from this model by {self.difference:.2g} times "
            "what is allowed"
        )


def self_check(model: nn.Module, recorder: Recorder, new_caches: Callable[[], list]) -> Verdict:
    """Compare replayed slots with the slots the model leaves.

    Three calls of at most 4 tokens; the replay covers their boundary and a tape cut in two. Where
    rounding in half precision could add up, LONG_ROWS single rows as well. new_caches: makes what
    to pass as `cache`.
    """
    caches = new_caches()
    if not arrays_caches(caches):
        return Verdict()
    try:
        return Verdict(_replay_error(model, recorder, caches))
    except Exception as error:
        # Whatever a newer mlx-lm changed may cost the user speed, not the model.
        words = str(error).strip().splitlines() or ["no more is known"]
        return Verdict(float("inf"), f"{type(error).__name__}: {words[0]}")


def _replay_error(model: nn.Module, recorder: Recorder, caches: list[Any]) -> float:
    recurrent = arrays_caches(caches)
    _feed(model, caches, 3)
    starts = _slots(recurrent)
    tapes = [_recorded(model, caches, rows, recorder) for rows in (4, 1)]
    tape, reached = Tape.concat(tapes), _slots(recurrent)
    halfway, coarse = tape.replay(starts, 2), tape.slots_that(_is_coarse)
    worst = max(
        difference(tape.replay(starts, 5), reached, coarse),
        difference(tape.last(3).replay(halfway, 3), reached, coarse),
    )
    if not _adds_up(tape, reached):
        return worst
    return max(worst, long_error(model, recorder, caches, LONG_ROWS))


def long_error(model: nn.Module, recorder: Recorder, caches: list[Any], rows: int) -> float:
    """The same for many calls of one row, in units of what is allowed."""
    recurrent, tapes = arrays_caches(caches), []
    starts = _slots(recurrent)
    for _ in range(rows):
        tapes.append(_recorded(model, caches, 1, recorder))
        mx.async_eval(_slots(recurrent))
    tape = Tape.concat(tapes)
    again = tape.replay(starts, rows)
    return difference(again, _slots(recurrent), tape.slots_that(_is_coarse))


def _slots(recurrent: list[Any]) -> Slots:
    return [list(c.cache) for c in recurrent]


def _is_coarse(track: Track) -> bool:
    return track.recomputes and track.in_half


def _adds_up(tape: Tape, slots: Slots) -> bool:
    """Whether some state is computed from its last value and rounded to half precision on the
    way; slots that are rows of the tape are not computed."""
    computed = tape.slots_that(lambda track: track.inner_rows() is not None)
    by_call = tape.slots_that(lambda track: isinstance(track, CallRows) and track.in_half)
    marks = zip(chain(*slots), chain(*computed), chain(*by_call), strict=True)
    return any(
        rounds or (moves and slot is not None and slot.dtype in HALF)
        for slot, moves, rounds in marks
    )


def _feed(model: nn.Module, caches: list[Any], rows: int) -> None:
    """Feed ids 1 .. rows."""
    model(mx.arange(1, rows + 1)[None], cache=caches)


def _recorded(model: nn.Module, caches: list[Any], rows: int, recorder: Recorder) -> Tape:
    """The tape of a call that feeds ids 1 .. rows."""
    with recorder.recording(arrays_caches(caches)) as tape:
        _feed(model, caches, rows)
    return tape


def difference(slots: Slots, expected: Slots, coarse: Sequence[Sequence[bool]]) -> float:
    """The largest difference of two sets of slots, in units of what is allowed; inf if unlike.
    coarse: which slots are as exact as half precision only, whatever their type."""
    places = zip(chain(*slots), chain(*expected), chain(*coarse), strict=True)
    return max((_difference(*place) for place in places), default=0.0)


def _difference(a: mx.array | None, b: mx.array | None, coarse: bool) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    allowed = _TOLERANCE_HALF if coarse or b.dtype in HALF else _TOLERANCE
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    error = mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)
    return number(error) / allowed if mx.isfinite(error).item() else float("inf")
