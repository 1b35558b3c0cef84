"""A reply that is a call of a declared tool, or has the wanted form.

Both guards look on until it is decided: where a call opens before the form has begun, the reply is
a call; where the form's first token comes first, it is text and may hold no call any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds4cli.structured.guard import FormGuard
from ds4cli.tools.guard import Guard
from ds4cli.tools.steps import NOTHING, GuardEnd, GuardStep, Instead

if TYPE_CHECKING:
    import numpy as np

    from ds4cli.tools.parse import ParsedCall


class CallOrForm:
    """A guard of the protocol of `tools.steps` over two others."""

    def __init__(self, calls: Guard, form: FormGuard):
        self._calls, self._form = calls, form
        calls.allows_prose = False  # what begins as a call ends as one
        self._called_at: int | None = None  # where the first call opened
        self._waiting: list[tuple[int, int, str]] = []  # not given to the form: may begin a call
        self.notices = [*calls.notices, *form.notices]

    @property
    def _one(self) -> Guard | FormGuard:
        """The guard that decides now."""
        return self._calls if self._called_at is not None else self._form

    @property
    def repairs(self) -> int:
        return self._calls.repairs + self._form.repairs

    @property
    def caught(self) -> tuple[ParsedCall, ...]:
        return self._calls.caught

    @property
    def caught_text(self) -> str:
        return self._calls.caught_text

    @property
    def is_open(self) -> bool:
        return self._one.is_open

    @property
    def opened(self) -> int | None:
        return self._one.opened

    @property
    def settled(self) -> int:
        return self._one.settled

    @property
    def waiting(self) -> str:
        """Text that is not shown, because it may be the beginning of a call or a marker."""
        return self._one.waiting + "".join(text for _, _, text in self._waiting)

    def feed(self, pos: int, token: int, text: str) -> GuardStep:
        """Take the committed token at `pos`."""
        if self._called_at is not None:
            return self._calls.feed(pos, token, text)
        if self._form.is_open:
            return self._form.feed(pos, token, text)
        step = self._calls.feed(pos, token, text)
        if step.opened is not None:
            self._called_at, self._waiting = step.opened, []
            return step
        self._waiting.append((pos, token, text))
        return NOTHING if self._calls.waiting else self._to_form()

    def _to_form(self) -> GuardStep:
        """No call begins in what waited."""
        shown, self._waiting, waiting = "", [], self._waiting
        for pos, token, text in waiting:
            step = self._form.feed(pos, token, text)
            if step.event is not None:
                assert step.bad_pos is not None, "a form has no other event"
                self._calls.rewind(step.bad_pos)
                return step._replace(emit=shown)
            shown += step.emit
        return GuardStep(shown)

    def rewind(self, pos: int) -> None:
        """Forget the tokens from `pos` on."""
        self._waiting = [held for held in self._waiting if held[0] < pos]
        if self._called_at is not None and pos <= self._called_at:
            self._called_at = None
        self._calls.rewind(pos)
        self._form.rewind(pos)

    def catch_up(self, pos: int, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> bool:
        """Take a reply that was written before. False where nobody can watch it from here on."""
        if self._calls.catch_up(pos, tokens, decode) and (self._calls.is_open or self.caught):
            opened = self._calls.opened
            self._called_at = pos if opened is None else opened
            return True
        self._calls.rewind(pos)
        return self._form.catch_up(pos, tokens, decode)

    def allowed(self, size: int) -> np.ndarray:
        return self._one.allowed(size)

    def filter(self, tokens: Sequence[int]) -> int:
        return self._one.filter(tokens)

    def instead(self, tokens: Sequence[int], pick: int, size: int) -> Instead | None:
        return self._one.instead(tokens, pick, size)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        return self._one.forced(tokens)

    def finish(self, reason: str) -> GuardEnd:
        """The reply has ended for `reason`."""
        self._to_form()
        return self._one.finish(reason)
