"""MTP heads that lie in a checkpoint as one more layer (GLM-4.x, DeepSeek V3, MiMo).

mlx-lm's classes drop these tensors, so they are read from the files; the decoder layer among them
goes through the class's own `sanitize`, as its first layer. What families do differently:

* GLM and DeepSeek: `model.layers.N` behind the last layer, x_i = eh_proj([enorm(embed(t_{i+1})),
  hnorm(h_i)]). The next row of a chain takes what the layer returns; logits are made of
  shared_head.norm of it. Their `embed_tokens` and `shared_head.head` are copies of the target's.
* MiMo: `model.mtp_layers.0`, x_i = input_proj([hidden_layernorm(h_i), token_layernorm(embed(
  t_{i+1}))]): the other order. The next row and the logits both take final_layernorm.

In all, h_i is what the target's output head reads: the stream after the final norm. vLLM also
blanks the embedding of the very first row, which the technical reports do not; here it counts.

Sources: vLLM `glm4_moe_mtp.py`, `deepseek_mtp.py`, `mimo_mtp.py`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ds4cli.drafters import weights
from ds4cli.drafters.chain import LastStateHead
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError


@dataclass(frozen=True)
class Family:
    """How one family names its parts. prefix: with the number of layers of the target in place of
    N. state_first: the order in which the projection takes state and embedding.
    """

    module: str
    prefix: str
    embedding_norm: str
    state_norm: str
    projection: str
    last_norm: str
    state_first: bool = False
    carries_normed: bool = False
    copies: tuple[str, ...] = ()


def _like_deepseek(module: str) -> Family:
    return Family(
        module,
        "model.layers.N.",
        "enorm",
        "hnorm",
        "eh_proj",
        "shared_head.norm",
        copies=("embed_tokens.", "shared_head.head."),
    )


FAMILIES = {
    "deepseek_v3": _like_deepseek("mlx_lm.models.deepseek_v3"),
    "glm4_moe": _like_deepseek("mlx_lm.models.glm4_moe"),
    "mimo": Family(
        "mlx_lm.models.mimo",
        "model.mtp_layers.0.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        state_first=True,
        carries_normed=True,
    ),
}


def find(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the weight files of the target's folder hold such a head; only headers are read."""
    family = FAMILIES.get(str(config.get("model_type")))
    layers = config.get("num_hidden_layers")
    if family is None or type(layers) is not int:
        return False
    prefix = family.prefix.replace("N", str(layers))
    return any(name.startswith(prefix) for names in weights.headers(folder) for name in names[1])


class NextnHead(LastStateHead):
    """The head of one target; sessions share it. Make one with `load`."""

    def __init__(self, layer: nn.Module, family: Family, target: Target, eps: float):
        super().__init__(target)
        size = target.hidden_size
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.state_norm = nn.RMSNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.last_norm = nn.RMSNorm(size, eps)
        self.layer = layer
        self._family = family

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: mx.Dtype | None) -> NextnHead:
        """The head in the target's folder, evaluated. dtype: float32 to unpack and cast, None as
        stored. ModelError, naming the tensor, if it is not exactly what the target needs."""
        target.prove()
        family, args = FAMILIES[target.model.model_type], target.model.args
        prefix = family.prefix.replace("N", str(target.num_layers))
        tensors = _read(folder, prefix)
        tensors = {k: x for k, x in tensors.items() if not k.startswith(family.copies or " ")}
        layer, block = _block(family, args, tensors)
        head = cls(layer, family, target, args.rms_norm_eps)
        weights.fill(head, {**block, **_parts(family, tensors)}, str(folder), prefix, dtype)
        return head

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[KVCache]) -> mx.array:
        pair = [self.embedding_norm(embedded), self.state_norm(hidden)]
        if self._family.state_first:
            pair.reverse()
        x = self.projection(mx.concatenate(pair, axis=-1))[None]
        mask = create_attention_mask(x, caches[0], return_array=True)
        return self.layer(x, mask, caches[0])[0]

    def carried(self, out: mx.array) -> mx.array:
        return self.last_norm(out) if self._family.carries_normed else out

    def logits(self, out: mx.array) -> mx.array:
        return self._target.output(self.last_norm(out))


def _read(folder: Path, prefix: str) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for path, names in weights.headers(folder):
        if any(name.startswith(prefix) for name in names):
            stored, _ = weights.read(path)
            own = {name: x for name, x in stored.items() if name.startswith(prefix)}
            tensors |= {name.removeprefix(prefix): x for name, x in own.items()}
    if not tensors:
        raise ModelError(f"`{folder}` has no tensors `{prefix}*`")
    return tensors


def _parts(family: Family, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The tensors beside the decoder layer, by our names."""
    names = {
        family.embedding_norm: "embedding_norm",
        family.state_norm: "state_norm",
        family.projection: "projection",
        family.last_norm: "last_norm",
    }
    stems = {name: name.rpartition(".")[0] for name in tensors}
    return {
        f"{names[stem]}.{name.rpartition('.')[2]}": tensors[name]
        for name, stem in stems.items()
        if stem in names
    }


def _block(
    family: Family, args: Any, tensors: dict[str, mx.array]
) -> tuple[nn.Module, dict[str, mx.array]]:
    """mlx-lm's decoder layer, and its tensors in mlx-lm's layout: those of the only layer of a
    model that has no other, of which nothing else is ever computed."""
    others = (family.embedding_norm, family.state_norm, family.projection, family.last_norm)
    own = {k: x for k, x in tensors.items() if k.rpartition(".")[0] not in others}
    args = copy.copy(args)
    args.num_hidden_layers = 1
    if hasattr(args, "first_k_dense_replace"):
        args.first_k_dense_replace = 0
    model = import_module(family.module).Model(args)
    found = model.sanitize({f"model.layers.0.{k}": x for k, x in own.items()})
    return model.model.layers[0], {
        name.replace("model.layers.0.", "layer.", 1): x for name, x in found.items()
    }
