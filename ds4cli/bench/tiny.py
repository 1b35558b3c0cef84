"""Tiny random models, one or more per cache family of mlx-lm: CPU-sized, float32, no files.

`CFG` maps a name to the smallest configuration of that architecture that still has every layer
kind, in sizes that are legal for every kernel (on Metal, states of whole groups of 32); `build`
makes the model, `quantise` packs its weights to 4 bits. A name is an `mlx_lm.models` module, or
`module:variant`. What a machine does with every family is measured on them, and tests run on them.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

V = 97  # vocabulary of every tiny model


def build(
    name: str, seed: int = 0, scale: float | None = None, dtype: mx.Dtype = mx.float32, **over: Any
) -> Any:
    """Build the tiny model `name`; `over` replaces configuration fields. ImportError where mlx-lm
    has no such family.

    `scale` multiplies every matrix: larger values make the model's choices less even, so that a
    wrong state shows up in the argmax and not only in the last digits.
    """
    mx.random.seed(seed)
    module: Any = importlib.import_module(f"mlx_lm.models.{name.split(':')[0]}")
    model = module.Model(_args(module.ModelArgs, {**CFG[name], **over}))
    model.update(tree_map(lambda p: _cast(p, dtype), _without_zeros(model.parameters())))
    if scale:
        model.update(tree_map(lambda p: p * scale if p.ndim >= 2 else p, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def quantise(model: Any) -> Any:
    """Its weights packed to 4 bits, where mlx-lm packs them."""
    chosen = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def packs(path: str, module: Any) -> bool:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
        return fits and chosen(path, module)

    nn.quantize(model, group_size=32, bits=4, class_predicate=packs)
    mx.eval(model.parameters())
    return model


def _args(cls: Any, cfg: dict[str, Any]) -> Any:
    return cls.from_dict(cfg) if hasattr(cls, "from_dict") else cls(**cfg)


def _cast(p: mx.array, dtype: mx.Dtype) -> mx.array:
    return p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p


def _without_zeros(parameters: Any) -> Any:
    """Give all-zero parameters noise: mlx-lm creates whole RWKV-7, RG-LRU and Baichuan weights as
    zeros, and a zero weight hides a lost state."""
    leaves: Any = tree_flatten(parameters)
    flat = [(k, _noise_if_zero(p)) for k, p in leaves]
    return tree_unflatten(flat)


def _noise_if_zero(p: mx.array) -> mx.array:
    if not mx.issubdtype(p.dtype, mx.floating) or p.size == 0 or mx.any(p != 0).item():
        return p
    return mx.random.normal(p.shape) * 0.3


# What most architectures call the same.
BASE = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
)
_MLA = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
_QWEN_LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
)
_QWEN_MOE = dict(
    num_experts=0,
    num_experts_per_tok=0,
    decoder_sparse_step=1,
    shared_expert_intermediate_size=64,
    moe_intermediate_size=64,
)
_QWEN3_5_TEXT = dict(
    BASE,
    **_QWEN_LINEAR,
    **_QWEN_MOE,
    model_type="qwen3_5_text",
    num_hidden_layers=4,
    head_dim=16,
    rope_parameters={"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)
_KDA = dict(kda_layers=[1, 2, 4], num_heads=4, head_dim=32, short_conv_kernel_size=4)
_LONGCAT = dict(
    model_type="longcat_flash",
    attention_method="MLA",
    zero_expert_type="identity",
    hidden_size=64,
    ffn_hidden_size=128,
    moe_topk=2,
    expert_ffn_hidden_size=64,
    n_routed_experts=4,
    zero_expert_num=2,
    num_layers=2,
    vocab_size=V,
    max_position_embeddings=512,
    num_attention_heads=4,
    q_lora_rank=32,
    routed_scaling_factor=1.0,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
    attention_bias=False,
    **_MLA,
)

CFG: dict[str, dict] = {
    # plain KV
    "llama": dict(BASE, model_type="llama", num_hidden_layers=3),
    "afm7": dict(
        model_type="afm7",
        vocab_size=V,
        hidden_dim=64,
        num_layers=3,
        num_kv_reuse_layers=1,
        num_heads=4,
        num_kv_heads=2,
    ),
    # sliding windows
    "gemma3_text": dict(
        BASE,
        model_type="gemma3_text",
        num_hidden_layers=4,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        sliding_window_pattern=2,
    ),
    "gemma4_text": dict(
        BASE,
        model_type="gemma4_text",
        num_hidden_layers=4,
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=1,
        sliding_window=8,
        sliding_window_pattern=2,
        vocab_size_per_layer_input=V,
        hidden_size_per_layer_input=16,
    ),
    "gpt_oss": dict(
        model_type="gpt_oss",
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=V,
        hidden_size=64,
        intermediate_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        rope_scaling=None,
    ),
    "exaone4": dict(
        BASE,
        model_type="exaone4",
        num_hidden_layers=4,
        head_dim=16,
        rope_theta=1e4,
        tie_word_embeddings=True,
        rope_scaling=dict(
            rope_type="llama3",
            factor=1.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
        sliding_window=8,
        sliding_window_pattern="LG",
    ),
    "cohere2": dict(
        model_type="cohere2",
        vocab_size=V,
        hidden_size=64,
        head_dim=16,
        num_hidden_layers=4,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        sliding_window_pattern=2,
    ),
    "plamo3": dict(
        BASE,
        model_type="plamo3",
        num_hidden_layers=4,
        head_dim=16,
        window_size=8,
        sliding_window_pattern=2,
    ),
    # chunked attention
    "llama4": dict(
        model_type="llama4",
        text_config=dict(
            BASE,
            model_type="llama4_text",
            attention_bias=False,
            attention_chunk_size=8,
            head_dim=16,
            interleave_moe_layer_step=1,
            intermediate_size_mlp=128,
            num_experts_per_tok=1,
            num_hidden_layers=4,
            num_local_experts=2,
            rope_scaling=None,
            rope_theta=1e4,
            use_qk_norm=True,
        ),
    ),
    # gated delta rule
    "qwen3_next": dict(
        BASE,
        **_QWEN_LINEAR,
        **_QWEN_MOE,
        model_type="qwen3_next",
        num_hidden_layers=4,
        mlp_only_layers=[],
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        head_dim=16,
    ),
    "qwen3_5": dict(model_type="qwen3_5", text_config=_QWEN3_5_TEXT),
    "qwen3_5_moe": dict(
        model_type="qwen3_5_moe",
        text_config=dict(_QWEN3_5_TEXT, num_experts=4, num_experts_per_tok=2),
    ),
    "olmo_hybrid": dict(
        BASE,
        **_QWEN_LINEAR,
        model_type="olmo_hybrid",
        num_hidden_layers=4,
        linear_allow_neg_eigval=True,
        tie_word_embeddings=False,
        attention_bias=False,
        head_dim=16,
    ),
    # Kimi delta attention (a gate per channel)
    "kimi_linear": dict(
        BASE,
        **_MLA,
        model_type="kimi_linear",
        num_hidden_layers=4,
        head_dim=16,
        rope_theta=1e4,
        linear_attn_config=_KDA,
        model_max_length=512,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
    ),
    "kimi_k3": dict(
        model_type="kimi_k3",
        text_config=dict(
            BASE,
            **_MLA,
            num_hidden_layers=4,
            linear_attn_config=dict(_KDA, gate_lower_bound=-5.0),
            q_lora_rank=32,
            activation_situ_beta=1.0,
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            first_k_dense_replace=1,
            moe_intermediate_size=64,
            attn_res_block_size=2,
        ),
    ),
    "bailing_moe_v3": dict(
        BASE,
        **_MLA,
        model_type="bailing_moe_v3",
        num_hidden_layers=4,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        layer_group_size=4,
        head_dim=32,
        q_lora_rank=32,
    ),
    # Mamba-2
    "mamba2": dict(
        model_type="mamba2",
        num_heads=4,
        head_dim=32,
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        state_size=32,
        num_hidden_layers=2,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.0, math.inf),
        time_step_rank="auto",
    ),
    "nemotron_h": dict(
        model_type="nemotron_h",
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=False,
        mamba_num_heads=4,
        mamba_head_dim=32,
        mamba_proj_bias=False,
        ssm_state_size=32,
        conv_kernel=4,
        n_groups=1,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        num_hidden_layers=4,
        hybrid_override_pattern=["M", "*", "-", "M"],
        head_dim=16,
    ),
    "falcon_h1": dict(
        model_type="falcon_h1",
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        mamba_d_ssm=128,
        mamba_d_head=32,
        mamba_n_heads=4,
        mamba_d_state=32,
        vocab_size=V,
    ),
    "granitemoehybrid": dict(
        BASE,
        model_type="granitemoehybrid",
        num_hidden_layers=3,
        attention_bias=False,
        embedding_multiplier=1.0,
        attention_multiplier=0.25,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        layer_types=["mamba", "attention", "mamba"],
        rope_theta=1e4,
        shared_intermediate_size=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_proj_bias=False,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
    ),
    "plamo2": dict(
        model_type="plamo2",
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size_per_head=16,
        mamba_d_state=32,
        mamba_num_heads=4,
        intermediate_size=128,
        vocab_size=V,
    ),
    # Mamba-1
    "mamba": dict(
        model_type="mamba",
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        state_size=16,
        num_hidden_layers=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank="auto",
    ),
    "jamba": dict(
        BASE,
        model_type="jamba",
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=4,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    # RWKV-7
    "rwkv7": dict(
        model_type="rwkv7",
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        norm_eps=1e-5,
        head_dim=32,
        num_hidden_layers=2,
        a_low_rank_dim=16,
        v_low_rank_dim=16,
        gate_low_rank_dim=16,
        decay_low_rank_dim=16,
    ),
    # short convolutions
    "lfm2": dict(
        model_type="lfm2",
        vocab_size=V,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=64,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        block_ff_dim=128,
        full_attn_idxs=[2],
    ),
    "lfm2_moe": dict(
        model_type="lfm2_moe",
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_expert_bias=True,
        num_dense_layers=1,
        norm_eps=1e-5,
        conv_bias=True,
        conv_L_cache=3,
        full_attn_idxs=[2],
    ),
    "gear": dict(
        BASE,
        model_type="gear",
        num_hidden_layers=4,
        head_dim=16,
        layer_types=["conv_mixer", "full_attention", "conv_mixer", "sliding_attention"],
        sliding_window=8,
    ),
    "baichuan_m1": dict(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1e4,
        sliding_window=8,
        sliding_window_layers=[1],
        conv_window=2,
        rms_norm_eps=1e-5,
    ),
    # linear attention, gated by a constant per head
    "bailing_moe_linear": dict(
        BASE,
        model_type="bailing_moe_linear",
        num_hidden_layers=4,
        moe_intermediate_size=64,
        num_experts=4,
        num_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=2,
        rope_theta=1e4,
        first_k_dense_replace=1,
        layer_group_size=4,
        group_norm_size=2,
        topk_group=1,
        use_qk_norm=True,
    ),
    "bailing_hybrid": dict(
        BASE,
        **_MLA,
        model_type="bailing_hybrid",
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        layer_group_size=4,
        group_norm_size=2,
        rope_theta=1e4,
        routed_scaling_factor=1.0,
        head_dim=16,
        q_lora_rank=32,
    ),
    # RG-LRU
    "recurrent_gemma": dict(
        model_type="recurrent_gemma",
        attention_bias=False,
        conv1d_width=4,
        hidden_size=64,
        intermediate_size=128,
        logits_soft_cap=30.0,
        num_attention_heads=4,
        num_hidden_layers=3,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        attention_window_size=8,
        vocab_size=V,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    # several caches per layer; compressed rows
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": dict(
        _LONGCAT, model_type="longcat_flash_ngram", emb_split_num=2, emb_neighbor_num=3
    ),
    "deepseek_v32": dict(
        model_type="deepseek_v32",
        vocab_size=V,
        hidden_size=64,
        index_head_dim=32,
        index_n_heads=4,
        index_topk=8,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        q_lora_rank=32,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        **_MLA,
    ),
    "deepseek_v41": dict(
        model_type="deepseek_v41",
        vocab_size=V,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        o_groups=2,
        o_lora_rank=32,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        compress_ratios=(0, 1, 2, 4),
        kv_source_layer_ids=(0, 1, 2, 3),
        index_source_layer_ids=(0, 1, 2, 3),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        hc_mult=2,
        hc_sinkhorn_iters=1,
        num_hash_layers=0,
    ),
}
# Sizes of heads that MLX's fused attention and mlx-lm's packed kernel of the delta rule take.
for _size in (64, 128, 256):
    CFG[f"llama:{_size}"] = dict(CFG["llama"], head_dim=_size)
CFG["qwen3_next:128"] = dict(
    CFG["qwen3_next"], head_dim=128, linear_key_head_dim=128, linear_value_head_dim=128
)
CFG["gemma3_text:256"] = dict(CFG["gemma3_text"], head_dim=256, query_pre_attn_scalar=256)
CFG["qwen3_next:moe"] = dict(CFG["qwen3_next"], num_experts=4, num_experts_per_tok=2)
