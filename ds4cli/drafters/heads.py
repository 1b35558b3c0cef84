"""Drafting heads on disk: of which kind a checkpoint is, whether it fits the target, loading it.

Which kinds there are says `registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.registry import FOLDER, HEADS, OTHERS, WEIGHTS, Kind, named
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError, UsageError
from ds4cli.models.source import locate
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings

# What fields of the wrong type, and sizes that make no sense, raise somewhere in mlx or Python.
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
# Tokens of the text that a head guesses after when it is loaded.
REHEARSED = 3


@dataclass(frozen=True)
class HeadSource:
    """A head that was found. config: its own; of an MTP head, which has none, the target's."""

    kind: Kind
    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def notices(self) -> list[str]:
        """What of its config is ignored without knowing what it means."""
        if self.kind.source != FOLDER:
            return []
        fields = ", ".join(f"`{name}`" for name in self.kind.part("unknown_fields")(self.config))
        return [f"the head `{self.name}` has fields that are ignored: {fields}"] if fields else []

    def check(self, target_config: dict[str, Any]) -> None:
        """UsageError, naming the field, if this head was made for another target."""
        try:
            self.kind.part("check")(self.config, target_config, self.name)
        except NONSENSE as error:
            raise UsageError(f"the config of the head `{self.name}` makes no sense") from error

    def load(self, target: Target, dtype: mx.Dtype | None) -> Head:
        """The head with its weights evaluated. dtype: float32 to unpack and cast, None as stored.
        ModelError where it cannot run on this model."""
        try:
            module = self.kind.part(self.kind.head).load(self.folder, target, dtype)
            head = Head(self.kind, module, target)
            _rehearse(head)
        except NONSENSE as error:
            raise ModelError(f"the head `{self.name}` cannot run on this model") from error
        return head


def _rehearse(head: Head) -> None:
    """Guess once after a made-up text: what is wrong is found now, not in the middle of a reply."""
    rows = [mx.sin(mx.arange(REHEARSED * head.target.hidden_size)).reshape(REHEARSED, -1)]
    drafter = head.drafter(_Strict(Settings(), head.target.vocab_size))
    drafter.observe(0, rows * len(head.taps))
    drafter.propose([0] * (REHEARSED + 1), REHEARSED)


class _Strict(Sampler):
    """Refuses rows that name nothing."""

    def pick(
        self, rows: mx.array, pos: int, history: Sequence[int], mask: mx.array | None = None
    ) -> mx.array:
        if mx.isnan(rows).any().item() or not mx.isfinite(rows.max(axis=-1)).all().item():
            raise ValueError("the head's logits are no numbers")
        return super().pick(rows, pos, history, mask)


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

    @property
    def max_drafts(self) -> float:
        """The most guesses that it gives at once."""
        return self.drafter(Sampler(Settings(), self.target.vocab_size)).max_drafts

    def drafter(self, sampler: Sampler) -> Drafter:
        """A new session's drafter."""
        return self.kind.part(self.kind.drafter)(self.module, self.target, sampler)


def kind_of(config: dict[str, Any], name: str) -> Kind | None:
    """The kind of head that a config.json describes; None for an ordinary model. UsageError for a
    head of a method that is not built."""
    nested = config.get("dflash_config")
    keys = ("architectures", "model_type", "speculators_model_type")
    names = [config.get(key) for key in keys]
    names.append(nested.get("projector_type") if isinstance(nested, dict) else None)
    said = " ".join(map(str, names)).lower()
    said += " medusa" if "medusa_num_heads" in config else ""
    is_named = {kind.name: kind.name in said for kind in HEADS if kind.source == FOLDER}
    for word, method in OTHERS.items():
        if word in said.replace("eagle3", ""):
            raise UsageError(
                f"`{name}` is a head of the method {method}, which ds4cli does not run",
                f"heads it runs: {', '.join(is_named)}",
            )
    found = next((kind for kind, is_it in is_named.items() if is_it), None)
    if found is None and nested is not None:
        found = "dflash"
    return None if found is None else named(found)


def find(kind: Kind, name: str, folder: Path, config: dict[str, Any]) -> HeadSource | None:
    """The head of this kind in the target's own folder; None where it has none."""
    if kind.source == WEIGHTS:
        found = kind.part("find")(folder, config)
        return HeadSource(kind, f"{name} ({kind.name})", folder, config) if found else None
    if not (folder / kind.name / "config.json").exists():
        return None
    inside = locate(str(folder / kind.name))
    return HeadSource(kind, f"{name}/{kind.name}", inside.folder, inside.config)
