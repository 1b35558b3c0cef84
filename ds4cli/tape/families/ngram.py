"""LongCat's n-gram embedding: the slot is the last n - 1 token ids, fewer at the start."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ds4cli.hooks.rebind import Swaps, derived
from ds4cli.tape import frames
from ds4cli.tape.tracks import Tail

name = "n-gram token ids"


def owns(module: nn.Module) -> bool:
    return hasattr(module, "_get_ngram_ids")


def arm(module: nn.Module, swaps: Swaps) -> None:
    swaps.swap(module, _recording(type(module)))


@cache
def _recording(cls: type) -> type:
    def __call__(self, input_ids, cache=None):
        frame = frames.current()
        if frame is not None:
            frame.add(Tail((input_ids.astype(mx.int64),), self.n - 1, grows=True))
        return cls.__call__(self, input_ids, cache)

    return frames.framed(derived(cls, __call__))
