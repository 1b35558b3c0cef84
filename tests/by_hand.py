"""A model whose rows are computed by hand: whatever its layers hold shows in its logits, to the
bit, and a call takes a fraction of a millisecond.

The token at position i counts as (i + 1) times its id. A logits row has two numbers a layer: how
many tokens the layer has seen, and the sum of what they count as, all of them or, in a window, the
last few; the second layer's numbers are doubled, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ds4cli.hooks.last_row import Projections
from ds4cli.rewind.timeline import Limits, Timeline
from ds4cli.tape.recorder import Sizes
from ds4cli.tape.tape import Tape
from ds4cli.tape.tracks import Track

V = 7  # token ids
WINDOW = 5
GROUP = 32  # numbers in a row of keys: all are the same, so that 8 bits hold them
NUMBER_BYTES = 4


@dataclass
class Sums(Track):
    """A slot is what it was, and the sum of the rows.

    inner_every: so many rows apart the slot is known inside the call.
    """

    inner_every: int = 0
    has_inner_states = True

    @classmethod
    def replay(cls, tracks, starts, rows):
        known = [0 if s is None else s for s in starts]
        return [s + t.data[0][:, :rows].sum(axis=1) for t, s in zip(tracks, known, strict=True)]

    def inner_rows(self):
        return range(self.inner_every, self.rows, self.inner_every) if self.inner_every else ()


class Notes:
    """Records a model's recurrences, as `ds4cli.tape.Recorder` does. made: how each call was."""

    has_inner_states = True

    def __init__(self):
        self.sizes = Sizes()
        self.made: list[int] = []
        self.noted: dict[int, mx.array] | None = None

    @contextmanager
    def recording(self, caches: Sequence[ArraysCache], inner_every: int = 0) -> Iterator[Tape]:
        tape, self.noted = Tape(), {}
        self.made.append(inner_every)
        try:
            yield tape
            tracks = [[[Sums((self.noted[id(c)],), inner_every)]] for c in caches]
        finally:
            self.noted = None
        tape.fill(tracks)
        each = 2 * NUMBER_BYTES * len(caches)
        self.sizes = Sizes(each, 0, each, len(caches), len(caches))

    @contextmanager
    def recording_lanes(self, lanes: Sequence[Sequence[ArraysCache]], rows: Sequence[int]):
        """The same for a call on several lanes of so many rows: a tape for the caches of each."""
        tapes, self.noted = [Tape() for _ in lanes], {}
        noted = self.noted
        try:
            yield tapes
        finally:
            self.noted = None
        for tape, caches in zip(tapes, lanes, strict=True):
            tape.fill([[[Sums((noted[id(c)],))]] for c in caches])


class Head(nn.Module):
    """An output projection that changes nothing."""

    def __call__(self, x: mx.array) -> mx.array:
        return x


class ByHand(nn.Module):
    """kinds: a layer each, "plain", "window" or "recurrent". fails: the layer behind which a call
    ends with KeyboardInterrupt. calls: the rows of each call."""

    def __init__(self, *kinds: str):
        super().__init__()
        self._kinds, self._recorder = kinds, Notes() if "recurrent" in kinds else None
        self._fails: int | None = None
        self._calls: list[int] = []
        self.lm_head = Head()

    def make_cache(self) -> list:
        make = {
            "plain": KVCache,
            "window": lambda: RotatingKVCache(WINDOW, keep=0),
            "recurrent": lambda: ArraysCache(1),
        }
        return [make[kind]() for kind in self._kinds]

    def __call__(self, ids: mx.array, cache: list) -> mx.array:
        self._calls.append(ids.shape[1])
        columns: list[mx.array] = []
        for i, (kind, own) in enumerate(zip(self._kinds, cache, strict=True)):
            part = self._recur if kind == "recurrent" else self._look
            columns += [(i + 1) * x for x in part(own, ids[0].astype(mx.float32))]
            if self._fails == i:
                raise KeyboardInterrupt("planted")
        return self.lm_head(mx.stack(columns, axis=-1)[None])

    def _recur(self, cache: ArraysCache, tokens: mx.array) -> list[mx.array]:
        start = mx.zeros((1, 2)) if cache[0] is None else cache[0]
        seen = start[0, 0] + mx.arange(1, len(tokens) + 1)
        rows = mx.stack([mx.ones(len(tokens)), seen * tokens], axis=-1)
        after = start + mx.cumsum(rows, axis=0)
        cache[0] = after[-1:]
        if self._recorder is not None and self._recorder.noted is not None:
            self._recorder.noted[id(cache)] = rows[None]
        return [after[:, 0], after[:, 1]]

    def _look(self, cache: KVCache | RotatingKVCache, tokens: mx.array) -> list[mx.array]:
        seen = cache.offset + mx.arange(1, len(tokens) + 1)
        rows = mx.broadcast_to((seen * tokens)[None, None, :, None], (1, 1, len(tokens), GROUP)) + 0
        keys, _ = cache.update_and_fetch(rows, rows)
        if isinstance(keys, tuple):
            keys = mx.dequantize(*keys, group_size=cache.group_size, bits=cache.bits)
        total = mx.concatenate([mx.zeros(1), mx.cumsum(keys[0, 0, :, 0])])
        ends = len(total) - len(tokens) + mx.arange(len(tokens))
        wide = isinstance(cache, RotatingKVCache)
        return [seen, total[ends] - (total[mx.maximum(ends - WINDOW, 0)] if wide else 0)]

    def row(self, tokens: Sequence[int]) -> list[float]:
        """The logits row after `tokens`."""
        counts = [(i + 1) * token for i, token in enumerate(tokens)]
        found = []
        for i, kind in enumerate(self._kinds):
            seen = counts[-WINDOW:] if kind == "window" else counts
            found += [(i + 1) * len(tokens), (i + 1) * sum(seen)]
        return [float(x) for x in found]


class Noted:
    """Taps on what the model reads: rows (n, 1), the token ids."""

    def __init__(self, model: ByHand):
        self.model = model

    @contextmanager
    def noting(self) -> Iterator[list[mx.array]]:
        found: list[mx.array] = []
        call = ByHand.__call__

        def noting(model, ids, cache):
            found.append(ids[0].astype(mx.float32)[:, None])
            return call(model, ids, cache)

        ByHand.__call__ = noting
        try:
            yield found
        finally:
            ByHand.__call__ = call


def timeline(
    *kinds: str, horizon: int = 256, budget: int = 1 << 20, chunk: int = 512, at: int = 0, **options
) -> Timeline:
    """A timeline of a model with these layers, that has read `at` tokens."""
    model = ByHand(*kinds)
    limits = Limits(horizon, budget, chunk)
    made = Timeline(model, model._recorder, limits, projections=Projections(model), **options)
    made.sync(text(at))
    return made


def text(n: int, seed: int = 1) -> list[int]:
    """n token ids; a shorter text is the beginning of a longer one."""
    return mx.random.randint(0, V, (2048,), key=mx.random.key(seed)).tolist()[:n]


def check(t: Timeline) -> None:
    """What the timeline shows is what its tokens give, and every layer stands at their end."""
    assert t.pos == len(t.tokens)
    assert all(a.pos() in (None, t.pos) for a in t.adapters)
    if t.logits is not None:
        assert t.logits.tolist() == t.model.row(t.tokens), t.pos
    else:
        assert t.pos == 0


WORDS = 97  # token ids of a model that talks, as of the tiny ones


class Mouth(nn.Module):
    """Says at every place which token follows, and which would be next best."""

    def __call__(self, x: mx.array) -> mx.array:
        return -mx.remainder(5 * x.sum(axis=-1, keepdims=True) + 31 * mx.arange(WORDS), WORDS)


class Talking(ByHand):
    """One whose text goes on somehow, all of it depending on all that was said."""

    def __init__(self, *kinds: str):
        super().__init__(*kinds)
        self.lm_head = Mouth()

    def row(self, tokens: Sequence[int]) -> list[float]:
        total = 5 * sum(super().row(tokens))
        return [-float((total + 31 * i) % WORDS) for i in range(WORDS)]

    def goes_on(self, tokens: Sequence[int], n: int) -> list[int]:
        """The n tokens that follow."""
        said = list(tokens)
        for _ in range(n):
            row = self.row(said)
            said.append(row.index(max(row)))
        return said[len(tokens) :]
