"""Lark rules for the values that a JSON schema allows, in any spelling.

The rules take every value that the schema allows, its keys in any order, and as few others as
Lark can tell apart; what they cannot tell is checked when the call closes, and said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import regex
from llguidance import LLMatcher

from ds4cli.tools import schema as json_schema
from ds4cli.tools.literals import BARE_TEXT, JSON, Syntax

MAX_BITS = 60  # llguidance counts the keys already given in one 64-bit number
MAX_REPEATS = 50
MAX_DEPTH = 40
# White space as people and templates write it. Without a bound a weak model can go on with it for
# ever.
SPACE = r"([ \t]{1,4}|[ ]{0,2}(\r?\n){1,2}[ \t]{0,40})"
_HEX = "[0-9a-fA-F]"
_CODE = (
    rf"u([0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
_JSON_TEXT = rf'"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|{_CODE}))*"'
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_INTEGER = r"-?(0|[1-9][0-9]*)(\.0+)?"
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
PROBED = "city"  # an argument of the call that templates draw
NEVER = None  # the rule of a value that no text spells


def quoted(text: str) -> str:
    """A Lark string literal; "" for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def escaped(text: str) -> str:
    """`text` inside a Lark regular expression."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


def given(required: Iterable[int]) -> str:
    """`%if` every key with these numbers has been given; nothing when none has to be."""
    condition = ""
    for i in required:
        condition = f"and({condition}, bit_set({i}))" if condition else f"bit_set({i})"
    return f" %if {condition}" if condition else ""


def is_whole(lark: str) -> bool:
    """Whether llguidance can compile this."""
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))


class Rules:
    """The rules of one grammar, each written once. drawn: a call as the model's template draws it;
    given that, the rules take the one spelling of it and keys in the order of their schema.
    """

    def __init__(self, drawn: str = "") -> None:
        self.drawn = drawn
        self.lines: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def define(self, name: str, body: str) -> str:
        """A rule under its own name; `[lazy]` or `::_` may follow that."""
        plain = name.partition("[")[0].removesuffix("::_")
        self.lines[plain] = f"{name}: {body}"
        return plain

    def usual(self, ways: list[str]) -> list[str]:
        """The ways to spell something: all of them, or the one that is drawn."""
        if not self.drawn:
            return ways
        return [next((way for way in ways if way and way in self.drawn), ways[0])]

    def shared(self, body: str) -> str:
        """A rule with this body, whatever its name."""
        if body not in self._names:
            self._names[body] = self.define(f"n{len(self._names)}", body)
        return self._names[body]


class Values:
    """Writes the rules of one tool's values.

    root: the schema that references point into. notes: what the rules do not hold a value to.
    """

    def __init__(self, rules: Rules, syntax: Syntax, root: Any, name: str) -> None:
        self.rules, self.syntax, self.root, self.name = rules, syntax, root, name
        self.notes: list[str] = []
        self._references: dict[str, str] = {}
        self._count = 0
        self._any = ""

    # one value

    def value(self, schema: Any, depth: int = 0) -> str | None:
        """The rule of a value of `schema`; NEVER where there is none."""
        if schema is False:
            return NEVER
        if not isinstance(schema, dict) or not schema:
            return self.anything()
        if depth > MAX_DEPTH:
            self._note(f"values more than {MAX_DEPTH} levels deep are")
            return self.anything()
        if "$ref" in schema:
            return self._reference(schema["$ref"], depth)
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if constants is not None and not any(isinstance(c, (dict, list)) for c in constants):
            return self._either(self._constant(c) for c in constants)
        branch = self._branch(schema, depth)
        return branch if branch != "" else self._by_type(schema, depth)

    def _reference(self, ref: str, depth: int) -> str | None:
        """What a reference points at has one rule: it may refer to itself."""
        if ref not in self._references:
            name = f"{self.name}_f{len(self._references)}"
            self._references[ref] = name
            target = json_schema.resolve(self.root, ref)
            found = self.anything() if _only_refers(target) else self.value(target, depth + 1)
            self.rules.define(name, found or self.anything())
        return self._references[ref]

    def _branch(self, schema: dict[str, Any], depth: int) -> str | None:
        """The rule of alternatives; "" where the schema itself says more, or has none."""
        says = set(schema) & {"type", "properties", "items", "enum", "const", "required"}
        for word in ("anyOf", "oneOf"):
            if word in schema and not says - {"type"}:
                typed = {"type": schema["type"]} if "type" in schema else {}
                subs = [s if not isinstance(s, dict) else {**typed, **s} for s in schema[word]]
                return self._either(self.value(s, depth + 1) for s in subs)
        if "allOf" in schema and not says:
            self._note("`allOf` is", len(schema["allOf"]) > 1)
            parts = [p for p in schema["allOf"] if isinstance(p, dict)]
            return self.value(max(parts, key=len), depth + 1) if parts else self.anything()
        for word in ("anyOf", "oneOf", "allOf", "not", "if"):
            self._note(f"`{word}` is", word in schema)
        return ""

    def _by_type(self, schema: dict[str, Any], depth: int) -> str | None:
        types = json_schema.types_of(schema, self.root)
        kinds = [k for k in _TYPES if k in types and not (k == "integer" and "number" in types)]
        return self._either(self._of_type(kind, schema, depth) for kind in kinds)

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> str | None:
        if kind == "string":
            return self._text(schema)
        if kind == "boolean":
            return self._either([self._constant(True), self._constant(False)])
        if kind == "null":
            return self._constant(None)
        if kind in ("integer", "number"):
            return self._number(kind, schema)
        if kind == "array":
            return self._array(schema, depth)
        return self._object(schema, depth)

    def anything(self) -> str:
        """The rule of any value of this syntax."""
        if not self._any:
            syntax = self.syntax
            name = self._any = f"any_{syntax.name}"
            self._any_rule(name)
        return self._any

    def _any_rule(self, name: str) -> None:
        words = " | ".join(quoted(word) for word in self.syntax.words)
        comma, text = self._comma(), self.any_text()
        keys = [self.any_text(), *([self._bare_key()] if self.syntax.bare_keys else [])]
        member = f'({" | ".join(keys)}) WS? ":" WS? {name}'
        listed = f'"[" WS? ({name} ({comma} {name})*)? WS? "]"'
        objects = f'"{{" WS? ({member} ({comma} {member})*)? WS? "}}"'
        self.rules.define("NUMBER", f"/{_NUMBER}/")
        self.rules.define(name, f"{text} | NUMBER | {words} | {listed} | {objects}")

    def _either(self, options: Iterable[str | None]) -> str | None:
        found = list(dict.fromkeys(option for option in options if option is not None))
        return self.rules.shared(" | ".join(found)) if found else NEVER

    def _note(self, what: str, holds: object = True) -> None:
        note = f"{what} checked when a call closes, not before"
        if holds and note not in self.notes:
            self.notes.append(note)

    # texts, numbers, constants

    def _constant(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return " | ".join(quoted(word) for word in self.syntax.spellings(value))
        if not isinstance(value, str):
            whole = int(value) if float(value).is_integer() else value
            ways = dict.fromkeys([json.dumps(whole), json.dumps(value), json.dumps(float(value))])
            return " | ".join(quoted(way) for way in ways)
        if not self.syntax.escapes:
            return quoted(f"{self.syntax.quotes[0]}{value}{self.syntax.quotes[0]}")
        bare = [value] if self.syntax.bare_texts and regex.fullmatch(BARE_TEXT, value) else []
        return " | ".join(quoted(text) for text in [*_spelled(value, self.syntax), *bare])

    def any_text(self) -> str:
        """The terminal of any text."""
        syntax = self.syntax
        name = f"TEXT_{syntax.name.upper()}"
        if syntax == JSON:
            return self.rules.define(name, f"/{_JSON_TEXT}/")
        if syntax.escapes:
            never = escaped(syntax.never)
            inner = rf"[^{{q}}{never}\\]|\\([^{never}]|\n)" if never else r"[^{q}\\]|\\(.|\n)"
            inside = {q: inner.replace("{q}", q) for q in syntax.quotes}
            if syntax.apostrophes:
                inside["'"] += r"|\w('\w)+"
            forms = [f"{q}({inside[q]})*{q}" for q in syntax.quotes]
            forms += [BARE_TEXT] if syntax.bare_texts else []
            return self.rules.define(name, f"/{'|'.join(forms)}/")
        close = escaped(syntax.quotes[0])
        behind = self.rules.define(f"rest_{syntax.name}[lazy]", rf"/(.|\n)*{close}/")
        return f"{quoted(syntax.quotes[0])} {behind}"

    def _text(self, schema: dict[str, Any]) -> str:
        limits = {k: v for k, v in schema.items() if k in json_schema.TEXT_LIMITS}
        if not limits:
            return self.any_text()
        if self.syntax == JSON:
            rule = f"%json {json.dumps({'type': 'string', **limits})}"
            if is_whole(f"start: {rule}"):
                return rule
        for word in sorted(limits):
            self._note(f"`{word}` is")
        return self.any_text()

    def _number(self, kind: str, schema: dict[str, Any]) -> str:
        limits = {k: v for k, v in schema.items() if k in json_schema.NUMBER_LIMITS}
        if limits:
            rule = f"%json {json.dumps({'type': kind, **limits})}"
            if is_whole(f"start: {rule}"):
                return rule
            self._note(f"`{sorted(limits)[0]}` is")
        if kind == "integer":
            return self.rules.define("INTEGER", f"/{_INTEGER}/")
        return self.rules.define("NUMBER", f"/{_NUMBER}/")

    # lists and objects

    def _comma(self) -> str:
        return 'WS? "," WS?'

    def _array(self, schema: dict[str, Any], depth: int) -> str:
        """The first items by `prefixItems`, the others by `items`."""
        for word in ("uniqueItems", "contains"):
            self._note(f"`{word}` is", schema.get(word))
        first, others = json_schema.items_of(schema)
        item = self.value(others, depth + 1)
        if first:
            return self._tuple([self.value(s, depth + 1) for s in first], item)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if item is NEVER or most == 0:
            return '"[" WS? "]"'
        more = _times(f"({self._comma()} {item})", least - 1, None if most is None else most - 1)
        inner = f"{item} {more} WS?"
        return f'"[" WS? {inner if least > 0 else f"({inner})?"} "]"'

    def _tuple(self, first: list[str | None], item: str | None) -> str:
        """Each place has its own kind; the list may end at any of them."""
        tail = f"({self._comma()} {item})*" if item is not NEVER else ""
        for i, place in reversed(list(enumerate(first))):
            if place is NEVER:
                tail = ""
                continue
            tail = f"({self._comma() if i else ''} {place} {tail})?"
        return f'"[" WS? {tail} WS? "]"'

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        for word in ("minProperties", "maxProperties", "propertyNames"):
            self._note(f"`{word}` is", word in schema)
        declared = schema.get("properties", {})
        heads = [(f'({self._key(k)}) WS? ":" WS?', k, s) for k, s in declared.items()]
        other = self._other(schema, list(declared), depth)
        required = set(schema.get("required", ()))
        self._note("`required` of what is not declared is", required - declared.keys())
        body = self.members(heads, required, 'WS? "}"', self._comma(), depth, other)
        return f'"{{" WS? {body}'

    def _other(self, schema: dict[str, Any], known: Sequence[str], depth: int) -> str | None:
        """A member whose name is not declared, where the schema lets one in."""
        more = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties")
        self._note("`patternProperties` is", patterns)
        value = self.anything() if patterns else self.value(more, depth + 1)
        if value is NEVER:
            return NEVER
        return f'({self._other_key(known)}) WS? ":" WS? {value}'

    def _other_key(self, known: Sequence[str]) -> str:
        """A name that is none of `known`."""
        text = self.any_text()
        keys = text if self.syntax.escapes else f"{text} | {self._bare_key()}"
        if not known or not self.syntax.escapes:
            return keys
        names = " | ".join(self._key(k) for k in known)
        spelled = self.rules.define(f"KNOWN_{self.name.upper()}_{self._next()}", names)
        return self.rules.define(
            f"OTHER_{self.name.upper()}_{self._next()}", f"{text} & ~{spelled}"
        )

    def _bare_key(self) -> str:
        return self.rules.define("BARE_KEY", r"""/[^\s:{}\[\],"'<][^:{}\[\],"'<]*/""")

    def _key(self, key: str) -> str:
        if not self.syntax.bare_keys:
            ways = _spelled(key, self.syntax)
            single = bool(self.rules.drawn) and f'"{PROBED}"' not in self.rules.drawn
            ways = [w for w in ways if w[0] == "'"] or ways if single else ways
            ways = ways[:1] if self.rules.drawn else ways
            return " | ".join(quoted(text) for text in ways)
        wrapped = f"{self.syntax.quotes[0]}{key}{self.syntax.quotes[0]}"
        is_plain = not any(c in ":{}[],\"'<" or c.isspace() for c in key)
        if self.rules.drawn and is_plain:
            return quoted(key)
        return " | ".join(quoted(k) for k in ([key, wrapped] if is_plain else [wrapped]))

    def _next(self) -> int:
        self._count += 1
        return self._count

    def members(
        self,
        heads: list[tuple[str, str, Any]],
        required: set[str],
        close: str,
        comma: str,
        depth: int = 0,
        other: str | None = NEVER,
    ) -> str:
        """Members as (what stands before a value, its name, its schema): each at most once, in any
        order, all `required` ones; then `close`. other: the rule of a further member."""
        written = [(f"{head} {v}", name) for head, name, sub in heads
                   if (v := self.wrapped(sub, depth + 1)) is not NEVER]  # fmt: skip
        return self.ordered(written, required, close, comma, other)

    def ordered(
        self,
        written: list[tuple[str, str]],
        required: set[str],
        close: str,
        comma: str,
        other: str | None = NEVER,
    ) -> str:
        """The same for members as (their rule, their name)."""
        if self.rules.drawn:
            return self.in_order(written, required, close, comma)
        bits = numbered([name for _, name in written], required)
        first, rest = (f"{self.name}_{kind}{self._next()}" for kind in ("k", "r"))
        lines = [f"{rule} {marked(rest, bits, name)}" for rule, name in written]
        lines += [f"{other} {marked(rest, bits)}"] if other is not NEVER else []
        done = given(bits[name] for name in sorted(required & set(bits)))
        if not lines:
            return close
        is_bounded = other is NEVER and len(bits) == len(written)
        limit = f" %if bit_count_lt(_, {len(lines)})" if is_bounded else ""
        self.rules.define(marked(first, bits), "\n  | ".join(lines))
        again = f"{comma} {marked(first, bits)}{limit}"
        self.rules.define(marked(rest, bits), f"{close}{done}\n  | {again}")
        begin = f"{first}::0x0" if bits else first
        return f"({begin}{'' if required & set(bits) else f' | {close}'})"

    def in_order(
        self, written: list[tuple[str, str]], required: set[str], close: str, comma: str
    ) -> str:
        """The same in the order given: what a template draws."""
        name = f"{self.name}_o{self._next()}"
        for given_any in (0, 1):
            self.rules.define(f"{name}_{len(written)}_{given_any}", close)
            for i, (rule, key) in enumerate(written):
                before = comma if given_any else ""
                ways = [f"{before} {rule} {name}_{i + 1}_1"]
                ways += [] if key in required else [f"{name}_{i + 1}_{given_any}"]
                self.rules.define(f"{name}_{i}_{given_any}", " | ".join(ways))
        return f"{name}_0_0"

    def wrapped(self, sub: Any, depth: int) -> str | None:
        """A member's value; where the syntax may put quotes around all of them, with these."""
        value, types = self.value(sub, depth), json_schema.types_of(sub, self.root)
        if not self.syntax.wraps or depth > 1 or value is NEVER or types <= {"string"}:
            return value
        ways = [value]
        if self.rules.drawn and not any(f"{q}3" in self.rules.drawn for q in self.syntax.quotes):
            return value
        for quote in self.syntax.quotes:
            name = f"{self.name}_w{self._next()}"
            inner = Values(self.rules, self.syntax.inside(quote), self.root, name)
            ways.append(f"{quoted(quote)} WS? {inner.value(sub, depth)} WS? {quoted(quote)}")
        return self.rules.shared(" | ".join(ways))


def _spelled(text: str, syntax: Syntax) -> list[str]:
    """The usual ways to write a constant text between quotes."""
    ways = [json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text)]
    return [w for w in dict.fromkeys(ways) if w[0] in syntax.quotes]


def numbered(names: Sequence[str], required: set[str]) -> dict[str, int]:
    """A bit for each member, for the required ones first, as far as there are bits."""
    ordered = [n for n in names if n in required] + [n for n in names if n not in required]
    return {name: bit for bit, name in enumerate(ordered[:MAX_BITS])}


def marked(rule: str, bits: dict[str, int], name: str = "") -> str:
    """`rule` with the bits of the members given so far, and that of `name`."""
    if not bits:
        return rule
    bit = bits.get(name)
    return f"{rule}::_" if bit is None else f"{rule}::set_bit({bit}) %if bit_clear({bit})"


def _times(what: str, least: int, most: int | None) -> str:
    """`what` so many times, as far as it is sensible to count."""
    least = max(0, least)
    if least > MAX_REPEATS:
        least = 0
    if most is None or most > MAX_REPEATS:
        return f"{what}{{{least},}}" if least else f"{what}*"
    return f"{what}{{{least},{max(least, most)}}}" if most > 0 else ""


def _only_refers(target: Any) -> bool:
    return isinstance(target, dict) and "$ref" in target
