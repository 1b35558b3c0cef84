"""The grammar's side of a reply: what may stand in its calls, and a matcher that follows one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4cli.tools.forcing import Forcing

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher

    from ds4cli.tools.grammar import Grammar


class Limits:
    """What a grammar lets stand in the calls of one reply, and which tokens were taken back.

    gave_up: why the grammar was given up, should it be.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.gave_up = ""
        self._grammar = grammar
        self._banned: dict[int, set[int]] = {}
        self._call: CallMatcher | None = None

    def matcher(self, opened: int, ids: Sequence[int], first_text: str) -> CallMatcher | None:
        """The matcher of the call at `opened`, after the newest of its tokens `ids` that it
        accepts; None where it cannot follow. first_text: the first one's text from the marker on.
        """
        if self._call is None or self._call.opened != opened:
            self._call = CallMatcher(self._grammar, opened, ids[0], first_text)
        self._call.follow(ids)
        if self._call.gave_up:
            self.gave_up = f"the grammar was given up inside a call: {self._call.gave_up}"
        return self._call if self._call.live is not None else None

    def ban(self, pos: int, token: int) -> None:
        """`token` was wrong at `pos`."""
        self._banned.setdefault(pos, set()).add(token)

    def mask(self, matcher: CallMatcher | None, pos: int, size: int) -> np.ndarray:
        """(size,) bool: the tokens that `matcher` lets stand at `pos`; None: any but what was
        wrong there."""
        mask = self._grammar.mask(None if matcher is None else matcher.live, size)
        mask[[t for t in self._banned.get(pos, ()) if t < size]] = False
        return mask

    def instead(
        self, matcher: CallMatcher, tokens: Sequence[int], pick: int, size: int
    ) -> np.ndarray | None:
        """(size,) bool: what `matcher` lets follow `tokens`, where that is not `pick`."""
        assert matcher.live is not None, "it follows"
        return self._grammar.instead(matcher.live, tokens, pick, size)

    def spelled(self, token: int) -> str:
        return self._grammar.bytes_of(token).decode("utf-8", "replace")

    def rewind(self, end: int) -> None:
        """Forget the tokens from position `end` on, and what was wrong behind it."""
        self._banned = {pos: ids for pos, ids in self._banned.items() if pos <= end}
        if self._call is not None and not self._call.rewind(end):
            self._call = None


class CallMatcher:
    """Follows the call at `opened`, whose first token is `first` and spells `text` from the marker
    on: the marker may begin inside that token.

    live: llguidance's matcher; None where it cannot follow. gave_up: why it stopped.
    """

    def __init__(self, grammar: Grammar, opened: int, first: int, text: str) -> None:
        self.opened = opened
        self._lead = _spelling(grammar, first, text.encode())
        self.live: LLMatcher | None = grammar.matcher() if self._lead else None
        self.gave_up = ""
        self._taken = 0  # tokens that the matcher has consumed: the lead, then one per token
        self._forcing = Forcing(grammar.forcing)

    def follow(self, ids: Sequence[int]) -> None:
        """Consume what is new in `ids`, all tokens of the call; stops before one that is refused.

        Mostly that is the newest token.
        """
        behind = self._taken - len(self._lead)
        wanted = [*ids[1 + behind :]] if behind >= 0 else [*self._lead[behind:], *ids[1:]]
        if self.live is None or not wanted:
            return
        taken = self.live.try_consume_tokens(wanted)
        self._taken += taken
        self._forcing.take(wanted[:taken])
        if taken < len(wanted) and self.live.is_error():
            self.gave_up = self.live.get_error().strip().split("\n")[0]
            self.live = None

    def refused(self, end: int) -> int | None:
        """The position of the token before `end` that it did not consume, if there is one."""
        if self._taken == self._wants(end):
            return None
        return self.opened + max(0, self._taken - len(self._lead) + 1)

    def is_accepting(self) -> bool:
        assert self.live is not None
        return self.live.is_accepting()

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow. No side effect."""
        assert self.live is not None
        return self.live.validate_tokens(list(tokens))

    def forced(self, coming: Sequence[int]) -> list[int]:
        """Guesses for what follows `coming`, which comes next."""
        return self._forcing.after(coming)

    def rewind(self, end: int) -> bool:
        """Forget the tokens from position `end` on. False where that is the whole call."""
        if end <= self.opened:
            return False
        wanted = self._wants(end)
        if self.live is not None and self._taken > wanted:
            self.live.rollback(self._taken - wanted)
            self._taken = wanted
            self._forcing.rewind(wanted)
        return True

    def _wants(self, end: int) -> int:
        """How many tokens are consumed where the matcher stands before position `end`."""
        return len(self._lead) + end - self.opened - 1


def _spelling(grammar: Grammar, token: int, data: bytes) -> list[int]:
    """Tokens that spell `data`, the end of `token`; [] where the vocabulary has none."""
    whole = grammar.bytes_of(token)
    at = whole.rfind(data)
    return [token] if at == 0 else grammar.tokens_of(whole[at:]) if at > 0 else []
