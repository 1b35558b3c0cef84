"""Dialogues with tools: one call, several, a chain, none that fits, and answers from results."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

from .catalogue import CATALOGUE, Tool
from .sample import Message, Sample, assistant, casual, polite, tool_result, user
from .values import Value, draw, say
from .words import Pool

SYNONYMS = {
    "city": "location place town city_name where",
    "text": "content message body value",
    "path": "file filename file_path target",
    "query": "q search term keywords",
    "date": "day when on_date event_date",
    "time": "at clock start_time hour",
    "name": "full_name label title username",
    "amount": "value sum total quantity",
    "recipient": "to receiver target contact",
    "to": "recipient address email receiver",
    "title": "name subject headline summary",
    "order_id": "id order orderNumber order_number",
    "task_id": "id task task_number",
    "minutes": "duration length mins duration_minutes",
    "number": "id value num count",
    "days": "num_days count range day_count",
    "limit": "max_results count top_k n",
    "unit": "units scale unit_system format",
    "origin": "from_city start departure source",
    "destination": "to_city end arrival target",
    "subject": "title topic heading",
    "room": "location area zone where",
    "symbol": "ticker stock code",
    "level": "percent value volume amount",
    "quantity": "count amount number qty",
    "product": "item article sku product_name",
    "people": "persons guests attendees names",
    "command": "cmd shell line script",
    "pattern": "query regex term needle",
    "message": "text msg comment content",
}
_SYNONYMS = {key: words.split() for key, words in SYNONYMS.items()}
_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")

# Parameters of tools that no catalogue lists: a name's last part says which kind it holds.
GENERIC_PARAMS = [
    *(
        (name, kind)
        for kind, names in {
            "word": "name label tag color title category topic key mode owner brand material style group",
            "invented": "codename alias region zone channel server project",
            "code": "id code reference serial token ticket_id account_id batch",
            "integer": "count size width height limit offset port level amount priority age year total",
            "number": "price weight ratio threshold rate score distance temperature budget",
            "bool": "urgent public recursive verbose active notify force encrypted visible",
            "city": "city destination location branch_city",
            "person": "customer author manager assignee contact_person guest",
            "email": "email reply_to address",
            "date": "date start_date due_date deadline",
            "time": "time start_time opening_time",
            "path": "path file output source_file",
            "url": "url link endpoint",
            "phrase": "note comment description reason subject",
            "enum(low,medium,high)": "severity importance quality",
            "enum(daily,weekly,monthly)": "interval frequency",
            "enum(json,csv,xml)": "format output_format",
            "enum(small,medium,large)": "package_size box_size",
            "enum(north,south,east,west)": "direction side",
            "list(word,1,4)": "tags items labels keywords",
            "list(invented,1,3)": "aliases members hosts",
            "list(int(1,99),1,4)": "numbers ids scores",
            "list(person,1,3)": "guests participants",
            "object(width:int(1,900),height:int(1,900))": "dimensions box",
            "object(name:person,email:email)": "owner_info recipient",
            "object(city:city,zip:zip)": "address place",
            "object(start:date,end:date)": "period range",
            "object(x:int(0,500),y:int(0,500))": "position point",
            "object(key:word,value:integer)": "option setting",
        }.items()
        for name in names.split()
    ),
]


THINK_RESULT = "The tool has answered. I put its result in words."


@dataclass
class Declared:
    """A tool as this dialogue declares it, and one drawn use of it."""

    name: str
    description: str
    values: dict[str, Value]
    optional: set[str]
    request: str
    answer: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    def schema(self, rng: random.Random) -> dict:
        properties = {}
        for key, value in self.values.items():
            described = rng.random() < 0.35
            properties[key] = (
                {**value.schema, "description": f"The {say(key)}."} if described else value.schema
            )
        required = [key for key in self.values if key not in self.optional]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def in_words(self) -> str:
        """The result as the assistant tells it."""
        if self.answer:
            return self.answer
        name = say(self.name.replace("-", " ").replace(".", " "))
        return (
            f"The {name} result: "
            + ", ".join(f"{say(k)} {plain_json(v)}" for k, v in self.result.items())
            + "."
        )

    def call(self, used: set[str] | None = None) -> dict:
        keys = [k for k in self.values if k not in self.optional or (used is None or k in used)]
        return {"name": self.name, "arguments": {key: self.values[key].data for key in keys}}


def style_name(words: list[str], rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.6:
        return "_".join(words)
    if roll < 0.8:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    if roll < 0.9:
        return "-".join(words)
    return f"{words[-1]}.{'_'.join(words[:-1])}" if len(words) > 1 else words[0]


def rename_tool(name: str, pool: Pool) -> str:
    """The catalogue's name, or a spelling of it; always a held-out one for the evaluation."""
    rng = pool.rng
    if not pool.held_out and rng.random() < 0.45:
        return name

    def variant() -> str:
        words = name.split("_")
        if rng.random() < 0.4:
            words = [
                rng.choice(
                    (
                        "do",
                        "tool",
                        "my",
                        "api",
                        "fetch",
                        "service",
                        pool.word("verb"),
                        pool.invented(),
                    )
                ),
                *words,
            ]
        if rng.random() < 0.3:
            words = [*words, rng.choice(("v2", "now", "tool", "by", "info", pool.word("noun")))]
        return style_name(words, rng)

    return pool._fresh(variant)


def rename_params(tool: Tool, rng: random.Random) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, _, _ in tool.params:
        options = [w for w in _SYNONYMS.get(name, ()) if w not in names.values()]
        names[name] = rng.choice(options) if options and rng.random() < 0.4 else name
    return names if len(set(names.values())) == len(names) else {n: n for n in names}


def fill(template: str, values: dict[str, Any]) -> str:
    return _SLOT.sub(lambda m: str(values[m[1]]), template)


def from_catalogue(tool: Tool, pool: Pool) -> tuple[Declared, set[str]]:
    """One use of a catalogue tool: its declaration and the optional parameters that are used."""
    rng = pool.rng
    template = rng.choice(tool.requests)
    template = _OPTIONAL.sub(lambda m: m[1] if rng.random() < 0.4 else "", template)
    names = rename_params(tool, rng)
    values = {name: draw(kind, pool) for name, kind, _ in tool.params}
    used = {names[slot] for slot in _SLOT.findall(template)}
    request = casual(fill(template, {k: v.text for k, v in values.items()}), rng)
    result = {name: draw(kind, pool).data for name, kind in tool.result}
    answer = fill(tool.answer, {**{k: plain(v.data) for k, v in values.items()}, **result})
    declared = Declared(
        rename_tool(tool.name, pool),
        tool.description,
        {names[k]: v for k, v in values.items()},
        {names[n] for n, _, required in tool.params if not required},
        request,
        answer,
        result,
    )
    return declared, used


def plain(data: Any) -> str:
    if isinstance(data, list):
        return ", ".join(map(str, data))
    return ", ".join(map(str, data.values())) if isinstance(data, dict) else str(data)


def invented_tool(pool: Pool) -> tuple[Declared, set[str]]:
    """A tool nobody has seen: random name, random parameters, a request that spells them out."""
    rng = pool.rng
    verb, noun = pool.word("verb"), pool.word("noun") if rng.random() < 0.6 else pool.invented()
    extra = (
        [rng.choice((pool.word("adjective"), pool.word("object")))] if rng.random() < 0.3 else []
    )
    name = pool._fresh(lambda: style_name([verb, *extra, noun], rng))
    chosen = dict(rng.sample(GENERIC_PARAMS, rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5))))
    values = {styled(key, name, rng): draw(kind, pool) for key, kind in chosen.items()}
    optional = {key for key in values if rng.random() < 0.25}
    used = {key for key in values if key not in optional or rng.random() < 0.5}
    thing = " ".join([*extra, noun])
    description = rng.choice(
        (
            f"{verb.capitalize()} a {thing}.",
            f"{verb.capitalize()}s the {thing}.",
            f"Use this to {verb} a {thing}.",
            f"{verb.capitalize()} {thing}",
        )
    )
    spoken = {key: values[key] for key in values if key in used}
    request = generic_request(name, verb, thing, spoken, rng)
    result = {
        key: draw(kind, pool).data for key, kind in rng.sample(RESULT_FIELDS, rng.randint(1, 4))
    }
    return Declared(name, description, values, optional, request, "", result), used


def styled(key: str, tool_name: str, rng: random.Random) -> str:
    """Some interfaces write their parameters in camel case."""
    if "_" in key and rng.random() < 0.2:
        head, *tail = key.split("_")
        return head + "".join(part.capitalize() for part in tail)
    return key


RESULT_FIELDS = [
    ("status", "status"),
    ("id", "code"),
    ("count", "integer"),
    ("name", "word"),
    ("owner", "person"),
    ("city", "city"),
    ("price", "number"),
    ("date", "date"),
    ("email", "email"),
    ("path", "path"),
    ("title", "phrase"),
    ("version", "integer"),
    ("color", "word"),
    ("score", "number"),
    ("active", "bool"),
    ("size", "integer"),
    ("region", "invented"),
    ("created_at", "date"),
]


def clause(key: str, value: Value, rng: random.Random) -> str:
    quote = rng.choice(("'", '"')) if isinstance(value.data, str) and rng.random() < 0.2 else ""
    return f"{say(key)}{rng.choice((' ', ' ', ' ', ' = ', ': ', ' set to '))}{quote}{value.text}{quote}"


def generic_request(
    name: str, verb: str, thing: str, values: dict[str, Value], rng: random.Random
) -> str:
    parts = [clause(key, value, rng) for key, value in values.items()]
    if rng.random() < 0.3:
        rng.shuffle(parts)
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + "".join(parts[-1:])
    target = f"{rng.choice(('the', 'a', 'this', 'my'))} {thing}"
    if not parts:
        return polite(
            rng.choice(
                (
                    f"{verb.capitalize()} {target}.",
                    f"I want to {verb} {target}.",
                    f"Use {name}.",
                    f"{verb} {thing} now",
                )
            ),
            rng,
        )
    shapes = (
        f"{verb.capitalize()} {target} with {listed}.",
        f"{verb.capitalize()} {target}: {listed}",
        f"{verb} {thing}, {listed}",
        f"I need to {verb} {target}. Use {listed}.",
        f"I want you to {verb} {target}, {listed}.",
        f"Call {name} with {listed}.",
        f"Use the {name} tool: {listed}",
        f"With {listed}, {verb} {target}.",
        f"{verb.capitalize()} {target} that has {listed}.",
    )
    return polite(rng.choice(shapes), rng)


def draw_tool(pool: Pool) -> tuple[Declared, set[str]]:
    if pool.rng.random() < 0.5:
        return from_catalogue(pool.rng.choice(CATALOGUE), pool)
    return invented_tool(pool)


def with_distractors(wanted: list[Declared], pool: Pool, most: int = 4) -> list[dict]:
    """The declarations of `wanted` among others, in random order, names unique."""
    rng = pool.rng
    tools = list(wanted)
    texts = {tool.description for tool in tools}
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, most))):
        other, _ = draw_tool(pool)
        if other.name not in {tool.name for tool in tools} and other.description not in texts:
            tools.append(other)
            texts.add(other.description)
    rng.shuffle(tools)
    return [tool.schema(rng) for tool in tools]


def think_call(names: list[str]) -> str:
    if len(names) == 1:
        return f"The tool `{names[0]}` fits this request."
    return "I need these calls: " + ", ".join(f"`{name}`" for name in names) + "."


def single_call(pool: Pool) -> Sample:
    tool, used = draw_tool(pool)
    reply = assistant(calls=[tool.call(used)], think=think_call([tool.name]))
    return Sample([user(tool.request), reply], "tool-single", with_distractors([tool], pool))


def several_calls(pool: Pool) -> Sample:
    """Two or three calls in one turn: different tools, or one tool for several values."""
    rng = pool.rng
    if rng.random() < 0.5:
        return same_tool_twice(pool)
    drawn = [draw_tool(pool) for _ in range(rng.choice((2, 2, 3)))]
    if len({tool.name for tool, _ in drawn}) < len(drawn) or len(
        {t.description for t, _ in drawn}
    ) < len(drawn):
        return single_call(pool)
    link = rng.choice((" Then: ", " And also: ", " Also, ", "\n", " After that: "))
    request = link.join(tool.request for tool, _ in drawn)
    calls = [tool.call(used) for tool, used in drawn]
    reply = assistant(calls=calls, think=think_call([call["name"] for call in calls]))
    tools = with_distractors([tool for tool, _ in drawn], pool, 2)
    return Sample([user(request), reply], "tool-several", tools)


def tool_session(pool: Pool) -> Sample:
    """Several requests one after the other, each for another of the declared tools."""
    rng = pool.rng
    drawn = {
        tool.name: (tool, used)
        for tool, used in (draw_tool(pool) for _ in range(rng.choice((2, 3, 3, 4, 5))))
    }
    if len({tool.description for tool, _ in drawn.values()}) < len(drawn):
        return single_call(pool)
    turns = list(drawn.values())
    declared = [tool for tool, _ in turns]
    messages: list[Message] = []
    for tool, used in turns:
        messages += [
            user(tool.request),
            assistant(calls=[tool.call(used)], think=think_call([tool.name])),
        ]
        messages += [
            tool_result(result_text(tool.result, rng)),
            assistant(tool.in_words(), THINK_RESULT),
        ]
    if rng.random() < 0.6:
        messages = messages[:-2]
    rng.shuffle(declared)
    return Sample(messages, "tool-session", [tool.schema(rng) for tool in declared])


REPEATABLE = [
    t
    for t in CATALOGUE
    if len([p for p in t.params if p[2]]) == 1
    and t.params[0][1] in ("city", "code", "path", "symbol", "person", "word", "phone")
]


def same_tool_twice(pool: Pool) -> Sample:
    rng = pool.rng
    tool = rng.choice(REPEATABLE)
    declared, _ = from_catalogue(tool, pool)
    key = next(iter(declared.values))
    kind = tool.params[0][1]
    values = [draw(kind, pool) for _ in range(rng.choice((2, 2, 3)))]
    template = _OPTIONAL.sub(
        "", rng.choice([r for r in tool.requests if len(_SLOT.findall(_OPTIONAL.sub("", r))) == 1])
    )
    spoken = ", ".join(v.text for v in values[:-1]) + " and " + values[-1].text
    request = casual(fill(template, {tool.params[0][0]: spoken}), rng)
    calls = [{"name": declared.name, "arguments": {key: value.data}} for value in values]
    reply = assistant(calls=calls, think=think_call([declared.name] * len(calls)))
    return Sample([user(request), reply], "tool-several", with_distractors([declared], pool, 3))


def no_fitting_tool(pool: Pool) -> Sample:
    """The request needs a tool that is not declared: say so and name what is there."""
    rng = pool.rng
    wanted, _ = draw_tool(pool)
    others = [
        tool
        for tool in (draw_tool(pool)[0] for _ in range(rng.randint(1, 4)))
        if tool.description != wanted.description and tool.name != wanted.name
    ]
    arithmetic = wanted.description.startswith("Evaluate")  # the model can do that itself
    if not others or arithmetic or wanted.name in wanted.request:
        return single_call(pool)
    tools = [tool.schema(rng) for tool in {tool.name: tool for tool in others}.values()]
    names = [tool["function"]["name"] for tool in tools]
    have = ", ".join(f"`{name}`" for name in names)
    reply = f"I have no tool for that. I can only use {have}."
    message = assistant(reply, think="No declared tool fits this request.")
    return Sample([user(wanted.request), message], "tool-none", tools)


def missing_parameter(pool: Pool) -> Sample:
    """Required values are absent: ask for them instead of inventing them."""
    rng = pool.rng
    tool, _ = invented_tool(pool)
    required = [key for key in tool.values if key not in tool.optional]
    if not required:
        return single_call(pool)
    bare = tool.description.rstrip(".")
    verb = tool.description.split()[0].lower()
    if bare.startswith("Use this to "):
        bare, verb = bare[12:], ""
    elif verb.endswith("s") and " the " in bare:
        bare = verb[:-1] + bare[len(verb) :]
    request = polite(
        rng.choice((bare[0].upper() + bare[1:] + ".", f"I want to {bare[0].lower()}{bare[1:]}.")),
        rng,
    )
    wanted = ", ".join(f"`{key}`" for key in required)
    reply = f"To use `{tool.name}` I need {wanted}. Please tell me."
    message = assistant(
        reply, think=f"The tool `{tool.name}` fits, but values are missing: {wanted}."
    )
    return Sample([user(request), message], "tool-missing", with_distractors([tool], pool, 2))


def result_text(result: dict, rng: random.Random) -> str:
    return json.dumps(result, ensure_ascii=False, indent=2 if rng.random() < 0.15 else None)


def call_and_result(tool: Declared, used: set[str], pool: Pool, result: dict) -> list[Message]:
    first = assistant(calls=[tool.call(used)], think=think_call([tool.name]))
    return [user(tool.request), first, tool_result(result_text(result, pool.rng))]


def answer_from_result(pool: Pool) -> Sample:
    """A tool has answered: put its result in words, copying the values."""
    rng = pool.rng
    tool, used = draw_tool(pool)
    if rng.random() < 0.12:
        return failed_tool(tool, used, pool)
    messages = call_and_result(tool, used, pool, tool.result)
    return Sample(
        [*messages, assistant(tool.in_words(), THINK_RESULT)],
        "tool-result",
        with_distractors([tool], pool, 2),
    )


def plain_json(data: Any) -> str:
    return data if isinstance(data, str) else json.dumps(data)


ERRORS = (
    "not found",
    "permission denied",
    "timeout",
    "invalid argument",
    "service unavailable",
    "rate limit exceeded",
    "no such file",
    "connection refused",
    "unknown id",
    "out of stock",
)


def failed_tool(tool: Declared, used: set[str], pool: Pool) -> Sample:
    error = pool.rng.choice(ERRORS)
    if pool.rng.random() < 0.4:
        error = f"{error}: {pool.any_word()}"
    messages = call_and_result(tool, used, pool, {"error": error})
    reply = assistant(f"The tool `{tool.name}` reported an error: {error}.", "The tool has failed.")
    return Sample([*messages, reply], "tool-result", with_distractors([tool], pool, 2))


def question_about_result(pool: Pool) -> Sample:
    """Pick one field out of a result that holds several."""
    rng = pool.rng
    noun, code = pool.word("noun"), pool.code()
    fields = dict(rng.sample([f for f in RESULT_FIELDS if f[0] != "id"], rng.randint(3, 6)))
    result = {"id": code, **{key: draw(kind, pool).data for key, kind in fields.items()}}
    wanted = rng.choice(list(fields))
    name = pool._fresh(
        lambda: style_name(
            [rng.choice(("get", "find", "lookup", "fetch", "show", "read")), noun], rng
        )
    )
    key = rng.choice(("id", f"{noun}_id", "code", "reference"))
    request = rng.choice(
        (
            f"What is the {say(wanted)} of {noun} {code}?",
            f"Tell me the {say(wanted)} of the {noun} {code}.",
            f"{noun} {code}: what is its {say(wanted)}?",
            f"I need the {say(wanted)} for {noun} {code}.",
        )
    )
    value = Value(code, code, {"type": "string"})
    tool = Declared(name, f"Get one {noun}.", {key: value}, set(), request)
    answer = f"The {say(wanted)} of {noun} {code} is {plain_json(result[wanted])}."
    messages = call_and_result(tool, {key}, pool, result)
    think = f"The result has the field `{wanted}`."
    return Sample(
        [*messages, assistant(answer, think)], "tool-result", with_distractors([tool], pool, 2)
    )


def chained_calls(pool: Pool) -> Sample:
    """The second call needs a value from the first one's result."""
    rng = pool.rng
    noun, verb, who, code = pool.word("noun"), pool.word("verb"), pool.person(), pool.code()
    finder = pool._fresh(
        lambda: style_name([rng.choice(("find", "lookup", "search", "get")), noun], rng)
    )
    actor = pool._fresh(lambda: style_name([verb, noun], rng))
    id_key, name_key = (
        rng.choice(("id", f"{noun}_id", "code")),
        rng.choice(("name", "owner", "customer", "query")),
    )
    kind = rng.choice(
        [None, ("note", "phrase"), ("amount", "integer"), ("date", "date"), ("urgent", "bool")]
    )
    extra = {kind[0]: draw(kind[1], pool)} if kind else {}
    tail = "".join(f" with {say(k)} {v.text}" for k, v in extra.items())
    request = rng.choice(
        (
            f"Find the {noun} of {who} and {verb} it{tail}.",
            f"{verb.capitalize()} the {noun} of {who}{tail}.",
            f"Look up {who}'s {noun}, then {verb} it{tail}.",
        )
    )
    string = {"type": "string"}
    find = Declared(
        finder, f"Find the {noun} of a person.", {name_key: Value(who, who, string)}, set(), request
    )
    act = Declared(
        actor,
        f"{verb.capitalize()} a {noun} by its id.",
        {id_key: Value(code, code, string), **extra},
        set(),
        request,
    )
    result = {
        id_key: code,
        **{
            k: draw(v, pool).data
            for k, v in rng.sample(RESULT_FIELDS[4:], rng.randint(0, 2))
            if k != id_key
        },
    }
    tools = with_distractors([find, act], pool, 2)
    if finder == actor:
        return single_call(pool)
    start = [
        user(request),
        assistant(calls=[find.call()], think=f"First I need the {noun}: `{finder}`."),
    ]
    if rng.random() < 0.4:
        return Sample(start, "tool-chain", tools)
    second = assistant(calls=[act.call()], think=f"Now I have the id. Next: `{actor}`.")
    return Sample([*start, tool_result(result_text(result, rng)), second], "tool-chain", tools)
