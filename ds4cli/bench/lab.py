"""Where scenarios work: an engine that generates as many tokens as it is told to, a text, a clock.

Nothing a session reports about itself is believed: model calls and tokens are counted on its
timeline, and a time ends when the next token is known, so that nothing lazy is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ds4cli.arrays import named_leaves, number
from ds4cli.bench.corpus import Corpus
from ds4cli.bench.matrix import Matrix
from ds4cli.bench.measure import Sample
from ds4cli.engine.engine import Engine
from ds4cli.engine.session import Session
from ds4cli.errors import UsageError

# How far below the best a token may be where rounding decides, as a share of the largest logit.
HALF_PRECISION_MARGIN = 1 / 32


class Lab:
    """engine: its stop ids are taken away, so that a reply is as long as a scenario wants.
    trace: the agent's conversation; None = the one that ships with the program."""

    def __init__(
        self,
        engine: Engine,
        matrix: Matrix,
        *,
        trace: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.engine = engine
        self.engine.stop_ids = set()
        self.matrix = matrix
        self.trace = trace
        self.text = Corpus(engine.encode)
        self.clock = clock

    @property
    def is_exact(self) -> bool:
        """Whether everything is float32, so that equal means equal, token for token."""
        return self.engine.settings.kv_bits is None and dtypes(self.engine.model) == {"float32"}

    @property
    def cuts(self) -> bool:
        """Whether every layer of the model keeps every row: going back is a cut, at any depth."""
        return self.engine.capabilities.max_rollback is None

    def contexts(self, extra: int) -> list[int]:
        """The contexts of the matrix; UsageError where one and `extra` tokens do not fit."""
        for context in self.matrix.contexts:
            self.refuse_beyond(context + extra)
        return list(self.matrix.contexts)

    def refuse_beyond(self, tokens: int) -> None:
        """UsageError if `tokens` do not fit the model's context."""
        limit = self.engine.context_tokens
        if limit is not None and tokens > limit:
            raise UsageError(
                f"this measurement needs `{tokens}` tokens, this model reads at most `{limit}`",
                "give a shorter `--context`, or a smaller `--scale`",
            )

    # -- sessions ---------------------------------------------------------------------------------

    def session(self, tokens: Sequence[int] = ()) -> Session:
        """A fresh session that has read `tokens`: what a forced miss costs."""
        session = self.engine.session()
        if tokens:
            session.sync(tokens)
        return session

    def decode(self, session: Session, n: int) -> list[int]:
        """Generate n tokens, the way replies are generated."""
        events = list(session.stream(max_tokens=n, stop=[]))
        return [token for event in events for token in event.tokens]

    def decode_blocks(self, session: Session, truth: Sequence[int], end: int) -> None:
        """Decode up to position `end` in full blocks: the drafts are what `truth` says."""
        while session.pos < end:
            stop = min(session.pos + self.matrix.block, end)
            session.step(drafts=truth[session.pos + 1 : stop])

    def truth(self, prompt: Sequence[int], n: int) -> list[int]:
        """`prompt` and the n tokens that the model says next."""
        session = self.session(prompt)
        self.decode(session, n)
        return session.tokens

    # -- measuring --------------------------------------------------------------------------------

    def sample(self, session: Session, action: Callable[[], Any]) -> Sample:
        """`action`, timed until the session's next token is known."""
        before = replace(session.counters)
        begin = self.clock()
        report = action()
        session.next_token()
        seconds = self.clock() - begin
        forwards = session.counters.forwards - before.forwards
        fed_tokens = session.counters.fed_tokens - before.fed_tokens
        return Sample(seconds, forwards, fed_tokens, getattr(report, "source", ""))

    def rebuild(self, tokens: Sequence[int]) -> tuple[Session, Sample]:
        """Everything read again: a fresh session at the end of `tokens`, and what it took."""
        session = self.session()
        sample = self.sample(session, lambda: session.sync(tokens))
        return session, replace(sample, source="")

    def trials(self) -> range:
        """Trial numbers; those below zero are for warming up and do not count."""
        return range(-self.matrix.warmup, self.matrix.num_trials)

    def is_last(self, trial: int) -> bool:
        return trial == self.matrix.num_trials - 1

    def agree(self, session: Session, fresh: Session) -> bool:
        """Whether `session` goes on as `fresh`, which stands at the same position, says.

        Teacher forcing: each token of a branch of `session` must be the one that `fresh` likes
        best, or, outside float32, close to it. `fresh` has read the branch then.
        """
        branch = session.fork()
        for _ in range(self.matrix.match_tokens):
            token = branch.next_token()
            row = fresh.logits
            assert row is not None, "it has read a text"
            if not self.would_say(row, token):
                return False
            branch.step(drafts=[])
            fresh.sync([*fresh.tokens, token])
        return branch.tokens == fresh.tokens

    def would_say(self, row: mx.array, token: int) -> bool:
        """Whether `token` is the best of `row` (V,), or as good as rounding can tell."""
        return gap(row, token) <= (0 if self.is_exact else HALF_PRECISION_MARGIN)


def gap(row: mx.array, token: int) -> float:
    """How far `token` is below the best of `row` (V,), as a share of the largest logit, or of one
    where that is less."""
    row = row.astype(mx.float32)
    below = mx.max(row) - row[token]
    return number(below / mx.maximum(mx.max(mx.abs(row)), 1))


def dtypes(model: Any) -> set[str]:
    """The types of a model's weights: "float32", "bfloat16", "uint32" (packed), ..."""
    names = {str(v.dtype).rpartition(".")[2] for _, v in named_leaves(model.parameters())}
    return {n for n in names if n.startswith(("float", "bfloat", "uint"))}
