"""The text side of one reply: committed tokens in; text to show, and what the loop must do, out.

Detokeniser, tool-call guard and stop scanner stand in this order. All three are functions of the
reply's tokens, so going back is forgetting the newest ones. No mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4cli.errors import StateError
from ds4cli.text.detokenizer import Detokenizer, settled
from ds4cli.text.reasoning import Markers, ReasoningSplitter
from ds4cli.text.stops import StopHit, StopScanner

if TYPE_CHECKING:
    from ds4cli.structured.guards import AnyGuard
    from ds4cli.tools import GuardStep, ParsedCall


FENCE = "```"
LINE_CHARS = 32


@dataclass(frozen=True)
class Taken:
    """What newly committed tokens did.

    text: to show now. used: how many were taken before something has to be done. keep: the position
    to go back to because the reply ends there, with `reason`. step: what the guard asks for.
    """

    text: str
    used: int = 0
    keep: int | None = None
    reason: str | None = None
    step: GuardStep | None = None


class Regions:
    """What kind of text comes next: "think" inside a reasoning section, "code" inside a fenced
    block, else "prose". Text drafts alike within a kind.

    think: the markers, and whether the reply begins inside them; None for a model without any.
    """

    def __init__(self, think: tuple[Markers, bool] | None = None):
        markers, self._thinks = think or (Markers("", ""), False)
        self._start, self._end = markers.start, markers.end
        self._keep = max(len(self._start), len(self._end)) - 1
        self._tail = ""  # may be the beginning of a marker
        self._line = ""  # the beginning of the current line
        self._fenced = False

    @property
    def current(self) -> str:
        return "think" if self._thinks else "code" if self._fenced else "prose"

    def push(self, text: str) -> None:
        """The reply goes on with `text`."""
        if self._start:
            self._follow_markers(text)
        *ended, rest = text.split("\n")
        for part in ended:
            if (self._line + part).lstrip().startswith(FENCE):
                self._fenced = not self._fenced
            self._line = ""
        if len(self._line) < LINE_CHARS:  # a fence stands at its beginning
            self._line += rest

    def _follow_markers(self, text: str) -> None:
        window = self._tail + text
        at_start, at_end = window.rfind(self._start), window.rfind(self._end)
        if at_start != at_end:
            self._thinks = at_start > at_end
        self._tail = window[max(0, len(window) - self._keep) :]


class ReplyText:
    """The text of one reply that begins at position `start`.

    decode: token ids -> text. before: tokens of the same text that were shown already.
    calls: the tool calls that closed so far. think: the markers of reasoning, see `Regions`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        start: int,
        before: Sequence[int] = (),
        stops: Sequence[str] = (),
        guard: AnyGuard | None = None,
        think: tuple[Markers, bool] | None = None,
    ):
        self.start = start
        self.guard = guard
        self.tokens: list[int] = []
        self.calls: list[ParsedCall] = []
        self._decode = decode
        self._before = list(before)
        self._stops = stops
        self._detokenizer = Detokenizer(decode, before)
        self._think = think
        self._regions = self._read_regions()
        self._scanner = StopScanner(stops)
        self._split = ReasoningSplitter(*(think or (None,)))
        self._split.push(settled(decode(self._before)))
        self._said = self._split.pushed_chars
        self._closed_at: int | None = None  # where the last call ended, while nothing followed it
        self._after_call = ""  # white space after it, not shown
        self._reported = 0
        self._stopped = False  # by a stop string: no more text
        self._remarks: list[str] = []  # on calls, for the user

    @property
    def pos(self) -> int:
        return self.start + len(self.tokens)

    @property
    def region(self) -> str:
        """What kind of text comes next: "tool" inside a call, else as `Regions` says."""
        if self.guard is not None and self.guard.is_open:
            return "tool"
        return self._regions.current

    def _read_regions(self) -> Regions:
        regions = Regions(self._think)
        regions.push(self._decode([*self._before, *self.tokens]))
        return regions

    def take(self, tokens: Sequence[int]) -> Taken:
        """Take committed tokens in order, up to the first one after which the loop has to act."""
        shown = []
        for used, token in enumerate(tokens, 1):
            text, taken = self._take_one(token)
            shown.append(text)
            if taken is not None:
                return Taken("".join(shown), used, taken.keep, taken.reason, taken.step)
        return Taken("".join(shown), len(tokens))

    def _take_one(self, token: int) -> tuple[str, Taken | None]:
        pos = self.pos
        self.tokens.append(token)
        text, step = self._detokenizer.push(token), None
        self._regions.push(text)
        if self.guard is not None:
            step = self.guard.feed(pos, token, text)
            text = step.emit
        text, hit = self._scan(text)
        if hit is not None:
            self._stopped = True
            return text, Taken("", keep=self.start + hit.kept, reason="stop")
        if self._closed_at is not None and step is not None:
            return self._take_after_call(text, step)
        if step is not None and step.event == "closed":
            self._closed(step)
        if step is not None and step.event == "refused":
            self._remarks.append(f"a tool call was left as text: {step.reason}")
        return text, Taken("", step=step) if step is not None and step.event else None

    def _scan(self, text: str) -> tuple[str, StopHit | None]:
        """What may be shown, and whether a stop string ends the answer. Reasoning has no stops."""
        if not self._stops:
            return self._scanner.push(text)
        self._split.push(text)
        hidden = self._split.hidden_chars
        return self._scanner.push(text, hidden if hidden is None else hidden - self._said)

    def _closed(self, step: GuardStep) -> None:
        self._add(step.calls)
        self._closed_at = self.pos

    def _add(self, calls: Sequence[ParsedCall]) -> None:
        self.calls.extend(calls)
        self._remarks += [f"tool call `{c.name}`: {note}" for c in calls for note in c.notes]

    def _take_after_call(self, text: str, step: GuardStep) -> tuple[str, Taken | None]:
        """Another call may follow; any other text means that the reply ended with the call."""
        if step.bad_pos is not None:  # the next call begins wrong: that token is taken back
            return "", Taken("", step=step)
        self._after_call += text
        if step.event in ("open", "closed"):  # one token may do both
            shown, self._after_call, self._closed_at = self._after_call, "", None
            if step.event == "closed":
                self._closed(step)
            return shown, Taken("", step=step)
        if step.event is None and not self._after_call.strip():
            return "", None
        return "", Taken("", keep=self._closed_at, reason="tool")

    def end(self, token: int) -> Taken:
        """A stop token comes next (it is not committed): does a call forbid or complete it?"""
        if self._closed_at is not None:
            return Taken("", keep=self._closed_at, reason="tool")
        step = None if self.guard is None else self.guard.feed(self.pos, token, "")
        if step is None or step.event is None:
            return Taken("", reason="stop")
        if step.event == "closed":
            self._closed(step)
            return Taken(step.emit, keep=self.pos, reason="tool")
        return Taken(step.emit, step=step)

    def rewind(self, pos: int) -> None:
        """Forget the tokens from `pos` on."""
        del self.tokens[pos - self.start :]
        self._detokenizer = Detokenizer(self._decode, [*self._before, *self.tokens])
        self._regions = self._read_regions()
        self._scanner.forget(len(self.tokens))
        if self.guard is not None:
            self.guard.rewind(pos)

    def moved(self, pos: int) -> ReplyText:
        """The reply that goes on at `pos`: somebody took the session there between two events."""
        if self.guard is not None:
            raise StateError(
                "the session was moved while a reply with tools was written", "begin another one"
            )
        is_inside = self.start <= pos <= self.pos
        before = [*self._before, *self.tokens[: pos - self.start]] if is_inside else []
        return ReplyText(self._decode, pos, before, self._stops, think=self._think)

    def report(self) -> list[int]:
        """The tokens that nothing can take back any more and that no event had yet."""
        settled = self._scanner.settled
        if self.guard is not None:
            settled = min(settled, self.guard.settled - self.start)
        return self._report(settled if self._closed_at is None else self._closed_at - self.start)

    def _report(self, end: int) -> list[int]:
        new = self.tokens[self._reported : end]
        self._reported += len(new)
        return new

    def finish(self, reason: str) -> tuple[list[int], str, str, str]:
        """The end: tokens not reported yet, the text still held, the final reason, and a note.

        The loop stands at the reply's last token (or at the last call's, where `closed_at` says).
        """
        text, note = self._detokenizer.flush(), ""
        if self.guard is not None:
            end = self.guard.finish(reason)
            text, note = end.emit + text, end.reason
            if end.calls and reason in ("stop", "length"):
                self._add(end.calls)
                reason = "tool"
        tokens = self._report(len(self.tokens))
        note = "; ".join(dict.fromkeys([*self._remarks, *([note] if note else [])]))
        return tokens, "" if self._stopped else self._rest(text), reason, note

    def _rest(self, text: str) -> str:
        """What the scanner held back, and `text`, unless that completes a stop string."""
        shown, hit = self._scan(text)
        if hit is None:
            more, hit = self._scanner.push("")  # nothing hides what was held back to the end
            shown += more
        return shown if hit is not None else shown + self._scanner.flush()

    @property
    def closed_at(self) -> int | None:
        """Where the last tool call ended, if nothing but white space followed it."""
        return self._closed_at
