"""MTP heads of Qwen3-Next and Qwen3.5: one decoder layer of the target's own kind.

Row i pairs what the target's output head read at position i, h_i (the residual stream after the
final norm), with the token at i + 1, and names the token at i + 2:

    x_i = fc([pre_fc_norm_embedding(embed(t_{i+1})), pre_fc_norm_hidden(h_i)])
    y_i = norm(layer(x_i)),  logits = the target's output head on y_i

For more guesses the layer is run again, on y_i in place of h_{i+1} and on the guess in place of the
token (vLLM's qwen3_next_mtp.py and qwen3_5_mtp.py). The layer has a key and value row per position.
Only rows made of the target's own states stay: what a chain of guesses adds is cut off again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ds4cli.drafters import mtp_weights, weights
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.rows import Rows
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.models.weights import unpack
from ds4cli.sampling import Sampler
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tokens import common_prefix

# Model type -> module and class of its decoder layer.
LAYERS = {
    "qwen3_next": ("mlx_lm.models.qwen3_next", "Qwen3NextDecoderLayer"),
    "qwen3_5": ("mlx_lm.models.qwen3_5", "DecoderLayer"),
    "qwen3_5_moe": ("mlx_lm.models.qwen3_5", "DecoderLayer"),
}
REASONS = {
    "deepseek_v41": "its layers return hyper-connection streams, not one residual stream",
    "deepseek_v41_text": "its layers return hyper-connection streams, not one residual stream",
}
# Rows whose states are kept, to make them anew after going back: a horizon and one block.
KEPT_ROWS = 256 + MAX_BLOCK_TOKENS
# Rows that may wait to be made; the oldest are given up beyond that.
WAITING_ROWS = 16384
CHUNK_ROWS = 512


def find(folder: Path) -> bool:
    """Whether the weight files of the target's folder hold an MTP head."""
    return bool(mtp_weights.find(folder))


def check(config: dict[str, Any], target_config: dict[str, Any], name: str) -> None:
    """UsageError, naming the field, if ds4cli cannot run the MTP head of such a target.

    config: the head's, which for an MTP head is the target's own.
    """
    kind = target_config.get("model_type")
    if kind not in LAYERS:
        why = REASONS.get(kind, f"those of {', '.join(LAYERS)} can be used")
        raise UsageError(f"`{name}`: no MTP head of model_type `{kind}` can be used: {why}")
    for table in (config, config.get("text_config") or {}):
        for field in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            if (table.get(field) or 1) != 1:
                raise UsageError(f"`{name}`: {field} is `{table[field]}`, ds4cli runs one layer")
        if table.get("mtp_use_dedicated_embeddings"):
            raise UsageError(
                f"`{name}`: mtp_use_dedicated_embeddings is true, ds4cli uses the target's"
            )


class MtpHead(nn.Module):
    """The head of one target; sessions share it.

    layer: an mlx-lm decoder layer with full attention. taps: the target's last layer.
    """

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float, taps: tuple[int, ...]):
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps)
        self.taps = taps

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: mx.Dtype | None) -> MtpHead:
        """The head in the target's folder, evaluated. dtype: float32 to unpack and cast, None as
        stored. ModelError, naming the tensor, if it is not exactly what the target needs."""
        target.prove()
        tensors = mtp_weights.read(folder)
        if not tensors:
            raise ModelError(f"`{folder}` has no `mtp.*` tensors")
        more = sorted(t for t in tensors if t.startswith("layers.") and t.split(".")[1] != "0")
        if more:
            raise ModelError(f"`{folder}` has `mtp.{more[0]}`: ds4cli runs one MTP layer")
        has_experts = any(".mlp.switch_mlp." in name for name in tensors)
        layer, eps = _layer(target.model, has_experts)
        head = cls(layer, target.hidden_size, eps, (target.num_layers - 1,))
        weights.fill(head, tensors, str(folder), "mtp.")
        if dtype is not None:
            unpack(head, dtype)
            mx.eval(head.parameters())
        head.eval()
        return head

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: KVCache) -> mx.array:
        """embedded (n, H): of the tokens that follow; hidden (n, H): what the target's output head
        read. Adds n rows to the cache. Returns what the output head reads for the guesses (n, H).
        """
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(pair, axis=-1))[None]
        mask = create_attention_mask(x, cache)
        return self.norm(self.layers[0](x, mask=mask, cache=cache))[0]


def _layer(model: Any, has_experts: bool) -> tuple[nn.Module, float]:
    """mlx-lm's decoder layer with full attention for this model, and the epsilon of its norms."""
    if model.model_type not in LAYERS:
        raise ModelError(f"ds4cli knows no MTP layer of model_type `{model.model_type}`")
    module, name = LAYERS[model.model_type]
    args = copy.copy(getattr(model, "language_model", model).args)
    args.full_attention_interval = args.decoder_sparse_step = 1
    args.mlp_only_layers = []
    if not has_experts:
        args.num_experts = 0
    return getattr(import_module(module), name)(args, 0), args.rms_norm_eps


class MtpDrafter(Drafter):
    """Guesses by running an MTP head behind the target, again and again for more.

    Rows of the head wait until a proposal needs them. A row belongs to the token that follows, so
    going back leaves them standing until another token, or another state, comes. Text that was
    begun elsewhere (a loaded session) is seen from where it goes on.
    """

    name = "mtp"
    is_free = False
    assumed_chance = 0.8  # heads are trained on their target

    def __init__(self, head: MtpHead, target: Target, sampler: Sampler):
        self.taps = head.taps
        self._head = head
        self._target = target
        self._sampler = sampler
        self._begin(0)

    def _begin(self, pos: int) -> None:
        """No context; the next row is that of position `pos`."""
        self._base = pos
        self._cache = KVCache()  # its rows are counted from the base: rotary is relative
        self._paired: list[int] = []  # the token that each of its rows was made with
        self._sure = pos  # rows below are known to stand before the tokens proposed for
        self._rows = Rows(pos)

    @property
    def _made(self) -> int:
        """The first position whose row is still to be made."""
        return self._base + len(self._paired)

    # -- what the target read ---------------------------------------------------------------------

    def observe(self, start: int, hidden: Sequence[mx.array]) -> None:
        """hidden: one (n, H), the residual stream after the last layer, before the final norm."""
        if not self._base <= start <= self._rows.end:
            self._begin(start)
        self._rows.put(start, hidden)
        self._cut(start)
        self._sure = min(self._sure, start - 1)
        self._rows.drop(min(self._made, self._rows.end - KEPT_ROWS))
        if self._rows.end - self._made > WAITING_ROWS:
            self._give_up_old_rows()

    def _give_up_old_rows(self) -> None:
        """Too many rows wait for a proposal: the context is the newer half of them."""
        rows = self._rows
        rows.drop(rows.end - WAITING_ROWS // 2)
        self._begin(rows.start)
        self._rows = rows

    def rewind(self, pos: int) -> None:
        self._sure = min(self._sure, pos - 1)

    def forget(self) -> None:
        self._begin(0)

    def use(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def fork(self) -> MtpDrafter:
        twin = copy.copy(self)
        twin._paired, twin._rows = self._paired.copy(), self._rows.copy()
        twin._cache = KVCache()
        if self._paired:  # written in place, so each needs its own
            twin._cache.state = *map(mx.array, self._cache.state[:2]), self._cache.offset
        return twin

    def _cut(self, pos: int) -> None:
        """Forget the rows made for positions from `pos` on, and those that a chain added."""
        del self._paired[max(0, pos - self._base) :]
        self._cache.offset = len(self._paired)

    # -- guessing ---------------------------------------------------------------------------------

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """The head's own picks for the n tokens after `tokens`; [] where the state before the last
        of them is not known."""
        if n < 1 or not self._agree(tokens):
            return []
        return self._chain(self._catch_up(tokens), tokens, n)

    def _agree(self, tokens: Sequence[int]) -> bool:
        """Cut the rows that were made for other tokens; false if the last row cannot be made.

        Rows whose states are no longer kept stay as they are. At most one of them, the last before
        a place gone back to, was made for a token that another one replaced: one odd row of many.
        """
        last = len(tokens) - 2
        if not self._rows.start <= last < self._rows.end:
            return False
        first = max(self._sure, self._rows.start)
        made, text = self._paired[first - self._base :], list(tokens[first + 1 : last + 1])
        self._cut(first + common_prefix(made, text))
        self._sure = last
        return True

    def _catch_up(self, tokens: Sequence[int]) -> mx.array:
        """Make the rows up to the one that the last token is paired with: its output (1, H)."""
        out = None
        while self._made < len(tokens) - 1:
            first = self._made
            end = min(first + CHUNK_ROWS, len(tokens) - 1)
            if out is not None:
                mx.eval(self._cache.keys, self._cache.values)
            pairs = list(tokens[first + 1 : end + 1])
            hidden = self._target.norm(self._rows.take(first, end)[0])
            out = self._head(self._target.embed(mx.array(pairs)), hidden, self._cache)
            self._paired += pairs
        return out[-1:]

    def _chain(self, out: mx.array, tokens: Sequence[int], n: int) -> list[int]:
        """n picks, each made of the one before; evaluated together where the sampler allows."""
        pos, known, picks = len(tokens), list(tokens), []
        while True:
            row = self._target.head(out)
            picks.append(self._sampler.pick(row, pos + len(picks), known))
            if len(picks) == n:
                break
            if self._sampler.needs_history:
                known.append(picks[-1].item())
            out = self._head(self._target.embed(picks[-1]), out, self._cache)
        guesses = mx.concatenate(picks)
        mx.eval(guesses, self._cache.keys, self._cache.values)
        return guesses.tolist()
