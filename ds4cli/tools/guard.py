"""Watches one reply for tool calls, and says where to go back to when one goes wrong.

What it says, and when, is in `steps.py`. Positions are the session's, tokens come in order, and the
guard's state is a function of the tokens it was fed: one small snapshot per position, so `rewind`
is a truncation.

Text outside calls is handed back as it comes; what may still turn out to be the beginning of a
marker is held back, from the beginning of its token on. Nearly every token changes nothing: it
holds no character that could belong to a marker. Such tokens take a short way through `feed` and
share one `State`; the rest is as slow as it likes. Where calls begin in text is in `openings.py`,
what the grammar says of an open one in `matcher.py`, what its text means in `parse.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import regex

from ds4cli.settings import Settings
from ds4cli.text.detokenizer import Detokenizer
from ds4cli.text.reasoning import reasoning_pair
from ds4cli.tools.declared import Tool
from ds4cli.tools.detect import require_format
from ds4cli.tools.formats import Format, Json, Named, Tagged
from ds4cli.tools.matcher import CallMatcher, Limits
from ds4cli.tools.mend import Refused, Unclosed
from ds4cli.tools.openings import FENCE, SECTIONS, Openings, place
from ds4cli.tools.parse import ParsedCall, parse_calls
from ds4cli.tools.state import Held, State, split, without
from ds4cli.tools.steps import NOTHING, GuardEnd, GuardStep, Instead

if TYPE_CHECKING:
    import numpy as np


class Guard:
    """One per reply. `tokenizer` is mlx-lm's wrapper; `think`: the prompt ends inside thinking;
    `resumable`: a reply that was cut may go on, so that what may begin a marker waits for that.

    notices: things for the user to read (what is not checked, why there is no grammar).
    repairs: the number of "left" and "broken" steps so far.
    allows_prose: whether a call without a marker may turn out to be the beginning of prose.
    caught, caught_text: the calls that closed in what `catch_up` took, and the text around them.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Tool],
        think: bool = False,
        max_repairs: int = Settings.max_repairs,
        fmt: Format | None = None,
        use_grammar: bool = True,
        resumable: bool = False,
    ) -> None:
        self.fmt = fmt or require_format(tokenizer)
        self.tools = list(tools)
        self.max_repairs = max_repairs
        self._resumable = resumable
        self.allows_prose = True
        self.repairs = 0
        self.notices = [notice for tool in tools for notice in tool.notices]
        self._limits = self._build_limits(tokenizer) if use_grammar else None
        self._stops = frozenset(tokenizer.eos_token_ids)
        marks = self.fmt.think or reasoning_pair(tokenizer)
        names = [tool.name for tool in self.tools]
        self._openings = Openings(self.fmt, names, (marks[0] or "", marks[1] or ""))
        self._first = State(mode="think" if think else "text")
        self.caught: tuple[ParsedCall, ...] = ()
        self.caught_text = ""
        self._base: int | None = None
        self._ids: list[int] = []
        self._ends: list[int] = []  # offset in the text after each token
        self._pieces: list[str] = []
        self._states: list[State] = []
        self._shown = 0  # offset in the text up to which it was handed out
        self._out: list[str] = []
        self._attempts: dict[int, int] = {}
        self._forced: int | None = None  # the call that `allowed` must let begin

    def _build_limits(self, tokenizer: Any) -> Limits | None:
        from ds4cli.tools.grammar import NoGrammar, grammar_for

        try:
            grammar = grammar_for(tokenizer, self.fmt, self.tools)
        except NoGrammar as why:
            self.notices.append(f"tool calls are checked only when they close: {why}")
            return None
        self.notices += grammar.notices
        return Limits(grammar)

    # where we are

    @property
    def is_open(self) -> bool:
        """Whether a call is open (where long drafts pay, and drafts are filtered)."""
        return self._state.mode == "call"

    @property
    def opened(self) -> int | None:
        """The position of the first token of the open call."""
        return self._state.opened if self.is_open else None

    @property
    def settled(self) -> int:
        """The position before which no token can be taken back by a repair any more."""
        held = self._state.held
        return held[0][0] if held else self._end

    @property
    def waiting(self) -> str:
        """Text that is not shown because it may be the beginning of a marker."""
        return "" if self.is_open else "".join(piece for _, piece in self._state.held)

    @property
    def _state(self) -> State:
        return self._states[-1] if self._states else self._first

    @property
    def _start(self) -> int:
        """The position of the first token."""
        assert self._base is not None, "a token was fed"
        return self._base

    @property
    def _end(self) -> int:
        """The position of the next token."""
        return self._start + len(self._ids)

    def rewind(self, pos: int) -> None:
        """Forget every token at `pos` and after it. Nothing changes if the guard stands there."""
        if self._base is None or pos >= self._end:
            return
        keep = max(0, pos - self._base)
        for kept in (self._ids, self._pieces, self._ends, self._states):
            del kept[keep:]
        self._shown = min(self._shown, self._ends[-1] if self._ends else 0)
        self._forced = None
        if self._limits is not None:
            self._limits.rewind(self._end)

    def catch_up(self, pos: int, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> bool:
        """Take a reply that was written before, from `pos` on, showing nothing of it. False where
        a call in it does not fit the declared tools: then nobody can watch it from here on.
        What closed in it is `caught`."""
        self._base = pos
        self.caught, self.caught_text = (), ""
        detokenizer = Detokenizer(decode)
        for at, token in enumerate(tokens, pos):
            step = self.feed(at, token, detokenizer.push(token))
            if step.event in ("left", "broken"):
                return False
            self.caught, self.caught_text = self.caught + step.calls, self.caught_text + step.emit
        self.finish("length")  # what was held back at its end was shown then
        return True

    # one token

    def feed(self, pos: int, token: int, text: str) -> GuardStep:
        """Take the committed token at `pos`, with the text that the detokenizer released for it."""
        if self._base is None:
            self._base = pos
        assert pos == self._base + len(self._ids), "tokens must be fed in order"
        self._forced, self._out = None, []
        if token in self._stops:
            step = self._stop_token(pos, token)
        else:
            step = self._take(pos, token, text)
        return step._replace(emit="".join(self._out)) if self._out else step

    def _take(self, pos: int, token: int, text: str) -> GuardStep:
        state = self._states[-1] if self._states else self._first
        start = self._ends[-1] if self._ends else 0
        self._ids.append(token)
        self._pieces.append(text)
        self._ends.append(start + len(text))
        self._states.append(state)
        if state.mode != "call":
            is_plain = not state.held and state.is_settled(self.fmt)
            if is_plain and not self._openings.may_matter(state.mode, text):
                return self._plain(start, text)
            return self._outside(state, (*state.held, (pos, text)), start)
        bad = self._first_bad(state)
        if bad is None:
            return self._advance(state, text)
        return self._to_prose(state, text) or self._left(bad, state.opened)

    def _to_prose(self, state: State, text: str) -> GuardStep | None:
        """Where a call has no marker it is the whole reply: one that goes on in its own line with
        `text`, the newest token, is the beginning of a sentence."""
        raw = self._raw(state)
        cut = len(raw) - len(text)
        between = raw[len(raw[:cut].rstrip()) : len(raw) - len(text.lstrip())]
        is_bare = self.fmt.bare and not state.marker and self.allows_prose
        if (
            not is_bare
            or not self._may_close(state)
            or {"\n", "\r"} & {*between}
            or not text.strip()
        ):
            return None
        self._show(state.at, state.before + raw[:cut])
        self._resume(state, cut, called=True)
        return NOTHING

    def _plain(self, start: int, text: str) -> GuardStep:
        """Text that no marker begins in, at offset `start`."""
        if self._shown > start:
            self._show(start, text)
            return NOTHING
        self._shown = start + len(text)
        return GuardStep(text)

    def _set(self, state: State) -> None:
        self._states[-1] = state

    def _show(self, at: int, text: str) -> None:
        """Hand out `text`, which begins at offset `at`, but for what was handed out before."""
        self._out.append(text[max(0, self._shown - at) :])
        self._shown = max(self._shown, at + len(text))

    # outside calls

    def _outside(self, state: State, held: Held, start: int | None = None) -> GuardStep:
        """Go on with text not shown yet; `start` is where its newest token begins, `state.at` where
        the first does, if it was held before."""
        if start is not None and not state.held:
            state = replace(state, at=start)
        whole = "".join(piece for _, piece in held)
        if state.mode != "text":
            return self._in_section(state, held, whole)
        match = self._openings.find(whole, not state.begun)
        if match is None or match.partial:
            return self._hold(state, held, match.start() if match else len(whole))
        kind = match.lastgroup
        if kind in ("think", "code", "quote"):
            return self._switch(state, held, whole, match.end(), kind)
        return self._open(state, held, match)

    def _in_section(self, state: State, held: Held, whole: str) -> GuardStep:
        """Thoughts, code and quotations hold no calls."""
        match = self._openings.find_end(whole, state.mode)
        if match is None or match.partial:
            return self._hold(state, held, match.start() if match else len(whole))
        return self._switch(state, held, whole, match.end(), "text")

    def _switch(self, state: State, held: Held, whole: str, end: int, mode: str) -> GuardStep:
        """Show the first `end` characters and go on in another mode."""
        self._show(state.at, whole[:end])
        begun = state.mode != "think" and mode != "think"
        at, called = state.at + end, state.called
        after = State(mode=mode, at=at, since=at, begun=begun, called=called)
        return self._outside(after, without(held, end))

    def _hold(self, state: State, held: Held, at: int) -> GuardStep:
        """Show the tokens that end before character `at`, hold back the others."""
        shown, held = split(held, at)
        self._show(state.at, shown)
        begun = state.begun or bool(shown.strip())
        self._set(replace(state, at=state.at + len(shown), held=held, begun=begun))
        return NOTHING

    def _open(self, state: State, held: Held, match: regex.Match[str]) -> GuardStep:
        begin, marker = place(match)
        shown, first = split(held, begin)
        self._show(state.at, shown)
        start = begin - len(shown)
        text = "".join(piece for _, piece in first)
        state = State("call", state.at + len(shown), first, text[:start], marker)
        self._set(state)
        bad = self._first_bad(state)
        if bad is not None:
            return self._left(bad, state.opened)
        step = self._advance(state, text[start + marker :])
        return step._replace(event=step.event or "open", opened=state.opened)

    # inside a call

    def _advance(self, state: State, text: str) -> GuardStep:
        """Look for the end marker, whose last character must be in `text`, the newest part."""
        end = self.fmt.end
        if not end or end[-1] not in text:
            return NOTHING
        window = self._newest(state, len(text) + len(end) - 1)
        if end in window and self._may_close(state):
            return self._close(state, len(window) - window.index(end) - len(end)) or NOTHING
        return NOTHING

    def _newest(self, state: State, size: int) -> str:
        """The last `size` characters of the open call behind its marker, or all of them."""
        text, index, first = "", len(self._pieces), state.held[-1][0] - self._start
        while len(text) < size and (index := index - 1) > first:
            text = self._pieces[index] + text
        if len(text) < size:
            opening = "".join(piece for _, piece in state.held)
            text = opening[len(state.before) + state.marker :] + text
        return text[-size:]

    def _may_close(self, state: State) -> bool:
        """With a grammar, whether the end marker is one rather than text inside a value."""
        matcher = self._matcher(state)
        return matcher is None or matcher.is_accepting()

    def _close(self, state: State, after: int) -> GuardStep | None:
        """Close the call `after` characters before the end; None: the marker is inside a string."""
        raw = self._raw(state)
        cut = len(raw) - after
        try:
            calls = self._parse(state, raw[state.marker : cut - len(self.fmt.end)])
        except Refused as error:
            if isinstance(error, Unclosed) and isinstance(self.fmt.style, (Json, Named)):
                return None
            return self._broken(state, str(error), cut)
        self._show(state.at, state.before)
        self._resume(state, cut)
        return GuardStep(event="closed", calls=calls, opened=state.opened)

    def _resume(self, state: State, cut: int, called: bool = False) -> None:
        """Go on with ordinary text at character `cut` of the call's text."""
        at = state.at + len(state.before) + cut
        rest = self._raw(state)[cut:]
        self._set(State(at=at, begun=True, called=called))
        if rest:
            self._outside(self._state, ((self._end - 1, rest),))

    def _parse(self, state: State, body: str) -> tuple[ParsedCall, ...]:
        calls = parse_calls(self.fmt, body, self.tools)
        return tuple(replace(c, id=f"call_{state.opened}_{i}") for i, c in enumerate(calls))

    def _broken(self, state: State, reason: str, cut: int) -> GuardStep:
        opened, tried = state.opened, self._attempts.get(state.opened, 0)
        if tried >= self.max_repairs:
            self._show(state.at, state.before + self._raw(state)[:cut])
            self._resume(state, cut)
            return GuardStep(event="refused", opened=opened, reason=reason)
        self._attempts[opened] = tried + 1
        self.repairs += 1
        self.rewind(opened)
        return GuardStep(event="broken", opened=opened, bad_pos=opened, reason=reason)

    def _raw(self, state: State) -> str:
        """The text of the open call from its marker on."""
        after = state.held[-1][0] + 1 - self._start
        first = "".join(piece for _, piece in state.held)
        return first[len(state.before) :] + "".join(self._pieces[after:])

    # the end

    def _stop_token(self, pos: int, token: int) -> GuardStep:
        state = self._state
        if state.mode != "call":
            return NOTHING
        matcher = self._matcher(state)
        if matcher is not None and not matcher.is_accepting():
            return self._left(pos, state.opened, token)
        try:
            calls = self._parse(state, self._body_so_far(state))
        except Refused as error:
            return self._broken(state, str(error), len(self._raw(state)))
        self._show(state.at, state.before)
        return GuardStep(event="closed", calls=calls, opened=state.opened)

    def _body_so_far(self, state: State) -> str:
        """The body of a call that the reply's end has ended; a cut end marker is not part of it."""
        body = self._raw(state)[state.marker :]
        end = self.fmt.end
        for n in range(len(end) - 1, 1, -1):
            if body.rstrip().endswith(end[:n]):
                return body.rstrip()[:-n]
        return body

    def finish(self, reason: str) -> GuardEnd:
        """The reply has ended for `reason`: "stop", "length", "cancelled" or "tool"."""
        end = self._end_of_reply(reason)
        notes = [end.reason, "" if self._limits is None else self._limits.gave_up]
        return replace(end, reason="; ".join(filter(None, notes)))

    def _end_of_reply(self, reason: str) -> GuardEnd:
        state, self._out = self._state, []
        if state.mode != "call":
            if not (self._resumable and reason in ("length", "cancelled")):
                self._show(state.at, self.waiting)
            found = self._calls_in_open_section(state) if reason == "stop" else ()
            return GuardEnd(
                "".join(self._out), found, reason="" if found else self._examples(state)
            )
        if reason == "tool":
            return GuardEnd()
        return self._finish_in_call(state, reason)

    def _finish_in_call(self, state: State, reason: str) -> GuardEnd:
        raw, cut = self._raw(state), reason != "stop"
        self._show(state.at, state.before)
        shown = "".join(self._out)
        try:
            calls = self._parse(state, self._body_so_far(state))
        except Refused as error:
            why = f"the call was cut ({reason})" if cut else str(error)
            return GuardEnd(shown, cut=cut, raw=raw, reason=why)
        if cut and not (self._is_whole(raw) and all(c.outcome == "valid" for c in calls)):
            return GuardEnd(shown, cut=True, raw=raw, reason=f"the call was cut ({reason})")
        note = "its end marker was missing"
        calls = tuple(replace(c, notes=(*c.notes, note)) for c in calls)
        return GuardEnd(shown, calls, cut, raw)

    def _is_whole(self, raw: str) -> bool:
        """Whether nothing could have followed but the end marker."""
        style = self.fmt.style
        if isinstance(style, Tagged):
            return bool(style.call_close) and style.call_close in raw
        return isinstance(style, (Json, Named))

    def _calls_in_open_section(self, state: State) -> tuple[ParsedCall, ...]:
        """A model that never closed its thoughts or its code meant the call that ends its reply."""
        where = SECTIONS.get(state.mode)
        if where is None:
            return ()
        text = "".join(self._pieces)[state.since :].rstrip()
        matches = list(self._openings.calls(text))
        if not matches or not text.endswith(self.fmt.end):
            return ()
        begin, marker = place(matches[-1])
        try:
            calls = self._parse(
                State(held=((self._end, ""),)),
                text[begin + marker : len(text) - len(self.fmt.end)],
            )
        except Refused:
            return ()
        note = f"it stood in {where} that was never closed"
        return tuple(replace(c, notes=(*c.notes, note)) for c in calls)

    def _examples(self, state: State) -> str:
        """Said of calls that were taken for examples."""
        if state.called:
            return "a tool call at the beginning of a sentence was taken as text"
        blocks = "".join(self._pieces).split(FENCE)[1::2]
        if any(True for block in blocks for _ in self._openings.calls(block)):
            return "a tool call in a code block was taken as text"
        return ""

    # the grammar

    def allowed(self, size: int) -> np.ndarray:
        """(size,) bool: the tokens that may stand at the next position, `size` the width of a
        logits row.

        After "left" these are the tokens that keep the call inside its grammar; all others are
        False.
        """
        import numpy as np

        opened = self._forced if self._forced is not None else self.opened
        if opened is None or self._limits is None:
            return np.ones(size, bool)
        # A token that holds a whole bad opening by itself may be replaced by anything else.
        matcher = self._matcher(self._state) if opened < self._end else None
        return self._limits.mask(matcher, self._end, size)

    def filter(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the next token and the drafts behind it, stay inside the grammar.
        No side effect.

        Outside calls: all of them.
        """
        matcher = self._matcher(self._state) if self.is_open else None
        return len(tokens) if matcher is None else matcher.fitting(tokens)

    def instead(self, tokens: Sequence[int], pick: int, size: int) -> Instead | None:
        """What may follow `tokens`, the next token and the guesses behind it, where `pick` may not;
        None where it may, or where only feeding it tells.
        """
        matcher = self._matcher(self._state) if self.is_open else None
        if matcher is None or self._limits is None or self.fmt.bare:
            return None
        mask = self._limits.instead(matcher, tokens, pick, size)
        if mask is None:
            return None
        self.repairs += 1
        return Instead(mask, self._why_left(pick))

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """What the call's syntax lets follow `tokens`, the next token and the guesses behind it,
        where that is one text only. Guesses: nothing else depends on them.
        """
        matcher = self._matcher(self._state) if self.is_open else None
        if matcher is None:
            return []
        return matcher.forced(tokens)

    def _left(self, bad: int, opened: int, token: int | None = None) -> GuardStep:
        token = self._ids[bad - self._start] if token is None else token
        self.rewind(bad)
        assert self._limits is not None, "only a grammar is left"
        self._limits.ban(bad, token)
        self.repairs += 1
        self._forced = opened
        return GuardStep(event="left", opened=opened, bad_pos=bad, reason=self._why_left(token))

    def _why_left(self, token: int) -> str:
        assert self._limits is not None, "only a grammar is left"
        return (
            "the reply would end inside the call"
            if token in self._stops
            else f"`{self._limits.spelled(token)}` does not fit the grammar of the declared tools"
        )

    def _first_bad(self, state: State) -> int | None:
        """The position of the first token that the grammar refuses, if any does."""
        matcher = self._matcher(state)
        return None if matcher is None else matcher.refused(self._end)

    def _matcher(self, state: State) -> CallMatcher | None:
        """The matcher of the open call, after the newest token that it accepts; None without a
        grammar.
        """
        if self._limits is None:
            return None
        ids = self._ids[state.opened - self._start :]
        return self._limits.matcher(state.opened, ids, state.first_text)
