"""What a chat template adds to a conversation, piece by piece. Pure: no mlx, no tokenizer class.

A conversation's tokens are append-only: what the model sampled stays as it was sampled, and the
template renders only what is new. To find that, the last reply is replaced by a marker and the
whole conversation is rendered as text: whatever follows the marker is new, however the template
redraws what stands before it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds4cli.errors import DS4Error, UsageError
from ds4cli.text import thinking
from ds4cli.tokens import common_prefix

Message = dict[str, Any]

# Stands for text whose place we want to find. No white space and no markup: templates strip those.
MARKER = "xQ7zThisStandsForTextZ7qX"
REPLY = "xQ7zThisIsTheReplyZ7qX"
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template, with the tokenizer that belongs to it.

    render(messages, add_generation_prompt) -> text; it may raise anything. encode: text -> ids,
    special tokens parsed and none added. start: ids in front of everything, for a conversation
    without a template. stop_ids: tokens that end a reply. encode_data: text -> ids of plain text,
    for what was typed, read or answered by a tool: what spells a special token in it, as
    `spells_specials` says, must not become one. None where it may.
    """

    render: Callable[[list[Message], bool], str]
    encode: Callable[[str], list[int]]
    stop_ids: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    encode_data: Callable[[str], list[int]] | None = None
    spells_specials: Callable[[str], bool] | None = None

    @cached_property
    def takes_system(self) -> bool:
        """Whether system text has its own place. Gemma refuses it, others drop it silently."""
        probe = [{"role": "system", "content": MARKER}, {"role": "user", "content": "a"}]
        try:
            return MARKER in self.render(probe, True)
        except DS4Error:  # it runs for too long: not once more
            raise
        except Exception:
            return False

    def head(self, system: str | None) -> tuple[int, ...]:
        """The tokens in front of the first message, whatever that message says."""
        one, other = (self.opening(system, [_user(text)]) for text in ("Alpha", "zeta"))
        return one[: common_prefix(one, other)]

    def opening(
        self, system: str | None, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """All tokens of a conversation that begins with `messages`, up to the model's turn."""
        shown, hidden = self._hide_data(self._with_system(system, messages))
        return self._begun(self._encode_around(self._render(shown, add_generation_prompt), hidden))

    def continuing(self, system: str | None, messages: Sequence[Message]) -> tuple[int, ...]:
        """All tokens of a conversation that ends inside the last message, which the model wrote."""
        *before, last = messages
        marked = [*before, {"role": "assistant", "content": REPLY}]
        shown, hidden = self._hide_data(self._with_system(system, marked))
        text = self._render(shown, False)
        if REPLY not in text:
            raise UsageError("the chat template cannot go on with a message of the model's")
        text = text[: text.rindex(REPLY)] + str(last["content"])
        return self._begun(self._encode_around(text, hidden))

    def _begun(self, ids: list[int]) -> tuple[int, ...]:
        """`ids` behind what begins every text, once."""
        there = tuple(ids[: len(self.start)]) == self.start
        return tuple(ids) if there else (*self.start, *ids)

    def dropped_system(self, messages: Sequence[Message]) -> list[int]:
        """Which messages are system texts behind the first message that the template leaves out."""
        later = [i for i, m in enumerate(messages) if i and m["role"] in SYSTEM_ROLES]
        return [i for i in later if not self._shows(messages, i)]

    def _shows(self, messages: Sequence[Message], index: int) -> bool:
        marked = [{**m, "content": MARKER} if i == index else m for i, m in enumerate(messages)]
        text = self._try(self._with_system(None, marked))
        return text is None or MARKER in text  # what it refuses it does not drop

    def following(
        self,
        system: str | None,
        history: Sequence[Message],
        reply: Sequence[int],
        new: Sequence[Message],
        reply_text: str = "",
    ) -> tuple[int, ...]:
        """The tokens that `new` adds after `reply`, the sampled ids of history's last message.

        They close the reply, carry the new messages, and open the model's turn.
        """
        shown, hidden = self._hide_data(new)
        text = self._following_text(system, history, shown, reply_text)
        ids = self._encode_around(text, hidden)
        if reply and ids and reply[-1] == ids[0] and ids[0] in self.stop_ids:
            return tuple(ids[1:])  # the reply was closed by the model itself
        return tuple(ids)

    def _hide_data(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Names in place of texts that spell special tokens, and what they stand for. What the
        model wrote keeps its markers."""
        shown, hidden = list(messages), {}
        for i, message in enumerate(messages):
            text = message.get("content")
            if message["role"] != "assistant" and isinstance(text, str) and self._is_data(text):
                name, data = f"{MARKER}{i}x", text.strip()
                hidden[name] = data
                shown[i] = {**message, "content": text.replace(data, name, 1)}
        return shown, hidden

    def _is_data(self, text: str) -> bool:
        spells = self.spells_specials
        return spells is not None and spells(text)

    def _encode_around(self, text: str, hidden: dict[str, str]) -> list[int]:
        encode_data = self.encode_data
        if not hidden or encode_data is None:
            return self.encode(text)
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"({'|'.join(hidden)})", text)):
            ids += encode_data(hidden[piece]) if i % 2 else self.encode(piece)
        return ids

    def _following_text(
        self, system: str | None, history: Sequence[Message], new: Sequence[Message], reply: str
    ) -> str:
        if history[-1].get("tool_calls"):
            return self._after_calls(system, history, new, reply)
        marked = {"role": "assistant", "content": REPLY}
        shortest = [_user("a"), marked]
        for past in ([*history[:-1], marked], shortest):
            text = self._try([*self._with_system(system, past), *new])
            if text is not None and REPLY in text:
                return text[text.rindex(REPLY) + len(REPLY) :]
        return self._behind(reply, self._with_system(system, history), new)

    def _after_calls(
        self, system: str | None, history: Sequence[Message], new: Sequence[Message], reply: str
    ) -> str:
        """What follows a reply that called tools: templates frame results by the calls in front of
        them, so these are drawn, in the first spelling that the template takes."""
        said = self._with_system(system, history)
        for spelled in SPELLINGS:
            past, more = ([spelled(m) for m in part] for part in (said, new))
            if self._try([*past, *more]) is not None:
                return self._behind(reply, past, more)
        return self._behind(reply, said, new)

    def _behind(self, reply: str, past: list[Message], new: Sequence[Message]) -> str:
        """What the template draws behind the reply, the last message of `past`.

        The reply may be drawn otherwise than it was sampled, but its last characters are the same:
        it ends behind its longest ending that stands between its beginning and the next message.
        """
        text = self._render([*past, *new])
        named = self._try([*past, {**new[0], "content": MARKER}, *new[1:]]) or text
        end = named.find(MARKER)
        end = common_prefix(text, named) if end < 0 else end
        begin = common_prefix(text, self._try(past[:-1], False) or "")
        return text[_end_of(reply, text[begin:end]) + begin :]

    def cue(self, system: str | None, messages: Sequence[Message]) -> int:
        """Tokens of the generation prompt, the last ones of `opening` or `following`."""
        try:
            closed = self._render(self._with_system(system, messages), False)
            opened = self._render(self._with_system(system, messages), True)
        except UsageError:
            return 0
        return len(self.encode(opened[len(closed) :])) if opened.startswith(closed) else 0

    def redrawn(self, system: str | None, messages: Sequence[Message]) -> list[tuple[int, ...]]:
        """The conversation as the template would draw it now, around the replies' own ids.

        Returns one token span in front of each reply and one for what follows the last one.
        """
        replies = sum(m["role"] == "assistant" for m in messages)
        marked = [
            {"role": "assistant", "content": REPLY} if m["role"] == "assistant" else m
            for m in messages
        ]
        shown, hidden = self._hide_data(self._with_system(system, marked))
        pieces = self._render(shown).split(REPLY)
        if len(pieces) != replies + 1:
            raise UsageError("the chat template does not show every reply")
        first, *rest = (self._encode_around(piece, hidden) for piece in pieces)
        return [self._begun(first), *map(tuple, rest)]

    def _with_system(self, system: str | None, messages: Sequence[Message]) -> list[Message]:
        if not system:
            return list(messages)
        if self.takes_system:
            return [{"role": "system", "content": system}, *messages]
        first, *rest = messages
        return [{**first, "content": f"{system}\n\n{first['content']}"}, *rest]

    def _try(self, messages: list[Message], add_generation_prompt: bool = True) -> str | None:
        try:
            return self.render(messages, add_generation_prompt)
        except DS4Error:
            raise
        except Exception:
            return None

    def _render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        try:
            return self.render(messages, add_generation_prompt)
        except DS4Error:
            raise
        except Exception as error:  # templates raise whatever they like
            raise UsageError(f"the chat template refuses this conversation: {error}") from None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _end_of(reply: str, drawn: str) -> int:
    """Where the reply's longest ending that stands in `drawn` ends there."""
    reply = reply.rstrip()
    low, high = 0, min(len(reply), 4096)
    while low < high:  # if an ending occurs, so do all shorter ones
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reply[-middle:] in drawn else (low, middle - 1)
    if not low:
        raise UsageError("the chat template does not show the last reply")
    return drawn.rindex(reply[len(reply) - low :]) + low


# How templates want calls and results: as they are, with the arguments as text, with ids of nine
# letters (Mistral), or both.


def _with_text(message: Message) -> Message:
    """The arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**function, "arguments": _json_text(function["arguments"])}}
        for call in message.get("tool_calls", ())
        for function in (call["function"],)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_short_ids(message: Message) -> Message:
    """Ids of nine letters and digits, the same for a call and its result."""
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    calls = [
        {**call, "id": _short_id(call.get("id", ""))} for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _short_id(name: str) -> str:
    return f"{zlib.crc32(name.encode()):09d}"[-9:]


def _as_it_is(message: Message) -> Message:
    return message


SPELLINGS: tuple[Callable[[Message], Message], ...] = (
    _as_it_is,
    _with_text,
    _with_short_ids,
    lambda message: _with_text(_with_short_ids(message)),
)


def read_template(path: str) -> str:
    """The text of a chat template's file. UsageError for one that is none."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(f"cannot read `{path}`: {reason}", "name a Jinja template") from None
    if not text.strip():
        raise UsageError(
            f"the chat template `{path}` is empty", "`--raw` continues a text without one"
        )
    if fault := thinking.fault(text):
        raise UsageError(f"`{path}` is no Jinja template: {fault}")
    return text
