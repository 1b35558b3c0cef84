"""A reply on a terminal: the Markdown that the model wrote, coloured while it streams.

Nothing is left out, moved, joined or wrapped: the texts of all pieces, one after the other, are the
reply. Prose is shown at once; a line of a code block when it is complete, because its colours
depend on its end. Nothing that was shown is drawn again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ds4cli import terminal
from ds4cli.escapes import visible

if TYPE_CHECKING:
    from pygments.lexer import Lexer

Piece = tuple[str, str]  # a text and its Rich style

_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*([\w+#.-]*)")
_HEADING = re.compile(r" {0,3}#{1,6}(?=\s|$)")
_MARKER = re.compile(r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+|>\s?)+")
# The line may still become a fence, a heading or an item of a list.
_UNDECIDED = re.compile(r"\s*(#{0,6}|`{1,2}|`{3,}[^`]*|~{1,2}|~{3,}.*|[-*+>]|\d{0,9}[.)]?)")
_INLINE = re.compile(r"\\.|`+|\*+|_+|[^\\`*_]+|\\", re.DOTALL)
_MARKS = "\\`*_"  # how far they reach shows with the next character

_EMPHASIS = {
    "*": "italic", "_": "italic", "**": "bold", "__": "bold", "***": "bold italic",
}  # fmt: skip
CODE = "cyan"
CONTEXT_LINES = 40  # of a code block are read again for the colours of the next line
# The terminal's own colours, which suit a dark and a light background.
_TOKEN_STYLES = (
    ("Token.Comment", "dim"),
    ("Token.Keyword", "magenta"),
    ("Token.Literal.String", "green"),
    ("Token.Literal.Number", "cyan"),
    ("Token.Name.Function", "bold"),
    ("Token.Name.Class", "bold"),
    ("Token.Generic.Deleted", "red"),
    ("Token.Generic.Inserted", "green"),
)


class Styler:
    """Gives streamed Markdown its styles. The texts of the pieces make up what was pushed."""

    def __init__(self) -> None:
        self._line = ""  # the current one, and how much of it was given out
        self._given = 0
        self._prose = _Prose()
        self._code: _Code | None = None

    def push(self, text: str) -> list[Piece]:
        """What can be shown after `text` has come, too."""
        pieces = []
        *ended, rest = text.split("\n")
        for part in ended:
            self._line += part
            pieces += [*self._rest_of_line(), ("\n", "")]
            self._end_line()
        self._line += rest
        if self._code is None and (self._given or not _UNDECIDED.fullmatch(self._line)):
            pieces += self._give(len(self._line.rstrip(_MARKS)))
        return _without_empty(pieces)

    def flush(self) -> list[Piece]:
        """What was held back. More may still follow."""
        return _without_empty(self._rest_of_line())

    def _rest_of_line(self) -> list[Piece]:
        if self._code is None:
            return self._give(len(self._line))
        begin, self._given = self._given, len(self._line)
        return _from(begin, self._code.styled(self._line))

    def _give(self, end: int) -> list[Piece]:
        """The line of prose up to `end`."""
        if end <= self._given:
            return []
        if _FENCE.match(self._line):
            begin, self._given = self._given, len(self._line)
            return [(self._line[begin:], "dim")]
        pieces = [] if self._given else self._prose.opening(self._line[:end])
        begin = self._given + sum(len(text) for text, _ in pieces)
        self._given = end
        return [*pieces, *self._prose.inline(self._line[begin:end])]

    def _end_line(self) -> None:
        line, self._line, self._given, self._prose = self._line, "", 0, _Prose()
        if self._code is None:
            fence = _FENCE.match(line)
            self._code = _Code(fence[1], fence[2]) if fence else None
        elif self._code.is_closed_by(line):
            self._code = None
        else:
            self._code.add(line)


class _Prose:
    """The styles in one line of prose: a marker holds to its counterpart or the line's end."""

    def __init__(self) -> None:
        self._base = ""
        self._code = ""  # the backticks that close the code span
        self._open: dict[str, str] = {}  # "*", "**", "_" and so on, with their styles
        self._last = " "

    def opening(self, line: str) -> list[Piece]:
        """What stands at the line's beginning and is no text."""
        if found := _HEADING.match(line):
            self._base = "bold"
            return [(found[0], "bold dim")]
        found = _MARKER.match(line)
        return [(found[0], "cyan")] if found else []

    def inline(self, text: str) -> Iterator[Piece]:
        """The pieces of `text`, which goes on where the last one ended."""
        for found in _INLINE.finditer(text):
            word, after = found[0], text[found.end() : found.end() + 1]
            yield word, self._style_of(word, after)
            self._last = word[-1]

    def _style_of(self, word: str, after: str) -> str:
        if word[0] == "`" and self._code in ("", word):
            self._code = "" if self._code else word
            return CODE
        if self._code:
            return CODE
        if word in _EMPHASIS:
            before, is_closing = self._styles(), self._open.pop(word, None)
            if is_closing is None and self._may_open(after):
                self._open[word] = _EMPHASIS[word]
            return before if is_closing else self._styles()
        return self._styles()

    def _may_open(self, after: str) -> bool:
        """`2*3` and `a_name` hold no emphasis, nor does a star with a space behind it."""
        return not self._last.isalnum() and bool(after.strip())

    def _styles(self) -> str:
        return " ".join(filter(None, (self._base, *self._open.values())))


class _Code:
    """An open code block, from the line behind its fence on."""

    def __init__(self, fence: str, language: str):
        self._fence = fence
        self._lines: list[str] = []
        self._lexer = _lexer(language) if language else None

    def is_closed_by(self, line: str) -> bool:
        closing = line.strip()
        return set(closing) == {self._fence[0]} and len(closing) >= len(self._fence)

    def add(self, line: str) -> None:
        """A line is complete."""
        self._lines = [*self._lines[1 - CONTEXT_LINES :], line]

    def styled(self, line: str) -> list[Piece]:
        """One line of the block, or the line that closes it."""
        if self.is_closed_by(line):
            return [(line, "dim")]
        if self._lexer is None:
            return [(line, CODE)]
        before = "".join(f"{earlier}\n" for earlier in self._lines)
        return _from(len(before), _tokens(self._lexer, before + line))


def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


def _tokens(lexer: Lexer, text: str) -> Iterator[Piece]:
    """All of `text`, whatever the lexer makes of it."""
    at = 0
    for begin, kind, value in lexer.get_tokens_unprocessed(text):
        if begin < at:
            continue
        yield text[at:begin], ""
        at = begin + len(value)
        yield text[begin:at], _token_style(str(kind))
    yield text[at:], ""


def _token_style(kind: str) -> str:
    return next((style for prefix, style in _TOKEN_STYLES if kind.startswith(prefix)), "")


def _from(begin: int, pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces without their first `begin` characters."""
    rest, at = [], 0
    for text, style in pieces:
        at += len(text)
        rest.append((text[max(0, len(text) - max(0, at - begin)) :], style))
    return _without_empty(rest)


def _without_empty(pieces: Iterable[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece[0]]


class MarkdownWriter(terminal.ReplyWriter):
    """Writes an answer to a terminal, in colours."""

    def __init__(self, show_reasoning: bool) -> None:
        super().__init__(show_reasoning)
        self._styler = Styler()
        self._last = "\n"

    def prime(self, text: str) -> None:
        """Text that was shown already and that the reply goes on from."""
        self._styler.push(visible(text))
        self._styler.flush()

    def answer(self, text: str) -> None:
        self._close_reasoning()
        self._write(self._styler.push(visible(text)))

    def end(self) -> None:
        self._close_reasoning()
        self._write(self._styler.flush())
        if self._last != "\n":
            self._write([("\n", "")])

    def _write(self, pieces: list[Piece]) -> None:
        if pieces:
            self._last = pieces[-1][0][-1]
            terminal.write_styled(pieces)
