"""How a template lays out a call, for guesses: the white space of the probe call in place of any.

A grammar with one layout leaves one text wherever the model has no choice of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import regex

from ds4cli.tools.detect import ARGUMENTS, PROBE
from ds4cli.tools.formats import Format, Named, Style, Tagged

FIRST, SECOND = ARGUMENTS  # the names of the probe's arguments
_ANY_SPACES = regex.compile(r"\[ \\t\\r\\n\]\{\d,\d\}")  # as the patterns of formats write it


@dataclass(frozen=True)
class Layout:
    """White space where a call has any: around `,` and `:`, behind the start marker, between calls
    and in front of the end marker, in front of tags, inside elements. within: the format's own
    patterns, each with what its places for white space hold.
    """

    comma: tuple[str, str] = ("", " ")
    colon: tuple[str, str] = ("", " ")
    lead: str = ""
    gap: str = ""
    tag: str = ""
    pad: str = ""
    within: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, fmt: Format, drawn: str) -> Layout:
        """How a template lays out the probe call."""
        value = ARGUMENTS[FIRST]
        drawn = drawn[max(0, drawn.find(PROBE.name) - 80) :]
        comma = _spaces(rf"{value}\S{{0,12}}?(\s*),(\s*)", drawn, cls.comma)
        colon = _spaces(rf"{FIRST}[\"']?(\s*):(\s*)", drawn, cls.colon)
        lead = _spaces(rf"{regex.escape(fmt.start)}(\s*)()", drawn)[0] if fmt.start else ""
        gap = _spaces(rf"(\s*)(){regex.escape(fmt.end)}", drawn)[0] if fmt.end else ""
        tag = pad = ""
        if isinstance(fmt.style, Tagged):
            tag = _spaces(rf"(\s*)(){regex.escape(fmt.style.key_open + SECOND)}", drawn)[0]
            pad = _spaces(rf">(\s*)(){value}", drawn)[0]
        elif isinstance(fmt.style, Named) and fmt.style.after:
            tag = _spaces(rf"(\s*)(){regex.escape(fmt.style.after)}", drawn)[0]
        return cls(comma, colon, lead, gap, tag, pad, tuple(_within(fmt.style, tag, drawn)))

    def applied(self, lark: str) -> str:
        """A grammar with this white space in place of any."""
        from ds4cli.tools.lark import ANY_TEXT, slashed
        from ds4cli.tools.values import SPACE, escaped, quoted

        pairs = (
            ('WS? "," WS?', quoted(",".join(self.comma))),
            ('WS? ":" WS?', quoted(":".join(self.colon))),
            ("WS?", quoted(self.pad)),
            ("GAP?", quoted(self.gap)),
            ("LEAD?", quoted(self.lead)),
            (f"({SPACE})?", escaped(self.tag)),
            *((slashed(p), slashed(_filled(p, map(escaped, found)))) for p, found in self.within),
            (ANY_TEXT, f"{escaped(self.pad)}{ANY_TEXT}"),
        )
        for any_space, exact in pairs:
            lark = lark.replace(any_space, exact)
        return lark.replace(" // ", " ")


def layouts(fmt: Format, drawn: str) -> list[Layout]:
    """The template's own layout first, then what models fall into."""
    own = Layout.of(fmt, drawn)
    return list(dict.fromkeys([own, replace(own, comma=("", ""), colon=("", ""))]))


def _within(style: Style, tag: str, drawn: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The patterns of a style that allow white space and are in the probe call, longest first."""
    around = []
    if isinstance(style, Tagged):
        around = [
            (style.key_open + FIRST, style.key_close, ""),
            (PROBE.name, style.name_close, tag + style.key_open),
        ]
    elif isinstance(style, Named):
        around = [(PROBE.name, style.between, "")]
    for before, pattern, behind in around:
        groups = (f"(?P<space{i}>{s})" for i, s in enumerate(_ANY_SPACES.findall(pattern)))
        one = regex.escape(before) + _filled(pattern, groups) + regex.escape(behind)
        if (match := regex.search(one, drawn)) and match.groupdict():
            yield pattern, tuple(match.groupdict().values())


def _filled(pattern: str, spaces: Iterable[str]) -> str:
    """A pattern with these in place of any white space, one after the other."""
    left = iter(spaces)
    return _ANY_SPACES.sub(lambda _: next(left), pattern)


def _spaces(pattern: str, drawn: str, default: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """The white space in a pattern's two groups."""
    match = regex.search(pattern, drawn)
    return (match[1], match[2]) if match else default
