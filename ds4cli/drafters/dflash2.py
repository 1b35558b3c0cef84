"""DFlash 2: DFlash with short convolutions in its layers, and a choice among candidates.

Slot i names the token at the anchor's position + i; the anchor's own slot is not read. What goes
into attention and MLP and what comes out is convolved along the block: a fixed kernel for each
channel plus one that the input gives for each group of channels, no row seeing those behind it. Of
each slot the likeliest tokens are candidates; which is taken depends on the one taken before:

    score(c) = logit(c) + (predecessor[previous] * hidden_projection(slot)) . successor[c]

Source: QEfficient `modeling_dflash2.py`, and SpecForge's release as others have ported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.drafters import block_config
from ds4cli.drafters.block import BlockDrafter, BlockHead, BlockLayer, Places, one_by_one
from ds4cli.drafters.block_config import BlockConfig
from ds4cli.drafters.target import Target


def check(config: dict[str, Any], target_config: dict[str, Any], name: str) -> None:
    """UsageError naming the field in which the head differs from its target, or is unknown."""
    block_config.check(config, target_config, "dflash2", name)


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Fields that are ignored without knowing what they mean."""
    return block_config.unknown_fields(config)


class GroupedConv(nn.Module):
    """Two causal convolutions over the rows of blocks, (blocks, n, H) -> (blocks, n, H): before and
    after a part."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, taps, group = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.base_kernel = mx.zeros((2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)
        self._taps, self._group = taps, group

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """What goes into the part, and what `finish` wants to know."""
        kernels = self.kernel_projection(x).reshape(*x.shape[:2], 2, self._taps, -1)
        return self._convolve(x, kernels[:, :, 0], 0), kernels[:, :, 1]

    def finish(self, x: mx.array, kernels: mx.array) -> mx.array:
        return self._convolve(x, kernels, 1)

    def _convolve(self, x: mx.array, kernels: mx.array, side: int) -> mx.array:
        """kernels (blocks, n, taps, groups): tap t weighs the row t before."""
        out, n = mx.zeros_like(x), x.shape[1]
        for tap in range(min(self._taps, n)):
            by_group = mx.repeat(kernels[:, :, tap], self._group, axis=-1)
            weight = self.base_kernel[side, tap] + by_group
            out = out + weight * mx.pad(x[:, : n - tap], [(0, 0), (tap, 0), (0, 0)])
        return out


class ConvLayer(BlockLayer):
    """A Qwen3 block with convolutions around attention and MLP."""

    def __init__(self, config: BlockConfig, layer: int):
        super().__init__(config, layer)
        self.attention_conv = GroupedConv(config)
        self.mlp_conv = GroupedConv(config)

    def __call__(self, x: mx.array, places: Places) -> mx.array:
        into, kernels = self.attention_conv.prepare(self.input_layernorm(x))
        x = x + self.attention_conv.finish(self.self_attn(into, places), kernels)
        into, kernels = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return x + self.mlp_conv.finish(self.mlp(into), kernels)


class CandidateSelector(nn.Module):
    """What a candidate gains by the token before it."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook, self.successor_codebook = mx.zeros(shape), mx.zeros(shape)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def __call__(self, previous: mx.array, projected: mx.array, ids: mx.array) -> mx.array:
        """previous (n,), projected (n, r), candidates' ids (n, k) -> (n, k)"""
        wanted = self.predecessor_codebook[previous] * projected
        return (self.successor_codebook[ids] @ wanted[..., None])[..., 0]


class DFlash2Head(BlockHead):
    """The backbone with convolutions, and the selector."""

    kind = "dflash2"
    layer_class = ConvLayer

    def __init__(self, config: BlockConfig, target: Target):
        super().__init__(config, target)
        self.candidate_selector = CandidateSelector(config)

    def logits(self, slots: mx.array) -> mx.array:
        rows = super().logits(slots).astype(mx.float32) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return rows if cap is None else mx.tanh(rows / cap) * cap


class DFlash2Drafter(BlockDrafter):
    """Drafts with a `DFlash2Head`."""

    name = "dflash2"

    @classmethod
    def picks(
        cls, parts: Sequence[BlockDrafter], texts: Sequence[Sequence[int]], slots: mx.array
    ) -> mx.array:
        """Slot after slot among its candidates."""
        head, (count, n, _) = parts[0]._head, slots.shape
        selector = head.candidate_selector
        rows = head.logits(slots.reshape(count * n, -1)).reshape(count, n, -1)
        top_k = min(head.config.selector_top_k, rows.shape[-1])
        ids = mx.argpartition(-rows, kth=top_k - 1, axis=-1)[..., :top_k]
        projected = selector.hidden_projection(slots)

        def row(i: int, previous: mx.array) -> mx.array:
            own, found = rows[:, i], ids[:, i]
            scores = mx.take_along_axis(own, found, axis=-1)
            scores = scores + selector(previous, projected[:, i], found)
            nothing = mx.full(own.shape, -mx.inf, mx.float32)
            return mx.put_along_axis(nothing, found, scores.astype(mx.float32), axis=-1)

        return one_by_one(parts, texts, n, row)
