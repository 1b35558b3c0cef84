"""The grammar's side of one open call: a matcher that follows the call's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4cli.tools.forcing import Forced

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ds4cli.tools.grammar import Grammar


class CallMatcher:
    """Follows the call at `opened`, whose first token is `first` and spells `text` from the marker
    on: the marker may begin inside that token.

    live: llguidance's matcher; None where it cannot follow. gave_up: why it stopped, once.
    """

    def __init__(self, grammar: Grammar, opened: int, first: int, text: str) -> None:
        self.opened = opened
        self._lead = _spelling(grammar, first, text.encode())
        self.live: LLMatcher | None = grammar.matcher() if self._lead else None
        self.gave_up = ""
        self._taken = 0  # tokens that the matcher has consumed: the lead, then one per token
        self._forced = Forced(grammar, self._lead) if self._lead else None

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

    def forced(self, ids: Sequence[int], ahead: Sequence[int]) -> list[int]:
        """Guesses for what follows `ahead`, which follows `ids`, all tokens of the call."""
        return [] if self._forced is None else self._forced.after(ids, ahead)

    def rewind(self, end: int) -> bool:
        """Forget the tokens from position `end` on. False where that is the whole call."""
        if end <= self.opened:
            return False
        wanted = self._wants(end)
        if self.live is not None and self._taken > wanted:
            self.live.rollback(self._taken - wanted)
            self._taken = wanted
        return True

    def _wants(self, end: int) -> int:
        """How many tokens are consumed where the matcher stands before position `end`."""
        return len(self._lead) + end - self.opened - 1


def _spelling(grammar: Grammar, token: int, data: bytes) -> list[int]:
    """Tokens that spell `data`, the end of `token`; [] where the vocabulary has none."""
    whole = grammar.bytes_of(token)
    at = whole.rfind(data)
    return [token] if at == 0 else grammar.tokens_of(whole[at:]) if at > 0 else []
