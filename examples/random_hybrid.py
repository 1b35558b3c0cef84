"""A random hybrid model (gated DeltaNet and attention) of any size, as an mlx-lm folder to measure
with: `python random_hybrid.py FOLDER --layers 16 --hidden 1024`, `ds4cli rewind-bench -m FOLDER`.

What it says means nothing; what it costs is what a trained model of that shape costs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

HEAD = 64


def config(layers: int, hidden: int, vocab_size: int) -> dict:
    """Qwen3.5's shape: three DeltaNet layers, then one of attention; heads of 64."""
    heads = hidden // HEAD
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": HEAD,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 65536,
        "rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }
    return {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 0}


def main() -> None:
    """Write config, weights and a tokenizer that another folder lends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument(
        "--tokenizer", type=Path, help="a model folder; default: the built-in model"
    )
    given = parser.parse_args()
    lender = given.tokenizer or builtin()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(lender / name, given.folder / name)
    tokenizer = json.loads((lender / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    shape = config(given.layers, given.hidden, max(ids) + 1)
    (given.folder / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(shape))
    weights = dict(tree_flatten(model.parameters()))
    path = given.folder / "model.safetensors"
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    print(f"{sum(w.size for w in weights.values()) / 1e6:.0f} M parameters in {given.folder}")


def builtin() -> Path:
    """The folder of the model that ships with the package."""
    import ds4cli

    return Path(ds4cli.__file__).parent / "builtin"


if __name__ == "__main__":
    main()
