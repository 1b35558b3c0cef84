"""Replies of a wanted form: what may be asked, exact repairs, ends, reasoning, calls, guesses."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from test_tools_exact import LENGTH, FakeModel, Loop, copying
from toolkit import TOOLS, encode, pieces, tokenizer
from typer.testing import CliRunner

from ds4cli import Engine
from ds4cli.cli import app
from ds4cli.engine.generation import Generation
from ds4cli.errors import UsageError
from ds4cli.settings import Settings
from ds4cli.structured.asked import checked, from_request, from_settings, inlined
from ds4cli.structured.either import CallOrForm
from ds4cli.structured.grammar import form_of
from ds4cli.structured.guard import FormGuard
from ds4cli.structured.missing import missing
from ds4cli.structured.wanted import Wanted
from ds4cli.text.reasoning import Markers
from ds4cli.tools import Guard, Tool

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "object": Wanted("json", PERSON, "--json-schema"),
    "choice": Wanted("json", {"enum": ["yes", "no", 3, None]}, "--json-schema"),
    "list": Wanted(
        "json", {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "--json-schema"
    ),
    "regex": Wanted("regex", r"[A-C]{2,5}/\d\.", "--regex"),
    "lark": Wanted("grammar", 'start: "x" item+\nitem: /[0-9]/ | "(" start ")"', "--grammar"),
}


def guard_of(wrapper, wanted, **options):
    return FormGuard(wrapper, form_of(wrapper, wanted), **options)


def play(guard, wrapper, text, start=0):
    """Feed a text's tokens until one leaves the form; the steps."""
    steps = []
    for pos, (token, piece) in enumerate(pieces(wrapper, encode(wrapper, text)), start):
        steps.append(guard.feed(pos, token, piece))
        if steps[-1].event == "left":
            break
    return steps


# -- what may be asked for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json_schema": "{}", "regex": "a"}, "exclude each other"),
        ({"json_object": True, "grammar": 'start: "a"'}, "exclude each other"),
        ({"json_schema": "no/such/file"}, "no such file"),
        ({"json_schema": '{"type": '}, "is no JSON"),
        ({"json_schema": '{"type": "nope"}'}, "Invalid type: nope"),
        ({"json_schema": '{"$ref": "#/nowhere"}'}, "does not exist"),
        ({"json_schema": '{"not": {}}', "strict": True}, "`not`"),
        ({"regex": "a("}, 'used: invalid regex "a(" (in regex): regex parse error: unclosed group'),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, 'used: unknown name: "nothing"'),
    ],
)
def test_what_cannot_be_is_one_line(given, words):
    """Guards: a form that is impossible shows only when the model is loaded and writes."""
    with pytest.raises(UsageError) as error:
        from_settings(Settings(**given))
    assert words in error.value.message and "\n" not in error.value.message


def test_what_a_grammar_cannot_hold_is_named():
    """Guards: a keyword of a schema that nothing enforces and nobody mentions."""
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "odd"}}
    wanted = from_settings(Settings(json_schema=json.dumps(schema)))
    assert wanted.unheld == ("`uniqueItems`",) and wanted.unchecked == ("`format` `odd`",)
    assert ["only checked at the end" in n for n in wanted.notices] == [True, False]
    twice = {"type": "array", "contains": {}, "items": {"type": "array", "contains": {}}}
    assert from_settings(Settings(json_schema=json.dumps(twice))).unheld == ("`contains`",)
    assert from_settings(Settings(json_schema=json.dumps(PERSON), strict=True)).unheld == ()
    assert from_settings(Settings()) is None


def test_what_nothing_checks_is_named():
    """Guards: a notice that says a keyword is checked at the end, where no check knows it."""
    odd = {"type": "object", "unevaluatedProperties": False, "propertyNames": {"minLength": 1}}
    wanted = checked(Wanted("json", odd, "--json-schema"))
    assert (wanted.unheld, wanted.unchecked) == (("`propertyNames`",), ("`unevaluatedProperties`",))
    there = {"$id": "http://a.test/b", "$defs": {"c": {"not": {}}}, "$ref": "b#/$defs/c"}
    assert "`$ref` `b#/$defs/c`" in checked(Wanted("json", there, "--json-schema")).unchecked


def test_files_are_read_and_kept_as_text(tmp_path):
    """Guards: a batch resumed with another schema in a file of the same name."""
    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON))
    settings = Settings(json_schema=str(path))
    assert from_settings(settings).source == PERSON
    assert json.loads(inlined(settings).json_schema) == PERSON


def test_each_way_to_ask_is_known_by_its_name(tmp_path):
    """Guards: a form of another kind, and a message about a flag that nobody gave."""
    (tmp_path / "form").write_text("\ufeff" + json.dumps(PERSON), encoding="utf-8")
    (tmp_path / "form.lark").write_text('start: "é"', encoding="utf-8")
    object_of = {"type": "object"}
    for given, kind, source, name in (
        ({"json_object": True}, "json", object_of, "--json-object"),
        ({"regex": "a+"}, "regex", "a+", "--regex"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"', "--grammar"),
        ({"grammar": str(tmp_path / "form.lark")}, "grammar", 'start: "é"', "--grammar"),
        ({"json_schema": " {}"}, "json", {}, "--json-schema"),
        ({"json_schema": str(tmp_path / "form")}, "json", PERSON, "--json-schema"),
    ):
        wanted = from_settings(Settings(**given))
        assert (wanted.kind, wanted.source, wanted.name) == (kind, source, name)
    asked = from_request({"type": "json_object"})
    assert (asked.kind, asked.source, asked.name) == ("json", object_of, "response_format")
    schema = {"type": "json_schema", "json_schema": {"schema": PERSON}}
    asked = from_request(schema)
    assert (asked.kind, asked.source, asked.name) == ("json", PERSON, "response_format")
    (tmp_path / "no.text").write_bytes(b"\xff")
    for given, message, hint in (
        ({"grammar": "nowhere"}, "`nowhere`", "`--grammar` wants a file"),
        ({"json_schema": "nowhere"}, "`nowhere`", "`--json-schema` wants a file"),
        ({"json_schema": str(tmp_path / "no.text")}, "not UTF-8", "`--json-schema` wants a text"),
        ({"json_schema": "{"}, "the schema of `--json-schema` is no JSON", ""),
        ({"regex": "a", "json_object": True}, "`--json-object` and `--regex` exclude", "one form"),
        ({"json_schema": '{"type": 3}'}, "`--json-schema` cannot be used", ""),
    ):
        with pytest.raises(UsageError) as error:
            from_settings(Settings(**given))
        assert message in error.value.message and hint in (error.value.hint or "")


@pytest.mark.parametrize(
    "field",
    [
        "json_object",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}},
    ],
)
def test_a_bad_response_format_is_refused(field):
    """Guards: a batch line whose format is ignored."""
    with pytest.raises(UsageError):
        from_request(field)


def test_a_response_format_is_read():
    """Guards: OpenAI's three types."""
    assert from_request({"type": "text"}) is None
    assert from_request({"type": "json_object"}).source == {"type": "object"}
    body = {"name": "p", "schema": PERSON, "strict": True}
    assert from_request({"type": "json_schema", "json_schema": body}).source == PERSON


# -- exact -----------------------------------------------------------------------------------------


def masked(loop: Loop, wanted) -> list[int]:
    """The reference: the mask of a fresh matcher at every step."""
    form, tokens = form_of(loop.wrapper, wanted), []
    while len(tokens) < LENGTH:
        matcher = form.matcher()
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        token = loop.pick(tokens, form.mask(matcher, loop.model.size))
        if token in loop.wrapper.eos_token_ids:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("name", list(FORMS))
def test_repair_equals_masking_from_the_start(name, temp):
    """Guards: repairs that give other text than constrained decoding, with drafts or without."""
    wrapper = tokenizer(merged=['{"', '": ', "name", "ag", '", "', "AB"])
    repaired = 0
    for seed in range(3):
        model = FakeModel(wrapper, 'Sure: {"nam": "Ann", "age": 7x} AB/3. x1(x2)', seed)
        loop = Loop(wrapper, model, temp)
        expected = masked(loop, FORMS[name])
        plain, repairs = loop.guarded(guard_of(wrapper, FORMS[name]))
        drafted, _ = loop.guarded(guard_of(wrapper, FORMS[name]), copying(expected, seed))
        assert plain == drafted == expected
        repaired += repairs
    assert repaired > 2, "the scripts must make the model err"


@pytest.mark.parametrize("name", ["object", "list", "choice"])
def test_finished_json_is_valid_with_any_drafter(name, model_folder):
    """Guards: a text that ended and is not what was asked for; drafts that change it."""
    texts = []
    for drafter, speculate in (("none", "auto"), ("ngram", "always")):
        engine = Engine.load(
            model_folder, temp=1.0, max_tokens=160, drafter=drafter, speculate=speculate
        )
        texts.append([_reply(engine, FORMS[name], attempt) for attempt in range(2)])
    assert texts[0] == texts[1]
    ended = [text for text, reason in texts[0] if reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), FORMS[name].source)


def test_what_a_grammar_forces_costs_no_call(drafting, monkeypatch):
    """Guards: guesses of the grammar that are fed and then dropped, since a model that would write
    something else is asked what it thinks of each; a repair for each, and a call."""
    inside = {"temperature": {"enum": [1, 2]}, "humidity": {"enum": [3, 4]}}
    schema = {
        "type": "object",
        "properties": inside,
        "required": list(inside),
        "additionalProperties": False,
    }
    wanted = checked(Wanted("json", schema, "--json-schema"))
    found = []
    for holds in (True, False):
        if not holds:
            monkeypatch.setattr(Generation, "repicked", lambda self, feed, picks, *_: picks)
        session = drafting[1].session()
        session.sync(drafting[1].encode("Name a person, please."))
        guard = guard_of(drafting[1].tokenizer, wanted)
        text = "".join(event.text for event in session.stream(guard=guard))
        repairs = len(session.stats.repairs)
        assert repairs == guard.repairs > 20
        found.append((text, repairs, session.stats.forwards))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] < 0.6 * found[1][2], found


# Every keyword that a grammar holds, in the company it is found in.
SCHEMAS = [
    {"anyOf": [{"const": None}, {"type": "integer", "multipleOf": 5}]},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, "a"]}], "items": False},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 1}, "minItems": 2},
    {"type": "string", "pattern": "^[a-f]{2,5}$|^\\d\\W?[xy]$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "properties": {"y": False}},
    {"allOf": [{"minimum": 3}, {"type": "integer"}, {"maximum": 7}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#"}}}},
    {"type": ["string", "null"], "format": "date"},
]


@pytest.fixture(scope="module")
def drafting(model_folder):
    """A tiny model that writes by itself, and one that is helped."""
    plain, helped = {"drafter": "none"}, {"drafter": "ngram", "speculate": "always"}
    return [Engine.load(model_folder, temp=1.0, max_tokens=48, **way) for way in (plain, helped)]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: "-".join(schema))
def test_what_a_grammar_holds_is_held(schema, drafting):
    """Guards: a finished text that the schema refuses, and nobody said that it might."""
    assert any(hold(schema, drafting, attempt) for attempt in range(4)), "none came to its end"


def hold(schema, engines, attempt=0) -> bool:
    """Whether a text came to its end, which is what the schema asks for."""
    wanted = checked(Wanted("json", schema, "--json-schema"))
    replies = [_reply(engine, wanted, attempt) for engine in engines]
    assert replies[0] == replies[1]
    text, reason = replies[0]
    if reason == "stop" and not wanted.notices:
        draft = jsonschema.validators.validator_for(schema)
        jsonschema.validators.extend(draft, {"pattern": _pattern})(schema).validate(
            json.loads(text)
        )
    return reason == "stop"


def _pattern(validator, pattern, value, schema):
    """As ECMA reads it, which the drafts ask for: `\\w` is ASCII and `\\s` is not."""
    if isinstance(value, str) and not any(re.search(pattern, value, f) for f in (re.ASCII, 0)):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


SUITE = os.environ.get("DS4CLI_JSON_SCHEMA_SUITE", "")


@pytest.mark.slow
@pytest.mark.skipif(not SUITE, reason="DS4CLI_JSON_SCHEMA_SUITE names no folder of JSON files")
def test_every_schema_of_a_suite_is_held_or_refused(drafting):
    """Guards: a crash, a text that drafts change or that a schema refuses, among those that only a
    suite thinks of. Minutes."""
    cases = [case for path in sorted(Path(SUITE).rglob("*.json")) for case in _json_of(path)]
    tried = 0
    for text in dict.fromkeys(json.dumps(case["schema"]) for case in cases):
        with contextlib.suppress(UsageError):
            hold(json.loads(text), drafting)
            tried += 1
    assert tried > 100


def _json_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def _reply(engine, wanted, attempt):
    session = engine.session()
    session.sync(engine.encode("Name a person, please."))
    session.attempt = attempt
    events = list(session.stream(guard=guard_of(engine.tokenizer, wanted)))
    return "".join(event.text for event in events), events[-1].finish_reason


# -- the end ---------------------------------------------------------------------------------------


def test_a_grammar_is_built_once_and_for_its_form():
    """Two forms in one process: the second reply was held to the form of the first."""
    wrapper = tokenizer()
    first, again, other = (Wanted("regex", p, "--regex") for p in ("a", "a", "b"))
    assert form_of(wrapper, first) is form_of(wrapper, again) is not form_of(wrapper, other)
    lark = Wanted("grammar", 'start: "a"', "--grammar")
    same = Wanted("regex", 'start: "a"', "--regex")
    assert form_of(wrapper, lark) is not form_of(wrapper, same)
    assert not play(guard_of(wrapper, other), wrapper, "b")[-1].event


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "a/b", "a/b", "a\\"),
        ("regex", r"a\/b", "a/b", "ab"),
        ("regex", r"a\\/b", r"a\/b", "a/"),
        ("regex", "//", "//", "/x"),
        ("regex", "a\nb", "a\nb", "ab"),
        ("json", True, '[1, {"a": null}]', "x"),
        ("json", {}, "null", "nul1"),
    ],
)
def test_a_form_as_it_was_given(kind, source, good, bad):
    """Guards: a pattern that ends at its first slash; a schema that is no object."""
    wrapper, wanted = tokenizer(merged=[]), checked(Wanted(kind, source, "it"))
    guard = guard_of(wrapper, wanted)
    steps = play(guard, wrapper, good)
    assert not any(step.event for step in steps) and guard.text == good
    assert guard.allowed(len(wrapper))[wrapper.eos_token_id] and not guard.finish("stop").reason
    assert play(guard_of(wrapper, wanted), wrapper, bad)[-1].event == "left"


def test_a_stop_token_may_come_only_where_the_text_may_end():
    """Guards: half an object that counts as a finished answer."""
    wrapper = tokenizer()
    guard, stop = guard_of(wrapper, FORMS["object"]), wrapper.eos_token_id
    steps = play(guard, wrapper, '{"name": "A", "age": 3')
    step = guard.feed(len(steps), stop, "")
    assert (step.event, step.bad_pos) == ("left", len(steps))
    assert step.reason == "the reply would end before its text fits"
    assert not guard.allowed(len(wrapper))[stop]
    play(guard, wrapper, "}", len(steps))
    assert guard.allowed(len(wrapper))[stop]
    assert guard.feed(len(steps) + 1, stop, "").event is None
    assert guard.finish("stop").reason == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "A', 'the keys `age` and `"}` are missing'),
        ('{"name": "A", "age": 3, "tags": ["a"', "`]}` is missing"),
        ('{"name": "A", "age": 3', "`}` is missing"),
    ],
)
def test_a_text_that_was_cut_says_what_is_missing(text, words):
    """Guards: `max_tokens` inside a text, and nobody says that it is not whole."""
    guard = guard_of(tokenizer(), FORMS["object"])
    play(guard, tokenizer(), text)
    assert guard.finish("length").reason == f"the text was cut (length): {words}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the rest of the value is missing"),
        ('{"name": "A"}', "the rest of the value is missing"),
        ('{"age": 1, "tags": [{"name": "A"', "the keys `name` and `}]}` are missing"),
        ('{"tags": {"name": "A", "age": 1}', "the keys `name`, `age` and `}` are missing"),
        ('{"na\\u006de": "A", "x\\', 'the keys `age` and `"}` are missing'),
        ('{"x\\": "', "the keys `name`, `age` and `}` are missing"),
        ('[{"name": 1, "age": {', "`}}]` is missing"),
        ('{"name": "age", "b": "[:{"', "the keys `age` and `}` are missing"),
        ('{"name": [1], "age": [2', "`]}` is missing"),
    ],
)
def test_what_a_text_lacks_to_be_whole(text, words):
    """Guards: a key of an inner object, or a text, that counts as one of the outermost."""
    wanted = FORMS["object"] if text[:1] != "[" else Wanted("json", True, "x")
    assert missing(wanted, text) == words


def test_missing_reads_strings_as_json_does():
    """Guards: a bracket or a quote inside a string counted as one of the text."""
    wanted = FORMS["object"]
    assert missing(wanted, '{"name": "a\\"}]{", "age": 1') == "`}` is missing"
    assert "does not match" in missing(FORMS["regex"], "A")


def test_what_no_grammar_holds_is_checked_at_the_end():
    """Guards: a keyword that was named as not enforced, and then is not checked either."""
    wanted = checked(Wanted("json", {"type": "array", "uniqueItems": True}, "--json-schema"))
    for text, is_fit in (("[1, 2]", True), ("[1, 1]", False)):
        guard = guard_of(tokenizer(), wanted)
        play(guard, tokenizer(), text)
        assert (guard.finish("stop").reason == "") == is_fit


# -- reasoning and calls ---------------------------------------------------------------------------

THINK = Markers("<think>", "</think>")


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("between", ["", "\n\n"])
def test_the_form_begins_behind_reasoning(thinks, between):
    """Guards: reasoning that is forced into the form, or an answer behind it that is not."""
    wrapper = tokenizer(think=True)
    guard = guard_of(wrapper, FORMS["choice"], markers=THINK, thinks=thinks)
    thought = ("" if thinks else "<think>") + "yes or {no}?</think>" + between
    steps = play(guard, wrapper, thought)
    assert [step.event for step in steps] == [None] * len(steps) and not guard.is_open
    last = play(guard, wrapper, "maybe", len(steps))[-1]
    assert (last.event, last.bad_pos) == ("left", len(steps))
    mask = guard.allowed(len(wrapper))
    assert mask[encode(wrapper, '"')[0]] and not mask[encode(wrapper, "m")[0]]
    assert play(guard, wrapper, '"yes"', len(steps))[-1].event is None and guard.is_open
    assert guard.text == '"yes"'


def test_a_reply_may_begin_without_reasoning():
    """Guards: the first token is held back for ever where a model may think."""
    wrapper = tokenizer(think=True)
    guard = guard_of(wrapper, FORMS["choice"], markers=THINK)
    assert "".join(step.emit for step in play(guard, wrapper, '"no"')) == '"no"'
    guard = guard_of(wrapper, FORMS["choice"], markers=THINK)
    assert play(guard, wrapper, "zo")[-1].bad_pos == 0


def test_reasoning_may_not_end_the_reply():
    """Guards: a reply that is thoughts only."""
    wrapper = tokenizer(think=True)
    guard = guard_of(wrapper, FORMS["choice"], markers=THINK)
    steps = play(guard, wrapper, "<think>so")
    assert guard.feed(len(steps), wrapper.eos_token_id, "").event == "left"
    mask = guard.allowed(len(wrapper))
    assert not mask[wrapper.eos_token_id] and mask.sum() == len(wrapper) - 1


def both(wrapper):
    return CallOrForm(Guard(wrapper, TOOLS), guard_of(wrapper, FORMS["object"]))


def test_a_call_or_a_text():
    """Guards: a form that forbids calls, or a text that may turn into one."""
    wrapper = tokenizer()
    guard = both(wrapper)
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    steps = play(guard, wrapper, call)
    assert steps[-1].event == "closed" and steps[-1].calls[0].name == "get_weather"
    guard = both(wrapper)
    text = '{"name": "<tool_ca", "age": 1}'
    steps = play(guard, wrapper, text)
    assert "".join(step.emit for step in steps) == text and guard.finish("stop").reason == ""
    guard = both(wrapper)
    assert play(guard, wrapper, "<tool_x")[-1].event == "left"
    assert play(guard, wrapper, '{"name": "A", "age": 1}')[-1].event is None


def test_what_waits_is_text_that_was_not_shown():
    """Guards: a chat with tools and a form that ends with an error, because nobody knows what of
    an unfinished reply was not shown yet."""
    wrapper = tokenizer()
    guard = both(wrapper)
    steps = play(guard, wrapper, "<tool_ca")
    assert "".join(step.emit for step in steps) + guard.waiting == "<tool_ca"
    guard = both(wrapper)
    text = '{"name": "A"'
    steps = play(guard, wrapper, text)
    assert "".join(step.emit for step in steps) + guard.waiting == text


def test_what_left_the_form_is_said_in_a_call_or_behind_it():
    """Guards: a repair of which nobody learns why."""
    wrapper, said = tokenizer(), "`x` does not fit"
    guard, (x,) = guard_of(wrapper, FORMS["object"]), encode(wrapper, "x")
    assert play(guard, wrapper, '{"name": x')[-1].reason.startswith(said)
    assert guard.instead(encode(wrapper, '"'), x, len(wrapper)) is None  # in a string
    assert guard.instead(encode(wrapper, '""'), x, len(wrapper)).reason.startswith(said)
    assert not guard.allowed(x)[:x].all() and len(guard.allowed(x)) == x  # rows end before it


def test_going_back_forgets_text_and_calls():
    """Guards: a reply that is rewound to its beginning and stays decided."""
    wrapper = tokenizer()
    guard = both(wrapper)
    play(guard, wrapper, '<tool_call>{"name": ')
    guard.rewind(0)
    assert play(guard, wrapper, '{"name": "A", "age": 1}')[-1].event is None
    guard.rewind(3)
    ids = encode(wrapper, '{"name": "A", "age": 1}')
    assert guard.opened == 0 and guard.feed(3, ids[3], "").event is None


@pytest.mark.parametrize("keep", range(7))
def test_going_back_anywhere_is_as_if_nothing_had_come(keep):
    """Guards: a matcher that stands elsewhere than its text after two ways back."""
    wrapper = tokenizer(think=True)
    ids = list(pieces(wrapper, encode(wrapper, '<think>a</think>{"name": "é", "age": 1}')))
    guard, fresh = (guard_of(wrapper, FORMS["object"], markers=THINK) for _ in range(2))
    for pos, (token, text) in enumerate(ids[: keep + 4]):
        guard.feed(pos, token, text)
    guard.rewind(keep + 2)
    guard.rewind(keep)
    for pos, (token, text) in enumerate(ids):
        if pos >= keep:
            guard.feed(pos, token, text)
        fresh.feed(pos, token, text)
        if pos >= keep:
            assert (guard.text, guard.settled) == (fresh.text, fresh.settled)
            assert np.array_equal(guard.allowed(len(wrapper)), fresh.allowed(len(wrapper)))


def test_a_reply_that_was_begun_goes_on():
    """Guards: `/continue` of a text in the middle of its form."""
    wrapper = tokenizer()
    ids = encode(wrapper, '{"name": "A", ')
    guard = guard_of(wrapper, FORMS["object"])
    assert guard.catch_up(5, ids, wrapper.decode)
    assert play(guard, wrapper, '"age": 1}', 5 + len(ids))[-1].event is None
    assert not guard_of(wrapper, FORMS["object"]).catch_up(5, ids[1:], wrapper.decode)


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.mark.parametrize("keep", [13, 35, len(CALL)])
def test_a_call_that_was_begun_goes_on(keep):
    """Guards: `/continue` of a call that is taken for a text, or for nothing at all."""
    wrapper = tokenizer()
    ids, guard = encode(wrapper, CALL[:keep]), both(wrapper)
    assert guard.catch_up(5, ids, wrapper.decode)
    assert guard.is_open == (keep < len(CALL)) and bool(guard.caught) == (keep == len(CALL))
    if guard.is_open:
        assert play(guard, wrapper, CALL[keep:], 5 + len(ids))[-1].event == "closed"
    assert guard.finish("stop").reason == ""


def test_a_text_that_was_begun_goes_on_where_there_are_tools():
    """Guards: a text that nobody watches any more, or one that never fitted."""
    wrapper = tokenizer()
    ids, guard = encode(wrapper, '{"name": "A", '), both(wrapper)
    assert guard.catch_up(5, ids, wrapper.decode) and not guard.caught
    assert play(guard, wrapper, "x", 5 + len(ids))[-1].event == "left"
    assert play(guard, wrapper, '"age": 1}', 5 + len(ids))[-1].event is None
    assert not both(wrapper).catch_up(5, ids[1:], wrapper.decode)


def test_going_back_behind_the_beginning_of_a_call_leaves_all_open():
    """A call that was continued, and went wrong, could not become a text any more."""
    wrapper = tokenizer(think=True)
    guard = CallOrForm(Guard(wrapper, TOOLS), guard_of(wrapper, FORMS["object"], markers=THINK))
    thought = encode(wrapper, "<think>so</think>")
    ids = encode(wrapper, "<think>so</think>" + CALL[:30])
    assert guard.catch_up(5, ids, wrapper.decode) and guard.opened == 5 + len(thought)
    guard.rewind(guard.opened)
    assert not guard.is_open
    text = '{"name": "A", "age": 1}'
    assert play(guard, wrapper, text, 5 + len(thought))[-1].event is None and guard.is_open
    assert guard.finish("stop").reason == ""


def test_who_decides_answers():
    """Guards: guesses, masks and ends of the guard that is not concerned."""
    wrapper = tokenizer(merged=[])
    guard, x = both(wrapper), encode(wrapper, "x")
    play(guard, wrapper, '{"na')
    me = encode(wrapper, 'me"')
    assert guard.filter(me) == len(me) and guard.filter([*me, *x]) == len(me)
    assert guard.forced([])[: len(me)] == me and guard.forced(me[:1])[:1] == me[1:2]
    assert guard.instead(me, x[0], len(wrapper)).allowed[encode(wrapper, ":")[0]]
    assert len(guard.instead(me, x[0], 300).allowed) == 300
    assert guard.allowed(300)[me[0]] and not guard.allowed(300)[x[0]]
    assert "(length)" in guard.finish("length").reason
    guard = both(wrapper)
    play(guard, wrapper, CALL[:40])
    rest = encode(wrapper, CALL[40:46])
    assert guard.filter([*rest[:3], *encode(wrapper, "\x00")]) == 3


def test_what_waits_is_forgotten_with_its_tokens():
    """Text of a token that was taken back was shown."""
    wrapper = tokenizer(merged=[])
    guard = both(wrapper)
    play(guard, wrapper, "<tool_ca")
    guard.rewind(3)
    assert guard.waiting == "<to"


def test_what_waited_and_fits_is_shown():
    """Text of a form that looked like the beginning of a call was lost."""
    wrapper, tag = tokenizer(merged=[]), Wanted("regex", "<tob+", "--regex")
    for text, event in (("<tob", None), ("<tox", "left")):
        guard = CallOrForm(Guard(wrapper, TOOLS), guard_of(wrapper, tag))
        steps = play(guard, wrapper, text)
        assert steps[-1].event == event
        assert "".join(step.emit for step in steps) == text.removesuffix("x")


def test_what_begins_as_a_call_ends_as_one():
    """Guards: an object that is neither a call nor the form; a notice of one guard only."""
    wrapper = tokenizer("llama3_json")
    unique = {"type": "array", "uniqueItems": True}
    tools = [Tool("now", "", {"type": "object", "properties": {"l": unique}})]
    wanted = checked(Wanted("json", unique, "--json-schema"))
    guard = CallOrForm(Guard(wrapper, tools), guard_of(wrapper, wanted))
    assert len(guard.notices) == 2
    step = play(guard, wrapper, '{"name": "A", "age": 1}')[-1]
    assert step.event == "left" and guard.is_open
    guard = CallOrForm(Guard(wrapper, tools), guard_of(wrapper, wanted))
    step = play(guard, wrapper, '{"name": "now", "parameters": {}} and')[-1]
    assert step.event == "left", "it is no beginning of a sentence"


# -- guesses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("comma", "colon"), [(", ", ": "), (",", ":")])
def test_keys_are_guessed_in_the_style_of_the_text(comma, colon):
    """Guards: guesses that stop at white space, which a grammar leaves open."""
    wrapper = tokenizer(merged=[])
    guard = guard_of(wrapper, FORMS["object"])
    play(guard, wrapper, f'{{"name"{colon}"A"')
    assert wrapper.decode(guard.forced(encode(wrapper, ","))) == f'{comma[1:]}"age"{colon}'
    assert guard.filter(encode(wrapper, f'{comma}"age"')) == len(f'{comma}"age"')


def test_guesses_go_back_with_the_text():
    """Guards: guesses of a text that is gone, and guesses after a text of no style."""
    wrapper = tokenizer(merged=[])
    guard = guard_of(wrapper, FORMS["object"])
    play(guard, wrapper, '{"name": "A"')
    comma = encode(wrapper, ",")
    before = guard.forced(comma)
    assert wrapper.decode(before) == ' "age": '
    guard.rewind(7)
    play(guard, wrapper, ' :"A"', 7)
    guard.forced(comma)
    guard.rewind(7)
    play(guard, wrapper, ': "A"', 7)
    assert guard.forced(comma) == before


# -- the commands ----------------------------------------------------------------------------------


def test_a_batch_answers_in_the_forms_that_its_lines_ask_for(model_folder, tmp_path):
    """Guards: a format that is parsed and then not obeyed; a table of texts that do not parse."""
    choice = {"enum": ["yes", "no"]}
    formats = [
        {"type": "json_schema", "json_schema": {"name": "c", "schema": choice}},
        {"type": "text"},
        None,
        {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "nope"}}},
    ]
    lines = [json.dumps({"prompt": "Is it?", "response_format": form}) for form in formats]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    args = ["--batch", str(source), "-o", str(output), "-m", str(model_folder), "-n", "12"]
    done = CliRunner().invoke(app, ["generate", *args, "--regex", "[ab]{2}c"])
    assert done.exit_code == 1, done.stderr
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    first, text, default = (a["response"]["body"]["choices"][0] for a in answers[:3])
    assert first["message"]["parsed"] in choice["enum"]
    assert json.loads(first["message"]["content"]) == first["message"]["parsed"]
    assert "parsed" not in text["message"] and "parsed" not in default["message"]
    assert re.fullmatch("[ab]{2}c", default["message"]["content"])
    assert "nope" in answers[3]["error"]["message"]


def test_a_chat_may_change_the_form(model_folder):
    """Guards: `/set regex` without effect, and without a way back."""
    lines = "/set regex x{3}\nhello\n/set regex default\n/set regex\n/set grammar no/file\n"
    args = ["chat", "-m", str(model_folder), "--no-save", "-n", "8"]
    done = CliRunner().invoke(app, args, input=lines)
    assert done.stdout == "xxx\n"
    assert "regex = None" in done.stderr and "no/file" in done.stderr


def test_one_form_at_a_time_and_before_the_model(tmp_path):
    """Guards: minutes of loading before a wrong schema is told."""
    args = ["generate", "-m", str(tmp_path / "nowhere"), "x", "--json-object", "--regex", "a"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 and "exclude each other" in done.stderr
