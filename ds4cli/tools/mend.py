"""Reading JSON with three outcomes only: as it is, mended with a note of every change, refused.

Only unambiguous damage is mended. A string that is never closed is not: nobody knows where it was
to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSER = {"{": "}", "[": "]"}
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Refused(ValueError):
    """The call cannot be used; the text says why."""


class Unclosed(Refused):
    """The text ends inside a string."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Refused(f"`{twice}` is given twice")
    return result


def _no_constant(word: str) -> Any:
    raise Refused(f"`{word}` is not JSON")


STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def strict(text: str) -> Any:
    """One JSON value and nothing else. Raises Refused or ValueError."""
    try:
        return STRICT.decode(text)
    except RecursionError as error:
        raise Refused("nested too deeply to read") from error


@dataclass
class Value:
    """A JSON value: the text it was read from, what follows, and what had to be changed."""

    value: Any
    text: str
    rest: str
    notes: list[str] = field(default_factory=list)


def read(text: str) -> Value:
    """The first JSON value of `text`. Raises Refused (Unclosed when a string does not end)."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = STRICT.raw_decode(text, start)
        return Value(value, text[start:end], text[end:])
    except Refused:
        raise
    except RecursionError as error:
        raise Refused("nested too deeply to read") from error
    except ValueError:
        mended = _Mender(text[start:])
        fixed = mended.run()
    try:
        return Value(strict(fixed), fixed, mended.rest, mended.notes)
    except Refused:
        raise
    except ValueError as error:
        raise Refused(f"not JSON: {error}") from error


def members(text: str) -> Iterator[tuple[str, str]]:
    """(key, source text of the value) for each member of a strictly valid JSON object."""
    at = text.index("{") + 1
    while True:
        at = _skip(text, at, ", \t\r\n")
        if text[at] == "}":
            return
        key, at = scanstring(text, at + 1)
        at = _skip(text, at, ": \t\r\n")
        _, end = STRICT.raw_decode(text, at)
        yield key, text[at:end]
        at = end


def _skip(text: str, at: int, what: str) -> int:
    while text[at] in what:
        at += 1
    return at


class _Mender:
    """One pass over damaged JSON that writes what it should have been."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.out: list[str] = []
        self.open: list[str] = []
        self.notes: list[str] = []
        self.rest = ""

    def run(self) -> str:
        while self.at < len(self.text):
            self._piece(self.text[self.at])
            if not self.open and self.out and self.out[-1] in ("}", "]"):
                break
        else:
            self._close_all()
        self.rest = self.text[self.at :]
        return "".join(self.out)

    def _note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def _piece(self, char: str) -> None:
        if char in "\"'":
            self._string(char)
        elif char == ",":
            self._comma()
        elif char in "{[":
            self.open.append(char)
            self._keep(1)
        elif char in "}]":
            self._closer(char)
        elif char.isalpha():
            self._word()
        else:
            self._keep(1)

    def _keep(self, n: int) -> None:
        self.out.append(self.text[self.at : self.at + n])
        self.at += n

    def _comma(self) -> None:
        following = self.text[self.at + 1 :].lstrip()[:1]
        if following in ("}", "]"):
            self._note("a trailing comma was dropped")
            self.at += 1
        else:
            self._keep(1)

    def _closer(self, char: str) -> None:
        if not self.open or _CLOSER[self.open.pop()] != char:
            raise Refused(f"not JSON: `{char}` closes nothing")
        self._keep(1)

    def _word(self) -> None:
        end = self.at
        while end < len(self.text) and self.text[end].isalnum():
            end += 1
        word = self.text[self.at : end]
        if word in _WORDS:
            self._note(f"`{word}` was read as `{_WORDS[word]}`")
        self.out.append(_WORDS.get(word, word))
        self.at = end

    def _string(self, quote: str) -> None:
        if quote == "'":
            self._note("single quotes were read as double quotes")
        out, at = ['"'], self.at + 1
        while at < len(self.text) and self.text[at] != quote:
            piece, at = self._string_piece(at, quote)
            out.append(piece)
        if at >= len(self.text):
            raise Unclosed("a string is never closed")
        self.out.append("".join(out) + '"')
        self.at = at + 1

    def _string_piece(self, at: int, quote: str) -> tuple[str, int]:
        char = self.text[at]
        if char == "\\":
            return self._escape(at)
        if char < " ":
            self._note("a raw control character in a string was escaped")
            return _CONTROL.get(char, f"\\u{ord(char):04x}"), at + 1
        return ('\\"' if char == '"' != quote else char), at + 1

    def _escape(self, at: int) -> tuple[str, int]:
        following = self.text[at + 1 : at + 2]
        if following == "u" and _is_hex(self.text[at + 2 : at + 6]):
            return self.text[at : at + 6], at + 6
        if following and following in '"\\/bfnrt':
            return self.text[at : at + 2], at + 2
        if following == "'":
            return "'", at + 2
        self._note("a backslash that begins no JSON escape was doubled")
        return "\\\\", at + 1

    def _close_all(self) -> None:
        if self.open:
            self._note(f"{len(self.open)} missing closing bracket(s) were added")
        self.out += [_CLOSER[opener] for opener in reversed(self.open)]


def _is_hex(digits: str) -> bool:
    return len(digits) == 4 and all(c in "0123456789abcdefABCDEF" for c in digits)
