"""What the sessions of a process said and read, so that one can guess from the text of another.

Texts stand in one array, with a mark between them; an index links every place to the one before it
that ends with the same few tokens. Bounded: when it is full the older half goes. In memory only,
unless a file is named: then texts are appended there, a line each, for its owner alone to read.
No mlx.
"""

from __future__ import annotations

import atexit
import json
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from ds4cli.atomic import replacing
from ds4cli.drafters.links import MAX_MATCH, Links, longest
from ds4cli.errors import UsageError

FORMAT = "ds4cli corpus 1"
NEW_FILE = "name a new file, or one that was made with `--corpus`"
MOST_TOKENS = 1 << 17  # some 15 MB with the index
# Tokens that two texts must share before one is continued with the other.
ORDER = 4
MAX_CANDIDATES = 16
BETWEEN = -1  # no token


class Author(Protocol):
    """Who has text that was not added yet."""

    def teach(self) -> None:
        """Add it."""


class Corpus:
    """Texts to guess from; the sessions of an engine share one.

    notices: gets a line where the file can no longer be written.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        self._path: Path | None = None
        self._authors: WeakSet[Author] = WeakSet()
        self.clear()

    @classmethod
    def kept(cls, path: Path, model: str) -> Corpus:
        """The corpus in a file, which gets what is added; a new one if there is none. UsageError
        for a file that is something else, or of another model."""
        corpus = cls()
        texts = _read(path, model)
        for text in texts:
            corpus.add(text)
        corpus._path = path
        _rewrite(path, model, corpus._texts())
        atexit.register(corpus.finish)
        return corpus

    def __len__(self) -> int:
        return len(self._tokens)

    def join(self, author: Author) -> None:
        """`author` will be asked for its last text before the process ends."""
        self._authors.add(author)

    def clear(self) -> None:
        """Forget all texts, but for those in the file."""
        self._tokens = array("i")
        self._links = Links((ORDER,), MAX_CANDIDATES)

    def finish(self) -> None:
        """Take in what nobody added yet."""
        for author in list(self._authors):
            author.teach()

    def add(self, text: Sequence[int]) -> None:
        """A text that was said or read."""
        if len(self._tokens) + len(text) >= MOST_TOKENS:
            self._forget_half()
        known = len(self._tokens)
        self._tokens.extend(text[-MOST_TOKENS // 2 :])
        self._tokens.append(BETWEEN)
        self._links.extend(self._tokens, known)
        if self._path is not None:
            self._append(self._path, text)

    def _forget_half(self) -> None:
        self._tokens = self._tokens[len(self._tokens) // 2 :]
        self._links = Links((ORDER,), MAX_CANDIDATES)
        self._links.extend(self._tokens, 0)

    def _texts(self) -> list[list[int]]:
        texts: list[list[int]] = [[]]
        for token in self._tokens:
            if token == BETWEEN:
                texts.append([])
            else:
                texts[-1].append(token)
        return [text for text in texts if text]

    # -- guessing ----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Where the texts that end most like `tokens` go on, the newest first, and how many tokens
        they share."""
        ends = self._links.candidates(tokens)
        if not ends:
            return [], 0
        ends, length = longest(self._tokens, ends, tokens, 0, min(MAX_MATCH, len(tokens)))
        return (ends, length) if length >= ORDER else ([], 0)

    def continued(self, ends: list[int], n: int, row_price: float) -> list[int]:
        """At most n tokens after these places: the most frequent ones, while it is likelier than a
        row's price, by the counts, that a text goes on like this."""
        return continuation(self._tokens, ends, n, row_price)

    # -- on disk -----------------------------------------------------------------------------------

    def _append(self, path: Path, text: Sequence[int]) -> None:
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(json.dumps(list(text)) + "\n")
        except OSError as error:
            self._path = None
            self.notices.append(f"nothing more is kept in `{path}`: {error.strerror}")


def continuation(tokens: Sequence[int], ends: list[int], n: int, row_price: float) -> list[int]:
    """At most n of `tokens`: what most often follows `ends`, after that what most often follows
    there, ..., while the product of their shares is not below `row_price`, in tokens."""
    out: list[int] = []
    chance = 1.0
    while len(out) < n:
        ends = [end for end in ends if end < len(tokens) and tokens[end] != BETWEEN]
        if not ends:
            break
        token, count = Counter(tokens[end] for end in ends).most_common(1)[0]
        chance *= count / len(ends)
        if chance < row_price:
            break
        out.append(token)
        ends = [end + 1 for end in ends if tokens[end] == token]
    return out


def _read(path: Path, model: str) -> list[list[int]]:
    """The texts in a file; a last line that was cut off is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the corpus `{path}`: {error}") from None
    texts = []
    for i, line in enumerate(lines):
        try:
            found = json.loads(line)
        except ValueError:
            if i == 0 or i < len(lines) - 1:
                raise UsageError(
                    f"`{path}` is no corpus of ds4cli: line {i + 1}", NEW_FILE
                ) from None
            continue
        if i == 0:
            _check_header(path, found, model)
        elif _is_text(found):
            texts.append(found)
        else:
            raise UsageError(f"`{path}` is no corpus of ds4cli: line {i + 1}", NEW_FILE)
    return texts


def _is_text(found: object) -> bool:
    return isinstance(found, list) and all(type(t) is int and 0 <= t < 1 << 31 for t in found)


def _check_header(path: Path, found: object, model: str) -> None:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"`{path}` is no corpus of ds4cli", NEW_FILE)
    if found.get("model") != model:
        raise UsageError(
            f"the corpus `{path}` was made with another model", "name another file for this one"
        )


def _rewrite(path: Path, model: str, texts: list[list[int]]) -> None:
    """The file anew, with what is kept of it, whole or not at all."""
    lines = [json.dumps({"format": FORMAT, "model": model}), *map(json.dumps, texts)]
    try:
        with replacing(path) as new:
            new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the corpus `{path}`: {error.strerror}") from None
