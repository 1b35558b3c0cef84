"""Several drafters as one: a copy from the text beats the head, the head fills in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4cli.drafters.drafter import Drafter

if TYPE_CHECKING:
    import mlx.core as mx

    from ds4cli.sampling import Sampler


class CombinedDrafter(Drafter):
    """Asks its parts in turn; free ones stand first. Only one of them may observe the target."""

    def __init__(self, *parts: Drafter):
        self._parts = parts
        self.name = "+".join(part.name for part in parts)
        self.is_free = all(part.is_free for part in parts)
        self.taps = next((part.taps for part in parts if part.taps), ())

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._parts

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """The first proposal that any part has."""
        return next(filter(None, (part.propose(tokens, n) for part in self._parts)), [])

    def observe(self, start: int, hidden: Sequence[mx.array]) -> None:
        for part in self._parts:
            if part.taps:
                part.observe(start, hidden)

    def rewind(self, pos: int) -> None:
        for part in self._parts:
            part.rewind(pos)

    def forget(self) -> None:
        for part in self._parts:
            part.forget()

    def use(self, sampler: Sampler) -> None:
        for part in self._parts:
            part.use(sampler)

    def fork(self) -> CombinedDrafter:
        return CombinedDrafter(*(part.fork() for part in self._parts))
