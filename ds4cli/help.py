"""`--help` as people read it: in groups, no type for a switch, words for other types, one long name
each.

It is plain text: what Typer prints it with in colours takes longer to load than all the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

WORDS = {"Path": "FILE", "path": "FILE", "int": "INT", "float": "NUMBER"}
TITLES = {"argument": "Arguments", "option": "Options"}
COMMANDS = "Commands"

Row = tuple[str, str]


class ReadableHelp:
    """Mixed into a command: its parameters in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all parameters."""
        params = self.get_params(ctx)  # type: ignore[attr-defined]
        rows = ((title(p, TITLES[p.param_type_name]), readable(p, ctx)) for p in params)
        write_groups(formatter, rows, TITLES.values())


class Command(ReadableHelp, TyperCommand):
    """A command with readable help."""


class Group(ReadableHelp, TyperGroup):
    """A group of commands with readable help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all parameters, and what each command does."""
        super().format_options(ctx, formatter)
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        rows = ((title(c, COMMANDS), (c.name or "", c.help or "")) for c in commands)
        write_groups(formatter, rows)


def title(part: Any, default: str) -> str:
    """The group that a parameter or command stands in."""
    return getattr(part, "rich_help_panel", None) or default


def write_groups(
    formatter: Any, rows: Iterable[tuple[str, Row]], first: Iterable[str] = ()
) -> None:
    """Write rows under their titles: those of `first`, then others as they come."""
    groups: dict[str, list[Row]] = {name: [] for name in first}
    for name, row in rows:
        groups.setdefault(name, []).append(row)
    for name, members in groups.items():
        if members:
            with formatter.section(name):
                formatter.write_dl(members)


def readable(param: Any, ctx: Any) -> Row:
    """A parameter's names and text; further long names go behind its text."""
    shown = copy.copy(param)
    if param.param_type_name == "argument":
        shown.display_type_rich = lambda ctx: ""
    elif not param.is_flag and param.metavar is None:
        kind = param.display_type(ctx) or ""
        shown.metavar = next((word for name, word in WORDS.items() if name in kind), "TEXT")
    long = [name for name in param.opts if name.startswith("--")]
    if len(long) > 1:
        shown.opts = [name for name in param.opts if name not in long[1:]]
        shown.help = f"{param.help} Also {', '.join(long[1:])}."
    return shown.get_help_record(ctx)
