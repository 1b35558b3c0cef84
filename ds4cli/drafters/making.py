"""The drafter that settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4cli.drafters import registry
from ds4cli.drafters.combined import CombinedDrafter
from ds4cli.drafters.drafter import Drafter

if TYPE_CHECKING:
    from ds4cli.drafters.corpus import Corpus
    from ds4cli.drafters.heads import Head
    from ds4cli.rewind.timeline import Timeline
    from ds4cli.sampling import Sampler
    from ds4cli.settings import Settings


def make(
    settings: Settings,
    sampler: Sampler,
    *,
    draft: Timeline | None = None,
    head: Head | None = None,
    corpus: Corpus | None = None,
) -> Drafter:
    """The drafter the settings ask for; UsageError for a name that is none.

    draft: the state of a loaded draft model. corpus: texts of other sessions. `auto` puts ngram in
    front of whichever there is.
    """
    if settings.speculate == "never":
        return Drafter()
    if settings.drafter != registry.AUTO:
        return _of_kind(registry.named(settings.drafter), sampler, draft, head, corpus)
    copies = _of_kind(registry.named("ngram"), sampler, corpus=corpus)
    if draft is None and head is None:
        return copies
    loaded = registry.named("model") if head is None else head.kind
    return CombinedDrafter(copies, _of_kind(loaded, sampler, draft, head))


def _of_kind(
    kind: registry.Kind,
    sampler: Sampler,
    draft: Timeline | None = None,
    head: Head | None = None,
    corpus: Corpus | None = None,
) -> Drafter:
    drafter = kind.part(kind.drafter)
    if kind.source == registry.TEXT:
        return drafter(corpus)
    if kind.source == registry.NOTHING:
        return drafter()
    if kind.source == registry.MODEL:
        return drafter(draft, sampler)
    assert head is not None, "the engine has loaded what this kind is made of"
    return head.drafter(sampler)
