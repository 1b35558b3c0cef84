"""The tiny models of the package; with an mlx-lm that lacks a family its tests are skipped."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ds4cli.bench import tiny
from ds4cli.bench.tiny import CFG, V, quantise

__all__ = ["CFG", "V", "build", "ids", "quantise"]


def build(name: str, *args, **options):
    """`ds4cli.bench.tiny.build`."""
    module = f"mlx_lm.models.{name.split(':')[0]}"
    pytest.importorskip(module, reason=f"this mlx-lm has no {name}")
    return tiny.build(name, *args, **options)


def ids(n: int, seed: int = 1) -> mx.array:
    """`n` random token ids, int32 (n,)."""
    return mx.random.randint(0, V, (n,), key=mx.random.key(seed)).astype(mx.int32)
