"""Guesses for the lanes of a group: whose are fed, and how many, in one call for all.

A lane that knows its next token offers what it can guess behind it, and rows are shared out among
the offers (`drafters/sharing.py`). What calls cost is learnt by timing the rounds that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds4cli.drafters.sharing import RoundCosts, is_worth_stopping, share

if TYPE_CHECKING:
    from ds4cli.engine.group import Lane
    from ds4cli.engine.session import Session


class Guesses:
    """What is fed behind the next tokens. lanes: those of the group, as they come and go."""

    def __init__(self, lanes: Sequence[Lane], clock: Callable[[], float]):
        self._lanes = lanes
        self._clock = clock
        self._costs = RoundCosts()
        # When the last call was made, its lanes, rows, and lengths of blocks.
        self._round: tuple[float, int, int, int] | None = None

    # -- what rounds cost -------------------------------------------------------------------------

    def begin(self, due: Sequence[Lane]) -> None:
        """A round begins: the one before, if nothing else was done in it, says what rounds cost."""
        now = self._clock()
        if self._round is not None:
            begin, lanes, rows, lengths = self._round
            self._costs.observe(lanes, rows, lengths, now - begin)
        sizes = [lane.size for lane in due]
        is_whole = len(due) == len(self._lanes)
        self._round = (now, len(due), sum(sizes), len({*sizes})) if is_whole else None

    def interrupt(self) -> None:
        """More is done in this round than a call: it says nothing of what rounds cost."""
        self._round = None

    # -- what is fed ------------------------------------------------------------------------------

    def make(self, lanes: Sequence[Lane]) -> None:
        """Give lanes that know their next token the guesses that pay."""
        offers: list[tuple[Lane, list[int], list[float]]] = []
        for lane in lanes:
            try:
                is_shared = self._shares_out(lane.session)
                drafts, chances = lane.offer(is_shared)
            except Exception as error:
                lane.fail(error)
                continue
            if not is_shared:
                lane.guess(drafts)
            elif drafts:
                offers.append((lane, drafts, chances))
        if not offers or not self._costs.plain(len(self._lanes)):
            return
        fed = share(self._costs, len(self._lanes), [chances for *_, chances in offers])
        if not any(fed):
            self._costs.forget()
        for (lane, drafts, _), k in zip(offers, fed, strict=True):
            lane.session.stats.parked += not k
            lane.guess(drafts[:k])

    def _shares_out(self, session: Session) -> bool:
        """Whether it is decided here, not by the session, if guesses pay."""
        policy = session.policy
        is_shared = len(self._lanes) > 1 and session.is_drafting
        return is_shared and policy.chooses and policy.runs_ahead

    def wants(self, session: Session, token: int, end: int | None) -> bool:
        """Whether a lane is to stop running ahead, to feed guesses behind `token`."""
        if not self._shares_out(session):
            return session.wants(token, end)
        left = None if end is None else end - session.pos
        if not self._costs.plain(len(self._lanes)):
            return False
        _, chances = session.offer(token, left)
        return is_worth_stopping(self._costs, len(self._lanes), chances)
