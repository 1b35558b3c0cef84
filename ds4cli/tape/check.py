"""Does replaying give what the model itself computes? Cheap enough to ask at every load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.tape.recorder import Recorder, arrays_caches
from ds4cli.tape.tape import Slots, Tape

# Largest accepted difference, relative to the slot's largest entry.
_TOLERANCE = 1e-4
_TOLERANCE_HALF = 3e-2


def self_check(model: nn.Module, recorder: Recorder, new_caches: Callable[[], list]) -> float:
    """How far replayed slots are from the slots the model leaves, in units of what is allowed.

    Above 1.0, inf for a failure, the tape must not be used. Three calls of at most 4 tokens; the
    replay covers their boundary and a tape cut in two. new_caches: makes what to pass as `cache`.
    """
    caches = new_caches()
    if not arrays_caches(caches):
        return 0.0
    try:
        return _replay_error(model, recorder, caches)
    except Exception:
        # Whatever a newer mlx-lm changed may cost the user speed, not the model.
        return float("inf")


def _replay_error(model: nn.Module, recorder: Recorder, caches: list[Any]) -> float:
    recurrent = arrays_caches(caches)
    _feed(model, caches, 3)
    starts = [list(c.cache) for c in recurrent]
    tapes = [_feed(model, caches, rows, recorder) for rows in (4, 1)]
    tape, reached = Tape.concat(tapes), [list(c.cache) for c in recurrent]
    halfway = tape.replay(starts, 2)
    return max(
        difference(tape.replay(starts, 5), reached),
        difference(tape.tail(3).replay(halfway, 3), reached),
    )


def _feed(model: nn.Module, caches: list[Any], rows: int, recorder: Recorder | None = None):
    """Feed ids 1 .. rows; return the tape of the call."""
    tokens = mx.arange(1, rows + 1)[None]
    if recorder is None:
        model(tokens, cache=caches)
        return None
    with recorder.recording(arrays_caches(caches)) as tape:
        model(tokens, cache=caches)
    return tape


def difference(slots: Slots, expected: Slots) -> float:
    """The largest difference of two sets of slots, in units of what is allowed; inf if unlike."""
    pairs = [pair for a, b in zip(slots, expected, strict=True) for pair in zip(a, b, strict=True)]
    return max((_difference(a, b) for a, b in pairs), default=0.0)


def _difference(a: mx.array | None, b: mx.array | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    allowed = _TOLERANCE_HALF if b.dtype in (mx.float16, mx.bfloat16) else _TOLERANCE
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    error = mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)
    return error.item() / allowed if mx.isfinite(error).item() else float("inf")
