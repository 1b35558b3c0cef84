"""The guard on scripted token streams: markers, think sections, stop tokens, cuts, rewinds,
repairs.
"""

from __future__ import annotations

import json
import random

import pytest
from test_tools_parse import BODIES
from toolkit import EOS, TOOLS, encode, pieces, play, tokenizer

from ds4cli.tools import FORMATS, Guard, Tool
from ds4cli.tools.formats import Tagged
from ds4cli.tools.matcher import CallMatcher

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def text_of(name: str) -> str:
    fmt = FORMATS[name]
    start = "" if fmt.bare else fmt.start
    return start + BODIES[name] + fmt.end + ("" if fmt.end else EOS)


def intro(name: str, text: str = "Well, x") -> str:
    """Prose that may stand in front of a call."""
    return "" if FORMATS[name].bare else text


def wrapper_for(name: str):
    return tokenizer(name, stops=("<|call|>", EOS) if name == "harmony" else (EOS,))


def events(steps):
    return [s.event for s in steps if s.event]


def shown(steps):
    return "".join(s.emit for s in steps)


@pytest.mark.parametrize("grammar", [True, False], ids=["grammar", "parsed"])
@pytest.mark.parametrize("split", [False, True], ids=["merged", "split"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_calls_are_found_however_tokens_fall(name, split, grammar):
    """Markers merged with their neighbours (`>\\n` as one token) or split are missed."""
    wrapper = wrapper_for(name)
    guard = Guard(wrapper, TOOLS, use_grammar=grammar)
    text = intro(name) + text_of(name)
    split = split and not set(encode(wrapper, text)) & wrapper.eos_token_ids
    steps = play(guard, wrapper, text, chars=split)
    assert events(steps) == ["open", "closed"], [s.reason for s in steps if s.reason]
    (call,) = steps[-1].calls
    assert (call.name, call.arguments, call.notes) == ("get_weather", '{"city": "Paris"}', ())
    assert call.openai()["id"] == f"call_{steps[-1].opened}_0"
    assert shown(steps) == intro(name)


def test_any_tokenisation_gives_the_same():
    """A boundary between two tokens at an unlucky place in a marker."""
    wrapper = tokenizer()
    rng = random.Random(4)
    text = f"A < b.{CALL}\nand{CALL}<tool"
    for _ in range(40):
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, 30)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        guard, steps = Guard(wrapper, TOOLS), []
        ids = [i for part in parts for i in encode(wrapper, part)]
        for pos, (token, piece) in enumerate(pieces(wrapper, ids)):
            steps.append(guard.feed(pos, token, piece))
        assert events(steps) == ["open", "closed"] * 2
        assert shown(steps) + guard.finish("stop").emit == "A < b.\nand<tool"


def test_two_markers_in_one_token():
    """The end of a call and the beginning of the next merged into a single token."""
    wrapper = tokenizer(merged=["</tool_call><tool_call>", "l><tool_call>{"])
    guard = Guard(wrapper, TOOLS)
    tight = CALL.replace("\n", "")
    steps = play(guard, wrapper, tight + tight)
    assert sum(len(s.calls) for s in steps) == 2 and shown(steps) == ""


@pytest.mark.parametrize(
    "text",
    [
        "Use the <tool_call> tag to call.",
        "`<tool_call>` opens a call, `</tool_call>` closes it.",
        "<tool_call>",
        "Calls stand within <tool_call></tool_call> tags.",
        "a < b <t <tool <tool_call> <tool_call",
        'In JSON {"name": "get_weather", "arguments": {}} is a call.',
    ],
)
def test_text_that_only_mentions_a_marker_stays_prose(text):
    """Prose about tool calls is executed, swallowed, or forced into a call."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    steps = play(guard, wrapper, text)
    assert not events(steps)
    assert shown(steps) + guard.finish("stop").emit == text


TEXT = {"type": "string"}
TEXTS = Tool(
    "note",
    "",
    {
        "type": "object",
        "properties": {"title": TEXT, "days": {"type": "integer"}, "b": TEXT},
        "required": ["title", "days"],
    },
)
TAGGED = [n for n, f in FORMATS.items() if isinstance(f.style, Tagged) and not f.style.is_keyed]


def element(name: str, key: str, value: str, close: bool = True) -> str:
    """An argument as a format writes it, with its closing tag or without."""
    style, body = FORMATS[name].style, BODIES[name]
    begin = body.index(style.key_open + "city")
    end = body.index(style.value_close, begin)
    text = body[begin:end].replace("city", key).replace("Paris", value)
    return text + (style.value_close if close else "") + "\n"


@pytest.mark.parametrize("grammar", [True, False], ids=["grammar", "parsed"])
@pytest.mark.parametrize("name", TAGGED)
def test_a_closing_tag_that_is_missing_between_arguments(name, grammar):
    """The next argument becomes a part of the value, and nobody says so."""
    wrapper, style, body = wrapper_for(name), FORMATS[name].style, BODIES[name]
    begin = body.index(style.key_open + "city")
    end = body.index(style.value_close, begin) + len(style.value_close)
    for first, rest in (("title", "days"), ("b", "title")):
        last = element(name, "days", "3") if rest == "title" else ""
        value = "3" if rest == "days" else "x </p> y"
        inside = element(name, first, "A <b>", close=False) + element(name, rest, value) + last
        text = body[:begin].replace("get_weather", "note") + inside.rstrip("\n") + body[end:]
        guard = Guard(wrapper, [TEXTS], use_grammar=grammar)
        fmt = FORMATS[name]
        steps = play(guard, wrapper, (fmt.start or "") + text + fmt.end)
        assert events(steps) == ["open", "closed"], steps[-1]
        (call,) = steps[-1].calls
        found = json.loads(call.arguments)
        assert found[first].strip() == "A <b>" and str(found[rest]) == value and found["days"] == 3
        assert any(f"of `{first}` was missing" in note for note in call.notes)


def test_a_value_may_speak_of_arguments():
    """A text with the tags of an argument is cut there."""
    wrapper = tokenizer("qwen3_coder")
    value = "see <parameter=other> and <parameter=b>x</parameter> there"
    text = element("qwen3_coder", "title", value) + element("qwen3_coder", "days", "3")
    body = "<tool_call><function=note>" + text.replace("<parameter=b>x", "<parameter=c>x")
    guard = Guard(wrapper, [TEXTS])
    (call,) = play(guard, wrapper, body + "</function></tool_call>")[-1].calls
    assert json.loads(call.arguments)["title"] == value.replace("=b>", "=c>") and not call.notes


def test_what_a_template_drops_is_null():
    """A family whose calls leave out what is null, and lack an argument for us."""
    inner = {"type": "object", "required": ["v"], "properties": {"v": {"type": ["number", "null"]}}}
    rows = {"type": "array", "items": inner}
    inside = {"rows": rows, "note": {"anyOf": [TEXT, {"type": "null"}]}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": inside, "required": list(inside)}
    mark, wrapper = "]<]minimax[>[", tokenizer("minimax_m3")
    items = f"{mark}<item>{mark}<v>1.5{mark}</v>{mark}</item>{mark}<item>{mark}</item>"
    rows = f"{mark}<rows>{items}{mark}</rows>{mark}<n>1{mark}</n>"
    text = f'{mark}<tool_call>\n{mark}<invoke name="t">{rows}{mark}</invoke>\n{mark}</tool_call>'
    steps = play(Guard(wrapper, [Tool("t", "", schema)]), wrapper, text)
    assert events(steps) == ["open", "closed"], steps[-1]
    wanted = {"rows": [{"v": 1.5}, {"v": None}], "note": None, "n": 1}
    assert json.loads(steps[-1].calls[0].arguments) == wanted
    bad = text.replace(f"{mark}<n>1{mark}</n>", "")
    assert events(play(Guard(wrapper, [Tool("t", "", schema)]), wrapper, bad))[-1] == "left"


@pytest.mark.parametrize("name", ["pythonic", "pythonic_bare"])
def test_an_apostrophe_that_nothing_escapes(name):
    """A template that escapes nothing teaches its model so; the text is cut at the apostrophe."""
    wrapper = tokenizer(name)
    fmt, text = FORMATS[name], "[get_weather(city='it's St John's', days=3)]"
    for grammar in (True, False):
        guard = Guard(wrapper, TOOLS, use_grammar=grammar)
        start = "" if fmt.bare else fmt.start
        steps = play(guard, wrapper, start + text + (fmt.end or EOS))
        calls = [call for step in steps for call in step.calls]
        assert [json.loads(c.arguments)["city"] for c in calls] == ["it's St John's"]
        assert "apostrophe" in calls[0].notes[0]
    wrong = start + '[get_weather(city="Ulm"days=3)]'
    assert play(Guard(wrapper, TOOLS), wrapper, wrong)[-1].bad_pos == len(
        encode(wrapper, wrong.partition("days")[0])
    )


def test_a_grammar_that_is_given_up_is_said(monkeypatch):
    """A call that nothing watches from some token on, and nobody knows."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    play(guard, wrapper, CALL[:40])
    follow = CallMatcher.follow

    def broken(self, ids):
        follow(self, ids)
        self.live, self.gave_up = None, "out of room"

    monkeypatch.setattr(CallMatcher, "follow", broken)
    steps = play(guard, wrapper, CALL[40:], len(encode(wrapper, CALL[:40])))
    assert steps[-1].event == "closed" and "out of room" in guard.finish("tool").reason


BARE = [name for name, fmt in FORMATS.items() if fmt.bare]


@pytest.mark.parametrize("name", BARE)
def test_a_sentence_that_begins_with_a_call_is_prose(name):
    """Where calls have no marker, a sentence about one is cut, forced to its end, and executed."""
    wrapper = wrapper_for(name)
    for behind in (" is how one calls it.", ". And so on", " `x`"):
        guard = Guard(wrapper, TOOLS)
        text = BODIES[name] + behind
        steps = play(guard, wrapper, text)
        assert events(steps) == ["open"] and not guard.is_open
        end = guard.finish("stop")
        assert shown(steps) + end.emit == text and "taken as text" in end.reason
        guard.rewind(len(encode(wrapper, BODIES[name])))
        assert guard.is_open and guard.feed(guard._end, wrapper.eos_token_id, "").calls
    guard = Guard(wrapper, TOOLS)
    assert events(play(guard, wrapper, BODIES[name] + "\nThat is it."))[-1] == "left"


@pytest.mark.parametrize("name", list(FORMATS))
def test_examples_of_calls_stay_prose(name):
    """A call shown in a code block, or quoted, is executed."""
    fmt, wrapper = FORMATS[name], wrapper_for(name)
    call = text_of(name).removesuffix(EOS).removesuffix("<|call|>")
    for text in (f"Like so:\n```xml\n{call}\n```\nIt calls.", f"Write `{call}` for that."):
        guard = Guard(wrapper, TOOLS)
        steps = play(guard, wrapper, text)
        end = guard.finish("stop")
        assert not events(steps) and shown(steps) + end.emit == text, name
        assert fmt.bare or ("code block" in end.reason) == ("xml" in text)


def test_a_call_in_a_code_block_that_never_closes_is_not_lost():
    """A reply that ends with a call is prose because of a fence somewhere before it."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    assert not events(play(guard, wrapper, f"So:\n```\n{CALL}"))
    (call,) = guard.finish("stop").calls
    assert call.name == "get_weather" and "code block" in call.notes[0]


WITHOUT_MARKER = {
    "qwen3_coder": BODIES["qwen3_coder"].strip() + "\n",
    "seed_oss": BODIES["seed_oss"].strip() + "\n",
    "kimi_k2": BODIES["kimi_k2"],
    "harmony": " to=get_weather<|channel|>commentary json<|message|>" + '{"city": "Paris"}',
}


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("name", list(WITHOUT_MARKER))
def test_calls_without_their_opening_marker_are_found(name, end):
    """A model that leaves out the marker: neither a call nor a word about it."""
    wrapper = wrapper_for(name)
    tail = FORMATS[name].end if end else EOS
    steps = play(Guard(wrapper, TOOLS), wrapper, "Well." + WITHOUT_MARKER[name] + tail)
    assert events(steps) == ["open", "closed"], steps[-1]
    assert steps[-1].calls[0].arguments == '{"city": "Paris"}' and shown(steps) == "Well."


ODD = [
    Tool("9-lives", "", {"type": "object", "properties": {"$a b": {"type": "string"}},
         "required": ["$a b"]}),
    Tool("get-it.now", "", {"type": "object", "properties": {"x y": {"type": "integer"}}}),
]  # fmt: skip
ODD_CALLS = {
    "json_tools": '{"name": "9-lives", "arguments": {"$a b": "Paris"}}',
    "qwen3_coder": "<function=9-lives>\n<parameter=$a b>\nParis\n</parameter>\n</function>\n",
    "glm47": "9-lives<arg_key>$a b</arg_key><arg_value>Paris</arg_value>",
    "minimax_m2": '<invoke name="9-lives"><parameter name="$a b">Paris</parameter></invoke>',
    "kimi_k2": "<|tool_call_begin|>functions.9-lives:0<|tool_call_argument_begin|>"
    '{"$a b": "Paris"}<|tool_call_end|>',
    "mistral": '9-lives[ARGS]{"$a b": "Paris"}',
    "gemma4": 'call:9-lives{<|"|>$a b<|"|>:<|"|>Paris<|"|>}',
    "pythonic": '[9-lives($a b="Paris"), get-it.now(x y=3)]',
}


@pytest.mark.parametrize("name", list(ODD_CALLS))
def test_any_declared_name_can_be_called(name):
    """Names that the grammar takes and the parser does not, or the other way round."""
    wrapper, fmt = wrapper_for(name), FORMATS[name]
    text = fmt.start + ODD_CALLS[name] + (fmt.end or EOS)
    steps = play(Guard(wrapper, ODD), wrapper, text)
    assert steps[-1].event == "closed", steps[-1]
    call = steps[-1].calls[0]
    assert (call.name, call.arguments, call.notes) == ("9-lives", '{"$a b": "Paris"}', ())


SPELLED = Tool(
    "set",
    "",
    {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "string"}},
            "o": {"type": "object", "properties": {"k": {"type": ["number", "null"]}}},
            "s": {"type": ["string", "null"]},
        },
    },
)
AS_PYTHON = {
    "qwen3_coder": "<function=set>\n<parameter=on>\nTrue\n</parameter>\n"
    "<parameter=l>\n['a', \"b's\"]\n</parameter>\n<parameter=o>\n{'k': None}\n</parameter>\n"
    "<parameter=s>\nNone\n</parameter>\n"
    "</function>\n",
    "minicpm5": '<function name="set"><param name="on">True</param><param name="l">[\'a\', "b\'s"]'
    '</param><param name="o">{\'k\': None}</param><param name="s">None</param>',
    "pythonic": "[set(on=True, l=['a', \"b's\"], o={'k': None}, s=None)]",
    "pythonic_bare": "[set(on=\"True\", l=['a', \"b's\"], o={'k': None}, s=None)]",
    "function_gemma": "call:set{on:<escape>True<escape>,l:<escape>['a', \"b's\"]<escape>,"
    "o:<escape>{'k': None}<escape>,s:<escape>None<escape>}",
    "phi4_mini": '{"name": "set", "arguments": {\'on\': True, \'l\': [\'a\', "b\'s"], '
    "'o': {'k': None}, 's': None}}",
}


@pytest.mark.parametrize("name", list(AS_PYTHON))
def test_values_may_be_spelled_as_python_spells_them(name):
    """What models write that saw their calls through Python's `str` is flagged, or read as text."""
    wrapper, fmt = wrapper_for(name), FORMATS[name]
    text = ("" if fmt.bare else fmt.start) + AS_PYTHON[name] + (fmt.end or EOS)
    steps = play(Guard(wrapper, [SPELLED]), wrapper, text)
    assert steps[-1].event == "closed", steps[-1]
    call = steps[-1].calls[0]
    assert call.notes == ()
    assert json.loads(call.arguments) == {
        "on": True,
        "l": ["a", "b's"],
        "o": {"k": None},
        "s": None,
    }


@pytest.mark.parametrize("value", ["  x = 1\n", "\n", "a\n", " "])
@pytest.mark.parametrize("name", ["glm47", "minimax_m2", "muse_spark", "laguna", "deepseek_v32"])
def test_white_space_in_texts_is_kept(name, value):
    """A line of code loses its indent, a file its last line end."""
    wrapper = wrapper_for(name)
    steps = play(Guard(wrapper, TOOLS), wrapper, text_of(name).replace("Paris", value))
    assert json.loads(steps[-1].calls[0].arguments) == {"city": value}


def test_a_last_value_without_its_tag_ends_where_the_call_does():
    """The value swallows the closing tags, up to the reply's end."""
    wrapper = tokenizer("qwen3_coder")
    text = "<tool_call>" + BODIES["qwen3_coder"].replace("</parameter>\n", "") + "</tool_call>"
    steps = play(Guard(wrapper, TOOLS), wrapper, text)
    assert events(steps) == ["open", "closed"]
    assert steps[-1].calls[0].arguments == '{"city": "Paris"}'
    assert "</parameter>" in steps[-1].calls[0].notes[0]


def test_text_streams_and_only_a_possible_marker_waits():
    """Text outside calls that arrives late, or not before the end."""
    wrapper = tokenizer()
    steps = play(Guard(wrapper, TOOLS), wrapper, "ab <x <tool y", chars=True)
    # mlx-lm's detokenizer itself keeps a space until the next token
    assert [s.emit for s in steps] == [*"ab", "", "", " <x", "", "", "", "", "", "", "", " <tool y"]


@pytest.mark.parametrize("start_inside", [False, True])
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_call_drafted_while_thinking_is_prose(name, start_inside):
    """Prose in the think block executed, even twice."""
    wrapper, call = tokenizer(name, think=True), text_of(name)
    guard = Guard(wrapper, TOOLS, think=start_inside)
    start, end = FORMATS[name].think or ("<think>", "</think>")
    thought = f"{'' if start_inside else start}I could {call.removesuffix(EOS)} now.{end}"
    answer = intro(name, "Ok ")
    steps = play(guard, wrapper, f"{thought}{answer}{call}")
    assert events(steps) == ["open", "closed"]
    assert shown(steps) == f"{thought}{answer}"


def test_a_call_in_a_think_section_that_never_closes_is_not_lost():
    """A real call inside an unclosed think section is lost."""
    wrapper = tokenizer(think=True)
    guard = Guard(wrapper, TOOLS, think=True)
    steps = play(guard, wrapper, f"Let me see. {CALL}\n")
    assert not events(steps)
    (call,) = guard.finish("stop").calls
    assert call.name == "get_weather" and "think" in call.notes[0]
    assert guard.finish("length").calls == ()
    other = Guard(wrapper, TOOLS, think=True)
    play(other, wrapper, f"I could {CALL} but will not.")
    assert other.finish("stop").calls == ()


def test_a_stop_token_ends_a_harmony_call():
    """`<|call|>` is a stop token and never reaches the parser; both channels."""
    wrapper = wrapper_for("harmony")
    for channel in FORMATS["harmony"].starts:
        guard = Guard(wrapper, TOOLS)
        text = "<|channel|>analysis<|message|>Hm.<|end|>" + channel + BODIES["harmony"] + "<|call|>"
        steps = play(guard, wrapper, text)
        assert events(steps) == ["open", "closed"], channel
        assert steps[-1].calls[0].arguments == '{"city": "Paris"}'


def test_a_stop_token_inside_a_call_leaves_the_grammar():
    """The matcher asked after it accepted the stop token; a reply that ends in half a call (report
    2.10).
    """
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    play(guard, wrapper, CALL[:40])
    pos = len(encode(wrapper, CALL[:40]))
    step = guard.feed(pos, wrapper.eos_token_id, "")
    assert (step.event, step.bad_pos) == ("left", pos)
    allowed = guard.allowed(len(wrapper) + 5)
    assert allowed.any() and not allowed[wrapper.eos_token_id] and not allowed[len(wrapper) :].any()


def test_a_cut_call_is_kept_for_continue():
    """A call cut by the token limit is reported as complete, or cannot be resumed."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    ids = encode(wrapper, CALL)
    fed = list(pieces(wrapper, ids))
    for pos, (token, piece) in enumerate(fed[:20]):
        guard.feed(pos, token, piece)
    end = guard.finish("length")
    assert end.cut and not end.calls and end.raw.startswith("<tool_call>")
    steps = [guard.feed(pos, token, piece) for pos, (token, piece) in enumerate(fed[20:], 20)]
    assert events(steps) == ["closed"]


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_call_cut_anywhere_is_half_or_whole_and_goes_on(name):
    """Half a call reported as a call; one that cannot be resumed, wherever it was cut."""
    wrapper = wrapper_for(name)
    guard, steps = Guard(wrapper, TOOLS, resumable=True), []
    for pos, (token, piece) in enumerate(pieces(wrapper, encode(wrapper, text_of(name)))):
        steps.append(guard.feed(pos, token, piece))
        end = guard.finish("length" if pos % 2 else "cancelled")
        assert end.emit == "" and end.cut == guard.is_open
        assert all(call.arguments == '{"city": "Paris"}' for call in end.calls)
        assert all("end marker" in call.notes[-1] for call in end.calls)
    assert events(steps) == ["open", "closed"]


def test_a_whole_call_whose_end_marker_was_cut_is_recovered():
    """A complete call thrown away for its closing tag at the token budget."""
    wrapper = tokenizer()
    for text, expected in [(CALL[:-5], 1), (CALL[:-13], 1), (CALL[:-14], 0)]:
        guard = Guard(wrapper, TOOLS)
        play(guard, wrapper, text)
        end = guard.finish("length")
        assert end.cut and len(end.calls) == expected, text
        assert all("end marker" in call.notes[-1] for call in end.calls)
    pairs = tokenizer("glm47")
    guard = Guard(pairs, TOOLS)
    play(guard, pairs, "<tool_call>" + BODIES["glm47"])
    assert guard.finish("length").calls == (), "another argument could have followed"


def test_held_text_is_shown_once():
    """Text flushed at a cut is shown again by /continue, or a marker across the cut is missed."""
    wrapper = tokenizer(merged=[])
    guard = Guard(wrapper, TOOLS)
    steps = play(guard, wrapper, "ab<too")
    flushed = guard.finish("length").emit
    assert shown(steps) + flushed == "ab<too"
    more = play(guard, wrapper, "th", start=6)
    assert shown(more) + guard.finish("stop").emit == "th"
    guard.rewind(6)
    steps = play(guard, wrapper, CALL[4:], start=6)
    assert events(steps) == ["open", "closed"] and shown(steps) == ""


def test_rewind_makes_the_state_a_function_of_the_tokens():
    """A guard that remembers tokens which the session has taken back."""
    wrapper = tokenizer()
    fed = list(pieces(wrapper, encode(wrapper, f"One.{CALL}two{CALL}three<too")))
    reference = [Guard(wrapper, TOOLS)]
    steps = [reference[0].feed(i, t, p) for i, (t, p) in enumerate(fed)]
    guard, at = Guard(wrapper, TOOLS), 0
    rng = random.Random(1)
    for _ in range(60):
        ahead = rng.randint(at, len(fed))
        for i in range(at, ahead):
            step = guard.feed(i, *fed[i])
            assert (step.event, step.calls) == (steps[i].event, steps[i].calls)
        at = rng.randint(0, ahead)
        guard.rewind(at)
        junk = encode(wrapper, "zq")[0]
        if guard.feed(at, junk, "z").event != "left":
            guard.rewind(at)


def test_the_first_bad_token_is_named_and_nothing_else_is_lost():
    """A repair that goes back to the beginning of the call, or to the wrong place."""
    wrapper = tokenizer()
    text = CALL.replace("weather", "wether")
    steps = play(Guard(wrapper, TOOLS), wrapper, text)
    fed = list(pieces(wrapper, encode(wrapper, text)))
    assert steps[-1].event == "left"
    before = "".join(p for _, p in fed[: steps[-1].bad_pos])
    assert before.endswith('"get_we') and fed[steps[-1].bad_pos][1] == "t"


@pytest.mark.parametrize("merged", [[], [">\n"], [">{"], ["<tool_call>{x"], ["o <tool_call>{x"]])
def test_a_bad_opening_is_repaired_whatever_token_it_is(merged):
    """The token that opens the call holds the first mistake; it may also hold the whole marker."""
    wrapper = tokenizer(merged=merged)
    guard = Guard(wrapper, TOOLS)
    ids = encode(wrapper, "Hello <tool_call>{x")
    for pos, (token, piece) in enumerate(pieces(wrapper, ids)):
        step = guard.feed(pos, token, piece)
    assert step.event == "left" and step.bad_pos == len(ids) - 1
    allowed = guard.allowed(len(wrapper))
    assert allowed.any() and not allowed[ids[-1]]
    good = next(i for i in allowed.nonzero()[0] if wrapper.decode([i]).strip())
    step = guard.feed(step.bad_pos, int(good), wrapper.decode([int(good)]))
    assert step.event in (None, "open")


def test_drafts_are_cut_at_the_first_that_leaves():
    """Drafts outside the grammar are verified for nothing, or the matcher keeps them."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    assert guard.filter([1, 2, 3]) == 3
    play(guard, wrapper, CALL[:30])
    drafts = encode(wrapper, CALL[30:])
    assert guard.filter(drafts) == len(drafts)
    bad = [*drafts[:3], encode(wrapper, "}")[0], *drafts[3:]]
    assert guard.filter(bad) == 3 and guard.filter(drafts) == len(drafts)


def test_without_grammar_a_broken_call_is_tried_again_at_most_three_times():
    """Identical retries without end; broken calls that stay in the history."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS, use_grammar=False)
    play(guard, wrapper, "Hm. ")
    start = len(encode(wrapper, "Hm. "))
    broken = CALL.replace("Paris", "Paris").replace('"city"', '"town"')
    for _ in range(3):
        steps = play(guard, wrapper, broken, start=start)
        assert steps[-1].event == "broken" and steps[-1].bad_pos == start
        assert "town" in steps[-1].reason
    steps = play(guard, wrapper, broken + "!", start=start)
    assert events(steps) == ["open", "refused"] and guard.repairs == 3
    assert shown(steps) == broken + "!"


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_call_that_never_closes_is_refused_at_the_stop_token(name):
    """DSML opened and never closed: the session stalls. With a grammar it is not ended there."""
    wrapper = wrapper_for(name)
    text = text_of(name).partition("Paris")[0]
    guard = Guard(wrapper, TOOLS, use_grammar=False, max_repairs=0)
    steps = play(guard, wrapper, text + EOS)
    assert events(steps) == ["open", "refused"]
    assert shown(steps) + guard.finish("stop").emit == text
    steps = play(Guard(wrapper, TOOLS), wrapper, text + EOS)
    assert events(steps) == ["open", "left"]


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].end and n != "harmony"])
def test_a_marker_inside_a_value_does_not_close_the_call(name):
    """A value that mentions the end marker ends the call in the middle of the value."""
    wrapper = tokenizer(name)
    value = f"a {FORMATS[name].end} b"
    guard = Guard(wrapper, TOOLS)
    steps = play(guard, wrapper, text_of(name).replace("Paris", value))
    assert events(steps) == ["open", "closed"], steps[-1]
    assert value in steps[-1].calls[0].arguments


def test_bytes_of_a_character_split_over_tokens():
    """A value whose characters are several tokens long, with the text released late."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    steps = play(guard, wrapper, "é" + CALL.replace("Paris", "Orléans 東京 🎉"))
    assert events(steps) == ["open", "closed"]
    assert "東京 🎉" in steps[-1].calls[0].arguments


def test_a_reply_that_was_written_before_is_taken_whole():
    """A chat that goes on after its file was read: an open call was not known, a closed one lost,
    and a call of other tools was repaired in the past."""
    wrapper = tokenizer()
    whole, cut = f"Well, {CALL}", CALL[: CALL.index("Paris")]
    for text, caught, shown_text, is_open in (
        (whole, ["get_weather"], "Well, ", False),
        (whole + cut, ["get_weather"], "Well, ", True),
        ("A < b <tool", [], "A < b ", False),
    ):
        guard, ids = Guard(wrapper, TOOLS), encode(wrapper, text)
        assert guard.catch_up(7, ids, wrapper.decode)
        assert [call.name for call in guard.caught] == caught and guard.is_open == is_open
        assert guard.caught_text == shown_text and (not is_open or guard.opened > 7)
        assert guard.feed(7 + len(ids), encode(wrapper, "x")[0], "x").event is None
    for grammar, bad in ((True, '{"name": "gone'), (False, '{"name": "gone"}\n</tool_call>')):
        guard = Guard(wrapper, TOOLS, use_grammar=grammar)
        assert not guard.catch_up(7, encode(wrapper, "<tool_call>\n" + bad), wrapper.decode)


def test_what_may_stand_instead_of_a_wrong_guess():
    """A token that no grammar allows was fed and taken back, though its row was there to pick from;
    or it was picked under the mask of another place."""
    wrapper = tokenizer()
    size = len(wrapper)
    guard = Guard(wrapper, TOOLS)
    ahead, wrong = encode(wrapper, ' "days": 1'), encode(wrapper, "x")[0]
    assert guard.instead(ahead, wrong, size) is None, "no call is open"
    play(guard, wrapper, CALL[: CALL.index("}}")] + ",")
    instead = guard.instead(ahead, wrong, size)
    assert "`x`" in instead.reason
    allowed = {i for i in range(size) if instead.allowed[i]}
    assert {encode(wrapper, c)[0] for c in "2 }"} <= allowed and wrong not in allowed
    assert guard.repairs == 1
    assert guard.instead(ahead, encode(wrapper, "2")[0], size) is None, "it may stand there"
    assert guard.instead(encode(wrapper, ' "x"'), wrong, size) is None, "they leave it before"
    assert play(guard, wrapper, ' "days": 12', start=guard._end)[-1].event is None
    assert Guard(wrapper, TOOLS, use_grammar=False).instead([], wrong, size) is None


def test_repairs_are_counted_over_the_reply():
    """Two repairs told as one."""
    wrapper = tokenizer()
    guard = Guard(wrapper, TOOLS)
    play(guard, wrapper, '<tool_call>\n{"name')
    for n in (1, 2, 3):
        (step,) = play(guard, wrapper, "x", start=guard._end)
        assert step.event == "left" and guard.repairs == n


def test_a_call_opened_by_one_token():
    """What is looked at for the end marker then begins right behind it."""
    wrapper = tokenizer(merged=['<tool_call>{"'])
    for grammar in (True, False):
        text = CALL.replace(">\n{", ">{") + "b"
        steps = play(Guard(wrapper, TOOLS, use_grammar=grammar), wrapper, text)
        assert events(steps[:1]) == ["open"] and events(steps) == ["open", "closed"]
        assert shown(steps) == "b"


def test_text_that_waited_before_a_call_is_shown_once():
    """A `<` that waited, and text in the token of the marker: lost where the call was refused."""
    text = 'Hi <ax<tool_call>{"name": "no"}</tool_call>.'
    wrapper = tokenizer(merged=["ax<tool_call>{", "x<"])
    guard = Guard(wrapper, TOOLS, use_grammar=False, max_repairs=0)
    steps = play(guard, wrapper, text)
    assert events(steps) == ["open", "refused"]
    assert shown(steps) + guard.finish("stop").emit == text


def test_what_is_allowed_where():
    """All of a row before a call and without a grammar, what fits inside one."""
    wrapper = tokenizer()
    size, begun = len(wrapper) + 5, CALL[: CALL.index("Paris") - 1]
    guard = Guard(wrapper, TOOLS)
    everything = guard.allowed(size)
    assert (everything.dtype, everything.shape, everything.all()) == (bool, (size,), True)
    play(guard, wrapper, begun)
    inside = guard.allowed(size)
    assert inside[encode(wrapper, '"')[0]] and not inside[encode(wrapper, "x")[0]]
    unwatched = Guard(wrapper, TOOLS, use_grammar=False)
    play(unwatched, wrapper, begun)
    assert unwatched.allowed(size).all()


def test_a_call_without_a_marker_is_never_picked_again_ahead_of_its_feeding():
    """It may still turn out to be prose, which only the token itself tells."""
    wrapper = tokenizer("pythonic_bare")
    guard, wrong = Guard(wrapper, TOOLS), encode(wrapper, ";")[0]
    play(guard, wrapper, "[get_weather(city=")
    ahead = encode(wrapper, '"a"')
    assert guard.is_open and guard.filter([*ahead, wrong]) == len(ahead)
    assert guard.instead(ahead, wrong, len(wrapper)) is None


def test_a_call_in_any_code_block_is_told_as_an_example():
    """Guards: only the first block is looked at."""
    wrapper = tokenizer()
    for blocks in (0, 1, 2):
        guard = Guard(wrapper, TOOLS)
        play(guard, wrapper, "```\nx\n```\n" * blocks + f"```\n{CALL}\n```\n")
        assert "in a code block was taken as text" in guard.finish("stop").reason
