"""Drafts from a small model with the target's tokenizer.

Its state is a `Timeline` like the target's, so a hybrid or windowed draft rewinds through the same
code. It samples with the target's own noise for each position, so where the two models agree on
the likely tokens their picks agree too, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4cli.arrays import integer
from ds4cli.drafters.drafter import Drafter
from ds4cli.rewind.timeline import Timeline
from ds4cli.sampling import Sampler


class ModelDrafter(Drafter):
    """Guesses by running the draft model one token at a time behind the target."""

    name = "model"
    is_free = False

    def __init__(self, timeline: Timeline, sampler: Sampler):
        self.timeline = timeline
        self._sampler = sampler

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """The draft model's own picks for the n tokens after `tokens`."""
        self.timeline.sync(tokens)
        drafts = [self._pick(tokens)]
        while len(drafts) < n:
            self.timeline.feed(drafts[-1:])
            self.timeline.evaluate()
            self.timeline.commit(1)
            drafts.append(self._pick([*tokens, *drafts]))
        return drafts

    def _pick(self, history: Sequence[int]) -> int:
        row = self.timeline.logits
        assert row is not None, "a text was read"
        return integer(self._sampler.pick(row[None], self.timeline.pos, history))

    def use(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def fork(self) -> ModelDrafter:
        return ModelDrafter(self.timeline.fork(), self._sampler)
