"""What each drafter gains on a model, by kind of text, against plain decoding in the same run.

python examples/drafting.py [MODEL] [DRAFTER[:MODE] ...]

Each prompt is answered by one session per drafter, in turns with a session that drafts nothing; the
text must be the same. Shown: tokens per model call and the median of the pairs' ratios of speed.
The first answers warm up and are not counted. MODE is a value of `--speculate`, else auto.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

from ds4cli import Engine
from ds4cli.tools import Guard, detect_format, tools_of

PAIRS = 5
MAX_TOKENS = 160


def tool(name, description, required, **properties):
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("get_weather", "Weather of a city.", ["city"], city=TEXT, unit=TEXT),
    tool("send_message", "Send a message.", ["recipient", "text"], recipient=TEXT, text=TEXT),
    tool("create_event", "Add to the calendar.", ["title"], title=TEXT, date=TEXT, minutes=NUMBER),
]
CODE = """def add(prices):
    total = 0
    for price in prices:
        total += price
    return total
"""
RECORD = '{"name": "lamp", "color": "red", "price": 12, "rooms": ["kitchen", "garden"]}'
STORY = (
    "the small brown fox walks over the old bridge and looks at the green river near the village"
)
WORK = {
    "copy-edit": [
        f"Rename the variable `total` to `amount`:\n```python\n{CODE}```",
        f'Change the value of "color" to "blue" in this JSON: {RECORD}',
        f"Repeat this text: {STORY}",
    ],
    "tool calls": [
        "What is the weather in Paris?",
        "Send a message to Anna: the train to Lima leaves at three from platform nine",
        "Create an event called Dentist on 2025-03-14 for 45 minutes",
    ],
    "code": [
        "Write a Python function that reverses a string.",
        "Write a Python class for a stack.",
        "Write a function that counts the vowels in a text.",
    ],
    "chat": ["Hello, who are you?", "What can you do?", "Tell me a short story about a dog."],
}


class Way:
    """One drafter: its engine, its session of the moment, and what it did."""

    def __init__(self, base, name):
        self.name = name
        drafter, _, mode = name.partition(":")
        self.engine = base if drafter == "none" else load(base, drafter, mode or "auto")
        self.begin()

    def begin(self):
        """A new session: what it learnt about one kind of text is not used on another."""
        self.session = self.engine.session()
        self.tokens = self.calls = 0

    def answer(self, prompt, guard):
        """Seconds a token, and the text."""
        session = self.session
        self.engine.corpus.clear()  # an answer given before would be guessed whole
        session.sync(prompt)
        session.next_token()
        blocks, generated = session.stats.blocks, session.stats.generated_tokens
        begin = time.perf_counter()
        text = "".join(event.text for event in session.stream(MAX_TOKENS, guard=guard()))
        took = time.perf_counter() - begin
        generated = session.stats.generated_tokens - generated
        self.tokens += generated
        self.calls += session.stats.blocks - blocks
        return took / max(1, generated), text


def load(base, drafter, mode):
    """Another engine on the same weights, or with a head loaded, on weights of its own."""
    if drafter != "ngram":
        return Engine.load(base.settings.model, drafter=drafter, speculate=mode)
    settings = replace(base.settings, drafter=drafter, speculate=mode)
    context, fingerprint = base.context_tokens, base.fingerprint
    return Engine(
        base.model, base.tokenizer, settings, context_tokens=context, fingerprint=fingerprint
    )


def measure(way, plain, kind):
    """One line: this way against plain on a kind of work."""
    way.begin()
    ratios, same = [], True
    tools = tools_of(TOOLS, "TOOLS") if kind == "tool calls" else None
    for pair in range(-1, PAIRS):
        if pair == 0:
            way.tokens = way.calls = 0
        for question in WORK[kind]:
            message = [{"role": "user", "content": question}]
            prompt = way.engine.render(message, tools=TOOLS if tools else None)

            def guard():
                return Guard(way.engine.tokenizer, tools) if tools else None

            first, second = (way, plain) if pair % 2 else (plain, way)
            took = {one.name: one.answer(prompt, guard) for one in (first, second)}
            same = same and took[way.name][1] == took[plain.name][1]
            if pair >= 0:
                ratios.append(took[plain.name][0] / took[way.name][0])
    calls, speed = way.tokens / way.calls, median(ratios)
    print(f"{kind:11} {way.name:13} {calls:5.2f} tokens a call, {speed:5.2f} x plain, same={same}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin", help="folder, hub id or builtin")
    parser.add_argument("drafters", nargs="*", metavar="DRAFTER[:MODE]", help="default: auto ngram")
    given = parser.parse_args()
    base = Engine.load(given.model, drafter="none")
    plain = Way(base, "none")
    for drafter in given.drafters or ["auto", "ngram"]:
        way = Way(base, drafter)
        for kind in WORK:
            if kind == "tool calls" and detect_format(base.tokenizer) is None:
                print(f"{kind:11} {way.name:13} left out: this model has no tool-call format")
                continue
            plain.begin()
            measure(way, plain, kind)


if __name__ == "__main__":
    main()
