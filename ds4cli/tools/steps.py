"""What a guard and the loop that feeds it say to each other.

Positions are the session's, tokens come in order, and the guard's state is a function
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
    instead(tokens, pick, n) what may follow `tokens`, which come next, in place of `pick`: counts
                             as "left"
    forced(tokens)           what must follow these in the open call, for guesses; the same
    is_open, opened          whether a call is open, and where it began
    settled                  tokens before this position cannot be taken back by a repair
    finish(reason)           the reply has ended: hands out what is held back, and what the end
                             completes; after "length" or "cancelled" `feed` may go on
    catch_up(...)            instead of `feed`: a reply that was written before
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ds4cli.tools.parse import ParsedCall

if TYPE_CHECKING:
    import numpy as np


class GuardStep(NamedTuple):  # one for every token: made faster than a dataclass
    """What one token did. `emit` is text to show now; see the module's docstring for `event`."""

    emit: str = ""
    event: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    opened: int | None = None
    bad_pos: int | None = None
    reason: str = ""


NOTHING = GuardStep()


class Instead(NamedTuple):
    """For a token that would be taken back. allowed: (size,) bool, what may stand there."""

    allowed: np.ndarray
    reason: str


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
