"""MTP heads stored as one more layer: what they guess is what their families' equations say.

The reference runs mlx-lm's own decoder layer, as the last of a model with one layer more, without a
cache and anew for every guess; pairing, norms, order and chain are written out.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten
from test_mtp import Moves, state

from ds4cli.drafters import mtp, nextn
from ds4cli.drafters.heads import HeadSource
from ds4cli.drafters.registry import named
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings

V, H, N, EPS = tiny.V, 64, 3, 1e-5
BASE = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": EPS,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "num_hidden_layers": N,
    "num_nextn_predict_layers": 1,
}
EXPERTS = {
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "glm4_moe": {
        **BASE,
        **EXPERTS,
        "head_dim": 16,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": {
        **BASE,
        **EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "mimo": BASE,
}


def build(name, layers=N):
    module = import_module(f"mlx_lm.models.{name}")
    config = {**CONFIGS[name], "model_type": name, "num_hidden_layers": layers}
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(layers), 400))
    weights = [(k, _random(k, x, next(keys))) for k, x in tree_flatten(model.parameters())]
    model.load_weights(weights)
    model.eval()
    return model


def _random(name, x, key):
    drawn = mx.random.normal(x.shape, key=key)
    if x.ndim == 1:
        return (0 if "bias" in name else 1) + 0.2 * drawn
    return drawn * 2.0 / x.shape[-1] ** 0.5


@lru_cache
def target(name):
    return Target(build(name))


@lru_cache
def whole(name):
    """A model with one layer more, whose last one is the head's block."""
    return build(name, N + 1)


def published(name):
    """The block's tensors under the names of the published checkpoints."""
    keys, found = iter(mx.random.split(mx.random.key(9), 100)), {}
    for key, x in tree_flatten(whole(name).layers[N].parameters()):
        if "embed_q" in key or "unembed_out" in key:
            continue
        if "switch_mlp" in key:
            path, part = key.split(".switch_mlp.")
            found |= {f"{path}.experts.{e}.{part}": x[e] for e in range(len(x))}
        else:
            found[key] = x
    if name == "deepseek_v3":
        shape = (4 * 32, 32)
        found["self_attn.kv_b_proj.weight"] = mx.random.normal(shape, key=next(keys)) * 0.3
    deepseek = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    mimo = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    for part in mimo if name == "mimo" else deepseek:
        shape = (H, 2 * H) if "proj" in part else (H,)
        found[f"{part}.weight"] = _random(part, mx.zeros(shape), next(keys))
    if name != "mimo":
        found["embed_tokens.weight"] = mx.zeros((V, H))  # a copy in the files, not looked at
        found["shared_head.head.weight"] = mx.zeros((V, H))
    return found


def save(folder, name, tensors):
    folder.mkdir(exist_ok=True)
    prefix = "model.mtp_layers.0." if name == "mimo" else f"model.layers.{N}."
    mx.save_safetensors(str(folder / "a.safetensors"), {"model.norm.weight": mx.ones(H)})
    stored = {prefix + key: x for key, x in tensors.items()}
    mx.save_safetensors(str(folder / "b.safetensors"), stored)
    config = {**CONFIGS[name], "model_type": name}
    return HeadSource(named("mtp"), "h", folder, config)


class Reference:
    """Every row made each time."""

    def __init__(self, name, tensors):
        self.name, self.w, self.target = name, tensors, target(name)
        model = whole(name)
        own = {f"model.layers.{N}.{k}": x for k, x in tensors.items()}
        model.load_weights(
            [(k, x) for k, x in model.sanitize(own).items() if "layers" in k and known(model, k)],
            strict=False,
        )
        self.layer = model.layers[N]

    def norm(self, x, name):
        return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * self.w[f"{name}.weight"]

    def row(self, token, hidden):
        embedded = self.target.embed(mx.array([token]))[0]
        if self.name == "mimo":
            pair = [self.norm(hidden, "hidden_layernorm"), self.norm(embedded, "token_layernorm")]
            return mx.concatenate(pair) @ self.w["input_proj.weight"].T
        pair = [self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")]
        return mx.concatenate(pair) @ self.w["eh_proj.weight"].T

    def run(self, rows):
        x = mx.stack(rows)[None]
        return self.layer(x, mx.tril(mx.ones((len(rows), len(rows)))) > 0, None)[0, -1]

    def propose(self, tokens, n, sampler, base=0):
        states = self.target.norm(mx.stack([state(tokens, i) for i in range(len(tokens) - 1)]))
        rows = [self.row(tokens[i + 1], states[i]) for i in range(base, len(tokens) - 1)]
        known = list(tokens)
        for _ in range(n):
            out = self.run(rows)
            last = "final_layernorm" if self.name == "mimo" else "shared_head.norm"
            normed = self.norm(out, last)
            logits = self.target.output(normed[None])
            known.append(sampler.pick(logits, len(known), known).item())
            rows.append(self.row(known[-1], normed if self.name == "mimo" else out))
        return known[len(tokens) :]


def known(model, key):
    return key in dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("name", CONFIGS)
def test_guesses_are_what_the_equations_say_after_any_moves(name, temp, tmp_path):
    """Guards: state and embedding in the other order, a norm at the wrong place, the wrong state
    handed on in a chain, experts or latent projections in another layout."""
    tensors = published(name)
    source = save(tmp_path / "h", name, tensors)
    source.check(source.config)
    assert mtp.find(source.folder, source.config)
    head = source.load(target(name), None)
    sampler = Sampler(Settings(temp=temp), token_limit=V)
    session = Moves(head.drafter(sampler), Reference(name, tensors), sampler, seed=len(name))
    session.read(9)
    for _ in range(6):
        session.check()
        session.any()
    session.check(1)


def test_an_ordinary_folder_has_no_such_head(tmp_path):
    """Guards: every GLM that is loaded without its head is refused."""
    source = save(tmp_path / "h", "glm4_moe", published("glm4_moe"))
    assert not nextn.find(source.folder, {**source.config, "num_hidden_layers": N + 1})
    assert not nextn.find(source.folder, {"model_type": "llama", "num_hidden_layers": N})
    assert not nextn.find(tmp_path, source.config)


def test_a_missing_tensor_is_named(tmp_path):
    """Guards: a head with random weights where the checkpoint has none."""
    tensors = published("mimo")
    del tensors["input_proj.weight"]
    with pytest.raises(ModelError, match="projection"):
        save(tmp_path / "h", "mimo", tensors).load(target("mimo"), None)
