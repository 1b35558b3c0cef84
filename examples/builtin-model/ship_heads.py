"""Between the shipped model folder and `train_heads.py`: weights out, heads in.

python ship_heads.py thaw MODEL_FOLDER TARGET_FOLDER     float16 weights for `train_heads.py`
python ship_heads.py ship RUN_FOLDER MODEL_FOLDER [--dspark-bits 5] [--mtp-bits 5]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx.core as mx

GROUP = 64
PREFIX = "language_model.model."
FILE_WEIGHTS = 7_000_000  # a weight file stays below 15 MB


def dequantised(folder: Path) -> dict[str, mx.array]:
    """The weights that a quantised model folder stands for; its own names."""
    stored = mx.load(str(folder / "model.safetensors"))
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization"]
    weights = {}
    for name, value in stored.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in stored:
            scales, biases = (
                stored[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases")
            )
            value = mx.dequantize(value, scales, biases, settings["group_size"], settings["bits"])
        if not name.endswith((".scales", ".biases")):
            weights[name] = value
    return weights


def thaw(model: Path, out: Path) -> None:
    """Matrices in float16 (exact to 11 bits of 5), all else in float32; files small to carry."""
    out.mkdir(parents=True, exist_ok=True)
    part: dict[str, mx.array] = {}
    size = index = 0
    for name, value in dequantised(model).items():
        value = value.astype(mx.float16 if value.ndim == 2 else mx.float32)
        if part and size + value.size > FILE_WEIGHTS:
            mx.save_safetensors(str(out / f"weights-{index}.safetensors"), part)
            part, size, index = {}, 0, index + 1
        part[name.removeprefix(PREFIX)] = value
        size += value.size
    mx.save_safetensors(str(out / f"weights-{index}.safetensors"), part)


def quantised(weights: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    """Matrices in groups of 64, as mlx-lm stores them; norms and the one-row matrix stay."""
    stored: dict[str, mx.array] = {}
    for name, value in weights.items():
        if value.ndim < 2 or value.shape[0] < 32:
            stored[name] = value.astype(mx.bfloat16)
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(value.astype(mx.bfloat16), GROUP, bits)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            stored[f"{stem}.{part}"] = array
    return stored


def ship(run: Path, model: Path, dspark_bits: int, mtp_bits: int) -> None:
    """`dspark/` is a checkpoint of its own; the MTP file lies beside the model's weights, because
    mlx-lm takes `mtp.*` among them as a sign that the norms are stored less one."""
    folder = model / "dspark"
    folder.mkdir(exist_ok=True)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["quantization"] = {"group_size": GROUP, "bits": dspark_bits, "mode": "affine"}
    config["quantization_config"] = config["quantization"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = quantised(mx.load(str(run / "dspark.safetensors")), dspark_bits)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    weights = quantised(mx.load(str(run / "mtp.safetensors")), mtp_bits)
    weights = {f"mtp.{name}": value for name, value in weights.items()}
    about = {"format": "mlx", "bits": str(mtp_bits), "group_size": str(GROUP)}
    mx.save_safetensors(str(model / "mtp.safetensors"), weights, metadata=about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("thaw", "ship"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dspark-bits", type=int, default=5, choices=(4, 5, 6, 8))
    parser.add_argument("--mtp-bits", type=int, default=5, choices=(4, 5, 6, 8))
    args = parser.parse_args()
    if args.action == "thaw":
        thaw(args.source, args.out)
    else:
        ship(args.source, args.out, args.dspark_bits, args.mtp_bits)


if __name__ == "__main__":
    main()
