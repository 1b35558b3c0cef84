"""Who is recording now: a frame per recurrent cache, and the one whose module is running.

A *frame* collects the rows of one `ArraysCache` in one model call; it is the current one while the
module that was given that cache runs. What is recorded belongs to a thread, so recordings in two
threads do not meet, and recordings of two models (target and draft) may nest. Without one a hook is
a plain call. Hooks run for every layer and token: they read attributes and call next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from mlx_lm.models.cache import ArraysCache, CacheList

from ds4cli.hooks.rebind import derived
from ds4cli.tape.tracks import Track


class Frame:
    """The tracks that one ArraysCache collects, per slot: none yet, one, or one per call of a hook.

    next: the slot whose rows come next. inner_every: keep the state after every so many rows of a
    call, where that costs nothing; 0: none. delegated: whether the running module handed its cache
    on to a module inside it. shared: frames of caches that were a batch of several, and which of
    them this one's was.
    """

    # Set here, and made without arguments: nothing is called for it.
    next = inner_every = 0
    delegated = False
    shared: tuple[tuple[Frame, int], ...] = ()
    cache: ArraysCache
    tracks: list[tuple[Track, ...]]

    def add(self, track: Track) -> None:
        """Record rows for the next slot in call order (convolutions come before their state)."""
        self.tracks[self.next] += (track,)
        self.next += 1

    def add_all(self, track: Track) -> None:
        """Record one track for all slots: it moves them together."""
        self.tracks = [(*slot, track) for slot in self.tracks]

    def add_state(self, track: Track) -> None:
        """Record rows for the last slot, where a recurrence keeps its state; repeatable."""
        self.tracks[-1] += (track,)

    def found(self) -> list[tuple[Track, ...]]:
        """The tracks per slot, those of shared frames too (views)."""
        found = self.tracks
        for frame, i in self.shared:
            found = [(*a, *b) for a, b in zip(found, frame.of(i), strict=True)]
        return found

    def of(self, i: int) -> list[tuple[Track, ...]]:
        """Those of number i of the batch whose rows it has (views)."""
        return [tuple(track.of(i) for track in tracks) for tracks in self.tracks]


class Here(threading.local):
    """What a thread records: its frames by their cache, and the frame of the module that runs."""

    frames: Mapping[ArraysCache, Frame] = {}
    frame: Frame | None = None


here = Here()


class Recording:
    """A context in which the rows of some caches are recorded, beside whatever is already."""

    def __init__(self, caches: Sequence[ArraysCache], inner_every: int):
        self.frames: list[Frame] = []
        for cache in caches:
            frame = Frame()
            frame.cache, frame.tracks = cache, [() for _ in cache.cache]
            if inner_every:
                frame.inner_every = inner_every
            self.frames += (frame,)

    def __enter__(self) -> list[Frame]:
        self._outer = here.frames
        here.frames = {**self._outer, **{f.cache: f for f in self.frames}}
        return self.frames

    def __exit__(self, *exc: object) -> None:
        here.frames = self._outer


def current() -> Frame | None:
    """The frame of the module that is running, if its cache is being recorded."""
    return here.frame


def share(cache: ArraysCache, frame: Frame, i: int) -> None:
    """`cache`, if it is recorded, was number i of the batch whose rows `frame` has."""
    own = here.frames.get(cache)
    if own is not None:
        own.shared += ((frame, i),)


def recording() -> bool:
    """Whether any cache is being recorded in this thread."""
    return bool(here.frames)


def framed(cls: type, slot: int = 0) -> type:
    """A subclass of `cls` whose call runs in the frame of the cache that it is given.

    slot: the first one that it records.
    """
    inner = cls.__call__

    def __call__(self, *args, **kwargs):
        frames = here.frames
        if not frames:
            return inner(self, *args, **kwargs)
        frame: Frame | None
        try:
            frame = frames[kwargs["cache"] if kwargs else args[-1]]
        except (KeyError, IndexError, TypeError):
            frame = _find(frames, args, kwargs)
        if frame is None:
            return inner(self, *args, **kwargs)
        outer, before = here.frame, frame.next
        here.frame, frame.next, frame.delegated = frame, slot, False
        try:
            return inner(self, *args, **kwargs)
        finally:
            # Done; if another module had the frame before, that one has handed it on.
            here.frame, frame.next, frame.delegated = outer, before, True

    return derived(cls, __call__)


def _find(frames: Mapping[ArraysCache, Frame], args: tuple, kwargs: dict) -> Frame | None:
    """The frame of the cache among the arguments; mlx-lm hands it on by name or as the last."""
    values = (*kwargs.values(), *args)
    caches = [v for v in values if isinstance(v, ArraysCache)]
    caches += [c for v in values if isinstance(v, CacheList) for c in v.caches]
    return next((frames[c] for c in caches[::-1] if c in frames), None)
