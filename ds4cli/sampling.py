"""Position-keyed sampling: the token at position p is a pure function of its logits row, the token
history before it, the settings, and (seed, attempt, p).

The sample is `argmax(filtered_logprobs / T + gumbel(seed, attempt, p))`, the Gumbel-max trick: an
exact draw that needs no stored generator state. A row's pick does not depend on how many rows are
picked together, so drafted, rewound and resumed text equals plain text at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ds4cli.arrays import apart, integers
from ds4cli.errors import ModelError, UsageError
from ds4cli.settings import Settings
from ds4cli.tokens import common_prefix

# Positions whose noise is drawn together, and the most floats that takes (16 MB): each session at a
# temperature holds so many.
NOISE_POSITIONS = 32
NOISE_FLOATS = 1 << 22
_MASK64 = (1 << 64) - 1
# Tells the chance of XTC from the noise of the same position.
_XTC = 0x5A5A

Filter = Callable[[mx.array], mx.array]


class Sampler:
    """Picks tokens from logits rows.

    token_limit: ids at or above it are never picked (vocabularies are padded beyond the tokenizer).
    spared: ids that XTC never drops: what ends a line or a reply.
    attempt: a retry raises it to draw other noise for the same positions.
    needs_history: whether picks depend on the tokens before them.
    UsageError if a logit bias names an id at or above token_limit.
    """

    def __init__(self, settings: Settings, token_limit: int, spared: Collection[int] = ()):
        self.attempt = 0
        self.settings = settings = settings.filled()
        self._token_limit = token_limit
        self._filters = _filters(settings)
        self._spared = sorted(token for token in spared if token < token_limit)
        self._bias = _bias(settings, token_limit)
        self._counts = _HistoryCounts(settings.repetition_context_size)
        self._noise = Noise(settings.seed, token_limit)
        s = settings
        penalties = s.repetition_penalty - 1, s.presence_penalty, s.frequency_penalty
        self.needs_history = any(penalties) and s.repetition_context_size != 0

    def pick(
        self, rows: mx.array, pos: int, history: Sequence[int], mask: mx.array | None = None
    ) -> mx.array:
        """The tokens for positions pos, pos + 1, ...: int32 (k,), not evaluated.

        rows: logits (k, V) of any float type; row i predicts position pos + i and sees
        history[:pos + i]. history: tokens from position 0 on, pos + k - 1 or more; unused unless
        `needs_history`. mask: bool (V,) or (k, V), true for allowed ids, one or more in every row.
        It applies after the filters; where they leave nothing allowed, the whole row counts.
        """
        width = min(rows.shape[-1], self._token_limit)
        if width < rows.shape[-1]:
            rows = rows[:, :width]
        if self._bias is not None or self.needs_history:
            rows = self._penalise(rows.astype(mx.float32), pos, history)
        if mask is not None:
            mask = _fit(mask, width)
        if self.settings.temp == 0:
            # The filters never drop the best token, and falling back to the whole row when they
            # drop the best allowed one is what greedy does without them.
            rows = rows if mask is None else mx.where(mask, rows, -mx.inf)
            return mx.argmax(rows, axis=-1).view(mx.int32)
        dropped = self._drops(pos, len(rows))
        return self._sample(rows.astype(mx.float32), self.noise(pos, len(rows)), mask, dropped)

    def _drops(self, pos: int, k: int) -> mx.array | None:
        """Where XTC drops likely tokens, a matter of chance: bool (k, 1); None without it."""
        chance = self.settings.xtc_probability
        if not chance:
            return None
        keys = [position_key(self.settings.seed, self.attempt, pos + i) for i in range(k)]
        return mx.array([[_splitmix64(key ^ _XTC) < chance * 2**64] for key in keys])

    def noise(self, pos: int, k: int) -> mx.array:
        """What the picks for positions pos, pos + 1, ... owe to chance: (k, token_limit)."""
        return self._noise.rows(self.attempt, pos, k)

    def pick_with(self, rows: mx.array, noise: Sequence[mx.array]) -> mx.array:
        """The tokens that rows (k, V) of any positions give with the noise of each: int32 (k,)."""
        rows = rows[:, : self._token_limit].astype(mx.float32)
        return self._sample(rows, mx.concatenate([*noise]), None)

    @property
    def kind(self) -> tuple[Any, ...] | None:
        """Samplers of one kind differ in their noise only; None: this one is like no other."""
        s = self.settings
        if self._bias is not None or self.needs_history or s.xtc_probability:
            return None
        return (s.temp, s.top_p, s.top_k, s.min_p) if s.temp else (0,)

    def _sample(
        self,
        rows: mx.array,
        noise: mx.array,
        mask: mx.array | None,
        dropped: mx.array | None = None,
    ) -> mx.array:
        # Shifted log-probabilities: the filters and the sample do not depend on the shift.
        rows = rows - rows.max(axis=-1, keepdims=True)
        before, after = self._filters
        kept = _filtered(rows, before)
        if dropped is not None:
            kept = mx.where(dropped & self._likely(kept), -mx.inf, kept)
        kept = _filtered(kept, after)
        if mask is not None:
            kept = _allow(kept, rows, mask)
        temp = self.settings.temp
        assert temp is not None, "the engine has decided"
        noise = noise[:, : rows.shape[-1]]
        picks = mx.argmax(kept * (1 / temp) + noise, axis=-1).astype(mx.int32)
        return mx.where(mx.isnan(rows[:, 0]), 0, picks)  # for `refuse_nan`

    def _likely(self, rows: mx.array) -> mx.array:
        """What XTC drops, as `mlx_lm.sample_utils.apply_xtc` does, which draws its own chance: of
        the tokens above the threshold all but the least likely. bool (k, V)."""
        probs = mx.softmax(rows, axis=-1)
        above = mx.where(probs > self.settings.xtc_threshold, probs, mx.inf)
        likely = probs > above.min(axis=-1, keepdims=True)
        if self._spared:
            likely[:, mx.array(self._spared)] = False
        return likely

    def _penalise(self, rows: mx.array, pos: int, history: Sequence[int]) -> mx.array:
        """Bias and penalties in mlx-lm's order (`mlx_lm.sample_utils.make_logits_processors`)."""
        s = self.settings
        if self._bias is not None:
            rows = rows + self._bias[: rows.shape[-1]]
        if not self.needs_history:
            return rows
        counts = self._counts.rows(history, pos, *rows.shape)
        seen = counts > 0
        if s.repetition_penalty != 1:
            factor = mx.where(rows < 0, s.repetition_penalty, 1 / s.repetition_penalty)
            rows = mx.where(seen, rows * factor, rows)
        return rows - s.presence_penalty * seen - s.frequency_penalty * counts


class Asked(NamedTuple):
    """What one of several samplers is asked, see `Sampler.pick`. rows: so many are its own."""

    sampler: Sampler
    rows: int
    pos: int
    history: Sequence[int] = ()


def pick_together(rows: mx.array, asked: Sequence[Asked]) -> mx.array:
    """What each sampler picks from its own of the rows (N, V), which lie one after the other: int32
    (N,), not evaluated. The picks are those of `Sampler.pick`; where all are of one kind they are
    made in one go."""
    kinds = {each.sampler.kind for each in asked}
    if len(kinds) > 1 or None in kinds:
        pairs = zip(asked, apart(rows, [each.rows for each in asked]), strict=True)
        return mx.concatenate([a.sampler.pick(x, a.pos, a.history) for a, x in pairs])
    first = asked[0].sampler
    if not first.settings.temp:
        return first.pick(rows, 0, ())
    return first.pick_with(rows, [a.sampler.noise(a.pos, a.rows) for a in asked])


class Chooser:
    """Picks what follows several texts, token after token, each made with those before it. Nothing
    is evaluated unless a sampler needs what was picked."""

    def __init__(self, samplers: Sequence[Sampler], texts: Sequence[Sequence[int]]):
        self._samplers, self._ends = samplers, [len(text) for text in texts]
        self._needs_history = any(sampler.needs_history for sampler in samplers)
        self._known = [list(text) if self._needs_history else [] for text in texts]

    def pick(self, rows: mx.array) -> mx.array:
        """rows: the next row of each text (texts, V) -> int32 (texts,)"""
        own = zip(self._samplers, self._ends, self._known, strict=True)
        picks = pick_together(rows, [Asked(sampler, 1, pos, known) for sampler, pos, known in own])
        self._ends = [end + 1 for end in self._ends]
        if self._needs_history:
            for known, pick in zip(self._known, integers(picks), strict=True):
                known.append(pick)
        return picks


class Noise:
    """Gumbel noise by position, for many at once: tracing a draw takes the host 0.2 ms.

    Always of the tokenizer's width: the generator's output depends on the shape, and a draft model
    with other padding must see the same noise.
    """

    def __init__(self, seed: int, width: int):
        self._seed, self._width = seed, width
        self._most = min(NOISE_POSITIONS, NOISE_FLOATS // width)
        self._attempt, self._start = 0, 0
        self._drawn: mx.array | None = None

    def rows(self, attempt: int, pos: int, k: int) -> mx.array:
        """Noise (k, width) for positions pos, pos + 1, ..."""
        drawn = self._drawn
        if drawn is None or attempt != self._attempt or not self._has(pos, k):
            self._attempt, self._start = attempt, pos
            drawn = self._drawn = self._draw(max(k, self._most))
        first = pos - self._start
        return drawn[first : first + k]

    def _has(self, pos: int, k: int) -> bool:
        drawn = 0 if self._drawn is None else len(self._drawn)
        return self._start <= pos and pos + k <= self._start + drawn

    def _draw(self, n: int) -> mx.array:
        keys = [position_key(self._seed, self._attempt, self._start + i) for i in range(n)]
        draw = mx.vmap(lambda key: mx.random.gumbel((self._width,), key=key))
        drawn = draw(mx.array([[key >> 32, key & 0xFFFFFFFF] for key in keys], mx.uint32))
        mx.async_eval(drawn)  # in no call's graph: most calls draw nothing
        return drawn


class _HistoryCounts:
    """How often each id occurs in the last `context` tokens before a position (-1: in all).

    The counts before the latest position are kept on the device, with the tokens they stand for:
    a later call adds and subtracts only what differs, so going back and edits need no notice.
    """

    def __init__(self, context: int):
        self._context = context
        self._tokens: list[int] = []
        self._base: mx.array | None = None

    def rows(self, history: Sequence[int], pos: int, k: int, width: int) -> mx.array:
        """Counts (k, width) float32; row i counts history[:pos + i], its last `context` tokens."""
        first = self._first(pos)
        counts = mx.broadcast_to(self._count(list(history[first:pos]), width), (k, width))
        entering = [(i, pos + j, 1) for i in range(k) for j in range(i)]
        leaving = [(i, j, -1) for i in range(k) for j in range(first, self._first(pos + i))]
        changes = [(i, history[at], by) for i, at, by in entering + leaving]
        return _add(counts, [change for change in changes if change[1] < width])

    def _first(self, pos: int) -> int:
        return 0 if self._context < 0 else max(0, pos - self._context)

    def _count(self, tokens: list[int], width: int) -> mx.array:
        if self._base is None or self._base.shape[-1] != width:
            self._tokens, self._base = [], mx.zeros((1, width))
        same = common_prefix(self._tokens, tokens)
        changes = [(0, t, -1) for t in self._tokens[same:]] + [(0, t, 1) for t in tokens[same:]]
        self._base = _add(self._base, [change for change in changes if change[1] < width])
        self._tokens = tokens
        return self._base


def _add(counts: mx.array, changes: Sequence[tuple[int, int, float]]) -> mx.array:
    """`counts` (k, V) with each (row, id, by) added."""
    if not changes:
        return counts
    row, token, by = zip(*changes, strict=True)
    return counts.at[mx.array(row), mx.array(token)].add(mx.array(by, mx.float32))


def _filters(settings: Settings) -> tuple[list[Filter], list[Filter]]:
    """mlx-lm's filters in its order (`mlx_lm.sample_utils.make_sampler`), before and after XTC."""
    filters: list[Filter] = []
    top_p, min_p, top_k = settings.top_p, settings.min_p, settings.top_k
    assert top_p is not None and top_k is not None, "the engine has decided"
    if 0 < top_p < 1:
        filters.append(lambda rows: apply_top_p(rows, top_p))
    if min_p > 0:
        filters.append(lambda rows: apply_min_p(rows, min_p))
    return filters, [lambda rows: _top_k(rows, top_k)] if top_k > 0 else []


def _filtered(rows: mx.array, filters: Sequence[Filter]) -> mx.array:
    for keep in filters:
        rows = keep(rows)
    return rows


def _top_k(rows: mx.array, k: int) -> mx.array:
    """mlx-lm's own refuses a k that keeps everything."""
    return apply_top_k(rows, k) if k < rows.shape[-1] else rows


def check_bias(settings: Settings, token_limit: int) -> None:
    """UsageError for a bias on a token that the model does not have."""
    beyond = [token for token in settings.logit_bias if token >= token_limit]
    if beyond:
        raise UsageError(
            f"`logit_bias` names token `{beyond[0]}`", f"this model has ids below {token_limit}"
        )


def _bias(settings: Settings, token_limit: int) -> mx.array | None:
    """The logit bias as a row (token_limit,)."""
    if not settings.logit_bias:
        return None
    check_bias(settings, token_limit)
    changes = [(0, token, by) for token, by in settings.logit_bias.items()]
    return _add(mx.zeros((1, token_limit)), changes)[0]


def _fit(mask: mx.array, width: int) -> mx.array:
    """The mask's first `width` columns; ids it does not speak of are not allowed."""
    missing = width - mask.shape[-1]
    if missing > 0:
        widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
        return mx.pad(mask, widths)
    return mask[..., :width]


def _allow(kept: mx.array, rows: mx.array, mask: mx.array) -> mx.array:
    """`kept` where `mask` allows; a row with nothing left is `rows` where the mask allows."""
    allowed = mx.where(mask, kept, -mx.inf)
    empty = allowed.max(axis=-1, keepdims=True) == -mx.inf
    return mx.where(empty, mx.where(mask, rows, -mx.inf), allowed)


def position_key(seed: int, attempt: int, pos: int) -> int:
    """64 bits of key for one position: the same on every platform and Python version."""
    key = 0
    for part in (seed, attempt, pos):
        key = _splitmix64(key ^ part)
    return key


def _splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def refuse_nan(rows: mx.array, picks: Sequence[int]) -> None:
    """ModelError if a pick came from a row of NaN. rows: (k, V), evaluated together with the picks.

    Such a row always picks id 0 (nothing compares as larger), so other rows are not looked at.
    """
    for i, pick in enumerate(picks):
        if pick == 0 and mx.isnan(rows[i, 0]).item():
            raise ModelError(
                "the model's output is not a number", "try `--dtype float32`, or other weights"
            )
