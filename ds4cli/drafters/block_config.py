"""The configuration of a block drafter (DSpark, DFlash), read from the dialects it is written in.

DeepSpec writes flat fields; SpecForge and z-lab put some under `dflash_config`; vLLM's speculators
puts the layers' under `transformer_layer_config` and counts target layers from one. What would
change the computation and is not built here is refused by name. Pure: no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from ds4cli.errors import UsageError

MARKOV_TYPES = ("vanilla", "gated", "rnn")
# In an architecture's name: families whose blocks are no Qwen3 blocks, and other methods in the
# same clothes.
OTHER_ARCHITECTURES = ("qwen3_5", "qwen3next", "qwen3_next", "qwen35")
OTHER_FAMILIES = ("gemma", "lfm2", "nemotron", "muse", "deepseek")
OTHER_METHODS = ("dflash2", "dfly", "dflare", "domino", "eagle")
# Fields, or beginnings of fields, of what is not built here, unless they are off.
REFUSED = (
    "attention_k_eq_v",
    "attention_sink",
    "causal",
    "conv_",
    "dflash_",
    "draft_adapter_rank",
    "final_logit_softcapping",
    "hidden_correction",
    "input_embedding_scale",
    "is_causal",
    "layer_fusion",
    "log_snr",
    "output_multiplier",
    "pure_draft",
    "rope_interleaved",
    "rope_traditional",
    "selector_",
    "shift_label",
    "use_swa",
)
# What DFlash 2 has of these.
DFLASH2 = (
    "conv_group_size",
    "conv_kernel_size",
    "final_logit_softcapping",
    "output_multiplier",
    "selector_rank",
    "selector_top_k",
)
# The values that say no more than that nothing special is done.
NEUTRAL = {
    "attention_mode": ("gqa", "mha"),
    "hidden_act": ("silu",),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "rope_is_neox_style": (True,),
}
# A guess less likely than this costs more than it gives even where one more row costs a twentieth
# of a call; what pays above it is the session's to decide.
CONFIDENCE_THRESHOLD = 0.1


# Rows of context that the full attention of a DSpark head sees: at 32k tokens, more than it was
# trained on, mlx-dspark reports 2.60 tokens kept of a block with so many, and 1.98 with all.
CONTEXT_ROWS = 4096
MOST_SLOTS = 64  # of a block; published heads have 5 to 16


@dataclass(frozen=True)
class BlockConfig:
    """What the code needs to know. vocab_size is the target's, draft_vocab_size the head's own.

    taps: target layers, from 0 on; -1 is what goes into the first one, the embeddings.
    windows: for each layer how many positions it sees back, its own among them; None for all.
    context_rows: how many the other layers see, besides the block; None for all.
    sees_ahead: whether a row of a windowed layer sees the rows of the block behind it.
    first_slot: the first slot of a block that is read. Slot i stands at the anchor's position + i,
    and the first that is read names the token after the anchor.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]
    first_slot: int
    context_rows: int | None = None
    sees_ahead: bool = False
    num_target_layers: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    markov_rank: int = 0
    markov_type: str = "vanilla"
    has_confidence: bool = False
    has_markov_confidence: bool = False
    confidence_threshold: float = CONFIDENCE_THRESHOLD
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False

    @property
    def guesses(self) -> int:
        """How many tokens one block names."""
        return self.block_size - self.first_slot


def read(config: Mapping[str, Any], kind: str, name: str) -> BlockConfig:
    """The configuration in a head's config.json. kind: "dspark", "dflash" or "dflash2".

    UsageError that names the field which is missing, or which is not built here.
    """
    flat = Fields(_flatten(config, name), name)
    _refuse_others(flat, kind)
    hidden, heads = flat.integer("hidden_size"), flat.integer("num_attention_heads")
    vocab = flat.integer("vocab_size")
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=flat.integer("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads(flat, heads),
        head_dim=head_dim(flat, hidden // heads),
        rms_norm_eps=flat.number("rms_norm_eps", 1e-6, most=1),
        attention_bias=flat.flag("attention_bias"),
        vocab_size=vocab,
        draft_vocab_size=flat.integer("draft_vocab_size", vocab, most=vocab),
        block_size=flat.integer("block_size", least=2, most=MOST_SLOTS),
        mask_token_id=flat.integer("mask_token_id", least=0, most=vocab - 1),
        taps=taps(flat),
        windows=windows(flat, flat.integer("num_hidden_layers", most=MOST_LAYERS)),
        context_rows=CONTEXT_ROWS if kind == "dspark" else None,
        sees_ahead=_sees_ahead(flat, kind),
        first_slot=_first_slot(config, flat, kind),
        num_target_layers=flat.optional("num_target_layers"),
        max_position_embeddings=flat.optional("max_position_embeddings"),
        tie_word_embeddings=flat.flag("tie_word_embeddings"),
        **rope(flat),
        **(_markov(config, flat) if kind == "dspark" else {}),
        **(_dflash2(flat) if kind == "dflash2" else {}),
    )


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Fields of which nobody here knows whether they change anything."""
    return [key for key in unknown_in(_flatten(config, ""), NEUTRAL) if not key.startswith(REFUSED)]


def check(
    config: Mapping[str, Any], target_config: Mapping[str, Any], kind: str, name: str
) -> None:
    """UsageError naming the first field in which the head differs from its target."""
    head = read(config, kind, name)
    target = {**target_config, **(target_config.get("text_config") or {})}
    for what, here, there in _pairs(config, head, target):
        if there is not None and here != there:
            raise UsageError(
                f"`{name}` was made for another target: its `{what}` is {here}, the target's is "
                f"{there}",
                "use the head that was trained for this model",
            )
    check_taps(head.taps, target.get("num_hidden_layers"), name)


def _pairs(config: Mapping[str, Any], head: BlockConfig, target: Mapping[str, Any]) -> Iterator:
    stated = config.get("target_hidden_size")
    if stated is not None:
        yield "target_hidden_size", stated, target.get("hidden_size")
    yield "hidden_size", head.hidden_size, target.get("hidden_size")
    if head.num_target_layers is not None:
        yield "num_target_layers", head.num_target_layers, target.get("num_hidden_layers")
    yield "vocab_size", head.vocab_size, target.get("vocab_size")


def _flatten(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    layers = nested(config, "transformer_layer_config", name)
    flat = {**layers, **config, **nested(config, "dflash_config", name)}
    if layers:
        flat["vocab_size"] = layers.get("vocab_size")
        flat["model_type"] = "qwen3"  # whatever the verifier is, its draft blocks are Qwen3's
        flat.setdefault("architectures", config.get("architectures"))
    if "aux_hidden_state_layer_ids" in config:
        # There, 1 is what follows the first layer; vLLM subtracts one as well.
        taps = config["aux_hidden_state_layer_ids"] or ()
        flat["target_layer_ids"] = [i - 1 if type(i) is int else i for i in taps]
    return flat


def _sees_ahead(flat: Fields, kind: str) -> bool:
    """DFlash 2 says it by `is_causal`; where it says nothing, windowed layers do not."""
    if kind == "dflash2":
        return not flat.flag("is_causal", True)
    return flat.flag("sliding_window_non_causal")


def _dflash2(flat: Fields) -> dict[str, Any]:
    hidden, group = flat.integer("hidden_size"), flat.integer("conv_group_size")
    if hidden % group:
        raise flat.unknown("conv_group_size", f"is {group}, which does not divide {hidden}")
    cap = flat.get("final_logit_softcapping")
    return {
        "conv_kernel_size": flat.integer("conv_kernel_size", most=MOST_SLOTS),
        "conv_group_size": group,
        "selector_rank": flat.integer("selector_rank"),
        "selector_top_k": flat.integer("selector_top_k", most=flat.integer("vocab_size")),
        "output_multiplier": flat.number("output_multiplier", 1.0, most=1e6),
        "final_logit_softcapping": cap and flat.positive("final_logit_softcapping", cap, 1e6),
    }


def _refuse_others(flat: Fields, kind: str) -> None:
    """What is no Qwen3 head. The trainers copy the target's whole config, so most fields, and the
    `model_type` of a Qwen, say nothing: the architecture does, and the shapes of the tensors."""
    names = ("architectures", "model_type", "speculators_model_type", "projector_type")
    for key in names:
        said = str(flat.get(key, "")).lower()
        others = (*OTHER_FAMILIES, *(m for m in OTHER_METHODS if m != kind))
        others += OTHER_ARCHITECTURES if key == "architectures" else ()
        if any(other in said for other in others):
            raise flat.refuse(key, flat.get(key))
    model_type = str(flat.get("model_type", "")).lower()
    if not any(known in model_type for known in ("qwen3", "dspark", "dflash")):
        raise flat.refuse("model_type", flat.get("model_type"))
    for key, value in flat.fields.items():
        if key == "dflash_config" or value is None or (kind == "dflash2" and key in DFLASH2):
            continue
        if key in NEUTRAL:
            is_neutral = value in NEUTRAL[key]
        else:
            is_neutral = not key.startswith(REFUSED) or not value
        if not is_neutral:
            raise flat.refuse(key, value)


def _first_slot(config: Mapping[str, Any], flat: Fields, kind: str) -> int:
    """0 where the anchor's slot is read too: DSpark's rule, unless the file says otherwise.

    What the file says of the slot goes before the number of tokens it proposes: the trainer of
    speculators makes slot i name the token at the anchor's position + i + 1 where
    `sample_from_anchor` is true and + i where it is not, however many of them are asked for later.
    A file that proposes one token less than its block then leaves out the last slot, not the first.
    SpecForge's and DeepSpec's trainers of DSpark do as if it were true.
    """
    if flat.get("sample_from_anchor") is not None:
        return 0 if flat.flag("sample_from_anchor") else 1
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    if tokens is not None:
        return max(0, min(1, flat.integer("block_size") - tokens))
    return 0 if kind == "dspark" else 1


def _markov(config: Mapping[str, Any], flat: Fields) -> dict[str, Any]:
    rank = flat.integer("markov_rank", 0, least=0)
    kind = str(flat.get("markov_head_type", "vanilla")).lower()
    # SpecForge says it by the weight of its loss.
    trained = flat.get("confidence_head_alpha", 0) != 0
    has_confidence = flat.flag("enable_confidence_head", trained)
    with_markov = has_confidence and flat.flag("confidence_head_with_markov")
    if rank and kind not in MARKOV_TYPES:
        raise flat.refuse("markov_head_type", kind)
    if rank and kind == "rnn" and _first_slot(config, flat, "dspark"):
        raise flat.refuse("markov_head_type", "rnn with sample_from_anchor false")
    if with_markov and not rank:
        raise flat.refuse("confidence_head_with_markov", "true with markov_rank 0")
    return {
        "markov_rank": rank,
        "markov_type": kind,
        "has_confidence": has_confidence,
        "has_markov_confidence": with_markov,
        "confidence_threshold": _threshold(flat),
    }


def _threshold(flat: Fields) -> float:
    found = flat.get("confidence_threshold", CONFIDENCE_THRESHOLD)
    return 0.0 if found == 0 else flat.positive("confidence_threshold", found, most=1)
