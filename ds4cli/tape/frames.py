"""Who is recording now: a frame per recurrent cache, and the one whose module is running.

A *frame* collects the rows of one `ArraysCache` in one model call; it is the current one while the
module that was given that cache runs. A recording lives in a context variable, so recordings in
different contexts do not meet, and recordings of two models (target and draft) may nest. Without
one a hook is a plain call. Hooks run for every layer and token, so they touch few objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

from mlx_lm.models.cache import ArraysCache, CacheList

from ds4cli.hooks.rebind import derived
from ds4cli.tape.tracks import Track


class Frame:
    """The tracks that one ArraysCache collects, per slot: none yet, one, or one per call of a hook.

    stop_rows: keep the state after every so many rows of a call, where that costs nothing; 0: none.
    delegated: whether the running module handed its cache on to a module inside it.
    """

    __slots__ = ("_next", "cache", "delegated", "stop_rows", "tracks")

    def __init__(self, cache: ArraysCache, stop_rows: int):
        self.cache = cache
        self.stop_rows = stop_rows
        self.tracks: list[list[Track]] = [[] for _ in cache.cache]
        self.delegated = False
        self._next = 0

    def add(self, track: Track) -> None:
        """Record rows for the next slot in call order (convolutions come before their state)."""
        self.tracks[self._next].append(track)
        self._next += 1

    def add_all(self, track: Track) -> None:
        """Record one track for all slots: it moves them together."""
        for slot in self.tracks:
            slot.append(track)

    def add_state(self, track: Track) -> None:
        """Record rows for the last slot, where a recurrence keeps its state; repeatable."""
        self.tracks[-1].append(track)

    def open(self, slot: int) -> int:
        """A module runs whose first slot is `slot`; returns what to `close` with."""
        outer, self._next, self.delegated = self._next, slot, False
        return outer

    def close(self, outer: int) -> None:
        """It is done: if another module had the frame before, that one has handed it on."""
        self._next, self.delegated = outer, True


class Recording:
    """A context in which the rows of some caches are recorded, beside whatever is already."""

    def __init__(self, caches: Sequence[ArraysCache], stop_rows: int):
        self.frames = [Frame(c, stop_rows) for c in caches]
        self.by_cache = {id(f.cache): f for f in self.frames}
        self.current: Frame | None = None
        self._token: Token | None = None

    def __enter__(self) -> list[Frame]:
        outer = _recording.get()
        if outer is not None:
            self.by_cache = {**outer.by_cache, **self.by_cache}
        self._token = _recording.set(self)
        return self.frames

    def __exit__(self, *exc: object) -> None:
        _recording.reset(self._token)


_recording: ContextVar[Recording | None] = ContextVar("ds4cli_recording", default=None)


def current() -> Frame | None:
    """The frame of the module that is running, if its cache is being recorded."""
    recording = _recording.get()
    return None if recording is None else recording.current


def recording() -> bool:
    """Whether any cache is being recorded in this context."""
    return _recording.get() is not None


def framed(cls: type, slot: int = 0) -> type:
    """A subclass of `cls` whose call runs in the frame of the cache that it is given.

    slot: the first one that it records.
    """
    inner = cls.__call__

    def __call__(self, *args, **kwargs):
        recording = _recording.get()
        frame = None if recording is None else _find(recording.by_cache, args, kwargs)
        if frame is None:
            return inner(self, *args, **kwargs)
        outer, recording.current = recording.current, frame
        before = frame.open(slot)
        try:
            return inner(self, *args, **kwargs)
        finally:
            frame.close(before)
            recording.current = outer

    return derived(cls, __call__)


def _find(frames: dict[int, Frame], args: tuple, kwargs: dict) -> Frame | None:
    """The frame of the cache among the arguments; mlx-lm hands it on by name or as the last."""
    for value in (*kwargs.values(), *args)[::-1] if kwargs else args[::-1]:
        frame = frames.get(id(value))  # a frame holds its cache, so an id is never another's
        if frame is not None:
            return frame
    lists = (v.caches for v in (*kwargs.values(), *args) if isinstance(v, CacheList))
    return next(filter(None, (_find(frames, caches, {}) for caches in lists)), None)
