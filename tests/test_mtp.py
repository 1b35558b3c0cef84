"""MTP heads: what they guess is what their equations say, however the session moved before.

The reference below is written out in full, keeps nothing and knows nothing of mlx-lm's layer.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache

import mlx.core as mx
import pytest
import tiny

from ds4cli.drafters import chain, mtp, mtp_weights
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings

H, HEADS, KV, D = 64, 4, 2, 16
THETA, ROTARY, EPS = 1e4, 8, 1e-5
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "qwen3_next:moe")
EXPERTS, PER_TOKEN = 4, 2


@lru_cache
def target(name):
    model = tiny.build(name, scale=2.0)
    getattr(model, "language_model", model).model.norm.weight = 1 + 0.5 * noise(7)(H)
    return Target(model)


def noise(seed):
    """Draws of one seed, one after another."""
    keys = iter(mx.random.split(mx.random.key(seed), 64))
    return lambda *shape: mx.random.normal(shape, key=next(keys))


def checkpoint(name, seed=0):
    """A random head as Transformers stores it: norms less one, experts single or joined."""
    draw = noise(seed)
    matrix = lambda out, into: draw(out, into) * 2.5 / into**0.5  # noqa: E731
    tensors = {
        "fc.weight": matrix(H, 2 * H),
        "layers.0.self_attn.q_proj.weight": matrix(2 * HEADS * D, H),
        "layers.0.self_attn.k_proj.weight": matrix(KV * D, H),
        "layers.0.self_attn.v_proj.weight": matrix(KV * D, H),
        "layers.0.self_attn.o_proj.weight": matrix(H, HEADS * D),
    }
    norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
    norms += ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    tensors |= {f"{n}.weight": draw(H) * 0.1 for n in norms}
    tensors |= {f"layers.0.self_attn.{n}_norm.weight": draw(D) * 0.1 for n in "qk"}
    if "moe" not in name:
        return tensors | gated("layers.0.mlp", 128, matrix)
    mlp = "layers.0.mlp"
    tensors[f"{mlp}.gate.weight"] = matrix(EXPERTS, H)
    tensors[f"{mlp}.shared_expert_gate.weight"] = matrix(1, H)
    tensors |= gated(f"{mlp}.shared_expert", 64, matrix)
    experts = [gated(f"{mlp}.experts.{i}", 64, matrix) for i in range(EXPERTS)]
    return tensors | (joined(experts) if name == "qwen3_5_moe" else merged(experts))


def gated(path, inner, matrix):
    shapes = {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)}
    return {f"{path}.{n}.weight": matrix(*s) for n, s in shapes.items()}


def merged(tables):
    return {k: v for table in tables for k, v in table.items()}


def joined(experts):
    """As Qwen3.5 stores them: gate and up in one, no `.weight`."""
    path, table = "layers.0.mlp.experts", merged(experts)
    get = lambda i, n: table[f"{path}.{i}.{n}.weight"]  # noqa: E731
    pairs = [mx.concatenate([get(i, "gate_proj"), get(i, "up_proj")]) for i in range(EXPERTS)]
    downs = [get(i, "down_proj") for i in range(EXPERTS)]
    return {f"{path}.gate_up_proj": mx.stack(pairs), f"{path}.down_proj": mx.stack(downs)}


def save(folder, tensors, prefix="mtp.", **about):
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "a.safetensors"), {"model.norm.weight": mx.ones(H)})
    tensors = {prefix + name: x for name, x in tensors.items()}
    mx.save_safetensors(str(folder / "b.safetensors"), tensors, metadata=about)
    return folder


# -- the reference ---------------------------------------------------------------------------------


class Reference:
    """The equations of a head on tensors as Transformers stores them; every row made each time."""

    def __init__(self, name, tensors):
        self.name, self.w, self.target = name, tensors, target(name)

    def norm(self, x, name):
        scale = 1 / mx.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        return x * scale * (1 + self.w[f"{name}.weight"])

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def row(self, token, hidden):
        embedded = self.target.embed(mx.array([token]))[0]
        pair = [self.norm(embedded, "pre_fc_norm_embedding")]
        pair.append(self.norm(hidden, "pre_fc_norm_hidden"))
        return self.linear(mx.concatenate(pair), "fc")

    def run(self, rows, base):
        """All rows through the layer; what the output head reads for each."""
        x = mx.stack(rows)
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"), base)
        mlp = self.experts if "moe" in self.name else self.gated
        x = x + mlp(self.norm(x, "layers.0.post_attention_layernorm"), "layers.0.mlp")
        return self.norm(x, "norm")

    def attention(self, x, base):
        n, path = len(x), "layers.0.self_attn"
        q, gate = mx.split(self.linear(x, f"{path}.q_proj").reshape(n, HEADS, 2 * D), 2, axis=-1)
        k, v = (self.linear(x, f"{path}.{p}_proj").reshape(n, KV, D) for p in "kv")
        at = mx.arange(base, base + n)
        q, k = (rotate(self.norm(y, f"{path}.{p}_norm"), at) for y, p in ((q, "q"), (k, "k")))
        k, v = (mx.repeat(y, HEADS // KV, axis=1).transpose(1, 0, 2) for y in (k, v))
        scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / D**0.5
        scores = mx.where(mx.tril(mx.ones((n, n))) > 0, scores, -mx.inf)
        out = (mx.softmax(scores, axis=-1) @ v).transpose(1, 0, 2) * mx.sigmoid(gate)
        return self.linear(out.reshape(n, HEADS * D), f"{path}.o_proj")

    def gated(self, x, path):
        gate = self.linear(x, f"{path}.gate_proj")
        gate = gate * mx.sigmoid(gate)
        return self.linear(gate * self.linear(x, f"{path}.up_proj"), f"{path}.down_proj")

    def experts(self, x, path):
        shares = mx.softmax(self.linear(x, f"{path}.gate"), axis=-1)
        least = mx.sort(shares, axis=-1)[:, -PER_TOKEN, None]
        shares = mx.where(shares >= least, shares, 0)
        if self.name == "qwen3_5_moe":  # norm_topk_prob
            shares = shares / shares.sum(-1, keepdims=True)
        out = sum(shares[:, i, None] * self.expert(x, path, i) for i in range(EXPERTS))
        shared = self.gated(x, f"{path}.shared_expert")
        return out + mx.sigmoid(self.linear(x, f"{path}.shared_expert_gate")) * shared

    def expert(self, x, path, i):
        if f"{path}.experts.{i}.up_proj.weight" in self.w:
            return self.gated(x, f"{path}.experts.{i}")
        gate, up = mx.split(x @ self.w[f"{path}.experts.gate_up_proj"][i].T, 2, axis=-1)
        return (gate * mx.sigmoid(gate) * up) @ self.w[f"{path}.experts.down_proj"][i].T

    def propose(self, tokens, n, sampler, base=0):
        """n guesses after `tokens`, seeing the text from position `base` on."""
        states = self.target.norm(mx.stack([state(tokens, i) for i in range(len(tokens) - 1)]))
        rows = [self.row(tokens[i + 1], states[i]) for i in range(base, len(tokens) - 1)]
        known = list(tokens)
        for _ in range(n):
            out = self.run(rows, base)[-1]
            logits = self.target.output(out[None])
            known.append(sampler.pick(logits, len(known), known).item())
            rows.append(self.row(known[-1], out))
        return known[len(tokens) :]


def rotate(x, at):
    half = ROTARY // 2
    angle = (at[:, None] * THETA ** (-mx.arange(half) / half))[:, None, :]
    a, b, rest = x[..., :half], x[..., half:ROTARY], x[..., ROTARY:]
    cos, sin = mx.cos(angle), mx.sin(angle)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def state(tokens, i, tap=0):
    """A made-up residual row: it depends on the tokens up to position i, and on nothing else."""
    key = mx.random.key(hash((tap, *tokens[: i + 1])) & 0xFFFFFFFF)
    return mx.random.normal((H,), key=key)


# -- a session's moves -----------------------------------------------------------------------------


class Moves:
    """Plays a session towards a drafter: every row that is read is shown to it."""

    def __init__(self, drafter, reference, sampler, seed=0):
        self.drafter, self.reference, self.sampler = drafter, reference, sampler
        self.random = random.Random(seed)
        self.known, self.pos, self.base = [], 0, 0

    def token(self):
        return self.random.randrange(tiny.V)

    def read(self, n, start=None):
        """Read n new tokens; from `start` on the ones that stand there are read again."""
        self.known = [*self.known[: self.pos], *(self.token() for _ in range(n))]
        start = self.pos if start is None else start
        self.pos = len(self.known)
        while start < self.pos:
            end = min(self.pos, start + self.random.randint(1, 6))
            self.show(start, end)
            start = end

    def show(self, start, end):
        taps = range(len(self.drafter.taps))
        rows = [mx.stack([state(self.known, i, t) for i in range(start, end)]) for t in taps]
        self.drafter.observe(start, rows)

    def go(self, pos):
        self.pos = pos
        self.drafter.rewind(pos)

    def check(self, n=3):
        tokens = [*self.known[: self.pos], self.token()]
        expected = self.reference.propose(tokens, n, self.sampler, self.base)
        assert self.drafter.propose(tokens, n) == expected
        if self.random.random() < 0.5:  # the text takes the anchor, and perhaps the first guess
            taken = [*tokens[self.pos :], *expected[: self.random.randint(0, n)]]
            self.known = [*self.known[: self.pos], *taken]
            self.show(self.pos, len(self.known))
            self.pos = len(self.known)

    def any(self):
        """One move of a session, at random."""
        kind = self.random.choice(("read", "lower", "redo", "replay", "edit"))
        if kind == "read":
            self.read(self.random.randint(1, 4))
        elif kind == "redo":
            self.go(self.random.randint(self.pos, len(self.known)))
        else:
            pos = self.random.randint(max(2, self.pos - 8), self.pos)
            self.go(pos) if self.random.random() < 0.5 or kind == "lower" else None
            self.pos = pos  # a sync reads before it says where it stands
            if kind == "replay":  # back to a checkpoint before, and from there on again
                self.read(0, start=self.random.randint(0, pos - 1))
            elif kind == "edit":
                self.read(self.random.randint(1, 3))


@lru_cache
def folder_of(name, tmp):
    return save(tmp / name.replace(":", "_"), checkpoint(name), format="pt")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Family -> its random head, loaded from files."""
    root = tmp_path_factory.mktemp("mtp")
    return lru_cache(lambda name: mtp.MtpHead.load(folder_of(name, root), target(name), mx.float32))


def moves(name, head, temp=0.0, seed=0, **settings):
    sampler = Sampler(Settings(temp=temp, **settings), token_limit=tiny.V)
    drafter = mtp.MtpDrafter(head, target(name), sampler)
    return Moves(drafter, Reference(name, checkpoint(name)), sampler, seed)


@pytest.mark.parametrize(
    ("name", "temp"),
    [
        pytest.param(name, temp, marks=() if i % 2 == k else pytest.mark.slow)
        for i, name in enumerate(FAMILIES)
        for k, temp in enumerate((0.0, 0.8))
    ],
)
def test_guesses_are_what_the_equations_say_after_any_moves(name, temp, loaded):
    """Guards: a row paired with the wrong token or position, one kept from a chain of guesses or
    from text that was taken back, norms less one, experts in another order."""
    session = moves(name, loaded(name), temp, seed=len(name))
    session.read(9)
    for _ in range(14):
        session.check()
        session.any()
    session.check(1)


def test_penalties_see_the_guesses_before(loaded):
    """Guards: a chain whose later guesses are picked by a history without the earlier ones."""
    few = {i: 50.0 for i in range(8)}
    session = moves("qwen3_5", loaded("qwen3_5"), logit_bias=few, presence_penalty=20.0)
    session.read(5)
    session.check(6)


def test_forks_do_not_see_each_other(loaded):
    """Guards: two branches that write into one buffer."""
    session = moves("qwen3_5", loaded("qwen3_5"))
    session.read(7)
    session.check()
    twin = moves("qwen3_5", loaded("qwen3_5"), seed=5)
    twin.drafter, twin.known, twin.pos = session.drafter.fork(), session.known, session.pos
    for _ in range(4):
        for branch in (session, twin):
            branch.any()
            branch.check()


def test_a_text_begun_elsewhere_is_seen_from_where_it_goes_on(loaded):
    """Guards: a loaded session whose first rows are taken for those of position 0, or are stuck
    behind the gap for good."""
    session = moves("qwen3_5", loaded("qwen3_5"))
    session.read(4)
    session.known += [session.token() for _ in range(5)]
    session.pos = session.base = 9
    assert session.drafter.propose([*session.known, 1], 3) == []
    session.read(1)
    session.check()
    session.read(3)
    session.check()
    session.go(6)  # before the context: it begins anew there
    session.base = 6
    assert session.drafter.propose([*session.known[:6], 1], 3) == []
    session.read(2)
    session.check()


def test_going_back_beyond_the_kept_states_costs_a_proposal(loaded, monkeypatch):
    """Guards: guesses made of a state that is gone, or a drafter that is silent from then on; and
    states that are kept for good."""
    monkeypatch.setattr(chain, "KEPT_ROWS", 6)
    session = moves("qwen3_5", loaded("qwen3_5"))
    session.read(30)
    session.check()
    session.read(2)
    assert session.drafter._rows.start >= 20
    session.go(session.pos - 5)
    session.check()
    session.go(12)
    assert session.drafter.propose([*session.known[:12], 1], 3) == []
    session.go(20)
    session.go(12)
    session.read(2)
    assert session.drafter._made == 12  # rows of the states that were there are not taken over
    assert len(session.drafter.propose([*session.known[:14], 1], 3)) == 3
    session.go(3)
    session.read(4, start=0)  # the odd row is read again
    session.check()


def test_rows_that_wait_are_bounded(loaded, monkeypatch):
    """Guards: a parked drafter that holds on to the states of the whole text."""
    monkeypatch.setattr(chain, "WAITING_ROWS", 16)
    monkeypatch.setattr(chain, "CHUNK_ROWS", 3)
    session = moves("qwen3_5", loaded("qwen3_5"))
    session.read(60)
    rows = session.drafter._rows
    assert rows.end - rows.start <= 16 and rows.end == 60
    session.base = rows.start
    session.check()


def test_many_pieces_are_joined(loaded):
    """Guards: a state lost or doubled where single rows are joined."""
    session = moves("qwen3_5", loaded("qwen3_5"))
    for _ in range(80):
        session.read(1)
    assert len(session.drafter._rows._pieces) <= 64
    session.check()


# -- files -----------------------------------------------------------------------------------------


def as_mlx(tensors):
    """As MLX conversions store a head: plain norms, experts stacked."""
    plain = {n: x + 1 if x.ndim == 1 else x for n, x in tensors.items()}
    return mtp_weights._joined_experts(plain)


def quantised(tensors, bits, group):
    """(stored, what it stands for)"""
    stored, meant = {}, {}
    for name, x in tensors.items():
        stored[name] = meant[name] = x
        if x.ndim >= 2 and x.shape[-2] > 1:
            parts = mx.quantize(x, group, bits)
            stem = name.removesuffix(".weight")
            names = (f"{stem}.{part}" for part in ("weight", "scales", "biases"))
            stored |= dict(zip(names, parts, strict=True))
            meant[name] = mx.dequantize(*parts, group, bits)
    return stored, meant


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp."])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next:moe"])
def test_an_mlx_conversion_is_the_same_head(name, prefix, loaded, tmp_path):
    """Guards: norms raised by one twice, or experts stacked twice."""
    folder = save(tmp_path / "m", as_mlx(checkpoint(name)), prefix, format="mlx")
    assert same(mtp.MtpHead.load(folder, target(name), None), loaded(name))


def test_norms_that_a_conversion_left_as_they_were_are_seen(loaded, tmp_path):
    """Guards: converted files with norms less one (there are such), which flip the head's signs."""
    raw = checkpoint("qwen3_5")
    mixed = raw | {"norm.weight": raw["norm.weight"] + 1}
    for i, tensors in enumerate((raw, mixed)):
        folder = save(tmp_path / str(i), tensors, format="mlx")
        assert same(mtp.MtpHead.load(folder, target("qwen3_5"), None), loaded("qwen3_5"))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (5, 64)])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_quantised_weights_are_unpacked_or_kept(name, bits, group, tmp_path):
    """Guards: bits or groups taken from elsewhere than the tensors, which read as noise."""
    stored, meant = quantised(as_mlx(checkpoint(name)), bits, group)
    packed = save(tmp_path / "q", stored, format="mlx")
    plain = mtp.MtpHead.load(save(tmp_path / "p", meant, format="mlx"), target(name), None)
    assert same(mtp.MtpHead.load(packed, target(name), mx.float32), plain)
    kept = mtp.MtpHead.load(packed, target(name), None)
    assert kept.fc.bits == bits and kept.fc.group_size == group
    assert same(kept, plain)


def same(head, other):
    x, y = noise(9)(5, H), noise(8)(5, H)
    ours, theirs = (h(x, y, h.caches()) for h in (head, other))
    return mx.allclose(ours, theirs, atol=1e-3).item()


def test_only_headers_are_looked_at(tmp_path):
    """Guards: a search that reads a large checkpoint, or that stumbles over another file."""
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    assert not mtp.find(tmp_path, {})
    header = json.dumps({"mtp.fc.weight": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}})
    with (tmp_path / "x.safetensors").open("wb") as file:  # the tensor itself is not there
        file.write(len(header).to_bytes(8, "little") + header.encode() + b"0")
    assert mtp.find(tmp_path, {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("fc.weight"), "`mtp.fc.weight` is missing"),
        (lambda t: t.update({"embed_tokens.weight": mx.ones((4, H))}), "`mtp.embed_tokens.weight`"),
        (lambda t: t.update({"layers.1.x.weight": mx.ones(3)}), "`mtp.layers.1.x.weight`"),
        (lambda t: t.update({"norm.weight": mx.ones(H + 1)}), "`mtp.norm.weight`"),
        (lambda t: t.update({"fc.scales": mx.ones((H, 3))}), "`mtp.fc.weight`"),
        (lambda t: t.clear(), "no `mtp"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_tensor(change, says, tmp_path):
    """Guards: a head that runs with weights left at random, or without a part it needs."""
    tensors = checkpoint("qwen3_5")
    change(tensors)
    with pytest.raises(ModelError, match=says):
        mtp.MtpHead.load(save(tmp_path / "x", tensors), target("qwen3_5"), None)


def test_missing_experts_are_refused_by_tensor(tmp_path):
    """Guards: experts that are stacked in another place than their number."""
    tensors = checkpoint("qwen3_next:moe")
    del tensors["layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ModelError, match=r"switch_mlp\.up_proj"):
        mtp.MtpHead.load(save(tmp_path / "x", tensors), target("qwen3_next:moe"), None)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "deepseek_v41"}, "`deepseek_v41`.*hyper-connection"),
        ({"model_type": "nemotron_h"}, "`nemotron_h`"),
        ({"model_type": "qwen3_next", "num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        (
            {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 3}},
            "mtp_num_hidden_layers is `3`",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"mtp_use_dedicated_embeddings": True}},
            "mtp_use_dedicated_embeddings",
        ),
    ],
)
def test_targets_whose_heads_cannot_be_run_are_refused_by_field(config, says):
    """Guards: minutes of loading before a head turns out to be of another kind."""
    with pytest.raises(UsageError, match=says):
        mtp.check(config, config, "x")


def test_ordinary_configs_pass():
    """Guards: a refusal of the checkpoints that this is for, whose flags may be off or absent."""
    for table in ({}, {"mtp_num_hidden_layers": 1}, {"mtp_num_hidden_layers": 0}):
        config = {"model_type": "qwen3_5_moe", "text_config": table}
        mtp.check(config, config, "x")
