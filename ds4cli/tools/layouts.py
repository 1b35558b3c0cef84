"""How a template lays out a call, for guesses: the white space of the probe call in place of any.

A grammar with one layout leaves one text wherever the model has no choice of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from ds4cli.tools.detect import ARGUMENTS, PROBE
from ds4cli.tools.formats import Format, Tagged

FIRST, SECOND = ARGUMENTS  # the names of the probe's arguments
_SPACES = r"[ \t\r\n]{0,4}"


@dataclass(frozen=True)
class Layout:
    """White space where a call has any: around `,` and `:`, behind the start marker, between calls
    and in front of the end marker, in front of tags, inside elements, between an element's tags.
    """

    comma: tuple[str, str] = ("", " ")
    colon: tuple[str, str] = ("", " ")
    lead: str = ""
    gap: str = ""
    tag: str = ""
    pad: str = ""
    between: str = ""

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
        from ds4cli.tools.values import SPACE, escaped, quoted

        pairs = (
            ('WS? "," WS?', quoted(",".join(self.comma))),
            ('WS? ":" WS?', quoted(":".join(self.colon))),
            ("WS?", quoted(self.pad)),
            ("GAP?", quoted(self.gap)),
            ("LEAD?", quoted(self.lead)),
            (f"({SPACE})?", escaped(self.tag)),
            (_SPACES, escaped(self.between)),
            (ANY_TEXT, f"{escaped(self.pad)}{ANY_TEXT}"),
        )
        for any_space, exact in pairs:
            lark = lark.replace(any_space, exact)
        return lark.replace(" // ", " ")


def layouts(fmt: Format, drawn: str) -> list[Layout]:
    """The template's own layout first, then what models fall into."""
    own = Layout.of(fmt, drawn)
    compact = Layout(("", ""), ("", ""), own.lead, own.gap, own.tag, own.pad, own.between)
    return list(dict.fromkeys([own, compact]))


def _spaces(pattern: str, drawn: str, default: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """The white space in a pattern's two groups, near the probe's name."""
    at = max(0, drawn.find(PROBE.name) - 80)
    match = regex.compile(pattern).search(drawn, at)
    return (match[1], match[2]) if match else default
