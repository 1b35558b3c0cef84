"""RecurrentGemma's RG-LRU: `rnn_scan` returns every state, so a row is the state itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, calls, rebound
from ds4cli.tape import frames
from ds4cli.tape.families.short_conv import arm_convolutions
from ds4cli.tape.tracks import States

name = "RG-LRU"


def owns(module: nn.Module) -> bool:
    inner: type = type(getattr(module, "rg_lru", None))
    return calls(inner, "rnn_scan")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, frames.framed(type(module)))
    arm_convolutions(module, swaps)
    inner: type = type(module.rg_lru)
    swaps.swap(module.rg_lru, _recording(inner))


@cache
def _recording(cls: type) -> type:
    return rebound(cls, {"rnn_scan": _recorded})


def _recorded(scan: Callable) -> Callable:
    @wraps(scan)
    def rnn_scan(x, a, h0):
        y, last = scan(x, a, h0)
        frame = frames.current()
        if frame is not None:
            frame.add(States((y,)))
        return y, last

    return rnn_scan
