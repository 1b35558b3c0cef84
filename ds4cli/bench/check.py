"""`--check`: the proof, on the user's own model, that going back and speculating change nothing.

The reference is the stock model with stock caches. In float32 logits must agree to `EXACT_LIMIT`
and every token must be the same; in half precision the rounding of a call depends on its length, so
there each token must be near the reference's best, and the largest distance is printed.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ds4cli.arrays import integer, number
from ds4cli.bench.lab import HALF_PRECISION_MARGIN, Lab, gap
from ds4cli.bench.reference import Pick, Reference
from ds4cli.engine.engine import Engine
from ds4cli.engine.session import Session
from ds4cli.errors import UsageError
from ds4cli.rewind.plan import call_sizes
from ds4cli.sampling import Sampler

EXACT_LIMIT = 2e-5
# Where a model's own rounding is larger, as between long and short calls of the stock model.
NOISE_FACTOR = 4
LENGTH = 24  # tokens generated where texts are compared
ONWARD = 3  # tokens read after a rewind, to see that every layer stands where it should
DEPTHS = 8  # random positions
# Drafts of its own that a model keeps in half precision, where rounding turns near ties; a draft
# model that stands elsewhere guesses nothing.
SELF_DRAFT_SHARE = 0.5


@dataclass(frozen=True)
class Finding:
    """One case. case: "check:context:...", what `--case` takes. worst: the largest difference of
    logits or distance of a token from the best, as a share of the largest logit."""

    case: str
    worst: float
    limit: float
    is_same: bool = True
    detail: str = ""

    @property
    def check(self) -> str:
        return self.case.partition(":")[0]

    @property
    def context(self) -> int:
        return int(self.case.split(":")[1])

    @property
    def is_ok(self) -> bool:
        return self.is_same and self.worst <= self.limit


class Course:
    """A session's way through a text. calls: how many tokens each model call kept and was fed."""

    def __init__(self, session: Session, prompt: Sequence[int]):
        self.session = session
        self.calls: list[tuple[int, int]] = []
        session.sync(prompt, progress=self._note_read)

    def _note_read(self, done: int, total: int) -> None:
        size = done - sum(kept for kept, _ in self.calls)
        self.calls += [(size, size)] if size else []

    def step(self, max_tokens: int, drafts: Sequence[int] | None = None) -> None:
        """One block."""
        session = self.session
        pos, fed = session.pos, session.counters.fed_tokens
        session.step(max_tokens, drafts)
        self.calls.append((session.pos - pos, session.counters.fed_tokens - fed))

    def decode(self, end: int) -> None:
        """Blocks, drafted as the session likes, up to position `end`."""
        while self.session.pos < end:
            self.step(end - self.session.pos)


class Examiner:
    """What the checks of one context share."""

    def __init__(self, lab: Lab, reference: Reference, context: int):
        self.lab, self.reference, self.context = lab, reference, context
        self.prompt = lab.text.take(context)
        self._said: dict[float, list[int]] = {}
        self._read: Session | None = None
        self.noise = self._noise()
        floor = EXACT_LIMIT if lab.is_exact else HALF_PRECISION_MARGIN
        self.limit = max(floor, NOISE_FACTOR * self.noise)

    def _noise(self) -> float:
        """What the stock model differs from itself by when it is fed in long and in short calls."""
        n = min(self.context, 64)
        long = self.reference.rows(self.prompt[:n], [n])
        short = self.reference.rows(self.prompt[:n], call_sizes(n, self.lab.matrix.block, n))
        return max(difference(a, b) for a, b in zip(short, long, strict=True))

    def notes(self) -> list[str]:
        """What a reader must know about the limit."""
        if self.limit == NOISE_FACTOR * self.noise:
            return [
                f"At context {self.context} the stock model differs from itself by "
                f"{self.noise:.1e} between long and short calls, so {NOISE_FACTOR} times that is "
                "allowed."
            ]
        return []

    def finding(self, *where: object, **fields: Any) -> Finding:
        return Finding(":".join(map(str, where)), limit=self.limit, **fields)

    def engine(self, draft: Any = None, **settings: Any) -> Engine:
        """Another engine over the same model."""
        engine = self.lab.engine
        chosen = replace(engine.settings, **settings)
        other = Engine(
            engine.model,
            engine.tokenizer,
            chosen,
            draft=draft,
            context_tokens=engine.context_tokens,
        )
        other.stop_ids = set()
        return other

    def session(self) -> Session:
        """A session that has read the prompt: a branch of one that is kept for that."""
        if self._read is None:
            self._read = self.lab.session(self.prompt)
        return self._read.fork()

    def plain(self, n: int, temp: float = 0.0) -> list[int]:
        """The prompt and n <= LENGTH tokens of the stock model, one at a time."""
        if temp not in self._said:
            self._said[temp] = self._say(temp)
        return [*self.prompt, *self._said[temp][:n]]

    def _say(self, temp: float) -> list[int]:
        return self.reference.plain(self.prompt, LENGTH, self._picker(temp))

    def _picker(self, temp: float) -> Pick:
        engine = self.lab.engine
        sampler = Sampler(replace(engine.settings, temp=temp), engine.token_limit)
        return lambda row, tokens: integer(sampler.pick(row[None], len(tokens), tokens))

    def judge(self, course: Course, temp: float = 0.0) -> tuple[bool, str]:
        """Whether a text in float32 is what the stock model says, and what to know about that.

        Some models answer otherwise by the rows of a call alone, on their own too: kernels differ,
        and Plamo 3 sees one position more in a call of many rows than its cache keeps for one row.
        So a text that differs from one token a call is held against the stock model in calls of the
        same sizes, and in one call, which needs no cache.
        """
        tokens = course.session.tokens
        if tokens == self.plain(len(tokens) - self.context, temp):
            return True, ""
        if self._says(tokens, self.reference.rows_of_calls(tokens, course.calls), temp):
            return True, "as the stock model says in calls of these sizes"
        if self._says(tokens, self.reference.rows(tokens, [len(tokens)]), temp):
            return True, "as the stock model says in one call"
        return False, ""

    def _says(self, tokens: list[int], rows: mx.array, temp: float) -> bool:
        pick, places = self._picker(temp), range(self.context, len(tokens))
        return all(pick(rows[pos - 1], tokens[:pos]) == tokens[pos] for pos in places)

    def drafts(self, truth: Sequence[int], kept: int) -> list[int]:
        """Drafts of a full block after the prompt, of which the first kept - 1 are right."""
        vocab = self.lab.engine.token_limit
        right = list(truth[self.context + 1 : self.context + kept])
        rest = truth[self.context + kept : self.context + self.lab.matrix.block]
        return right + [(token + 1) % vocab for token in rest]

    def single_rows(self, tokens: Sequence[int]) -> mx.array:
        """The reference's rows (n, V): the prompt in one call, then one token a call."""
        return self.reference.rows(tokens, [self.context, *[1] * (len(tokens) - self.context)])

    def compare(self, session: Session, whole: Sequence[int], rows: mx.array) -> float:
        """How far `session`, at some position of `whole`, is from the reference: its logits, and
        those of a branch that reads on."""
        branch = session.fork()
        branch.sync(whole[: session.pos + ONWARD])
        here = difference(session.logits, rows[session.pos - 1])
        return max(here, difference(branch.logits, rows[branch.pos - 1]))

    def says(self, tokens: Sequence[int]) -> float:
        """Teacher forcing: how far the worst token after the prompt is from the best."""
        rows = self.single_rows(tokens)
        pairs = zip(rows[self.context - 1 :], tokens[self.context :], strict=False)
        return max(gap(row, token) for row, token in pairs)


def difference(row: mx.array | None, reference: mx.array | None) -> float:
    """Largest difference of two rows (V,), as a share of the largest logit, or of one where that is
    less. Infinite for anything that is no number."""
    assert row is not None and reference is not None, "both have read a text"
    row, reference = row.astype(mx.float32), reference.astype(mx.float32)
    scale = mx.maximum(mx.max(mx.abs(reference)), 1)
    value = number(mx.max(mx.abs(row - reference)) / scale)
    return value if value == value else float("inf")


# --- the checks -----------------------------------------------------------------------------------


def block(exam: Examiner) -> Iterator[Finding]:
    """A block, however much of it is kept, leaves what single tokens leave."""
    size = exam.lab.matrix.block
    truth = exam.plain(size)
    rows = exam.single_rows(truth)
    for kept in range(1, size + 1):
        session = exam.session()
        session.step(drafts=exam.drafts(truth, kept))
        is_same = session.tokens == truth[: exam.context + kept] or not exam.lab.is_exact
        worst = difference(session.logits, rows[session.pos - 1]) if is_same else float("inf")
        if not exam.lab.is_exact:
            worst = exam.says(session.tokens)
        yield exam.finding("block", exam.context, kept, worst=worst, is_same=is_same)


def row(exam: Examiner) -> Iterator[Finding]:
    """Every row of the record, in any order, is a place where a fresh session would stand."""
    size = exam.lab.matrix.block
    truth = exam.plain(size + ONWARD)
    true_rows = exam.single_rows(truth)
    for kept in range(1, size + 1):
        session = exam.session()
        session.step(drafts=exam.drafts(truth, kept))
        end, whole, rows = session.pos, truth, true_rows
        if session.tokens != truth[:end] and not exam.lab.is_exact:  # rounding took another way
            whole = session.tokens + exam.lab.text.take(ONWARD, at=exam.context)
            rows = exam.single_rows(whole)
        for pos in range(end, exam.context - 1, -1):
            yield _rewound(exam, session, pos, whole, rows, "row", kept, "back")
        session.sync(whole[:end])
        worst, same = exam.compare(session, whole, rows), session.tokens == list(whole[:end])
        yield exam.finding("row", exam.context, kept, "forward", end, worst=worst, is_same=same)


def depth(exam: Examiner) -> Iterator[Finding]:
    """Random places, across windows and checkpoints, are what a fresh session is."""
    session = exam.session()
    exam.lab.decode(session, LENGTH)
    whole = session.tokens + exam.lab.text.take(ONWARD, at=exam.context)
    chunk = exam.lab.engine.settings.prefill_step_size
    rows = exam.reference.rows(whole, call_sizes(len(whole), chunk, chunk))
    end = session.pos
    dice = random.Random(exam.context)
    for pos in [*dice.sample(range(2, end + 1), min(DEPTHS, end - 1)), 1]:
        session.sync(whole[:end])
        yield _rewound(exam, session, pos, whole, rows, "depth")


def _rewound(
    exam: Examiner,
    session: Session,
    pos: int,
    whole: Sequence[int],
    rows: mx.array,
    *where: object,
) -> Finding:
    """Plan, rewind, compare; the plan must say what the counters then show."""
    plan = session.plan(pos)
    before = replace(session.counters)
    session.rewind(pos)
    forwards = session.counters.forwards - before.forwards
    fed = session.counters.fed_tokens - before.fed_tokens
    as_planned = (forwards, fed) == (plan.forwards, plan.replay)
    name, *rest = where
    return exam.finding(
        name,
        exam.context,
        *rest,
        pos,
        worst=exam.compare(session, whole, rows),
        is_same=as_planned and session.tokens == list(whole[:pos]),
        detail="" if as_planned else f"planned {plan.forwards} calls, took {forwards}",
    )


def save(exam: Examiner) -> Iterator[Finding]:
    """A session that was saved and loaded says the same, and goes back to the same."""
    session = exam.session()
    exam.lab.decode(session, 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.safetensors"
        session.save(str(path))
        loaded = exam.lab.engine.load_session(path)
        worst = difference(loaded.logits, session.logits)
        same = exam.lab.decode(loaded, 8) == exam.lab.decode(session, 8)
        middle = max(1, exam.context // 2)
        loaded.rewind(middle)
    fresh = exam.reference.rows(exam.prompt[:middle], [middle])[-1]
    worst = max(worst, difference(loaded.logits, fresh))
    yield exam.finding("save", exam.context, worst=worst, is_same=same)


def speculative(exam: Examiner) -> Iterator[Finding]:
    """Speculation, by n-grams or with drafts that are half wrong, says what plain decoding says."""
    for temp in (0.0, 0.8) if exam.lab.is_exact else (0.0,):
        truth = exam.plain(LENGTH, temp=temp)
        for name, course in (
            ("ngram", _by_ngrams(exam, temp)),
            ("half-wrong", _half_wrong(exam, temp, truth)),
        ):
            exact = exam.lab.is_exact
            same, detail = exam.judge(course, temp) if exact else (True, "")
            worst = 0.0 if exact else exam.says(course.session.tokens)
            where = exam.context, name, temp
            yield exam.finding("speculative", *where, worst=worst, is_same=same, detail=detail)


def _by_ngrams(exam: Examiner, temp: float) -> Course:
    engine = exam.engine(drafter="ngram", speculate="always", temp=temp)
    course = Course(engine.session(), exam.prompt)
    course.decode(exam.context + LENGTH)
    return course


def _half_wrong(exam: Examiner, temp: float, truth: list[int]) -> Course:
    course = Course(exam.engine(temp=temp).session(), exam.prompt)
    vocab, size = exam.lab.engine.token_limit, exam.lab.matrix.block
    while (pos := course.session.pos) < len(truth):
        ahead = truth[pos + 1 : pos + size]
        right = pos % size
        course.step(size, ahead[:right] + [(t + 1) % vocab for t in ahead[right:]])
    return course


def self_draft(exam: Examiner) -> Iterator[Finding]:
    """A model that drafts for itself is always right, and changes nothing."""
    size = exam.lab.matrix.block - 1
    engine = exam.engine(
        draft=exam.lab.engine.model,
        drafter="model",
        draft_model=exam.lab.engine.settings.model,
        num_draft_tokens=size,
        speculate="always",
    )
    course = Course(engine.session(), exam.prompt)
    course.decode(exam.context + LENGTH)
    session = course.session
    accepted, proposed = session.stats.accepted, session.stats.proposed
    share = accepted / proposed if proposed else 0.0
    exact = exam.lab.is_exact
    same, detail = exam.judge(course) if exact else (True, "")
    same = same and (share == 1 if exact else share > SELF_DRAFT_SHARE)
    worst = 0.0 if exact else exam.says(session.tokens)
    detail = "; ".join(filter(None, [f"{accepted} of {proposed} drafts accepted", detail]))
    yield exam.finding("self-draft", exam.context, worst=worst, is_same=same, detail=detail)


CHECKS: dict[str, Callable[[Examiner], Iterator[Finding]]] = {
    "block": block,
    "row": row,
    "depth": depth,
    "save": save,
    "speculative": speculative,
    "self-draft": self_draft,
}


# --- running them ---------------------------------------------------------------------------------


def contexts(lab: Lab) -> list[int]:
    """Short, longer, longer than a prefill chunk and than any window of the model, as far as the
    model can read."""
    settings = lab.engine.settings
    windows = [window(cache) for cache in Reference(lab.engine.model).caches()]
    long = max(settings.prefill_step_size, *windows) + settings.horizon_tokens + 64
    room = (lab.engine.context_tokens or long + LENGTH + ONWARD) - LENGTH - ONWARD
    return sorted({min(n, room) for n in (16, 96, long)})


def window(cache: Any) -> int:
    """Positions that a cache looks back on, where that is limited; else 0."""
    sizes = ("max_size", "chunk_size", "window_size")
    parts = [window(part) for part in getattr(cache, "caches", ())]
    return max([getattr(cache, name, 0) for name in sizes] + parts)


def examine(
    lab: Lab, wanted: Sequence[int], case: str | None = None, notes: list[str] | None = None
) -> Iterator[Finding]:
    """All findings, from short contexts to long ones; with `case`, only that one. `notes` collects
    what a reader must know about the limits."""
    names = list(CHECKS)
    if case is not None:
        names, wanted = _parse(case)
    engine = lab.engine
    reference = Reference(engine.model, engine.settings.kv_bits, engine.settings.kv_group_size)
    for context in wanted:
        lab.refuse_beyond(context + LENGTH + ONWARD)
        exam = Examiner(lab, reference, context)
        if notes is not None:
            notes += exam.notes()
        for name in names:
            yield from (f for f in CHECKS[name](exam) if case in (None, f.case))


def _parse(case: str) -> tuple[list[str], list[int]]:
    name, _, rest = case.partition(":")
    context = rest.partition(":")[0]
    if name not in CHECKS or not context.isdigit() or int(context) < 1:
        known = ", ".join(CHECKS)
        raise UsageError(f"`--case` cannot be `{case}`", f"it is NAME:CONTEXT:..., NAME of {known}")
    return [name], [int(context)]


def smallest(findings: Sequence[Finding]) -> Finding | None:
    """The failure with the shortest context, and there the first."""
    bad = [f for f in findings if not f.is_ok]
    return min(bad, key=lambda f: f.context, default=None)
