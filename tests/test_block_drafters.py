"""DSpark and DFlash against the same equations written plainly: no buffer, nothing lazy."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import V, build, ids

from ds4cli.drafters import block, block_config, dflash, dflash2, dspark
from ds4cli.drafters.block import BlockHead
from ds4cli.drafters.block_config import read
from ds4cli.drafters.heads import HeadSource
from ds4cli.drafters.registry import named
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings

H, HEADS, KV, DIM, RANK, BLOCK = 64, 4, 2, 16, 32, 5
TARGET = {"model_type": "qwen3_5", "text_config": {"hidden_size": H, "vocab_size": V}}
TARGET["text_config"]["num_hidden_layers"] = 4
LAYERS = {
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": V,
}
DSPARK = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "mask_token_id": 3,
    "target_layer_ids": [2, 0],
    "num_target_layers": 4,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "confidence_threshold": 0.0,
}
DFLASH = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 3},
}
DFLASH2 = {
    **LAYERS,
    "architectures": ["DFlash2DraftModel"],
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "is_causal": False,
    "dflash_config": {
        "block_size": BLOCK,
        "target_layer_ids": [1, 3],
        "mask_token_id": 3,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
        "output_multiplier": 1.0,
    },
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkDraftModel"],
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [1, 3],
    "draft_vocab_size": 40,
    "block_size": BLOCK,
    "mask_token_id": 3,
    "markov_rank": RANK,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "confidence_threshold": 0.0,
    "sample_from_anchor": False,
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
CASES = {
    "vanilla": (DSPARK, ()),
    "gated": ({**DSPARK, "markov_head_type": "gated"}, ("lm_head", "embed_tokens")),
    "rnn": ({**DSPARK, "markov_head_type": "rnn"}, ("lm_head",)),
    "no markov": ({**DSPARK, "markov_rank": 0, "enable_confidence_head": False}, ()),
    "dflash2": (DFLASH2, ()),
    "dflash2, capped": (
        {**DFLASH2, "is_causal": None, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        (),
    ),
    "speculators": (SPECULATORS, ("lm_head",)),
    "dflash": (DFLASH, ()),
    # What DeepSpec copies from a target with partial rotation and gated attention says nothing.
    "copied fields": (
        {
            **DSPARK,
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
        (),
    ),
    "embeddings tapped": ({**DSPARK, "target_layer_ids": [-1, 2]}, ()),
    "sliding": (
        {**SPECULATORS, "transformer_layer_config": {**LAYERS, **SLIDING}},
        ("lm_head",),
    ),
    "sliding, sees ahead": (
        {
            **SPECULATORS,
            "transformer_layer_config": {**LAYERS, **SLIDING},
            "sliding_window_non_causal": True,
        },
        ("lm_head",),
    ),
}


@pytest.fixture(scope="module")
def target():
    return Target(build("qwen3_5", scale=2.0))


def parts(config):
    """The modules that belong to a config: its kind, head class and drafter class."""
    if "DFlash2" in config["architectures"][0]:
        return "dflash2", dflash2.DFlash2Head, dflash2.DFlash2Drafter
    if "DFlash" in config["architectures"][0]:
        return "dflash", dflash.DFlashHead, dflash.DFlashDrafter
    return "dspark", dspark.DSparkHead, dspark.DSparkDrafter


def checkpoint(folder, config, target, own=(), seed=5, **extra):
    """A random head in a folder; returns its tensors."""
    kind, head_class, _ = parts(config)
    read_config = read(config, kind, "x")
    head = head_class(read_config, target)
    if "embed_tokens" in own:
        head.embed_tokens = nn.Embedding(V, H)
    if "lm_head" in own:
        head.lm_head = nn.Linear(H, read_config.draft_vocab_size, bias=False)
    keys = iter(mx.random.split(mx.random.key(seed), 100))
    weights = {k: _random(k, v, next(keys)) for k, v in tree_flatten(head.parameters())}
    if read_config.draft_vocab_size != V:
        picked = sorted(random.Random(1).sample(range(V), 40))
        weights["d2t"] = mx.array([t - i for i, t in enumerate(picked)], mx.int64)
        weights["t2d"] = mx.array([t in picked for t in range(V)])
    return save(folder, config, {**weights, **extra})


def _random(name, value, key):
    noise = mx.random.normal(value.shape, key=key)
    if "q_norm" in name:  # sharp, so that it matters where a row stands
        return 4 + noise
    if "norm" in name:
        return 1 + 0.2 * noise
    return noise * (1.0 if "markov" in name or "embed" in name else 1.5 * value.shape[-1] ** -0.5)


def save(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return weights


def sampler(temp=0.0, **settings):
    return Sampler(Settings(temp=temp, seed=7, **settings), V)


# -- the same equations, plainly -------------------------------------------------------------------


class Plain:
    """One head's proposal from all taps and all tokens, a slot and a head at a time."""

    def __init__(self, weights, config, target):
        self.w, self.target = weights, target
        self.c = read(config, parts(config)[0], "x")

    def norm(self, x, name):
        eps = self.c.rms_norm_eps
        return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[f"{name}.weight"]

    def rope(self, x, pos):
        half = DIM // 2
        angle = pos * 1e4 ** (-mx.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = mx.cos(angle), mx.sin(angle)
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def key_value(self, x, pos, at):
        k = (x @ self.w[f"{at}.k_proj.weight"].T).reshape(KV, DIM)
        v = (x @ self.w[f"{at}.v_proj.weight"].T).reshape(KV, DIM)
        return self.rope(self.norm(k, f"{at}.k_norm"), pos), v

    def attend(self, x, pos, rows, at, window):
        """One block row at pos over `rows`: (position, key, value)."""
        if not window and self.c.context_rows:
            rows = rows[-self.c.context_rows - BLOCK :]
        if window:
            last = float("inf") if self.c.sees_ahead else pos
            rows = [row for row in rows if pos - window < row[0] <= last]
        q = (x @ self.w[f"{at}.q_proj.weight"].T).reshape(HEADS, DIM)
        q, out = self.rope(self.norm(q, f"{at}.q_norm"), pos), []
        for h in range(HEADS):
            keys = mx.stack([k[h * KV // HEADS] for _, k, _ in rows])
            values = mx.stack([v[h * KV // HEADS] for _, _, v in rows])
            out.append(mx.softmax(keys @ q[h] * DIM**-0.5) @ values)
        return mx.concatenate(out) @ self.w[f"{at}.o_proj.weight"].T

    def slots(self, tokens, taps, first):
        """The block's vectors; taps: one (n, H) per layer, of positions first..len(tokens)-2."""
        p = len(tokens) - 1
        context = mx.concatenate(taps, -1) @ self.w["fc.weight"].T
        context = self.norm(context, "hidden_norm")
        block = mx.array([tokens[-1]] + [self.c.mask_token_id] * (BLOCK - 1))
        own = self.w.get("embed_tokens.weight")
        x = self.target.embed(block) if own is None else own[block]
        for i, window in enumerate(self.c.windows):
            at, low = f"layers.{i}.self_attn", f"layers.{i}"
            h = self.norm(x, f"{low}.input_layernorm")
            h, after = self.before(h, f"{low}.attention_conv")
            rows = [
                (first + j, *self.key_value(context[j], first + j, at)) for j in range(p - first)
            ]
            rows += [(p + j, *self.key_value(h[j], p + j, at)) for j in range(BLOCK)]
            out = mx.stack([self.attend(h[j], p + j, rows, at, window) for j in range(BLOCK)])
            x = x + self.after(out, after, f"{low}.attention_conv")
            h = self.norm(x, f"{low}.post_attention_layernorm")
            h, after = self.before(h, f"{low}.mlp_conv")
            gate, up, down = (
                self.w[f"{low}.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down")
            )
            x = x + self.after((nn.silu(h @ gate) * (h @ up)) @ down, after, f"{low}.mlp_conv")
        return self.norm(x, "norm")

    def before(self, h, at):
        """DFlash 2: what goes into a part, and the kernels (row, tap, channel) for after it."""
        if f"{at}.base_kernel" not in self.w:
            return h, None
        taps, group = self.c.conv_kernel_size, self.c.conv_group_size
        all_kernels = (h @ self.w[f"{at}.kernel_projection.weight"].T).reshape(BLOCK, 2, taps, -1)
        all_kernels = mx.repeat(all_kernels, group, axis=-1)
        return self.after(h, all_kernels[:, 0], at, 0), all_kernels[:, 1]

    def after(self, h, kernels, at, side=1):
        if kernels is None:
            return h
        base, rows = self.w[f"{at}.base_kernel"][side], []
        for j in range(BLOCK):
            taps = range(min(len(base), j + 1))
            rows.append(sum((base[t] + kernels[j, t]) * h[j - t] for t in taps))
        return mx.stack(rows)

    def select(self, row, slot, prev):
        """DFlash 2: the row with the candidates' scores alone."""
        row = row * self.c.output_multiplier
        if self.c.final_logit_softcapping:
            row = mx.tanh(row / self.c.final_logit_softcapping) * self.c.final_logit_softcapping
        at = "candidate_selector"
        ids = sorted(range(V), key=lambda t: -row[t].item())[: self.c.selector_top_k]
        context = self.w[f"{at}.predecessor_codebook"][prev]
        context = context * (self.w[f"{at}.hidden_projection.weight"] @ slot)
        scores = [-float("inf")] * V
        for t in ids:
            scores[t] = (row[t] + self.w[f"{at}.successor_codebook"][t] @ context).item()
        return mx.array(scores)

    def bias(self, slot, prev, state):
        w1, w2 = self.w["markov_head.markov_w1.weight"], self.w["markov_head.markov_w2.weight"]
        e = w1[prev]
        if self.c.markov_type == "gated":
            gate = self.linear(mx.concatenate([slot, e]), "markov_head.gate_proj")
            return w2 @ (mx.sigmoid(gate) * e), None
        if self.c.markov_type == "rnn":
            joint = self.linear(mx.concatenate([state, e, slot]), "markov_head.joint_proj")
            g, c, o = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            state = mx.sigmoid(g) * state + (1 - mx.sigmoid(g)) * mx.tanh(c)
            return w2 @ mx.tanh(o), state
        return w2 @ e, None

    def linear(self, x, name):
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def propose(self, tokens, taps, n, sampler, first=0):
        """Guesses and the chance of each."""
        s = self.slots(tokens, taps, first)[self.c.first_slot :]
        out, chances, state = list(tokens), [], mx.zeros(RANK)
        for i in range(min(n, len(s))):
            head = self.w.get("lm_head.weight")
            row = self.target.output(s[i : i + 1])[0] if head is None else head @ s[i]
            if self.c.selector_rank:
                row = self.select(row, s[i], out[-1])
            if self.c.markov_rank:
                bias, state = self.bias(s[i], out[-1], state)
                row = row + bias
            if self.c.has_confidence:
                chances.append(self.chance(s[i], out[-1]))
            if "d2t" in self.w:
                wide = [-float("inf")] * V
                for j, logit in enumerate(row.tolist()):
                    wide[j + self.w["d2t"][j].item()] = logit
                row = mx.array(wide)
            out.append(sampler.pick(row[None], len(out), out).item())
        return out[len(tokens) :], chances

    def chance(self, slot, prev):
        w1 = self.w["markov_head.markov_w1.weight"]
        with_markov = self.c.has_markov_confidence
        features = mx.concatenate([slot, w1[prev]]) if with_markov else slot
        return mx.sigmoid(self.linear(features, "confidence_head.proj")[0]).item()


class World:
    """A session's tokens and residual stream: both change where the text does."""

    def __init__(self, n, taps, seed=1):
        self.tokens = ids(n, seed).tolist()
        keys = mx.random.split(mx.random.key(seed), taps)
        self.taps = [mx.random.normal((n, H), key=key) for key in keys]

    def rows(self, a, b):
        return [tap[a:b] for tap in self.taps]


def make(folder, target, config, own, temp=0.0, **settings):
    weights = checkpoint(folder, config, target, own)
    _, head_class, drafter_class = parts(config)
    head = head_class.load(folder, target, None)
    drafter = drafter_class(head, target, sampler(temp, **settings))
    return drafter, Plain(weights, config, target)


def agree(drafter, plain, world, p, n=BLOCK, temp=0.0, first=0, **settings):
    """The drafter's guesses at anchor p are the plain ones."""
    tokens = world.tokens[: p + 1]
    draws = sampler(temp, **settings)
    expected, _ = plain.propose(tokens, world.rows(first, p), n, draws, first)
    assert drafter.propose(tokens, n) == expected
    block = mx.array([tokens[-1]] + [plain.c.mask_token_id] * (BLOCK - 1))
    (slots,) = drafter._head(block[None], [(p, drafter._context.join(p))])
    assert mx.abs(slots - plain.slots(tokens, world.rows(first, p), first)).max() < 2e-4


# -- proposals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "temp"),
    [
        pytest.param(case, temp, marks=() if i % 2 == k else pytest.mark.slow)
        for i, case in enumerate(CASES)
        for k, temp in enumerate((0.0, 0.8))
    ],
)
def test_a_proposal_equals_the_plain_equations(case, temp, target, tmp_path):
    """A slot off by one, a missing rotation, a mask, the noise of another position."""
    drafter, plain = make(tmp_path / "h", target, *CASES[case], temp)
    world = World(24, len(drafter.taps))
    for a, b in ((0, 9), (9, 10), (10, 14)):
        drafter.observe(a, world.rows(a, b))
    agree(drafter, plain, world, 14, temp=temp)
    drafter.observe(14, world.rows(14, 17))
    agree(drafter, plain, world, 17, n=2, temp=temp)


@pytest.mark.parametrize("case", ["vanilla", "dflash"])
def test_penalties_see_the_guesses_before(case, target, tmp_path):
    """Guesses that a repetition penalty would rule out, or a crash on lazy history."""
    how = {"repetition_penalty": 1.8}
    drafter, plain = make(tmp_path / "h", target, *CASES[case], 0.7, **how)
    world = World(16, 2)
    drafter.observe(0, world.rows(0, 12))
    agree(drafter, plain, world, 12, temp=0.7, **how)


@pytest.mark.parametrize("case", ["rnn", "dflash"])
def test_going_back_and_forth_keeps_the_context(case, target, tmp_path, monkeypatch):
    """Rows of a text that is gone, rows lost by a redo, and what a replay gives again."""
    monkeypatch.setattr(block, "MOST_WAITING", 7)
    monkeypatch.setattr(block, "STEP", 8)
    drafter, plain = make(tmp_path / "h", target, *CASES[case])
    world, pos, draw = World(40, 2), 20, random.Random(3)
    drafter.observe(0, world.rows(0, 20))
    for turn in range(6):
        back = draw.randint(1, pos)
        drafter.rewind(back)
        if turn % 2:
            agree(drafter, plain, world, back)
        if turn % 3 == 0:  # a redo, then on
            drafter.rewind(pos)
            agree(drafter, plain, world, pos)
        else:  # another text from `back` on, with some rows given again
            fresh, start = World(40, 2, seed=turn + 50), draw.randint(0, back)
            world = splice(world, fresh, back)
            pos = min(39, back + draw.randint(1, 12))
            drafter.observe(start, world.rows(start, back))
            drafter.observe(back, world.rows(back, pos))
        agree(drafter, plain, world, pos)


def splice(old, new, at):
    """The old world up to `at`, the new one after."""
    new.tokens = old.tokens[:at] + new.tokens[at:]
    pairs = zip(old.taps, new.taps, strict=True)
    new.taps = [mx.concatenate([a[:at], b[at:]]) for a, b in pairs]
    return new


def test_forks_do_not_see_each_other(target, tmp_path):
    """Two branches that write into one buffer."""
    first, plain = make(tmp_path / "h", target, *CASES["vanilla"])
    world = World(40, 2)
    first.observe(0, world.rows(0, 20))
    agree(first, plain, world, 20)
    second = first.fork()
    other = splice(world, World(40, 2, seed=9), 20)
    first.observe(20, world.rows(20, 30))
    second.observe(20, other.rows(20, 26))
    for _ in range(2):
        agree(first, plain, world, 30)
        agree(second, plain, other, 26)
    third = second.fork()
    second.rewind(4)
    agree(third, plain, other, 26)


def test_rows_given_again_replace_those_that_wait(target, tmp_path):
    """Rows of two texts, or a row twice, where nothing was proposed in between."""
    drafter, plain = make(tmp_path / "h", target, *CASES["vanilla"])
    world = World(24, 2)
    drafter.observe(0, world.rows(0, 10))
    drafter.observe(10, World(24, 2, seed=8).rows(10, 18))
    drafter.rewind(13)
    drafter.observe(10, world.rows(10, 13))
    drafter.observe(13, World(24, 2, seed=9).rows(13, 20))
    drafter.observe(13, world.rows(13, 16))
    drafter.observe(15, world.rows(15, 19))
    agree(drafter, plain, world, 19)


def test_a_gap_starts_the_context_anew(target, tmp_path):
    """Positions counted from the buffer's start; guesses from rows that are not there."""
    drafter, plain = make(tmp_path / "h", target, *CASES["vanilla"])
    world = World(40, 2)
    assert drafter.propose(world.tokens[:5], 3) == []
    drafter.observe(0, world.rows(0, 6))
    assert drafter.propose(world.tokens[:10], 3) == []
    drafter.observe(30, world.rows(30, 33))
    agree(drafter, plain, world, 33, first=30)
    drafter.rewind(12)
    drafter.observe(12, world.rows(12, 20))
    agree(drafter, plain, world, 20, first=12)
    drafter.rewind(14)  # what stood in 14..17 is of another text now
    drafter.observe(17, world.rows(17, 22))
    agree(drafter, plain, world, 22, first=17)


def test_full_attention_sees_the_newest_rows_only(target, tmp_path, monkeypatch):
    """A head that was trained on short texts and loses its way in the context of a long one."""
    monkeypatch.setattr(block_config, "CONTEXT_ROWS", 6)
    drafter, plain = make(tmp_path / "h", target, *CASES["vanilla"])
    assert plain.c.context_rows == 6 and read(DFLASH, "dflash", "x").context_rows is None
    world = World(24, 2)
    drafter.observe(0, world.rows(0, 5))
    agree(drafter, plain, world, 5)
    drafter.observe(5, world.rows(5, 20))
    agree(drafter, plain, world, 20)
    agree(drafter, plain, world, 20, n=2)


def test_many_rows_do_not_wait(target, tmp_path, monkeypatch):
    """A parked session that keeps every residual stream of a long text alive; a buffer that grows
    by too little where more comes than was there."""
    monkeypatch.setattr(block, "MOST_WAITING", 16)
    monkeypatch.setattr(block, "STEP", 32)
    drafter, plain = make(tmp_path / "h", target, *CASES["no markov"])
    world = World(50, 2)
    for at in range(0, 28, 4):
        drafter.observe(at, world.rows(at, at + 4))
    assert len(drafter._context._waiting) <= 16
    agree(drafter, plain, world, 27)
    drafter.rewind(3)
    drafter.observe(3, world.rows(3, 48))
    agree(drafter, plain, world, 48)
    assert drafter.nbytes == 2 * 2 * (KV * 64 * DIM * 4)


# -- confidence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["vanilla", "speculators"])
def test_unlikely_guesses_are_not_proposed(case, target, tmp_path):
    """A threshold that is compared with another slot's chance, or never."""
    config, own = CASES[case]
    drafter, plain = make(tmp_path / "a", target, config, own)
    world = World(24, 2)
    guesses, chances = plain.propose(world.tokens[:13], world.rows(0, 12), BLOCK, sampler())
    drafter.observe(0, world.rows(0, 12))
    assert drafter.propose(world.tokens[:13], BLOCK) == guesses
    assert drafter.confidence in (1, 2, 4, 8, 16, 32)
    for chance in [*sorted(chances), 1.0]:
        threshold = chance - 1e-6
        cut = min((i for i, p in enumerate(chances) if p < threshold), default=len(chances))
        drafter._head.config = replace(drafter._head.config, confidence_threshold=threshold)
        assert drafter.propose(world.tokens[:13], BLOCK) == guesses[:cut]
    assert read({**config, "confidence_threshold": 0.3}, "dspark", "x").confidence_threshold == 0.3


def test_confidence_grows_with_the_chances(target, tmp_path):
    """A scale that says the contrary, or runs out of the controller's buckets."""
    drafter, _ = make(tmp_path / "h", target, *CASES["vanilla"])
    seen = []
    for chance in (0.2, 0.5, 0.6, 0.7, 0.8, 0.95):
        drafter._sure([1, 2], mx.array([chance, chance]))
        seen.append(drafter.confidence)
    assert [level.bit_length() for level in seen] == [1, 2, 3, 4, 5, 6]


# -- checkpoints -----------------------------------------------------------------------------------


def test_quantised_weights_equal_unpacked_ones(target, tmp_path):
    """Packed tensors read as floats, or unpacked with rounded scales."""
    weights = checkpoint(tmp_path / "a", DSPARK, target)
    head = dspark.DSparkHead.load(tmp_path / "a", target, None)
    nn.quantize(head, group_size=32, bits=8, class_predicate=lambda path, m: _packs(path, m))
    packed = dict(tree_flatten(head.parameters()))
    quantised = {**DSPARK, "quantization": {"group_size": 32, "bits": 8}}
    save(tmp_path / "b", quantised, packed)
    plain = Plain(dict(weights), DSPARK, target)
    float_head = dspark.DSparkHead.load(tmp_path / "b", target, mx.float32)
    plain.w = dict(tree_flatten(float_head.parameters()))
    assert set(plain.w) == set(weights)
    stored_head = dspark.DSparkHead.load(tmp_path / "b", target, None)
    assert isinstance(stored_head.fc, nn.QuantizedLinear)
    world = World(16, 2)
    for loaded in (float_head, stored_head):
        drafter = dspark.DSparkDrafter(loaded, target, sampler())
        drafter.observe(0, world.rows(0, 12))
        agree(drafter, plain, world, 12)


@pytest.mark.parametrize("case", ["rnn", "speculators", "dflash"])
def test_half_precision_stays_half_precision(case, target, tmp_path):
    """Keys and queries of two types, which do not go together, or a cast that loses the sense."""
    config, own = CASES[case]
    weights = checkpoint(tmp_path / "h", config, target, own)
    floats = {k: mx.issubdtype(v.dtype, mx.floating) for k, v in weights.items()}
    half = {k: v.astype(mx.bfloat16) if floats[k] else v for k, v in weights.items()}
    save(tmp_path / "h", config, half)
    _, head_class, drafter_class = parts(config)
    head, world = head_class.load(tmp_path / "h", target, None), World(16, 2)
    drafter = drafter_class(head, target, sampler(0.8))
    drafter.observe(0, world.rows(0, 12))
    assert drafter.propose(world.tokens[:13], BLOCK)
    assert {buffer.dtype for pair in drafter._context._buffers for buffer in pair} == {mx.bfloat16}
    same = {k: v.astype(mx.float32) if floats[k] else v for k, v in half.items()}
    expected = Plain(same, config, target).slots(world.tokens[:13], world.rows(0, 12), 0)
    block = mx.array([world.tokens[12]] + [3] * (BLOCK - 1))
    (slots,) = head(block[None], [(12, drafter._context.join(12))])
    assert mx.abs(slots - expected).mean() < 0.1 * mx.abs(expected).mean()


def _packs(path, module):
    return hasattr(module, "to_quantized") and "confidence" not in path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("norm.weight"), "norm.weight"),
        (lambda w: w.update(surprise=mx.zeros(3)), "surprise"),
        (lambda w: w.update({"fc.weight": mx.zeros((H, 3 * H))}), "fc.weight"),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(change, named, target, tmp_path):
    """Random weights where the checkpoint has none, or half of a checkpoint ignored."""
    weights = checkpoint(tmp_path / "h", DSPARK, target)
    change(weights)
    save(tmp_path / "h", DSPARK, weights)
    with pytest.raises(ModelError, match=named):
        dspark.DSparkHead.load(tmp_path / "h", target, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(value, target, tmp_path):
    """A damaged head that guesses nothing right, for a reason nobody is told."""
    checkpoint(tmp_path / "h", DSPARK, target, **{"norm.weight": mx.full((H,), value)})
    with pytest.raises(ModelError, match=r"norm\.weight.*no numbers"):
        HeadSource(named("dspark"), "h", tmp_path / "h", DSPARK).load(target, None)


def test_a_vocabulary_of_its_own_needs_its_table(target, tmp_path):
    """Draft ids taken for the target's."""
    weights = checkpoint(tmp_path / "h", SPECULATORS, target, ("lm_head",))
    by_mask = {k: v for k, v in weights.items() if k != "d2t"}
    save(tmp_path / "h", SPECULATORS, by_mask)
    head = dspark.DSparkHead.load(tmp_path / "h", target, None)
    assert head._target_ids.tolist() == (mx.arange(40) + weights["d2t"]).tolist()
    save(tmp_path / "h", SPECULATORS, {k: v for k, v in by_mask.items() if k != "t2d"})
    with pytest.raises(ModelError, match="d2t"):
        dspark.DSparkHead.load(tmp_path / "h", target, None)


@pytest.mark.parametrize(("offset", "named"), [(V, "names id"), (-(10**6), "names id -")])
def test_a_table_that_leads_beyond_the_target_is_refused(offset, named, target, tmp_path):
    """MLX writes such a row's logits into memory that belongs to something else."""
    d2t = mx.array([0] * 39 + [offset])
    checkpoint(tmp_path, SPECULATORS, target, ("lm_head",), d2t=d2t)
    with pytest.raises(ModelError, match=named):
        dspark.DSparkHead.load(tmp_path, target, None)


def test_a_head_of_another_vocabulary_is_refused(target, tmp_path):
    """Where the target's config states no vocabulary, nothing compared the two."""
    checkpoint(tmp_path, {**DFLASH, "vocab_size": V + 8}, target)
    with pytest.raises(ModelError, match=f"knows {V + 8} token ids, .* has {V}"):
        dflash.DFlashHead.load(tmp_path, target, None)


def test_a_head_shared_with_the_target_must_prove_itself(tmp_path):
    """Guesses through an output projection that is not all there is to the target's logits."""
    capped = Target(build("cohere2"))
    checkpoint(tmp_path / "h", DFLASH, capped)
    with pytest.raises(ModelError, match="do not make its logits"):
        dflash.DFlashHead.load(tmp_path / "h", capped, None)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**DSPARK, "hidden_size": 32}, r"hidden_size.* 32.* 64"),
        ({**DSPARK, "num_target_layers": 9}, r"num_target_layers.* 9.* 4"),
        ({**DSPARK, "vocab_size": 99}, r"vocab_size.* 99.* 97"),
        ({**DSPARK, "target_layer_ids": [1, 4]}, r"layer 4 .*target_layer_ids"),
        ({**DSPARK, "target_layer_ids": [-2, 2]}, r"layer -2 .*target_layer_ids"),
        ({**DSPARK, "target_layer_ids": [2, 2]}, r"twice.*target_layer_ids"),
        ({**DSPARK, "tie_word_embeddings": "false"}, r"tie_word_embeddings.*not true or false"),
        ({**DSPARK, "mask_token_id": 500}, "mask_token_id"),
        ({k: v for k, v in DSPARK.items() if k != "block_size"}, "block_size"),
        ({**DSPARK, "markov_head_type": "cubic"}, "markov_head_type"),
        ({**DSPARK, "log_snr_conditioning": True}, "log_snr_conditioning"),
        ({**DSPARK, "attention_sink_bias": True}, "attention_sink_bias"),
        ({**DSPARK, "architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({**DSPARK, "model_type": "lfm2"}, "lfm2"),
        ({**DSPARK, "rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": [5]}, r"layer 4 "),
        ({**SPECULATORS, "markov_head_type": "rnn"}, "sample_from_anchor"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_it_is_read(config, named):
    """A head of another model that loads and guesses noise."""
    with pytest.raises(UsageError, match=named):
        dspark.check(config, TARGET, "head")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dflash_query_causal": True}, "dflash_query_causal"),
        ({"selector_rank": 256}, "selector_rank"),
        ({"conv_kernel_size": 2}, "conv_kernel_size"),
        ({"layer_fusion_weights": [1.0]}, "layer_fusion_weights"),
        ({"projector_type": "domino"}, "domino"),
        ({"causal": True}, "causal"),
        ({"is_causal": True}, "is_causal"),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale"),
        ({"use_swa": True, "swa_window_size": 512}, "use_swa"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"draft_adapter_rank": 16}, "draft_adapter_rank"),
        ({"attention_mode": "mla"}, "attention_mode"),
    ],
)
def test_methods_in_the_same_clothes_are_refused(changes, named):
    """DFlash 2, DFly and others: the same tensors and more, another computation."""
    nested = {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], **changes}}
    for config in ({**DFLASH, **changes}, nested):
        with pytest.raises(UsageError, match=named):
            dflash.check(config, TARGET, "head")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NONSENSE = [
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": -5.0}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_scaling": {**YARN, "factor": 0}}, "factor"),
    ({"rope_scaling": {**YARN, "attention_factor": 2.5}}, "attention_factor"),
    ({"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 100_000}, "num_hidden_layers"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 10**18}, "sliding_window"),
    ({"target_layer_ids": ["1", "2"]}, "target_layer_ids"),
    ({"target_layer_ids": [True, 2]}, "target_layer_ids"),
    ({"confidence_threshold": 1.5}, "confidence_threshold"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    ({"draft_vocab_size": V + 1}, "draft_vocab_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"intermediate_size": 10**12}, "intermediate_size"),
    ({"markov_rank": -1}, "markov_rank"),
    ({"layer_types": 5}, "layer_types"),
    ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"dflash_config": [1]}, "dflash_config"),
    ({"transformer_layer_config": 3}, "transformer_layer_config"),
]


@pytest.mark.parametrize(("changes", "named"), NONSENSE)
def test_a_config_that_makes_no_sense_is_refused_by_field(changes, named):
    """A head that raises at its first guess, in the middle of a reply, or that never ends."""
    with pytest.raises(UsageError, match=named):
        dspark.check({**DSPARK, **changes}, TARGET, "head")


def test_a_field_that_nobody_knows_is_named(target, tmp_path):
    """A field that changes the computation and is passed over."""
    config = {**DSPARK, "torch_dtype": "bfloat16", "speculate_backwards": True, "_x": 1}
    assert HeadSource(named("dspark"), "h", tmp_path, config).notices == [
        "the head `h` has fields that are ignored: `speculate_backwards`"
    ]
    for known, _ in CASES.values():
        kind = named(parts(known)[0])
        assert HeadSource(kind, "h", tmp_path, known).notices == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {**YARN, "beta_fast": 32, "low_freq_factor": 1.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"type": "default", "rope_theta": 5.0, "twist": 3}}, ["twist"]),
        ({"rope_scaling": {**YARN, "b": 1, "a": 2}}, ["a", "b"]),
        ({"rope_scaling": {**YARN, "mrope_section": [8, 8, 8], "truncate": True}}, []),
    ],
)
def test_a_field_inside_a_table_is_named(changes, said, tmp_path):
    """A rotation that is other than the file says, because one of its numbers has another name."""
    eagle = {"model_type": "llama", **LAYERS, **changes}
    for kind, config in (("dspark", {**DSPARK, **changes}), ("eagle3", eagle)):
        fields = HeadSource(named(kind), "h", tmp_path, config)
        names = ", ".join(f"`rope_scaling.{field}`" for field in said)
        wanted = [f"the head `h` has fields that are ignored: {names}"] if said else []
        assert fields.notices == wanted


def test_other_tables_are_looked_into(tmp_path):
    """How guesses are asked for, in a file of speculators; one of two ways to rotate."""

    def ignored(**changes):
        return named("dspark").part("unknown_fields")({**DSPARK, **changes})

    methods = {"proposal_methods": [{"speculative_tokens": 3}], "algorithm": "dspark", "tree": 2}
    assert ignored(speculators_config=methods) == ["speculators_config.tree"]
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert ignored(rope_parameters=plain, rope_scaling=YARN) == ["rope_scaling"]
    assert ignored(rope_parameters=YARN, rope_scaling=YARN) == []


def test_a_usual_attention_factor_is_no_reason_to_refuse():
    """Files of Transformers say what follows from the factor anyway."""
    scaling = {**YARN, "attention_factor": 0.1 * math.log(4) + 1}
    dspark.check({**DSPARK, "rope_scaling": scaling}, TARGET, "head")


WRONG_WEIGHTS = {
    "bytes": ("norm.weight", lambda x: x.astype(mx.uint8)),
    "whole numbers": ("fc.weight", lambda x: x.astype(mx.int32)),
    "yes or no": ("fc.weight", lambda x: x > 0),
    "far too large": ("layers.0.mlp.up_proj.weight", lambda x: x * 1e30),
    "ids beyond": ("d2t", lambda x: x + 2**40),
    "ids just beyond": ("d2t", lambda x: x + V - 40),
    "ids below": ("d2t", lambda x: x - 1000),
    "ids that are no numbers": ("d2t", lambda x: x.astype(mx.float32)),
    "too few ids": ("d2t", lambda x: x[:5]),
    "gated attention": ("layers.0.self_attn.q_proj.weight", lambda x: mx.concatenate([x, x])),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_hostile_weights_are_refused_by_tensor(case, target, tmp_path):
    """A table of ids beyond the vocabulary ended the process; others raised at the first guess,
    with a text of MLX."""
    tensor, change = WRONG_WEIGHTS[case]
    weights = checkpoint(tmp_path / "h", SPECULATORS, target, ("lm_head",))
    save(tmp_path / "h", SPECULATORS, {**weights, tensor: change(weights[tensor])})
    with pytest.raises(ModelError, match=tensor) as caught:
        HeadSource(named("dspark"), "h", tmp_path / "h", SPECULATORS).load(target, None)
    assert not caught.value.message.startswith("[")


def test_a_mask_longer_than_the_vocabulary_is_refused(target, tmp_path):
    """Ids that are written beyond the end of a row."""
    weights = checkpoint(tmp_path / "h", SPECULATORS, target, ("lm_head",))
    del weights["d2t"]
    weights["t2d"] = mx.arange(V + 40) >= V
    save(tmp_path / "h", SPECULATORS, weights)
    with pytest.raises(ModelError, match=r"t2d.* names id 97"):
        dspark.DSparkHead.load(tmp_path / "h", target, None)


@pytest.mark.parametrize("case", CASES)
def test_a_head_guesses_once_when_it_is_loaded(case, target, tmp_path, monkeypatch):
    """What a check overlooked is found in the middle of a reply."""
    config, own = CASES[case]
    checkpoint(tmp_path / "h", config, target, own)
    source = HeadSource(named(parts(config)[0]), "h", tmp_path / "h", config)
    source.load(target, None)
    monkeypatch.setattr(BlockHead, "logits", lambda self, slots: slots[:, :3] * mx.nan)
    with pytest.raises(ModelError, match="`h` cannot run"):
        source.load(target, None)


def test_heads_that_fit_pass():
    """A check that refuses what it should let through."""
    for config, _ in CASES.values():
        named(parts(config)[0]).part("check")(config, TARGET, "head")


def test_speculators_say_which_slot_comes_first():
    """All guesses shifted by one, where the file says it by the number of tokens only."""
    silent = {k: v for k, v in SPECULATORS.items() if k != "sample_from_anchor"}
    for tokens, first in ((BLOCK, 0), (BLOCK - 1, 1)):
        methods = {"proposal_methods": [{"speculative_tokens": tokens}]}
        config = read({**silent, "speculators_config": methods}, "dspark", "x")
        assert (config.first_slot, config.guesses) == (first, tokens)
        said = {**silent, "speculators_config": methods, "sample_from_anchor": True}
        assert read(said, "dspark", "x").first_slot == 0


def test_the_head_says_what_it_wants(target, tmp_path):
    """Taps of the wrong layers: speculators count them from one."""
    drafter, _ = make(tmp_path / "h", target, *CASES["speculators"])
    assert drafter.taps == (0, 2)
    assert isinstance(drafter._head, BlockHead)
