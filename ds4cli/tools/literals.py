"""Values of a call, spelled as JSON, as Python or with a family's own quotes: what differs, as
data, and the reader for what is not strict JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

import regex

from ds4cli.tools.mend import Refused, strict

MAX_DEPTH = 200
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CODE = regex.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_WORD = regex.compile(r"\w")
APOSTROPHE = "an apostrophe in a text was not escaped"
_BARE = regex.compile(r"[^,{}\[\]()\s][^,{}\[\]()]*")
BARE_TEXT = r"""[^"'\[\]{}\s,()=][^,()\[\]{}=\n]*"""


@dataclass(frozen=True)
class Syntax:
    """How values are spelled.

    quotes: what may stand around a text. escapes: whether a backslash escapes in it; otherwise it
    runs to the next quote. words: the constants, with their spellings, the usual one first.
    bare_keys: keys of objects stand without quotes. wraps: a value that is no text may stand
    between quotes, too. bare_texts: a short text may stand without any. apostrophes: one
    between two letters is a part of its text, though nothing escapes it. never: what its texts do
    not hold.
    """

    name: str
    quotes: tuple[str, ...] = ('"',)
    escapes: bool = True
    true: tuple[str, ...] = ("true",)
    false: tuple[str, ...] = ("false",)
    null: tuple[str, ...] = ("null",)
    bare_keys: bool = False
    wraps: bool = False
    bare_texts: bool = False
    apostrophes: bool = False
    never: str = ""

    def spellings(self, constant: bool | None) -> tuple[str, ...]:
        return self.null if constant is None else self.true if constant else self.false

    def inside(self, quote: str) -> Syntax:
        """How values are spelled that stand between quotes."""
        others = tuple(q for q in PYTHON.quotes if q != quote)
        is_free = len(others) == len(PYTHON.quotes)
        never = "" if is_free else quote
        return replace(PYTHON, name=f"in{ord(quote[0])}", quotes=others, never=never)

    @property
    def words(self) -> dict[str, bool | None]:
        """What each word means."""
        return {word: c for c in (True, False, None) for word in self.spellings(c)}


JSON = Syntax("json")
# What models write that were shown their calls through Python's `str`, or through JSON.
PYTHON = Syntax(
    "python", ('"', "'"), true=("True", "true"), false=("False", "false"), null=("None", "null")
)
# Templates that write calls as Python put quotes around a text and escape nothing in it (LFM2.5).
CALLS = replace(PYTHON, name="calls", apostrophes=True)
# As Llama's own history shows its calls: all values quoted, or none.
LOOSE = replace(CALLS, name="loose", wraps=True, bare_texts=True)
BARE = Syntax("bare", ('<|"|>',), escapes=False, null=("null", "None"), bare_keys=True)
ESCAPED = Syntax(
    "escaped",
    ("<escape>",),
    escapes=False,
    true=("true", "True"),
    false=("false", "False"),
    null=("null", "None"),
    bare_keys=True,
    wraps=True,
)


def read_literal(text: str, syntax: Syntax) -> Any:
    """The one value that `text` spells. Raises Refused."""
    reader = LiteralReader(text, syntax)
    value = reader.value()
    if reader.rest().strip():
        raise Refused(f"unexpected text after a value: `{reader.rest().strip()[:40]}`")
    return value


class LiteralReader:
    """Reads values of a syntax from the beginning of a text on."""

    def __init__(self, text: str, syntax: Syntax) -> None:
        self.text, self.syntax, self.at = text, syntax, 0
        self.notes: list[str] = []

    def rest(self) -> str:
        return self.text[self.at :]

    def value(self, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise Refused("nested too deeply to read")
        for quote in self.syntax.quotes:
            if self.take(quote):
                return self._string(quote)
        if self.take("{"):
            return self._object(depth + 1)
        if self.take("["):
            return self._list(depth + 1)
        return self._word(depth)

    def take(self, what: str) -> bool:
        """Go behind `what` and the white space in front of it, if it comes next."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if not self.text.startswith(what, self.at):
            return False
        self.at += len(what)
        return True

    def _word(self, depth: int) -> Any:
        match = _BARE.match(self.text, self.at)
        if not match:
            raise Refused(f"expected a value at `{self.rest()[:40]}`")
        self.at = match.end()
        word = match[0].strip()
        if self.syntax.bare_texts and not depth:
            return word  # its schema says what it stands for
        if word in self.syntax.words:
            return self.syntax.words[word]
        try:
            return strict(word)
        except ValueError as error:
            raise Refused(f"`{word[:40]}` is neither quoted nor JSON") from error

    def _string(self, quote: str) -> str:
        out: list[str] = []
        while not self._closes(quote):
            if self.at >= len(self.text):
                raise Refused("a string is never closed")
            if self.syntax.escapes and self.text[self.at] == "\\":
                out.append(self._escape())
            else:
                out.append(self.text[self.at])
                self.at += 1
        self.at += len(quote)
        return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _closes(self, quote: str) -> bool:
        """Whether a text ends here."""
        if not self.text.startswith(quote, self.at):
            return False
        around = self.text[self.at - 1], self.text[self.at + 1 : self.at + 2]
        may_be_text = self.syntax.apostrophes and quote == "'"
        if not may_be_text or not all(map(_WORD.fullmatch, around)):
            return True
        if APOSTROPHE not in self.notes:
            self.notes.append(APOSTROPHE)
        return False

    def _escape(self) -> str:
        """What a backslash and what follows stand for; an unknown escape is kept, as in Python."""
        self.at += 2
        char = self.text[self.at - 1 : self.at]
        if char in _ESCAPES:
            return _ESCAPES[char]
        if char and char in "\"'\\/":
            return char
        if code := _CODE.match(self.text, self.at - 1):
            self.at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            return chr(number) if number <= 0x10FFFF else "\ufffd"
        return "\\" + char

    def _object(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self.take("}"):
            if result and not self.take(","):
                raise Refused(f"expected `,` or `}}` at `{self.rest()[:40]}`")
            if result and self.take("}"):
                break
            key = self._key()
            if not self.take(":"):
                raise Refused(f"`{key}` has no value")
            if key in result:
                raise Refused(f"`{key}` is given twice")
            result[key] = self.value(depth)
        return result

    def _key(self) -> str:
        for quote in self.syntax.quotes:
            if self.take(quote):
                return self._string(quote)
        match = regex.compile(r"\s*([^:{}\[\],\"']+?)\s*(?=:)").match(self.text, self.at)
        if not match or not self.syntax.bare_keys:
            raise Refused(f"expected an argument's name at `{self.rest()[:40]}`")
        self.at = match.end()
        return match[1]

    def _list(self, depth: int) -> list[Any]:
        result: list[Any] = []
        while not self.take("]"):
            if result and not self.take(","):
                raise Refused(f"expected `,` or `]` at `{self.rest()[:40]}`")
            if result and self.take("]"):
                break
            result.append(self.value(depth))
        return result

    def calls(self, known: Callable[[str], Set[str]]) -> list[tuple[str, dict[str, Any]]]:
        """`[name(key=value, ...), ...]`, also without its last bracket; known(name): the names of a
        tool's arguments, which may hold any characters."""
        if not self.take("["):
            raise Refused(f"expected a list of calls at `{self.rest()[:40]}`")
        found: list[tuple[str, dict[str, Any]]] = []
        while not self.take("]"):
            if found and not self.take(","):
                if self.rest().strip():
                    raise Refused(f"expected `,` or `]` at `{self.rest()[:40]}`")
                self.notes.append("the closing `]` was missing")
                return found
            found.append(self._call(known))
        return found

    def _call(self, known: Callable[[str], Set[str]]) -> tuple[str, dict[str, Any]]:
        head = regex.compile(r"\s*(?P<name>[\w.:$\-]+)\s*\(").match(self.text, self.at)
        if not head:
            raise Refused(f"each call must be `name(key=value, ...)`, not `{self.rest()[:40]}`")
        self.at = head.end()
        keys = "|".join(regex.escape(k) for k in sorted(known(head["name"]), key=len, reverse=True))
        pattern = regex.compile(rf"\s*(?P<key>{keys or '(?!)'}|[\w$\-]+)\s*=(?!=)")
        arguments: dict[str, Any] = {}
        while not self.take(")"):
            if arguments and not self.take(","):
                raise Refused(f"expected `,` or `)` at `{self.rest()[:40]}`")
            match = pattern.match(self.text, self.at)
            if not match:
                raise Refused(f"expected `name=value` at `{self.rest()[:40]}`")
            self.at = match.end()
            if match["key"] in arguments:
                raise Refused(f"`{match['key']}` is given twice")
            arguments[match["key"]] = self.value()
        return head["name"], arguments
