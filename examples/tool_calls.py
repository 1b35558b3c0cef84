"""How a model calls tools with and without the guard, and what a repair costs.

python examples/tool_calls.py MODEL [PROMPTS]

Every prompt declares 3 to 8 random tools and asks for one of them. At temperature 1 it is answered
without the guard, with it, and with it and drafts; at temperature 0 the same tokens are written
with and without the guard in turns, for what the guard costs when nothing is wrong. Wall time is
what counts, but on a shared machine the CPU time of the thread that decodes says more.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ds4cli import Engine
from ds4cli.drafters.drafter import Drafter
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
PAIRS = 3  # of replies with and without the guard, for each prompt


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


@dataclass(frozen=True)
class Reply:
    """tokens: from position `start` on. cpu_s: of the thread that decodes."""

    tokens: list
    calls: tuple
    stats: Any
    start: int
    seconds: float
    cpu_s: float


class Lab:
    """One engine and one session; every reply begins right behind its prompt."""

    def __init__(self, model):
        self.engine = Engine.load(model, dtype="float32")
        self.session = self.engine.session()
        self.drafter = self.session.drafter
        self.plain = Drafter()

    def ask(self, case, temp, guarded, drafts=False, max_tokens=MAX_TOKENS):
        """Let the model answer."""
        tools, prompt = case
        session, engine = self.session, self.engine
        session.drafter = self.drafter if drafts else self.plain
        session.use(replace(engine.settings, temp=temp))
        messages = [{"role": "user", "content": prompt}]
        session.sync(engine.render(messages, tools=[tool.spec for tool in tools]))
        session.stats = type(session.stats)(drafter=session.drafter.name)
        start, calls = session.pos, ()
        begin, cpu = time.perf_counter(), time.thread_time()
        guard = Guard(engine.tokenizer, tools) if guarded else None
        for event in session.stream(max_tokens=max_tokens, guard=guard):
            calls = event.calls
        took, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        return Reply(session.tokens[start:], calls, session.stats, start, took, cpu)

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


def build(lab, cases):
    """What a grammar costs, once for each set of tools."""
    took = []
    for tools, _ in cases:
        begin = time.perf_counter()
        Guard(lab.engine.tokenizer, tools)
        took.append(time.perf_counter() - begin)
    print(f"a grammar is built in {1e3 * took[0]:.0f} ms, one of other tools", end=" ")
    print(f"for the same model in {1e3 * median(took[1:] or took):.1f} ms")


def hot(lab, cases):
    """Temperature 1: what the guard changes, and what repairs cost."""
    raw_begun = raw_good = made = cut = good = differing = 0
    repairs, regenerated, steps = [], [], []
    for case in cases:
        begun, valid = lab.judge(case, lab.ask(case, 1.0, guarded=False).tokens)
        raw_begun, raw_good = raw_begun + begun, raw_good + valid
        drafted = lab.ask(case, 1.0, guarded=True, drafts=True)
        reply = lab.ask(case, 1.0, guarded=True)
        differing += reply.tokens != drafted.tokens
        begun, valid = lab.judge(case, reply.tokens)
        made, good = made + len(reply.calls), good + valid
        cut += begun - len(reply.calls)
        steps.append(reply.stats.decode_s / max(1, reply.stats.blocks))
        repairs += [repair.seconds for repair in reply.stats.repairs]
        for repair in reply.stats.repairs[-1:]:
            regenerated.append(lab.regenerate(reply.start, reply.calls, repair))
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
    wall, cpu, steps, replies = [], [], [], 0
    for case in cases:
        reply = lab.ask(case, 0.0, guarded=True)
        if reply.stats.repairs or not reply.calls:
            continue
        replies += 1
        for i in range(PAIRS):
            with_it, without = pair(lab, case, len(reply.tokens), first=i % 2 == 0)
            n = len(without.tokens)
            steps.append(without.seconds / n)
            wall.append(with_it.seconds / without.seconds - 1)
            cpu.append((with_it.cpu_s - without.cpu_s) / n)
    if replies:
        share = median(cpu) / median(steps)
        print(f"{replies} replies that needed no repair, {PAIRS} pairs each, medians:")
        print(f"a token without the guard takes {1e3 * median(steps):.2f} ms; the guard adds")
        print(f"{1e3 * median(cpu):.3f} ms of CPU time, {100 * share:.1f} % of that;", end=" ")
        print(f"wall time differs by {100 * median(wall):+.1f} %")


def pair(lab, case, n, first):
    """The same `n` tokens with the guard and without it."""
    replies = {}
    for guarded in (first, not first):
        replies[guarded] = lab.ask(case, 0.0, guarded, max_tokens=MAX_TOKENS if guarded else n)
    assert replies[True].tokens == replies[False].tokens
    return replies[True], replies[False]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin", help="folder, hub id or builtin")
    parser.add_argument("prompts", nargs="?", type=int, default=100)
    given = parser.parse_args()
    lab, rng = Lab(given.model), random.Random(1)
    cases = [random_case(rng) for _ in range(given.prompts)]
    build(lab, cases)
    hot(lab, cases)
    cold(lab, cases)


if __name__ == "__main__":
    main()
