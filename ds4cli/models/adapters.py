"""LoRA and DoRA adapters, as mlx-lm trains and loads them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ds4cli.errors import ModelError, UsageError

FILES = ("adapter_config.json", "adapters.safetensors")


def find(name: str) -> Path:
    """The adapter's folder. UsageError if it lacks a file."""
    folder = Path(name).expanduser()
    for file in FILES:
        if not (folder / file).is_file():
            hint = "name the folder that `mlx_lm.lora --train` wrote"
            raise UsageError(f"`{name}` has no {file}", hint)
    return folder


def fingerprint(model: str, folder: Path | None) -> str:
    """Stands for a model with this adapter, or with none."""
    if folder is None:
        return model
    digest = hashlib.sha256(model.encode())
    for file in FILES:
        digest.update((folder / file).read_bytes())
    return digest.hexdigest()[:32]


def put_on(model: Any, folder: Path) -> list[str]:
    """Put the adapter on a loaded model; returns notices. ModelError where it was made for another
    model."""
    import mlx.core as mx

    _load(model, folder)
    mx.eval(model.parameters())
    model.eval()
    return [f"adapter `{folder}`"]


def fuse_into(model: Any, folder: Path) -> list[str]:
    """Add the adapter to the weights, which are not read yet: what is shared out over ranks has no
    place for it beside them. UsageError for packed weights: they would be rounded anew."""
    from mlx.utils import tree_unflatten

    _load(model, folder)
    found = [(path, module) for path, module in model.named_modules() if hasattr(module, "fuse")]
    for path, module in found:
        if "scales" in getattr(module, "linear", module):
            raise UsageError(
                f"ranks hold the adapter within the weights, and those of `{path}` are packed",
                "`mlx_lm.fuse` rounds them anew; `--dtype float32` unpacks them",
            )
    model.update_modules(tree_unflatten([(path, module.fuse()) for path, module in found]))
    return [f"adapter `{folder}`, added to the weights"]


def _load(model: Any, folder: Path) -> None:
    from mlx_lm.tuner.utils import load_adapters

    try:
        load_adapters(model, str(folder))
    except Exception as error:  # whatever a config of another model brings about
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"the adapter `{folder}` does not fit this model: {first}") from None
