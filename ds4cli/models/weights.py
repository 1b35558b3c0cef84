"""A model's weights, as mlx-lm reads them: from the files that count, in the right dtype."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import dequantize_model, load_model

from ds4cli.arrays import named_leaves
from ds4cli.errors import ModelError, UsageError
from ds4cli.models import adapters, stages
from ds4cli.models.sharding import Share
from ds4cli.models.shards import PATTERN
from ds4cli.models.source import Source, unsupported_hint

# Share of the free memory that float32 weights may take on a CPU before we keep them as stored.
FLOAT32_MEMORY_SHARE = 0.6


# Configs that say how the files are to be read.
READING = ("config.json", "generation_config.json", "hf_quant_config.json")
SHOWN_NAMES = 3


def load_weights(
    source: Source, dtype: str, share: Share | None = None, adapter: Path | None = None
) -> tuple[Any, list[str]]:
    """The model with its weights evaluated, and notices about them.

    dtype: "stored", "float32", or "auto": float32 on a CPU when that fits, else as stored. share:
    what of the model this process holds, where that is not all of it. adapter: the folder of one
    to put on it.
    """
    _refuse_quantized_activations(source)
    with _only_what_counts(source) as folder:
        model = _load(source, folder, share)
        notices = _to_float32(model, source.name) if _wants_float32(model, dtype, share) else []
        if share is not None:
            notices += [] if adapter is None else adapters.fuse_into(model, adapter)
            how = share.take(model, source.config, source.name)
            notices.append(f"{how}: this is one of {share.size} ranks")
        mx.eval(model.parameters())
    model.eval()
    if share is None and adapter is not None:
        notices += adapters.put_on(model, adapter)
    return model, [*source.shards.notices, *notices]


def _refuse_quantized_activations(source: Source) -> None:
    if source.config.get("quantize_activations") and mx.default_device() == mx.Device(mx.cpu):
        raise UsageError(
            f"`{source.name}` computes with quantised activations, which MLX does on a GPU only",
            "use a conversion without `quantize_activations`",
        )


@contextmanager
def _only_what_counts(source: Source) -> Iterator[Path]:
    """A folder in which mlx-lm, which takes all that is called `model*`, finds what counts."""
    files = [shard.path for shard in source.shards.files]
    if sorted(files) == sorted(source.folder.glob(PATTERN)):
        yield source.folder
        return
    with tempfile.TemporaryDirectory(prefix="ds4cli-") as view:
        for name in READING:
            if (source.folder / name).exists():
                (Path(view) / name).symlink_to((source.folder / name).resolve())
        for number, path in enumerate(files):
            (Path(view) / f"model-{number:05}.safetensors").symlink_to(path.resolve())
        yield Path(view)


def _load(source: Source, folder: Path, share: Share | None) -> Any:
    own: dict[str, Any] = {}
    if source.own_files is not None:
        assert share is not None, "it is a part of something"
        own["get_model_classes"] = stages.classes(share)
    try:
        model, _ = load_model(folder, lazy=True, **own)
    except ValueError as error:
        raise _refusal(source, str(error), unsupported_hint(error)) from None
    except Exception as error:  # a config that its model class cannot read, a broken file
        raise ModelError(f"cannot load `{source.name}`: {error}") from None
    return model


def _refusal(source: Source, said: str, hint: str | None) -> UsageError:
    """mlx-lm's complaint in one line: it lists every parameter that is missing or too much."""
    head, *names = [line.strip(" ,.:") for line in said.splitlines()]
    if names:
        hint = hint or "weights and config.json do not belong together: get the folder again"
        shown = ", ".join(f"`{name}`" for name in names[:SHOWN_NAMES])
        head += f": {shown}" + (", …" if len(names) > SHOWN_NAMES else "")
    return UsageError(f"cannot load `{source.name}`: {head}", hint)


def _wants_float32(model: Any, dtype: str, share: Share | None) -> bool:
    if dtype != "auto":
        return dtype == "float32"
    # Half-precision and quantised products are 10 to 100 times slower on MLX's CPU backend.
    if mx.default_device() != mx.Device(mx.cpu):
        return False
    own_bytes = float32_bytes(model) / (1 if share is None else share.size)
    fits = own_bytes < FLOAT32_MEMORY_SHARE * free_memory_bytes()
    return fits if share is None else share.all(fits)


def float32_bytes(model: Any) -> int:
    """Bytes of the weights as float32 (quantised ones unpacked)."""
    from mlx_lm.utils import get_total_parameters

    return 4 * get_total_parameters(model)


def free_memory_bytes() -> int:
    """Memory that is free now; a large number where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


def is_float32(model: Any) -> bool:
    """Whether all weights are float32, none of them packed."""
    dtypes = {v.dtype for _, v in named_leaves(model.parameters())}
    floats = {dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)}
    return floats <= {mx.float32} and mx.uint32 not in dtypes


def _to_float32(model: Any, name: str) -> list[str]:
    if is_float32(model):
        return []
    unpack(model, mx.float32)
    gigabytes = 4 * sum(v.size for _, v in named_leaves(model.parameters())) / 1e9
    return [f"`{name}`: weights held as float32 ({gigabytes:.1f} GB), the fast type here"]


def unpack(module: Any, dtype: mx.Dtype) -> None:
    """Hold all weights of a model or head as `dtype`, quantised ones too."""
    module.set_dtype(dtype)  # scales first, so that unpacking rounds nothing
    dequantize_model(module)
    module.set_dtype(dtype)  # formats without scales of that type unpack to another
