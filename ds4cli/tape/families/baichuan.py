"""Baichuan-M1's two-tap convolutions of k and v: each slot is the last row, after the heads."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, derived
from ds4cli.tape import frames
from ds4cli.tape.tracks import Tail

name = "two-tap convolution"


def owns(module: nn.Module) -> bool:
    return hasattr(module, "_custom_convolution")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))


@cache
def _recording(cls: Any) -> type:
    def _custom_convolution(self, u, weights, state=None):
        frame = frames.current()
        if frame is not None:
            frame.add(Tail((u.swapaxes(1, 2),), 1, time_axis=2))
        return cls._custom_convolution(self, u, weights, state)

    return frames.framed(derived(cls, _custom_convolution))
