"""`--help` as people read it: in groups, no type for a switch, words for other types, one long name
each.

It is plain text: what Typer prints it with in colours takes longer to load than all the rest. What
commands do is said here, so that they need not be loaded for it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

WORDS = {"Path": "FILE", "path": "FILE", "int": "INT", "float": "NUMBER"}
TITLES = {"argument": "Arguments", "option": "Options"}
# What each command does.
COMMANDS = {
    "Commands": {
        "generate": "Answer one prompt, or a batch. Piped text comes first, then files, then the "
        "prompt.",
        "chat": "Talk in the terminal, and go back: /undo, /edit, /retry, /branch.",
        "rewind-bench": "Measure what going back costs on this model and machine, and prove that "
        "it is exact.",
    },
    "Looking around": {
        "models": "List the models on this machine: type, size, layers, tool calls, heads that "
        "fit.",
        "doctor": "Say what this machine gives: backend, BLAS, prices, versions, a tiny proof, "
        "what is slow.",
    },
}
TEXTS = {name: text for group in COMMANDS.values() for name, text in group.items()}


class ReadableHelp:
    """Mixed into a command: its parameters in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all parameters."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES.values()}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            title = getattr(param, "rich_help_panel", None) or TITLES[param.param_type_name]
            groups.setdefault(title, []).append(readable(param, ctx))
        write_groups(formatter, groups)


class Command(ReadableHelp, TyperCommand):
    """A command with readable help."""


class Group(ReadableHelp, TyperGroup):
    """A group of commands with readable help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all parameters, and what each command does."""
        super().format_options(ctx, formatter)
        write_groups(formatter, {title: group.items() for title, group in COMMANDS.items()})


def write_groups(formatter: Any, groups: Mapping[str, Collection[tuple[str, str]]]) -> None:
    """Write names and texts under their titles."""
    for title, rows in groups.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def readable(param: Any, ctx: Any) -> tuple[str, str]:
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
