"""Which model a folder holds: everything that decides what it writes, in 32 hex digits. No mlx.

Weights are too long to be read for that. Two fine-tunes of one base differ in nearly all tensors,
so a few bytes out of every tensor tell them apart.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ds4cli.models.shards import Shard

# Read whole. The last one may be any of these: templates in a folder of their own.
DECIDING = (
    "config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "tiktoken.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
# A read on a cold disk takes about 0.1 ms.
MAX_SAMPLES = 2048
MIN_SAMPLES = 64
SAMPLE_BYTES = 256


def fingerprint(
    folder: Path, shards: Iterable[Shard], template: str = "", revision: str = ""
) -> str:
    """Changes when configs, tokenizer, templates or weights do. template: one from elsewhere.
    revision: stands for weights that are not all here."""
    digest = hashlib.sha256((template + revision).encode())
    for path in [*(folder / name for name in DECIDING), *sorted(folder.glob(MORE_TEMPLATES))]:
        data = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    shards = tuple(shards)
    for shard in shards:
        _add(digest, shard, MAX_SAMPLES // len(shards))
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, shard: Shard, most: int) -> None:
    digest.update(f"{shard.path.name} {shard.path.stat().st_size}\n".encode() + shard.header)
    with shard.path.open("rb") as file:
        for pos in sample_places(list(shard.spans.values()), most):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, pos))


def sample_places(spans: list[tuple[int, int]], most: int) -> list[int]:
    """Where to read: in the middle of every tensor, or of at most about `most` tensors spread over
    the file; of few tensors at several places each."""
    step = max(1, -(-len(spans) // max(1, most)))
    each = max(1, MIN_SAMPLES // max(1, len(spans)))
    return [
        begin + max(0, (2 * part + 1) * (end - begin) // (2 * each) - SAMPLE_BYTES // 2)
        for begin, end in spans[::step]
        for part in range(each)
    ]
