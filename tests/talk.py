"""A chat on a tiny random hybrid, and the oracles that it must agree with."""

from __future__ import annotations

import contextlib

from folder import SPECIALS, VOCAB_SIZE, byte_tokenizer

from ds4cli.chat import loop
from ds4cli.chat.console import Chat
from ds4cli.chat.conversation import Watch
from ds4cli.chat.request import ChatRequest
from ds4cli.chat.transcript import Turn
from ds4cli.engine.engine import Engine
from ds4cli.settings import Settings

# Letters, space and the end of turn: a random model then writes text that can be edited.
_LETTERS = [byte_tokenizer().token_to_id(c) for c in "abcdefghijklmnopqrstuvwxyzĠ"]
END = 256 + SPECIALS.index("<|im_end|>")
LETTERS_ONLY = {i: -1000.0 for i in range(VOCAB_SIZE) if i not in (*_LETTERS, END)}


def load(folder, **settings) -> Engine:
    """An engine that replies in letters."""
    settings = {"max_tokens": 12, "logit_bias": LETTERS_ONLY, "stats": True, **settings}
    return Engine.load(str(folder), **settings)


class Script:
    """A reader with prepared messages."""

    was_interrupted = False
    has_keys = False

    def __init__(self, *texts: str, is_interactive: bool = True):
        self.texts = list(texts)
        self.is_interactive = is_interactive
        self.offered: list[str] = []

    def lent(self):
        return contextlib.nullcontext()

    def read(self, default: str = "") -> str:
        self.offered.append(default)
        if not self.texts:
            raise EOFError
        return self.texts.pop(0)


class TestedChat(Chat):
    """A chat that can be stopped after a number of looks at the Ctrl-C flag."""

    __test__ = False
    looks: int | None = None

    def take(self, text: str) -> None:
        """One message or command."""
        loop.take(self, text)

    @contextlib.contextmanager
    def watching(self):
        yield Watch(self._is_stopped)

    def _is_stopped(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0

    def stopped_after(self, looks: int, text: str) -> None:
        """Take `text`, and press Ctrl-C before look `looks` + 1."""
        self.looks = looks
        self.take(text)
        self.looks = None

    def engine_text(self, line) -> str:
        """All that the model reads of a line."""
        return self.conversation.engine.decode(line.tokens)

    @property
    def session(self):
        return self.conversation.session

    @property
    def counters(self):
        return self.session._timeline.counters


def chat(engine: Engine, *texts: str, settings: Settings | None = None, **request) -> TestedChat:
    """A chat that has taken `texts`."""
    made = TestedChat(engine, ChatRequest(**request), settings or engine.settings, reader=Script())
    made.begin()
    for text in texts:
        made.take(text)
    return made


def check(chat: TestedChat) -> None:
    """The session holds the line, or a beginning of it, or what it read of an unsent message."""
    held = chat.session.tokens
    assert chat.session.pos == len(held)
    assert any(_agree(held, tokens) for tokens in (chat.line.tokens, *_unsent(chat)))


def _agree(held: list[int], tokens: list[int]) -> bool:
    n = min(len(held), len(tokens))
    return held[:n] == tokens[:n]


def _unsent(chat: TestedChat):
    """What the chat would hold with the message in the input line, behind each of its turns."""
    line, message = chat.line, Turn("user", chat.draft)
    for number in range(len(line.turns) + 1):
        if chat.draft and (number == 0 or line.turn(number).is_reply):
            yield chat.conversation.scribe.ask(line.upto(number), message).tokens


def check_replies(chat: TestedChat, engine: Engine) -> None:
    """Every reply is what a session gives that never saw anything but its context.

    For chats whose replies and system text were not edited.
    """
    for number, turn in enumerate(chat.line.turns, 1):
        if turn.is_reply and turn.tokens:
            check_reply(chat, engine, number)


def check_reply(chat: TestedChat, engine: Engine, number: int) -> None:
    """The same for one turn."""
    turn, (start, end) = chat.line.turn(number), chat.line.span(number)
    session = engine.session()
    session.sync(chat.line.tokens[:start])
    session.sampler = chat.session.sampler
    session.attempt = turn.attempt
    for _ in session.stream(max_tokens=end - start, stop=()):
        pass
    assert session.tokens[start:] == list(turn.tokens), f"turn {number}"
