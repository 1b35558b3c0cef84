"""A grammar for the calls of the declared tools, in the format's own syntax.

The grammar covers a call from the first byte of its start marker to its end marker, then anything,
so that a token which merges a marker with its neighbours is an ordinary token. It never forces a
tokenisation (`no_forcing`): a token is allowed exactly when the matcher would accept it, and that
makes repairing after the fact equal to masking from the start.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ds4cli.tools.declared import Tool
from ds4cli.tools.detect import find_format
from ds4cli.tools.formats import Format
from ds4cli.tools.lark import NoGrammar, Writer
from ds4cli.tools.layouts import layouts


class TokenBytes:
    """A tokenizer's vocabulary as bytes, and what a matcher over it allows."""

    def __init__(self, vocab: LLTokenizer) -> None:
        self.vocab = vocab

    def tokens_of(self, data: bytes) -> list[int]:
        """Tokens that spell `data`; [] when the vocabulary cannot."""
        ids = self.vocab.tokenize_bytes(data)
        return ids if self.vocab.decode_bytes(ids) == data else []

    def bytes_of(self, token: int) -> bytes:
        return self.vocab.decode_bytes([token]) if token < self.vocab.vocab_size else b""

    def mask(self, matcher: LLMatcher | None, size: int) -> np.ndarray:
        """(size,) bool: the tokens that `matcher` accepts next (None: all), never padding ids."""
        mask = np.zeros(size, bool)
        n = min(size, self.vocab.vocab_size)
        mask[:n] = True
        if matcher is not None:
            data = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask[:n] = np.unpackbits(data, bitorder="little")[:n]
        return mask

    def instead(
        self, matcher: LLMatcher, tokens: Sequence[int], pick: int, size: int
    ) -> np.ndarray | None:
        """(size,) bool: what `matcher` lets follow `tokens`, where that is not `pick`; else None.
        The matcher stays where it is."""
        n = len(tokens)
        if matcher.validate_tokens([*tokens, pick]) != n:
            return None
        matcher.consume_tokens(list(tokens))
        mask = self.mask(matcher, size)
        matcher.rollback(n)
        return mask if mask.any() else None


class Grammar(TokenBytes):
    """The compiled grammar of one tokenizer, format and set of tools.

    build_s: seconds spent building (grammar, and the vocabulary's trie if it is the first one).
    notices: what the grammar does not enforce, for the user to read.
    """

    def __init__(self, tokenizer: Any, fmt: Format, tools: Sequence[Tool]) -> None:
        begin = time.perf_counter()
        super().__init__(vocabulary_for(tokenizer, fmt.literals()))
        self.notices: list[str] = []
        self._root = self._compile(fmt, tools)
        self._strict: list[LLMatcher] | None = None
        self._source = fmt, list(tools), find_format(tokenizer).drawn
        self.build_s = time.perf_counter() - begin

    def _compile(self, fmt: Format, tools: Sequence[Tool]) -> LLMatcher:
        """The root matcher. Tools that no grammar can hold take any arguments, and that is said."""
        writer = Writer(fmt, tools)
        matcher, error = self._try(writer.lark())
        if error:
            loose = {t.name: e for t in tools if (e := self._try(Writer(fmt, [t]).lark())[1])}
            loose = loose or {t.name: error for t in tools}
            self.notices += [
                f"tool `{name}`: arguments are checked when a call closes, not before: {why}"
                for name, why in loose.items()
            ]
            writer = Writer(fmt, tools, frozenset(loose))
            matcher, error = self._try(writer.lark())
        if error:
            raise NoGrammar(error)
        self.notices += dict.fromkeys(writer.notices)
        return matcher

    def _try(self, lark: str) -> tuple[LLMatcher, str]:
        matcher = LLMatcher(self.vocab, LLMatcher.grammar_from_lark(lark), log_level=0)
        return matcher, matcher.get_error().strip().split("\n")[0][:200]

    def matcher(self) -> LLMatcher:
        """A matcher that stands before the start marker."""
        return self._root.deep_copy()

    def forcing(self) -> list[LLMatcher]:
        """Matchers that leave no choice where a layout of the template leaves none, one for each.
        Compiled when they are first asked for."""
        if self._strict is None:
            self._strict = self._compile_strict()
        return [matcher.deep_copy() for matcher in self._strict]

    def _compile_strict(self) -> list[LLMatcher]:
        fmt, tools, drawn = self._source
        if not drawn:
            return []
        lark = Writer(fmt, tools, drawn=drawn).lark()
        tried = [self._try(layout.applied(lark)) for layout in layouts(fmt, drawn)]
        return [matcher for matcher, error in tried if not error]


_cache: weakref.WeakKeyDictionary[Any, dict[str, Grammar | str]] = weakref.WeakKeyDictionary()
_vocabularies: weakref.WeakKeyDictionary[Any, dict[str, LLTokenizer]] = weakref.WeakKeyDictionary()


def grammar_for(tokenizer: Any, fmt: Format, tools: Sequence[Tool]) -> Grammar:
    """The grammar, built once per tokenizer and set of tools. Raises NoGrammar every time."""
    built = _cache.setdefault(tokenizer, {})
    key = json.dumps([fmt.name, [[t.name, t.parameters] for t in tools]])
    if key not in built:
        try:
            built[key] = Grammar(tokenizer, fmt, tools)
        except NoGrammar as error:
            built[key] = str(error)
    found = built[key]
    if isinstance(found, str):
        raise NoGrammar(found)
    return found


# The vocabulary as bytes


def vocabulary_for(tokenizer: Any, syntax: str) -> LLTokenizer:
    """The vocabulary, built once per tokenizer and syntax: nearly all of a grammar's time.

    syntax: a text; the special tokens in it count as text too. NoGrammar where the tokens are not
    known as bytes.
    """
    built = _vocabularies.setdefault(tokenizer, {})
    if syntax not in built:
        built[syntax] = _vocabulary(tokenizer, syntax)
    return built[syntax]


class _Vocabulary:
    """What llguidance wants to know: the bytes of each id, and which ids are not text."""

    def __init__(self, backend: Any, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = eos, None
        self._backend = backend

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return self._backend.encode(text, add_special_tokens=False).ids


def _vocabulary(tokenizer: Any, syntax: str) -> LLTokenizer:
    """Special tokens count as text only where they spell a part of the format's syntax."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoGrammar("the tokenizer has no fast (tokenizer.json) form")
    if backend.padding or backend.truncation:  # would reach into what we encode; not ours to change
        backend = type(backend).from_str(backend.to_str())
        backend.no_padding()
        backend.no_truncation()
    stops = sorted(tokenizer.eos_token_ids)
    if not stops:
        raise NoGrammar("the tokenizer names no end token")
    # No slices: they make masks faster, but only repairs need a mask, and every start would pay.
    plain = LLTokenizer(backend.to_str(), eos_token=stops, slices=[])
    tokens = [plain.decode_bytes([i]) for i in range(plain.vocab_size)]
    special = {
        i for i, added in backend.get_added_tokens_decoder().items()
        if added.special and added.content not in syntax
    }  # fmt: skip
    words = _Vocabulary(backend, tokens, sorted(special | set(stops)), stops[0])
    return LLTokenizer(TokenizerWrapper(words), eos_token=stops, slices=[])
