"""Drafting token by token with a head of few layers that runs behind the target (MTP, EAGLE-3).

Row i of the head pairs what it takes of the target's state at position i with the token at i + 1,
and names the token at i + 2. For more guesses the head is run again, on its own output in place of
the target's state and on the guess in place of the token. Its layers have a key and value row per
position. Only rows made of the target's own states stay: what a chain of guesses adds is cut off.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ds4cli.arrays import integers, tables
from ds4cli.drafters.drafter import Drafter, Together
from ds4cli.drafters.rows import Rows
from ds4cli.drafters.target import Target
from ds4cli.lanes.arm import Feed, Lanes
from ds4cli.sampling import Chooser, Sampler
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tokens import common_prefix

# Rows whose states are kept, to make them anew after going back: a horizon and one block.
KEPT_ROWS = 256 + MAX_BLOCK_TOKENS
# Rows that may wait to be made; the oldest are given up beyond that.
WAITING_ROWS = 16384
CHUNK_ROWS = 512
# Rows that are made in a call with those of other texts.
MOST_TOGETHER = 32


class ChainHead(Protocol):
    """What a head owes; sessions share it. taps: layers of the target that it reads."""

    taps: tuple[int, ...]

    def caches(self) -> list[KVCache]:
        """Empty ones, one per layer of the head."""

    def embed(self, ids: mx.array) -> mx.array:
        """ids (n,) -> (n, H)"""

    def context(self, hidden: list[mx.array]) -> mx.array:
        """What rows take of the target's residual stream: one (n, H) per tap -> (n, H)."""

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[KVCache]) -> mx.array:
        """Run n rows, which the caches take in: embedded (n, H), hidden (n, H) -> (n, H)."""

    def carried(self, out: mx.array) -> mx.array:
        """What the row after takes of a row's output: (n, H) -> (n, H)."""

    def logits(self, out: mx.array) -> mx.array:
        """(n, H) -> (n, V), over the target's ids"""


class LastStateHead(nn.Module):
    """What MTP heads share: one layer, and the state that the target's output head reads."""

    def __init__(self, target: Target):
        super().__init__()
        self.taps = (target.num_layers - 1,)
        self._target = target

    def caches(self) -> list[KVCache]:
        return [KVCache()]

    def embed(self, ids: mx.array) -> mx.array:
        return self._target.embed(ids)

    def context(self, hidden: list[mx.array]) -> mx.array:
        """What the target's output head read."""
        return self._target.norm(hidden[0])


class ChainDrafter(Drafter):
    """Guesses by running a head behind the target, again and again for more.

    Rows of the head wait until a proposal needs them. A row belongs to the token that follows, so
    going back leaves them standing until another token, or another state, comes. Text that was
    begun elsewhere (a loaded session) is seen from where it goes on.
    """

    is_free = False
    assumed_chance = 0.8  # heads are trained on their target

    def __init__(self, head: ChainHead, target: Target, sampler: Sampler):
        self.taps = head.taps
        self._head = head
        self.sampler = sampler
        self._begin(0)

    def _begin(self, pos: int) -> None:
        """No context; the next row is that of position `pos`."""
        self._base = pos
        self.caches = (
            self._head.caches()
        )  # their rows are counted from the base: rotary is relative
        self._paired: list[int] = []  # the token that each of its rows was made with
        self._sure = pos  # rows below are known to stand before the tokens proposed for
        self._rows = Rows(pos)

    @property
    def _made(self) -> int:
        """The first position whose row is still to be made."""
        return self._base + len(self._paired)

    # -- what the target read ---------------------------------------------------------------------

    def observe(self, start: int, hidden: Sequence[mx.array]) -> None:
        """hidden: the residual stream after each of `taps`, (n, H)."""
        if not self._base <= start <= self._rows.end:
            self._begin(start)
        self._rows.put(start, hidden)
        self._cut(start)
        self._sure = min(self._sure, start - 1)
        self._rows.drop(min(self._made, self._rows.end - KEPT_ROWS))
        if self._rows.end - self._made > WAITING_ROWS:
            self._give_up_old_rows()

    def _give_up_old_rows(self) -> None:
        """Too many rows wait for a proposal: the context is the newer half of them."""
        rows = self._rows
        rows.drop(rows.end - WAITING_ROWS // 2)
        self._begin(rows.start)
        self._rows = rows

    def rewind(self, pos: int) -> None:
        self._sure = min(self._sure, pos - 1)

    def forget(self) -> None:
        self._begin(0)

    def use(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def fork(self) -> ChainDrafter:
        twin = copy.copy(self)
        twin._paired, twin._rows = self._paired.copy(), self._rows.copy()
        twin.caches = self._head.caches()
        if self._paired:  # written in place, so each needs its own
            for own, cache in zip(twin.caches, self.caches, strict=True):
                own.state = *map(mx.array, cache.state[:2]), cache.offset
        return twin

    def _cut(self, pos: int) -> None:
        """Forget the rows made for positions from `pos` on, and those that a chain added."""
        del self._paired[max(0, pos - self._base) :]
        for cache in self.caches:
            cache.offset = len(self._paired)

    # -- guessing ---------------------------------------------------------------------------------

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """The head's own picks for the n tokens after `tokens`; [] where the state before the last
        of them is not known."""
        if n < 1 or not self.knows(tokens):
            return []
        return self._chain(self._catch_up(tokens, len(tokens) - 1), tokens, n)

    def knows(self, tokens: Sequence[int]) -> bool:
        """Cut the rows that were made for other tokens; false if the last row cannot be made.

        Rows whose states are no longer kept stay as they are. At most one of them, the last before
        a place gone back to, was made for a token that another one replaced: one odd row of many.
        """
        last = len(tokens) - 2
        if not self._rows.start <= last < self._rows.end:
            return False
        first = max(self._sure, self._rows.start)
        made, text = self._paired[first - self._base :], list(tokens[first + 1 : last + 1])
        self._cut(first + common_prefix(made, text))
        self._sure = last
        return True

    def _catch_up(self, tokens: Sequence[int], stop: int) -> mx.array:
        """Make the rows below `stop`: the output of the last of them (1, H)."""
        out: mx.array | None = None
        while self._made < stop:
            end = min(self._made + CHUNK_ROWS, stop)
            if out is not None:
                mx.eval([(cache.keys, cache.values) for cache in self.caches])
            pairs, hidden = self._waiting(tokens, end)
            out = self._head(
                self._head.embed(mx.array(pairs)), self._head.context(hidden), self.caches
            )
            self._paired += pairs
        assert out is not None, "there is a row that was not paired yet"
        return out[-1:]

    def _waiting(self, tokens: Sequence[int], end: int) -> tuple[list[int], list[mx.array]]:
        """What the rows below `end` that are not made yet are made of: the tokens they are paired
        with, and the target's states, (n, H) per tap."""
        first = self._made
        return list(tokens[first + 1 : end + 1]), self._rows.take(first, end)

    def last_rows(self, tokens: Sequence[int]) -> tuple[list[int], list[mx.array]]:
        """Make all rows but a few, and return what those are made of; they count as made."""
        stop = len(tokens) - 1
        if stop - self._made > MOST_TOGETHER:
            self._catch_up(tokens, stop - 1)
        pairs, hidden = self._waiting(tokens, stop)
        self._paired += pairs
        return pairs, hidden

    def _chain(self, out: mx.array, tokens: Sequence[int], n: int) -> list[int]:
        """n picks, each made of the one before; evaluated together where the sampler allows."""
        chooser = Chooser([self.sampler], [tokens])
        picks = [chooser.pick(self._head.logits(out))]
        while len(picks) < n:
            fed = self._head.embed(picks[-1]), self._head.carried(out)
            out = self._head(*fed, self.caches)
            picks.append(chooser.pick(self._head.logits(out)))
        guesses = mx.concatenate(picks)
        mx.eval(guesses, [(cache.keys, cache.values) for cache in self.caches])
        return integers(guesses)

    def together(self) -> ChainsTogether:
        return ChainsTogether(self._head)


class _AsModel(nn.Module):
    """A head as lanes see a model. hidden: of the rows of the next call, (n, H)."""

    def __init__(self, head: ChainHead):
        super().__init__()
        self.head = head
        self._hidden: mx.array | None = None

    def __call__(self, ids: mx.array, cache: list[KVCache]) -> mx.array:
        """ids (1, n) -> (1, n, H)"""
        embedded = self.head.embed(ids[0])
        hidden = embedded if self._hidden is None else self._hidden
        return self.head(embedded, hidden, cache)[None]

    def run(
        self, lanes: Lanes, hidden: mx.array, feeds: Sequence[Feed], caches: list[list[KVCache]]
    ) -> tuple[mx.array, Any]:
        """One call: the outputs of all rows (n, H), and what is to be evaluated with them."""
        self._hidden = hidden
        try:
            return lanes.call(feeds, caches)
        finally:
            self._hidden = None


class ChainsTogether(Together):
    """Runs a head behind several texts in one call a guess. ModelError for a head that cannot be
    run so."""

    def __init__(self, head: ChainHead):
        self._head, self._model = head, _AsModel(head)
        self._lanes = Lanes.arm(self._model, head.caches)

    def ask(
        self, parts: Sequence[ChainDrafter], texts: Sequence[Sequence[int]], n: int
    ) -> list[list[int]]:
        order = self._lanes.seat([part.caches for part in parts])
        said = self._chain([parts[i] for i in order], [texts[i] for i in order], n)
        return [guesses for _, guesses in sorted(zip(order, said, strict=True))]

    def _chain(
        self, parts: list[ChainDrafter], texts: list[Sequence[int]], n: int
    ) -> list[list[int]]:
        """n picks of each, as `ChainDrafter.propose` makes them."""
        caches = [part.caches for part in parts]
        waiting = [part.last_rows(text) for part, text in zip(parts, texts, strict=True)]
        pairs, states = zip(*waiting, strict=True)
        hidden = self._head.context([mx.concatenate([*rows]) for rows in zip(*states, strict=True)])
        out, live = self._model.run(self._lanes, hidden, pairs, caches)
        out = out[mx.array([*accumulate(map(len, pairs))]) - 1]
        chooser = Chooser([part.sampler for part in parts], texts)
        picks = [chooser.pick(self._head.logits(out))]
        while len(picks) < n:
            last, hidden = [*mx.split(picks[-1], len(parts))], self._head.carried(out)
            out, live = self._model.run(self._lanes, hidden, last, caches)
            picks.append(chooser.pick(self._head.logits(out)))
        guesses = mx.stack(picks, axis=1)
        mx.eval(guesses, live)
        return tables(guesses)

    def close(self) -> None:
        self._lanes.disarm()
