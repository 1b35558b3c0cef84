"""Markdown on a terminal while it streams: the open block is plain, a finished one is rendered.

A block is final when it closes (a blank line, the end of a fence), so it is replaced once and
scrolls away like any output; nothing redraws the screen.
"""

from __future__ import annotations

import re
import sys

from rich.cells import cell_len
from rich.markdown import Markdown

from ds4cli import terminal
from ds4cli.escapes import visible

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LIST = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])\s")
_HEADING = re.compile(r" {0,3}#{1,6}\s")


class BlockScanner:
    """Cuts streamed text into finished Markdown blocks. `open` is the block that goes on.

    A fence lasts to its closing fence, a table or a paragraph to a blank line, a list to the first
    line behind a blank one that is neither an item nor indented.
    """

    def __init__(self) -> None:
        self.open = ""
        self._scanned = 0  # characters of `open` in lines that were looked at
        self._fence = ""

    def push(self, text: str) -> list[str]:
        """The blocks that `text` finishes, each with its line ends."""
        self.open += text
        finished = []
        while (end := self.open.find("\n", self._scanned)) >= 0:
            finished += self._take_line(self.open[self._scanned : end + 1], end + 1)
        return finished

    def flush(self) -> list[str]:
        """What is open at the end, as a block."""
        block, self.open, self._scanned = self.open, "", 0
        return [block] if block.strip() else []

    def _take_line(self, line: str, end: int) -> list[str]:
        before = self.open[: self._scanned]
        if self._fence:
            return self._in_fence(line, end)
        if _goes_on_below_blank(before, line):
            self._scanned = end
            return []
        if before.endswith("\n\n") and before.strip():
            return [*self._cut(self._scanned), *self._take_line(line, len(line))]
        opening = _FENCE.match(line)
        if opening:
            finished = self._cut(self._scanned) if before.strip() else []
            self._fence, self._scanned = opening[1], len(line) if finished else end
            return finished
        self._scanned = end
        is_final = line.isspace() and before.strip() and not _LIST.match(before)
        return self._cut(end) if is_final or _HEADING.match(line) else []

    def _in_fence(self, line: str, end: int) -> list[str]:
        self._scanned = end
        closing = line.strip()
        if set(closing) == {self._fence[0]} and len(closing) >= len(self._fence):
            self._fence = ""
            return self._cut(end)
        return []

    def _cut(self, end: int) -> list[str]:
        block, self.open, self._scanned = self.open[:end], self.open[end:], 0
        return [block] if block.strip() else []


def _goes_on_below_blank(before: str, line: str) -> bool:
    """A list goes on behind a blank line with an item or with an indented line."""
    if not _LIST.match(before) or not before.endswith("\n\n"):
        return False
    return line.isspace() or line[0] in " \t" or bool(_LIST.match(line))


class MarkdownWriter(terminal.ReplyWriter):
    """Writes an answer to a terminal, each finished block rendered in place of its plain text."""

    def __init__(self, show_reasoning: bool) -> None:
        super().__init__(show_reasoning)
        self._scanner = BlockScanner()
        self._width = 0
        self._written_blocks = 0

    def prime(self, text: str) -> None:
        """Text that was shown already and that the reply goes on from."""
        self._scanner.push(visible(text))

    def answer(self, text: str) -> None:
        self._close_reasoning()
        text = visible(text)
        shown = self._scanner.open
        blocks = self._scanner.push(text)
        if blocks and self._erase(shown):
            for block in blocks:
                self._render(block)
            text = self._scanner.open
        self._write(text)

    def end(self) -> None:
        self._close_reasoning()
        shown = self._scanner.open
        blocks = self._scanner.flush()
        if blocks and self._erase(shown):
            self._render(blocks[0])
        elif shown and not shown.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._width = terminal.out.width
        sys.stdout.write(text)
        sys.stdout.flush()

    def _erase(self, shown: str) -> bool:
        """Take the open block's plain text off the screen, unless it wrapped otherwise or scrolled.

        What cannot be taken off stays as it is, plain."""
        rows = rows_of(shown, terminal.out.width)
        if shown and (terminal.out.width != self._width or rows > terminal.out.height):
            return False
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        sys.stdout.write(f"\r{up}\x1b[J" if shown else "")
        return True

    def _render(self, block: str) -> None:
        if self._written_blocks:
            sys.stdout.write("\n")
        self._written_blocks += 1
        with terminal.out.capture() as rendered:
            terminal.out.print(Markdown(block, hyperlinks=False))  # links show their target
        # Rich fills lines with spaces, which would come along when the text is copied.
        lines = [line.rstrip(" ") for line in rendered.get().strip("\n").split("\n")]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def rows_of(text: str, width: int) -> int:
    """Rows that `text` takes on a terminal, the one the cursor is left in included."""
    return sum(_rows_of_line(line.expandtabs(), width) for line in text.split("\n"))


def _rows_of_line(line: str, width: int) -> int:
    rows, column = 1, 0
    for cells in map(cell_len, line):
        if column + cells > width:  # a wide character wraps as a whole
            rows, column = rows + 1, 0
        column += cells
    return rows
