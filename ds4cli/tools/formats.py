"""How each family of models writes a tool call: one entry per format, as data.

Markers are matched as text. A call opens when `start` and enough of what follows (`lead`) have been
seen, so that text that only mentions a marker stays prose. `{name}` and `{key}` stand for a tool's
and an argument's name. Sources: the parsers in `mlx_lm/tool_parsers`,
`mlx_lm/chat_templates/deepseek_v32.py`, OpenAI's harmony format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import regex

BAR = "\uff5c"  # the full-width bar in DeepSeek's markers
SPACE = r"[ \t\r\n]{0,8}"


@dataclass(frozen=True)
class Json:
    """`{"name": ..., "arguments": {...}}`, as the Hermes family writes it."""


@dataclass(frozen=True)
class Named:
    """The name outside, the arguments as one JSON object: `before` name `between` {...} `after`."""

    between: str  # a regular expression, valid for both `regex` and llguidance
    before: str = ""
    after: str = ""
    or_list: bool = False  # may also be a JSON list of {"name", "arguments"}


@dataclass(frozen=True)
class Tagged:
    """Every argument in its own element.

    call_open name name_close (key_open key key_close VALUE value_close)* call_close; `name_close`
    and `key_close` are regular expressions, the rest is literal. `trim` says what surrounds a
    string value: "newline" (one on each side), "all" white space, or "none". Several calls may
    follow each other where `many`.
    """

    call_open: str
    name_close: str
    key_open: str
    key_close: str
    value_close: str
    call_close: str
    trim: str = "newline"
    many: bool = True


@dataclass(frozen=True)
class Literal:
    """`call:name{key:value,...}` with strings between `quote`s (Gemma)."""

    quote: str


@dataclass(frozen=True)
class Pythonic:
    """`[name(key=value, ...), ...]`, Python literals."""


@dataclass(frozen=True)
class Foreign:
    """A format that only mlx-lm's own parser knows: `parse(text, tools)`."""

    parse: Any


@dataclass(frozen=True)
class Format:
    """Where calls begin and end, and how they are written inside."""

    name: str
    start: str
    end: str  # "": the reply's end ends the call
    lead: str  # a regular expression: what must follow `start` for it to be a call
    style: Json | Named | Tagged | Literal | Pythonic | Foreign
    start_also: tuple[str, ...] = ()
    think: tuple[str, str] | None = None  # where the tokenizer does not say
    keep_start: bool = False  # the style's own syntax begins with `start`

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start, *self.start_also)

    def opening(self) -> str:
        """A regular expression with the group `start`."""
        either = "|".join(regex.escape(s) for s in self.starts)
        return f"(?P<start>{either}){self.lead}"

    def literals(self) -> str:
        """All literal text of the syntax: tokens spelled so are ordinary text to the grammar."""
        texts = [*self.starts, self.end]
        texts += [v for v in vars(self.style).values() if isinstance(v, str)]
        return " ".join(texts).replace("\\", "")


_NAME = r"[\w.:\-]{1,128}"
# `<tool_call></tool_call>` and `<tool_call> <tool_call>` are how prose talks about the markers.
_ANY_ELEMENT = r"[\[{]|<[^t/\s]"
_ELEMENT = SPACE + f"(?:{_ANY_ELEMENT})"
_NAMED_ELEMENT = SPACE + rf"(?:{_NAME}[ \t\r\n]{{0,4}}<|{_ANY_ELEMENT})"


def _arg_pairs(name: str, prefix: str) -> Format:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    return Format(
        name,
        f"<{prefix}tool_call>",
        f"</{prefix}tool_call>",
        _NAMED_ELEMENT,
        Tagged(
            call_open="",
            name_close=r"[ \t\r\n]{0,4}",
            key_open=f"<{key}>",
            key_close=rf"</{key}>[ \t\r\n]{{0,4}}<{value}>",
            value_close=f"</{value}>",
            call_close="",
            trim="all",
            many=False,
        ),
    )


def _invoke(name: str, start: str, end: str, tag: str, key_close: str = '">') -> Format:
    return Format(
        name,
        start,
        end,
        _ELEMENT,
        Tagged(
            call_open=f'<{tag}invoke name="',
            name_close='">',
            key_open=f'<{tag}parameter name="',
            key_close=key_close,
            value_close=f"</{tag}parameter>",
            call_close=f"</{tag}invoke>",
            trim="all" if not key_close.startswith('" string') else "none",
        ),
    )


_ALL = [
    Format("json_tools", "<tool_call>", "</tool_call>", _ELEMENT, Json()),
    Format(
        "qwen3_coder",
        "<tool_call>",
        "</tool_call>",
        _ELEMENT,
        Tagged("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", many=False),
    ),
    _arg_pairs("glm47", ""),
    _arg_pairs("laguna", ""),
    _arg_pairs("longcat", "longcat_"),
    _invoke("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", ""),
    _invoke("muse_spark", "<atem:function_calls>", "</atem:function_calls>", "atem:"),
    _invoke(
        "deepseek_v32",
        f"<{BAR}DSML{BAR}function_calls>",
        f"</{BAR}DSML{BAR}function_calls>",
        f"{BAR}DSML{BAR}",
        '" string="(true|false)">',
    ),
    Format(
        "minicpm5",
        "<function name=",
        "</function>",
        r"[ \t]{0,2}[\"'\w]",
        Tagged(
            '<function name="', '">', '<param name="', '">', "</param>", "", trim="all", many=False
        ),
        keep_start=True,
    ),
    Format(
        "kimi_k3",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        SPACE + r"<",
        Tagged(
            '<|open|>call tool="',
            r'" index="[0-9]{1,4}"<\|sep\|>',
            '<|open|>argument key="',
            r'" type="[a-z]{1,10}"<\|sep\|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
            trim="none",
        ),
    ),
    Format(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        SPACE + r"(?:<|functions\.)",
        Named(
            r":[0-9]{1,4}[ \t\r\n]{0,4}<\|tool_call_argument_begin\|>",
            before="<|tool_call_begin|>functions.",
            after="<|tool_call_end|>",
        ),
    ),
    Format(
        "deepseek_v31",
        f"<{BAR}tool▁calls▁begin{BAR}>",
        f"<{BAR}tool▁calls▁end{BAR}>",
        SPACE + "<",
        Named(
            f"<{BAR}tool▁sep{BAR}>",
            before=f"<{BAR}tool▁call▁begin{BAR}>",
            after=f"<{BAR}tool▁call▁end{BAR}>",
        ),
    ),
    Format(
        "mistral",
        "[TOOL_CALLS]",
        "",
        SPACE + rf"(?:{_NAME}[ \t]{{0,4}}[\[{{]|[\[{{])",
        Named(r"[ \t\r\n]{0,4}\[ARGS\][ \t\r\n]{0,4}", or_list=True),
    ),
    Format(
        "harmony",
        "<|channel|>commentary to=functions.",
        "<|call|>",
        r"[\w.\-]",
        Named(r"(<\|channel\|>commentary)?( ?<\|constrain\|>json| json)?<\|message\|>"),
        start_also=(
            "<|channel|>analysis to=functions.",
            "<|start|>assistant to=functions.",
            " to=functions.",  # where the prompt ends with `<|start|>assistant`
        ),
        think=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    Format("gemma4", "<|tool_call>", "<tool_call|>", SPACE + "call:", Literal('<|"|>')),
    Format(
        "function_gemma",
        "<start_function_call>",
        "<end_function_call>",
        SPACE + "call:",
        Literal("<escape>"),
    ),
    Format("pythonic", "<|tool_call_start|>", "<|tool_call_end|>", SPACE + r"\[", Pythonic()),
]
FORMATS = {f.name: f for f in _ALL}

# Formats that mlx-lm has no parser for, by tokens that only their vocabularies have.
_BY_VOCABULARY = {
    "harmony": ("<|channel|>", "<|message|>", "<|call|>"),
    "deepseek_v32": (f"{BAR}DSML{BAR}",),
    "deepseek_v31": (f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁sep{BAR}>"),
}


def detect_format(tokenizer: Any) -> Format | None:
    """The format of an mlx-lm TokenizerWrapper, None when the model has none.

    A format whose end marker is one of the model's stop tokens (it never becomes text) gets an
    empty `end`.
    """
    found = _named_format(tokenizer)
    if (
        found
        and found.end
        and tokenizer.convert_tokens_to_ids(found.end) in tokenizer.eos_token_ids
    ):
        return replace(found, end="")
    return found


def _named_format(tokenizer: Any) -> Format | None:
    config = getattr(tokenizer, "init_kwargs", {})
    named = config.get("tool_parser_type") or config.get("chat_template_type")
    if named in FORMATS:
        return FORMATS[named]
    if tokenizer.has_tool_calling:
        return _foreign(tokenizer, named or "unknown")
    vocabulary = tokenizer.get_vocab()
    for name, tokens in _BY_VOCABULARY.items():
        if all(token in vocabulary for token in tokens):
            return FORMATS[name]
    return None


def _foreign(tokenizer: Any, name: str) -> Format:
    return Format(
        name,
        tokenizer.tool_call_start,
        tokenizer.tool_call_end or "",
        SPACE + r"[^\s\w]",
        Foreign(tokenizer.tool_parser),
    )
