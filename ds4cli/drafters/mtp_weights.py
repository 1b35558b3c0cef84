"""The `mtp.*` tensors of a target's folder: finding them and giving them mlx-lm's layout.

mlx-lm drops them (`sanitize` of its qwen3_next and qwen3_5), so they are read from the files. Their
presence counts, not what the config says about it. Layouts of public checkpoints that are read:

* names from `mtp.` on, with whatever prefix before it (`language_model.mtp.` in MLX conversions);
* experts one by one (Qwen3-Next), all in one with gate and up joined (Qwen3.5), or as mlx-lm has
  them (`switch_mlp`);
* norm weights less one, as Transformers has them, or plain, as MLX has them;
* matrices that MLX quantised, of any bits, groups and mode.
"""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx

from ds4cli.arrays import number
from ds4cli.drafters import weights
from ds4cli.errors import ModelError

_NAME = re.compile(r"(?:.*\.)?mtp\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases)")
_LAYER_NORMS = re.compile(
    r"layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight"
)
# Below this mean a norm of a layer is stored less one: such ones lie about 0, plain ones about 1.
_LESS_ONE_MEAN = 0.4


def find(folder: Path) -> list[Path]:
    """The weight files in `folder` that hold MTP tensors; only headers are read."""
    found = weights.headers(folder)
    return [path for path, names in found if any(map(_NAME.fullmatch, names))]


def read(folder: Path) -> dict[str, mx.array]:
    """The MTP tensors of `folder`, lazy, named from `mtp.` on without it, in mlx-lm's layout."""
    tensors: dict[str, mx.array] = {}
    for path in find(folder):
        stored, about = weights.read(path)
        own = {m[1]: x for name, x in stored.items() if (m := _NAME.fullmatch(name))}
        tensors |= _plain_norms(own, about.get("format") == "mlx")
    return _joined_experts(tensors)


def _plain_norms(tensors: dict[str, mx.array], is_mlx: bool) -> dict[str, mx.array]:
    """Norm weights as factors. Files from Transformers hold them less one.

    Some MLX conversions left the norms of the MTP layer, or all of them, as they were: the layer's
    own norms tell, and the two before `fc` go with them, whose mean may be small in either form;
    see jundot/omlx #1507 and #3750, youssofal/MTPLX #511.
    """
    norms = {name: x for name, x in tensors.items() if x.ndim == 1 and "norm" in name}
    means = {name: number(x.astype(mx.float32).mean()) for name, x in norms.items()}
    layers = [mean for name, mean in means.items() if _LAYER_NORMS.fullmatch(name)]
    less_one = not is_mlx or (bool(layers) and sum(layers) / len(layers) < _LESS_ONE_MEAN)
    last_too = not is_mlx or (less_one and means.get("norm.weight", 1) < _LESS_ONE_MEAN)
    shifted = [name for name in norms if (last_too if name == "norm.weight" else less_one)]
    return tensors | {name: norms[name] + 1 for name in shifted}


def _joined_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts as mlx-lm's `SwitchGLU` wants them: one (experts, out, in) per projection."""
    joined: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, x in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            mlp, index, projection, part = expert.groups()
            single.setdefault(f"{mlp}.switch_mlp.{projection}.{part}", {})[int(index)] = x
        elif name.endswith(".experts.gate_up_proj"):
            gate, up = mx.split(x, 2, axis=-2)
            switch = name.replace(".experts.gate_up_proj", ".switch_mlp")
            joined |= {f"{switch}.gate_proj.weight": gate, f"{switch}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            joined[name.replace(".experts.", ".switch_mlp.") + ".weight"] = x
        else:
            joined[name] = x
    for name, experts in single.items():
        if sorted(experts) != list(range(len(experts))):
            raise ModelError(f"the experts of `mtp.{name}` are not all there")
        joined[name] = mx.stack([experts[i] for i in range(len(experts))])
    return joined
