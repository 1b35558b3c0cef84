"""The dialogue about tool calls: who gives a call's result, and when the model goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ds4cli import terminal
from ds4cli.chat.transcript import Line, Turn
from ds4cli.errors import UsageError

if TYPE_CHECKING:
    from ds4cli.chat.console import Chat
    from ds4cli.tools import Tool, ToolRun

# Of a tool: at most this, and no more than half of what the context has room for (a token is about
# four bytes of text).
MAX_OUTPUT_BYTES = 100_000
MAX_UNASKED = 20  # runs in a row: a model that calls for ever must not run for ever


class Calls:
    """The calls that the last reply ended with, and the results that there are already.

    is_new: they were written since the last input.
    """

    def __init__(self, chat: Chat):
        self._chat = chat
        self._results: tuple[Line, list[Turn]] | None = None  # of a line, until all are there
        self.is_new = False

    @property
    def results(self) -> list[Turn]:
        """The results given so far to the last reply's calls."""
        if self._results is None or self._results[0] != self._chat.line:
            return []
        return self._results[1]

    def next(self) -> dict[str, Any]:
        """The tool call whose result is missing. UsageError if there is none."""
        calls, given = self._chat.conversation.open_calls, len(self.results)
        if given >= len(calls):
            raise UsageError("the model has called no tool")
        return calls[given]

    def announce(self) -> None:
        """A reply ended with calls: show the first."""
        self.is_new = True
        self.print(self._chat.conversation.open_calls[0])

    # -- results ----------------------------------------------------------------------------------

    def give(self, text: str) -> None:
        """The result of the next tool call; with the last one the model goes on."""
        chat, calls, results = self._chat, self._chat.conversation.open_calls, self.results
        self._results = chat.line, results
        results.append(Turn("tool", text, calls=(calls[len(results)],)))
        if len(results) < len(calls):
            return self.print(calls[len(results)])
        is_sent = False
        try:
            is_sent = chat.ask(*results)
        finally:
            if is_sent:
                self._results = None
            else:
                chat.draft = results.pop().content

    def give_output(self, done: ToolRun) -> None:
        """What a command gave is the result of its call."""
        try:
            self.give(done.content)
        except UsageError as error:  # it does not fit, and is nothing to edit in the input line
            self._chat.draft = ""
            hint = "type a shorter result, or /skip or /abort the call"
            raise UsageError(error.message, hint) from None

    # -- running ----------------------------------------------------------------------------------

    def run_unasked(self) -> None:
        """Run the new calls of the tools that may run unasked, reply after reply."""
        runs = 0
        while self._may_run():
            if runs == MAX_UNASKED:
                text = f"{runs} runs in a row: /run goes on, /skip or /abort ends it"
                return terminal.note(text)  # with -q too: it says why nothing happens
            runs += 1
            before = self._chat.line, len(self.results)
            self._run_next()
            if (self._chat.line, len(self.results)) == before:
                return  # stopped by the user: the result waits in the input line

    def _may_run(self) -> bool:
        chat = self._chat
        return (
            self.is_new
            and len(self.results) < len(chat.conversation.open_calls)
            and chat.line.turns[-1].finish_reason == "tool"
            and self.next()["function"]["name"] in chat.request.yes_tools
        )

    def _run_next(self) -> None:
        function = self.next()["function"]
        done = self.run(function)
        if done is None:
            return
        cut = (", output cut" if done.truncated else "") + (", killed" if done.timed_out else "")
        end = f", exit code {done.exit_code}" if done.exit_code else cut
        # With -q too: nothing runs unseen.
        terminal.note(
            f"ran {function['name']}: {len(done.output):,} characters, {done.seconds:.1f} s{end}"
        )
        self.give_output(done)

    def run(self, function: dict[str, Any]) -> ToolRun | None:
        """What the command of a called tool gives; None if the user stopped it."""
        from ds4cli.tools import run_tool

        chat, tool = self._chat, self._tool(function["name"])
        room = chat.conversation.room
        most = MAX_OUTPUT_BYTES if room is None else min(MAX_OUTPUT_BYTES, max(256, 2 * room))
        with chat.watching() as watch:
            done = run_tool(tool, function["arguments"], max_bytes=most, cancel=watch.cancel)
        if not done.cancelled:
            return done
        chat.reader.was_interrupted = False
        terminal.note(
            f"stopped {tool.name} after {done.seconds:.1f} s: the call still waits; "
            + self._choices(tool.name)
        )
        return None

    def _tool(self, name: str) -> Tool:
        """A declared tool. UsageError if there is none of this name."""
        for tool in self._chat.conversation.tools:
            if tool.name == name:
                return tool
        raise UsageError(f"no tool `{name}` is declared", "start with `--tools FILE`")

    # -- showing ----------------------------------------------------------------------------------

    def print(self, call: dict[str, Any]) -> None:
        """A call: a line of JSON for a script, words for a reader."""
        chat = self._chat
        if not chat.reader.is_interactive:
            return terminal.write(json.dumps(call, ensure_ascii=False) + "\n")
        function = call["function"]
        terminal.note(f"call {function['name']} {function['arguments']}")
        if function["name"] not in chat.request.yes_tools:
            chat.note(self._choices(function["name"]))

    def _choices(self, name: str) -> str:
        """What can be done about a call."""
        chat = self._chat
        is_runnable = any(t.name == name and t.command for t in chat.conversation.tools)
        run, turn = "/run, " if is_runnable else "", len(chat.line.turns)
        return f"type its result, or {run}/skip or /abort it; /edit {turn} changes the arguments"
