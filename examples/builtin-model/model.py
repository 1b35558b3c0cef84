"""The hybrid in plain PyTorch, parameter for parameter as mlx-lm's `qwen3_5` names and shapes them.

Three gated delta-net layers, then one layer of gated full attention. Training reads rows in which
several dialogues stand one after the other; `starts` marks where one begins, and nothing leaks
from one into the next: not through the convolution, the recurrent state, or attention.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from pytorch import F, Tensor, nn, torch

CHUNK = 64
BLOCK = 16  # the triangular inverse squares blocks of this size, larger ones lose digits
FORGET = -40.0  # log decay at the start of a dialogue: exp(-40) is nothing


@dataclass(frozen=True)
class Config:
    vocab_size: int = 4096
    hidden_size: int = 448
    intermediate_size: int = 1344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25

    def to_json(self) -> dict:
        """The `config.json` that mlx-lm reads."""
        text = asdict(self)
        theta, rotary = text.pop("rope_theta"), text.pop("partial_rotary_factor")
        rope = {
            "type": "default",
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotary,
        }
        interval, layers = self.full_attention_interval, self.num_hidden_layers
        text |= {
            "model_type": "qwen3_5_text",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rope_parameters": rope,
            "layer_types": [
                "full_attention" if (i + 1) % interval == 0 else "linear_attention"
                for i in range(layers)
            ],
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "text_config": text,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


# -- the chunked gated delta rule ---------------------------------------------------------------
#
# In a chunk of L rows that starts at state S (dk, dv), with G the running sum of log decays:
#   A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j), j < i;  T = (1 + A)^-1
#   u = T (beta v),  w = T (beta exp(G) k)      what is written if S were zero, and S's part
#   S_next = (exp(G_L) - kd^T w) S + kd^T u,    kd_i = k_i exp(G_L - G_i)
#   o = q exp(G) S + P (u - w S),               P[i, j] = (q_i . k_j) exp(G_i - G_j), j <= i
# so the states of all chunks follow from one small product a chunk, and all else is batched.
# Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.


def _unit_triangular_inverse(a: Tensor) -> Tensor:
    """(1 + a)^-1 for strictly lower triangular `a` (..., L, L) in float32."""
    size = a.shape[-1]
    eye = torch.eye(BLOCK, device=a.device, dtype=a.dtype)
    tiles = a.unflatten(-2, (size // BLOCK, BLOCK)).unflatten(-1, (size // BLOCK, BLOCK))
    x = -torch.diagonal(tiles, dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
    inverse = eye + x
    for _ in range(int(math.log2(BLOCK)) - 1):
        x = x @ x
        inverse = inverse + inverse @ x
    width = BLOCK
    while width < size:
        inverse = _join_blocks(a, inverse, width)
        width *= 2
    return inverse[..., 0, :, :]


def _join_blocks(a: Tensor, inverse: Tensor, width: int) -> Tensor:
    """Inverses (..., n, w, w) of the diagonal blocks -> (..., n/2, 2w, 2w)."""
    size = a.shape[-1]
    tiles = a.unflatten(-2, (size // width, width)).unflatten(-1, (size // width, width))
    below = torch.diagonal(tiles[..., 1::2, :, ::2, :], dim1=-4, dim2=-2).movedim(-1, -3)
    upper, lower = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
    corner = -(lower @ below @ upper)
    top = torch.cat([upper, torch.zeros_like(upper)], -1)
    return torch.cat([top, torch.cat([corner, lower], -1)], -2)


@torch.library.custom_op("ds4::triangular_inverse", mutates_args=())
def triangular_inverse(a: Tensor) -> Tensor:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # short mantissas would be amplified here
    result = _unit_triangular_inverse(a)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return result.contiguous()


@triangular_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _inverse_backward(ctx, grad: Tensor) -> Tensor:
    (t,) = ctx.saved_tensors
    return -(t.mT @ grad @ t.mT).tril(-1)


triangular_inverse.register_autograd(
    _inverse_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


@torch.library.custom_op("ds4::scan_states", mutates_args=())
def scan_states(step: Tensor, gain: Tensor) -> Tensor:
    """Start state of every chunk: S[0] = 0, S[c+1] = step[c] @ S[c] + gain[c]; chunks lead."""
    states = torch.zeros_like(gain)
    for c in range(gain.shape[0] - 1):
        torch.baddbmm(gain[c], step[c], states[c], out=states[c + 1])
    return states


@scan_states.register_fake
def _(step: Tensor, gain: Tensor) -> Tensor:
    return torch.empty_like(gain)


@torch.library.custom_op("ds4::scan_states_back", mutates_args=())
def scan_states_back(step: Tensor, grad: Tensor) -> Tensor:
    """Gradient for `gain`: what each chunk's end state is worth to all later chunks."""
    result = torch.zeros_like(grad)
    for c in range(grad.shape[0] - 1, 0, -1):
        torch.baddbmm(grad[c], step[c].mT, result[c], out=result[c - 1])
    return result


@scan_states_back.register_fake
def _(step: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _scan_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    step, states = ctx.saved_tensors
    worth = scan_states_back(step, grad.contiguous())
    return worth @ states.mT, worth


scan_states.register_autograd(
    _scan_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output),
)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """q, k (B, H, T, dk), v (B, H, T, dv), log_decay and beta (B, H, T), float32 -> (B, H, T, dv).

    T is a multiple of `CHUNK`; the state before the first row is zero.
    """
    batch, heads, rows, dk = q.shape
    q, k, v = (
        x.reshape(batch * heads, rows // CHUNK, CHUNK, -1).transpose(0, 1).contiguous()
        for x in (q, k, v)
    )
    g, beta = (
        x.reshape(batch * heads, rows // CHUNK, CHUNK).transpose(0, 1) for x in (log_decay, beta)
    )
    g = g.cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    a = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    t = triangular_inverse(a.contiguous())
    u = t @ (beta[..., None] * v)
    w = t @ ((beta * g.exp())[..., None] * k)
    end = g[..., -1:]
    kd = ((end - g).exp()[..., None] * k).mT
    eye = torch.eye(dk, device=q.device, dtype=q.dtype)
    step = end.exp()[..., None] * eye - kd @ w
    states = scan_states(step.contiguous(), (kd @ u).contiguous())
    written = u - w @ states
    out = (g.exp()[..., None] * q) @ states + ((q @ k.mT) * decay) @ written
    return out.transpose(0, 1).reshape(batch, heads, rows, -1)


class DepthwiseConv(nn.Module):
    """Causal convolution with one filter a channel; the weight has mlx's shape (C, K, 1)."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, kernel, 1) * kernel**-0.5)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        kernel = self.weight.shape[1]
        out = x * self.weight[:, -1, 0]
        for back in range(1, kernel):
            earlier = F.pad(x, (0, 0, back, 0))[:, :-back]
            inside = (position >= back)[..., None]
            out = out + torch.where(inside, earlier, 0) * self.weight[:, -1 - back, 0]
        return out


class GatedDeltaNet(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden, self.heads = config.hidden_size, config.linear_num_value_heads
        self.dk, self.dv = config.linear_key_head_dim, config.linear_value_head_dim
        key, value = self.heads * self.dk, self.heads * self.dv
        self.sizes = [key, key, value]
        self.in_proj_qkv = nn.Linear(hidden, 2 * key + value, bias=False)
        self.in_proj_z = nn.Linear(hidden, value, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.heads, bias=False)
        self.conv1d = DepthwiseConv(2 * key + value, config.linear_conv_kernel_dim)
        self.norm = RMSNorm(self.dv, config.rms_norm_eps)
        self.out_proj = nn.Linear(value, hidden, bias=False)
        # Time steps between 0.001 and 0.1, as Mamba starts: most heads begin with a long memory.
        dt = torch.exp(torch.rand(self.heads) * math.log(100) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        qkv = F.silu(self.conv1d(self.in_proj_qkv(x), position))
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2).float()
            for y in qkv.split(self.sizes, -1)
        )
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * self.dk**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        beta = self.in_proj_b(x).float().sigmoid().mT
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        log_decay = torch.where((position == 0)[..., None], FORGET, log_decay).mT
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta_rule(q, k, v, log_decay, beta)
        out = out.transpose(1, 2)
        gate = self.in_proj_z(x).unflatten(-1, (self.heads, self.dv)).float()
        out = self.norm(out) * F.silu(gate)
        return self.out_proj(out.reshape(batch, rows, -1).to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden, self.dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.rotary, self.theta = int(self.dim * config.partial_rotary_factor), config.rope_theta

    def rope(self, x: Tensor) -> Tensor:
        half = self.rotary // 2
        frequency = self.theta ** (-torch.arange(half, device=x.device).float() / half)
        angle = torch.arange(x.shape[2], device=x.device).float()[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = (
            x[..., :half].float(),
            x[..., half : self.rotary].float(),
            x[..., self.rotary :],
        )
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*(y.to(x.dtype) for y in turned), rest], -1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q, gate = self.q_proj(x).view(batch, rows, self.heads, 2 * self.dim).chunk(2, -1)
        k = self.k_proj(x).view(batch, rows, self.kv_heads, self.dim)
        v = self.v_proj(x).view(batch, rows, self.kv_heads, self.dim).transpose(1, 2)
        q, k = self.rope(self.q_norm(q).transpose(1, 2)), self.rope(self.k_norm(k).transpose(1, 2))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask)
        out = out.transpose(1, 2).reshape(batch, rows, -1)
        return self.o_proj(out * gate.reshape(batch, rows, -1).sigmoid())


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config, index: int):
        super().__init__()
        self.is_linear = (index + 1) % config.full_attention_interval != 0
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.linear_attn(y, position) if self.is_linear else self.self_attn(y, mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.reset()

    def reset(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        depth = (2 * self.config.num_hidden_layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = depth if name.endswith(("down_proj", "o_proj", "out_proj")) else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)

    def residuals(self, tokens: Tensor, starts: Tensor) -> list[Tensor]:
        """tokens (B, T) and starts (B, T, bool) -> the stream after every layer, (B, T, D) each."""
        index = torch.arange(tokens.shape[1], device=tokens.device)
        begin = torch.where(starts, index, 0).cummax(1).values
        position = index - begin
        document = starts.cumsum(1)
        mask = (document[:, :, None] == document[:, None, :]) & (index[:, None] >= index)
        x = F.embedding(tokens, self.embed_tokens.weight)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        streams = []
        for layer in self.layers:
            x = layer(x, position, mask[:, None])
            streams.append(x)
        return streams

    def hidden(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """What the output head reads, (B, T, D)."""
        return self.norm(self.residuals(tokens, starts)[-1])

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each row."""
        return F.linear(self.hidden(tokens, starts), self.embed_tokens.weight)
