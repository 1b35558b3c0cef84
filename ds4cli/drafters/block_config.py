"""The configuration of a block drafter (DSpark, DFlash), read from the dialects it is written in.

DeepSpec writes flat fields; SpecForge and z-lab put some under `dflash_config`; vLLM's speculators
puts the layers' under `transformer_layer_config` and counts target layers from one. What would
change the computation and is not built here is refused by name. Pure: no weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    "rope_interleaved",
    "rope_traditional",
    "selector_",
    "shift_label",
    "use_swa",
)
# The values that say no more than that nothing special is done.
NEUTRAL = {
    "attention_mode": ("gqa", "mha"),
    "hidden_act": ("silu",),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "rope_is_neox_style": (True,),
}
# Fields that are read, or that change nothing: of trainers, of Transformers, of the target's own
# layers, whose config was copied. Any other one is named.
KNOWN = (
    # read
    "attention_bias", "aux_hidden_state_layer_ids", "block_size", "confidence_head_with_markov",
    "confidence_threshold", "dflash_config", "draft_vocab_size", "enable_confidence_head",
    "head_dim", "hidden_size", "intermediate_size", "layer_types", "markov_head_type",
    "markov_rank", "mask_token_id", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "num_target_layers", "quantization",
    "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "sample_from_anchor", "sliding_window", "sliding_window_non_causal", "speculators_config",
    "target_hidden_size", "target_layer_ids", "tie_word_embeddings", "transformer_layer_config",
    "use_sliding_window", "vocab_size",
    # what it is called
    "architectures", "auto_map", "model_type", "name_or_path", "projector_type",
    "speculators_model_type", "speculators_version", "transformers_version",
    # training and files
    "attention_dropout", "attn_implementation", "confidence_head_alpha", "dpace_alpha", "dtype",
    "embed_requires_grad", "initializer_range", "loss_config", "num_anchors", "torch_dtype",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward",
    "id2label", "label2id", "is_encoder_decoder", "is_decoder", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "cross_attention_hidden_size",
    # of the target's own layers
    "attn_output_gate", "decoder_sparse_step", "full_attention_interval", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_ssm_dtype", "max_window_layers", "mlp_only_layers",
    "moe_intermediate_size", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "norm_topk_prob", "num_experts", "num_experts_per_tok", "output_router_logits",
    "partial_rotary_factor", "pretraining_tp", "router_aux_loss_coef",
    "shared_expert_intermediate_size", "mlp_bias",
)  # fmt: skip
# A guess less likely than this costs more than it gives even where one more row costs a twentieth
# of a call; what pays above it is the session's to decide.
CONFIDENCE_THRESHOLD = 0.1


MOST_SLOTS = 64  # of a block; published heads have 5 to 16
MOST_LAYERS = 64  # published heads have 1 to 8
MOST = 1 << 24  # of anything else that is counted


@dataclass(frozen=True)
class BlockConfig:
    """What the code needs to know. vocab_size is the target's, draft_vocab_size the head's own.

    taps: target layers, from 0 on; -1 is what goes into the first one, the embeddings.
    windows: for each layer how many positions it sees back, its own among them; None for all.
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
    tie_word_embeddings: bool = False

    @property
    def guesses(self) -> int:
        """How many tokens one block names."""
        return self.block_size - self.first_slot


def read(config: Mapping[str, Any], kind: str, name: str) -> BlockConfig:
    """The configuration in a head's config.json. kind: "dspark" or "dflash".

    UsageError that names the field which is missing, or which is not built here.
    """
    flat = _Fields(_flatten(config), name)
    _refuse_others(flat)
    hidden, heads = flat.integer("hidden_size"), flat.integer("num_attention_heads")
    vocab = flat.integer("vocab_size")
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=flat.integer("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(flat, heads),
        head_dim=_head_dim(flat, hidden // heads),
        rms_norm_eps=flat.number("rms_norm_eps", 1e-6, most=1),
        attention_bias=flat.flag("attention_bias"),
        vocab_size=vocab,
        draft_vocab_size=flat.integer("draft_vocab_size", vocab, most=vocab),
        block_size=flat.integer("block_size", least=2, most=MOST_SLOTS),
        mask_token_id=flat.integer("mask_token_id", least=0, most=vocab - 1),
        taps=_taps(flat),
        windows=_windows(flat),
        sees_ahead=flat.flag("sliding_window_non_causal"),
        first_slot=_first_slot(config, flat, kind),
        num_target_layers=flat.optional("num_target_layers"),
        max_position_embeddings=flat.optional("max_position_embeddings"),
        tie_word_embeddings=flat.flag("tie_word_embeddings"),
        **_rope(flat),
        **(_markov(config, flat) if kind == "dspark" else {}),
    )


def _kv_heads(flat: _Fields, heads: int) -> int:
    kv_heads = flat.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise flat.unknown("num_key_value_heads", f"is {kv_heads}, which does not divide {heads}")
    return kv_heads


def _head_dim(flat: _Fields, default: int) -> int:
    dim = flat.integer("head_dim", default)
    if dim % 2:
        raise flat.unknown("head_dim", f"is {dim}, an odd number, which cannot be rotated")
    return dim


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Fields of which nobody here knows whether they change anything."""
    known = {*KNOWN, *NEUTRAL}
    fields = (key for key in _flatten(config) if not key.startswith("_"))
    return sorted(key for key in fields if key not in known and not key.startswith(REFUSED))


def check(config: Mapping[str, Any], target_config: Mapping[str, Any], kind: str, name: str):
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
    _check_taps(head, target.get("num_hidden_layers"), name)


def _pairs(config: Mapping[str, Any], head: BlockConfig, target: Mapping[str, Any]) -> Iterator:
    stated = config.get("target_hidden_size")
    if stated is not None:
        yield "target_hidden_size", stated, target.get("hidden_size")
    yield "hidden_size", head.hidden_size, target.get("hidden_size")
    if head.num_target_layers is not None:
        yield "num_target_layers", head.num_target_layers, target.get("num_hidden_layers")
    yield "vocab_size", head.vocab_size, target.get("vocab_size")


def _check_taps(head: BlockConfig, layers: int | None, name: str) -> None:
    beyond = [i for i in head.taps if i < -1 or (layers is not None and i >= layers)]
    if beyond:
        raise UsageError(
            f"`{name}` reads layer {beyond[0]} (`target_layer_ids`), the target has "
            f"{layers} layers, from 0 on"
        )


class _Fields:
    """Typed look-ups that name what is missing."""

    def __init__(self, fields: dict[str, Any], name: str):
        self.fields, self.name = fields, name

    def get(self, key: str, default: Any = None) -> Any:
        found = self.fields.get(key)
        return default if found is None else found

    def integer(
        self, key: str, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        found = self.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int):
            said = "is missing" if found is None else f"is `{found}`, not a whole number"
            raise self.unknown(key, said)
        if not least <= found <= most:
            raise self.unknown(key, f"is {found}, not {least} to {most}")
        return found

    def optional(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float, most: float) -> float:
        """A positive number."""
        return self.positive(key, self.get(key, default), most)

    def positive(self, key: str, found: Any, most: float) -> float:
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not is_number or not 0 < found <= most:
            raise self.unknown(key, f"is `{found}`, not a number above 0, at most {most:g}")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise self.unknown(key, f"is `{found}`, not true or false")
        return found

    def unknown(self, key: str, said: str) -> UsageError:
        return UsageError(f"`{self.name}` is no head that ds4cli knows: `{key}` {said}")

    def refuse(self, key: str, value: Any) -> UsageError:
        return UsageError(
            f"`{self.name}` has `{key}` = `{value}`, which ds4cli does not implement",
            "heads with Qwen3 blocks (DeepSpec, z-lab, speculators) are implemented",
        )


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config.get("transformer_layer_config") or {}
    flat = {**layers, **config, **(config.get("dflash_config") or {})}
    if layers:
        flat["vocab_size"] = layers.get("vocab_size")
        flat["model_type"] = "qwen3"  # whatever the verifier is, its draft blocks are Qwen3's
        flat.setdefault("architectures", config.get("architectures"))
    if "aux_hidden_state_layer_ids" in config:
        # There, 1 is what follows the first layer; vLLM subtracts one as well.
        taps = config["aux_hidden_state_layer_ids"] or ()
        flat["target_layer_ids"] = [i - 1 if type(i) is int else i for i in taps]
    return flat


def _refuse_others(flat: _Fields) -> None:
    """What is no Qwen3 head. The trainers copy the target's whole config, so most fields, and the
    `model_type` of a Qwen, say nothing: the architecture does, and the shapes of the tensors."""
    names = ("architectures", "model_type", "speculators_model_type", "projector_type")
    for key in names:
        said = str(flat.get(key, "")).lower()
        others = (*OTHER_FAMILIES, *OTHER_METHODS)
        others += OTHER_ARCHITECTURES if key == "architectures" else ()
        if any(other in said for other in others):
            raise flat.refuse(key, flat.get(key))
    model_type = str(flat.get("model_type", "")).lower()
    if not any(known in model_type for known in ("qwen3", "dspark", "dflash")):
        raise flat.refuse("model_type", flat.get("model_type"))
    for key, value in flat.fields.items():
        if key == "dflash_config" or value is None:
            continue
        if key in NEUTRAL:
            is_neutral = value in NEUTRAL[key]
        else:
            is_neutral = not key.startswith(REFUSED) or not value
        if not is_neutral:
            raise flat.refuse(key, value)


def _taps(flat: _Fields) -> tuple[int, ...]:
    found = flat.get("target_layer_ids")
    if not isinstance(found, (list, tuple)) or not found:
        said = "is missing" if found is None else f"is `{found}`"
        raise UsageError(f"`{flat.name}` names no layers to read: `target_layer_ids` {said}")
    if not all(type(i) is int for i in found):
        raise flat.unknown("target_layer_ids", f"is `{found}`, not whole numbers")
    taps = tuple(found)
    if len(set(taps)) < len(taps):
        raise UsageError(f"`{flat.name}` reads a layer twice: `target_layer_ids` is `{found}`")
    return taps


def _windows(flat: _Fields) -> tuple[int | None, ...]:
    layers = flat.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = flat.get("layer_types")
    if not kinds:
        if flat.flag("use_sliding_window"):
            raise flat.refuse("use_sliding_window", "true without layer_types")
        return (None,) * layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise flat.refuse("layer_types", kind)
    if len(kinds) < layers:
        raise flat.refuse("layer_types", f"{len(kinds)} entries for {layers} layers")
    is_sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    return tuple(flat.integer("sliding_window") if slides else None for slides in is_sliding)


def _first_slot(config: Mapping[str, Any], flat: _Fields, kind: str) -> int:
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


def _rope(flat: _Fields) -> dict[str, Any]:
    """How positions are rotated: the whole of each head. A `partial_rotary_factor` was copied from
    the target and is not used by the trainers' blocks."""
    stated = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise flat.refuse("rope_parameters", "one for each kind of layer")
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise flat.refuse("rope_type", kind)
    theta = stated.get("rope_theta", flat.get("rope_theta", 10000.0))
    theta = flat.positive("rope_theta", theta, most=1e15)
    if kind == "default":
        return {"rope_theta": theta}
    factor = flat.positive("factor", stated.get("factor"), most=1e6)
    scaling = {key: value for key, value in stated.items() if key != "partial_rotary_factor"}
    if kind == "yarn" and stated.get("attention_factor") is not None:
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        if abs(flat.positive("attention_factor", stated["attention_factor"], 1e6) - usual) > 1e-6:
            raise flat.refuse("attention_factor", stated["attention_factor"])
    return {"rope_theta": theta, "rope_scaling": scaling}


def _markov(config: Mapping[str, Any], flat: _Fields) -> dict[str, Any]:
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


def _threshold(flat: _Fields) -> float:
    found = flat.get("confidence_threshold", CONFIDENCE_THRESHOLD)
    return 0.0 if found == 0 else flat.positive("confidence_threshold", found, most=1)
