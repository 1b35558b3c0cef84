"""Watches one reply for its form, and says where to go back to when a token leaves it.

It speaks the protocol of `tools.steps` (see there): `feed` answers with text to show and, where a
token leaves the grammar, with "left" and the position to go back to; `allowed` is the mask there.
Nothing is masked while the model stays inside. The form begins with the reply, or behind its
reasoning; a stop token may come only where the text may end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ds4cli.structured.grammar import Form
from ds4cli.structured.missing import missing
from ds4cli.text.detokenizer import Detokenizer
from ds4cli.text.reasoning import Markers, ReasoningSplitter
from ds4cli.tools import checking
from ds4cli.tools.forcing import Forcing
from ds4cli.tools.steps import NOTHING, GuardEnd, GuardStep, Instead


@dataclass
class _Body:
    """The text that has the form: where it begins, and the matcher behind its newest token.

    lead: tokens that spell what of its first token belongs to it. forcing: guesses for it.
    """

    opened: int
    lead: list[int]
    matcher: Any
    forcing: Forcing
    ids: list[int] = field(default_factory=list)


class FormGuard:
    """One per reply. markers: what opens and closes reasoning, and what opens an answer without
    any; thinks: the prompt opened reasoning.

    repairs: the number of "left" steps so far. notices: things for the user to read.
    """

    caught = ()
    caught_text = ""

    def __init__(
        self,
        tokenizer: Any,
        form: Form,
        markers: Markers | None = None,
        thinks: bool = False,
    ):
        self.form = form
        self.repairs = 0
        self.notices = form.wanted.notices
        self._stops = frozenset(tokenizer.eos_token_ids)
        self._markers, self._thinks = markers, thinks
        self._base: int | None = None
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._banned: dict[int, set[int]] = {}
        self._begin()

    def _begin(self) -> None:
        """Stand before the first token."""
        self._splitter = ReasoningSplitter(self._markers, self._thinks)
        self._body: _Body | None = None
        self._shown = 0  # tokens whose text was handed out

    # where we are

    @property
    def is_open(self) -> bool:
        """Whether the text that has the form has begun."""
        return self._body is not None

    @property
    def opened(self) -> int | None:
        """The position of its first token."""
        return None if self._body is None else self._body.opened

    @property
    def settled(self) -> int:
        """The position before which no token can be taken back by a repair any more."""
        return (self._base or 0) + self._shown

    @property
    def waiting(self) -> str:
        """Text that is not shown, because it may be the beginning of a marker."""
        return "".join(self._texts[self._shown :])

    @property
    def text(self) -> str:
        """The text that has the form, as far as it goes."""
        if self._body is None:
            return ""
        data = b"".join(map(self.form.bytes_of, [*self._body.lead, *self._body.ids]))
        return data.decode("utf-8", "replace")

    @property
    def _start(self) -> int:
        """The position of the first token."""
        assert self._base is not None, "a token was fed"
        return self._base

    @property
    def _end(self) -> int:
        return (self._base or 0) + len(self._ids)

    # one token

    def feed(self, pos: int, token: int, text: str) -> GuardStep:
        """Take the committed token at `pos`, with the text that the detokenizer released for it."""
        if self._base is None:
            self._base = pos
        assert pos == self._end, "tokens must be fed in order"
        if token in self._stops:
            return self._stop_token(pos, token)
        self._ids.append(token)
        self._texts.append(text)
        body = self._body
        bad = self._look_for_body(text) if body is None else self._follow(body, [token])
        return self._show() if bad is None else self._left(bad)

    def _show(self) -> GuardStep:
        if self._body is None and self._splitter.is_waiting:
            return NOTHING
        text, self._shown = self.waiting, len(self._texts)
        return GuardStep(text)

    def _look_for_body(self, text: str) -> int | None:
        """Whether the form begins in the newest tokens; the position of one that is refused."""
        pieces = self._splitter.push(text)
        answer = "".join(piece.text for piece in pieces if not piece.is_reasoning)
        if not answer:
            return None
        first, part = self._first_of(len(answer))
        lead = [self._ids[first]] if part is None else self.form.tokens_of(part.encode())
        forcing = Forcing(self.form.forcing)
        forcing.take(lead)
        self._body = _Body(self._start + first, lead, self.form.matcher(), forcing)
        if self._body.matcher.try_consume_tokens(lead) < len(lead):
            return self._body.opened
        return self._follow(self._body, self._ids[first + 1 :])

    def _first_of(self, characters: int) -> tuple[int, str | None]:
        """The token in which the newest `characters` begin, and what of its text belongs to them;
        None: all of it. Tokens that only begin a character have no text of their own."""
        index = len(self._texts)
        while characters > 0:
            index -= 1
            characters -= len(self._texts[index])
        if characters < 0:
            return index, self._texts[index][-characters:]
        while index > 0 and not self._texts[index - 1]:
            index -= 1
        return index, None

    def _follow(self, body: _Body, tokens: list[int]) -> int | None:
        """Let the matcher consume `tokens`; the position of the first that it refuses."""
        taken = body.matcher.try_consume_tokens(tokens) if tokens else 0
        body.ids += tokens[:taken]
        body.forcing.take(tokens[:taken])
        return None if taken == len(tokens) else body.opened + 1 + len(body.ids)

    def _left(self, bad: int, token: int | None = None) -> GuardStep:
        token = self._ids[bad - self._start] if token is None else token
        self.rewind(bad)
        self._banned.setdefault(bad, set()).add(token)
        self.repairs += 1
        reason = self._why_left(token)
        return GuardStep(event="left", opened=self.opened, bad_pos=bad, reason=reason)

    def _why_left(self, token: int) -> str:
        shown = self.form.bytes_of(token).decode("utf-8", "replace")
        return (
            "the reply would end before its text fits"
            if token in self._stops
            else f"`{shown}` does not fit {self.form.wanted.name}"
        )

    def _stop_token(self, pos: int, token: int) -> GuardStep:
        if self._body is not None and self._body.matcher.is_accepting():
            return NOTHING
        return self._left(pos, token)

    # going back

    def rewind(self, pos: int) -> None:
        """Forget every token at `pos` and after it. Nothing changes if the guard stands there."""
        if self._base is None or pos >= self._end:
            return
        keep = max(0, pos - self._base)
        del self._ids[keep:], self._texts[keep:]
        self._banned = {p: ids for p, ids in self._banned.items() if p <= pos}
        if self._body is not None and pos > self._body.opened:
            self._roll_back(self._body, pos)
        else:
            self._read_again()

    def _roll_back(self, body: _Body, pos: int) -> None:
        gone = len(body.ids) - (pos - body.opened - 1)
        if gone > 0:
            body.matcher.rollback(gone)
            del body.ids[-gone:]
            body.forcing.rewind(len(body.lead) + len(body.ids))
        self._shown = min(self._shown, len(self._ids))

    def _read_again(self) -> None:
        shown = self._shown
        self._begin()
        for text in self._texts:
            self._splitter.push(text)
        self._shown = min(shown, len(self._texts))

    def catch_up(self, pos: int, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> bool:
        """Take a reply that was written before, from `pos` on, showing nothing of it. False where
        it has not the form: then nobody can watch it from here on."""
        self._base = pos
        detokenizer = Detokenizer(decode)
        steps = (self.feed(at, t, detokenizer.push(t)) for at, t in enumerate(tokens, pos))
        return all(step.event is None for step in steps)

    # the grammar

    def allowed(self, size: int) -> np.ndarray:
        """(size,) bool: the tokens that may stand at the next position, `size` the width of a
        logits row; after "left" only those that keep the form."""
        banned = [t for t in self._banned.get(self._end, ()) if t < size]
        if self._body is None and not self._at_beginning():
            mask = np.ones(size, bool)
        else:
            matcher = self.form.matcher() if self._body is None else self._body.matcher
            mask = self.form.mask(matcher, size)
        mask[banned] = False
        return mask

    def _at_beginning(self) -> bool:
        """Whether the next token may be the form's first: no reasoning is open."""
        return not self._splitter.is_inside

    def filter(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the next token and the drafts behind it, keep the form."""
        if self._body is None:
            return len(tokens)
        return self._body.matcher.validate_tokens(list(tokens))

    def instead(self, tokens: Sequence[int], pick: int, size: int) -> Instead | None:
        """What may follow `tokens`, the next token and the guesses behind it, where `pick` may not;
        None where it may."""
        if self._body is None:
            return None
        mask = self.form.instead(self._body.matcher, tokens, pick, size)
        if mask is None:
            return None
        self.repairs += 1
        return Instead(mask, self._why_left(pick))

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """What must follow `tokens`, the next token and what is drafted so far; for guesses."""
        if self._body is None:
            return []
        return self._body.forcing.after(tokens)

    # the end

    def finish(self, reason: str) -> GuardEnd:
        """The reply has ended for `reason`: "stop", "length", "cancelled" or "tool"."""
        text = self.waiting
        self._shown = len(self._texts)
        return GuardEnd(text, reason=self._note(reason))

    def _note(self, reason: str) -> str:
        if self._body is None:
            return f"the reply ended ({reason}) before a text of the wanted form began"
        if not self._body.matcher.is_accepting():
            return f"the text was cut ({reason}): {missing(self.form.wanted, self.text)}"
        return self._unfit() if self.form.wanted.unheld else ""

    def _unfit(self) -> str:
        """What the finished text is not, of what its grammar could not hold."""
        try:
            checking.check(json.loads(self.text), self.form.wanted.source)
        except checking.Invalid as error:
            return f"the text does not fit {self.form.wanted.name}: {error}"
        except ValueError as error:
            return f"the text is no JSON: {error}"
        return ""
