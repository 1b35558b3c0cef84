"""The grammar of a wanted form, compiled by llguidance.

A token is allowed exactly when the matcher would accept it (`no_forcing`), so that repairing after
the fact equals masking from the start. A second matcher, which may force, is asked for guesses.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from ds4cli.structured.wanted import Wanted
from ds4cli.tools.grammar import TokenBytes, vocabulary_for
from ds4cli.tools.lark import NoGrammar

# White space as people write it; bounded, since a weak model can go on with it for ever.
_SPACE = r"([ \t]{1,4}|[ ]{0,2}(\r?\n){1,2}[ \t]{0,40})"
_JSON_RULES = r"""start: LEAD? value TAIL?
LEAD: /[ \t\n]{1,4}/
TAIL: /\n{1,2}/
value: %json """
FLEXIBLE = {"whitespace_pattern": _SPACE}
# The two ways in which models write JSON on one line.
STYLES = tuple(
    {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    for item, key in ((", ", ": "), (",", ":"))
)
NO_FORCING = '%llguidance {"no_forcing": true}\n'


_BOOLEAN: dict[bool, dict[str, Any]] = {True: {}, False: {"not": {}}}


class NoForm(Exception):
    """There can be no grammar of this form; the text says why."""


def unheld(wanted: Wanted) -> list[str]:
    """What of a schema no grammar holds a text to; NoForm where there can be no grammar at all."""
    is_bad, messages = LLMatcher.validate_grammar_with_warnings(_compiled(wanted, lenient=False))
    if not is_bad:
        return []
    if wanted.kind == "json":
        is_bad, messages = LLMatcher.validate_grammar_with_warnings(_compiled(wanted, lenient=True))
    if is_bad:
        raise NoForm(_first_line(messages))
    return list(dict.fromkeys(word for message in messages for word in _words(message)))


def _first_line(messages: list[str]) -> str:
    """llguidance's reason without the place in a text that the user did not write."""
    text = messages[0] if messages else "it does not compile"
    lines = [line.strip() for line in text.split("\n")]
    head = lines[0].split(": ", 1)[-1]
    error = next((line for line in lines if line.startswith("error: ")), "")
    return f"{head} {error.removeprefix('error: ')}".strip()[:200]


def _words(message: str) -> list[str]:
    """A warning of llguidance in the words of the schema."""
    kind, _, names = message.partition(": ")
    if kind == "Unimplemented keys":
        return [f"`{name}`" for name in re.findall(r'"([^"]+)"', names)]
    return [f"`format` `{names}`" if kind == "Unknown format" else f"`{message.split()[0]}`"]


def _compiled(
    wanted: Wanted,
    lenient: bool = True,
    forcing: bool = False,
    style: Mapping[str, object] = FLEXIBLE,
) -> str:
    """The grammar as llguidance takes it; `style` says what white space JSON has."""
    head = "" if forcing else NO_FORCING
    if wanted.kind == "json":
        options = {**style, "lenient": lenient}
        schema = _BOOLEAN[wanted.source] if isinstance(wanted.source, bool) else wanted.source
        body = _JSON_RULES + json.dumps({**schema, "x-guidance": options})
    elif wanted.kind == "regex":
        body = f"start: TEXT\nTEXT: /{_slashed(wanted.source)}/"
    else:
        body = wanted.source
    return LLMatcher.grammar_from_lark(head + body)


def _slashed(pattern: str) -> str:
    """A pattern as it stands between slashes, on one line."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")


class Form(TokenBytes):
    """The compiled grammar of a wanted form for one tokenizer's vocabulary."""

    def __init__(self, tokenizer: Any, wanted: Wanted):
        self.wanted = wanted
        super().__init__(vocabulary_for(tokenizer, ""))
        self._root = LLMatcher(self.vocab, _compiled(wanted), log_level=0)
        strict = STYLES if wanted.kind == "json" else ()
        styles: tuple[Mapping[str, object], ...] = (*strict, FLEXIBLE)
        texts = [_compiled(wanted, forcing=True, style=style) for style in styles]
        self._forcing = [LLMatcher(self.vocab, text, log_level=0) for text in texts]

    def matcher(self) -> LLMatcher:
        """A matcher that stands before the text."""
        return self._root.deep_copy()

    def forcing(self) -> list[LLMatcher]:
        """Matchers that say which tokens must follow, for guesses, one for each style."""
        return [matcher.deep_copy() for matcher in self._forcing]


_forms: weakref.WeakKeyDictionary[Any, dict[str, Form]] = weakref.WeakKeyDictionary()


def form_of(tokenizer: Any, wanted: Wanted) -> Form:
    """The form's grammar, built once per tokenizer. NoForm where the vocabulary is not known as
    bytes."""
    built = _forms.setdefault(tokenizer, {})
    key = json.dumps([wanted.kind, wanted.source])
    if key not in built:
        try:
            built[key] = Form(tokenizer, wanted)
        except NoGrammar as error:
            raise NoForm(str(error)) from None
    return built[key]
