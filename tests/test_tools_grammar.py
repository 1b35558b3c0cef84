"""The grammar against the parser, hostile schemas, special tokens, and what building costs."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from test_tools_detect import drawn, with_template
from test_tools_guard import text_of, wrapper_for
from tokenizers.processors import TemplateProcessing
from toolkit import EOS, TOOLS, encode, play, tokenizer

from ds4cli.tools import FORMATS, Guard, Refused, Tool, parse_calls
from ds4cli.tools.grammar import Grammar, NoGrammar, grammar_for, vocabulary_for
from ds4cli.tools.lark import Writer

RICH = [
    Tool(
        "edit",
        "",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "mode": {"type": "string", "enum": ["a", "ab", "w r"]},
                "size": {"type": ["integer", "null"]},
                "at": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}, "y": {"$ref": "#/$defs/flag"}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
                "list": {"type": "array", "items": {"type": "string", "enum": ["p", "q"]}},
            },
            "required": ["mode", "path"],
            "$defs": {"flag": {"type": "boolean"}},
        },
    ),
    Tool("now", "", {"type": "object", "properties": {}}),
    Tool("opt", "", {"type": "object", "properties": {"n": {"type": "integer"}}}),
]
KEYS = list(RICH[0].parameters["properties"])
CLOSERS = [bytes([b]) for b in b"\"'}]>)<|e/"]


def walk(grammar, fmt, stops, rng, limit=60):
    """Random text of the grammar that likes to close things; None when it does not end."""
    matcher, data = grammar.matcher(), b""
    parts = [v for v in vars(fmt.style).values() if isinstance(v, str)]
    parts += fmt.style.values.quotes
    parts += [part.replace("{key}", key) for part in parts for key in KEYS if "{key}" in part]
    closers = [grammar.tokens_of(t.encode()) for t in (fmt.end, *parts, '"', "'") if t]
    while limit > 0 and len(data) < 4000:
        if matcher.is_accepting():
            return data
        chosen = rng.choice(closers)
        if rng.random() < 0.5 or matcher.validate_tokens(chosen) < len(chosen):
            options = np.flatnonzero(grammar.mask(matcher, grammar.vocab.vocab_size))
            texts = {int(i): grammar.bytes_of(int(i)) for i in options if int(i) not in stops}
            limit -= len(texts) > 20
            weights = [8 if t[:1] in CLOSERS else 0.3 for t in texts.values()]
            chosen = rng.choices(list(texts), weights)
        assert matcher.try_consume_tokens(chosen) == len(chosen)
        data += b"".join(grammar.bytes_of(i) for i in chosen)
    return None


@pytest.mark.parametrize("wanted", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(FORMATS))
def test_whatever_the_grammar_allows_is_a_valid_call(name, wanted):
    """A call that was kept inside its grammar is refused, mended or read differently when it
    closes.
    """
    wrapper, fmt = wrapper_for(name), FORMATS[name]
    grammar = grammar_for(wrapper, fmt, RICH)
    rng, done = random.Random(7), 0
    for _ in range(200):
        if done == wanted:
            break
        data = walk(grammar, fmt, wrapper.eos_token_ids, rng)
        if data is None:
            continue
        text = data.decode("utf-8", "replace")
        start = next((s for s in fmt.starts if text.startswith(s)), "")
        tail = text[-len(fmt.end) - 3 :]  # tokens may go on behind the marker
        end = text.rindex(fmt.end) if fmt.end and fmt.end in tail else len(text)
        for call in parse_calls(fmt, text[len(start) : end], RICH):
            assert all("was missing" in note for note in call.notes), (text, call)
            json.loads(call.arguments)
        done += 1
    assert done == wanted


@pytest.mark.parametrize("name", list(FORMATS))
def test_marks_the_first_wrong_character(name):
    """A format whose grammar takes a wrong name, or an argument that is not declared."""
    wrapper = wrapper_for(name)
    for wrong in ("get_wether", "get_weatherr"):
        steps = play(Guard(wrapper, TOOLS), wrapper, text_of(name).replace("get_weather", wrong))
        assert steps[-1].event == "left", steps[-1]
    steps = play(Guard(wrapper, TOOLS), wrapper, text_of(name).replace("city", "cite"))
    assert steps[-1].event == "left"


def build(parameters, name="json_tools"):
    return Guard(tokenizer(name), [Tool("t", "", parameters)])


def test_huge_enums_deep_nesting_and_recursion_do_not_hang():
    """A schema that takes minutes to compile, or overflows a stack."""
    deep = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"d": deep}, "required": ["d"]}
    recursive = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "object", "properties": {"kids": {"type": "array",
                  "items": {"$ref": "#/$defs/node"}}}, "additionalProperties": False}},
    }  # fmt: skip
    enum = {"type": "object", "properties": {"e": {"enum": [f"value-{i}" for i in range(20_000)]}}}
    for schema in (deep, recursive, enum):
        for name in ("json_tools", "qwen3_coder", "gemma4"):
            guard = build(schema, name)
            assert guard._limits is not None or guard.notices


def test_a_recursive_value_stays_inside_its_schema():
    """Recursion resolved against the wrong root once a schema is part of a grammar."""
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "$defs": {"node": {"type": "object", "properties": {"kids": {"type": "array",
                  "items": {"$ref": "#/$defs/node"}}}, "additionalProperties": False}},
    }  # fmt: skip
    guard = build(schema)
    wrapper = tokenizer()
    good = '<tool_call>{"name": "t", "arguments": {"tree": {"kids": [{"kids": [{}]}]}}}</tool_call>'
    assert play(guard, wrapper, good)[-1].event == "closed"
    guard = build(schema)
    assert play(guard, wrapper, good.replace("[{}]", "[1]"))[-1].event == "left"


def test_unsupported_keywords_are_named_and_checked_at_the_end():
    """A keyword that the grammar cannot hold is ignored in silence."""
    guard = build({"type": "object", "properties": {"l": {"type": "array", "uniqueItems": True}}})
    assert any("when a call closes" in notice for notice in guard.notices)
    text = '<tool_call>{"name": "t", "arguments": {"l": [1, 1]}}</tool_call>'
    steps = play(guard, tokenizer(), text)
    assert steps[-1].event == "broken" and "repeats" in steps[-1].reason
    guard = build({"type": "object", "properties": {"l": {"type": "string", "shape": "round"}}})
    assert any("`properties.l.shape` is not checked" in notice for notice in guard.notices)
    guard = build(
        {"type": "object", "properties": {"s": {"type": "string", "pattern": "^a+$"}}},
        "qwen3_coder",
    )
    assert any("pattern" in notice for notice in guard.notices)


def test_more_arguments_than_there_are_bits():
    """Tools with more than 60 arguments are not kept inside any grammar, or only in one order."""
    many = {
        "type": "object",
        "properties": {f"k{i}": {"type": "string"} for i in range(70)},
        "required": ["k69"],
    }
    call = '<tool_call>{"name": "t", "arguments": {"k69": "a", "k3": "b"}}</tool_call>'
    guard = build(many)
    assert play(guard, tokenizer(), call)[-1].event == "closed"
    guard = build(many)
    assert play(guard, tokenizer(), call.replace('"k69": "a", ', ""))[-1].event == "left"
    guard = build(many, "qwen3_coder")
    assert guard._limits is not None


def closes(schema, arguments, name="json_tools"):
    """Whether a call with this text of arguments closes without anything being mended."""
    guard = build(schema, name)
    text = f'<tool_call>{{"name": "t", "arguments": {arguments}}}</tool_call>'
    step = play(guard, tokenizer(name), text)[-1]
    return step.event == "closed" and not step.calls[0].notes


NESTED = {
    "type": "object",
    "properties": {
        "o": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["b"],
        },
        "l": {"type": "array", "items": {"$ref": "#/$defs/pair"}, "minItems": 1, "maxItems": 2},
    },
    "$defs": {
        "pair": {"type": "object", "properties": {"x": {}, "y": {"type": ["string", "null"]}}}
    },
}


@pytest.mark.parametrize(
    ("arguments", "is_valid"),
    [
        ('{"o": {"b": "x", "a": 1}}', True),
        ('{"l": [{"y": null, "x": [1]}], "o": {"a": 1, "b": ""}}', True),
        ('{"o": {"c": true, "b": "x"}}', True),
        ('{"o": {"a": 1}}', False),
        ('{"o": {"b": 1}}', False),
        ('{"l": []}', False),
        ('{"l": [{}, {}, {}]}', False),
        ('{"l": [{"y": 1}]}', False),
    ],
)
def test_keys_come_in_any_order(arguments, is_valid):
    """Valid JSON is flagged for the order of its keys, and the repair invents one."""
    assert closes(NESTED, arguments) is is_valid
    more = {**NESTED, "additionalProperties": True, "minProperties": 1}
    assert closes(more, arguments) is is_valid
    assert closes(more, arguments.replace("{", '{"z": [1], ', 1)) is is_valid


@pytest.mark.parametrize("text", ["caf\\u00e9", "a\\/b", "\\ud83d\\ude00", "\\u0041\\n\\t\\\\"])
def test_every_escape_of_json_may_be_written(text):
    """After `\\u00` only three digits are allowed, so that `é` becomes something else."""
    schema = {"type": "object", "properties": {"s": {"type": "string"}}}
    assert closes(schema, f'{{"s": "{text}"}}')


@pytest.mark.parametrize(
    ("schema", "value", "other"),
    [
        ({"type": "string", "nullable": True}, "null", "1"),
        ({"type": ["integer", "null"]}, "3.0", "3.5"),
        (
            {"items": [{"type": "integer"}, {"type": "string"}], "type": "array"},
            '[1, "a"]',
            '["a"]',
        ),
        ({"prefixItems": [{"type": "integer"}], "items": False, "type": "array"}, "[1]", "[1, 2]"),
        ({"type": "string", "pattern": "^\\p{L}+$"}, '"Łódź"', '"1"'),
        ({"type": "string", "format": "date"}, '"soon"', "1"),
        ({"patternProperties": {"^\\p{L}$": {"type": "integer"}}}, '{"é": 1}', '{"é": "x"}'),
        ({"enum": [1, "x"]}, "1.0", "1.5"),
        ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, '"all"', '"some"'),
        ({"properties": {"a": False}, "type": "object"}, '{"b": 1}', '{"a": 1}'),
    ],
)
def test_a_grammar_takes_what_the_schema_allows(schema, value, other):
    """A schema that ends in a traceback, or a value that is valid to one and not to the other."""
    schema = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    assert closes(schema, f'{{"v": {value}}}')
    assert not closes(schema, f'{{"v": {other}}}')


def test_one_hard_schema_does_not_cost_the_others_their_grammar(monkeypatch):
    """One schema that cannot be compiled takes the grammar from all tools."""
    whole = Writer._arguments

    def broken(self, index, syntax):
        is_hard = self.schemas[index].get("title") == "hard"
        return "no_such_rule" if is_hard else whole(self, index, syntax)

    monkeypatch.setattr(Writer, "_arguments", broken)
    hard = Tool("hard", "", {"type": "object", "properties": {}, "title": "hard"})
    guard = Guard(tokenizer(), [*TOOLS, hard])
    assert [notice for notice in guard.notices if "`hard`" in notice]
    wrong = text_of("json_tools").replace("city", "town")
    assert play(guard, tokenizer(), wrong)[-1].event == "left"


def test_special_tokens_of_the_chat_are_never_inside_a_call():
    """A grammar that lets `<|user|>` or a padding id into a string; the syntax's own special tokens
    must pass.
    """
    quote = '<|"|>'
    wrapper = tokenizer("gemma4", specials=[quote, "<|tool_call>", "<tool_call|>"])
    guard = Guard(wrapper, TOOLS)
    text = text_of("gemma4")
    assert play(guard, wrapper, text)[-1].event == "closed"
    guard = Guard(wrapper, TOOLS)
    at = text.index("Paris") + 2
    play(guard, wrapper, text[:at])
    mask = guard.allowed(len(wrapper) + 9)
    assert mask[encode(wrapper, quote)[0]] and not mask[encode(wrapper, "<|user|>")[0]]
    assert not mask[len(wrapper) :].any() and not mask[wrapper.eos_token_id]


def test_the_grammar_is_built_once():
    """Every reply of a chat pays for the grammar again."""
    wrapper = tokenizer()
    first, second = (grammar_for(wrapper, FORMATS["json_tools"], TOOLS) for _ in range(2))
    assert first is second and first.build_s > 0
    other = grammar_for(wrapper, FORMATS["json_tools"], RICH)
    assert other is not first and other.vocab is first.vocab


def test_tools_of_one_name_have_grammars_of_their_own():
    """Two sets of tools in one process: the second was held to the arguments of the first."""
    wrapper, fmt = tokenizer(), FORMATS["json_tools"]
    city = dict.fromkeys(("city", "town"))
    for key in city:
        schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        city[key] = grammar_for(wrapper, fmt, [Tool("get", "", schema)])
    text = fmt.start + '{"name": "get", "arguments": {"town": "'
    for key, grammar in city.items():
        matcher, tokens = grammar.matcher(), grammar.tokens_of(text.encode())
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) == (key == "town"), key


def test_what_may_follow_in_place_of_a_wrong_token():
    """Guards: a mask of another place, or none; a matcher that stays where it looked."""
    wrapper, fmt = tokenizer(), FORMATS["json_tools"]
    grammar, size = grammar_for(wrapper, fmt, TOOLS), len(wrapper) + 3
    matcher, spell = grammar.matcher(), lambda text: grammar.tokens_of(text.encode())
    begun = spell(fmt.start + '{"name": "get_weather", "arguments": {"days": ')
    assert matcher.try_consume_tokens(begun) == len(begun)
    (digit,), (letter,) = spell("1"), spell("x")
    mask = grammar.instead(matcher, [digit], letter, size)
    assert mask.shape == (size,) and mask[digit] and not mask[letter]
    assert matcher.validate_tokens(both := spell("12,")) == len(both), "it stays where it was"
    assert grammar.instead(matcher, [digit], digit, size) is None
    assert grammar.instead(matcher, [letter], digit, size) is None, "it never comes that far"


def test_each_layout_of_the_template_leaves_no_choice():
    """Guards: no guesses inside calls, or those of one layout in another."""
    fmt = FORMATS["json_tools"]
    own = fmt.start + drawn("json_tools") + fmt.end
    compact = own.replace(", ", ",").replace(": ", ":")
    grammar = grammar_for(with_template("json_tools", own), fmt, TOOLS)
    taken = []
    for matcher in grammar.forcing():
        texts = [grammar.tokens_of(text.encode()) for text in (own, compact)]
        taken.append([matcher.validate_tokens(ids) == len(ids) for ids in texts])
    assert taken == [[True, False], [False, True]]
    assert grammar_for(with_template("json_tools", ""), fmt, TOOLS).forcing() == []


def test_a_tokenizer_that_pads_cuts_or_begins_texts_spells_all_the_same():
    """Guards: padding, or a begin of text, among a text's tokens; settings that we change."""
    wrapper = tokenizer()
    backend = wrapper._tokenizer.backend_tokenizer
    backend.enable_padding(length=9)
    backend.enable_truncation(2)
    first = ("<|user|>", backend.token_to_id("<|user|>"))
    backend.post_processor = TemplateProcessing("<|user|> $A", special_tokens=[first])
    ids = vocabulary_for(wrapper, "").tokenize_bytes(b"abc")
    assert [wrapper.decode([i]) for i in ids] == ["a", "b", "c"]
    assert backend.padding and backend.truncation


def test_a_tokenizer_without_a_fast_form_says_so():
    """A slow tokenizer crashes instead of going without a grammar."""

    class Slow:
        eos_token_ids = (1,)

    with pytest.raises(NoGrammar, match="fast"):
        Grammar(Slow(), FORMATS["json_tools"], TOOLS)


REAL = Path(__file__).parents[2] / "shared" / "models" / "tiny-hybrid-8bit"


@pytest.mark.skipif(not os.path.exists(REAL), reason="no model folder at hand")
def test_a_real_tokenizer():
    """Everything above holds for hand-made vocabularies only."""
    from mlx_lm.tokenizer_utils import load

    wrapper = load(REAL)
    for text in (text_of("json_tools"), text_of("json_tools").replace("Paris", "Łódź 🎉\\n")):
        guard = Guard(wrapper, TOOLS)
        steps = play(guard, wrapper, "Let me see.\n" + text)
        assert [s.event for s in steps if s.event] == ["open", "closed"]
    wrong = text_of("json_tools").replace("city", "town")
    assert play(Guard(wrapper, TOOLS), wrapper, wrong)[-1].event == "left"


def test_refused_is_what_parsing_raises():
    """Callers catch Refused; anything else is a crash in the middle of a reply."""
    rng = random.Random(3)
    for name, fmt in FORMATS.items():
        text = text_of(name).removeprefix(fmt.start).removesuffix(fmt.end).removesuffix(EOS)
        for _ in range(60):
            chars = list(text)
            for _ in range(rng.randint(1, 6)):
                at = rng.randrange(len(chars))
                chars[at : at + rng.randint(0, 3)] = rng.choice(
                    ['"', "{", "}", "\\", "<", "\0", "", "\n", "["]
                )
            try:
                calls = parse_calls(fmt, "".join(chars), TOOLS)
            except Refused:
                continue
            assert all(isinstance(json.loads(c.arguments), dict) for c in calls)
