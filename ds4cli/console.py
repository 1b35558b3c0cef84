"""Rich's console, of which nothing that is printed can steer the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ds4cli.escapes import visible

PIPE_COLUMNS = 10_000


class SafeConsole(Console):
    """A console whose texts cannot steer the terminal: no markup, and hidden characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    @property
    def options(self) -> ConsoleOptions:
        """Those of the screen; in a pipe a row of a table is one line."""
        found = super().options
        return found if self.file.isatty() else found.update_width(PIPE_COLUMNS)

    def print(self, *objects: Any, crop: bool = True, **options: Any) -> None:
        """Print; only a screen has an edge."""
        super().print(*objects, crop=crop and self.file.isatty(), **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escaped before it is measured, so that tables stay in line."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """What came as Rich's own objects is escaped here; only Rich's own controls pass."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
