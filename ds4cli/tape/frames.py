"""Who is recording now: the logs of the current context, and the frame of the running module.

A *log* collects the rows of one `ArraysCache`; a *frame* is open while the module that was given
that cache runs. Both live in context variables, so recordings in different contexts do not meet,
and recordings of two models (target and draft) may nest. Without a frame a hook is a plain call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList

from ds4cli.rebind import derived
from ds4cli.tape.tracks import Track


class Log:
    """The tracks that one ArraysCache collects, per slot, in the order of the model calls.

    stop_rows: keep the state after every so many rows of a call, where that costs nothing; 0: none.
    """

    def __init__(self, cache: ArraysCache, stop_rows: int):
        self.cache = cache
        self.stop_rows = stop_rows
        self.slots: list[list[Track]] = [[] for _ in cache.cache]


class Frame:
    """One call of a module that was handed a recorded cache.

    delegated: whether it handed the cache on to a module inside it.
    """

    __slots__ = ("_log", "_next", "delegated")

    def __init__(self, log: Log, slot: int):
        self._log = log
        self._next = slot
        self.delegated = False

    @property
    def cache(self) -> ArraysCache:
        return self._log.cache

    @property
    def stop_rows(self) -> int:
        return self._log.stop_rows

    def add(self, track: Track) -> None:
        """Record rows for the next slot in call order (convolutions come before their state)."""
        self._log.slots[self._next].append(track)
        self._next += 1

    def add_all(self, track: Track) -> None:
        """Record one track for all slots: it moves them together."""
        for slot in self._log.slots:
            slot.append(track)

    def add_state(self, track: Track) -> None:
        """Record rows for the last slot, where a recurrence keeps its state; repeatable."""
        self._log.slots[-1].append(track)


_logs: ContextVar[dict[int, Log] | None] = ContextVar("ds4cli_logs", default=None)
_frame: ContextVar[Frame | None] = ContextVar("ds4cli_frame", default=None)


def current() -> Frame | None:
    """The frame of the module that is running, if its cache is being recorded."""
    return _frame.get()


def recording() -> bool:
    """Whether any cache is being recorded in this context."""
    return _logs.get() is not None


@contextmanager
def logging(caches: list[ArraysCache], stop_rows: int) -> Iterator[list[Log]]:
    """Record the rows of these caches in this context, beside whatever is recorded already."""
    logs = [Log(c, stop_rows) for c in caches]
    token = _logs.set({**(_logs.get() or {}), **{id(log.cache): log for log in logs}})
    try:
        yield logs
    finally:
        _logs.reset(token)


def run(call, self, args: tuple, kwargs: dict, slot: int = 0) -> Any:
    """Run a module's call, inside a frame when it was given a recorded cache."""
    logs = _logs.get()
    log = _find(logs, args, kwargs) if logs else None
    if log is None:
        return call(self, *args, **kwargs)
    outer = _frame.get()
    if outer is not None and outer.cache is log.cache:
        outer.delegated = True
    token = _frame.set(Frame(log, slot))
    try:
        return call(self, *args, **kwargs)
    finally:
        _frame.reset(token)


def _find(logs: dict[int, Log], args: tuple, kwargs: dict) -> Log | None:
    # Called for every layer and token; mlx-lm hands a cache on as the last argument.
    values = (*kwargs.values(), *args)[::-1]
    for value in values:
        log = logs.get(id(value))  # a log holds its cache, so an id is never another's
        if log is not None:
            return log
    parts = (_find(logs, v.caches, {}) for v in values if isinstance(v, CacheList))
    return next(filter(None, parts), None)


def framed(cls: type, slot: int = 0) -> type:
    """A subclass of `cls` whose call opens a frame; its first recorded slot is `slot`."""
    inner = cls.__call__

    def __call__(self, *args, **kwargs):
        return run(inner, self, args, kwargs, slot)

    return derived(cls, __call__)
