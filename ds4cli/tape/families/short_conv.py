"""Short convolutions: the slot is the last kernel - 1 rows of the convolution's input.

Alone in LFM2 and gear; in front of the state in every family with a recurrence.
"""

from __future__ import annotations

from functools import cache
from inspect import signature

import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, derived
from ds4cli.tape import frames
from ds4cli.tape.tracks import Tail

name = "short convolution"


def owns(module: nn.Module) -> bool:
    return bool(_convolutions(module)) and "cache" in type(module).__call__.__code__.co_varnames


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _framed(type(module)))
    arm_convolutions(module, swaps)


def arm_convolutions(module: nn.Module, swaps: Swaps) -> None:
    """Record the input of every convolution in `module`; slots are given in call order."""
    for conv in _convolutions(module):
        keep = conv.weight.shape[1] - 1
        swaps.swap(conv, _recording(type(conv), keep, 0 if _takes_history(type(conv)) else keep))


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Convolutions of the module itself and of plain wrappers around one (Kimi's ShortConv1d)."""
    children = [c for c in module.children().values() if isinstance(c, nn.Module)]
    found = [c for c in children if _is_convolution(c)]
    wrapped = [g for c in children for g in c.children().values() if _only_child(c, g)]
    return found + wrapped


def _is_convolution(module: object) -> bool:
    """MLX's, or a model's own of that name (RecurrentGemma)."""
    return isinstance(module, nn.Conv1d) or type(module).__name__ == "Conv1d"


def _only_child(parent: nn.Module, child: object) -> bool:
    return _is_convolution(child) and len(parent.children()) == 1


@cache
def _takes_history(cls: type) -> bool:
    """Whether it is given the history apart from the new rows."""
    return "cache" in signature(cls.__call__).parameters


@cache
def _framed(cls: type) -> type:
    return frames.framed(cls)


@cache
def _recording(cls: type, keep: int, lead: int) -> type:
    """Records the input (1, lead + rows, channels), whose first `lead` rows are the history."""
    call = cls.__call__

    def __call__(self, x, **history):
        frame = frames.here.frame
        if frame is not None:
            frame.tracks[frame.next] += (Tail((x,), keep, lead=lead),)
            frame.next += 1
        return call(self, x, **history)

    return derived(cls, __call__)
