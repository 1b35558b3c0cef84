"""The tiny models of the package; with an mlx-lm that lacks a family its tests are skipped."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ds4cli.bench import tiny
from ds4cli.bench.tiny import BASE, CFG, V, quantise

__all__ = ["BASE", "CFG", "HEAD_BLOCK", "V", "build", "ids", "quantise"]

# The blocks of a drafting head that fits the tiny models, as its config states them.
HEAD_BLOCK = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def build(name: str, *args, **options):
    """`ds4cli.bench.tiny.build`."""
    module = f"mlx_lm.models.{name.split(':')[0]}"
    pytest.importorskip(module, reason=f"this mlx-lm has no {name}")
    return tiny.build(name, *args, **options)


def ids(n: int, seed: int = 1) -> mx.array:
    """`n` random token ids, int32 (n,)."""
    return mx.random.randint(0, V, (n,), key=mx.random.key(seed)).astype(mx.int32)
