"""Where guesses come from. A wrong guess costs time, never text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4cli.settings import Settings

if TYPE_CHECKING:
    from ds4cli.sampling import Sampler
    from ds4cli.timeline import Timeline


class Drafter:
    """Guesses nothing: the drafter `none`, and the base of all others.

    is_free: a proposal costs next to nothing, so it may be asked for and then not be fed.
    confidence: how sure the last proposal was; its scale is the drafter's own, 0 means no idea.
    """

    name = "none"
    is_free = True
    confidence = 0

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most n guesses for what follows `tokens`; [] = no idea."""
        return []

    def rewind(self, pos: int) -> None:
        """The session went back: from position `pos` on, tokens may differ from what was seen."""

    def use(self, sampler: Sampler) -> None:
        """The session samples otherwise from here on."""


def make(settings: Settings, draft: Timeline | None, sampler: Sampler) -> Drafter:
    """The drafter the settings ask for; `auto` is the draft model if one is loaded, else ngram."""
    if settings.drafter == "none" or settings.speculate == "never":
        return Drafter()
    if draft is not None:
        from ds4cli.drafters.model import ModelDrafter

        return ModelDrafter(draft, sampler)
    from ds4cli.drafters.ngram import NgramDrafter

    return NgramDrafter()
