"""The configuration of a block drafter (DSpark, DFlash), read from the dialects it is written in.

DeepSpec writes flat fields; SpecForge and z-lab put some under `dflash_config`; vLLM's speculators
puts the layers' under `transformer_layer_config` and counts target layers from one. What would
change the computation and is not built here is refused by name. Pure: no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds4cli.errors import UsageError

MARKOV_TYPES = ("vanilla", "gated", "rnn")
# Families whose blocks are no Qwen3 blocks, and other methods in the same clothes.
OTHER_FAMILIES = ("gemma", "lfm2", "nemotron", "muse", "qwen3_5", "qwen3_next", "deepseek")
OTHER_METHODS = ("dflash2", "dfly", "dflare", "domino", "eagle")
# Fields, or beginnings of fields, of methods that are not built.
REFUSED = (
    "attention_k_eq_v",
    "attention_sink",
    "attn_output_gate",
    "causal",
    "conv_",
    "dflash_",
    "final_logit_softcapping",
    "hidden_correction",
    "layer_fusion",
    "log_snr",
    "output_multiplier",
    "rope_interleaved",
    "rope_traditional",
    "selector_",
    "shift_label",
)
# A guess less likely than this costs more than it gives even where one more row costs a twentieth
# of a call; what pays above it is the session's to decide.
CONFIDENCE_THRESHOLD = 0.1


MOST_SLOTS = 64  # of a block; published heads have 5 to 16


@dataclass(frozen=True)
class BlockConfig:
    """What the code needs to know. vocab_size is the target's, draft_vocab_size the head's own.

    windows: for each layer how many positions it sees back, its own among them; None for all.
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
    num_target_layers: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
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
    _refuse_others(config, flat, kind)
    heads = flat.integer("num_attention_heads")
    vocab = flat.integer("vocab_size")
    return BlockConfig(
        hidden_size=flat.integer("hidden_size"),
        intermediate_size=flat.integer("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=flat.integer("num_key_value_heads", heads),
        head_dim=flat.integer("head_dim", flat.integer("hidden_size") // heads),
        rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
        attention_bias=flat.flag("attention_bias"),
        vocab_size=vocab,
        draft_vocab_size=flat.integer("draft_vocab_size", vocab),
        block_size=flat.integer("block_size"),
        mask_token_id=flat.integer("mask_token_id"),
        taps=_taps(flat),
        windows=_windows(flat, "transformer_layer_config" in config),
        first_slot=_first_slot(config, flat, kind),
        num_target_layers=flat.get("num_target_layers"),
        max_position_embeddings=flat.get("max_position_embeddings"),
        tie_word_embeddings=flat.flag("tie_word_embeddings"),
        **_rope(flat),
        **(_markov(config, flat) if kind == "dspark" else {}),
    )


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
    _check_ranges(head, target.get("num_hidden_layers"), name)


def _pairs(config: Mapping[str, Any], head: BlockConfig, target: Mapping[str, Any]) -> Iterator:
    stated = config.get("target_hidden_size")
    if stated is not None:
        yield "target_hidden_size", stated, target.get("hidden_size")
    yield "hidden_size", head.hidden_size, target.get("hidden_size")
    if head.num_target_layers is not None:
        yield "num_target_layers", head.num_target_layers, target.get("num_hidden_layers")
    yield "vocab_size", head.vocab_size, target.get("vocab_size")


def _check_ranges(head: BlockConfig, layers: int | None, name: str) -> None:
    beyond = [i for i in head.taps if i < 0 or (layers is not None and i >= layers)]
    if beyond:
        raise UsageError(
            f"`{name}` reads layer {beyond[0]} (`target_layer_ids`), the target has "
            f"{layers} layers, from 0 on"
        )
    if not 2 <= head.block_size <= MOST_SLOTS:
        raise UsageError(f"`{name}`: `block_size` is {head.block_size}, not 2 to {MOST_SLOTS}")
    if any(window is not None and window < 1 for window in head.windows):
        raise UsageError(f"`{name}`: `sliding_window` is less than 1")
    if not 0 <= head.mask_token_id < head.vocab_size:
        raise UsageError(
            f"`{name}`: `mask_token_id` is {head.mask_token_id}, `vocab_size` is {head.vocab_size}"
        )


class _Fields:
    """Typed look-ups that name what is missing."""

    def __init__(self, fields: dict[str, Any], name: str):
        self.fields, self.name = fields, name

    def get(self, key: str, default: Any = None) -> Any:
        found = self.fields.get(key)
        return default if found is None else found

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int):
            said = "is missing" if found is None else f"is `{found}`, not a whole number"
            raise self._unknown(key, said)
        return found

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise self._unknown(key, f"is `{found}`, not true or false")
        return found

    def _unknown(self, key: str, said: str) -> UsageError:
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
    if "aux_hidden_state_layer_ids" in config:
        # There, 1 is what follows the first layer; vLLM subtracts one as well.
        flat["target_layer_ids"] = [i - 1 for i in config["aux_hidden_state_layer_ids"] or ()]
    return flat


def _refuse_others(config: Mapping[str, Any], flat: _Fields, kind: str) -> None:
    for key in ("architectures", "model_type", "speculators_model_type", "projector_type"):
        said = str(flat.get(key, "")).lower()
        if any(other in said for other in (*OTHER_FAMILIES, *OTHER_METHODS)):
            raise flat.refuse(key, flat.get(key))
    model_type = str(flat.get("model_type", "")).lower()
    if not any(known in model_type for known in ("qwen3", "dspark", "dflash")):
        raise flat.refuse("model_type", flat.get("model_type"))
    if flat.get("hidden_act", "silu") != "silu":
        raise flat.refuse("hidden_act", flat.get("hidden_act"))
    for key, value in flat.fields.items():
        is_neutral = not value or (key == "output_multiplier" and value == 1)
        if key.startswith(REFUSED) and key != "dflash_config" and not is_neutral:
            raise flat.refuse(key, value)


def _taps(flat: _Fields) -> tuple[int, ...]:
    found = flat.get("target_layer_ids")
    if not isinstance(found, (list, tuple)) or not found:
        said = "is missing" if found is None else f"is `{found}`"
        raise UsageError(f"`{flat.name}` names no layers to read: `target_layer_ids` {said}")
    taps = tuple(int(i) for i in found)
    if len(set(taps)) < len(taps):
        raise UsageError(f"`{flat.name}` reads a layer twice: `target_layer_ids` is `{found}`")
    return taps


def _windows(flat: _Fields, is_speculators: bool) -> tuple[int | None, ...]:
    layers = flat.integer("num_hidden_layers")
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
    # Files of speculators that do not say it are read in either way, depending on the reader.
    if any(is_sliding) and flat.flag("sliding_window_non_causal", is_speculators):
        raise flat.refuse("sliding_window_non_causal", "true or unsaid, with sliding layers")
    return tuple(flat.integer("sliding_window") if slides else None for slides in is_sliding)


def _first_slot(config: Mapping[str, Any], flat: _Fields, kind: str) -> int:
    """0 where the anchor's slot is read too: DSpark's rule, unless the file says otherwise."""
    if flat.get("sample_from_anchor") is not None:
        return 0 if flat.flag("sample_from_anchor") else 1
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    if tokens is not None:
        return max(0, min(1, flat.integer("block_size") - tokens))
    return 0 if kind == "dspark" else 1


def _rope(flat: _Fields) -> dict[str, Any]:
    stated = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise flat.refuse("rope_parameters", "one for each kind of layer")
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise flat.refuse("rope_type", kind)
    theta = stated.get("rope_theta", flat.get("rope_theta", 10000.0))
    rotated = stated.get("partial_rotary_factor", flat.get("partial_rotary_factor", 1.0))
    return {
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else dict(stated),
        "partial_rotary_factor": float(rotated),
    }


def _markov(config: Mapping[str, Any], flat: _Fields) -> dict[str, Any]:
    rank = flat.integer("markov_rank", 0)
    kind = str(flat.get("markov_head_type", "vanilla")).lower()
    has_confidence = flat.flag("enable_confidence_head")
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
        "confidence_threshold": float(flat.get("confidence_threshold", CONFIDENCE_THRESHOLD)),
    }
