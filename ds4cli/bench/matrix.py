"""What is measured, how often and how large; every default once. `configs/rewind-bench.toml` shows
them all."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli

from ds4cli.bench.files import read_text
from ds4cli.errors import UsageError
from ds4cli.settings import nearest

FLAGS = {
    "contexts": "--context", "distances": "--depth", "num_trials": "--num-trials",
    "scale": "--scale",
}  # fmt: skip


@dataclass(frozen=True)
class Matrix:
    """Sizes in tokens.

    contexts: prompts to go back in. distances: how far back, besides 1..block. block: rows of one
    block, the sampled token and its drafts. num_trials, warmup: samples taken, and not counted
    before them. generate: tokens of one control run; pairs: how many pairs of runs. match_tokens:
    compared after every way back. scale: factor on the sizes of the agent's trace.
    """

    contexts: tuple[int, ...] = (4095,)
    distances: tuple[int, ...] = (8, 64, 256, 1024, 2048)
    block: int = 5
    num_trials: int = 5
    warmup: int = 1
    generate: int = 128
    pairs: int = 10
    match_tokens: int = 8
    scale: float = 0.1

    def __post_init__(self) -> None:
        for field in fields(self):
            _refuse_bad(field.name, getattr(self, field.name))
        if self.block < 2:
            raise UsageError(f"`block` cannot be `{self.block}`", "a block has 2 rows at least")

    @property
    def tail(self) -> int:
        """Tokens decoded in blocks after the prompt, before anything goes back."""
        return 8 * self.block

    @classmethod
    def quick(cls) -> Matrix:
        """Small enough to end within a minute on the built-in model."""
        return cls(
            contexts=(384,),
            distances=(8, 64, 256),
            num_trials=2,
            generate=32,
            pairs=3,
            match_tokens=4,
            scale=0.01,
        )


def _refuse_bad(name: str, value: Any, shown_as: str = "") -> None:
    values = value if isinstance(value, tuple) else (value,)
    kinds, lowest = ((int, float), 1e-6) if name == "scale" else ((int,), name != "warmup")
    if not values or not all(type(v) in kinds and v >= lowest for v in values):
        shown = ", ".join(map(str, values))
        raise UsageError(f"`{shown_as or name}` cannot be `{shown}`", "it wants numbers above zero")


def read(path: Path | None, *, quick: bool, given: dict[str, Any]) -> Matrix:
    """The matrix: defaults (or the quick ones), then the file, then what was given as flags."""
    base = Matrix.quick() if quick else Matrix()
    table = {} if path is None else _table(path)
    known = [f.name for f in fields(Matrix)]
    for key in table:
        if key not in known:
            raise UsageError(f"unknown key `{key}` in `{path}`", nearest(key, known))
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    chosen = {k: v for k, v in given.items() if v is not None}
    for name, value in chosen.items():
        _refuse_bad(name, value, FLAGS[name])
    return replace(base, **{**lists, **chosen})


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(read_text(path))
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"`{path}` is not valid TOML: {error}") from None


def numbers(text: str | None, name: str) -> tuple[int, ...] | None:
    """`512,4095` -> (512, 4095); `name` is the field that it is for."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"`{FLAGS[name]}` wants whole numbers with commas, not `{text}`"
        raise UsageError(message) from None
