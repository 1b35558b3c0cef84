"""A stage of a pipeline: which weight files of a repository it reads, and loading from these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from ds4cli.models import mlx_lm
from ds4cli.models.sharding import PIPELINE, Share
from ds4cli.models.shards import INDEX

# Numbers of layers count from the first one of the whole model.
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# A layer of a drafting head has a number of its own.
HEAD = re.compile(r"(?:^|\.)mtp\.")


def own_files(folder: Path, config: dict[str, Any], share: Share) -> list[str] | None:
    """Names of the weight files that this rank reads, by the index in `folder`, where no weights
    need to be. None for all of them: no pipeline, or no index. UsageError where the model cannot be
    shared out."""
    model = mlx_lm.build(config)
    if share.of(model) != PIPELINE or not (folder / INDEX).exists():
        return None
    count = len(model.model.layers)
    model.model.pipeline(share.comm)
    own = range(model.model.start_idx, model.model.end_idx)
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return sorted({file for name, file in weight_map.items() if _is_own(name, own, count)})


def _is_own(tensor: str, own: range, count: int) -> bool:
    """Whether the stage with the layers `own`, of `count`, reads a tensor. All of them have the
    embedding, the final norm and the output projection; the last one has the drafting head."""
    has_last = own.stop == count
    if HEAD.search(tensor):
        return has_last
    found = LAYER.search(tensor)
    return found is None or int(found[1]) in own or (int(found[1]) >= count and has_last)


def classes(share: Share) -> Callable[[dict[str, Any]], tuple[type, type]]:
    """As mlx-lm's way from a config to a model's class, and that of its arguments; this one keeps
    its own layers before it loads, so a tensor that is missing of those is one too few."""

    def of(config: dict[str, Any]) -> tuple[type, type]:
        whole, arguments = mlx_lm.classes(config)

        def load_weights(self: Any, weights: list[tuple[str, Any]], strict: bool = True) -> Any:
            every = dict(tree_flatten(self.parameters()))
            self.model.pipeline(share.comm)
            self.__class__ = whole
            others = every.keys() - dict(tree_flatten(self.parameters()))
            kept = [(name, x) for name, x in weights if name not in others]
            return self.load_weights(kept, strict=strict)

        body = {"load_weights": load_weights, "__module__": whole.__module__}
        return type(whole.__name__, (whole,), body), arguments

    return of
