"""The parts of a model, by the names that mlx-lm's models give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.nn as nn

# The table of the tokens' vectors.
EMBEDDINGS = (
    "embed_tokens", "tok_embeddings", "token_embeddings", "word_embeddings", "embeddings",
    "embedding", "embed", "embed_in", "wte",
)  # fmt: skip
# What stands between the last layer and the output projection.
NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f", "ln_f")
# The output projection, where that is not the embedding.
OUTPUTS = ("lm_head", "output", "embed_out")


def named(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """The modules with one of these names, the outermost first."""
    modules = sorted(model.named_modules(), key=lambda item: item[0].count("."))
    return (module for path, module in modules if path.rsplit(".", 1)[-1] in names)


def output(model: nn.Module) -> nn.Module | None:
    """The output projection; None where that is the embedding, or has another name."""
    return next(named(model, OUTPUTS), None)


def embedding_rows(model: nn.Module) -> int | None:
    """How many token ids the embedding holds; None where none has a known name."""
    tables = (m for m in named(model, EMBEDDINGS) if "weight" in m)
    return next((m.weight.shape[0] for m in tables), None)
