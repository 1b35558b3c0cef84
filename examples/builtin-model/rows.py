"""Rows of tokens for training, made by worker processes while the GPU works.

A row holds dialogues one after the other. Beside each token goes one byte: its kind, and whether a
dialogue starts there.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from corpus import MIX, Pool, draw
from plaintext import excerpts, standard_library, training_texts
from render import pieces
from tokenizers import Tokenizer

PROMPT, ANSWER, TEXT = 0, 1, 2  # what a token is; decides its weight in the loss
START = 4  # added where a dialogue begins
ROWS_A_BLOCK = 32


@dataclass(frozen=True)
class Recipe:
    """What the rows are made of. `text_share` is the share of rows that are plain text.

    `keep_share` of the conversations are learned in all their turns, think sections kept.
    """

    length: int = 2048
    text_share: float = 0.08
    thinking_share: float = 0.5
    keep_share: float = 0.6
    mix: dict[str, float] = field(default_factory=lambda: dict(MIX))


Document = tuple[list[int], list[int]]


def encode_dialogue(tokenizer: Tokenizer, pool: Pool, recipe: Recipe) -> Document:
    """One dialogue as (token ids, kinds)."""
    thinking = pool.rng.random() < recipe.thinking_share
    parts = list(pieces(draw(pool, recipe.mix), thinking, pool.rng.random() < recipe.keep_share))
    encoded = tokenizer.encode_batch_fast([text for text, _ in parts], add_special_tokens=False)
    ids: list[int] = []
    kinds: list[int] = []
    for (_, learned), piece in zip(parts, encoded, strict=True):
        ids += piece.ids
        kinds += [ANSWER if learned else PROMPT] * len(piece.ids)
    kinds[0] += START
    return ids, kinds


def encode_text(tokenizer: Tokenizer, text: str) -> Document:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids, [TEXT + START] + [TEXT] * (len(ids) - 1)


def fill_row(documents: Iterator[Document], length: int) -> np.ndarray:
    """(2, length) uint16: tokens and kinds. The last document is cut where the row ends."""
    ids: list[int] = []
    kinds: list[int] = []
    while len(ids) < length:
        more_ids, more_kinds = next(documents)
        ids += more_ids
        kinds += more_kinds
    return np.array([ids[:length], kinds[:length]], dtype=np.uint16)


def rows(
    tokenizer: Tokenizer, recipe: Recipe, seed: int, held_out: bool = False
) -> Iterator[np.ndarray]:
    """Rows without end. Held-out rows hold dialogues only."""
    pool = Pool(random.Random(seed), held_out)
    dialogues = (encode_dialogue(tokenizer, pool, recipe) for _ in iter(int, 1))
    texts = () if held_out or not recipe.text_share else training_texts()
    plain = (
        (encode_text(tokenizer, text) for text in excerpts(texts, pool.rng, 5 * recipe.length))
        if texts
        else dialogues
    )
    while True:
        source = plain if texts and pool.rng.random() < recipe.text_share else dialogues
        yield fill_row(source, recipe.length)


def held_out_rows(tokenizer: Tokenizer, recipe: Recipe, n: int) -> np.ndarray:
    """(n, 2, length): dialogues whose names and values no training row contains."""
    source = rows(tokenizer, recipe, seed=10**9, held_out=True)
    return np.stack([next(source) for _ in range(n)])


def held_out_text(tokenizer: Tokenizer, length: int, n: int) -> np.ndarray:
    """(n, 2, length): library modules that training does not read."""
    source = excerpts(standard_library(held_out=True), random.Random(0), 5 * length)
    return np.stack(
        [fill_row((encode_text(tokenizer, text) for text in source), length) for _ in range(n)]
    )


def _work(path: Path, recipe: Recipe, seed: int, queue: mp.Queue) -> None:
    os.nice(5)  # the process that feeds the GPU goes first
    source = rows(Tokenizer.from_file(str(path)), recipe, seed)
    while True:
        queue.put(np.stack([next(source) for _ in range(ROWS_A_BLOCK)]))


def start_workers(
    path: Path, recipe: Recipe, n: int, seed: int
) -> tuple[mp.Queue, list[mp.Process]]:
    """`n` daemon processes that put blocks (32, 2, length) on the queue."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = mp.get_context("spawn")
    queue = context.Queue(maxsize=4 * n)
    workers = [
        context.Process(target=_work, args=(path, recipe, seed * 1000 + i, queue), daemon=True)
        for i in range(n)
    ]
    for worker in workers:
        worker.start()
    return queue, workers
