"""Fields of a head's config.json, checked as they are read. Pure: no weights are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ds4cli.errors import UsageError

MOST_LAYERS = 64  # published heads have 1 to 8
MOST = 1 << 24  # of anything else that is counted

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
# The same of tables in a config: how positions are rotated, by its kind, and how guesses are asked
# for. Of other tables nothing is read, and nothing in them changes a guess.
ROTATED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "attention_factor", "truncate",
    ),
}  # fmt: skip
# Sections tell the axes of an image apart; a text is rotated as if there were none.
ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section",
        "mrope_interleaved")  # fmt: skip
# Where a config says how positions are rotated: the first that says anything is followed.
ROPES = ("rope_parameters", "rope_scaling")
SPECULATORS = ("algorithm", "default_proposal_method", "proposal_methods", "verifier")


class Fields:
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
            "ds4cli/drafters/README.md says which heads are",
        )


def nested(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """The fields that stand under `key`; none where it is missing."""
    found = config.get(key)
    if found is None or isinstance(found, Mapping):
        return found or {}
    raise Fields({}, name).unknown(key, f"is `{found}`, not a table")


def kv_heads(flat: Fields, heads: int) -> int:
    found = flat.integer("num_key_value_heads", heads)
    if heads % found:
        raise flat.unknown("num_key_value_heads", f"is {found}, which does not divide {heads}")
    return found


def head_dim(flat: Fields, default: int) -> int:
    dim = flat.integer("head_dim", default)
    if dim % 2:
        raise flat.unknown("head_dim", f"is {dim}, an odd number, which cannot be rotated")
    return dim


def taps(flat: Fields) -> tuple[int, ...]:
    found = flat.get("target_layer_ids")
    if not isinstance(found, (list, tuple)) or not found:
        said = "is missing" if found is None else f"is `{found}`"
        raise UsageError(f"`{flat.name}` names no layers to read: `target_layer_ids` {said}")
    if not all(type(i) is int for i in found):
        raise flat.unknown("target_layer_ids", f"is `{found}`, not whole numbers")
    ids = tuple(found)
    if len(set(ids)) < len(ids):
        raise UsageError(f"`{flat.name}` reads a layer twice: `target_layer_ids` is `{found}`")
    return ids


def check_taps(taps: Sequence[int], layers: int | None, name: str) -> None:
    beyond = [i for i in taps if i < -1 or (layers is not None and i >= layers)]
    if beyond:
        raise UsageError(
            f"`{name}` reads layer {beyond[0]} (`target_layer_ids`), the target has "
            f"{layers} layers, from 0 on"
        )


def rope(flat: Fields) -> dict[str, Any]:
    """How positions are rotated: the whole of each head. A `partial_rotary_factor` was copied from
    the target and is not used by the trainers' blocks."""
    first, second = (nested(flat.fields, key, flat.name) for key in ROPES)
    stated = first or second
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise flat.refuse("rope_parameters", "one for each kind of layer")
    kind = _rotation(stated)
    if kind not in ROTATED:
        raise flat.refuse("rope_type", kind)
    theta = stated.get("rope_theta", flat.get("rope_theta", 10000.0))
    theta = flat.positive("rope_theta", theta, most=1e15)
    if kind == "default":
        return {"rope_theta": theta}
    factor = flat.positive("factor", stated.get("factor"), most=1e6)
    scaling = {key: value for key, value in stated.items() if key != "partial_rotary_factor"}
    if kind == "yarn" and not stated.get("truncate", True):
        raise flat.refuse("truncate", False)
    if kind == "yarn" and stated.get("attention_factor") is not None:
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        if abs(flat.positive("attention_factor", stated["attention_factor"], 1e6) - usual) > 1e-6:
            raise flat.refuse("attention_factor", stated["attention_factor"])
    return {"rope_theta": theta, "rope_scaling": scaling}


def windows(flat: Fields, layers: int) -> tuple[int | None, ...]:
    """For each layer how many positions it sees back, its own among them; None for all."""
    kinds = flat.get("layer_types")
    if not kinds:
        if flat.flag("use_sliding_window"):
            raise flat.refuse("use_sliding_window", "true without layer_types")
        return (None,) * layers
    if not isinstance(kinds, list):
        raise flat.unknown("layer_types", f"is `{kinds}`, not a list")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise flat.refuse("layer_types", kind)
    if len(kinds) < layers:
        raise flat.refuse("layer_types", f"{len(kinds)} entries for {layers} layers")
    is_sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    return tuple(flat.integer("sliding_window") if slides else None for slides in is_sliding)


def unknown_in(fields: Mapping[str, Any], more: Iterable[str]) -> list[str]:
    """The fields that are neither `KNOWN` nor among `more`; those in a table as `table.field`."""
    known = {*KNOWN, *more}
    found = [key for key in fields if key not in known and not key.startswith("_")]
    return sorted([*found, *_unknown_inside(fields)])


def _unknown_inside(fields: Mapping[str, Any]) -> Iterator[str]:
    used, other = (_table(fields, name) for name in ROPES)
    known: dict[str, tuple[str, ...]] = {"speculators_config": SPECULATORS}
    for name in ROPES:
        known[name] = (*ROPE, *ROTATED.get(_rotation(_table(fields, name)), ()))
    if used and other and used != other:
        del known[ROPES[1]]
        yield ROPES[1]  # as a whole: the first is followed
    for name, inside in known.items():
        yield from (f"{name}.{key}" for key in _table(fields, name) if key not in inside)


def _table(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = fields.get(key)
    return found if isinstance(found, Mapping) else {}


def _rotation(stated: Mapping[str, Any]) -> str:
    return str(stated.get("rope_type") or stated.get("type") or "default")
