"""How each family of models writes a tool call: one entry per format, as data.

Markers are matched as text. A call opens when one of `starts` and enough of what follows (`lead`)
have been seen, so that text that only mentions a marker stays prose; or at what only a call begins
with (`kept`). A new format is its entry here and its text in the tests: `detect.py` tries every
entry on a call that the model's own template has drawn. Sources: the parsers in
`mlx_lm/tool_parsers`, `mlx_lm/chat_templates/deepseek_v32.py`, OpenAI's harmony format, and what
public chat templates draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from ds4cli.tools.literals import BARE, CALLS, ESCAPED, JSON, LOOSE, PYTHON, Syntax

BAR = "\uff5c"  # the full-width bar in DeepSeek's markers
SPACE = r"[ \t\r\n]{0,8}"
NAME = r"[\w.:$\-]{1,128}"
_ID = r"[\w.:\-]{1,64}"


@dataclass(frozen=True)
class Json:
    """`{"name": ..., "arguments": {...}}`: one object, several, or a list of them.

    arguments: the keys that may hold them, the family's own first. more: keys of texts that mean
    nothing here. keyed: `{"the name": {...}}` instead.
    """

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    more: tuple[str, ...] = ("id", "type")
    keyed: bool = False
    values: Syntax = JSON


@dataclass(frozen=True)
class Named:
    """The name outside, the arguments as one JSON object: `before` name `between` {...} `after`.

    before, between: regular expressions, valid for both `regex` and llguidance. or_list: may also
    be a JSON list of {"name", "arguments"}.
    """

    between: str
    before: str = ""
    after: str = ""
    or_list: bool = False
    values: Syntax = JSON


@dataclass(frozen=True)
class Tagged:
    """Every argument in its own element.

    call_open name name_close (key_open key key_close VALUE value_close)* call_close; `name_close`
    and `key_close` are regular expressions, the rest is literal, `{key}` in `value_close` is the
    argument's name. `trim` says what surrounds a text and is no part of it: "newline" (one on each
    side), "pair" (one on both sides or none), "all" white space, or "none". Several calls may
    follow each other where `many`. An argument that is null is not written where `omits_null`.
    """

    call_open: str
    name_close: str
    key_open: str
    key_close: str
    value_close: str
    call_close: str
    trim: str = "newline"
    many: bool = True
    omits_null: bool = False
    values: Syntax = PYTHON

    @property
    def is_keyed(self) -> bool:
        """Whether elements are named after their arguments, and lists and objects have parts."""
        return "{key}" in self.value_close

    def closes(self, key: str) -> str:
        """What ends the value of `key`."""
        return self.value_close.replace("{key}", key)


@dataclass(frozen=True)
class Literal:
    """`call:name{key:value,...}` (Gemma)."""

    values: Syntax


@dataclass(frozen=True)
class Pythonic:
    """`[name(key=value, ...), ...]`, Python literals."""

    values: Syntax = CALLS


@dataclass(frozen=True)
class Foreign:
    """A format that only mlx-lm's own parser knows: `parse(text, tools)`."""

    parse: Callable[[str, Any], Any]


Style = Json | Named | Tagged | Literal | Pythonic | Foreign


@dataclass(frozen=True)
class Format:
    """Where calls begin and end, and how they are written inside.

    starts: markers, the usual one first; mlx-lm strips it. end: "" where the reply's end ends the
    call. lead: a regular expression, what must follow a marker for it to open a call. kept: pairs
    of a literal and a regular expression that open a call without a marker; the text belongs to the
    call, and `{names}` stands for the declared tools. bare: `kept` counts only where a reply, or
    the answer behind its thoughts, begins. close: may stand before the reply's end. think: where
    the tokenizer does not say. sign: what shows this format in a call of another one.
    """

    name: str
    starts: tuple[str, ...]
    end: str
    style: Style
    lead: str = ""
    kept: tuple[tuple[str, str], ...] = ()
    bare: bool = False
    close: str = ""
    think: tuple[str, str] | None = None
    sign: str = ""

    @property
    def start(self) -> str:
        return self.starts[0] if self.starts else ""

    def opening(self, names: Sequence[str], begins: bool | None = None) -> str:
        """A regular expression for where a call of these tools opens, with the group `start` or
        `kept`. begins: whether an answer begins here; None: no matter."""
        either = "|".join(regex.escape(s) for s in self.starts)
        ways = [f"(?P<start>{either}){self.lead}"] if either else []
        if self.kept and not (self.bare and begins is False):
            every = "|".join(regex.escape(name) for name in names) or "(?!)"
            kept = "|".join(
                regex.escape(literal) + pattern.replace("{names}", f"(?:{every})")
                for literal, pattern in self.kept
            )
            anchor = r"\A\s*" if self.bare and begins else ""
            ways.append(f"{anchor}(?P<kept>{kept})")
        return "|".join(ways) or "(?!)"

    @property
    def beginnings(self) -> list[str]:
        """Literal texts that a call may open with, wherever it stands."""
        return [*self.starts, *([] if self.bare else [literal for literal, _ in self.kept])]

    def literals(self) -> str:
        """All literal text of the syntax: tokens spelled so are ordinary text to the grammar."""
        texts = [*self.starts, self.end, self.close, *(text for pair in self.kept for text in pair)]
        style = vars(self.style)
        texts += [v for v in style.values() if isinstance(v, str)]
        texts += style["values"].quotes if "values" in style else ()
        return " ".join(texts).replace("\\", "")


# `<tool_call></tool_call>` and `<tool_call> <tool_call>` are how prose talks about the markers.
_ANY_ELEMENT = r"[\[{]|<[^t/\s]"
_ELEMENT = SPACE + f"(?:{_ANY_ELEMENT})"
_NAMED_ELEMENT = SPACE + rf"(?:{NAME}[ \t\r\n]{{0,4}}<|{_ANY_ELEMENT})"
_OBJECT = SPACE + r"[\[{]"


def _arg_pairs(name: str, prefix: str = "", suffix: str = "", sign: str = "") -> Format:
    def tag(word: str) -> str:
        return f"<{prefix}{word}{suffix}>"

    def end(word: str) -> str:
        return f"</{prefix}{word}{suffix}>"

    return Format(
        name,
        (tag("tool_call"),),
        end("tool_call"),
        Tagged(
            call_open="",
            name_close=r"[ \t\r\n]{0,4}",
            key_open=tag("arg_key"),
            key_close=rf"{end('arg_key')}[ \t\r\n]{{0,4}}{tag('arg_value')}",
            value_close=end("arg_value"),
            call_close="",
            trim="none",
            many=False,
        ),
        _NAMED_ELEMENT,
        sign=sign,
    )


def _parameters(name: str, start: str, end: str, trim: str, sign: str = "") -> Format:
    return Format(
        name,
        (start,),
        end,
        Tagged("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", trim, False),
        _ELEMENT,
        kept=(("<function=", "{names}>"),),
        sign=sign,
    )


def _invoke(name: str, word: str, mark: str, tag: str, key_close: str = '">') -> Format:
    return Format(
        name,
        (f"<{mark}{word}>",),
        f"</{mark}{word}>",
        Tagged(
            call_open=f'<{tag}invoke name="',
            name_close='">',
            key_open=f'<{tag}parameter name="',
            key_close=key_close,
            value_close=f"</{tag}parameter>",
            call_close=f"</{tag}invoke>",
            trim="none",
        ),
        _ELEMENT,
    )


def _dsml(name: str, word: str, space: str = "") -> Format:
    mark = f"{BAR}DSML{BAR}{space}"
    return _invoke(name, word, mark, mark, '" string="(true|false)">')


_OBJECTS = Json()


def _listed(name: str, start: str, end: str = "", style: Json = _OBJECTS) -> Format:
    return Format(name, (start,), end, style, _OBJECT)


_CALLS, _CALL, _SEP = (f"<{BAR}tool▁{word}{BAR}>" for word in ("calls▁begin", "call▁begin", "sep"))
_CALLS_END, _CALL_END = f"<{BAR}tool▁calls▁end{BAR}>", f"<{BAR}tool▁call▁end{BAR}>"
_M3 = "]<]minimax[>["
# The last one is for a prompt that ends with `<|start|>assistant`.
_HEADS = ("<|channel|>commentary", "<|channel|>analysis", "<|start|>assistant", "")

_ALL = [
    Format("json_tools", ("<tool_call>",), "</tool_call>", Json(), _ELEMENT, sign="{"),
    _parameters("qwen3_coder", "<tool_call>", "</tool_call>", "newline", sign="<function="),
    _parameters("seed_oss", "<seed:tool_call>", "</seed:tool_call>", "pair"),
    _arg_pairs("glm47", sign="<arg_key>"),
    _arg_pairs("laguna"),
    _arg_pairs("longcat", "longcat_"),
    Format(
        "hunyuan3",
        ("<tool_calls:opensource>",),
        "</tool_calls:opensource>",
        Tagged(
            "<tool_call:opensource>",
            r"<tool_sep:opensource>",
            "<arg_key:opensource>",
            r"</arg_key:opensource>[ \t\r\n]{0,4}<arg_value:opensource>",
            "</arg_value:opensource>",
            "</tool_call:opensource>",
            trim="none",
        ),
        SPACE + "<tool_call:",
    ),
    _invoke("minimax_m2", "tool_call", "minimax:", ""),
    _invoke("muse_spark", "function_calls", "atem:", "atem:"),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    _dsml("deepseek_v41", "calls", " "),
    Format(
        "minimax_m3",
        (f"{_M3}<tool_call>",),
        f"{_M3}</tool_call>",
        Tagged(
            f'{_M3}<invoke name="',
            '">',
            f"{_M3}<",
            ">",
            f"{_M3}</{{key}}>",
            f"{_M3}</invoke>",
            trim="none",
            omits_null=True,
        ),
        SPACE + regex.escape(_M3),
    ),
    Format(
        "minicpm5",
        (),
        "</function>",
        Tagged(
            '<function name="', '">', '<param name="', '">', "</param>", "", trim="all", many=False
        ),
        kept=(("<function name=", r"[ \t]{0,2}[\"'\w]"),),
    ),
    Format(
        "kimi_k3",
        ("<|open|>tools<|sep|>",),
        "<|close|>tools<|sep|>",
        Tagged(
            '<|open|>call tool="',
            r'" index="[0-9]{1,4}"<\|sep\|>',
            '<|open|>argument key="',
            r'" type="[a-z]{1,10}"<\|sep\|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
            trim="none",
        ),
        SPACE + r"<",
    ),
    Format(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        Named(
            r":[0-9]{1,4}[ \t\r\n]{0,4}<\|tool_call_argument_begin\|>",
            before=r"<\|tool_call_begin\|>(functions\.)?",
            after="<|tool_call_end|>",
        ),
        SPACE + r"(?:<|functions\.)",
        kept=(("<|tool_call_begin|>", r"(?:functions\.)?{names}:"),),
    ),
    Format(
        "deepseek_v31",
        (_CALLS,),
        _CALLS_END,
        Named(_SEP, before=_CALL, after=_CALL_END),
        SPACE + "<",
    ),
    Format(
        "deepseek_v3",
        (_CALLS,),
        _CALLS_END,
        Named(
            r"[ \t\r\n]{0,4}```json[ \t\r\n]{1,4}",
            before=f"{_CALL}function{_SEP}",
            after=f"```{_CALL_END}",
        ),
        SPACE + "<",
    ),
    Format(
        "mistral",
        ("[TOOL_CALLS]",),
        "",
        Named(
            rf"[ \t\r\n]{{0,4}}(\[CALL_ID\]{_ID})?[ \t\r\n]{{0,4}}\[ARGS\][ \t\r\n]{{0,4}}",
            or_list=True,
        ),
        SPACE + rf"(?:{NAME}[ \t]{{0,4}}[\[{{]|[\[{{])",
    ),
    Format(
        "solar",
        ("<|tool_calls|>",),
        "<|calls|>",
        Named(
            r"<\|tool_call:args\|>",
            before=rf"<\|tool_call:begin\|>{_ID}<\|tool_call:name\|>",
            after="<|tool_call:end|>",
        ),
        SPACE + "<",
    ),
    Format(
        "harmony",
        tuple(f"{head} to={space}" for space in ("functions.", "") for head in _HEADS),
        "<|call|>",
        Named(r"(<\|channel\|>commentary)?( ?<\|constrain\|>json| json)?<\|message\|>"),
        r"(?!browser\.|container\.|python\b)[\w.\-]{1,64}(?= ?<\|| json)",
        think=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    Format(
        "functionary_v31",
        ("<function=",),
        "</function>",
        Named(">"),
        r"[\w.\-]{1,64}>" + SPACE + r"\{",
    ),
    Format(
        "functionary_v32",
        (">>>",),
        "",
        Named(r"\r?\n"),
        r"(?!all\n)[\w.\-]{1,64}\r?\n" + SPACE + r"\{",
        kept=(("", r"(?!all\n)[\w.\-]{1,64}\r?\n" + SPACE + r"\{"),),
        bare=True,
    ),
    Format("gemma4", ("<|tool_call>",), "<tool_call|>", Literal(BARE), SPACE + "call:"),
    Format(
        "function_gemma",
        ("<start_function_call>",),
        "<end_function_call>",
        Literal(ESCAPED),
        SPACE + "call:",
    ),
    Format("pythonic", ("<|tool_call_start|>",), "<|tool_call_end|>", Pythonic(), SPACE + r"\["),
    Format(
        "pythonic_bare",  # Llama 3.2 and 4, ToolACE, Olmo 3
        ("<|python_tag|>",),
        "",
        Pythonic(LOOSE),
        SPACE + r"\[",
        kept=(("[", SPACE + NAME + r"\(\s{0,8}(?:[\w$\-]{1,64}\s?=|\))"),),
        bare=True,
    ),
    _listed("tool_calls", "<tool_calls>", "</tool_calls>"),  # Hunyuan A13B, Apriel, MiniMax-M1
    _listed("nemotron_nano", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("granite3", "<|tool_call|>"),
    _listed("granite_20b", "<function_call>"),
    _listed("gigachat3", "<|function_call|>", "<|message_sep|>"),
    _listed("gigachat3_role", "function call<|role_sep|>", "<|message_sep|>"),
    _listed(
        "internlm2",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        Json(arguments=("parameters", "arguments")),
    ),
    _listed(
        "command_r7b",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        Json("tool_name", ("parameters",), ("tool_call_id",)),
    ),
    _listed("apertus", "<|tools_prefix|>", "<|tools_suffix|>", Json(keyed=True)),
    Format(
        "llama3_json",
        ("<|python_tag|>",),
        "",
        Json(arguments=("parameters", "arguments")),
        SPACE + r"\{",
        kept=(("{", SPACE + r'"(?:name|type)"[ \t]{0,4}:'),),
        bare=True,
    ),
    Format(
        "xlam",
        (),
        "",
        Json(),
        kept=(("[", SPACE + r'\{[ \t\r\n]{0,16}"name"[ \t]{0,4}:'),),
        bare=True,
    ),
    Format(
        "phi4_mini",
        ("<|tool_call|>", "functools"),
        "",
        Json(arguments=("arguments", "parameters"), values=PYTHON),
        _OBJECT,
        kept=(("{", SPACE + r"[\"']name[\"'][ \t]{0,4}:"),),
        bare=True,
        close="<|/tool_call|>",
    ),
]
FORMATS = {f.name: f for f in _ALL}
