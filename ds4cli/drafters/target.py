"""The parts of the target that a drafting head shares: embedding, final norm, output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.arrays import number
from ds4cli.caches.build import build_caches
from ds4cli.errors import ModelError
from ds4cli.hooks.taps import Taps
from ds4cli.models import parts

# Largest difference from the model's own logits, as a share of their size.
TOLERANCE = {mx.float32: 1e-4}
HALF_TOLERANCE = 3e-2
PROBE = (3, 1, 4, 1, 5)

# What the model says to a text of its own: tokens (n,) -> logits (n, V).
Read = Callable[[Sequence[int]], mx.array]


class Target:
    """A loaded target as its heads see it. ModelError where a part is not to be found.

    model: an mlx-lm model. hidden_size, num_layers: of the layers it runs. vocab_size: of its
    embedding. read: calls it, if that takes more than to call it. output: its output projection,
    where the model itself has only a part of that.
    """

    def __init__(self, model: Any, read: Read | None = None, output: nn.Module | None = None):
        self.model = model
        self._read = read or self._read_alone
        self.num_layers = len(model.layers)
        rows = parts.embedding_rows(model)
        if rows is None:
            raise ModelError("the target has no token embedding under a name known to ds4cli")
        self.vocab_size = rows
        self._embedding = _part(model, parts.EMBEDDINGS, "token embedding")
        self._norm = _part(model, parts.NORMS, "final norm")
        self._output = output or parts.output(model) or self._embedding.as_linear
        self.hidden_size = self._embedding(mx.array([0])).shape[-1]

    def embed(self, ids: mx.array) -> mx.array:
        """ids (n,) -> (n, H)"""
        return self._embedding(ids)

    def norm(self, hidden: mx.array) -> mx.array:
        """The final norm: (n, H) -> (n, H)"""
        return self._norm(hidden)

    def output(self, hidden: mx.array) -> mx.array:
        """The output projection alone: (n, H) -> logits (n, V)"""
        return self._output(hidden[None])[0]

    def prove(self) -> None:
        """Norm and head on the last layer's residual must give the model's own logits: else this
        model scales, caps or shifts somewhere, and a head made of its parts would guess badly.
        """
        taps = Taps.arm(self.model, [self.num_layers - 1])
        with taps.noting() as noted:
            logits = self._read(PROBE)
        ours = self.output(self.norm(noted[0]))
        if ours.shape != logits.shape:
            raise ModelError(f"the target's head gives {ours.shape}, its logits are {logits.shape}")
        error, size = number(mx.abs(ours - logits).max()), number(mx.abs(logits).max())
        if not error <= TOLERANCE.get(logits.dtype, HALF_TOLERANCE) * max(size, 1e-6):
            raise ModelError(
                f"norm and head of `{type(self.model).__module__}` do not make its logits "
                f"(they differ by {error:.2g}, the logits reach {size:.2g})"
            )

    def _read_alone(self, tokens: Sequence[int]) -> mx.array:
        return self.model(mx.array([[*tokens]]), cache=build_caches(self.model, 0))[0]


def _part(model: nn.Module, names: Sequence[str], what: str) -> nn.Module:
    """The outermost module with one of these names."""
    found = next(parts.named(model, names), None)
    if found is None:
        raise ModelError(f"the target has no {what} under a name known to ds4cli")
    return found
