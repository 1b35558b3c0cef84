"""Which part of a model's weights this process holds, where several hold one model together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.arrays import integer
from ds4cli.errors import UsageError
from ds4cli.models import parts
from ds4cli.settings import Settings

TENSOR, PIPELINE = "tensor-parallel", "pipeline"
# Heads are dealt out whole. What configs call how many there are.
HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
KV_HEADS = "num_key_value_heads"


@dataclass
class Share:
    """One rank's part. how: "tensor-parallel", "pipeline", or empty: what the model's code has.
    keeps_output: whether a drafting head may need the whole output projection; output: that, where
    the model itself has only a part of it now."""

    comm: mx.distributed.Group
    how: str = ""
    keeps_output: bool = False
    output: nn.Module | None = None

    @property
    def size(self) -> int:
        """How many ranks hold the model."""
        return self.comm.size()

    def of(self, model: Any) -> str:
        """How `model` is shared out. UsageError where mlx-lm's code for it cannot do that."""
        ways = []
        if hasattr(model, "shard"):
            ways.append(TENSOR)
        if hasattr(getattr(model, "model", None), "pipeline"):
            ways.append(PIPELINE)
        if self.how in ways or (ways and not self.how):
            return self.how or ways[0]
        kind = type(model).__module__.rpartition(".")[2]
        what = f"cannot share `{kind}` out over ranks" + (f" as {self.how}" if self.how else "")
        other = f"`--{ways[0]}` works" if ways else "use it on one machine"
        raise UsageError(f"mlx-lm {what}", other)

    def take(self, model: Any, config: dict[str, Any], name: str) -> str:
        """Keep this rank's part of `model`, whose weights are not read yet; how it is shared."""
        how = self.of(model)
        if how == TENSOR:
            _check_heads({**config, **config.get("text_config", {})}, self.size, name)
        whole = parts.output(model) if self.keeps_output else None
        try:
            if how == TENSOR:
                model.shard(self.comm)
            elif stages(model) == 1:  # a stage that was loaded alone is one already
                model.model.pipeline(self.comm)
        except (ValueError, AssertionError) as error:
            raise UsageError(f"`{name}` is not for {self.size} ranks: {error}") from None
        self.output = None if whole is parts.output(model) else whole
        return how

    def all(self, holds: bool) -> bool:
        """Whether something holds on every rank. All have to ask."""
        return integer(mx.distributed.all_sum(mx.array(int(holds)), group=self.comm)) == self.size

    def fingerprint(self, whole: str, model: Any) -> str:
        """Stands for a model that is shared out like this: its text may round otherwise."""
        return hashlib.sha256(f"{whole} {self.of(model)} {self.size}".encode()).hexdigest()


def asked(settings: Settings) -> str:
    """How the settings want a model shared out; empty: as its code can."""
    if settings.tensor_parallel and settings.pipeline:
        raise UsageError("`--tensor-parallel` and `--pipeline` contradict each other", "give one")
    return TENSOR if settings.tensor_parallel else PIPELINE if settings.pipeline else ""


def stages(model: Any) -> int:
    """How many ranks its layers run on, one after the other."""
    return getattr(getattr(model, "model", None), "pipeline_size", 1)


def _check_heads(config: dict[str, Any], size: int, name: str) -> None:
    """UsageError where the ranks would cut a head in two: mlx-lm would go on with wrong ones."""
    uneven = [key for key in HEADS if config.get(key, 0) and config[key] % size]
    keys = config.get(KV_HEADS) or size
    if keys % size and size % keys:
        uneven.append(KV_HEADS)
    if uneven:
        reason = f"{uneven[0]} is {config[uneven[0]]}"
        raise UsageError(f"`{name}` is not for {size} ranks: {reason}", "use another number")
