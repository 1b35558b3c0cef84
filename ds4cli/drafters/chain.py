"""Drafting token by token with a head of few layers that runs behind the target (MTP, EAGLE-3).

Row i of the head pairs what it takes of the target's state at position i with the token at i + 1,
and names the token at i + 2. For more guesses the head is run again, on its own output in place of
the target's state and on the guess in place of the token. Its layers have a key and value row per
position. Only rows made of the target's own states stay: what a chain of guesses adds is cut off.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ds4cli.arrays import integer, integers
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.rows import Rows
from ds4cli.drafters.target import Target
from ds4cli.sampling import Sampler
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tokens import common_prefix

# Rows whose states are kept, to make them anew after going back: a horizon and one block.
KEPT_ROWS = 256 + MAX_BLOCK_TOKENS
# Rows that may wait to be made; the oldest are given up beyond that.
WAITING_ROWS = 16384
CHUNK_ROWS = 512


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
        self._sampler = sampler
        self._begin(0)

    def _begin(self, pos: int) -> None:
        """No context; the next row is that of position `pos`."""
        self._base = pos
        self._caches = (
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
        self._sampler = sampler

    def fork(self) -> ChainDrafter:
        twin = copy.copy(self)
        twin._paired, twin._rows = self._paired.copy(), self._rows.copy()
        twin._caches = self._head.caches()
        if self._paired:  # written in place, so each needs its own
            for own, cache in zip(twin._caches, self._caches, strict=True):
                own.state = *map(mx.array, cache.state[:2]), cache.offset
        return twin

    def _cut(self, pos: int) -> None:
        """Forget the rows made for positions from `pos` on, and those that a chain added."""
        del self._paired[max(0, pos - self._base) :]
        for cache in self._caches:
            cache.offset = len(self._paired)

    # -- guessing ---------------------------------------------------------------------------------

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """The head's own picks for the n tokens after `tokens`; [] where the state before the last
        of them is not known."""
        if n < 1 or not self._agree(tokens):
            return []
        return self._chain(self._catch_up(tokens), tokens, n)

    def _agree(self, tokens: Sequence[int]) -> bool:
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

    def _catch_up(self, tokens: Sequence[int]) -> mx.array:
        """Make the rows up to the one that the last token is paired with: its output (1, H)."""
        out: mx.array | None = None
        while self._made < len(tokens) - 1:
            first = self._made
            end = min(first + CHUNK_ROWS, len(tokens) - 1)
            if out is not None:
                mx.eval([(cache.keys, cache.values) for cache in self._caches])
            pairs = list(tokens[first + 1 : end + 1])
            hidden = self._head.context(self._rows.take(first, end))
            out = self._head(self._head.embed(mx.array(pairs)), hidden, self._caches)
            self._paired += pairs
        assert out is not None, "there is a row that was not paired yet"
        return out[-1:]

    def _chain(self, out: mx.array, tokens: Sequence[int], n: int) -> list[int]:
        """n picks, each made of the one before; evaluated together where the sampler allows."""
        pos, known = len(tokens), list(tokens)
        picks: list[mx.array] = []
        while True:
            row = self._head.logits(out)
            picks.append(self._sampler.pick(row, pos + len(picks), known))
            if len(picks) == n:
                break
            if self._sampler.needs_history:
                known.append(integer(picks[-1]))
            fed = self._head.embed(picks[-1]), self._head.carried(out)
            out = self._head(*fed, self._caches)
        guesses = mx.concatenate(picks)
        mx.eval(guesses, [(cache.keys, cache.values) for cache in self._caches])
        return integers(guesses)
