"""What every drafter can do. A wrong guess costs time, never text."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from ds4cli.sampling import Sampler


class Drafter:
    """Guesses nothing: the drafter `none`, and the base of all others.

    is_free: a proposal costs next to nothing, so it may be asked for and then not be fed.
    confidence: how sure the last proposal was; its scale is the drafter's own, 0 means no idea.
    taps: layers of the target whose residual stream it observes.
    assumed_chance, worth_trying: how likely its first guess is kept, and how many guesses are worth
    trying, before anything was seen. drafts_at_once: a long draft takes no longer than a short one.
    max_drafts: the most guesses it ever gives. row_price: what one more row of a call costs, in
    tokens, if a policy knows it: a guess that is surely less likely need not be made.
    """

    name = "none"
    is_free = True
    confidence = 0
    assumed_chance = 0.6
    worth_trying = 2
    drafts_at_once = False
    max_drafts: float = math.inf
    row_price = 0.3
    taps: tuple[int, ...] = ()

    @property
    def probed(self) -> int:
        """Guesses that show whether it is any good now, where each takes time."""
        return self.worth_trying if self.drafts_at_once else 1

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that this one is made of, free ones first."""
        return (self,)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most n guesses for what follows `tokens`; [] = no idea."""
        return []

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether what it has seen is of this text, so that it can guess what follows; what is of
        another one is given up."""
        return True

    def together(self) -> Together:
        """What asks drafters of this kind, of several sessions, at once."""
        return Together()

    def observe(self, start: int, hidden: Sequence[mx.array]) -> None:
        """The target has read, and keeps, the rows from position `start` on.

        hidden: the residual stream after each of `taps`, (n, H), maybe lazy. Rows given before are
        given again when the session reads tokens again. Only called if `taps` names a layer.
        """

    def rewind(self, pos: int) -> None:
        """The session stands at `pos` now, mostly lower than before, or higher again (a redo).

        From there on tokens may differ from what was seen.
        """

    def forget(self) -> None:
        """An error or an interrupt cut a call of this drafter short: begin anew, knowing nothing of
        the text. For drafters whose own books could be left half written."""

    def use(self, sampler: Sampler) -> None:
        """The session samples otherwise from here on."""

    def fork(self) -> Drafter:
        """An independent twin, for a branch of the session."""
        return copy.copy(self)


class Together:
    """Asks drafters of one kind, of several sessions: one after the other, unless a kind knows
    better. What it holds it gives back in `close`."""

    def propose(
        self, parts: Sequence[Any], texts: Sequence[Sequence[int]], n: int
    ) -> list[list[int]]:
        """At most n guesses of each of `parts` for what follows its text, as `Drafter.propose`."""
        found: list[list[int]] = [[] for _ in parts]
        able = [i for i, part in enumerate(parts) if n > 0 and part.knows(texts[i])]
        if able:
            asked = self.ask([parts[i] for i in able], [texts[i] for i in able], n)
            for i, guesses in zip(able, asked, strict=True):
                found[i] = guesses
        return found

    def ask(self, parts: Sequence[Any], texts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        """The same of parts that know their texts, and one guess or more."""
        return [part.propose(text, n) for part, text in zip(parts, texts, strict=True)]

    def close(self) -> None:
        """Nobody is asked any more."""
