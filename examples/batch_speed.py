"""Tokens a second of several texts written at a time, beside mlx_lm's own batches.

python examples/batch_speed.py MODEL [--lanes N ...] [--prompt TOKENS] [--shared TOKENS]
python examples/batch_speed.py MODEL --shared 600 --prompt 40 --tokens 32 --lanes 8
python examples/batch_speed.py MODEL --drafts [--copy] [--drafter NAME] [--lanes N ...]

Each row is so many prompts of unlike lengths, read and answered to their end, by sessions that are
stepped together and by `mlx_lm.batch_generate` on the same weights, in turns in one process. With
`--drafts` it is sessions with guesses and the same without, on four lines a lane with answers of
unlike lengths: whenever one ends the next takes its place, and only the writing is timed. With
`--copy` these lines are to be copied, half of them with an edit. No turn guesses from what another
one wrote. The last two columns count the texts that are what each of the two says to that prompt
alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

from ds4cli import Engine

# ruff: noqa: I001  (the package chooses a BLAS before mlx is imported)
import mlx.core as mx
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step

from ds4cli.bench.corpus import Corpus
from ds4cli.bench.reference import stock
from ds4cli.drafters.drafter import Drafter
from ds4cli.engine.group import Group
from ds4cli.engine.session import Session
from ds4cli.rewind.timeline import Limits
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tokens import common_prefix

Texts = list[list[int]]
STORY = (
    "the small brown fox walks over the old bridge and looks at the green river near the village "
    "while two white boats carry bread and apples to the market behind the tall grey tower"
)

RECORD: dict[str, list] = {
    "name": ["lamp", "chair", "table", "window"],
    "color": ["red", "blue", "green", "white"],
    "price": [12, 35, 60, 84],
    "rooms": [["kitchen", "garden"], ["garden", "bridge", "tower"], ["market", "kitchen", "river"]],
    "size": [3, 18, 27, 41],
    "city": ["Oslo", "Lima", "Rome", "Paris"],
    "year": [1951, 1978, 2003, 2019],
    "owner": ["Anna", "Ben", "Eva"],
}


def prompts(engine: Engine, n: int, own: int, shared: int, seed: int) -> Texts:
    """n prompts: `shared` tokens that all begin with, then half to one and a half times `own`."""
    text, draw = Corpus(engine.encode), random.Random(seed)
    common = text.take(shared)
    sizes = [draw.randint(max(1, own // 2), own * 3 // 2) for _ in range(n)]
    return [common + text.take(size, at=draw.randrange(10**6)) for size in sizes]


def copies(engine: Engine, n: int, seed: int) -> Texts:
    """n lines that ask for a text or a record of 10 to 80 tokens again, every other one with an
    edit."""
    draw = random.Random(seed)
    asked = [_edit(draw) if i % 2 else _again(draw) for i in range(n)]
    if not engine.tokenizer.has_chat_template:
        return [engine.encode(said) for said in asked]
    return [engine.render([{"role": "user", "content": said}]) for said in asked]


def _again(draw: random.Random) -> str:
    words = STORY.split()
    size = draw.randint(12, len(words))
    start = draw.randrange(len(words) - size + 1)
    return f"Repeat this text: {' '.join(words[start : start + size])}"


def _edit(draw: random.Random) -> str:
    record = {key: draw.choice(values) for key, values in RECORD.items()}
    kept = draw.sample([*record], draw.randint(5, len(record)))
    key = draw.choice(kept)
    value = draw.choice([v for v in RECORD[key] if v != record[key]])
    shown = json.dumps({name: record[name] for name in kept})
    return f'Change the value of "{key}" to {json.dumps(value)} in this JSON: {shown}'


class Ours:
    """One session reads, branches of it write, as in `ds4cli generate --batch`. group: what steps
    them; guesses: whether there are any."""

    def __init__(self, group: Group, engine: Engine, guesses: bool = True):
        self.engine, self._group, self._guesses = engine, group, guesses
        self.seconds = 0.0  # of writing, in the last run

    def _session(self) -> Session:
        session = self.engine.session()
        if not self._guesses:
            session.drafter = Drafter()
        return session

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        session = self._session()
        session.sync(prompt)
        return [t for event in session.stream(max_tokens=tokens, stop=[]) for t in event.tokens]

    def together(self, prompts: Texts, tokens: Sequence[int], lanes: int) -> Texts:
        """The answers, of so many tokens each, so many of them written at a time."""
        reader, group = self._session(), self._group
        self.engine.corpus.clear()  # no guesses from an earlier turn
        few = Limits(MAX_BLOCK_TOKENS, reader.limits.budget_bytes, reader.limits.chunk_tokens)
        common = min(common_prefix(prompts[0], prompt[:-1]) for prompt in prompts)
        reader.sync(prompts[0][:common])
        waiting, written, texts, read_s = [*prompts], {}, [], 0.0
        most = iter(tokens)
        begin = time.perf_counter()
        try:
            while waiting or group.lanes:
                free = waiting[: lanes - len(group.lanes)]
                if free:
                    waiting, began = waiting[len(free) :], time.perf_counter()
                    for session in self._read([reader.fork(few) for _ in free], free):
                        texts.append([])
                        written[group.join(session, max_tokens=next(most), stop=[])] = texts[-1]
                    session, read_s = None, read_s + time.perf_counter() - began
                group.call()
                for lane in [lane for lane in written if lane.has_step]:
                    written[lane] += next(lane.events).tokens
                    if lane not in group.lanes:
                        lane.events.close()
                        del written[lane]
                lane = None  # one that has ended is to give its seat back
        finally:
            for lane in written:
                group.leave(lane)
        self.seconds = time.perf_counter() - begin - read_s
        return texts

    def _read(self, sessions: list[Session], prompts: Texts) -> list[Session]:
        for session in sessions:
            session.recording = False  # nothing goes back here
        self._group.read(sessions, prompts)
        mx.synchronize()
        return sessions


class Theirs:
    """mlx_lm with the same weights, in its own classes."""

    seconds = 0.0

    def __init__(self, engine: Engine):
        self._model, self._tokenizer = stock(engine.model), engine.tokenizer
        self._stops = engine.stop_ids

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        found = []
        for token, _ in generate_step(mx.array(prompt), self._model, max_tokens=tokens):
            if token in self._stops:
                break
            found.append(token)
        return found

    def together(self, prompts: Texts, tokens: Sequence[int], lanes: int) -> Texts:
        done = batch_generate(
            self._model, self._tokenizer, prompts, max_tokens=[*tokens], return_token_ids=True
        )
        return done.token_ids


def timed(
    side: Ours | Theirs,
    prompts: Texts,
    tokens: Sequence[int],
    lanes: int,
    given: argparse.Namespace,
) -> tuple[float, Texts]:
    """Tokens a second, and the texts; 0 and none where it fails."""
    mx.clear_cache()
    begin = time.perf_counter()
    try:
        texts = side.together(prompts, tokens, lanes)
    except Exception as error:
        print(f"{type(side).__name__}: {type(error).__name__}: {error}"[:200])
        return 0.0, []
    took = side.seconds if given.drafts else time.perf_counter() - begin
    return sum(map(len, texts)) / took, texts


def row(sides: dict, lanes: int, given: argparse.Namespace, engine: Engine) -> str:
    """One line of the table."""
    if given.copy:
        asked = copies(engine, 4 * lanes, seed=lanes)
    else:
        several = 4 * lanes if given.drafts else lanes
        asked = prompts(engine, several, given.prompt, given.shared, seed=lanes)
    tokens = [given.tokens] * len(asked)
    if given.drafts:  # no two end together, with guesses or without
        draw = random.Random(lanes)
        tokens = [draw.randint(given.tokens // 2, given.tokens * 3 // 2) for _ in asked]
    rates: dict[str, list[float]] = {name: [] for name in sides}
    same = {}
    for turn in range(given.repeats + 1):
        # What both need for the first time is paid by who comes first: each does, every other turn.
        for name in reversed(sides) if turn % 2 else sides:
            side = sides[name]
            rate, texts = timed(side, asked, tokens, lanes, given)
            if turn:
                rates[name].append(rate)
            elif not given.fast:
                alone = [side.alone(*each) for each in zip(asked, tokens, strict=True)]
                same[name] = sum(a == b for a, b in zip(alone, texts, strict=False))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    ours, theirs = rates.values()
    ratio = statistics.median(
        a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)
    )
    cells = [f"{lanes:5}", *(f"{middle[name]:9.1f}" for name in sides), f"{ratio:6.2f}"]
    cells += [f"{same[name]:6} of {len(asked):2}" for name in sides if name in same]
    return "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt, about")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="turns, after one that warms up")
    parser.add_argument("--dtype", default="auto", help="weights in memory, see ds4cli")
    parser.add_argument("--drafts", action="store_true", help="with guesses, and without")
    parser.add_argument("--copy", action="store_true", help="lines to be copied or edited")
    parser.add_argument("--drafter", help="where guesses come from, see ds4cli")
    parser.add_argument("--fast", action="store_true", help="compare no text with one alone")
    given = parser.parse_args()
    drafter = given.drafter or ("ngram" if given.drafts else "none")
    engine = Engine.load(given.model, dtype=given.dtype, drafter=drafter)
    if not given.copy:  # all texts are of one length
        engine.stop_ids = set()
        engine.tokenizer.eos_token_ids = set()
    group = Group(engine, print)
    if given.drafts:
        sides = {drafter: Ours(group, engine), "none": Ours(group, engine, guesses=False)}
    else:
        sides = {"ds4cli": Ours(group, engine), "mlx_lm": Theirs(engine)}
    one, other = sides
    print(f"lanes{one:>9}{other:>9} ratio {one:>8} {other:>9}")
    print("         tok/s    tok/s         as alone  as alone")
    for lanes in given.lanes:
        print(row(sides, lanes, given, engine), flush=True)


if __name__ == "__main__":
    main()
