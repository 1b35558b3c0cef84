"""What the syntax of a call leaves no choice about, as guesses.

A second matcher follows the open call, of a stricter grammar: white space, quotes and the order of
keys are those that the model's own template draws. Where only one text can follow there, it is
guessed. A model that writes otherwise costs a guess: the strict matcher has lost it then, until the
next of a few layouts fits all that was written, or the next call begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import regex

from ds4cli.tools.detect import ARGUMENTS, PROBE
from ds4cli.tools.formats import Format, Tagged

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ds4cli.tools.grammar import Grammar

FIRST, SECOND = ARGUMENTS  # the names of the probe's arguments
_SPACES = r"[ \t\r\n]{0,4}"


@dataclass(frozen=True)
class Layout:
    """White space where a call has any: around `,` and `:`, behind the start marker, between calls
    and in front of the end marker, in front of tags, inside elements, between an element's tags.
    in_order: keys stand in the order of their schema.
    """

    comma: tuple[str, str] = ("", " ")
    colon: tuple[str, str] = ("", " ")
    lead: str = ""
    gap: str = ""
    tag: str = ""
    pad: str = ""
    between: str = ""
    in_order: bool = True

    @classmethod
    def of(cls, fmt: Format, drawn: str) -> Layout:
        """How a template lays out the probe call."""
        value = ARGUMENTS[FIRST]
        comma = _spaces(rf"{value}\S{{0,12}}?(\s*),(\s*)", drawn, cls.comma)
        colon = _spaces(rf"{FIRST}[\"']?(\s*):(\s*)", drawn, cls.colon)
        lead = _spaces(rf"{regex.escape(fmt.start)}(\s*)()", drawn)[0] if fmt.start else ""
        gap = _spaces(rf"(\s*)(){regex.escape(fmt.end)}", drawn)[0] if fmt.end else ""
        tag = pad = between = ""
        if isinstance(fmt.style, Tagged):
            tag = _spaces(rf"(\s*)(){regex.escape(fmt.style.key_open + SECOND)}", drawn)[0]
            pad = _spaces(rf">(\s*)(){value}", drawn)[0]
            between = _spaces(rf"{FIRST}</\w+>(\s*)()<", drawn)[0]
        return cls(comma, colon, lead, gap, tag, pad, between)

    def applied(self, lark: str) -> str:
        """A grammar with this white space in place of any."""
        from ds4cli.tools.lark import ANY_TEXT
        from ds4cli.tools.values import SPACE, quoted

        pairs = (
            ('WS? "," WS?', quoted(",".join(self.comma))),
            ('WS? ":" WS?', quoted(":".join(self.colon))),
            ("WS?", quoted(self.pad)),
            ("GAP?", quoted(self.gap)),
            ("LEAD?", quoted(self.lead)),
            (f"({SPACE})?", _escaped(self.tag)),
            (_SPACES, _escaped(self.between)),
            (ANY_TEXT, f"{_escaped(self.pad)}{ANY_TEXT}"),
        )
        for any_space, exact in pairs:
            lark = lark.replace(any_space, exact)
        return lark.replace(" // ", " ")


def layouts(fmt: Format, drawn: str) -> list[Layout]:
    """The template's own layout first, then what models fall into."""
    own = Layout.of(fmt, drawn)
    compact = Layout(("", ""), ("", ""), own.lead, own.gap, own.tag, own.pad, own.between)
    return list(dict.fromkeys([own, compact]))


class Forced:
    """Follows one call; `lead` spells its first token from the marker on."""

    def __init__(self, grammar: Grammar, lead: Sequence[int]) -> None:
        self._grammar, self._lead = grammar, list(lead)
        self._layout = 0
        self._matcher = self._fresh()
        self._taken = 0

    def _fresh(self) -> LLMatcher | None:
        """The matcher of the present layout; None where there are no more."""
        return self._grammar.strict(self._layout)

    def after(self, ids: Sequence[int], ahead: Sequence[int]) -> list[int]:
        """What must follow `ahead`, which follows the tokens `ids` of the call."""
        if not self._follow([*self._lead, *ids[1:]]):
            return []
        matcher, n = self._matcher, len(ahead)
        assert matcher is not None, "one has followed"
        taken = matcher.try_consume_tokens(list(ahead))
        forced = matcher.compute_ff_tokens() if taken == n else []
        matcher.rollback(taken)
        return forced

    def _follow(self, tokens: list[int]) -> bool:
        """Whether a matcher has consumed `tokens`; another layout is tried where one is lost."""
        while self._matcher is not None:
            if self._taken > len(tokens):
                self._matcher.rollback(self._taken - len(tokens))
                self._taken = len(tokens)
            new = tokens[self._taken :]
            taken = self._matcher.try_consume_tokens(new) if new else 0
            if taken == len(new):
                self._taken = len(tokens)
                return True
            self._layout += 1
            self._matcher, self._taken = self._fresh(), 0
        return False


def _spaces(pattern: str, drawn: str, default: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """The white space in a pattern's two groups, near the probe's name."""
    at = max(0, drawn.find(PROBE.name) - 80)
    match = regex.compile(pattern).search(drawn, at)
    return (match[1], match[2]) if match else default


def _escaped(space: str) -> str:
    return "".join(f"\\x{ord(c):02x}" for c in space)
