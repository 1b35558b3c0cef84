"""DSpark: a block drafter whose guesses know the guess before them.

Slot i, the anchor's too, names the token at the anchor's position + i + 1. A Markov head adds what
usually follows the token before, one slot after another, which costs a small product a slot.
A confidence head says how likely each guess is kept.

Source: DeepSpec `deepspec/modeling/dspark/{markov_head,common}.py`, `qwen3/modeling.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.arrays import numbers, tables
from ds4cli.drafters import block_config
from ds4cli.drafters.block import BlockDrafter, BlockHead, one_by_one
from ds4cli.drafters.block_config import BlockConfig
from ds4cli.drafters.target import Target

# Chances between two levels of `confidence`.
LEVELS = (0.4, 0.55, 0.65, 0.75, 0.85)


def check(config: dict[str, Any], target_config: dict[str, Any], name: str) -> None:
    """UsageError naming the field in which the head differs from its target, or is unknown."""
    block_config.check(config, target_config, "dspark", name)


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Fields that are ignored without knowing what they mean."""
    return block_config.unknown_fields(config)


class MarkovHead(nn.Module):
    """What to add to a slot's logits after the token before: rank r, in one of three ways.

    vanilla: w2(w1[prev]). gated: w2(g * w1[prev]), g = sigmoid(gate_proj([slot, w1[prev]])).
    rnn: a state over the block's slots, from joint_proj([state, w1[prev], slot]).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, rank = config.hidden_size, config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if config.markov_type == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        if config.markov_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def __call__(
        self, prev: mx.array, slot: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """prev: w1 of the tokens before, (n, r); slot (n, H) -> (n, draft ids), new state."""
        if "gate_proj" in self:
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([slot, prev], axis=-1)))
            return self.markov_w2(gate * prev), None
        if "joint_proj" in self:
            return self._recur(prev, slot, mx.zeros_like(prev) if state is None else state)
        return self.markov_w2(prev), None

    def _recur(self, prev: mx.array, slot: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        joint = self.joint_proj(mx.concatenate([state, prev, slot], axis=-1))
        gate, candidate, out = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        state = gate * state + (1 - gate) * mx.tanh(candidate)
        return self.markov_w2(mx.tanh(out)), state


class ConfidenceHead(nn.Module):
    """How likely a slot's guess is kept, from the slot, and the token before it if trained so."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        rank = config.markov_rank if config.has_markov_confidence else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)

    def __call__(self, features: mx.array) -> mx.array:
        """(n, H or H + r) -> chances (n,)"""
        return mx.sigmoid(self.proj(features)[:, 0].astype(mx.float32))


class DSparkHead(BlockHead):
    """The backbone, with a Markov and a confidence head where the checkpoint has them."""

    kind = "dspark"

    def __init__(self, config: BlockConfig, target: Target):
        super().__init__(config, target)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.has_confidence:
            self.confidence_head = ConfidenceHead(config)

    def chances(self, slots: mx.array, before: mx.array | None) -> mx.array | None:
        """How likely each guess is kept if those before it are: (n,). before: w1 of the tokens
        before them, (n, r)."""
        if "confidence_head" not in self:
            return None
        if self.config.has_markov_confidence:
            assert before is not None, "such a head has a Markov head, too"
            slots = mx.concatenate([slots, before], axis=-1)
        return self.confidence_head(slots)


class DSparkDrafter(BlockDrafter):
    """Drafts with a `DSparkHead`, up to the first guess below its `confidence_threshold`.

    confidence: from the confidence head, the geometric mean g of the guesses' chances as 1, 2, 4,
    8, 16 or 32: g below 0.4, 0.55, 0.65, 0.75, 0.85, or above. 0 without such a head.
    """

    name = "dspark"

    @classmethod
    def choose(
        cls, parts: Sequence[Any], texts: Sequence[Sequence[int]], slots: mx.array
    ) -> list[list[int]]:
        head, before = parts[0]._head, None
        if "markov_head" in head:
            picks, before = _chain(parts, texts, slots)
        else:
            picks = cls.picks(parts, texts, slots)
        flat = slots.reshape(-1, slots.shape[-1])
        chances = head.chances(flat, None if before is None else before.reshape(len(flat), -1))
        if chances is None:
            return tables(picks)
        mx.eval(picks, chances)
        sure = numbers(chances)
        n = slots.shape[1]
        own = [sure[i * n : (i + 1) * n] for i in range(len(parts))]
        return [p._sure(*x) for p, *x in zip(parts, tables(picks), own, strict=True)]

    def _sure(self, guesses: list[int], chances: list[float]) -> list[int]:
        """Up to the first that is too unlikely."""
        low = [i for i, p in enumerate(chances) if p < self._head.config.confidence_threshold]
        n = low[0] if low else len(guesses)
        if n:
            self.confidence = 1 << bisect_right(LEVELS, prod(chances[:n]) ** (1 / n))
        return guesses[:n]


def _chain(
    parts: Sequence[BlockDrafter], texts: Sequence[Sequence[int]], slots: mx.array
) -> tuple[mx.array, mx.array]:
    """Guess after guess: tokens (texts, n), and w1 of the token before each (texts, n, r)."""
    head, (count, n, _) = parts[0]._head, slots.shape
    rows = head.logits(slots.reshape(count * n, -1)).reshape(count, n, -1)
    before: list[mx.array] = []
    states: list[mx.array | None] = [None]

    def row(i: int, previous: mx.array) -> mx.array:
        before.append(head.markov_head.markov_w1(previous))
        bias, state = head.markov_head(before[-1], slots[:, i], states[-1])
        states.append(state)
        return head.spread(rows[:, i] + bias)

    return one_by_one(parts, texts, n, row), mx.stack(before, axis=1)
