"""Give single module instances other behaviour, without touching their class or its module.

A recurrence is a plain function that a model file imports by name, so the obvious hook is to
replace that name, for the whole process. Instead, `rebound` derives a class whose methods run the
very same code objects over a copy of the globals in which that one name means something else, and
`Swaps` puts chosen instances into it. Other models, and other instances of the class, see nothing.

What breaks without each of them:

- a copy of the globals, in place of the model file's own: a draft of the target's family records
  into the target's tape, a model that somebody else loaded runs our code, and nothing can be undone
  while another engine lives;
- another class for the instance, in place of a wrapper around it: every parameter below has another
  path, so weights, heads on disk and quantisation do not find it, and code that asks for the
  module's attributes gets the wrapper's;
- the class's own name and module for the derived one: the check's reference tells stock classes by
  name, and what a user prints is not what he loaded;
- defaults and closure for the twin of a method: calls that leave an argument out fail, and so does
  every `super()`, which finds its class in the closure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import mlx.nn as nn


@cache
def calls(cls: type, name: str) -> bool:
    """Whether some method of `cls` uses the module-level function `name`."""
    return any(name in f.__code__.co_names and name in f.__globals__ for f in _methods(cls))


@cache
def names_used(cls: type) -> frozenset[str]:
    """Every global, attribute and method name that the methods of `cls` mention."""
    return frozenset(name for f in _methods(cls) for name in f.__code__.co_names)


def derived(cls: type, *methods: Callable) -> type:
    """A subclass of `cls`, under its name, with these methods."""
    body = {m.__name__: m for m in methods}
    return type(cls.__name__, (cls,), {**body, "__module__": cls.__module__})


def rebound(cls: type, replace: Mapping[str, Callable[[Any], Any]]) -> type:
    """A subclass of `cls` in which each global function named in `replace` is wrapped.

    replace: name -> maker; the maker gets the function, or the module, that the name means now.
    """
    globals_of: dict[int, dict] = {}
    methods = []
    for method in _methods(cls):
        names = [n for n in replace if n in method.__code__.co_names and n in method.__globals__]
        if names:
            scope = globals_of.setdefault(id(method.__globals__), dict(method.__globals__))
            scope.update({n: replace[n](method.__globals__[n]) for n in names})
            methods.append(with_globals(method, scope))
    return derived(cls, *methods)


def with_globals(function: FunctionType, scope: dict) -> FunctionType:
    """The same code, defaults and closure over other globals."""
    twin = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _methods(cls: type) -> list[FunctionType]:
    """Methods an instance runs, the most derived of each name, up to mlx's own base class."""
    found: dict[str, FunctionType] = {}
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                found.setdefault(name, value)
    return list(found.values())


class Swaps:
    """Instances whose class was exchanged, and how to undo it."""

    def __init__(self) -> None:
        self._originals: list[tuple[nn.Module, type]] = []

    def __len__(self) -> int:
        return len(self._originals)

    def swap(self, instance: nn.Module, cls: type) -> None:
        self._originals.append((instance, type(instance)))
        instance.__class__ = cls

    def undo(self) -> None:
        while self._originals:
            instance, cls = self._originals.pop()
            instance.__class__ = cls
