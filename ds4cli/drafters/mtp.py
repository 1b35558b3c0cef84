"""MTP heads of Qwen3-Next and Qwen3.5: one decoder layer of the target's own kind.

Row i pairs what the target's output head read at position i, h_i (the residual stream after the
final norm), with the token at i + 1, and names the token at i + 2:

    x_i = fc([pre_fc_norm_embedding(embed(t_{i+1})), pre_fc_norm_hidden(h_i)])
    y_i = norm(layer(x_i)),  logits = the target's output head on y_i

The next row of a chain takes y_i in place of h_{i+1} (vLLM's qwen3_next_mtp.py, qwen3_5_mtp.py).
"""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ds4cli.drafters import mtp_weights, nextn, weights
from ds4cli.drafters.chain import ChainDrafter, LastStateHead
from ds4cli.drafters.nextn import NextnHead
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError

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


def find(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the weight files of the target's folder hold an MTP head. config: the target's."""
    return bool(mtp_weights.find(folder)) or nextn.find(folder, config)


def check(config: dict[str, Any], target_config: dict[str, Any], name: str) -> None:
    """UsageError, naming the field, if ds4cli cannot run the MTP head of such a target.

    config: the head's, which for an MTP head is the target's own.
    """
    kind = str(target_config.get("model_type"))
    if kind not in (*LAYERS, *nextn.FAMILIES):
        known = ", ".join((*LAYERS, *nextn.FAMILIES))
        why = REASONS.get(kind, f"those of {known} can be used")
        raise UsageError(f"`{name}`: no MTP head of model_type `{kind}` can be used: {why}")
    for table in (config, config.get("text_config") or {}):
        for field in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            if (table.get(field) or 1) != 1:
                raise UsageError(f"`{name}`: {field} is `{table[field]}`, ds4cli runs one layer")
        if table.get("mtp_use_dedicated_embeddings"):
            raise UsageError(
                f"`{name}`: mtp_use_dedicated_embeddings is true, ds4cli uses the target's"
            )


class MtpHead(LastStateHead):
    """The head of one target; sessions share it.

    layer: an mlx-lm decoder layer with full attention. taps: the target's last layer.
    """

    def __init__(self, layer: nn.Module, target: Target, eps: float):
        super().__init__(target)
        hidden_size = target.hidden_size
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps)

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: mx.Dtype | None) -> MtpHead | NextnHead:
        """The head in the target's folder, evaluated. dtype: float32 to unpack and cast, None as
        stored. ModelError, naming the tensor, if it is not exactly what the target needs."""
        if target.model.model_type in nextn.FAMILIES:
            return NextnHead.load(folder, target, dtype)
        target.prove()
        tensors = mtp_weights.read(folder)
        if not tensors:
            raise ModelError(f"`{folder}` has no `mtp.*` tensors")
        more = sorted(t for t in tensors if t.startswith("layers.") and t.split(".")[1] != "0")
        if more:
            raise ModelError(f"`{folder}` has `mtp.{more[0]}`: ds4cli runs one MTP layer")
        has_experts = any(".mlp.switch_mlp." in name for name in tensors)
        layer, eps = _layer(target.model, has_experts)
        head = cls(layer, target, eps)
        weights.fill(head, tensors, str(folder), "mtp.", dtype)
        return head

    def carried(self, out: mx.array) -> mx.array:
        return out

    def logits(self, out: mx.array) -> mx.array:
        return self._target.output(out)

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[KVCache]) -> mx.array:
        """embedded (n, H): of the tokens that follow. Returns what the output head reads (n, H)."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(pair, axis=-1))[None]
        mask = create_attention_mask(x, caches[0])
        return self.norm(self.layers[0](x, mask=mask, cache=caches[0]))[0]


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


class MtpDrafter(ChainDrafter):
    """Drafts with an `MtpHead` or a `NextnHead`."""

    name = "mtp"
