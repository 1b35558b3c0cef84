"""Drafting heads on disk: of which kind a checkpoint is, whether it fits the target, loading it.

A new kind of head is a module with `check`, a class with `load`, and a row in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ds4cli import loading
from ds4cli.drafters import Drafter
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.sampling import Sampler

# Kind -> its module, head class and drafter class.
KINDS = {
    "dspark": ("ds4cli.drafters.dspark", "DSparkHead", "DSparkDrafter"),
    "dflash": ("ds4cli.drafters.dflash", "DFlashHead", "DFlashDrafter"),
    "mtp": ("ds4cli.drafters.mtp", "MtpHead", "MtpDrafter"),
}
# What fields of the wrong type, and sizes that make no sense, raise somewhere in mlx or Python.
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
# Heads that lie in a folder of their own, which may be a subfolder of the target's.
OWN_FOLDER = ("dspark", "dflash")


@dataclass(frozen=True)
class HeadSource:
    """A head that was found. config: its own; of an MTP head, which has none, the target's."""

    kind: str
    name: str
    folder: Path
    config: dict[str, Any]

    def check(self, target_config: dict[str, Any]) -> None:
        """UsageError, naming the field, if this head was made for another target."""
        try:
            _part(self.kind, "check")(self.config, target_config, self.name)
        except NONSENSE as error:
            raise UsageError(f"cannot read the config of head `{self.name}`: {error!r}") from None

    def load(self, model: Any, dtype: mx.Dtype | None) -> Head:
        """The head with its weights evaluated. dtype: float32 to unpack and cast, None as stored.
        ModelError where it cannot run on this model."""
        target = Target(model)
        try:
            module = _part(self.kind, KINDS[self.kind][1]).load(self.folder, target, dtype)
        except NONSENSE as error:
            raise ModelError(f"cannot load the head `{self.name}`: {error!r}") from None
        self._check_finite(module)
        return Head(module, target, _part(self.kind, KINDS[self.kind][2]))

    def _check_finite(self, module: nn.Module) -> None:
        """A head that computes NaN guesses nothing, and nobody would see why."""
        for name, x in tree_flatten(module.parameters()):
            if mx.issubdtype(x.dtype, mx.floating) and not mx.isfinite(x).all().item():
                raise ModelError(
                    f"the head `{self.name}` is damaged: `{name}` holds values that are no numbers"
                )


@dataclass(frozen=True)
class Head:
    """A loaded head; sessions share it."""

    module: Any
    target: Target
    drafter_class: Callable[[Any, Target, Sampler], Drafter]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that it reads."""
        return tuple(self.module.taps)

    def drafter(self, sampler: Sampler) -> Drafter:
        """A new session's drafter."""
        return self.drafter_class(self.module, self.target, sampler)


def kind_of(config: dict[str, Any]) -> str | None:
    """The kind of head that a config.json describes; None for an ordinary model."""
    nested = config.get("dflash_config")
    keys = ("architectures", "model_type", "speculators_model_type")
    names = [config.get(key) for key in keys]
    names.append(nested.get("projector_type") if isinstance(nested, dict) else None)
    said = " ".join(map(str, names)).lower()
    found = next((kind for kind in OWN_FOLDER if kind in said), None)
    return found or ("dflash" if "dflash_config" in config else None)


def find(kind: str, name: str, folder: Path, config: dict[str, Any]) -> HeadSource | None:
    """The head of this kind in the target's own folder; None where it has none."""
    if kind == "mtp":
        has_one = _part("mtp", "find")(folder)
        return HeadSource(kind, f"{name} (mtp)", folder, config) if has_one else None
    return _in_subfolder(kind, name, folder)


def _in_subfolder(kind: str, name: str, folder: Path) -> HeadSource | None:
    if not (folder / kind / "config.json").exists():
        return None
    found = loading.locate(str(folder / kind))
    return HeadSource(kind, f"{name}/{kind}", found.folder, found.config)


def _part(kind: str, name: str) -> Any:
    return getattr(import_module(KINDS[kind][0]), name)
