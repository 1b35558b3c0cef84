"""What the command line asked of a chat, checked before anything is loaded."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ds4cli.chat import journal, shelf
from ds4cli.errors import UsageError
from ds4cli.settings import Settings, nearest

if TYPE_CHECKING:
    from ds4cli.tools import Tool


@dataclass(frozen=True)
class ChatRequest:
    """What the command line asked for, beyond settings.

    resume: continue the latest session. name: of the session, new or old. single: all of standard
    input is one message. colours: for replies on a terminal. yes_tools: what may run unasked.
    """

    resume: bool = False
    name: str | None = None
    with_cache: bool = False
    save: bool = True
    history: bool = True
    single: bool = False
    colours: bool = True
    drop_reasoning: bool = False
    yes_tools: tuple[str, ...] = ()
    quiet: bool = False

    def stored(self) -> Path | None:
        """The session file to go on from; None for a new chat."""
        if self.resume and self.name is None:
            return shelf.latest()
        path = shelf.path_of(self.name) if self.name is not None else None
        exists = path is not None and path.exists() and not journal.is_unbegun(path)
        if self.resume and not exists:
            raise UsageError(f"there is no session `{self.name}`", "leave out `--continue`")
        return path if exists else None


def settings_for(request: ChatRequest, settings: Settings, model_given: bool) -> Settings:
    """The settings to load with: a stored session's own model, unless another was asked for.

    UsageError for a session that cannot be read or written: before anything is loaded.
    """
    path = request.stored()
    if request.save and sys.stdin is not None and sys.stdin.isatty():
        shelf.private_folder("sessions")
    named = path or (request.name and shelf.path_of(request.name))
    if named and not shelf.is_writable(named):
        raise UsageError(
            f"cannot write session `{named}`: it is read-only", "set XDG_STATE_HOME to yours"
        )
    if path is None or model_given:
        return settings
    model = journal.read(path).header.get("model")
    return replace(settings, model=model) if isinstance(model, str) else settings


def check_input() -> None:
    """UsageError if no message can ever come."""
    if sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    if not sys.stdin.isatty() and _is_at_end(sys.stdin):
        raise UsageError(
            "standard input is empty", "give one message a line, or all as one with `--single`"
        )


def _is_at_end(stream: TextIO) -> bool:
    """Whether there is nothing in a pipe or file, and never will be. Waits for nothing."""
    try:
        buffer: Any = stream.buffer  # the stubs do not say that it is a buffered one
        ready, _, _ = select.select([stream], [], [], 0)
        return bool(ready) and not buffer.peek(1)
    except (OSError, ValueError):  # not a file that can be asked
        return False


def unasked(names: Sequence[str], tools: Sequence[Tool]) -> tuple[str, ...]:
    """The tools that may run unasked, from names or comma lists of names.

    UsageError for a name that is not declared, or whose tool has no command.
    """
    chosen = tuple(name.strip() for text in names for name in text.split(",") if name.strip())
    runnable = {tool.name: tool.command is not None for tool in tools}
    for name in chosen:
        if name not in runnable:
            hint = nearest(name, runnable) or "it must be in the file of `--tools`"
            raise UsageError(f"`--yes-tools`: no tool `{name}` is declared", hint)
        if not runnable[name]:
            with_command = [other for other, has_command in runnable.items() if has_command]
            hint = nearest(name, with_command) or "give it a `command` in the tools file"
            raise UsageError(f"`--yes-tools`: the tool `{name}` has no command", hint)
    return chosen
