"""The tensors of a head: reading them, and putting each exactly where it belongs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.arrays import named_leaves
from ds4cli.errors import ModelError
from ds4cli.models.weights import unpack

# No trained weight is so large, and one that is makes numbers that are none, or all guesses alike.
LARGEST = 1e6
# Tensors of a checkpoint that nothing here reads: the verifier's own, and tables.
UNREAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors of one safetensors file, lazy, and what it says about itself."""
    try:
        loaded = mx.load(str(path), return_metadata=True)
        assert isinstance(loaded, tuple)
        return loaded
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"cannot read `{path}`: {_first_line(error)}") from None


def headers(folder: Path) -> list[tuple[Path, list[str]]]:
    """The weight files of a folder and the names of the tensors in them; none are read."""
    return [(path, _names(path)) for path in sorted(folder.glob("*.safetensors"))]


def _names(path: Path) -> list[str]:
    """The tensors of a safetensors file, from its header; none where it is no such file."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size < path.stat().st_size else {}
    except (OSError, ValueError, struct.error):
        return []
    return list(header)


def read_all(folder: Path) -> dict[str, mx.array]:
    """The tensors of a head's own folder, without those that nothing here reads."""
    tensors: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(read(path)[0])
    if not tensors:
        raise ModelError(f"`{folder}` has no weights (*.safetensors)")
    tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
    return {name: x for name, x in tensors.items() if not name.startswith(UNREAD)}


def _first_line(error: Exception) -> str:
    """What went wrong, without MLX's own prefix."""
    return str(error).partition("\n")[0].removeprefix("[load_safetensors] ")


def fill(
    module: nn.Module,
    tensors: dict[str, mx.array],
    name: str,
    prefix: str = "",
    dtype: mx.Dtype | None = None,
) -> None:
    """Give `module` these weights, quantised where they are, ready to run. ModelError,
    naming the tensor after `prefix`, where one is missing, unknown, of another shape or no weight.

    dtype: float32 to unpack and cast, None as stored.
    """

    def problem(key: str, said: str) -> ModelError:
        return ModelError(f"`{name}`: the tensor `{prefix}{key}` {said}")

    def packing(path: str, part: nn.Module) -> dict[str, Any] | bool:
        try:
            return _packing(path, part, tensors)
        except ValueError as error:
            raise problem(f"{path}.weight", str(error)) from None

    nn.quantize(module, class_predicate=packing)
    wanted = dict(named_leaves(module.parameters()))
    for key in sorted(wanted.keys() - tensors.keys()):
        raise problem(key, "is missing")
    for key in sorted(tensors.keys() - wanted.keys()):
        raise problem(key, "is none that ds4cli can use")
    for key, x in tensors.items():
        if x.shape != wanted[key].shape:
            raise problem(key, f"is {x.shape}, {wanted[key].shape} is needed")
        if x.dtype != wanted[key].dtype and not _are_floats(x, wanted[key]):
            raise problem(key, f"holds {_named(x.dtype)}, which are no weights")
    module.load_weights(list(tensors.items()))
    mx.eval(module.parameters())
    for key, x in tensors.items():
        if mx.issubdtype(x.dtype, mx.floating) and not (mx.abs(x) <= LARGEST).all().item():
            raise problem(key, "is damaged: it holds values that are no numbers, or beyond all use")
    if dtype is not None:
        unpack(module, dtype)
        mx.eval(module.parameters())
    module.eval()


def _are_floats(*arrays: mx.array) -> bool:
    return all(mx.issubdtype(x.dtype, mx.floating) for x in arrays)


def _named(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _packing(path: str, module: nn.Module, tensors: dict[str, mx.array]) -> dict[str, Any] | bool:
    """How MLX quantised the weight of `module`, from the shapes; False where it did not."""
    weight, scales = tensors.get(f"{path}.weight"), tensors.get(f"{path}.scales")
    if weight is None or scales is None or not hasattr(module, "to_quantized"):
        return False
    width = module.weight.shape[-1]
    bits, rest = divmod(32 * weight.shape[-1], width)
    group, more = divmod(width, max(1, scales.shape[-1]))
    if rest or more or bits not in (2, 3, 4, 5, 6, 8) or group not in (16, 32, 64, 128):
        raise ValueError(f"{weight.shape} with scales {scales.shape} does not unpack to {width}")
    mode = "affine" if f"{path}.biases" in tensors else f"{'nv' if group == 16 else 'mx'}fp{bits}"
    return {"group_size": group, "bits": bits, "mode": mode}
