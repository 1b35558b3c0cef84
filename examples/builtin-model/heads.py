"""Two drafting heads in plain PyTorch, parameter for parameter as their checkpoints name them.

Both read a frozen target. A *chain* starts at an anchor: position p, whose token is known and has
not been fed. Everything before p is the chain's context and gives keys and values only:

* `Dspark` proposes a whole block in one pass. Slot i stands at position p + i and names the token
  at p + i + 1; a Markov head adds what follows from the token before.
* `Mtp` proposes one token a run and is run again on its own output. Row r pairs the target's
  hidden state at r with the token at r + 1, so the chain's first row is p - 1.

Training knows the tokens that follow, so a chain is always run on true tokens: a draft counts only
when all drafts before it were right, and then it was made from exactly these inputs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from model import MLP, Config, Model, RMSNorm
from pytorch import F, Tensor, nn, torch


@dataclass(frozen=True)
class DsparkConfig:
    block_size: int = 8
    mask_token_id: int = 196  # the byte 0xFF, which no UTF-8 text contains
    target_layer_ids: tuple[int, ...] = (1, 2, 3)
    num_target_layers: int = 4
    num_hidden_layers: int = 2
    hidden_size: int = 448
    intermediate_size: int = 448
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    vocab_size: int = 4096
    markov_rank: int = 64

    def to_json(self) -> dict:
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3_dspark",
            **asdict(self),
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "tie_word_embeddings": True,
        }


def rope(x: Tensor, position: Tensor, size: int, theta: float) -> Tensor:
    """Turn the first `size` numbers of each head; x (..., heads, dim), position (...)."""
    half = size // 2
    frequency = theta ** (-torch.arange(half, device=x.device).float() / half)
    angle = (position[..., None].float() * frequency)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = x[..., :half].float(), x[..., half:size].float(), x[..., size:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(y.to(x.dtype) for y in turned), rest], -1)


def attend(q: Tensor, context: tuple, own: tuple, visible: Tensor) -> Tensor:
    """Every chain attends to its context and to its own rows.

    q (B, A, S, heads, D); context keys and values (B, T, kv, D), of which chain a sees
    `visible` (B, A, T); own keys and values (B, A, R, kv, D), seen whole. -> (B, A, S, heads * D)
    """
    (keys, values), (own_keys, own_values) = context, own
    batch, chains, slots, _, dim = q.shape
    rows, kv = keys.shape[1], keys.shape[2]
    q = q.unflatten(3, (kv, -1)) * dim**-0.5
    scores = torch.einsum("baskgd,btkd->bkgast", q, keys).float()
    scores = scores.masked_fill(~visible[:, None, None, :, None], float("-inf"))
    own_scores = torch.einsum("baskgd,barkd->bkgasr", q, own_keys).float()
    weights = torch.cat([scores, own_scores], -1).softmax(-1).to(q.dtype)
    out = torch.einsum("bkgast,btkd->baskgd", weights[..., :rows], values)
    out = out + torch.einsum("bkgasr,barkd->baskgd", weights[..., rows:], own_values)
    return out.reshape(batch, chains, slots, -1)


def at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, T, ...) at index (B, ...)."""
    batch = torch.arange(len(x), device=x.device)
    return x[batch.view(-1, *[1] * (index.ndim - 1)), index]


@dataclass
class Chains:
    """What both heads need to know of a batch: the target's view, and where chains start."""

    tokens: Tensor  # (B, T)
    taps: list[Tensor]  # residual stream after each target layer, (B, T, H)
    hidden: Tensor  # what the target's output head reads, (B, T, H)
    anchor: Tensor  # (B, A), at least 1
    visible: Tensor  # (B, A, T): rows before the anchor, of its dialogue
    embedding: Tensor  # (V, H), the target's: embeds tokens and is the output head

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.hidden.dtype)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.to(x.dtype))

    def token(self, ahead: Tensor | int) -> Tensor:
        """Tokens `ahead` of the anchors; past the row's end the last one, which no loss counts."""
        return at(self.tokens, (self.anchor[..., None] + ahead).clamp(max=self.tokens.shape[1] - 1))


# -- DSpark -------------------------------------------------------------------------------------


class DsparkAttention(nn.Module):
    def __init__(self, config: DsparkConfig):
        super().__init__()
        hidden, self.config = config.hidden_size, config
        q, kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, q * config.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv * config.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv * config.head_dim, bias=False)
        self.o_proj = nn.Linear(q * config.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        return rope(x, position, self.config.head_dim, self.config.rope_theta)

    def keys_values(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, self.config.head_dim)
        k = self.turn(self.k_norm(self.k_proj(x).unflatten(-1, shape)), position)
        return k, self.v_proj(x).unflatten(-1, shape)

    def forward(self, x: Tensor, position: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.config.head_dim)))
        rows = torch.arange(context.shape[1], device=x.device)
        before, own = self.keys_values(context, rows), self.keys_values(x, position)
        return self.o_proj(attend(self.turn(q, position), before, own, visible))


class DsparkLayer(nn.Module):
    def __init__(self, config: DsparkConfig):
        super().__init__()
        self.self_attn = DsparkAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, position: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position, context, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Markov(nn.Module):
    def __init__(self, config: DsparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)


class Confidence(nn.Module):
    def __init__(self, config: DsparkConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class Dspark(nn.Module):
    def __init__(self, config: DsparkConfig):
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DsparkLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.markov_head = Markov(config)
        self.confidence_head = Confidence(config)
        reset(self, config.num_hidden_layers)
        nn.init.normal_(self.markov_head.markov_w1.weight)
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.confidence_head.proj.weight)

    def context(self, taps: list[Tensor]) -> Tensor:
        chosen = [taps[i] for i in self.config.target_layer_ids]
        return self.hidden_norm(self.fc(torch.cat(chosen, -1)))

    def forward(self, chains: Chains) -> tuple[Tensor, Tensor]:
        """Logits (B, A, block, V) and confidence logits (B, A, block) on the true prefix."""
        slot = torch.arange(self.config.block_size, device=chains.tokens.device)
        before = chains.token(slot)  # slot i follows the token at p + i
        masked = torch.full_like(before[..., 1:], self.config.mask_token_id)
        x = chains.embed(torch.cat([before[..., :1], masked], -1))
        position, context = chains.anchor[..., None] + slot, self.context(chains.taps)
        for layer in self.layers:
            x = layer(x, position, context, chains.visible)
        x = self.norm(x)
        previous = self.markov_head.markov_w1(before).to(x.dtype)
        logits = chains.head(x) + self.markov_head.markov_w2(previous)
        return logits, self.confidence_head.proj(torch.cat([x, previous], -1))[..., 0]


# -- MTP ----------------------------------------------------------------------------------------


class MtpAttention(nn.Module):
    """The target's gated attention, with queries only where a chain is."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, self.dim, self.theta = config.hidden_size, config.head_dim, config.rope_theta
        q, kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, 2 * q * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv * self.dim, bias=False)
        self.o_proj = nn.Linear(q * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.rotary = int(self.dim * config.partial_rotary_factor)

    def keys_values(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.dim))
        return rope(k, position, self.rotary, self.theta), v

    def forward(self, x: Tensor, position: Tensor, context, own, visible: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.dim)).chunk(2, -1)
        q = rope(self.q_norm(q), position, self.rotary, self.theta)
        out = attend(q, context, own, visible)
        return self.o_proj(out * gate.flatten(-2).sigmoid())


class MtpLayer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.self_attn = MtpAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, position: Tensor, context, own, visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position, context, own, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Mtp(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden_size
        self.pre_fc_norm_embedding = RMSNorm(hidden, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, config.rms_norm_eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([MtpLayer(config)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        reset(self, 1)

    def pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(pair, -1))

    def keys_values(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        return layer.self_attn.keys_values(layer.input_layernorm(x), position)

    def forward(self, chains: Chains, runs: int) -> Tensor:
        """Logits (B, A, runs, V): run j names the token at p + j + 1.

        The hidden state is always the one that an output head reads: the target's after its final
        norm, later this head's own after `norm`, as vLLM and llama.cpp do.
        """
        rows = torch.arange(chains.tokens.shape[1], device=chains.tokens.device)
        following = F.pad(chains.tokens[:, 1:], (0, 1))
        context = self.pair(chains.embed(following), chains.hidden)
        before = self.keys_values(context, rows)
        x = at(context, chains.anchor - 1)[:, :, None]  # row p - 1 is in the context itself
        own = tuple(y.new_zeros(*x.shape[:2], 0, *y.shape[2:]) for y in before)
        outs = []
        for run in range(runs):
            position = chains.anchor[..., None] - 1 + run
            if run:
                x = self.pair(chains.embed(chains.token(run)), outs[-1])
                more = self.keys_values(x, position)
                own = tuple(torch.cat(pair, 2) for pair in zip(own, more, strict=True))
            x = self.layers[0](x, position, before, own, chains.visible)
            outs.append(self.norm(x))
        return chains.head(torch.cat(outs, 2))


# -- both ---------------------------------------------------------------------------------------


def reset(module: nn.Module, layers: int) -> None:
    depth = (2 * layers) ** -0.5
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            scale = depth if name.endswith(("down_proj", "o_proj")) else 1.0
            nn.init.normal_(part.weight, std=scale * part.in_features**-0.5)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class Heads(nn.Module):
    def __init__(self, target: Config, config: DsparkConfig):
        super().__init__()
        self.dspark, self.mtp = Dspark(config), Mtp(target)


@torch.no_grad()
def look(target: Model, tokens: Tensor, starts: Tensor, anchor: Tensor) -> Chains:
    """One pass of the frozen target, with chains at `anchor` (B, A)."""
    document = starts.cumsum(1)
    taps = target.residuals(tokens, starts)
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    same = at(document, anchor)[:, :, None] == document[:, None]
    visible = same & (rows < anchor[..., None])
    embedding = target.embed_tokens.weight
    return Chains(tokens, taps, target.norm(taps[-1]), anchor, visible, embedding)
