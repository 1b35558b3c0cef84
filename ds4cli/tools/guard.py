"""Watches one reply for tool calls, and says where to go back to when one goes wrong.

The protocol. Positions are the session's, tokens come in order, and the guard's state is a function
of the tokens it was fed: one small snapshot per position, so `rewind` is a truncation.

    feed(pos, token, text)   per committed token, with the text the detokenizer released for it, and
                             for a stop token before the reply ends. Returns a GuardStep: `emit` is
                             text to show now, `event` what the loop has to do:
        "open"     a call has begun at step.opened (a place worth a checkpoint)
        "left"     the token at step.bad_pos leaves the grammar; the guard stands before it: rewind
                   the session to bad_pos, pick from the kept row with `allowed(size)` as mask, feed
                   that token instead
        "closed"   step.calls are ready; stop here (finish reason "tool"), or go on
        "broken"   the call closed but is unusable; the guard stands before its first token: rewind
                   the session to bad_pos, raise `attempt`, go on
        "refused"  the same after max_repairs attempts: the text stays, step.reason says why
    rewind(pos)              the session went back: forget the tokens from `pos` on. After "left"
                             and "broken" that has happened already, and doing it again is harmless.
    filter(tokens)           how many of a block's tokens may be fed; asks, changes nothing
    forced(tokens)           what must follow these in the open call, for guesses; the same
    is_open, opened          whether a call is open, and where it began
    settled                  tokens before this position cannot be taken back by a repair
    finish(reason)           the reply has ended: hands out what is held back, and what the end
                             completes; after "length" or "cancelled" `feed` may go on
    catch_up(...)            instead of `feed`: a reply that was written before

Text outside calls is handed back as it comes; what may still turn out to be the beginning of a
marker is held back, from the beginning of its token on. Nearly every token changes nothing: it
holds no character that could belong to a marker. Such tokens take a short way through `feed` and
share one `_State`; the rest is as slow as it likes. What the grammar says of an open call is in
`matcher.py`, what the text of a call means in `parse.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

from ds4cli.settings import Settings
from ds4cli.text.detokenizer import Detokenizer
from ds4cli.text.reasoning import reasoning_pair
from ds4cli.tools.declared import Tool
from ds4cli.tools.detect import require_format
from ds4cli.tools.formats import Format, Json, Named, Tagged
from ds4cli.tools.matcher import CallMatcher
from ds4cli.tools.mend import Refused, Unclosed
from ds4cli.tools.parse import ParsedCall, parse_calls

if TYPE_CHECKING:
    import numpy as np


FENCE = "```"
_SECTIONS = {"think": "a think section", "code": "a code block", "quote": "a quotation"}


class GuardStep(NamedTuple):  # one for every token: made faster than a dataclass
    """What one token did. `emit` is text to show now; see the module's docstring for `event`."""

    emit: str = ""
    event: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    opened: int | None = None
    bad_pos: int | None = None
    reason: str = ""


NOTHING = GuardStep()


@dataclass(frozen=True)
class GuardEnd:
    """The end of a reply.

    emit: text that was held back.
    calls: calls that only the end completes.
    cut: a call was open when the reply ran out of room or was cancelled. It is kept: feed() may
        go on where it stopped. `calls` then holds it only if nothing but its end marker is missing.
    raw: the text of an unusable call.
    reason: why it is unusable.
    """

    emit: str = ""
    calls: tuple[ParsedCall, ...] = ()
    cut: bool = False
    raw: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _State:
    """After a token. `held`: (pos, text) of tokens not shown yet, `at`: where that text begins;
    `begun`: whether the answer has any text, `called`: whether that is a call which turned out to
    be prose, `since`: where thoughts or code began.

    In a call, `held` are its first tokens up to the one that opened it, `before` is text of the
    first of them that stands before the marker and `marker` the marker's length.
    """

    mode: str = "text"  # "text" | "think" | "code" | "quote" | "call"
    at: int = 0
    held: tuple[tuple[int, str], ...] = ()
    before: str = ""
    marker: int = 0
    since: int = 0
    begun: bool = False
    called: bool = False

    @property
    def opened(self) -> int:
        return self.held[0][0]

    def is_settled(self, fmt: Format) -> bool:
        """Whether calls open only at what `beginnings` names."""
        return self.begun or not fmt.bare or self.mode != "text"

    @property
    def first_text(self) -> str:
        """In a call: the text of its first token from the marker on."""
        return self.held[0][1][len(self.before) :]


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
        self._grammar = self._build_grammar(tokenizer) if use_grammar else None
        self._stops = frozenset(tokenizer.eos_token_ids)
        self._think = self.fmt.think or reasoning_pair(tokenizer)
        self._openings = {begins: self._opening_pattern(begins) for begins in (True, False)}
        self._hints = {
            "text": _hint(*self.fmt.beginnings, self._think[0], "`"),
            "think": _hint(self._think[1]),
            "code": _hint(FENCE),
            "quote": _hint("`"),
        }
        self._first = _State(mode="think" if think else "text")
        self.caught: tuple[ParsedCall, ...] = ()
        self.caught_text = ""
        self._base: int | None = None
        self._ids: list[int] = []
        self._ends: list[int] = []  # offset in the text after each token
        self._pieces: list[str] = []
        self._states: list[_State] = []
        self._shown = 0  # offset in the text up to which it was handed out
        self._out: list[str] = []
        self._attempts: dict[int, int] = {}
        self._banned: dict[int, set[int]] = {}
        self._forced: int | None = None  # the call that `allowed` must let begin
        self._call: CallMatcher | None = None

    def _build_grammar(self, tokenizer: Any) -> Any:
        from ds4cli.tools.grammar import NoGrammar, grammar_for

        try:
            grammar = grammar_for(tokenizer, self.fmt, self.tools)
        except NoGrammar as why:
            self.notices.append(f"tool calls are checked only when they close: {why}")
            return None
        self.notices += grammar.notices
        return grammar

    def _opening_pattern(self, begins: bool) -> regex.Pattern[str]:
        """What matters in text: a call, thoughts, and code, where calls are examples."""
        ways = [self.fmt.opening([tool.name for tool in self.tools], begins), f"(?P<code>{FENCE})"]
        if marks := "|".join(regex.escape(m) for m in self.fmt.beginnings if m):
            ways.append(f"(?P<quote>`(?:{marks}))")
        if self._think[0]:
            ways.append(f"(?P<think>{regex.escape(self._think[0])})")
        return regex.compile("|".join(ways))

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
    def _state(self) -> _State:
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
        self._banned = {p: ids for p, ids in self._banned.items() if p <= pos}
        self._forced = None
        if self._call is not None and not self._call.rewind(self._end):
            self._call = None

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
            if not state.held and state.is_settled(self.fmt) and not self._hints[state.mode](text):
                return self._plain(start, text)
            return self._outside(state, (*state.held, (pos, text)), start)
        bad = self._first_bad(state)
        if bad is None:
            return self._advance(state, text)
        return self._to_prose(state, text) or self._left(bad, state.opened)

    def _to_prose(self, state: _State, text: str) -> GuardStep | None:
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

    def _set(self, state: _State) -> None:
        self._states[-1] = state

    def _show(self, at: int, text: str) -> None:
        """Hand out `text`, which begins at offset `at`, but for what was handed out before."""
        self._out.append(text[max(0, self._shown - at) :])
        self._shown = max(self._shown, at + len(text))

    # outside calls

    def _outside(
        self, state: _State, held: tuple[tuple[int, str], ...], start: int | None = None
    ) -> GuardStep:
        """Go on with text not shown yet; `start` is where its newest token begins, `state.at` where
        the first does, if it was held before."""
        if start is not None and not state.held:
            state = replace(state, at=start)
        whole = "".join(piece for _, piece in held)
        if state.mode != "text":
            return self._in_section(state, held, whole)
        match = self._openings[not state.begun].search(whole, partial=True)
        if match is None or match.partial:
            return self._hold(state, held, match.start() if match else len(whole))
        kind = match.lastgroup
        if kind in ("think", "code", "quote"):
            return self._switch(state, held, whole, match.end(), kind)
        return self._open(state, held, match)

    def _in_section(self, state: _State, held: tuple, whole: str) -> GuardStep:
        """Thoughts, code and quotations hold no calls."""
        end = {"think": self._think[1], "code": FENCE, "quote": "`"}[state.mode]
        match = regex.search(regex.escape(end), whole, partial=True)
        if match is None or match.partial:
            return self._hold(state, held, match.start() if match else len(whole))
        return self._switch(state, held, whole, match.end(), "text")

    def _switch(self, state: _State, held: tuple, whole: str, end: int, mode: str) -> GuardStep:
        """Show the first `end` characters and go on in another mode."""
        self._show(state.at, whole[:end])
        begun = state.mode != "think" and mode != "think"
        at, called = state.at + end, state.called
        after = _State(mode=mode, at=at, since=at, begun=begun, called=called)
        return self._outside(after, _without(held, end))

    def _hold(self, state: _State, held: tuple, at: int) -> GuardStep:
        """Show the tokens that end before character `at`, hold back the others."""
        shown, held = _split(held, at)
        self._show(state.at, shown)
        begun = state.begun or bool(shown.strip())
        self._set(replace(state, at=state.at + len(shown), held=held, begun=begun))
        return NOTHING

    def _open(self, state: _State, held: tuple, match: regex.Match[str]) -> GuardStep:
        begin, marker = _place(match)
        shown, first = _split(held, begin)
        self._show(state.at, shown)
        start = begin - len(shown)
        text = "".join(piece for _, piece in first)
        state = _State("call", state.at + len(shown), first, text[:start], marker)
        self._set(state)
        bad = self._first_bad(state)
        if bad is not None:
            return self._left(bad, state.opened)
        step = self._advance(state, text[start + marker :])
        return step._replace(event=step.event or "open", opened=state.opened)

    # inside a call

    def _advance(self, state: _State, text: str) -> GuardStep:
        """Look for the end marker, whose last character must be in `text`, the newest part."""
        end = self.fmt.end
        if not end or end[-1] not in text:
            return NOTHING
        window = self._newest(state, len(text) + len(end) - 1)
        if end in window and self._may_close(state):
            return self._close(state, len(window) - window.index(end) - len(end)) or NOTHING
        return NOTHING

    def _newest(self, state: _State, size: int) -> str:
        """The last `size` characters of the open call behind its marker, or all of them."""
        text, index, first = "", len(self._pieces), state.held[-1][0] - self._start
        while len(text) < size and (index := index - 1) > first:
            text = self._pieces[index] + text
        if len(text) < size:
            opening = "".join(piece for _, piece in state.held)
            text = opening[len(state.before) + state.marker :] + text
        return text[-size:]

    def _may_close(self, state: _State) -> bool:
        """With a grammar, whether the end marker is one rather than text inside a value."""
        matcher = self._matcher(state)
        return matcher is None or matcher.is_accepting()

    def _close(self, state: _State, after: int) -> GuardStep | None:
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

    def _resume(self, state: _State, cut: int, called: bool = False) -> None:
        """Go on with ordinary text at character `cut` of the call's text."""
        at = state.at + len(state.before) + cut
        rest = self._raw(state)[cut:]
        self._set(_State(at=at, begun=True, called=called))
        if rest:
            self._outside(self._state, ((self._end - 1, rest),))

    def _parse(self, state: _State, body: str) -> tuple[ParsedCall, ...]:
        calls = parse_calls(self.fmt, body, self.tools)
        return tuple(replace(c, id=f"call_{state.opened}_{i}") for i, c in enumerate(calls))

    def _broken(self, state: _State, reason: str, cut: int) -> GuardStep:
        opened, tried = state.opened, self._attempts.get(state.opened, 0)
        if tried >= self.max_repairs:
            self._show(state.at, state.before + self._raw(state)[:cut])
            self._resume(state, cut)
            return GuardStep(event="refused", opened=opened, reason=reason)
        self._attempts[opened] = tried + 1
        self.repairs += 1
        self.rewind(opened)
        return GuardStep(event="broken", opened=opened, bad_pos=opened, reason=reason)

    def _raw(self, state: _State) -> str:
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

    def _body_so_far(self, state: _State) -> str:
        """The body of a call that the reply's end has ended; a cut end marker is not part of it."""
        body = self._raw(state)[state.marker :]
        end = self.fmt.end
        for n in range(len(end) - 1, 1, -1):
            if body.rstrip().endswith(end[:n]):
                return body.rstrip()[:-n]
        return body

    def finish(self, reason: str) -> GuardEnd:
        """The reply has ended for `reason`: "stop", "length", "cancelled" or "tool"."""
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

    def _finish_in_call(self, state: _State, reason: str) -> GuardEnd:
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

    def _calls_in_open_section(self, state: _State) -> tuple[ParsedCall, ...]:
        """A model that never closed its thoughts or its code meant the call that ends its reply."""
        where = _SECTIONS.get(state.mode)
        if where is None:
            return ()
        text = "".join(self._pieces)[state.since :].rstrip()
        matches = [m for m in self._openings[False].finditer(text) if _is_call(m)]
        if not matches or not text.endswith(self.fmt.end):
            return ()
        begin, marker = _place(matches[-1])
        try:
            calls = self._parse(
                _State(held=((self._end, ""),)),
                text[begin + marker : len(text) - len(self.fmt.end)],
            )
        except Refused:
            return ()
        note = f"it stood in {where} that was never closed"
        return tuple(replace(c, notes=(*c.notes, note)) for c in calls)

    def _examples(self, state: _State) -> str:
        """Said of calls that were taken for examples."""
        if state.called:
            return "a tool call at the beginning of a sentence was taken as text"
        blocks = "".join(self._pieces).split(FENCE)[1::2]
        if any(_is_call(m) for block in blocks for m in self._openings[False].finditer(block)):
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
        if opened is None or self._grammar is None:
            return np.ones(size, bool)
        # A token that holds a whole bad opening by itself may be replaced by anything else.
        matcher = self._matcher(self._state) if opened < self._end else None
        mask = self._grammar.mask(None if matcher is None else matcher.live, size)
        mask[[t for t in self._banned.get(self._end, ()) if t < size]] = False
        return mask

    def filter(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the next token and the drafts behind it, stay inside the grammar.
        No side effect.

        Outside calls: all of them.
        """
        matcher = self._matcher(self._state) if self.is_open else None
        return len(tokens) if matcher is None else matcher.fitting(tokens)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """What the call's syntax lets follow `tokens`, the next token and the guesses behind it,
        where that is one text only. Guesses: nothing else depends on them.
        """
        matcher = self._matcher(self._state) if self.is_open else None
        if matcher is None:
            return []
        return matcher.forced(self._ids[self._state.opened - self._start :], tokens)

    def _left(self, bad: int, opened: int, token: int | None = None) -> GuardStep:
        token = self._ids[bad - self._start] if token is None else token
        self.rewind(bad)
        self._banned.setdefault(bad, set()).add(token)
        self.repairs += 1
        self._forced = opened
        assert self._grammar is not None, "only a grammar is left"
        shown = self._grammar.bytes_of(token).decode("utf-8", "replace")
        reason = (
            "the reply would end inside the call"
            if token in self._stops
            else f"`{shown}` does not fit the grammar of the declared tools"
        )
        return GuardStep(event="left", opened=opened, bad_pos=bad, reason=reason)

    def _first_bad(self, state: _State) -> int | None:
        """The position of the first token that the grammar refuses, if any does."""
        matcher = self._matcher(state)
        return None if matcher is None else matcher.refused(self._end)

    def _matcher(self, state: _State) -> CallMatcher | None:
        """The matcher of the open call, after the newest token that it accepts; None without a
        grammar.
        """
        if self._grammar is None:
            return None
        if self._call is None or self._call.opened != state.opened:
            first = self._ids[state.opened - self._start]
            self._call = CallMatcher(self._grammar, state.opened, first, state.first_text)
        self._call.follow(self._ids[state.opened - self._start :])
        if self._call.gave_up:
            self.notices.append(f"the grammar was given up inside a call: {self._call.gave_up}")
            self._call.gave_up = ""
        return self._call if self._call.live is not None else None


def _is_call(match: regex.Match[str]) -> bool:
    return match.lastgroup in ("start", "kept")


def _place(match: regex.Match[str]) -> tuple[int, int]:
    """Where a call begins in its text, and how long its marker is."""
    groups = match.groupdict()
    if groups.get("start") is not None:
        return match.start("start"), len(groups["start"])
    return match.start("kept"), 0


def _hint(*markers: str | None) -> Callable[[str], Any]:
    """Searches a text for anything that a marker may begin with: its first two characters, or the
    first one at the text's end."""
    beginnings = [rf"{regex.escape(m[0])}(?:{regex.escape(m[1:2])}|\Z)" for m in markers if m]
    return regex.compile("|".join(beginnings) or r"(?!)").search


def _split(held: tuple[tuple[int, str], ...], at: int) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The text of the tokens that end at or before character `at`, and the other tokens."""
    shown = ""
    for i, (_, piece) in enumerate(held):
        if len(shown) + len(piece) > at:
            return shown, held[i:]
        shown += piece
    return shown, ()


def _without(held: tuple[tuple[int, str], ...], n: int) -> tuple[tuple[int, str], ...]:
    """`held` without its first `n` characters."""
    shown, rest = _split(held, n)
    if not rest:
        return ()
    (pos, piece), n = rest[0], n - len(shown)
    return ((pos, piece[n:]), *rest[1:])
