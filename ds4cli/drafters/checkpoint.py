"""Drafting heads on disk: of which kind a checkpoint is, whether it fits the target, loading it.

Which kinds there are says `registry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ds4cli.drafters.registry import FOLDER, HEADS, WEIGHTS, Kind, named
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.models import loading

# What fields of the wrong type, and sizes that make no sense, raise somewhere in mlx or Python.
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class HeadSource:
    """A head that was found. config: its own; of an MTP head, which has none, the target's."""

    kind: Kind
    name: str
    folder: Path
    config: dict[str, Any]

    def check(self, target_config: dict[str, Any]) -> None:
        """UsageError, naming the field, if this head was made for another target."""
        try:
            self.kind.part("check")(self.config, target_config, self.name)
        except NONSENSE as error:
            raise UsageError(f"cannot read the config of head `{self.name}`: {error!r}") from None

    def load(self, model: Any, dtype: mx.Dtype | None) -> Head:
        """The head with its weights evaluated. dtype: float32 to unpack and cast, None as stored.
        ModelError where it cannot run on this model."""
        target = Target(model)
        try:
            module = self.kind.part(self.kind.head).load(self.folder, target, dtype)
        except NONSENSE as error:
            raise ModelError(f"cannot load the head `{self.name}`: {error!r}") from None
        return Head(self.kind, module, target)


@dataclass(frozen=True)
class Head:
    """A loaded head; sessions share it."""

    kind: Kind
    module: Any
    target: Target

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that it reads."""
        return tuple(self.module.taps)


def kind_of(config: dict[str, Any]) -> Kind | None:
    """The kind of head that a config.json describes; None for an ordinary model."""
    nested = config.get("dflash_config")
    keys = ("architectures", "model_type", "speculators_model_type")
    names = [config.get(key) for key in keys]
    names.append(nested.get("projector_type") if isinstance(nested, dict) else None)
    said = " ".join(map(str, names)).lower()
    found = next((kind for kind in HEADS if kind.source == FOLDER and kind.name in said), None)
    return found or (named("dflash") if "dflash_config" in config else None)


def find(kind: Kind, name: str, folder: Path, config: dict[str, Any]) -> HeadSource | None:
    """The head of this kind in the target's own folder; None where it has none."""
    if kind.source == WEIGHTS:
        found = kind.part("find")(folder)
        return HeadSource(kind, f"{name} ({kind.name})", folder, config) if found else None
    if not (folder / kind.name / "config.json").exists():
        return None
    inside = loading.locate(str(folder / kind.name))
    return HeadSource(kind, f"{name}/{kind.name}", inside.folder, inside.config)
