"""A format's calls of the declared tools as a Lark grammar, one method per style."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ds4cli.tools import checking
from ds4cli.tools import schema as json_schema
from ds4cli.tools.declared import Tool
from ds4cli.tools.formats import (
    SPACE as LEAD,
)
from ds4cli.tools.formats import (
    Foreign,
    Format,
    Json,
    Literal,
    Named,
    Pythonic,
    Style,
    Tagged,
)
from ds4cli.tools.literals import Syntax
from ds4cli.tools.values import (
    NEVER,
    SPACE,
    Rules,
    Values,
    escaped,
    given,
    marked,
    numbered,
    quoted,
)

_OPEN = {"type": "object"}  # any arguments
_GAP = r"[ \t\r\n]{1,40}"  # between calls
ANY_TEXT = r"(.|\n)*"
_SEPARATED = '(WS? ("," | ";"))? GAP?'


class NoGrammar(Exception):
    """No grammar can be built; the text says why. Calls are then parsed when they close."""


class Writer:
    """Writes the Lark text for calls of `tools`; those named in `loose` take any arguments.
    drawn: see `Rules`."""

    def __init__(
        self,
        fmt: Format,
        tools: Sequence[Tool],
        loose: frozenset[str] = frozenset(),
        drawn: str = "",
    ) -> None:
        self.fmt, self.tools = fmt, tools
        self.schemas = [_OPEN if t.name in loose else t.arguments_schema for t in tools]
        self.rules = Rules(drawn)
        self.notices: list[str] = []

    def lark(self) -> str:
        self.rules.define("start", " | ".join(self._ways()))
        self.rules.define("LEAD", f"/{LEAD}/")
        self.rules.define("WS", f"/{SPACE}/")
        self.rules.define("GAP", f"/{_GAP}/")
        self.rules.define("TAIL", r"/(.|\n)+/")
        options = "{}" if self.rules.drawn else '{"no_forcing": true}'
        return "\n".join([f"%llguidance {options}", *self.rules.lines.values()])

    def _ways(self) -> list[str]:
        """A call with its marker, and one without."""
        fmt, drawn = self.fmt, self.rules.drawn
        ways = []
        if fmt.starts and (not drawn or any(start in drawn for start in fmt.starts)):
            ways.append(f"{self._start()} LEAD? {self._calls(fmt.style)} {self._end()}")
        if fmt.kept and not (drawn and ways):
            ways.append(self._kept())
        return ways

    def _calls(self, style: Style) -> str:
        match style:
            case Json():
                return self._json(style)
            case Named():
                return self._named(style)
            case Tagged():
                return self._tagged(style)
            case Literal():
                return self._literal(style)
            case Pythonic():
                return self._pythonic(style)
            case Foreign():
                raise NoGrammar(f"only its own parser knows the `{self.fmt.name}` format")

    def _start(self) -> str:
        return "(" + " | ".join(quoted(s) for s in self.rules.usual([*self.fmt.starts])) + ")"

    def _end(self) -> str:
        """A call that a stop token ends has nothing behind it: the matcher accepts the stop token
        itself."""
        fmt = self.fmt
        if _ends_itself(fmt):
            return "TAIL?"
        if not fmt.end:
            return f"WS? {quoted(fmt.close)}? WS?" if fmt.close else "WS?"
        return f"GAP? {quoted(fmt.end)} TAIL?"

    def _kept(self) -> str:
        """A call that began without a marker, which may end without one."""
        fmt = self.fmt
        if isinstance(fmt.style, Tagged) and _has_unclosed(fmt):
            return f"{self._tagged(fmt.style, kept='k')} TAIL?"
        end = self._end() if _ends_itself(fmt) or not fmt.end else f"({self._end()})?"
        return f"{self._calls(fmt.style)} {end}"

    def _values(self, index: int, syntax: Syntax) -> Values:
        return Values(self.rules, syntax, self.schemas[index], f"x{index}")

    def _said(self, values: Values) -> None:
        self.notices += values.notes

    def _arguments(self, index: int, syntax: Syntax) -> str:
        """The rule of a tool's arguments as one object."""
        values = self._values(index, syntax)
        schema = self.schemas[index]
        rule = values.value({"type": "object", **schema} if "$ref" not in schema else schema)
        self._said(values)
        return rule or '"{" WS? "}"'

    # {"name": ..., "arguments": {...}}

    def _json(self, style: Json) -> str:
        one = self.rules.define("object", " | ".join(self._objects(style)))
        listed = f'"[" WS? {one} (WS? "," WS? {one})* WS? "]"'
        again = self._again(one) or f"({_SEPARATED} {one})*"
        return self.rules.define("calls", f"{listed} | {one} {again}")

    def _again(self, call: str) -> str:
        """More calls where each has a marker of its own and nothing but the reply's end ends."""
        if self.fmt.end or not self.fmt.starts:
            return ""
        return f"({_SEPARATED} ({self._start()} LEAD?)? {call})*"

    def _objects(self, style: Json) -> list[str]:
        """A call of each tool, its keys in any order."""
        calls = []
        for i, tool in enumerate(self.tools):
            arguments = self._arguments(i, style.values)
            values = Values(self.rules, style.values, {}, f"h{i}")
            name = f"({' | '.join(_spelled(values, tool.name))})"
            if style.keyed:
                calls.append(f'"{{" WS? {name} WS? ":" WS? {arguments} WS? "}}"')
                continue
            members = [
                (f"{_member(values, [style.name])} {name}", style.name),
                (
                    f"{_member(values, self.rules.usual([*style.arguments]))} {arguments}",
                    style.arguments[0],
                ),
            ]
            if not self.rules.drawn:
                texts = values.any_text()
                members += [(f"{_member(values, [key])} {texts}", key) for key in style.more]
            needed = {style.name, style.arguments[0]}
            body = values.ordered(members, needed, 'WS? "}"', 'WS? "," WS?')
            calls.append(f'"{{" WS? {body}')
        return calls

    # name{...}: the name outside

    def _named(self, style: Named) -> str:
        between = _pattern(style.between)
        calls = [
            f"{quoted(tool.name)} {between} WS? {self._arguments(i, style.values)}"
            for i, tool in enumerate(self.tools)
        ]
        self.rules.define("headed", "\n  | ".join(calls))
        after = self._terminal(style.after) if style.after else ""
        before = _pattern(style.before) if style.before else ""
        call = self.rules.define("call", f"{before} headed {after}")
        again = self._again(call) or (f"(GAP? {call})*" if style.before else "")
        if not style.or_list:
            return self.rules.define("calls", f"{call} {again}")
        listed = self._json(Json())
        return self.rules.define("either", f"{call} {again} | {listed}")

    # call:name{key:value} and name(key=value)

    def _literal(self, style: Literal) -> str:
        def head(values: Values, key: str) -> str:
            return f'({values._key(key)}) WS? ":" WS?'

        calls = [
            f"{quoted('call:' + tool.name + '{')} WS? {self._members(i, style.values, head, '}')}"
            for i, tool in enumerate(self.tools)
        ]
        call = self.rules.define("call", "\n  | ".join(calls))
        return self.rules.define("calls", f'{call} ((WS? ",")? GAP? {call})*')

    def _pythonic(self, style: Pythonic) -> str:
        def head(values: Values, key: str) -> str:
            return f'{quoted(key)} " "? "=" " "?'

        calls = [
            f'{quoted(tool.name)} "(" WS? {self._members(i, style.values, head, ")")}'
            for i, tool in enumerate(self.tools)
        ]
        call = self.rules.define("call", "\n  | ".join(calls))
        return self.rules.define("calls", f'"[" WS? {call} (WS? "," WS? {call})* WS? "]"')

    def _members(self, index: int, syntax: Syntax, head: Any, close: str) -> str:
        """A tool's arguments, each with `head(values, key)` before it, and what closes them."""
        values = self._values(index, syntax)
        keys, required, more = self._declared(index)
        heads = [(head(values, key), key, sub) for key, sub in keys.items()]
        other = f"{self._any_head(index, keys, close)} {values.anything()}" if more else NEVER
        closing = f"WS? {quoted(close)}"
        rule = values.members(heads, required, closing, 'WS? "," WS?', other=other)
        self._said(values)
        return rule

    def _any_head(self, index: int, keys: Iterable[str], close: str) -> str:
        """What stands before the value of an argument that is none of `keys`."""
        known = " | ".join(map(quoted, keys))
        name = self.rules.define(f"NAME_{index}", _but(r"/[A-Za-z_][\w.\-]{0,63}/", known))
        return f"{name} WS? {quoted(':' if close == '}' else '=')} WS?"

    def _declared(self, index: int) -> tuple[dict[str, Any], set[str], bool]:
        """A tool's arguments, the required ones of them, and whether there may be more."""
        schema = json_schema.followed(self.schemas[index])
        keys = {k: s for k, s in schema.get("properties", {}).items() if s is not False}
        is_open = bool(schema.get("patternProperties") or schema.get("additionalProperties", True))
        required = set(schema.get("required", ())) & set(keys)
        if isinstance(self.fmt.style, Tagged) and self.fmt.style.omits_null:
            required -= set(json_schema.nullable(schema, self.schemas[index]))
        return keys, required, is_open

    # one element per argument

    def _tagged(self, style: Tagged, kept: str = "") -> str:
        """kept: what the rules of calls that began without a marker are called."""
        calls = [self._tagged_call(i, tool, style, kept) for i, tool in enumerate(self.tools)]
        call = self.rules.define(f"call{kept}", " | ".join(calls))
        return self.rules.define(f"calls{kept}", f"{call} (GAP? {call})*" if style.many else call)

    def _tagged_call(self, index: int, tool: Tool, style: Tagged, kept: str) -> str:
        values = self._values(index, style.values)
        keys, required, more = self._declared(index)
        written = [
            (self._terminal(style.key_open + key, style.key_close), body, key)
            for key, sub in keys.items()
            if (body := self._element(key, sub, values, style)) is not NEVER
        ]
        values._note("what follows an undeclared argument is", more and style.is_keyed)
        end = self._call_end(style, kept)
        if self.rules.drawn:
            members = [(f"{head} {body}", key) for head, body, key in written]
            rest = values.in_order(members, required, end, "")
        else:
            rest = self._any_order(f"t{index}{kept}", written, required, end, more)
        head = f"{quoted(style.call_open + tool.name)} {_pattern(style.name_close)}"
        self._said(values)
        return self.rules.define(f"c{index}{kept}", f"{head} {rest}")

    def _any_order(
        self,
        name: str,
        written: list[tuple[str, str, str]],
        required: set[str],
        end: str,
        more: bool,
    ) -> str:
        """The elements of a call as (head, value, key), each at most once, and its end; `more`:
        others among them."""
        style, bits = self.fmt.style, numbered([key for _, _, key in written], required)
        assert isinstance(style, Tagged)
        done = given(bits[k] for k in sorted(required & set(bits)))
        text = self._text(style, style.value_close)

        def value(body: str, key: str = "") -> str:
            is_open = body == text and not style.is_keyed
            return marked(f"{name}v", bits, key) if is_open else f"{body} {marked(name, bits, key)}"

        lines = [f"{end}{done}", *(f"{head} {value(body, key)}" for head, body, key in written)]
        if more:  # an element's own tag ends it: where its name is not known, the call's does
            body = self._rest(style) if style.is_keyed else value(text)
            lines.append(f"{self._other(name, written)} {body}")
        self.rules.define(marked(name, bits), "\n  | ".join(lines))
        ways = [f"{text} {marked(name, bits)}", *self._cut_short(done)]
        ways += [f"{self._until(key)} {value(body, key)}" for _, body, key in written]
        self.rules.define(marked(f"{name}v", bits), "\n  | ".join(ways))
        return f"{name}::0x0" if bits else name

    def _rest(self, style: Tagged) -> str:
        """Anything up to the end of a call."""
        return self.rules.define("rest[lazy]", f"/{ANY_TEXT}{escaped(style.call_close)}/")

    def _until(self, key: str) -> str:
        """A text that lacks its closing tag, up to the head of another argument."""
        style = self.fmt.style
        assert isinstance(style, Tagged)
        head = f"{escaped(style.key_open + key)}{slashed(style.key_close)}"
        return self.rules.define(f"until_{key.encode().hex()}[lazy]", f"/{ANY_TEXT}{head}/")

    def _cut_short(self, done: str) -> list[str]:
        """The last text of a call may lack its closing tag: the call's own tags end it."""
        style = self.fmt.style
        if not _has_unclosed(self.fmt) or not isinstance(style, Tagged):
            return []
        both = rf"{escaped(style.call_close)}[ \t\r\n]*{escaped(self.fmt.end)}"
        tagged = rf"/(.|\n)*{escaped(style.value_close)}(.|\n)*/"
        text = self.rules.define("UNCLOSED", rf"/(.|\n)*{both}/ & ~{tagged}")
        return [f"{text} TAIL?{done}"]

    def _call_end(self, style: Tagged, kept: str) -> str:
        """What closes a call. White space is part of these terminals: the lexer takes the longest
        match, and one of its own would lose against `inner`, which may begin with it too."""
        close = self._terminal(style.call_close or self.fmt.end)
        if not _has_unclosed(self.fmt):
            return close
        end = f"GAP? {quoted(self.fmt.end)} TAIL?"
        return f"{close} ({end})?" if kept else f"{close} {end}"

    def _other(self, name: str, written: list[tuple[str, str, str]]) -> str:
        """The head of an argument that is not declared."""
        style = self.fmt.style
        assert isinstance(style, Tagged)
        key = r"[^<>\"\n=\/]{1,64}"
        head = f"/({SPACE})?{escaped(style.key_open)}{key}{slashed(style.key_close)}/"
        known = " | ".join(declared for declared, _, _ in written)
        return self.rules.define(f"OTHER_{name.upper()}", _but(head, known))

    def _terminal(self, literal: str, pattern: str = "") -> str:
        return f"/({SPACE})?{escaped(literal)}{slashed(pattern)}/"

    def _text(self, style: Tagged, value_close: str) -> str:
        """A text ends at a closing tag that structure follows; one inside it is text."""
        close = escaped(value_close)
        follow = [style.key_open, style.call_close or self.fmt.end]
        first = "".join(sorted({escaped(f[0]) for f in follow}))
        second = "".join(sorted({escaped(f[1]) for f in follow}))
        inner = rf"[ \t\r\n]*([^{first} \t\r\n]|[{first}][^{second}])(.|\n)*{close}"
        tag = "" if value_close == style.value_close else f"_{value_close.encode().hex()}"
        text = self.rules.define(f"text{tag}[lazy]", rf"/{ANY_TEXT}{close}/")
        more = self.rules.define(f"inner{tag}[lazy]", f"/{inner}/")
        return self.rules.define(f"anytext{tag}", f"{text} {more}*")

    def _element(self, key: str, sub: Any, values: Values, style: Tagged) -> str | None:
        """The rule of one value with its closing tag; NEVER where there is none."""
        close = quoted(style.closes(key))
        if words := checking.plain_constants(sub, values.root):
            around = {"newline": '"\\n"?', "all": "WS?"}.get(style.trim, "")
            texts = [text for word in words for text in _bare_words(word, style.values)]
            spelled = " | ".join(quoted(text) or '""' for text in dict.fromkeys(texts))
            return f"{around} {self.rules.shared(spelled)} {around} {close}"
        if "string" in json_schema.types_of(sub, values.root):
            limits = set(sub) & set(json_schema.TEXT_LIMITS) if isinstance(sub, dict) else set()
            for word in sorted(limits):
                values._note(f"`{word}` is")
            return self._text(style, style.closes(key))
        if style.is_keyed and self._has_parts(sub, values.root):
            return self._text(style, style.closes(key))  # its parts are elements, too
        value = values.value(sub)
        return NEVER if value is NEVER else f"WS? {value} WS? {close}"

    def _has_parts(self, sub: Any, root: Any) -> bool:
        return bool(json_schema.types_of(sub, root) & {"array", "object"})


def _ends_itself(fmt: Format) -> bool:
    """Whether the rule of a call ends with the end marker."""
    return isinstance(fmt.style, Tagged) and (not fmt.style.call_close or _has_unclosed(fmt))


def _has_unclosed(fmt: Format) -> bool:
    """Whether a call and its section close together, so that a missing tag is no riddle."""
    style = fmt.style
    return isinstance(style, Tagged) and bool(style.call_close and fmt.end) and not style.many


def _member(values: Values, names: Sequence[str]) -> str:
    """What stands before the value of a key, which may have several names."""
    spelled = [text for name in names for text in _spelled(values, name)]
    return f'({" | ".join(spelled)}) WS? ":" WS?'


def _spelled(values: Values, text: str) -> list[str]:
    return values._key(text).split(" | ")


def _bare_words(value: Any, syntax: Syntax) -> list[str]:
    """A constant as an element's text."""
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, bool):
        return list(syntax.spellings(value))
    return [json.dumps(value)]


def _but(terminal: str, others: str) -> str:
    """The terminal but what is one of `others`."""
    return f"{terminal} & ~({others})" if others else terminal


def _pattern(text: str) -> str:
    """A regular expression of the format as Lark: a plain string where it is one."""
    plain = not any(c in r"\[](){}*+?|.^$" for c in text)
    return quoted(text) if plain else f"/{slashed(text)}/"


def slashed(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return pattern.replace("/", r"\/")
