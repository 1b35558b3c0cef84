"""Reading the residual stream of a model, after chosen layers, while the model runs.

Drafters such as DSpark, DFlash and MTP heads look at it. The chosen layer instances get a subclass
that notes what they return; outside of `noting` they behave as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.errors import ModelError
from ds4cli.hooks.rebind import derived

_noted: ContextVar[dict[int, list[Any]] | None] = ContextVar("ds4cli_taps", default=None)


class Taps:
    """Chosen layers of one model that can be listened to. Make one with `arm`.

    layers: 0-based, in the order in which a drafter wants them; -1 is what goes into the first one.
    """

    def __init__(self, layers: tuple[int, ...], modules: list[nn.Module]):
        self.layers = layers
        self._modules = modules

    @classmethod
    def arm(cls, model: Any, layers: Sequence[int]) -> Taps:
        """Put the layer instances into listening subclasses, once each. ModelError where the model
        has no such layers."""
        stack = getattr(model, "layers", None) or []
        beyond = [i for i in layers if not -1 <= i < len(stack)]
        if beyond:
            raise ModelError(
                f"the drafter reads layer `{beyond[0]}`, `{type(model).__module__}` has "
                f"{len(stack)} layers"
            )
        modules = [stack[max(0, i)] for i in layers]
        for module in modules:
            own: type = type(module)
            if not getattr(own, "is_tapped", False):
                module.__class__ = _listening(own)
        return cls(tuple(layers), modules)

    @contextmanager
    def noting(self) -> Iterator[list[mx.array]]:
        """Note one model call. The list holds, on exit, one lazy (n, H) array a layer."""
        notes: dict[int, list[Any]] = {id(m): [] for m in self._modules}  # (input, output)
        found: list[mx.array] = []
        token = _noted.set(notes)
        try:
            yield found
        finally:
            _noted.reset(token)
        pairs = zip(self.layers, self._modules, strict=True)
        found += [_rows(notes[id(m)], m, is_input=i < 0) for i, m in pairs]


def _rows(calls: list[Any], module: nn.Module, is_input: bool) -> mx.array:
    """The rows of the one output, or input, of a layer, the first of several; those of a batch one
    after the other."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    if len(calls) != 1:
        raise ModelError(f"`{name}` ran {len(calls)} times in one model call, not once")
    output = calls[0][0 if is_input else 1]
    output = output[0] if isinstance(output, tuple) else output
    if not isinstance(output, mx.array) or output.ndim != 3:
        raise ModelError(f"`{name}` does not return its residual stream as one array")
    return output[0] if output.shape[0] == 1 else output.flatten(0, 1)


@cache
def _listening(cls: type) -> type:
    call = cls.__call__

    def __call__(self, x, *args, **kwargs):
        output = call(self, x, *args, **kwargs)
        notes = _noted.get()
        if notes is not None and id(self) in notes:
            notes[id(self)].append((x, output))
        return output

    listening = derived(cls, __call__)
    listening.is_tapped = True  # type: ignore[attr-defined]  # a class made here
    return listening
