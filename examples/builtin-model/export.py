"""Turn a trained run into a folder that mlx-lm loads: quantised weights, tokenizer, configuration.

    python export.py RUN_FOLDER TOKENIZER_FOLDER OUT_FOLDER [--bits 8] [--group-size 64]

`--bits 32` keeps the trained float32 weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ENDS = [2, 0]  # <|im_end|>, <|endoftext|>


def trained_weights(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        weights |= mx.load(str(path))
    return {f"language_model.model.{name}": value for name, value in weights.items()}


def build(run: Path) -> tuple[qwen3_5.Model, dict]:
    """mlx-lm's own model class with the trained weights; a missing or extra name raises."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.load_weights(list(trained_weights(run).items()), strict=True)
    return model, config


def can_quantise(group_size: int):
    def predicate(path: str, module: nn.Module) -> bool:
        return (
            hasattr(module, "to_quantized")
            and module.weight.shape[-1] % group_size == 0
            and module.weight.shape[0] >= 32
        )

    return predicate


def quantise(model: qwen3_5.Model, config: dict, bits: int, group_size: int) -> None:
    """Affine quantisation of every matrix; norms and gates stay as trained, in bfloat16."""
    nn.quantize(model, group_size, bits, class_predicate=can_quantise(group_size))
    config["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    config["quantization_config"] = config["quantization"]


def storable(name: str, value: mx.array, bits: int) -> mx.array:
    keep = bits == 32 or value.dtype != mx.float32 or name.endswith("A_log")
    return value if keep else value.astype(mx.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=8, choices=(4, 5, 6, 8, 32))
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()
    model, config = build(args.run)
    if args.bits < 32:
        quantise(model, config, args.bits, args.group_size)
    config["eos_token_id"] = ENDS
    args.out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: storable(name, value, args.bits) for name, value in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(args.out / "model.safetensors"), weights, metadata={"format": "mlx"})
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(args.tokenizer / name, args.out / name)


if __name__ == "__main__":
    main()
