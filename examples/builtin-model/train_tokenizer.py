"""Train the byte-level BPE tokenizer on the corpus. Two minutes on one core.

python train_tokenizer.py OUT_FOLDER [--size 4096] [--dialogues 150000]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from corpus import Pool, draw
from plaintext import excerpts, standard_library
from render import pieces
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Known to the parser, yet part of the text: they must survive decoding.
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
]
# As Qwen's, with every digit on its own, so that numbers are copied and added digit by digit.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(dialogues: int, seed: int) -> Iterator[str]:
    pool = Pool(random.Random(seed))
    for _ in range(dialogues):
        yield "".join(text for text, _ in pieces(draw(pool), pool.rng.random() < 0.5))
    yield from islice(excerpts(standard_library(held_out=False), pool.rng, 4000), dialogues // 20)


def train(size: int, dialogues: int, seed: int = 0) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(dialogues, seed), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def unmark(path: Path) -> None:
    """The trainer marks every reserved token as special; the markers are not."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def config(template: str) -> dict:
    names = [*SPECIAL, *MARKERS]
    added = {
        str(i): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for i, text in enumerate(names)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
        "model_max_length": 8192,
        "chat_template": template,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--dialogues", type=int, default=150_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.size, args.dialogues).save(str(args.out / "tokenizer.json"), pretty=False)
    unmark(args.out / "tokenizer.json")
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    text = json.dumps(config(template), indent=1, ensure_ascii=False)
    (args.out / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
