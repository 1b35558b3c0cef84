"""How likely the model held each token that a session wrote, and what else it might have written.

The numbers are the model's own, before bias, penalties, temperature and filters. They are taken
from the very rows that the picks were made from, when tokens become final, so a drafted token has
what it would have alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ds4cli.tools.grammar import NoGrammar, TokenBytes, vocabulary_for


@dataclass(frozen=True)
class Score:
    """A token and its log-probability, and those of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Scores:
    """The scores of what one timeline commits, by position. top: how many others to name."""

    def __init__(self, top: int, token_limit: int):
        self._top, self._token_limit = top, token_limit
        self._kept: dict[int, Score] = {}

    def note(
        self, start: int, tokens: Sequence[int], before: mx.array | None, rows: mx.array
    ) -> None:
        """`tokens` are final from position `start` on. before: the row (V,) that the first of them
        was picked from; rows (n, V) follow the tokens of the call. A prompt's calls, which have
        the last row only, have no scores."""
        if before is None or len(rows) < len(tokens):
            return
        own = mx.concatenate([before[None], rows[: len(tokens) - 1]])[:, : self._token_limit]
        own = own.astype(mx.float32)
        own = own - mx.logsumexp(own, axis=-1, keepdims=True)
        taken = mx.take_along_axis(own, mx.array([*tokens])[:, None], axis=-1)[:, 0]
        best = mx.argsort(-own, axis=-1)[:, : self._top]
        best_values = mx.take_along_axis(own, best, axis=-1)
        values: list[Any] = [array.tolist() for array in (taken, best, best_values)]
        for i, (token, logprob, names, others) in enumerate(zip(tokens, *values, strict=True)):
            top = tuple(zip(names, others, strict=True))
            self._kept[start + i] = Score(token, logprob, top)

    def of(self, tokens: Sequence[int], start: int) -> list[Score]:
        """The scores of a text's tokens from position `start` on."""
        found = [self._kept[pos] for pos in range(start, len(tokens))]
        assert [score.token for score in found] == list(tokens[start:]), "another text's"
        return found


class Spelling:
    """What stands for a token in a result: its text, and its bytes. A part of a character has
    escapes for a text, as OpenAI writes it, so that two of them differ."""

    def __init__(self, decode: Callable[[list[int]], str], tokenizer: Any):
        self._decode = decode
        try:
            self._vocab: TokenBytes | None = TokenBytes(vocabulary_for(tokenizer, ""))
        except NoGrammar:  # its tokens are not known as bytes
            self._vocab = None

    def _spelt(self, token: int) -> tuple[str, list[int]]:
        data = self._vocab.bytes_of(token) if self._vocab is not None else b""
        if not data or data.startswith(b"\xff"):  # special
            data = self._decode([token]).encode()
        return data.decode("utf-8", "backslashreplace"), list(data)

    def openai(self, scores: Sequence[Score]) -> list[dict[str, Any]]:
        """As `logprobs.content` of a chat completion has them."""
        return [
            {
                **self._entry(score.token, score.logprob),
                "top_logprobs": [self._entry(*other) for other in score.top],
            }
            for score in scores
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._spelt(token)
        return {"token": text, "logprob": logprob, "bytes": data}
