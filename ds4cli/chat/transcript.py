"""A conversation as turns that own their tokens, and the ways to go back in it. Pure: no mlx.

A `Line` is one course of a conversation: immutable, so that branches share their turns. All turns'
tokens in a row are what the session is to hold: every command makes a new line, and one call moves
the session there. Going back puts the old line on the redo stack; when something new is said, what
the stack held stays reachable as an unnamed branch. Nothing that was typed is lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds4cli.errors import UsageError
from ds4cli.text.chat_template import ChatTemplate, Message
from ds4cli.text.editing import edit_tokens
from ds4cli.tokens import common_prefix

MAIN = "main"


@dataclass(frozen=True)
class Turn:
    """One message. `tokens`: the ids it owns, exactly as they stand in the session.

    A user turn's ids begin by closing the reply before it and end with the generation prompt, the
    last `cue` of them; a reply's ids are the sampled ones. content: what was typed, or the answer
    without its reasoning. attempt: the sampler's, for a reply. calls: the tool calls of a reply in
    OpenAI form; of a tool's result, the call that it answers.
    """

    role: str
    content: str
    tokens: tuple[int, ...] = ()
    cue: int = 0
    finish_reason: str | None = None
    attempt: int = 0
    calls: tuple[Any, ...] = ()

    @property
    def is_reply(self) -> bool:
        return self.role == "assistant"

    @property
    def is_cut(self) -> bool:
        """Whether the reply may go on: interrupted, ended by a limit, or edited."""
        return self.is_reply and self.finish_reason in ("cancelled", "length", "edited")

    @property
    def message(self) -> Message:
        """The turn as a chat template takes it."""
        message: Message = {"role": self.role, "content": self.content}
        if self.is_reply and self.calls:
            message["tool_calls"] = [_with_object(call) for call in self.calls]
        elif self.calls:
            call = self.calls[0]
            message |= {"name": call["function"]["name"], "tool_call_id": call.get("id", "")}
        return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object: what templates walk through."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class Line:
    """One course of a conversation: system text, the ids in front of the first turn, turns.

    Turns are numbered from 1; the system text is number 0.
    """

    system: str | None = None
    head: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """What the session is to hold."""
        return list(itertools.chain(self.head, *(turn.tokens for turn in self.turns)))

    def span(self, number: int) -> tuple[int, int]:
        """First and last token position (exclusive) of a turn; of the head for 0."""
        if number == 0:
            return 0, len(self.head)
        begin = len(self.head) + sum(len(t.tokens) for t in self.turns[: number - 1])
        return begin, begin + len(self.turns[number - 1].tokens)

    def upto(self, number: int) -> Line:
        """The line that ends with turn `number`."""
        return replace(self, turns=self.turns[:number])

    def plus(self, *turns: Turn) -> Line:
        return replace(self, turns=(*self.turns, *turns))

    def turn(self, number: int) -> Turn:
        """Turn `number`, from 1. UsageError if there is none."""
        if not 1 <= number <= len(self.turns):
            known = f"turns 1 to {len(self.turns)}" if self.turns else "no turns yet"
            raise UsageError(f"there is no turn `{number}`", f"{known}; see /turns")
        return self.turns[number - 1]

    def last(self, role: str) -> int:
        """The number of the last turn of `role`; 0 if there is none."""
        numbers = [i for i, turn in enumerate(self.turns, 1) if turn.role == role]
        return numbers[-1] if numbers else 0

    def exchange(self, back: int) -> int:
        """The number of the user turn that begins the `back`-th exchange from the end."""
        numbers = [i for i, turn in enumerate(self.turns, 1) if turn.role == "user"]
        if not 1 <= back <= len(numbers):
            if not numbers:
                raise UsageError("there is nothing to go back over")
            raise UsageError(f"there is no exchange `{back}` back", f"there are `{len(numbers)}`")
        return numbers[-back]

    def begins(self, other: Line) -> bool:
        """Whether this line is a beginning of `other`."""
        same = (self.system, self.head) == (other.system, other.head)
        return same and other.turns[: len(self.turns)] == self.turns

    def shared(self, other: Line) -> int:
        """How many turns both lines begin with."""
        if (self.system, self.head) != (other.system, other.head):
            return 0
        return common_prefix(self.turns, other.turns)


@dataclass
class Transcript:
    """The lines of one chat: the one being talked on, named ones, and dropped ones.

    line: the current one, stored under `name`. redo: lines gone back from, the latest last.
    dropped: unnamed branches by number, oldest first.
    """

    line: Line = field(default_factory=Line)
    name: str = MAIN
    named: dict[str, Line] = field(default_factory=dict)
    redo: list[Line] = field(default_factory=list)
    dropped: dict[int, Line] = field(default_factory=dict)

    # -- forward ----------------------------------------------------------------------------------

    def say(self, line: Line) -> None:
        """Go on with `line`, which adds turns. What could have been redone becomes a branch."""
        self.line = line
        self._keep_dropped()

    def copy(self) -> Transcript:
        """As it is now: lines never change, so this is cheap."""
        return replace(
            self, named=dict(self.named), redo=list(self.redo), dropped=dict(self.dropped)
        )

    def _keep_dropped(self) -> None:
        kept: list[Line] = []
        for line in self.redo:
            if not any(line.begins(other) for other in (*kept, *self._lines())):
                kept = [other for other in kept if not other.begins(line)]
                kept.append(line)
        number = max(self.dropped, default=0)
        self.dropped.update(enumerate(kept, number + 1))
        self.redo.clear()

    def _lines(self) -> list[Line]:
        return [self.line, *self.named.values(), *self.dropped.values()]

    # -- back -------------------------------------------------------------------------------------

    def go_back(self, line: Line) -> None:
        """Take `line` as the current one; `redo_last` brings the present one back."""
        if line != self.line:
            self.redo.append(self.line)
            self.line = line

    def redo_last(self) -> None:
        """Undo the latest going back."""
        if not self.redo:
            raise UsageError("there is nothing to redo")
        self.line = self.redo.pop()

    # -- branches ---------------------------------------------------------------------------------

    def branch(self, name: str | None = None) -> str:
        """Begin a branch here: the present line stays under its own name. Returns the new name."""
        name = name or self._free_name()
        if name in self.branches():
            raise UsageError(f"there is a branch `{name}` already", f"go there with /switch {name}")
        if not name.strip() or name.startswith("~") or len(name.split()) > 1:
            raise UsageError(f"`{name}` cannot name a branch", "use one word without `~`")
        self.named[self.name] = self.line
        self.name = name
        return name

    def switch(self, name: str) -> None:
        """Go on with another branch. A dropped one, `~2`, gets a name by that."""
        target = self.branches().get(name)
        if target is None:
            raise UsageError(f"there is no branch `{name}`", "see /branches")
        self._keep_dropped()
        self.named[self.name] = self.line
        if name.startswith("~"):
            del self.dropped[int(name[1:])]
            name = self._free_name()
        self.named.pop(name, None)
        self.name, self.line = name, target

    def branches(self) -> dict[str, Line]:
        """Every line by name: the current one, named ones, and `~1`, `~2` for dropped ones."""
        unnamed = {f"~{number}": line for number, line in self.dropped.items()}
        return {self.name: self.line, **self.named, **unnamed}

    def _free_name(self) -> str:
        taken = {self.name, *self.named}
        return next(n for i in itertools.count(1) if (n := f"branch-{i}") not in taken)


# -- what is said, as turns -----------------------------------------------------------------------


@dataclass(frozen=True)
class Scribe:
    """Makes turns: the template's tokens around what was typed and what was sampled."""

    template: ChatTemplate
    decode: Callable[[list[int]], str]

    def begin(self, system: str | None) -> Line:
        """An empty line with its head."""
        return Line(system, self.template.head(system))

    def ask(self, line: Line, *new: Turn) -> Line:
        """`line` with turns for the model to answer. The last one owns the tokens they add."""
        if line.turns and not line.turns[-1].is_reply:
            raise UsageError("the last message has no reply yet", "/retry asks for it")
        if not line.turns:
            return self._ask_first(line, new)
        history = [turn.message for turn in line.turns]
        messages = [turn.message for turn in new]
        reply = line.turns[-1].tokens
        text = self.decode(list(reply)) if line.turns[-1].calls else ""
        tokens = self.template.following(line.system, history, reply, messages, text)
        cue = self.template.cue(line.system, [*history, *messages])
        return line.plus(*_owning(new, tokens, cue))

    def _ask_first(self, line: Line, new: Sequence[Turn]) -> Line:
        messages = [turn.message for turn in new]
        tokens = self.template.opening(line.system, messages)
        shared = common_prefix(line.head, tokens)
        cue = self.template.cue(line.system, messages)
        fitting = replace(line, head=tokens[:shared])
        return fitting.plus(*_owning(new, tokens[shared:], cue))

    def edit_reply(self, turn: Turn, text: str, answer: str) -> Turn:
        """A reply with another raw text. What did not change keeps its sampled ids."""
        tokens = edit_tokens(turn.tokens, text, self.template.encode, self.decode)
        return replace(turn, content=answer, tokens=tokens)

    def with_system(self, line: Line, system: str | None) -> Line:
        """The same conversation under another system text; replies keep their ids."""
        begun = self.begin(system)
        if not line.turns:
            return begun
        asked = list(itertools.takewhile(lambda turn: not turn.is_reply, line.turns))
        first = self._ask_first(begun, asked)
        return first.plus(*line.turns[len(asked) :])

    def without_reasoning(self, line: Line, answers: Callable[[Turn], str]) -> Line:
        """The line as the template draws history: replies without reasoning, answers' ids kept.

        answers(turn): the raw text of a reply from where its answer begins. The last turn is one
        that asks. For templates that remove think blocks from earlier turns.
        """
        turns = list(line.turns)
        spans = iter(self.template.redrawn(line.system, [turn.message for turn in turns]))
        for i, turn in enumerate(turns):
            asks_model = i + 1 == len(turns) or turns[i + 1].is_reply
            if turn.is_reply:
                turns[i] = self.edit_reply(turn, answers(turn), turn.content)
            else:
                turns[i] = replace(turn, tokens=next(spans) if asks_model else ())
        return _with_head(replace(line, turns=tuple(turns)))

    def retokenised(self, line: Line) -> Line:
        """The same texts through this template and tokenizer, for a line of another model."""
        again = self.begin(line.system)
        pending: list[Turn] = []
        for turn in line.turns:
            if turn.is_reply:
                again = self.ask(again, *pending) if pending else again
                tokens = tuple(self.template.encode(turn.content))
                again, pending = again.plus(replace(turn, tokens=tokens)), []
            else:
                pending.append(turn)
        return self.ask(again, *pending) if pending else again


def _owning(turns: Sequence[Turn], tokens: tuple[int, ...], cue: int) -> list[Turn]:
    """The turns with their tokens: all at the last, so that no span is split by guesswork."""
    first = [replace(turn, tokens=(), cue=0) for turn in turns[:-1]]
    return [*first, replace(turns[-1], tokens=tokens, cue=min(cue, len(tokens)))]


def _with_head(line: Line) -> Line:
    """Take the ids of the line's head out of its first turn, where the template drew them again."""
    first, *rest = line.turns
    shared = common_prefix(line.head, first.tokens)
    first = replace(first, tokens=first.tokens[shared:])
    return replace(line, head=line.head[:shared], turns=(first, *rest))
