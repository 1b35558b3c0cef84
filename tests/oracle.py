"""References to compare with: stock mlx-lm caches, fed in the plainest way."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from tiny import V, build

from ds4cli.drafters.drafter import Drafter
from ds4cli.rewind.timeline import Timeline

FAMILIES = (
    "llama",
    "qwen3_next",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "granitemoehybrid",
    "rwkv7",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v41",
)
# One for each way to keep state; a property of none in particular is shown on these.
KINDS = ("llama", "qwen3_next", "lfm2", "mamba2", "rwkv7", "gemma3_text", "deepseek_v41")
# Architectures whose layers keep state as those of another tiny model do.
TWINS = ("qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2_moe", "exaone4", "cohere2", "plamo3")
# Heads of the sizes that real models have, for kernels that smaller ones do not reach.
REAL_HEADS = ("llama:64", "llama:128", "llama:256", "gemma3_text:256", "qwen3_next:128")
# A factor on the weights that makes the argmax move from token to token, family by family.
SCALE = 2.0
TOLERANCE = 2e-5
# The same for rows kept in 8 bits: one that rounds to the other side moves a logit by 1e-4 or so.
ROUNDED = 1e-3


def one_of_each(names: Sequence[str]) -> list:
    """`names` to test with; those that keep state as another one does are slow."""
    return [pytest.param(n, marks=() if n in KINDS else pytest.mark.slow) for n in names]


class Letters:
    """A tokenizer for the tiny models: id i is the i-th character of an alphabet."""

    has_chat_template = False
    alphabet = "".join(map(chr, range(32, 32 + V)))

    def __init__(self, eos: Sequence[int] = ()):
        self.eos_token_ids = set(eos)

    def __len__(self) -> int:
        return V

    def encode(self, text: str, **options: bool) -> list[int]:
        return [self.alphabet.index(c) for c in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(map(self.alphabet.__getitem__, ids))


class Noting(Timeline):
    """A timeline that notes which model calls its tokens came from.

    made: where each call began, and how many rows it was given; calls beyond `pos` are of a text
    that is gone.
    again: from here on rows are of other calls: a way back read a token again, in a call of its
    own, and was undone. The row stands, as it is that token's.
    """

    made: Sequence[tuple[int, int]] = ()
    again: float = inf

    def was_made_as(self, saved: Noting) -> None:
        """This one was loaded from what `saved` kept."""
        self.made, self.again = saved.made, saved.again

    def before_call(self, rows, *args):
        begin = self.pos + self.open_tokens
        self.again = self.again if self.again < begin else inf
        self.made = [*(call for call in self.made if call[0] < begin), (begin, rows)]
        return super().before_call(rows, *args)

    def rewind(self, pos):
        made, before = self.made, self.pos
        try:
            return super().rewind(pos)
        except BaseException:
            if self.pos == before:  # else it was done
                self.again = min([self.again, *(begin for begin, _ in {*self.made} - {*made})])
                self.made = made
            raise

    @property
    def calls(self) -> list[tuple[int, int]]:
        """How many tokens each call kept and was fed, for the tokens up to where it stands."""
        made = [call for call in self.made if call[0] < self.pos]
        ends = [*(begin for begin, _ in made[1:]), self.pos]
        return [(end - begin, rows) for (begin, rows), end in zip(made, ends, strict=True)]


def engine(name: str, *, model=None, draft=None, eos: Sequence[int] = (), **settings):
    """An engine over a tiny random model."""
    from ds4cli.engine.engine import Engine
    from ds4cli.settings import Settings

    if draft is not None:
        settings.setdefault("drafter", "model")
        settings.setdefault("draft_model", "given")
    settings.setdefault("drafter", "none")
    model = build(name, scale=SCALE) if model is None else model
    made = Engine(model, Letters(eos), Settings(**settings), draft=draft)
    made._make_timeline = Noting
    return made


def prompt(n: int, seed: int = 1) -> list[int]:
    """A random prompt of n tokens; a shorter one is a prefix of a longer one."""
    return mx.random.randint(0, V, (512,), key=mx.random.key(seed)).tolist()[:n]


def fresh_logits(model, tokens: Sequence[int], make: Callable | None = None) -> mx.array:
    """The row after `tokens`, from stock caches in one call. make: what makes the caches of a
    model, where they are not those of mlx-lm."""
    return model(mx.array(tokens)[None], cache=(make or make_prompt_cache)(model))[0, -1]


def logits_of_calls(
    model, tokens: Sequence[int], calls: Sequence[tuple[int, int]], make: Callable | None = None
) -> mx.array:
    """The row after `tokens`, from stock caches in calls of which each kept and was fed so many:
    what was not kept is made up, as rows do not depend on what follows them, and cut off again, or,
    where that cannot be, left to copies of the caches."""
    caches, done = (make or make_prompt_cache)(model), 0
    for kept, fed in calls:
        block, cut = tokens[done : done + kept], fed - kept
        copied = None if not cut or can_trim_prompt_cache(caches) else copy.deepcopy(caches)
        row = model(mx.array([[*block, *[tokens[0]] * cut]]), cache=copied or caches)[0, kept - 1]
        mx.eval(row)
        if copied is not None:
            mx.eval(model(mx.array([block]), cache=caches))
        elif cut:
            trim_prompt_cache(caches, cut)
        done += kept
    assert done == len(tokens), "a loaded timeline's calls are those of the saved one"
    return row


# Rows that stock caches gave for texts of late: (model, how its caches are made, text, rows).
_READ: deque[tuple[Any, Callable, list[int], mx.array]] = deque(maxlen=24)


def read_logits(
    model, tokens: Sequence[int], ahead: Sequence[int] = (), make: Callable | None = None
) -> mx.array:
    """The row after `tokens`, from stock caches: of one call on them and `ahead`, or on a text that
    begins with them, if one was read of late. make: see `fresh_logits`."""
    tokens, make = list(tokens), make or make_prompt_cache
    for known, made, text, rows in _READ:
        if known is model and made is make and text[: len(tokens)] == tokens:
            return rows[len(tokens) - 1]
    text = [*tokens, *ahead]
    rows = model(mx.array(text)[None], cache=make(model))[0]
    mx.eval(rows)
    _READ.appendleft((model, make, text, rows))
    return rows[len(tokens) - 1]


def plain(model, tokens: Sequence[int], n: int, sampler=None) -> list[int]:
    """n tokens after `tokens`, one at a time through stock caches; greedy without a sampler."""
    cache, out = make_prompt_cache(model), list(tokens)
    row = model(mx.array(out)[None], cache=cache)[0, -1]
    for _ in range(n):
        pick = row.argmax() if sampler is None else sampler.pick(row[None], len(out), out)
        out.append(pick.item())
        row = model(mx.array([[out[-1]]]), cache=cache)[0, -1]
    return out[len(tokens) :]


def error(a: mx.array, b: mx.array) -> float:
    """Largest difference of two logits rows, over their size where that is above one."""
    return (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1)).item()


def assert_fresh(model, timeline: Timeline, make: Callable | None = None) -> None:
    """The timeline's logits are what stock caches give for its text, to `TOLERANCE`; or to
    `ROUNDED` where the caches round, and no reference can make the same calls: see `Noting.again`.

    In one call; or, where that is another row, in the calls that the text came from: DeepSeek V4.1
    rounds activations to fp8 and fp4, Mamba-2 scans a chunk and a step by different sums, and so
    stock mlx-lm differs from itself between call sizes. make: see `fresh_logits`.
    """
    tokens, row = timeline.tokens, timeline.logits
    if error(row, read_logits(model, tokens, timeline.redo_tokens, make)) < TOLERANCE:
        return
    rounds = make not in (None, make_prompt_cache)
    limit = ROUNDED if rounds and timeline.again < timeline.pos else TOLERANCE
    if error(row, fresh_logits(model, tokens, make)) >= limit:
        assert error(row, logits_of_calls(model, tokens, timeline.calls, make)) < limit


def check(model, session) -> None:
    """The session's state equals a fresh one's, and every layer stands at its position."""
    timeline = session._timeline
    for adapter in timeline.adapters:
        assert adapter.pos() in (None, session.pos)
    assert_fresh(model, timeline)


class OracleDrafter(Drafter):
    """Knows what comes and is right with probability p, token by token."""

    name = "oracle"

    def __init__(self, truth: Sequence[int], right: float):
        self.truth, self.right = list(truth), right

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        known = self.truth[len(tokens) : len(tokens) + n]
        draws = mx.random.uniform(shape=(n,), key=mx.random.key(len(tokens))).tolist()
        return [t if d < self.right else (t + 1) % V for t, d in zip(known, draws, strict=False)]


@contextmanager
def failing_layer(model, index: int, error: type[BaseException] = KeyboardInterrupt):
    """The layer runs, its cache is written, and then it raises: an interrupt between layers."""
    layer = model.layers[index]
    kind = type(layer)

    def call(self, *args, **kwargs):
        kind.__call__(self, *args, **kwargs)
        raise error("planted")

    layer.__class__ = type(f"Failing{kind.__name__}", (kind,), {"__call__": call})
    try:
        yield
    finally:
        layer.__class__ = kind


class Interrupt:
    """Ctrl-C, or another error, before one line of some functions: the `nth` that runs within the
    `with` block.

    struck: whether so many lines ran.
    """

    def __init__(self, functions: Sequence[Callable], nth: int, error: type[BaseException]):
        self.struck = False
        self._error = error
        self._codes = {function.__code__ for function in functions}
        self._left = nth

    def __enter__(self) -> None:
        self._was = sys.gettrace()
        sys.settrace(self._enter_frame)

    def __exit__(self, kind, *_: object) -> bool:
        sys.settrace(self._was)
        return kind is self._error and self.struck

    def _enter_frame(self, frame, *_: object) -> Callable | None:
        return self._line if frame.f_code in self._codes else None

    def _line(self, frame, event: str, _: object) -> Callable:
        if event == "line":
            if self._left == 0:
                self.struck = True
                raise self._error("planted")
            self._left -= 1
        return self._line


def interrupts(
    *functions: Callable, error: type[BaseException] = KeyboardInterrupt
) -> Iterator[Interrupt]:
    """An `Interrupt` for each line of the functions that runs, and a last one that never strikes.

    Enter each once, around the same work.
    """
    for nth in count():
        interrupt = Interrupt(functions, nth, error)
        yield interrupt
        if not interrupt.struck:
            return
