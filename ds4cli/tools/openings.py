"""Where calls, thoughts and code begin and end in a reply's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import regex

from ds4cli.tools.formats import Format

FENCE = "```"
SECTIONS = {"think": "a think section", "code": "a code block", "quote": "a quotation"}


class Openings:
    """What matters in text outside calls, for one format and tools of these names; code and
    quotations hold examples of calls. think: the markers of thoughts, "" where there are none."""

    def __init__(self, fmt: Format, names: Sequence[str], think: tuple[str, str]) -> None:
        self._ends = {"think": think[1], "code": FENCE, "quote": "`"}
        self._patterns = {begins: _pattern(fmt, names, think, begins) for begins in (True, False)}
        self._hints = {mode: _hint(end) for mode, end in self._ends.items()}
        self._hints["text"] = _hint(*fmt.beginnings, think[0], "`")

    def may_matter(self, mode: str, text: str) -> bool:
        """Whether anything in `text` may belong to a marker. Cheap: asked for every token."""
        return self._hints[mode](text) is not None

    def find(self, text: str, begins: bool) -> regex.Match[str] | None:
        """What begins first; `partial` where more text decides. begins: the answer begins here."""
        return self._patterns[begins].search(text, partial=True)

    def find_end(self, text: str, mode: str) -> regex.Match[str] | None:
        """What ends a section, likewise."""
        return regex.search(regex.escape(self._ends[mode]), text, partial=True)

    def calls(self, text: str) -> Iterator[regex.Match[str]]:
        """Where calls begin."""
        return (match for match in self._patterns[False].finditer(text) if is_call(match))


def is_call(match: regex.Match[str]) -> bool:
    return match.lastgroup in ("start", "kept")


def place(match: regex.Match[str]) -> tuple[int, int]:
    """Where a call begins in its text, and how long its marker is."""
    groups = match.groupdict()
    if groups.get("start") is not None:
        return match.start("start"), len(groups["start"])
    return match.start("kept"), 0


def _pattern(
    fmt: Format, names: Sequence[str], think: tuple[str, str], begins: bool
) -> regex.Pattern[str]:
    ways = [fmt.opening(names, begins), f"(?P<code>{FENCE})"]
    if marks := "|".join(regex.escape(m) for m in fmt.beginnings if m):
        ways.append(f"(?P<quote>`(?:{marks}))")
    if think[0]:
        ways.append(f"(?P<think>{regex.escape(think[0])})")
    return regex.compile("|".join(ways))


def _hint(*markers: str | None) -> Callable[[str], Any]:
    """Searches a text for anything that a marker may begin with: its first two characters, or the
    first one at the text's end."""
    beginnings = [rf"{regex.escape(m[0])}(?:{regex.escape(m[1:2])}|\Z)" for m in markers if m]
    return regex.compile("|".join(beginnings) or r"(?!)").search
