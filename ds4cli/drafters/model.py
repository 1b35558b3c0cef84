"""Drafts from a small model with the target's tokenizer.

Its state is a `Timeline` like the target's, so a hybrid or windowed draft rewinds through the same
code. It samples with the target's own noise for each position, so where the two models agree on
the likely tokens their picks agree too, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ds4cli.arrays import integers
from ds4cli.drafters.drafter import Drafter, Together
from ds4cli.lanes.arm import Lanes
from ds4cli.rewind.timeline import Timeline
from ds4cli.rewind.together import evaluate_together, feed_together
from ds4cli.sampling import Chooser, Sampler
from ds4cli.tokens import common_prefix

# Tokens of a text that were not read yet and that are read in a call with those of other texts.
MOST_TOGETHER = 32


class ModelDrafter(Drafter):
    """Guesses by running the draft model one token at a time behind the target."""

    name = "model"
    is_free = False

    def __init__(self, timeline: Timeline, sampler: Sampler):
        self.timeline = timeline
        self.sampler = sampler

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """The draft model's own picks for the n tokens after `tokens`. While a call runs the next
        one is built, on a pick that nobody waits for, unless the sampler needs to know it."""
        if n < 1:
            return []
        unread = _pieces(self.stand_before(tokens))
        try:
            drafts = integers(mx.concatenate(self._picks(unread, tokens, n)))
        except BaseException:
            self.timeline.abort()
            raise
        for piece in unread:
            self.timeline.commit(len(piece))
        for _ in drafts[1:]:
            self.timeline.commit(1)
        return drafts

    def _picks(self, unread: list[list[int]], text: Sequence[int], n: int) -> list[mx.array]:
        """Open blocks on what is unread of `text` and on all but the last of n picks (1,)."""
        timeline, chooser = self.timeline, Chooser([self.sampler], [text])
        for piece in unread[:-1]:
            timeline.feed(piece)
            timeline.evaluate(wait=False)
        feed: list[int] | mx.array = unread[-1]
        picks: list[mx.array] = []
        while len(picks) < n:
            feed = chooser.pick(timeline.feed(feed)[-1:])
            timeline.evaluate(feed, wait=False)
            picks.append(feed)
        return picks

    def stand_before(self, text: Sequence[int]) -> list[int]:
        """Stand at the last position from which little of `text` is left, at least its last token;
        returns that."""
        common = common_prefix(self.timeline.tokens, text[:-1])
        self.timeline.sync(text[:common])
        if len(text) - common > MOST_TOGETHER:
            for piece in _pieces(text[common:-1]):
                common += len(piece)
                self.timeline.sync(text[:common])
        return list(text[common:])

    def together(self) -> ModelsTogether:
        return ModelsTogether(self.timeline)

    def use(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def fork(self) -> ModelDrafter:
        return ModelDrafter(self.timeline.fork(), self.sampler)


def _pieces(tokens: Sequence[int]) -> list[list[int]]:
    """In sizes that come again, powers of two: on CUDA a call of a size that was not met before is
    planned, which takes longer than a small model does."""
    pieces, begin = [], 0
    for bit in reversed(range(len(tokens).bit_length())):
        if len(tokens) >> bit & 1:
            pieces.append(list(tokens[begin : begin + (1 << bit)]))
            begin += 1 << bit
    return pieces


class ModelsTogether(Together):
    """Runs the draft model for several sessions in one call, token by token. ModelError for a model
    that cannot be run so."""

    def __init__(self, timeline: Timeline):
        self._lanes = Lanes.arm(timeline.model, timeline.new_caches)

    def ask(
        self, parts: Sequence[ModelDrafter], texts: Sequence[Sequence[int]], n: int
    ) -> list[list[int]]:
        feeds = [part.stand_before(text) for part, text in zip(parts, texts, strict=True)]
        timelines = [part.timeline for part in parts]
        chooser = Chooser([part.sampler for part in parts], texts)
        drafts: list[list[int]] = [[] for _ in parts]
        for _ in range(n):
            rows = feed_together(timelines, feeds, self._lanes)
            picks = chooser.pick(mx.concatenate([own[-1:] for own in rows]))
            evaluate_together(timelines, picks)
            for timeline, feed in zip(timelines, feeds, strict=True):
                timeline.commit(len(feed))
            feeds = [[pick] for pick in integers(picks)]
            for own, feed in zip(drafts, feeds, strict=True):
                own += feed
        return drafts

    def close(self) -> None:
        self._lanes.disarm()
