"""What DSpark and DFlash share: a small transformer that names a whole block in one pass.

Its context is the target's own: every committed token gives, from the residual stream after a few
target layers, keys and values for each draft layer, and no more. They are kept in a buffer, so
going back is a cursor move. The block, [anchor, mask, mask, ...], attends to them and to itself.

Sources: DeepSpec `deepspec/modeling/dspark/qwen3/modeling.py`, z-lab `dflash/model_mlx.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from ds4cli.arrays import tables
from ds4cli.drafters import vocabulary, weights
from ds4cli.drafters.block_config import BlockConfig, read
from ds4cli.drafters.drafter import Drafter, Together
from ds4cli.drafters.rows import Rows
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError
from ds4cli.sampling import Asked, Chooser, Sampler, pick_together

STEP = 256  # rows by which the context buffer grows
MOST_WAITING = 256  # rows that wait for a proposal before they are projected anyway

# (layer, block keys, block values) -> keys, values of context and block, first position of both
Join = Callable[[int, mx.array, mx.array], tuple[mx.array, mx.array]]
# Of each text, the position that its block stands at, and its context.
Places = Sequence[tuple[int, Join]]


class BlockAttention(nn.Module):
    """Qwen3 attention whose block rows see all of the block and of the context, or a window."""

    def __init__(self, config: BlockConfig, layer: int):
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(size, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, size, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            dim,
            config.rope_theta,
            False,
            config.rope_scaling,
            config.max_position_embeddings,
        )
        self._dim, self._layer, self._window = dim, layer, config.windows[layer]
        self._sees_ahead, self._context_rows = config.sees_ahead, config.context_rows

    def keys_values(self, x: mx.array, pos: int | mx.array) -> tuple[mx.array, mx.array]:
        """Of rows x (texts, n, H) that stand at pos, pos + 1, ... of each: (texts, heads, n, D)."""
        keys = self.k_norm(self._split(self.k_proj(x)))
        return self.rope(keys, offset=pos), self._split(self.v_proj(x))

    def __call__(self, x: mx.array, places: Places) -> mx.array:
        pos = places[0][0] if len(places) == 1 else mx.array([at for at, _ in places])
        queries = self.rope(self.q_norm(self._split(self.q_proj(x))), offset=pos)
        keys, values = self.keys_values(x, pos)
        outs = []
        for i, (_, join) in enumerate(places):
            own = slice(i, i + 1)
            seen = self._see(*join(self._layer, keys[own], values[own]), x.shape[1])
            outs.append(self._attend(queries[own], *seen))
        out = mx.concatenate(outs).transpose(0, 2, 1, 3)
        return self.o_proj(out.reshape(*x.shape[:2], -1))

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
    ) -> mx.array:
        scale = self._dim**-0.5
        return scaled_dot_product_attention(queries, keys, values, None, scale=scale, mask=mask)

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._dim).transpose(0, 2, 1, 3)

    def _see(
        self, keys: mx.array, values: mx.array, block: int
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """What the block's rows may see; in a windowed layer not those behind them, as z-lab trains
        it, unless the config says so."""
        if self._window is None:
            first = max(0, keys.shape[2] - block - (self._context_rows or keys.shape[2]))
            return keys[:, :, first:], values[:, :, first:], None
        first = max(0, keys.shape[2] - block - self._window + 1)
        keys, values = keys[:, :, first:], values[:, :, first:]
        rows = keys.shape[2]
        back = mx.arange(rows - block, rows)[:, None] - mx.arange(rows)[None]
        is_seen = back < self._window
        return keys, values, is_seen if self._sees_ahead else is_seen & (back >= 0)


class BlockLayer(nn.Module):
    """A Qwen3 block."""

    def __init__(self, config: BlockConfig, layer: int):
        super().__init__()
        self.self_attn = BlockAttention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, places: Places) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), places)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockHead(nn.Module):
    """The backbone, with the checkpoint's own embedding and output projection or the target's.

    Make one with `load`. taps: target layers whose residual stream it wants, in that order.
    """

    kind = ""
    layer_class = BlockLayer

    def __init__(self, config: BlockConfig, target: Target):
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, i) for i in range(len(config.windows))]
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.config = config
        self._target = target
        self._target_ids: mx.array | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: mx.Dtype | None) -> BlockHead:
        """The head in a folder, evaluated. dtype: float32 unpacks and casts, None is as stored.

        ModelError for a tensor that is missing, is not known or has another shape, and where the
        target lacks a part that the checkpoint leaves to it.
        """
        config = read(
            json.loads((folder / "config.json").read_text("utf-8")), cls.kind, folder.name
        )
        head, tensors = cls(config, target), _tensors(folder)
        head._fit_target()
        head._take_vocabulary(tensors)
        weights.fill(head, tensors, folder.name, dtype=dtype)
        return head

    def _fit_target(self) -> None:
        config, target = self.config, self._target
        if config.hidden_size != target.hidden_size or max(config.taps) >= target.num_layers:
            raise ModelError(
                f"the head wants layer {max(config.taps)} of a target of size "
                f"{config.hidden_size}; this one has {target.num_layers} layers of size "
                f"{target.hidden_size}"
            )
        if config.vocab_size != target.vocab_size:
            raise ModelError(
                f"the head knows {config.vocab_size} token ids, the target's embedding has "
                f"{target.vocab_size}"
            )

    def _take_vocabulary(self, tensors: dict[str, mx.array]) -> None:
        """Build the embedding, projection and id table that the checkpoint has of its own."""
        config = self.config
        offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
        if config.draft_vocab_size != config.vocab_size:
            sizes = config.draft_vocab_size, config.vocab_size
            self._target_ids = vocabulary.target_ids(offsets, mask, *sizes)
        has_head = "lm_head.weight" in tensors or self._target_ids is not None
        if "embed_tokens.weight" in tensors:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if has_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        elif "embed_tokens.weight" not in tensors or not config.tie_word_embeddings:
            self._target.prove()

    def context(self, hidden: Sequence[mx.array]) -> mx.array:
        """The context vectors of tokens: one (n, H) array for each of `taps` -> (n, H)."""
        taps = mx.concatenate(list(hidden), axis=-1).astype(self.norm.weight.dtype)
        return self.hidden_norm(self.fc(taps))

    def __call__(self, ids: mx.array, places: Places) -> mx.array:
        """The blocks `ids` (texts, n) of some texts: their slots' vectors (texts, n, H)."""
        embed = self.embed_tokens if "embed_tokens" in self else self._target.embed
        x = embed(ids).astype(self.norm.weight.dtype)
        for layer in self.layers:
            x = layer(x, places)
        return self.norm(x)

    def logits(self, slots: mx.array) -> mx.array:
        """(n, H) -> (n, draft vocabulary)"""
        if "lm_head" in self:
            return self.lm_head(slots)
        if "embed_tokens" in self and self.config.tie_word_embeddings:
            return self.embed_tokens.as_linear(slots)
        return self._target.output(slots)

    def spread(self, rows: mx.array) -> mx.array:
        """Logits (n, draft vocabulary) over the target's ids, so that both see the same noise."""
        if self._target_ids is None:
            return rows
        return vocabulary.spread(rows, self._target_ids, self.config.vocab_size)


def _tensors(folder: Path) -> dict[str, mx.array]:
    # Early checkpoints of SpecForge kept what stands beside the backbone in a part of its own.
    found = weights.read_all(folder)
    return {name.removeprefix("logit_head."): x for name, x in found.items()}


class Context:
    """Keys and values of committed tokens for each draft layer, at their absolute positions.

    Rows stand in [first, end); those before `pos` count. New rows wait as references to the
    target's residual stream and are projected together.
    """

    def __init__(self, head: BlockHead):
        self.pos = 0
        self._head = head
        self._first = self._end = 0
        self._waiting = Rows(0)
        self._buffers: list[list[mx.array]] = []  # [keys, values] a layer, (1, heads, rows, D)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in self._buffers for array in pair)

    def has(self, pos: int) -> bool:
        """Whether there are rows right up to pos."""
        return self._first < pos <= self.pos

    def seek(self, pos: int) -> None:
        """Rows from pos on do not count, for now."""
        self.pos = min(pos, self._end)

    def add(self, start: int, hidden: Sequence[mx.array]) -> None:
        """Rows from start on; they replace what stood there and after. A gap starts anew."""
        if not self._first <= start <= self.pos:
            self._first = start
            self._waiting = Rows(start)
        self._waiting.put(start, hidden)
        self.pos = self._end = self._waiting.end
        if len(self._waiting) > MOST_WAITING:
            self._project()
            mx.async_eval(self._buffers)

    def join(self, pos: int) -> Join:
        """What the attention of a block that stands at pos sees. Call it when `has(pos)`."""
        self._project()
        rows = pos - self._first

        def joined(layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            block = keys, values
            if pos < self._end:  # rows behind may count again
                old_keys, old_values = (buffer[:, :, :rows] for buffer in self._buffers[layer])
                all_keys = mx.concatenate([old_keys, keys], axis=2)
                return all_keys, mx.concatenate([old_values, values], axis=2)
            self._write(layer, rows, block)
            end = rows + keys.shape[2]
            shown_keys, shown_values = (buffer[:, :, :end] for buffer in self._buffers[layer])
            return shown_keys, shown_values

        return joined

    def _project(self) -> None:
        waiting = self._waiting
        if not len(waiting):
            return
        x = self._head.context(waiting.take(waiting.start, waiting.end))
        for i, layer in enumerate(self._head.layers):
            rows = layer.self_attn.keys_values(x[None], waiting.start)
            self._write(i, waiting.start - self._first, rows)
        self._waiting = Rows(self._end)

    def _write(self, layer: int, row: int, rows: tuple[mx.array, mx.array]) -> None:
        if layer == len(self._buffers):
            self._buffers.append([mx.zeros((*r.shape[:2], 0, r.shape[3]), r.dtype) for r in rows])
        buffers = self._buffers[layer]
        for i, new in enumerate(rows):
            end = row + new.shape[2]
            if end > buffers[i].shape[2]:
                more = -(-end // STEP) * STEP - row
                space = mx.zeros((*new.shape[:2], more, new.shape[3]), new.dtype)
                buffers[i] = mx.concatenate([buffers[i][:, :, :row], space], axis=2)
            buffers[i][:, :, row:end] = new

    def fork(self) -> Context:
        """A twin; rows are shared until one of the two writes."""
        twin = copy.copy(self)
        twin._waiting = self._waiting.copy()
        # `mx.array` makes a second array object over the same data, copied on write.
        twin._buffers = [[mx.array(buffer) for buffer in pair] for pair in self._buffers]
        return twin


class BlockDrafter(Drafter):
    """Names the next tokens of one session with a head that it shares with others."""

    is_free = False
    assumed_chance = 0.8  # heads are trained on their target
    worth_trying = 8
    drafts_at_once = True

    def __init__(self, head: BlockHead, target: Target, sampler: Sampler):
        self._head, self._target, self.sampler = head, target, sampler
        self._context = Context(head)
        self.taps, self.max_drafts = head.taps, head.config.guesses

    @property
    def nbytes(self) -> int:
        """Bytes of the context."""
        return self._context.nbytes

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most n guesses, from one pass; none without the row before the anchor."""
        return self.together().propose([self], [tokens], n)[0]

    def together(self) -> BlocksTogether:
        return BlocksTogether()

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether there is context right up to the last token, behind which a block stands. How
        sure it was of another one counts no more."""
        self.confidence = 0
        return self._context.has(len(tokens) - 1)

    def place(self, anchor: int) -> tuple[int, Join]:
        """Where a block behind the token at `anchor` stands."""
        return anchor, self._context.join(anchor)

    @classmethod
    def choose(
        cls, parts: Sequence[Any], texts: Sequence[Sequence[int]], slots: mx.array
    ) -> list[list[int]]:
        """The tokens that slots (texts, n, H) name after each text. parts: of this class."""
        return tables(cls.picks(parts, texts, slots))

    @classmethod
    def picks(
        cls, parts: Sequence[BlockDrafter], texts: Sequence[Sequence[int]], slots: mx.array
    ) -> mx.array:
        """The same as an array (texts, n)."""
        head, (count, n, _) = parts[0]._head, slots.shape
        rows = head.spread(head.logits(slots.reshape(count * n, -1)))
        if any(part.sampler.needs_history for part in parts):
            of_each = rows.reshape(count, n, -1)
            return one_by_one(parts, texts, n, lambda i, _: of_each[:, i])
        pairs = zip(parts, texts, strict=True)
        asked = [Asked(part.sampler, n, len(text)) for part, text in pairs]
        return pick_together(rows, asked).reshape(count, n)

    def observe(self, start: int, hidden: Sequence[mx.array]) -> None:
        if len(hidden[0]):
            self._context.add(start, hidden)

    def rewind(self, pos: int) -> None:
        self._context.seek(pos)

    def forget(self) -> None:
        self._context = Context(self._head)

    def use(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def fork(self) -> BlockDrafter:
        twin = copy.copy(self)
        twin._context = self._context.fork()
        return twin


class BlocksTogether(Together):
    """Names the blocks of several texts in one pass; only attention sees each text's own context,
    one after the other."""

    def ask(
        self, parts: Sequence[BlockDrafter], texts: Sequence[Sequence[int]], n: int
    ) -> list[list[int]]:
        head, n = parts[0]._head, int(min(n, parts[0].max_drafts))
        places = [part.place(len(text) - 1) for part, text in zip(parts, texts, strict=True)]
        # The whole block, however few are asked for: it was trained as a whole.
        config = head.config
        masks = [config.mask_token_id] * (config.block_size - 1)
        slots = head(mx.array([[text[-1], *masks] for text in texts]), places)
        return parts[0].choose(parts, texts, slots[:, config.first_slot :][:, :n])


def one_by_one(
    parts: Sequence[BlockDrafter],
    texts: Sequence[Sequence[int]],
    n: int,
    row: Callable[[int, mx.array], mx.array],
) -> mx.array:
    """Guess after guess (texts, n), none evaluated unless a sampler asks for history. row: of the
    slot's number and the tokens before it (texts,) the logits (texts, V)."""
    picks = [mx.array([text[-1] for text in texts])]
    chooser = Chooser([part.sampler for part in parts], texts)
    for i in range(n):
        picks.append(chooser.pick(row(i, picks[-1])))
    return mx.stack(picks[1:], axis=1)
