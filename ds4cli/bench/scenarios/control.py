"""What keeping the past costs a reply that never goes back: one text, recording on and off; and how
plain decoding stands beside mlx-lm's own loop over the same weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from ds4cli.bench.measure import Row, Sample, mad, timed
from ds4cli.bench.reference import Reference

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.session import Session


@dataclass
class Runs:
    """Samples of one way, and what was generated: a hash of the tokens and the number of blocks."""

    samples: list[Sample] = field(default_factory=list)
    outputs: set[tuple[str, int]] = field(default_factory=set)


def control(lab: Lab) -> Iterator[Row]:
    """Pairs of runs, one token a step and in full blocks; which goes first alternates."""
    n = lab.matrix.generate
    (context, *_) = lab.contexts(n)
    truth = lab.truth(lab.text.take(context), n)
    session = lab.session(truth[:context])
    cases: dict[str, Callable[[], object]] = {
        f"{n} tokens, one a step": lambda: lab.decode(session, n),
        f"{n} tokens in full blocks": lambda: lab.decode_blocks(session, truth, len(truth)),
    }
    for case, run in cases.items():
        on, off = _pairs(lab, session, context, run)
        same = len(on.outputs | off.outputs) == 1
        note = difference([s.seconds for s in on.samples], [s.seconds for s in off.samples])
        yield timed(
            on.samples, "control", case, "recording", against="not recording", match=same,
            note=note, context_tokens=context,
        )  # fmt: skip
        yield timed(off.samples, "control", case, "not recording", context_tokens=context)
    yield from _beside_mlx_lm(lab, session, truth, context)


def _beside_mlx_lm(lab: Lab, session: Session, truth: Sequence[int], context: int) -> Iterator[Row]:
    """The same reply by a session as it is, and by `generate_step`; which goes first alternates."""
    n, loop = len(truth) - context, StockLoop(lab, truth[:context])
    ours, theirs = Runs(), Runs()
    for pair in range(-lab.matrix.warmup, lab.matrix.pairs):
        for runs in (ours, theirs) if pair % 2 else (theirs, ours):
            sample, tokens = _turn(lab, session, context, n) if runs is ours else loop.turn(n)
            if pair >= 0:
                runs.samples.append(sample)
                runs.outputs.add((fingerprint(tokens), 0))
    same = len(ours.outputs | theirs.outputs) == 1 if lab.is_exact else None
    case, name = f"{n} tokens, one a step", "plain decoding"
    note = speed([s.seconds for s in ours.samples], [s.seconds for s in theirs.samples])
    yield timed(
        ours.samples, name, case, "session", against="mlx-lm generate_step", match=same, note=note,
        context_tokens=context,
    )  # fmt: skip
    yield timed(theirs.samples, name, case, "mlx-lm generate_step", context_tokens=context)


def _turn(lab: Lab, session: Session, start: int, n: int) -> tuple[Sample, list[int]]:
    session.rewind(start)
    session.next_token()
    return lab.sample(session, lambda: lab.decode(session, n)), session.tokens[start:]


class StockLoop:
    """mlx-lm's own loop after a text, with no code of ours in the model or its caches."""

    def __init__(self, lab: Lab, tokens: Sequence[int]):
        settings = lab.engine.settings
        reference = Reference(lab.engine.model, settings.kv_bits, settings.kv_group_size)
        self._lab, self._model, self._last = lab, reference.model, tokens[-1]
        self._caches = reference.caches()
        # Read by our model: mlx-lm's loops over the rows of a recurrence take minutes.
        chunk = lab.engine.chunk_tokens
        for i in range(0, len(tokens) - 1, chunk):
            part = tokens[i : min(i + chunk, len(tokens) - 1)]
            lab.engine.model(mx.array([*part])[None], cache=self._caches)
            mx.eval([cache.state for cache in self._caches])

    def turn(self, n: int) -> tuple[Sample, list[int]]:
        """n tokens from the end of the text, timed."""
        caches: list[Any] = copy.deepcopy(self._caches)
        mx.eval([cache.state for cache in caches])
        prompt = mx.array([self._last])
        begin = self._lab.clock()
        steps = generate_step(prompt, self._model, max_tokens=n, prompt_cache=caches)
        tokens = [int(token) for token, _ in steps]
        return Sample(self._lab.clock() - begin, forwards=n, fed_tokens=n), tokens


def _pairs(lab: Lab, session: Session, start: int, run: Callable[[], object]) -> tuple[Runs, Runs]:
    ways = {True: Runs(), False: Runs()}
    for pair in range(-lab.matrix.warmup, lab.matrix.pairs):
        for recording in (True, False) if pair % 2 else (False, True):
            session.rewind(start)
            session.next_token()
            session.recording = recording
            blocks = session.stats.blocks
            sample = lab.sample(session, run)
            session.recording = True
            if pair >= 0:
                output = fingerprint(session.tokens), session.stats.blocks - blocks
                ways[recording].samples.append(sample)
                ways[recording].outputs.add(output)
    return ways[True], ways[False]


def fingerprint(tokens: Sequence[int]) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def difference(on: Sequence[float], off: Sequence[float]) -> str:
    """The cost of the first in percent of the second, pair by pair: median and spread."""
    percents = [100 * (a / b - 1) for a, b in zip(on, off, strict=True)]
    return f"{median(percents):+.1f} ± {mad(percents):.1f} %"


def speed(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The speed of the first as a share of the second's, pair by pair: median and spread."""
    shares = [b / a for a, b in zip(ours, theirs, strict=True)]
    return f"{median(shares):.2f} ± {mad(shares):.2f} of mlx-lm's speed"
