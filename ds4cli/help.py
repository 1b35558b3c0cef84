"""`--help` as people read it: no type for a switch, words for other types, one long name each."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand, TyperGroup

WORDS = {"Path": "FILE", "path": "FILE", "int": "INT", "float": "NUMBER"}


class ReadableHelp:
    """Mixed into a command: while help is printed its parameters are shown as `readable` has it."""

    _is_printing = False

    def format_help(self, *arguments: Any) -> None:
        """Print the help."""
        self._is_printing = True
        try:
            super().format_help(*arguments)  # type: ignore[misc]
        finally:
            self._is_printing = False

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, or what help shows of them."""
        params = super().get_params(ctx)  # type: ignore[misc]
        return [readable(param, ctx) for param in params] if self._is_printing else params


class Command(ReadableHelp, TyperCommand):
    """A command with readable help."""


class Group(ReadableHelp, TyperGroup):
    """A group of commands with readable help."""


def readable(param: Any, ctx: Any) -> Any:
    """A copy of a parameter for help; further long names go behind its text."""
    shown = copy.copy(param)
    if param.param_type_name == "argument":
        shown.display_type_rich = lambda ctx: ""
    elif param.is_flag:
        shown.metavar = ""
    elif param.metavar is None:
        kind = param.display_type(ctx) or ""
        shown.metavar = next((word for name, word in WORDS.items() if name in kind), "TEXT")
    long = [name for name in param.opts if name.startswith("--")]
    if len(long) > 1:
        shown.opts = [name for name in param.opts if name not in long[1:]]
        shown.help = f"{param.help} Also {', '.join(long[1:])}."
    return shown
