"""The slash commands. To add one, write a function here and decorate it with `command`."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ds4cli import settings, terminal
from ds4cli.chat import clipboard, editor, shelf
from ds4cli.chat.transcript import Line, Transcript, Turn
from ds4cli.errors import UsageError
from ds4cli.settings import FORM, OPTIONS, SAMPLING

if TYPE_CHECKING:
    from ds4cli.chat.console import Chat

# Settings that may change while a model is loaded.
SETTABLE = (
    *(name for name, option in OPTIONS.items() if option.panel in (SAMPLING, FORM)),
    "think",
    "hide_reasoning",
    "stats",
)


@dataclass(frozen=True)
class Command:
    """One slash command. completes: what Tab offers behind its name."""

    name: str
    usage: str
    help: str
    run: Callable[[Chat, str], None]
    aliases: tuple[str, ...] = ()
    completes: str = ""


COMMANDS: dict[str, Command] = {}


def command(
    usage: str, *aliases: str, completes: str = ""
) -> Callable[[Callable[[Chat, str], None]], Callable[[Chat, str], None]]:
    """Register a command. usage: its name and arguments; the docstring is its help."""

    def register(run: Callable[[Chat, str], None]) -> Callable[[Chat, str], None]:
        name = usage.split()[0]
        COMMANDS[name] = Command(name, usage, inspect.getdoc(run) or "", run, aliases, completes)
        return run

    return register


def find(name: str) -> Command | None:
    """A command by its name or an alias."""
    return COMMANDS.get(name) or next((c for c in COMMANDS.values() if name in c.aliases), None)


def is_command(text: str) -> bool:
    """Whether text is for us. `//x` is not, nor is pasted text that begins with a path."""
    if not text.startswith("/") or text.startswith("//"):
        return False
    return "\n" not in text.rstrip("\n") or find(_split(text)[0]) is not None


def run(chat: Chat, text: str) -> None:
    """Carry out one command line. UsageError for an unknown name."""
    name, argument = _split(text)
    found = find(name)
    if found is None:
        hint = settings.nearest(name, [f"/{known}" for known in COMMANDS]) or "see /help."
        raise UsageError(
            f"unknown command `/{name}`", f"{hint} To send this as a message, begin it with `//`."
        )
    found.run(chat, argument)


def _split(text: str) -> tuple[str, str]:
    name, *rest = text[1:].split(maxsplit=1)[:2] if text[1:].strip() else [""]
    return name, rest[0].strip() if rest else ""


def complete(chat: Chat, text: str) -> tuple[list[str], int]:
    """Candidates for Tab behind `text`, and how many characters of it they replace."""
    if not text.startswith("/") or "\n" in text:
        return [], 0
    name, space, argument = text[1:].partition(" ")
    if not space:
        return [f"/{n}" for n in sorted(COMMANDS) if n.startswith(name)], len(text)
    found = find(name)
    offers = _OFFERS.get(found.completes) if found else None
    words = offers(chat, argument) if offers else []
    return [word for word in words if word.startswith(argument)], len(argument)


def _paths(chat: Chat, argument: str) -> list[str]:
    folder, slash, _ = argument.rpartition("/")
    try:
        children = sorted(Path(os.path.expanduser(folder + slash or ".")).iterdir())
    except OSError:
        return []
    return [folder + slash + p.name + ("/" if p.is_dir() else "") for p in children]


_OFFERS: dict[str, Callable[[Any, str], list[str]]] = {
    "path": _paths,
    "turn": lambda chat, _: [str(i) for i in range(1, len(chat.line.turns) + 1)],
    "branch": lambda chat, _: list(chat.conversation.transcript.branches()),
    "session": lambda chat, _: shelf.names(),
    "setting": lambda chat, _: list(SETTABLE),
    "command": lambda chat, _: sorted(COMMANDS),
}


# -- arguments ------------------------------------------------------------------------------------


def _number(argument: str, default: int) -> int:
    if not argument:
        return default
    if not argument.isdecimal():
        raise UsageError(f"`{argument}` is not a number")
    return int(argument)


def _refuse(argument: str) -> None:
    if argument:
        raise UsageError(f"this command takes no `{argument}`", "see /help")


# -- going back -----------------------------------------------------------------------------------


@command("undo [n]")
def undo(chat: Chat, argument: str) -> None:
    """Take back the last n exchanges, your message with its reply. 1 by default."""
    line = chat.line.upto(chat.line.exchange(_number(argument, 1)) - 1)
    chat.move(lambda watch: chat.conversation.go_back(line, watch))


@command("redo")
def redo(chat: Chat, argument: str) -> None:
    """Undo the latest /undo, /rewind, /edit, /clear or /system."""
    _refuse(argument)
    chat.move(chat.conversation.redo)


@command("retry [turn]", "regen", completes="turn")
def retry(chat: Chat, argument: str) -> None:
    """Let the model write a reply again, the last one by default. Later turns are dropped."""
    number = _number(argument, len(chat.line.turns))
    if not chat.line.turns:
        raise UsageError("there is no reply to retry yet")
    if chat.settings.temp == 0:
        terminal.note("at temperature 0 the reply will be the same: /set temp 0.8, or /edit")
    before = chat.conversation.transcript.copy()
    with chat.watching() as watch, chat.reading(watch) as reading:
        report, attempt = chat.conversation.retry(number, reading)
    chat.print_move(report)
    chat.reply(attempt)
    if chat.settings.temp and chat.line.turns[-1].tokens in _replies(before, len(chat.line.turns)):
        terminal.note("the same text again: the model is that sure of it; /set temp 1.5, or /edit")
    if not chat.line.turns[-1].is_reply:
        chat.conversation.transcript = before
        chat.conversation.record()
        chat.note("stopped before the first word: the reply before it stays")


def _replies(transcript: Transcript, number: int) -> list[tuple[int, ...]]:
    """What turn `number` was, in every branch where it is a reply."""
    lines = [transcript.line, *transcript.branches().values()]
    turns = [line.turns[number - 1] for line in lines if len(line.turns) >= number]
    return [turn.tokens for turn in turns if turn.is_reply and turn.tokens]


@command("edit [turn] [text]", completes="turn")
def edit(chat: Chat, argument: str) -> None:
    """Change a turn in your editor, the last message by default; 0 is the system text.

    A changed message is sent again. A changed reply keeps its other words as they were sampled,
    and /continue goes on from there; text typed behind its number replaces all but its reasoning.
    Later turns are dropped; /redo brings them back.
    """
    first, _, text = argument.partition(" ")
    number = _number(first, chat.line.last("user"))
    if number == 0 and first:
        return system(chat, text or _edited(chat, chat.line.system or "") or "")
    turn = chat.line.turn(number)
    if turn.role == "tool":
        raise UsageError(
            "a tool's result cannot be edited", "/rewind to the call, and give another"
        )
    before, text = chat.line.upto(number - 1), text.strip()
    old = chat.conversation.raw_text(turn) if turn.is_reply else turn.content
    if turn.is_reply and text:
        text = chat.conversation.raw_with(before, turn, text)
    new = text or _edited(chat, old)
    if not new or new == old:
        return chat.note("nothing changed")
    if turn.is_reply:
        _edit_reply(chat, before, turn, new)
    else:
        chat.note(_dropping(chat.line, number))
        chat.send(new, after=before)


def _edited(chat: Chat, text: str) -> str | None:
    with chat.reader.lent():
        edited = editor.edit(text)
    chat.reader.was_interrupted = False  # a Ctrl-C was the editor's
    return edited


def _edit_reply(chat: Chat, before: Line, turn: Turn, text: str) -> None:
    conversation = chat.conversation
    edited = conversation.edited_reply(before, turn, text)
    chat.move(lambda watch: conversation.go_back(before.plus(edited), watch))
    if edited.calls:
        return chat.calls.print(edited.calls[0])
    chat.note("/continue goes on from here")


def _dropping(line: Line, number: int) -> str:
    later = len(line.turns) - number
    dropped = f"; later turns dropped: {later}" if later else ""
    return f"turn {number} is sent again{dropped}"


@command("rewind <turn>", completes="turn")
def rewind(chat: Chat, argument: str) -> None:
    """Go back to the end of a turn; a message comes back into the input line."""
    if not argument:
        raise UsageError("to which turn?", "/turns lists them")
    number = _number(argument, 0)
    if number == 0:
        return clear(chat, "")
    turn = chat.line.turn(number)
    while number and not chat.line.turn(number).is_reply:
        number -= 1
    line = chat.line.upto(number)
    chat.move(lambda watch: chat.conversation.go_back(line, watch))
    if turn.role == "user":
        chat.draft = turn.content


@command("continue")
def go_on(chat: Chat, argument: str) -> None:
    """Go on with a reply that was cut, interrupted or edited. Nothing is read again."""
    _refuse(argument)
    turns = chat.line.turns
    if not turns or not turns[-1].is_cut:
        raise UsageError("the last reply is complete" if turns else "there is no reply yet")
    chat.conversation.check_room(chat.line)
    chat.reply()


@command("clear", "new", "reset")
def clear(chat: Chat, argument: str) -> None:
    """Begin again behind the system text. /redo brings the conversation back."""
    _refuse(argument)
    chat.attached.drop()
    chat.move(lambda watch: chat.conversation.go_back(chat.line.upto(0), watch))


# -- branches -------------------------------------------------------------------------------------


@command("branch [name]")
def branch(chat: Chat, argument: str) -> None:
    """Go on in a new branch; the conversation so far also stays under its own name."""
    old = chat.conversation.transcript.name
    name = chat.conversation.transcript.branch(argument or None)
    chat.conversation.record()
    chat.note(f"on branch `{name}`; /switch {old} goes back")


@command("branches")
def branches(chat: Chat, argument: str) -> None:
    """List the branches. `~1` and the like were dropped; they last until you leave."""
    _refuse(argument)
    transcript = chat.conversation.transcript
    table = _table("", "branch", "turns", "tokens", "last")
    for name, line in transcript.branches().items():
        last = _excerpt(line.turns[-1].content) if line.turns else ""
        mark = "*" if name == transcript.name else ""
        table.add_row(mark, name, str(len(line.turns)), f"{len(line.tokens):,}", last)
    terminal.err().print(table)


@command("switch <branch>", completes="branch")
def switch(chat: Chat, argument: str) -> None:
    """Go on with another branch."""
    if not argument:
        raise UsageError("to which branch?", "/branches lists them")
    chat.move(lambda watch: chat.conversation.switch(argument, watch))
    chat.note(f"on branch `{chat.conversation.transcript.name}`")


# -- tools ----------------------------------------------------------------------------------------


@command("run")
def run_call(chat: Chat, argument: str) -> None:
    """Run the command that your tools file attaches to the tool that the model called."""
    _refuse(argument)
    done = chat.calls.run(chat.calls.next()["function"])
    if done is not None:
        terminal.note(done.content)
        chat.calls.give_output(done)


@command("skip")
def skip(chat: Chat, argument: str) -> None:
    """Tell the model that its tool call was not carried out."""
    _refuse(argument)
    chat.calls.next()
    chat.calls.give("The user skipped this call.")


@command("abort")
def abort(chat: Chat, argument: str) -> None:
    """Drop the reply that called a tool, and change your message; /redo brings it back."""
    _refuse(argument)
    chat.calls.next()
    rewind(chat, str(len(chat.line.turns) - 1))
    rest = "the call before it waits" if chat.conversation.open_calls else "change your message"
    chat.note(f"the call is dropped: {rest}, or /redo brings it back")


# -- looking --------------------------------------------------------------------------------------


@command("turns [turn]", "history", completes="turn")
def turns(chat: Chat, argument: str) -> None:
    """List the turns with their token positions, or show one turn in full."""
    line = chat.line
    if argument:
        number = _number(argument, 0)
        return terminal.show((line.system or "") if number == 0 else _said(line.turn(number)))
    table = _table("turn", "role", "tokens", "ended by", "text")
    table.add_row("0", "system", _span(line, 0), "", _excerpt(line.system or ""))
    for number, turn in enumerate(line.turns, 1):
        reason = turn.finish_reason if turn.is_cut else ""
        table.add_row(str(number), turn.role, _span(line, number), reason, _excerpt(_said(turn)))
    terminal.err().print(table)


def _said(turn: Turn) -> str:
    """A turn's text, and the calls that a reply ended with."""
    calls = [call["function"] for call in turn.calls if turn.is_reply]
    return " ".join([turn.content, *(f"{c['name']} {c['arguments']}" for c in calls)]).strip()


def _span(line: Line, number: int) -> str:
    begin, end = line.span(number)
    return f"{begin:,}-{end:,}"


def _excerpt(text: str) -> str:
    words = terminal.one_line(text)
    return words[:59] + "…" if len(words) > 60 else words


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


@command("stats")
def stats(chat: Chat, argument: str) -> None:
    """Print what this chat has read, written, guessed and taken back so far."""
    _refuse(argument)
    why = chat.conversation.session.policy.verdict
    chat.start_counting()
    table = _table("", "")
    for name, value in chat.totals.items():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name.replace("_", " "), shown)
    counts = ", ".join(f"{n}: {blocks:,}" for n, blocks in sorted(chat.accepted.items()))
    table.add_row("blocks by guesses kept", counts)
    if why and not chat.totals.get("proposed"):
        table.add_row("no drafts", why)
    for name, size in chat.conversation.session.kept_bytes().items():
        table.add_row(f"kept to go back ({name})", f"{size / 1e6:,.1f} MB")
    terminal.err().print(table)
    terminal.show(str(chat.conversation.engine.capabilities))


@command("raw [on|off]")
def raw(chat: Chat, argument: str) -> None:
    """Print the last reply without colours; `on` shows all replies like that."""
    if argument in ("on", "off"):
        chat.colours = argument == "off"
        return chat.note(f"replies {'in' if chat.colours else 'without'} colours")
    _refuse(argument)
    number = chat.line.last("assistant")
    if not number:
        raise UsageError("there is no reply yet")
    text = chat.line.turn(number).content
    terminal.write(text + "\n")


@command("copy")
def copy(chat: Chat, argument: str) -> None:
    """Put the last reply on the clipboard: the system's, and the terminal's."""
    _refuse(argument)
    number = chat.line.last("assistant")
    if not number:
        raise UsageError("there is no reply yet")
    text = chat.line.turn(number).content
    if not text:
        raise UsageError("the last reply has no text", "it was cut before: /continue goes on")
    places = clipboard.copy(text)
    if not places:
        raise UsageError("there is no clipboard here", "/raw prints the reply for copying")
    chat.note(f"copied {terminal.counted(len(text), 'character')}: {', '.join(places)}")


# -- changing -------------------------------------------------------------------------------------


@command("system [text]")
def system(chat: Chat, argument: str) -> None:
    """Print or replace the system text. The conversation stays, and is read again below it."""
    if not argument:
        return terminal.show(chat.line.system or "(no system text)")
    line = chat.conversation.scribe.with_system(chat.line, argument)
    chat.conversation.check_room(line)
    if len(line.tokens) > 2048:
        chat.note(f"reading {len(line.tokens):,} tokens again")
    chat.move(lambda watch: chat.conversation.go_back(line, watch))


@command("set [name [value]]", completes="setting")
def set_(chat: Chat, argument: str) -> None:
    """Print or change settings, from the next reply on; `default` takes a change back."""
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        return _print_settings(chat)
    if name not in SETTABLE:
        fixed = "is fixed while a model is loaded" if name in OPTIONS else "is no setting"
        raise UsageError(f"`{name}` {fixed}", settings.nearest(name, SETTABLE))
    if text:
        value = _value(name, text.strip())
        chat.conversation.use(dataclasses.replace(chat.settings, **{name: value}))
    chat.note(f"{name} = {getattr(chat.settings, name)}")


def _value(name: str, text: str) -> Any:
    return (
        getattr(settings.defaults(), name) if text == "default" else settings.parse_text(name, text)
    )


def _print_settings(chat: Chat) -> None:
    table = _table("setting", "value")
    for name in SETTABLE:
        table.add_row(name, str(getattr(chat.settings, name)))
    terminal.err().print(table)


@command("file [path|-|-name]", "read", completes="path")
def file(chat: Chat, argument: str) -> None:
    """Attach text files to your next message: a path or a pattern such as `src/*.py`.

    Without a path, list what is attached. `-` drops all of it, `-name` one.
    """
    if not argument:
        return chat.note(
            f"attached: {chat.attached}; `/file -` drops"
            if chat.attached.files
            else "nothing is attached"
        )
    if argument.startswith("-") and not Path(argument).exists():
        chat.attached.drop(argument[1:])
        return chat.note(
            f"attached: {chat.attached}" if chat.attached.files else "nothing is attached any more"
        )
    new = chat.attached.add(argument, chat.conversation.room)
    tokens = sum(each.tokens for each in new)
    names = ", ".join(f"`{each.name}`" for each in new)
    which = "it goes" if len(new) == 1 else "they go"
    chat.note(f"attached {names} ({tokens:,} tokens); {which} with your next message")


# -- on disk --------------------------------------------------------------------------------------


@command("save [name]")
def save(chat: Chat, argument: str) -> None:
    """Keep this chat under a name. Without one, print where it is kept."""
    old = chat.conversation.journal
    if argument and argument != chat.name:
        was_named, old_path = chat.is_named, old.path if old is not None else None
        if shelf.path_of(argument).exists():
            raise UsageError(f"there is a session `{argument}` already", "choose another name")
        chat.keep_as(argument, is_named=True)
        if old_path is not None and not was_named:  # it had no name of its own: a renaming
            old_path.unlink(missing_ok=True)
            kept = shelf.cache_of(old_path)
            if kept.exists():
                renamed = shelf.cache_of(shelf.path_of(argument))
                chat.conversation.engine.rename_session(kept, renamed)
    if chat.name is None:
        raise UsageError("this chat is not kept", "give it a name: /save NAME")
    path = shelf.path_of(chat.name)
    if chat.request.with_cache and chat.line.turns:
        chat.save_state(path)
    chat.note(f"session `{chat.name}` in {path}")


@command("load <session>", completes="session")
def load(chat: Chat, argument: str) -> None:
    """Go on with a session that was kept. This one stays as it is."""
    if not argument:
        raise UsageError("which session?", "/sessions lists them")
    chat.load(argument)


@command("sessions")
def sessions(chat: Chat, argument: str) -> None:
    """List the sessions that were kept, the latest first."""
    _refuse(argument)
    table = _table("session", "turns", "model", "begins")
    for entry in shelf.entries():
        table.add_row(entry.name, str(entry.turns), entry.model, _excerpt(entry.first))
    terminal.err().print(table)


# -- help -----------------------------------------------------------------------------------------


@command("help [command]", "?", "h", completes="command")
def help_(chat: Chat, argument: str) -> None:
    """List the commands, or explain one."""
    if argument:
        found = find(argument.removeprefix("/"))
        if found is None:
            raise UsageError(f"unknown command `{argument}`", settings.nearest(argument, COMMANDS))
        return terminal.show(f"/{found.usage}\n{found.help}")
    table = _table("", "")
    for entry in COMMANDS.values():
        table.add_row(f"/{entry.usage}", entry.help.split("\n")[0])
    table.add_row('""" … """', "a message of several lines; also Alt-Enter")
    table.add_row("//text", "send a message that begins with a slash")
    terminal.err().print(table)


@command("exit", "quit", "bye", "q")
def exit_(chat: Chat, argument: str) -> None:
    """Leave; the chat is kept. Ctrl-D does the same."""
    _refuse(argument)
    chat.is_over = True
