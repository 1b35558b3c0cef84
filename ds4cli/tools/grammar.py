"""A grammar for the calls of the declared tools, in the format's own syntax.

The only module that imports llguidance.

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

from ds4cli.tools import schema as json_schema
from ds4cli.tools.declared import Tool
from ds4cli.tools.formats import SPACE, Format, Json, Literal, Named, Pythonic, Tagged
from ds4cli.tools.literals import Literals, NoGrammar, Syntax, gemma, given, python, quoted

_MAX_KEYS = 60  # llguidance counts the keys already given in one 64-bit number
# White space as people and templates write it. Without a bound a weak model can go on with it for
# ever.
_SPACE = r"([ \t]{1,4}|[ ]{0,2}(\r?\n){1,2}[ \t]{0,40})"
EMPTY = '""'
_PLAIN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_X_GUIDANCE = {"whitespace_pattern": _SPACE}


class Grammar:
    """The compiled grammar of one tokenizer, format and set of tools.

    build_s: seconds spent building (grammar, and the vocabulary's trie if it is the first one).
    notices: what the grammar does not enforce, for the user to read.
    """

    def __init__(self, tokenizer: Any, fmt: Format, tools: Sequence[Tool]) -> None:
        begin = time.perf_counter()
        self.vocab = _vocabulary_for(tokenizer, fmt)
        self.notices: list[str] = []
        self._root = self._compile(fmt, tools)
        self.build_s = time.perf_counter() - begin

    def _compile(self, fmt: Format, tools: Sequence[Tool]) -> LLMatcher:
        writer = _Writer(fmt, tools, lenient=False)
        matcher, error = self._try(writer.lark())
        if error:
            self.notices.append(f"checked when a call closes, not before: {error}")
            matcher, error = self._try(_Writer(fmt, tools, lenient=True).lark())
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


_cache: weakref.WeakKeyDictionary[Any, dict[str, Grammar | str]] = weakref.WeakKeyDictionary()
_vocabularies: weakref.WeakKeyDictionary[Any, dict[Format, LLTokenizer]] = (
    weakref.WeakKeyDictionary()
)


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


def _vocabulary_for(tokenizer: Any, fmt: Format) -> LLTokenizer:
    """The vocabulary, built once per tokenizer and format: nearly all of a grammar's time."""
    built = _vocabularies.setdefault(tokenizer, {})
    if fmt not in built:
        built[fmt] = _vocabulary(tokenizer, fmt)
    return built[fmt]


class _Vocabulary:
    """What llguidance wants to know: the bytes of each id, and which ids are not text."""

    def __init__(self, backend: Any, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = eos, None
        self._backend = backend

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return self._backend.encode(text, add_special_tokens=False).ids


def _vocabulary(tokenizer: Any, fmt: Format) -> LLTokenizer:
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
    syntax = fmt.literals()
    special = {
        i for i, added in backend.get_added_tokens_decoder().items()
        if added.special and added.content not in syntax
    }  # fmt: skip
    words = _Vocabulary(backend, tokens, sorted(special | set(stops)), stops[0])
    return LLTokenizer(TokenizerWrapper(words), eos_token=stops, slices=[])


# The grammar as text


def _escaped(text: str) -> str:
    """`text` inside a Lark regular expression."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


class _Writer:
    """Writes the Lark text. One method per style; `lenient` leaves out what llguidance cannot
    enforce.
    """

    def __init__(self, fmt: Format, tools: Sequence[Tool], lenient: bool) -> None:
        self.fmt, self.tools, self.lenient = fmt, tools, lenient
        self.rules: list[str] = []
        self.values: dict[str, str] = {}
        self.arguments: list[str] = []
        self.notices: list[str] = []

    def lark(self) -> str:
        writers = {
            Json: self._json,
            Named: self._named,
            Tagged: self._tagged,
            Literal: self._literal,
            Pythonic: self._pythonic,
        }
        style = type(self.fmt.style)
        if style not in writers:
            raise NoGrammar(f"only its own parser knows the `{self.fmt.name}` format")
        body = writers[style](self.fmt.style)
        start = "" if self.fmt.keep_start else f"{self._start()} LEAD?"
        # A call that a stop token ends has nothing behind it: the matcher accepts the stop token
        # itself.
        end = f"WS? {quoted(self.fmt.end)} TAIL?" if self.fmt.end else "WS?"
        if isinstance(self.fmt.style, Tagged) and not self.fmt.style.call_close:
            end = "TAIL?"  # the end marker ends the call itself
        self._rule("start", f"{start} {body} {end}")
        self._rule("LEAD", f"/{SPACE}/")
        self._rule("WS", f"/{_SPACE}/")
        self._rule("TAIL", r"/(.|\n)+/")
        return "\n".join(['%llguidance {"no_forcing": true}', *self.rules])

    def _start(self) -> str:
        return "(" + " | ".join(quoted(s) for s in self.fmt.starts) + ")"

    def _rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def _notice(self, sub: dict) -> None:
        """Name what this format's grammar does not hold a text to."""
        words = sorted(set(sub) & set(json_schema.TEXT_LIMITS))
        self.notices += [f"`{word}` is checked when a call closes, not before" for word in words]

    # values

    def _value(self, schema: Any, root: dict) -> str:
        """The rule of a JSON value that satisfies `schema`."""
        options = dict(_X_GUIDANCE, lenient=True) if self.lenient else _X_GUIDANCE
        schema = {} if schema is True else schema
        text = json.dumps({**root, **schema, "x-guidance": options})
        if text not in self.values:
            self.values[text] = self._rule(f"v{len(self.values)}", f"%json {text}")
        return self.values[text]

    def _all_arguments(self) -> list[str]:
        if not self.arguments:
            self.arguments = [self._arguments(i, tool) for i, tool in enumerate(self.tools)]
        return self.arguments

    def _arguments(self, index: int, tool: Tool) -> str:
        """The rule of a tool's arguments as one JSON object; its own keys come in any order."""
        schema = tool.arguments_schema
        keys = list(schema.get("properties", {}))
        if not self._is_plain(schema) or not keys:
            return self._value(schema, {"type": "object"})
        root = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        required = set(schema.get("required", ()))
        done = given([i for i, key in enumerate(keys) if key in required])
        lines = []
        for i, key in enumerate(keys):
            value = self._value(schema["properties"][key], root)
            name = quoted(json.dumps(key, ensure_ascii=False))
            lines.append(
                f'{name} WS? ":" WS? {value} WS? r{index}::set_bit({i}) %if bit_clear({i})'
            )
        self._rule(f"k{index}::_", "\n  | ".join(lines))
        more = f'"," WS? k{index}::_ %if bit_count_lt(_, {len(keys)})'
        self._rule(f"r{index}::_", f'"}}"{done}\n  | {more}')
        empty = "" if required else '| "{" WS? "}"'
        return self._rule(f"a{index}", f'"{{" WS? k{index}::0x0 {empty}')

    def _is_plain(self, schema: dict) -> bool:
        """Whether the properties can be taken one by one: nothing relates them to each other."""
        keys = set(schema) - json_schema.ANNOTATIONS
        refs = [n["$ref"] for _, n in json_schema.walk(schema) if "$ref" in n]
        return (
            keys <= _PLAIN
            and schema.get("additionalProperties") is False
            and set(schema.get("required", ())) <= set(schema.get("properties", {}))
            and all(str(r).startswith(("#/$defs/", "#/definitions/")) for r in refs)
            and len(schema["properties"]) <= _MAX_KEYS
        )

    # styles

    def _json(self, style: Json) -> str:
        calls = []
        for tool, arguments in zip(self.tools, self._all_arguments(), strict=True):
            name = quoted(json.dumps(tool.name, ensure_ascii=False))
            calls.append(f'{name} WS? "," WS? "\\"arguments\\"" WS? ":" WS? {arguments}')
        self._rule("named", "\n  | ".join(calls))
        return self._rule("object", '"{" WS? "\\"name\\"" WS? ":" WS? named WS? "}"')

    def _named(self, style: Named) -> str:
        between = _pattern(style.between)
        pairs = zip(self.tools, self._all_arguments(), strict=True)
        calls = [f"{quoted(tool.name)} {between} WS? {arguments}" for tool, arguments in pairs]
        self._rule("headed", "\n  | ".join(calls))
        after = f"WS? {quoted(style.after)}" if style.after else ""
        call = self._rule("call", f"{quoted(style.before)} headed {after}")
        if not style.or_list:
            return self._rule("calls", f"{call} (WS? {call})*") if self.fmt.end else call
        item = self._json(Json())
        listed = f'"[" WS? {item} (WS? "," WS? {item})* WS? "]"'
        return self._rule("calls", f"{call} (WS? {self._start()} WS? {call})* | {listed}")

    def _literal(self, style: Literal) -> str:
        self._rule("quoted_text[lazy]", f"/(.|\\n)*{_escaped(style.quote)}/")
        calls = [
            f"{quoted('call:' + tool.name + '{')} "
            + self._members(i, tool, gemma(style.quote), lambda key: f"{key}:", "}")
            for i, tool in enumerate(self.tools)
        ]
        self._rule("call", "\n  | ".join(calls))
        return self._rule("calls", "call call*")

    def _pythonic(self, style: Pythonic) -> str:
        escape = r"\\([\\\"'nrtbf]|u[0-9a-fA-F]{4})"
        single, double = (rf"{q}([^{q}\\\n\r\x00]|{escape})*{q}" for q in ("'", '"'))
        self._rule("PY_TEXT", f"/{double}|{single}/")
        calls = [
            f"{quoted(tool.name + '(')} "
            + self._members(i, tool, python(), lambda key: f"{key}=", ")")
            for i, tool in enumerate(self.tools)
        ]
        self._rule("call", "\n  | ".join(calls))
        return self._rule("calls", '"[" call ("," " "? call)* "]"')

    def _members(self, index: int, tool: Tool, syntax: Syntax, head: Any, close: str) -> str:
        """A tool's arguments, each with `head(key)` before it, and what closes them."""
        schema = tool.arguments_schema
        keys = schema.get("properties", {})
        if len(keys) > _MAX_KEYS:
            raise NoGrammar(f"`{tool.name}` has more than {_MAX_KEYS} arguments")
        if not keys:
            return quoted(close)
        required = [i for i, key in enumerate(keys) if key in schema.get("required", ())]
        pairs = [(head(key), sub) for key, sub in keys.items()]
        literals = Literals(self._rule, self._notice, schema, syntax, f"x{index}")
        return literals.members(pairs, required, quoted(close), 0)

    def _tagged(self, style: Tagged) -> str:
        self._text_rules(style)
        calls = [self._tagged_call(i, tool, style) for i, tool in enumerate(self.tools)]
        self._rule("call", " | ".join(calls))
        return self._rule("calls", "call (WS? call)*" if style.many else "call")

    def _text_rules(self, style: Tagged) -> None:
        """A text ends at a closing tag that structure follows; one inside it is text."""
        close = _escaped(style.value_close)
        follow = [style.key_open, style.call_close or self.fmt.end]
        first = "".join(sorted({_escaped(f[0]) for f in follow}))
        second = "".join(sorted({_escaped(f[1]) for f in follow}))
        inner = rf"[ \t\r\n]*([^{first} \t\r\n]|[{first}][^{second}])(.|\n)*{close}"
        self._rule("text[lazy]", rf"/(.|\n)*{close}/")
        self._rule("inner[lazy]", f"/{inner}/")
        self._rule("anytext", "text inner*")

    def _tagged_call(self, index: int, tool: Tool, style: Tagged) -> str:
        schema = tool.arguments_schema
        keys = schema.get("properties", {})
        root = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        if len(keys) > _MAX_KEYS:
            raise NoGrammar(f"`{tool.name}` has more than {_MAX_KEYS} arguments")
        required = [i for i, key in enumerate(keys) if key in schema.get("required", ())]
        # White space is part of these terminals: the lexer takes the longest match, and one of its
        # own would lose against `inner`, which may begin with white space too.
        close = self._terminal(style.call_close or self.fmt.end)
        lines = [f"{close}{given(required)}"]
        for i, (key, sub) in enumerate(keys.items()):
            head = self._terminal(style.key_open + key, style.key_close)
            body = self._element(sub, schema, root, style)
            lines.append(f"{head} {body} t{index}::set_bit({i}) %if bit_clear({i})")
        head = f"{quoted(style.call_open + tool.name)} {_pattern(style.name_close)}"
        if not keys:
            return self._rule(f"c{index}", f"{head} {close}")
        self._rule(f"t{index}::_", "\n  | ".join(lines))
        return self._rule(f"c{index}", f"{head} t{index}::0x0")

    def _terminal(self, literal: str, pattern: str = "") -> str:
        return f"/({_SPACE})?{_escaped(literal)}{_slashed(pattern)}/"

    def _element(self, sub: Any, schema: dict, root: dict, style: Tagged) -> str:
        """The rule of one value with its closing tag."""
        close = quoted(style.value_close)
        sub = {} if sub is True else sub
        if "$ref" in sub:
            sub = json_schema.resolve(schema, sub["$ref"])
        literals = [sub["const"]] if "const" in sub else sub.get("enum", [])
        if literals and not any(isinstance(v, (dict, list)) for v in literals):
            words = [v if isinstance(v, str) else json.dumps(v) for v in literals]
            around = {"newline": '"\\n"?', "all": "WS?", "none": ""}[style.trim]
            return f"{around} ({' | '.join(quoted(w) or EMPTY for w in words)}) {around} {close}"
        if "string" in json_schema.types_of(sub, schema):
            self._notice(sub)
            return "anytext"
        return f"WS? {self._value(sub, root)} WS? {close}"


def _pattern(text: str) -> str:
    """A regular expression of the format as Lark: a plain string where it is one."""
    plain = not any(c in r"\[](){}*+?|.^$" for c in text)
    return quoted(text) if plain else f"/{_slashed(text)}/"


def _slashed(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return pattern.replace("/", r"\/")
