"""What drafters gain on a model, by kind of text, with and without what other conversations said.

python examples/drafting.py [MODEL] [DRAFTER[+corpus] ...] [--counted] [--rounds N] [--tokens N]

Each conversation is held by a session per drafter, in turns with one that drafts nothing, and the
text must be the same. With `+corpus` the answers to the earlier conversations of a kind may be
copied from; without it only the conversation's own text. Printed, for each kind of text: tokens a
call where every guess is fed, up to 8 a call, which no clock decides, and the speed in times plain
decoding with `--speculate auto`: the median of the rounds, after one that is not counted.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

from ds4cli import Engine
from ds4cli.tools import Guard, detect_format, tools_of

GUESSES = 8  # a call, where tokens a call are counted


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
RUN = "Traceback: NameError: name `totl` is not defined, in `add`"
# A conversation is what its user says, turn by turn, with the answers that stand between.
WORK = {
    "copy-edit": [
        [f"Rename the variable `total` to `amount`:\n```python\n{CODE}```"],
        [f'Change the value of "color" to "blue" in this JSON: {RECORD}'],
        [f"Repeat this text: {STORY}"],
    ],
    "tool calls": [
        ["What is the weather in Paris?"],
        ["Send a message to Anna: the train to Lima leaves at three from platform nine"],
        ["What is the weather in Oslo?"],
        ["Send a message to Ben: the train to Rome leaves at five from platform two"],
        ["What is the weather in Cairo?"],
        ["Send a message to Eva: the train to Oslo leaves at six from platform four"],
    ],
    "code": [
        ["Write a Python function that reverses a string."],
        ["Write a Python function that reverses a list."],
        ["Write a function that counts the vowels in a text."],
    ],
    "chat": [["Hello, who are you?"], ["What can you do?"], ["Tell me a short story about a dog."]],
    "agent": [
        [
            f"Result of `cat shop.py`:\n```python\n{CODE}```\nRename `total` to `sum`.",
            f"```python\n{CODE.replace('total', 'sum')}```",
            f"Result of `pytest`: {RUN}\nRepeat the error.",
        ],
        [
            f'Result of `cat lamp.json`: {RECORD}\nChange the value of "price" to 14.',
            RECORD.replace("12", "14"),
            'Change the value of "color" to "green" as well.',
        ],
    ],
}


class Way:
    """One drafter, with or without a corpus: an engine that counts, one that is timed, and what
    they did on one kind of work."""

    def __init__(self, base, name, *, is_timed):
        self.name = name
        drafter, _, corpus = name.partition("+")
        self._has_corpus = corpus == "corpus"
        counting = {"speculate": "always", "num_draft_tokens": GUESSES}
        self.counting = load(base, drafter, **counting)
        self.timed = load(base, drafter) if is_timed else None
        if self.timed is not None:
            measure_prices(self.timed)

    def begin(self):
        """A round: what earlier rounds said is not there to be copied from."""
        for engine in filter(None, (self.counting, self.timed)):
            engine.corpus.clear()

    def answer(self, engine, talk, most):
        """Seconds, tokens, calls and the texts of a conversation's answers."""
        if not self._has_corpus:
            engine.corpus.clear()
        return answer(engine, talk, most)


def load(base, drafter, **chosen):
    """Another engine on the same weights, or with a head loaded, on weights of its own."""
    if drafter not in ("ngram", "none"):
        return Engine.load(base.settings.model, drafter=drafter, **chosen)
    settings = replace(base.settings, drafter=drafter, **chosen)
    context, fingerprint = base.context_tokens, base.fingerprint
    return Engine(
        base.model, base.tokenizer, settings, context_tokens=context, fingerprint=fingerprint
    )


def measure_prices(engine):
    """What calls cost, now: a list that was kept may have been measured on a busy machine."""
    session = engine.session()
    session.sync(engine.render([{"role": "user", "content": STORY}]))
    engine.prices.measure(engine.scratch_timeline(), session.sampler, session.tokens)


def answer(engine, talk, most):
    """Seconds, tokens, calls and the texts of the answers to one conversation."""
    kind, turns = talk
    tools = tools_of(TOOLS, "TOOLS") if kind == "tool calls" else None
    session, seconds, texts = engine.session(), 0.0, []
    for last in range(0, len(turns), 2):
        roles = ("user", "assistant") * len(turns)
        said = [{"role": r, "content": t} for r, t in zip(roles, turns[: last + 1], strict=False)]
        session.sync(engine.render(said, tools=TOOLS if tools else None))
        session.next_token()
        guard = Guard(engine.tokenizer, tools) if tools else None
        begin = time.perf_counter()
        texts.append("".join(event.text for event in session.stream(most, guard=guard)))
        seconds += time.perf_counter() - begin
    return seconds, session.stats.generated_tokens, session.stats.blocks, texts


def count(ways, base, kind, most):
    """Tokens a call of each way, and whether every text was that of plain decoding."""
    talks = [(kind, turns) for turns in WORK[kind]]
    texts = [answer(base, talk, most)[3] for talk in talks]
    found = {}
    for way in ways:
        way.begin()
        done = [way.answer(way.counting, talk, most) for talk in talks]
        if [texts for *_, texts in done] != texts:
            print(f"{way.name} on {kind}: another text than that of plain decoding")
        tokens, calls = (sum(one[i] for one in done) for i in (1, 2))
        found[way.name] = tokens / calls
    return found


def clock(ways, base, kind, most, rounds):
    """Times plain of each way: the median over rounds, in which all take turns at each talk."""
    ratios = {way.name: [] for way in ways}
    for number in range(-1, rounds):
        seconds = dict.fromkeys(["plain", *ratios], 0.0)
        for way in ways:
            way.begin()
        for turns in WORK[kind]:
            seconds["plain"] += answer(base, (kind, turns), most)[0]
            for way in ways if number % 2 else reversed(ways):
                seconds[way.name] += way.answer(way.timed, (kind, turns), most)[0]
        if number >= 0:
            for name, found in ratios.items():
                found.append(seconds["plain"] / seconds[name])
    return {name: median(found) for name, found in ratios.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin", help="folder, hub id or builtin")
    parser.add_argument("drafters", nargs="*", default=["auto", "auto+corpus"], metavar="DRAFTER")
    parser.add_argument("--counted", action="store_true", help="tokens a call only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="at most, an answer")
    given = parser.parse_args()
    base = Engine.load(given.model, drafter="none")
    ways = [Way(base, name, is_timed=not given.counted) for name in given.drafters]
    kinds = [k for k in WORK if k != "tool calls" or detect_format(base.tokenizer) is not None]
    if len(kinds) < len(WORK):
        print("tool calls are left out: this model has no tool-call format\n")
    print("| | " + " | ".join(kinds) + " |\n|---|" + "--:|" * len(kinds))
    rows = {f"`{way.name}`, {of}": [] for of in ("tokens a call", "times plain") for way in ways}
    for kind in kinds:
        for name, calls in count(ways, base, kind, given.tokens).items():
            rows[f"`{name}`, tokens a call"].append(f"{calls:.2f}")
        if not given.counted:
            for name, speed in clock(ways, base, kind, given.tokens, given.rounds).items():
                rows[f"`{name}`, times plain"].append(f"{speed:.2f}")
    for name, cells in rows.items():
        if cells:
            print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
