"""What a guard remembers after a token, and the tokens that it has not shown yet."""

from __future__ import annotations

from dataclasses import dataclass

from ds4cli.tools.formats import Format

Held = tuple[tuple[int, str], ...]  # (position, text) of tokens


@dataclass(frozen=True)
class State:
    """After a token. `held`: (pos, text) of tokens not shown yet, `at`: where that text begins;
    `begun`: whether the answer has any text, `called`: whether that is a call which turned out to
    be prose, `since`: where thoughts or code began.

    In a call, `held` are its first tokens up to the one that opened it, `before` is text of the
    first of them that stands before the marker and `marker` the marker's length.
    """

    mode: str = "text"  # "text" | "think" | "code" | "quote" | "call"
    at: int = 0
    held: Held = ()
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


def split(held: Held, at: int) -> tuple[str, Held]:
    """The text of the tokens that end at or before character `at`, and the other tokens."""
    shown = ""
    for i, (_, piece) in enumerate(held):
        if len(shown) + len(piece) > at:
            return shown, held[i:]
        shown += piece
    return shown, ()


def without(held: Held, n: int) -> Held:
    """`held` without its first `n` characters."""
    shown, rest = split(held, n)
    if not rest:
        return ()
    (pos, piece), n = rest[0], n - len(shown)
    return ((pos, piece[n:]), *rest[1:])
