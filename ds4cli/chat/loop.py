"""The course of a chat: a message or a command, until the user leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds4cli import signals, terminal
from ds4cli.chat import commands, prompt, shelf
from ds4cli.chat.console import Chat
from ds4cli.chat.request import ChatRequest
from ds4cli.errors import DS4Error
from ds4cli.settings import Settings

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.tools import Tool


def run(
    engine: Engine, request: ChatRequest, settings: Settings, tools: Sequence[Tool] = ()
) -> int:
    """Talk until the user leaves. Returns the exit code."""
    chat = Chat(engine, request, settings, tools)
    chat.reader = make_reader(chat)
    try:
        with signals.interrupts_raised(), signals.hinting(chat.kept_hint), chat.reader:
            chat.begin()
            talk(chat)
    except prompt.Leave:
        return terminal.EXIT_INTERRUPTED
    finally:
        chat.end()
    return 1 if chat.failures and not chat.reader.is_interactive else 0


def make_reader(chat: Chat) -> Any:
    """The reader that suits standard input."""
    request = chat.request
    if not sys.stdin.isatty():
        return prompt.PipeReader(sys.stdin, request.single)
    if terminal.err().is_dumb_terminal or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return prompt.PlainReader(sys.stdin)
    history = None
    if request.history:
        history = prompt.HistoryFile(shelf.private_folder() / "history.jsonl")
    return prompt.TerminalReader(history, lambda text: commands.complete(chat, text))


def talk(chat: Chat) -> None:
    """Messages and commands until the end of input."""
    while not chat.is_over:
        try:
            text = chat.reader.read(waiting(chat))
        except EOFError:
            return
        take(chat, text)


def waiting(chat: Chat) -> str:
    """The message that comes back into the line; what was typed meanwhile is no part of it, and
    comes first."""
    if chat.draft and chat.reader.has_keys:
        chat.note("what you typed meanwhile comes first; your message waits for the next prompt")
        return ""
    draft, chat.draft = chat.draft, ""
    return draft


def take(chat: Chat, text: str) -> None:
    """One message or command; a failure is printed, and the chat goes on."""
    try:
        _take(chat, text)
    except DS4Error as error:
        chat.fail(error.message, error.hint)
    except RuntimeError as error:  # what MLX raises, out of memory for one
        chat.fail(f"the model failed: {error}", "the conversation is as it was")
    if chat.conversation.unsaved is not None:
        chat.fail(chat.conversation.unsaved.message, "what was said since is not on disk yet")


def _take(chat: Chat, text: str) -> None:
    chat.calls.is_new = False
    if commands.is_command(text):
        commands.run(chat, text)
    elif text.strip():
        chat.send(text[1:] if text.startswith("//") else text)
    chat.calls.run_unasked()
