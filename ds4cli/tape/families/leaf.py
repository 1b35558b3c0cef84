"""Any other recurrence: call the module again.

A *leaf* is the innermost module that is handed the recurrent cache; which one that is shows when it
is called, so every module that may be one is armed. A row is the module's own input; the replay
gives the kept rows to the module with a new cache that holds the start slots. It costs the module's
projections, so known recurrences have their own file; it needs no knowledge, so an architecture
that is new today works today.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ds4cli.errors import ModelError
from ds4cli.hooks.rebind import Swaps, derived, names_used
from ds4cli.tape import frames
from ds4cli.tape.tracks import Track

if TYPE_CHECKING:
    from typing_extensions import Self

_CACHE = object()  # stands for the cache among recorded arguments


@dataclass
class _Row:
    """Stands for row array number `index` among recorded arguments."""

    index: int


@dataclass
class LeafRows(Track):
    """data: the array arguments (1, T, ...), the same for every slot: one call moves them all."""

    module: nn.Module
    args: tuple
    kwargs: dict
    recomputes = True

    def key(self, start: mx.array | None) -> Hashable:
        return id(self.module)

    @classmethod
    def join(cls, tracks: Sequence[Self]) -> Self:
        if any(t._call() != tracks[0]._call() for t in tracks):
            raise ModelError(f"calls of `{type(tracks[0].module).__name__}` can't be joined")
        return super().join(tracks)

    def _call(self) -> tuple:
        return id(self.module), self.args, self.kwargs

    @classmethod
    def replay(
        cls, tracks: Sequence[Self], starts: Sequence[mx.array | None], rows: int
    ) -> list[mx.array]:
        call = tracks[0].cut(0, rows)
        fresh: Any = ArraysCache(len(starts))
        fresh.cache = list(starts)
        args = [call._real(a, fresh) for a in call.args]
        call.module(*args, **{name: call._real(a, fresh) for name, a in call.kwargs.items()})
        return list(fresh.cache)

    def _real(self, arg: Any, fresh: ArraysCache) -> Any:
        if arg is _CACHE:
            return fresh
        return self.data[arg.index] if isinstance(arg, _Row) else arg


def owns(module: nn.Module) -> bool:
    """Whether it is handed a cache and does not use it as KV rows."""
    return _takes_cache(type(module)) and "update_and_fetch" not in names_used(type(module))


@cache
def _takes_cache(cls: type) -> bool:
    return "cache" in signature(cls.__call__).parameters


def candidates(model: nn.Module, known: list[nn.Module]) -> list[nn.Module]:
    """Modules that may be leaves, outside the known recurrent modules."""
    inside = {id(part) for module in known for part in module.modules()}
    return [m for m in model.modules() if id(m) not in inside and owns(m)]


def innermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those with nothing inside that is handed a cache: the leaves, as far as one can see."""
    return [m for m in modules if sum(_takes_cache(own) for own in _classes(m)) == 1]


def _classes(module: nn.Module) -> list[type]:
    """Of the module and of all inside it."""
    return [type(part) for part in module.modules()]


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))


@cache
def _recording(cls: type) -> type:
    def __call__(self, *args, **kwargs):
        out = cls.__call__(self, *args, **kwargs)
        frame = frames.current()
        if frame is None or frame.delegated:
            return out
        if any(a is frame.cache for a in (*args, *kwargs.values())):
            frame.add_all(_record(self, frame.cache, args, kwargs))
        return out

    return frames.framed(derived(cls, __call__))


def _record(module: nn.Module, own: ArraysCache, args: tuple, kwargs: dict) -> LeafRows:
    """The call with its arrays taken out. An argument that may depend on the position is refused:
    the call could not be cut or joined."""
    rows = next(a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)).shape[1]
    data: list[mx.array] = []

    def stand_in(arg: Any) -> Any:
        if arg is own:
            return _CACHE
        if isinstance(arg, mx.array) and arg.ndim > 1 and arg.shape[1] == rows:
            data.append(arg)
            return _Row(len(data) - 1)
        if isinstance(arg, bool):
            return arg
        if arg is None or isinstance(arg, str):
            # "causal" comes with calls of several rows only, and a recurrence is causal anyway.
            return None
        raise ModelError(f"`{type(module).__name__}` takes a `{type(arg).__name__}` with its rows")

    args = tuple(stand_in(a) for a in args)
    kwargs = {name: stand_in(a) for name, a in kwargs.items()}
    return LeafRows(tuple(data), module, args, kwargs)
