"""EAGLE-3: one decoder layer or a few, fed with three of the target's layers (arXiv:2503.01840).

The first layer attends over the embedding of the token that follows and the state side by side:

    h_i = fc([tap_1, tap_2, tap_3] at i)
    x_i = [input_layernorm(embed(t_{i+1})), hidden_norm(h_i)],  y_i = h_i + attention(x_i), ...

and later ones as usual. logits = lm_head(norm(y_i)), over a vocabulary of the head's own. The next
row of a chain takes y_i in place of h_{i+1}.

Three dialects are read. SpecForge (`LlamaForCausalLMEagle3`) calls the layer `midlayer`, and its
layer ids, if any stand in `eagle_config`, count what a layer returns, from 0 on. DeepSpec
(`Qwen3Eagle3Model`) names them `target_layer_ids`, counted alike. vLLM's speculators put the layers
under `transformer_layer_config` and count what goes into a layer: one more. Without any, all three
take what the second, a middle and the fourth layer from the end return. Whether heads are normed
(Qwen3) or not (Llama), and biases, the tensors say. Layers that `layer_types` calls sliding see
`sliding_window` positions, as speculators train them; all rows are kept all the same.

Sources: SpecForge `modeling/draft/llama3_eagle.py`, speculators `models/eagle3/`, DeepSpec
`modeling/eagle3/qwen3/modeling.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from ds4cli.drafters import vocabulary, weights
from ds4cli.drafters.chain import ChainDrafter
from ds4cli.drafters.fields import (
    MOST_LAYERS,
    Fields,
    check_taps,
    head_dim,
    kv_heads,
    nested,
    rope,
    taps,
    unknown_in,
    windows,
)
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError

FAMILIES = ("llama", "qwen3")
# Fields of NVIDIA's `eagle_config` whose other value is another computation.
WANTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "rope_is_neox_style": True,
    "use_swa": False,
    "input_embedding_scale": 1,
}
KNOWN = (
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "step_loss_decay",
    "ttt_length",
    "hidden_act",
    *WANTED,
)


@dataclass(frozen=True)
class Eagle3Config:
    """What the code needs to know.

    state_size: of the target's states. norms_before_fc: "", "one" over all taps or one for "each".
    keeps_normed: the state beside the attention is the normed one. carries_normed: the next row
    takes the normed output. has_last_norm: logits are made of it. windows: for each layer how many
    positions it sees back, its own among them; None for all.
    """

    hidden_size: int
    state_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    rope: dict[str, Any]
    max_position_embeddings: int | None
    norms_before_fc: str = ""
    keeps_normed: bool = False
    carries_normed: bool = False
    has_last_norm: bool = True


def read(config: Mapping[str, Any], num_target_layers: int | None, name: str) -> Eagle3Config:
    """The configuration in a head's config.json; UsageError that names a field."""
    flat = _flatten(config, num_target_layers, name)
    _refuse_others(flat)
    hidden, heads = flat.integer("hidden_size"), flat.integer("num_attention_heads")
    vocab = flat.integer("vocab_size")
    is_speculators = "transformer_layer_config" in config
    return Eagle3Config(
        hidden_size=hidden,
        state_size=flat.integer("target_hidden_size", hidden),
        intermediate_size=flat.integer("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads(flat, heads),
        head_dim=head_dim(flat, hidden // heads),
        windows=windows(flat, flat.integer("num_hidden_layers", 1, most=MOST_LAYERS)),
        rms_norm_eps=flat.number("rms_norm_eps", 1e-6, most=1),
        vocab_size=vocab,
        draft_vocab_size=flat.integer("draft_vocab_size", vocab, most=vocab),
        taps=taps(flat),
        rope=rope(flat),
        max_position_embeddings=flat.optional("max_position_embeddings"),
        norms_before_fc=_norms_before_fc(flat),
        keeps_normed=flat.flag("norm_before_residual"),
        # The same word: speculators hand the normed output on, SpecForge norms it for the logits.
        carries_normed=is_speculators and flat.flag("norm_output"),
        has_last_norm=is_speculators or flat.flag("norm_output", True),
    )


def _flatten(config: Mapping[str, Any], num_target_layers: int | None, name: str) -> Fields:
    layers = nested(config, "transformer_layer_config", name)
    flat = {**layers, **config, **nested(config, "eagle_config", name)}
    ids = flat.get("eagle_aux_hidden_state_layer_ids")
    if layers:
        flat["model_type"], flat["vocab_size"] = layers.get("model_type"), layers.get("vocab_size")
        ids = ids and [i - 1 if type(i) is int else i for i in ids]
    if flat.get("target_layer_ids") is None and ids:
        flat["target_layer_ids"] = ids
    if flat.get("target_layer_ids") is None and num_target_layers:
        n = num_target_layers
        flat["target_layer_ids"] = [1, n // 2 - 1, n - 4]
    return Fields(flat, name)


def _refuse_others(flat: Fields) -> None:
    model_type = str(flat.get("model_type", "llama"))
    if not model_type.startswith(FAMILIES):
        raise flat.refuse("model_type", model_type)
    if flat.get("hidden_act", "silu") != "silu":
        raise flat.refuse("hidden_act", flat.get("hidden_act"))
    for key, wanted in WANTED.items():
        if flat.get(key, wanted) != wanted:
            raise flat.refuse(key, flat.get(key))
    if flat.get("partial_rotary_factor", 1) != 1 and "transformer_layer_config" in flat.fields:
        raise flat.refuse("partial_rotary_factor", flat.get("partial_rotary_factor"))


def _norms_before_fc(flat: Fields) -> str:
    if flat.flag("norm_before_fc"):
        return "one"
    return "each" if flat.flag("fc_norm") else ""


def check(config: dict[str, Any], target_config: dict[str, Any], name: str) -> None:
    """UsageError naming the field in which the head differs from its target, or is unknown."""
    target = {**target_config, **(target_config.get("text_config") or {})}
    layers = target.get("num_hidden_layers")
    head = read(config, layers, name)
    pairs = (("hidden_size", head.state_size), ("vocab_size", head.vocab_size))
    for field, here in pairs:
        there = target.get(field)
        if there is not None and here != there:
            raise UsageError(
                f"`{name}` was made for another target: its `{field}` is {here}, the target's is "
                f"{there}",
                "use the head that was trained for this model",
            )
    check_taps(head.taps, layers, name)


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Fields that are ignored without knowing what they mean."""
    return unknown_in(_flatten(config, None, "").fields, KNOWN)


class Attention(nn.Module):
    """Causal attention. index: of the layer; the first attends over the embedding and the state
    side by side."""

    def __init__(self, config: Eagle3Config, index: int, has_norms: bool, has_bias: bool):
        super().__init__()
        size, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        kv_heads, into = config.num_key_value_heads, size if index else 2 * size
        self.q_proj = nn.Linear(into, heads * dim, bias=has_bias)
        self.k_proj = nn.Linear(into, kv_heads * dim, bias=has_bias)
        self.v_proj = nn.Linear(into, kv_heads * dim, bias=has_bias)
        self.o_proj = nn.Linear(heads * dim, size, bias=has_bias)
        if has_norms:
            self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        theta, scaling = config.rope["rope_theta"], config.rope.get("rope_scaling")
        self.rope = initialize_rope(dim, theta, False, scaling, config.max_position_embeddings)
        self._dim = dim

    def __call__(self, x: mx.array, mask: Any, cache: KVCache) -> mx.array:
        q, k, v = (self._split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        scale = self._dim**-0.5
        out = scaled_dot_product_attention(q, k, v, cache, scale=scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._dim).transpose(0, 2, 1, 3)


class Layer(nn.Module):
    """A decoder layer; the first one norms embedding and state apart."""

    def __init__(self, config: Eagle3Config, index: int, has_norms: bool, has_bias: bool):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index, has_norms, has_bias)
        self.mlp = MLP(size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        if index == 0:
            self.hidden_norm = nn.RMSNorm(size, eps)
        self._keeps_normed = config.keeps_normed

    def __call__(self, x: mx.array, embedded: mx.array, mask: Any, cache: KVCache) -> mx.array:
        if "hidden_norm" in self:
            normed = self.hidden_norm(x)
            x = normed if self._keeps_normed else x
            into = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        else:
            into = self.input_layernorm(x)
        x = x + self.self_attn(into, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """The head, with its own embedding or the target's. Make one with `load`."""

    def __init__(self, config: Eagle3Config, target: Target, tensors: dict[str, mx.array]):
        super().__init__()
        size, state = config.hidden_size, config.state_size
        has_norms, has_bias = (
            f"layers.0.self_attn.{name}" in tensors for name in ("q_norm.weight", "q_proj.bias")
        )
        self.fc = nn.Linear(len(config.taps) * state, size, bias="fc.bias" in tensors)
        if config.norms_before_fc == "one":
            self.input_norm = nn.RMSNorm(len(config.taps) * state, config.rms_norm_eps)
        if config.norms_before_fc == "each":
            self.fc_norm = [nn.RMSNorm(state, config.rms_norm_eps) for _ in config.taps]
        count = len(config.windows)
        self.layers = [Layer(config, i, has_norms, has_bias) for i in range(count)]
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in tensors:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.config, self.taps = config, config.taps
        self._target = target
        self._target_ids: mx.array | None = None

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: mx.Dtype | None) -> Eagle3Head:
        """The head in a folder, evaluated. dtype: float32 unpacks and casts, None is as stored.
        ModelError for a tensor that does not belong, and where the target does not fit."""
        stated = json.loads((folder / "config.json").read_text("utf-8"))
        config = read(stated, target.num_layers, folder.name)
        tensors = weights.read_all(folder)
        tensors = {name.replace("midlayer.", "layers.0.", 1): x for name, x in tensors.items()}
        if (config.state_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ModelError(
                f"the head wants states of {config.state_size} and {config.vocab_size} token ids, "
                f"the target has {target.hidden_size} and {target.vocab_size}"
            )
        offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
        head = cls(config, target, tensors)
        if "embed_tokens" not in head and config.hidden_size != target.hidden_size:
            raise ModelError("the head has no `embed_tokens`, and the target's are of another size")
        if config.draft_vocab_size != config.vocab_size:
            sizes = config.draft_vocab_size, config.vocab_size
            head._target_ids = vocabulary.target_ids(offsets, mask, *sizes)
        weights.fill(head, tensors, folder.name, dtype=dtype)
        return head

    def caches(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def embed(self, ids: mx.array) -> mx.array:
        embed = self.embed_tokens if "embed_tokens" in self else self._target.embed
        return embed(ids)

    def context(self, hidden: list[mx.array]) -> mx.array:
        """The taps, normed where the head wants it, as one state."""
        if "fc_norm" in self:
            hidden = [norm(x) for norm, x in zip(self.fc_norm, hidden, strict=True)]
        x = mx.concatenate(hidden, axis=-1).astype(self.norm.weight.dtype)
        return self.fc(self.input_norm(x) if "input_norm" in self else x)

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[KVCache]) -> mx.array:
        x, embedded = hidden[None], embedded.astype(hidden.dtype)[None]
        for layer, window, cache in zip(self.layers, self.config.windows, caches, strict=True):
            mask = create_attention_mask(x, cache, window_size=window)
            x = layer(x, embedded, mask, cache)
        return x[0]

    def carried(self, out: mx.array) -> mx.array:
        return self.norm(out) if self.config.carries_normed else out

    def logits(self, out: mx.array) -> mx.array:
        rows = self.lm_head(self.norm(out) if self.config.has_last_norm else out)
        if self._target_ids is None:
            return rows
        return vocabulary.spread(rows, self._target_ids, self.config.vocab_size)


class Eagle3Drafter(ChainDrafter):
    """Drafts with an `Eagle3Head`."""

    name = "eagle3"
