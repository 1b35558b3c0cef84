"""Recorder: arms a model's own recurrent modules so that a model call leaves a tape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from ds4cli.backend.memory import taken_bytes
from ds4cli.errors import ModelError
from ds4cli.hooks.rebind import Swaps
from ds4cli.tape import frames
from ds4cli.tape.families import (
    baichuan,
    delta_rule,
    griffin,
    leaf,
    lightning,
    mamba,
    ngram,
    rwkv7,
    short_conv,
    ssd,
)
from ds4cli.tape.tape import Tape
from ds4cli.tape.tracks import Track

# Order matters once: a short convolution is what remains when no recurrence function is called.
FAMILIES = (
    delta_rule,
    ssd,
    mamba,
    rwkv7,
    griffin,
    lightning,
    baichuan,
    ngram,
    short_conv,
)


class Sizes(NamedTuple):
    """Bytes, all layers together, and in how many arrays: of a row of tape, of the rows that the
    tape of a call has in front of its own (`history`), of the recurrent states."""

    row: int = 0
    history: int = 0
    state: int = 0
    row_arrays: int = 0
    state_arrays: int = 0


class Recorder:
    """A model whose recurrent modules can record. Make one with `arm`.

    families: names of the recurrences found, for people; empty for a model without any. sizes: what
    is recorded takes; nothing until a tape was made. has_inner_states: whether all recurrences can
    leave states inside a long call.
    """

    def __init__(self, families: list[str], swaps: Swaps):
        self.families = families
        self.sizes = Sizes()
        self.has_inner_states = False
        self._swaps = swaps

    @classmethod
    def arm(cls, model: nn.Module) -> Recorder:
        """Put the model's recurrent module instances into recording subclasses.

        Raises ModelError, with the model untouched, where a recurrent cache has no module that
        could record it.
        """
        needed = len(arrays_caches(make_prompt_cache(model)))
        found = list(_owners(model)) if needed else []
        leaves = leaf.candidates(model, [m for _, m in found]) if len(found) < needed else []
        unknown = leaf.innermost(leaves)
        if len(found) + len(unknown) < needed:
            raise ModelError(
                f"`{type(model).__module__}` has {needed} recurrent caches, but only "
                f"{len(found) + len(unknown)} modules that can be recorded"
            )
        swaps = Swaps()
        for family, module in found:
            family.arm(module, swaps)
        for module in leaves:
            leaf.arm(module, swaps)
        names = [f.name for f, _ in found] + [f"leaf ({type(m).__name__})" for m in unknown]
        return cls(list(dict.fromkeys(names)), swaps)

    def disarm(self) -> None:
        """Give every instance its own class back."""
        self._swaps.undo()
        self.families = []

    @contextmanager
    def recording(self, caches: list[ArraysCache], inner_every: int = 0) -> Iterator[Tape]:
        """Record the model calls of this context on `caches`. The tape is complete on exit.

        inner_every: recurrences that can, leave the state after every so many rows on the tape.
        """
        tape = Tape()
        with frames.Recording(caches, inner_every) as found:
            yield tape
        self._fill(tape, found)

    @contextmanager
    def recording_lanes(
        self, lanes: Sequence[list[ArraysCache]], rows: Sequence[int]
    ) -> Iterator[list[Tape]]:
        """The same for a call on several lanes of so many rows: a tape for the caches of each."""
        tapes = [Tape() for _ in lanes]
        with frames.Recording([c for caches in lanes for c in caches], 0) as found:
            yield tapes
        size = len(lanes[0])
        for i, tape in enumerate(tapes):
            own = found[i * size : (i + 1) * size]
            if self.sizes.row:
                tape.fill_later(rows[i], partial(_tracks, own))
            else:
                self._fill(tape, own)

    @contextmanager
    def recording_batch(
        self, caches: list[ArraysCache], lanes: int, rows: int
    ) -> Iterator[list[Tape]]:
        """The same for a call on a batch of lanes, so many rows of each, once `sizes` are known;
        caches: of all lanes. Each tape knows that of all lanes, see `Tape.whole`."""
        whole, tapes = Tape(), [Tape() for _ in range(lanes)]
        with frames.Recording(caches, 0) as found:
            yield tapes
        whole.fill_later(rows, partial(_tracks, found))
        for lane, tape in enumerate(tapes):
            tape.fill_as_part(whole, lane)

    def _fill(self, tape: Tape, found: list[frames.Frame]) -> None:
        tape.fill([frame.found() for frame in found])
        if not self.sizes.row:
            slots: list[mx.array | None] = [x for f in found for x in f.cache.cache]
            states = [x for x in slots if x is not None]
            arrays, taken = len(tape.arrays()), taken_bytes(states)
            self.has_inner_states = tape.has_inner_states
            self.sizes = Sizes(tape.row_bytes, tape.history_bytes, taken, arrays, len(states))


def _tracks(found: list[frames.Frame]) -> list[list[tuple[Track, ...]]]:
    return [frame.found() for frame in found]


def _owners(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Each module that keeps a recurrent cache, with the family that records it."""
    for module in model.modules():
        family = next((f for f in FAMILIES if f.owns(module)), None)
        if family is not None:
            yield family, module


def arrays_caches(caches: Sequence[Any]) -> list[ArraysCache]:
    """The recurrent caches among a model's caches, in order, those inside a CacheList too."""
    found: list[ArraysCache] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            found += arrays_caches(cache.caches)
        elif isinstance(cache, ArraysCache):
            found.append(cache)
    return found
