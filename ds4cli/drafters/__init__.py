"""Drafters: where guesses come from. A wrong guess costs time only, never the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ds4cli.drafters.ngram import NgramDrafter
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings
from ds4cli.timeline import Timeline


class Drafter(Protocol):
    """What the speculative loop asks of a drafter."""

    name: str

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most n guesses for what follows `tokens`; [] without an idea."""
        ...

    def rewind(self, pos: int) -> None:
        """The session went back to `pos`."""
        ...


class NoDrafter:
    """Never guesses: plain decoding."""

    name = "none"

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Nothing."""
        return []

    def rewind(self, pos: int) -> None:
        """Nothing to do."""


def make(settings: Settings, draft: Timeline | None, sampler: Sampler) -> Drafter:
    """The drafter the settings ask for; `auto` is the draft model if there is one, else ngram."""
    if settings.drafter == "none" or settings.speculate == "never":
        return NoDrafter()
    if draft is not None and settings.drafter in ("auto", "model"):
        from ds4cli.drafters.model import ModelDrafter

        return ModelDrafter(draft, sampler)
    return NgramDrafter()
