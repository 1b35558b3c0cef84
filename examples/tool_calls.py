"""How a model calls tools with and without the guard, and what a repair costs.

python examples/tool_calls.py MODEL [PROMPTS]

Every prompt declares 3 to 8 random tools and asks for one of them. At temperature 1 it is answered
without the guard, with it, and with it and drafts; at temperature 0 with and without the guard in
turns, for what the guard costs when nothing is wrong.
"""

import json
import random
import sys
import time
from dataclasses import replace
from statistics import median

from ds4cli import Engine
from ds4cli.drafters import Drafter
from ds4cli.tools import Guard, tools_of

VERBS = [
    "get",
    "set",
    "find",
    "send",
    "book",
    "open",
    "close",
    "count",
    "list",
    "move",
    "play",
    "read",
    "rate",
    "sort",
    "stop",
]
NOUNS = [
    "weather",
    "alarm",
    "mail",
    "ticket",
    "door",
    "song",
    "note",
    "file",
    "price",
    "order",
    "route",
    "light",
    "photo",
    "task",
]
KEYS = ["city", "name", "date", "amount", "color", "place", "title", "level", "query", "target"]
VALUES = [
    "Paris",
    "Anna",
    "Monday",
    "blue",
    "kitchen",
    "Oslo",
    "garden",
    "report",
    "Lima",
    "train",
    "lamp",
    "river",
]
MAX_TOKENS = 200


def random_property(rng):
    """A schema and a value for it."""
    kind = rng.choice(["string", "string", "integer", "number", "boolean", "enum", "array"])
    if kind == "enum":
        values = rng.sample(VALUES, 3)
        return {"type": "string", "enum": values}, rng.choice(values)
    if kind == "array":
        items = {"type": "array", "items": {"type": "string"}}
        return items, rng.sample(VALUES, 2)
    value = {
        "string": rng.choice(VALUES),
        "integer": rng.randint(0, 999),
        "number": rng.randint(0, 999) / 4,
        "boolean": rng.random() < 0.5,
    }[kind]
    return {"type": kind}, value


def random_case(rng):
    """Declared tools, and a prompt that asks for one of them."""
    names = rng.sample([f"{verb}_{noun}" for verb in VERBS for noun in NOUNS], rng.randint(3, 8))
    declared, asked = [], {}
    for name in names:
        keys = rng.sample(KEYS, rng.randint(1, 4))
        parts = {key: random_property(rng) for key in keys}
        properties = {key: schema for key, (schema, _) in parts.items()}
        parameters = {"type": "object", "properties": properties, "required": keys}
        asked[name] = ", ".join(f"{key} {json.dumps(value)}" for key, (_, value) in parts.items())
        declared.append({"name": name, "description": name, "parameters": parameters})
    name = rng.choice(names)
    words = name.replace("_", " the ")
    return tools_of(declared, "here"), f"Please {words} with {asked[name]}."


class Lab:
    """One engine and one session; every reply begins right behind its prompt."""

    def __init__(self, model):
        self.engine = Engine.load(model, dtype="float32")
        self.session = self.engine.session()
        self.drafter = self.session.drafter
        self.plain = Drafter()

    def ask(self, case, temp, guarded, drafts=False, max_tokens=MAX_TOKENS):
        """(reply's tokens, calls, its stats, seconds, position of the first token)."""
        tools, prompt = case
        session, engine = self.session, self.engine
        session.drafter = self.drafter if drafts else self.plain
        session.use(replace(engine.settings, temp=temp))
        messages = [{"role": "user", "content": prompt}]
        session.sync(engine.render(messages, tools=[tool.spec for tool in tools]))
        session.stats = type(session.stats)(drafter=session.drafter.name)
        start, calls = session.pos, ()
        guard = Guard(engine.tokenizer, tools) if guarded else None
        begin = time.perf_counter()
        for event in session.stream(max_tokens=max_tokens, guard=guard):
            calls = event.calls
        took = time.perf_counter() - begin
        return session.tokens[start:], calls, session.stats, took, start

    def judge(self, case, tokens):
        """(calls begun, calls that parse and satisfy their schema as they are) in a raw reply."""
        guard = Guard(self.engine.tokenizer, case[0], max_repairs=0, use_grammar=False)
        begun = good = 0
        detokenizer = self.engine.tokenizer.detokenizer
        for pos, token in enumerate(tokens):
            detokenizer.add_token(token)
            step = guard.feed(pos, token, detokenizer.last_segment)
            begun += step.event == "open"
            good += sum(call.outcome == "valid" for call in step.calls)
        end = guard.finish("stop")
        return begun, good + sum(call.outcome == "valid" for call in end.calls)

    def regenerate(self, start, calls, repair):
        """Seconds to write a repaired call again, from its opening to the repaired token."""
        opened = max((int(call.id.split("_")[1]) for call in calls), default=start)
        if opened >= repair.pos:
            return None  # it was another call
        begin = time.perf_counter()
        self.session.rewind(opened)
        for _ in range(opened, repair.pos + 1):
            self.session.step(drafts=())
        return time.perf_counter() - begin


def hot(lab, cases):
    """Temperature 1: what the guard changes, and what repairs cost."""
    raw_begun = raw_good = made = cut = good = differing = 0
    repairs, regenerated, steps = [], [], []
    for case in cases:
        begun, valid = lab.judge(case, lab.ask(case, 1.0, guarded=False)[0])
        raw_begun, raw_good = raw_begun + begun, raw_good + valid
        drafted = lab.ask(case, 1.0, guarded=True, drafts=True)[0]
        tokens, calls, stats, _, start = lab.ask(case, 1.0, guarded=True)
        differing += tokens != drafted
        begun, valid = lab.judge(case, tokens)
        made, good, cut = made + len(calls), good + valid, cut + begun - len(calls)
        steps.append(stats.decode_s / max(1, stats.blocks))
        repairs += [repair.seconds for repair in stats.repairs]
        for repair in stats.repairs[-1:]:
            regenerated.append(lab.regenerate(start, calls, repair))
    regenerated = [seconds for seconds in regenerated if seconds]
    step = median(steps)
    print(f"without the guard: {raw_good} of {raw_begun} calls are valid")
    print(f"with the guard:    {good} of {made} calls are valid; {cut} cut at {MAX_TOKENS} tokens")
    print(f"replies that differ with drafts: {differing} of {len(cases)}")
    print(f"a decode step: {1e3 * step:.2f} ms")
    if repairs:
        took = median(repairs)
        print(f"{len(repairs)} repairs, median {1e3 * took:.3f} ms: {took / step:.3f} decode steps")
    if regenerated:
        took = median(regenerated)
        print(f"the call written again: {1e3 * took:.2f} ms, {took / step:.1f} decode steps")


def cold(lab, cases):
    """Temperature 0, where nothing is repaired: the guard's share of decoding."""
    ratios = []
    for i, case in enumerate(cases):
        lab.ask(case, 0.0, guarded=True, max_tokens=1)  # builds the grammar, reads the prompt
        _, _, stats, _, _ = lab.ask(case, 0.0, guarded=True)
        if stats.repairs or stats.blocks < 16:
            continue
        pace = {}
        for guarded in (True, False) if i % 2 else (False, True):
            limit = MAX_TOKENS if guarded else stats.blocks
            _, _, done, took, _ = lab.ask(case, 0.0, guarded, max_tokens=limit)
            pace[guarded] = took / max(1, done.blocks)
        ratios.append(pace[True] / pace[False])
    if ratios:
        cost = 100 * (median(ratios) - 1)
        print(f"the guard costs {cost:+.1f} % of a decode step (median of {len(ratios)} pairs)")


def main(model="builtin", prompts="200"):
    lab, rng = Lab(model), random.Random(1)
    cases = [random_case(rng) for _ in range(int(prompts))]
    hot(lab, cases)
    cold(lab, cases)


if __name__ == "__main__":
    main(*sys.argv[1:])
