"""Tiny models as mlx-lm folders on disk, with a byte-level tokenizer: for tests of loading and of
the command. `python tests/folder.py PATH [NAME]` writes one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny import CFG, build
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 256 + len(SPECIALS) + len(MARKERS)

# ChatML, with the switch for thinking that Qwen's templates have.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then the special tokens, then markers that are ordinary text."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken(m, special=False) for m in MARKERS])
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Write tokenizer.json and its config; without `template` it is a base model's."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def save_folder(
    folder: Path, name: str = "llama", *, template: str | None = TEMPLATE, seed: int = 0, **over
) -> Path:
    """Write the tiny model `name` of tests/tiny.py as an mlx-lm folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    over = {"vocab_size": VOCAB_SIZE, **over}
    model = build(name, seed=seed, scale=3.0, **over)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {**CFG[name], **over}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_tokenizer(folder, template)
    return folder


if __name__ == "__main__":
    print(save_folder(Path(sys.argv[1]), *sys.argv[2:3]))
