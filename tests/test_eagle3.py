"""EAGLE-3 heads: what they guess is what their equations say, however the session moved before.

The reference below is written out in full and keeps nothing; checkpoints are random, in the layout
of each trainer.
"""

from __future__ import annotations

import json
from functools import lru_cache

import mlx.core as mx
import pytest
import tiny
from test_mtp import Moves, noise, state

from ds4cli.drafters import eagle3
from ds4cli.drafters.heads import HeadSource, kind_of
from ds4cli.drafters.registry import OTHERS, named
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings

V, H, HEADS, KV, D, INNER, EPS, THETA = tiny.V, 64, 4, 2, 16, 96, 1e-5, 1e4
TARGET = {"model_type": "llama", "hidden_size": H, "vocab_size": V, "num_hidden_layers": 4}
SIZES = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": V,
    "hidden_act": "silu",
}
SPECFORGE = {
    **SIZES,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 40,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "transformer_layer_config": {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2},
}
DEEPSPEC = {
    **SIZES,
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "target_layer_ids": [0, 1, 2],
    "ttt_length": 7,
}
# name -> config, taps, whether heads are normed, has its own embedding
CASES = {
    "specforge": (SPECFORGE, (0, 1, 3), False, True),
    "specforge, each tap normed": ({**SPECFORGE, "fc_norm": True}, (0, 1, 3), False, False),
    "specforge, nothing normed last": ({**SPECFORGE, "norm_output": False}, (0, 1, 3), False, True),
    "speculators": (SPECULATORS, (0, 1, 3), True, True),
    "speculators, norms": (
        {**SPECULATORS, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        (0, 1, 3),
        False,
        True,
    ),
    "speculators, one layer slides": (
        {
            **SPECULATORS,
            "transformer_layer_config": {
                **SPECULATORS["transformer_layer_config"],
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 3,
            },
        },
        (0, 1, 3),
        True,
        True,
    ),
    "deepspec": (DEEPSPEC, (0, 1, 2), True, True),
}


@lru_cache
def target():
    return Target(tiny.build("llama", num_hidden_layers=4, scale=2.0))


def layers_of(config):
    return config.get("transformer_layer_config", config)["num_hidden_layers"]


def checkpoint(config, has_norms, has_embedding, seed=3):
    """Random tensors, named as the trainer of such a config names them."""
    draw = noise(seed)
    matrix = lambda out, into: draw(out, into) * 2.0 / into**0.5  # noqa: E731
    norm = lambda size: 1 + 0.2 * draw(size)  # noqa: E731
    vocab = config.get("draft_vocab_size", V)
    tensors = {"fc.weight": matrix(H, 3 * H), "norm.weight": norm(H)}
    tensors["lm_head.weight"] = matrix(vocab, H)
    for i in range(layers_of(config)):
        at = "midlayer" if "eagle_config" in config else f"layers.{i}"
        into = 2 * H if i == 0 else H
        shapes = {"q": (HEADS * D, into), "k": (KV * D, into), "v": (KV * D, into)}
        shapes["o"] = (H, HEADS * D)
        tensors |= {f"{at}.self_attn.{n}_proj.weight": matrix(*s) for n, s in shapes.items()}
        shapes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
        tensors |= {f"{at}.mlp.{n}_proj.weight": matrix(*s) for n, s in shapes.items()}
        names = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if not i else [])]
        tensors |= {f"{at}.{n}.weight": norm(H) for n in names}
        if has_norms:
            tensors |= {f"{at}.self_attn.{n}_norm.weight": 3 + draw(D) for n in "qk"}
    if has_embedding:
        tensors["embed_tokens.weight"] = draw(V, H)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * H)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(H) for i in range(3)}
    if vocab != V:
        picked = [2 * i + (i > 20) for i in range(vocab)]
        tensors["d2t"] = mx.array([t - i for i, t in enumerate(picked)], mx.int64)
        tensors["t2d"] = mx.array([i in picked for i in range(V)])
    return tensors


def save(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return HeadSource(named("eagle3"), "h", folder, config)


class Reference:
    """The equations, every row made each time, one head of attention after another."""

    def __init__(self, config, tensors):
        self.w = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
        self.config = config

    def norm(self, x, name):
        scale = mx.rsqrt((x * x).mean(-1, keepdims=True) + EPS)
        return x * scale * self.w[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def state(self, tokens, i):
        taps = [state(tokens, i, tap) for tap in range(3)]
        if self.config.get("fc_norm"):
            taps = [self.norm(x, f"fc_norm.{t}") for t, x in enumerate(taps)]
        x = mx.concatenate(taps)
        return self.linear(self.norm(x, "input_norm") if "input_norm.weight" in self.w else x, "fc")

    def embed(self, token):
        own = self.w.get("embed_tokens.weight")
        return target().embed(mx.array([token]))[0] if own is None else own[token]

    def run(self, rows, base):
        """rows: (token that follows, state). The last row's output."""
        x = mx.stack([h for _, h in rows])
        embedded = mx.stack([self.embed(token) for token, _ in rows])
        for i in range(layers_of(self.config)):
            at = f"layers.{i}"
            if i == 0:
                normed = self.norm(x, f"{at}.hidden_norm")
                pair = [self.norm(embedded, f"{at}.input_layernorm"), normed]
                into = mx.concatenate(pair, -1)
                x = normed if self.config.get("norm_before_residual") else x
            else:
                into = self.norm(x, f"{at}.input_layernorm")
            x = x + self.attention(into, f"{at}.self_attn", base, self.window(i))
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate = self.linear(y, f"{at}.mlp.gate_proj")
            inner = gate * mx.sigmoid(gate) * self.linear(y, f"{at}.mlp.up_proj")
            x = x + self.linear(inner, f"{at}.mlp.down_proj")
        return x[-1]

    def window(self, layer):
        fields = self.config.get("transformer_layer_config", self.config)
        slides = fields.get("layer_types", [""] * (layer + 1))[layer] == "sliding_attention"
        return fields["sliding_window"] if slides else 10**6

    def attention(self, x, at, base, window):
        q, k, v = (self.linear(x, f"{at}.{n}_proj").reshape(len(x), -1, D) for n in "qkv")
        if f"{at}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        where = mx.arange(base, base + len(x))
        q, k, out = rotate(q, where), rotate(k, where), []
        for h in range(HEADS):
            scores = q[:, h] @ k[:, h * KV // HEADS].T / D**0.5
            back = where[:, None] - where[None]
            scores = mx.where((back >= 0) & (back < window), scores, -mx.inf)
            out.append(mx.softmax(scores, axis=-1) @ v[:, h * KV // HEADS])
        return self.linear(mx.concatenate(out, -1), f"{at}.o_proj")

    def propose(self, tokens, n, sampler, base=0):
        last = range(base, len(tokens) - 1)
        rows, known = [(tokens[i + 1], self.state(tokens, i)) for i in last], list(tokens)
        is_speculators = "transformer_layer_config" in self.config
        says = self.config.get("norm_output", not is_speculators)
        for _ in range(n):
            out = self.run(rows, base)
            normed = self.norm(out, "norm")
            row = self.linear(normed if is_speculators or says else out, "lm_head")
            if "d2t" in self.w:
                wide = [-float("inf")] * V
                for j, logit in enumerate(row.tolist()):
                    wide[j + self.w["d2t"][j].item()] = logit
                row = mx.array(wide)
            known.append(sampler.pick(row[None], len(known), known).item())
            rows.append((known[-1], normed if is_speculators and says else out))
        return known[len(tokens) :]


def rotate(x, at):
    half = D // 2
    angle = (at[:, None] * THETA ** (-mx.arange(half) / half))[:, None, :]
    a, b = x[..., :half], x[..., half:]
    cos, sin = mx.cos(angle), mx.sin(angle)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.parametrize(
    ("case", "temp"),
    [
        pytest.param(case, temp, marks=() if i % 2 == k else pytest.mark.slow)
        for i, case in enumerate(CASES)
        for k, temp in enumerate((0.0, 0.8))
    ],
)
def test_guesses_are_what_the_equations_say_after_any_moves(case, temp, tmp_path):
    """Guards: a row paired with the wrong token, a norm at the wrong place, the wrong state handed
    on in a chain, draft ids taken for the target's, layers counted from the wrong end."""
    config, taps, has_norms, has_embedding = CASES[case]
    tensors = checkpoint(config, has_norms, has_embedding)
    source = save(tmp_path / "h", config, tensors)
    source.check(TARGET)
    head = source.load(target(), None)
    assert head.taps == taps and source.notices == []
    sampler = Sampler(Settings(temp=temp), token_limit=V)
    session = Moves(head.drafter(sampler), Reference(config, tensors), sampler, seed=len(case))
    session.read(9)
    for _ in range(8):
        session.check()
        session.any()
    session.check(1)


def test_layers_that_nobody_names_are_the_usual_three():
    """Guards: taps of other layers than the head was trained on, where the file names none."""
    config = {k: v for k, v in SPECFORGE.items() if k != "eagle_config"}
    assert eagle3.read(config, 32, "x").taps == (1, 15, 28)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"vocab_size": 99}, "vocab_size"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "layer 9"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"norm_output": "yes"}, "norm_output"),
        ({"eagle_config": "yes"}, "eagle_config"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_field(changes, says):
    """Guards: a head of another model, or of another method, that loads and guesses noise."""
    with pytest.raises(UsageError, match=says):
        eagle3.check({**SPECFORGE, **changes}, TARGET, "head")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("fc.weight"), "fc.weight"),
        (lambda t: t.update(surprise=mx.zeros(3)), "surprise"),
        (lambda t: t.update(d2t=t["d2t"] + 90), "d2t"),
        (lambda t: t.update({"lm_head.weight": mx.zeros((40, H), mx.int8)}), "lm_head.weight"),
    ],
)
def test_tensors_that_do_not_belong_are_named(change, says, tmp_path):
    """Guards: random weights where the checkpoint has none; writes beyond the vocabulary."""
    tensors = checkpoint(SPECFORGE, False, True)
    change(tensors)
    with pytest.raises(ModelError, match=says):
        save(tmp_path / "h", SPECFORGE, tensors).load(target(), None)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["PEagleDraftModel"], "model_type": "llama"}, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"medusa_num_heads": 4}, "Medusa"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "MLP speculator"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "Gemma 4 assistant"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE 1 or 2"),
        ({"architectures": ["DominoDraftModel"], "dflash_config": {}}, "Domino"),
    ],
)
def test_other_methods_are_refused_by_their_name(config, method):
    """Guards: "names no model_type", or a head that is loaded as a model of its own."""
    assert method in OTHERS.values()
    with pytest.raises(UsageError, match=method):
        kind_of(config, "x")


def test_its_own_kind_is_seen():
    """Guards: a head taken for an ordinary Llama, whose config it has."""
    for config in (SPECFORGE, SPECULATORS, DEEPSPEC):
        assert kind_of(config, "x").name == "eagle3"
