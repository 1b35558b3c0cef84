"""`--check`: the proof, on the user's own model, that going back and speculating change nothing.

The reference is the stock model with stock caches. In float32 logits must agree to `EXACT_LIMIT`
and every token must be the same; in half precision the rounding of a call depends on its length, so
there each token must be near the reference's best, and the largest distance is printed. No limit
grows with what the model's own rounding does: where long and short calls of the stock model differ,
it is fed in the very calls that the session's tokens came from.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """A session, and which model calls its tokens came from: it stands in for the timeline's model
    and notes where each call began and how many tokens it was given."""

    def __init__(self, session: Session, made: Iterable[tuple[int, int]] = ()):
        self.session = session
        self._timeline = session._timeline
        self._model = self._timeline.model
        self._made = list(made)  # begin and size of each call, up to the last one
        self._timeline.model = self

    def __call__(self, ids: mx.array, **options: Any) -> mx.array:
        begin = self._timeline.pos + self._timeline.open_tokens
        self._made = [call for call in self._made if call[0] < begin]
        self._made.append((begin, ids.shape[1]))
        return self._model(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def calls(self) -> list[tuple[int, int]]:
        """How many tokens each call kept and was fed, for the tokens up to where it stands."""
        pos = self.session.pos
        made = [call for call in self._made if call[0] < pos]
        ends = [*(begin for begin, _ in made[1:]), pos]
        return [(end - begin, size) for (begin, size), end in zip(made, ends, strict=True)]

    def fork(self) -> Course:
        return self.goes_on(self.session.fork())

    def goes_on(self, session: Session) -> Course:
        """`session` stands where this one does, and came there the same way."""
        session._timeline.model = self._model
        return Course(session, self._made)

    def decode(self, end: int) -> None:
        """Blocks, drafted as the session likes, up to position `end`."""
        while self.session.pos < end:
            self.session.step(end - self.session.pos)


class Examiner:
    """What the checks of one context share."""

    def __init__(self, lab: Lab, reference: Reference, context: int):
        self.lab, self.reference, self.context = lab, reference, context
        self.prompt = lab.text.take(context)
        self._said: dict[float, list[int]] = {}
        self._read: Course | None = None
        self.limit = EXACT_LIMIT if lab.is_exact else HALF_PRECISION_MARGIN

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

    def course(self) -> Course:
        """A session that has read the prompt: a branch of one that is kept for that."""
        if self._read is None:
            self._read = Course(self.lab.session())
            self._read.session.sync(self.prompt)
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

    def stock(self, course: Course) -> Iterator[tuple[str, mx.array]]:
        """The stock model's own rows (n, V) of a session's text, in words and in numbers.

        Some models answer otherwise by the rows of a call alone, on their own too: kernels differ,
        and Plamo 3 sees one position more in a call of many rows than its cache keeps for one row.
        So a text is held against the stock model in calls of the same sizes, and in one call, which
        needs no cache.
        """
        tokens = course.session.tokens
        yield (
            "as the stock model says in calls of these sizes",
            self.reference.rows_of_calls(tokens, course.calls),
        )
        yield "as the stock model says in one call", self.reference.rows(tokens, [len(tokens)])

    def judge(self, course: Course, temp: float = 0.0) -> tuple[bool, str]:
        """Whether a text in float32 is what the stock model says, and what to know about that."""
        tokens = course.session.tokens
        if tokens == self.plain(len(tokens) - self.context, temp):
            return True, ""
        said = (words for words, rows in self.stock(course) if self._says(tokens, rows, temp))
        words = next(said, None)
        return words is not None, words or ""

    def _says(self, tokens: list[int], rows: mx.array, temp: float) -> bool:
        pick, places = self._picker(temp), range(self.context, len(tokens))
        return all(pick(rows[pos - 1], tokens[:pos]) == tokens[pos] for pos in places)

    def nearest(
        self, course: Course, rows: mx.array, far: Callable[[mx.array], float]
    ) -> tuple[float, str]:
        """How far a session is from the stock model, and what to know about that: from `rows`, or
        where those are too far, from the stock model as it is for the session's own calls."""
        least = far(rows)
        if least <= self.limit:
            return least, ""
        for words, others in self.stock(course):
            distance = far(others)
            if distance <= self.limit:
                return distance, words
            least = min(least, distance)
        return least, ""

    def drafts(self, truth: Sequence[int], kept: int) -> list[int]:
        """Drafts of a full block after the prompt, of which the first kept - 1 are right."""
        vocab = self.lab.engine.token_limit
        right = list(truth[self.context + 1 : self.context + kept])
        rest = truth[self.context + kept : self.context + self.lab.matrix.block]
        return right + [(token + 1) % vocab for token in rest]

    def single_rows(self, tokens: Sequence[int]) -> mx.array:
        """The reference's rows (n, V): the prompt in one call, then one token a call."""
        return self.reference.rows(tokens, [self.context, *[1] * (len(tokens) - self.context)])

    def compare(
        self, course: Course, whole: Sequence[int], rows: mx.array, onward: int = ONWARD
    ) -> tuple[float, str]:
        """How far a session, at some position of `whole`, is from the reference, whose rows (n, V)
        are those of `whole`: its logits, and those of a branch that reads on."""
        branch = course.fork()
        branch.session.sync(whole[: course.session.pos + onward])
        stands = [(session.pos - 1, session.logits) for session in (course.session, branch.session)]
        return self.nearest(
            branch, rows, lambda rows: max(difference(row, rows[at]) for at, row in stands)
        )

    def says(self, course: Course) -> tuple[float, str]:
        """Teacher forcing: how far the worst token after the prompt is from the best."""
        tokens = course.session.tokens

        def far(rows: mx.array) -> float:
            pairs = zip(rows[self.context - 1 :], tokens[self.context :], strict=False)
            return max(gap(row, token) for row, token in pairs)

        return self.nearest(course, self.single_rows(tokens), far)


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
        course = exam.course()
        course.session.step(drafts=exam.drafts(truth, kept))
        is_same, detail = True, ""
        if not exam.lab.is_exact:
            worst, detail = exam.says(course)
        elif course.session.tokens == truth[: exam.context + kept]:
            worst, detail = exam.compare(course, truth, rows, onward=0)
        else:
            is_same, detail = exam.judge(course)
            worst = 0.0 if is_same else float("inf")
        yield exam.finding("block", exam.context, kept, worst=worst, is_same=is_same, detail=detail)


def row(exam: Examiner) -> Iterator[Finding]:
    """Every row of the last block, in any order, is a place where a fresh session would stand."""
    size = exam.lab.matrix.block
    truth = exam.plain(size + ONWARD)
    true_rows = exam.single_rows(truth)
    for kept in range(1, size + 1):
        course = exam.course()
        session = course.session
        session.step(drafts=exam.drafts(truth, kept))
        end, whole, rows = session.pos, truth, true_rows
        if session.tokens != truth[:end]:  # rounding took another way
            whole = session.tokens + exam.lab.text.take(ONWARD, at=exam.context)
            rows = exam.single_rows(whole)
        for pos in range(end, exam.context - 1, -1):
            yield _rewound(exam, course, pos, whole, rows, "row", kept, "back")
        session.sync(whole[:end])
        worst, detail = exam.compare(course, whole, rows)
        same = session.tokens == list(whole[:end])
        where = exam.context, kept, "forward", end
        yield exam.finding("row", *where, worst=worst, is_same=same, detail=detail)


def depth(exam: Examiner) -> Iterator[Finding]:
    """Random places, across windows and checkpoints, are what a fresh session is."""
    course = exam.course()
    session = course.session
    exam.lab.decode(session, LENGTH)
    whole = session.tokens + exam.lab.text.take(ONWARD, at=exam.context)
    chunk = exam.lab.engine.chunk_tokens
    rows = exam.reference.rows(whole, call_sizes(len(whole), chunk, chunk))
    end = session.pos
    dice = random.Random(exam.context)
    for pos in [*dice.sample(range(2, end + 1), min(DEPTHS, end - 1)), 1]:
        session.sync(whole[:end])
        yield _rewound(exam, course, pos, whole, rows, "depth")


def _rewound(
    exam: Examiner,
    course: Course,
    pos: int,
    whole: Sequence[int],
    rows: mx.array,
    *where: object,
) -> Finding:
    """Plan, rewind, compare; the plan must say what the counters then show."""
    session = course.session
    plan = session.plan(pos)
    before = replace(session.counters)
    session.rewind(pos)
    forwards = session.counters.forwards - before.forwards
    fed = session.counters.fed_tokens - before.fed_tokens
    as_planned = (forwards, fed) == (plan.forwards, plan.replay)
    name, *rest = where
    worst, detail = exam.compare(course, whole, rows)
    return exam.finding(
        name,
        exam.context,
        *rest,
        pos,
        worst=worst,
        is_same=as_planned and session.tokens == list(whole[:pos]),
        detail=detail if as_planned else f"planned {plan.forwards} calls, took {forwards}",
    )


def save(exam: Examiner) -> Iterator[Finding]:
    """A session that was saved and loaded says the same, and goes back to the same."""
    course = exam.course()
    session = course.session
    exam.lab.decode(session, 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.safetensors"
        session.save(str(path))
        loaded = course.goes_on(exam.lab.engine.load_session(path))
        worst = difference(loaded.session.logits, session.logits)
        same = exam.lab.decode(loaded.session, 8) == exam.lab.decode(session, 8)
        middle = max(1, exam.context // 2)
        loaded.session.rewind(middle)
    fresh = exam.reference.rows(exam.prompt[:middle], [middle])
    back, detail = exam.compare(loaded, exam.prompt[:middle], fresh, onward=0)
    worst = max(worst, back)
    yield exam.finding("save", exam.context, worst=worst, is_same=same, detail=detail)


def speculative(exam: Examiner) -> Iterator[Finding]:
    """Speculation, by n-grams or with drafts that are half wrong, says what plain decoding says."""
    for temp in (0.0, 0.8) if exam.lab.is_exact else (0.0,):
        truth = exam.plain(LENGTH, temp=temp)
        for name, course in (
            ("ngram", _by_ngrams(exam, temp)),
            ("half-wrong", _half_wrong(exam, temp, truth)),
        ):
            worst, same = 0.0, True
            if exam.lab.is_exact:
                same, detail = exam.judge(course, temp)
            else:
                worst, detail = exam.says(course)
            where = exam.context, name, temp
            yield exam.finding("speculative", *where, worst=worst, is_same=same, detail=detail)


def _by_ngrams(exam: Examiner, temp: float) -> Course:
    engine = exam.engine(drafter="ngram", speculate="always", temp=temp)
    course = Course(engine.session())
    course.session.sync(exam.prompt)
    course.decode(exam.context + LENGTH)
    return course


def _half_wrong(exam: Examiner, temp: float, truth: list[int]) -> Course:
    course = Course(exam.engine(temp=temp).session())
    course.session.sync(exam.prompt)
    vocab, size = exam.lab.engine.token_limit, exam.lab.matrix.block
    while (pos := course.session.pos) < len(truth):
        follows = truth[pos + 1 : pos + size]
        right = pos % size
        course.session.step(size, follows[:right] + [(t + 1) % vocab for t in follows[right:]])
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
    course = Course(engine.session())
    session = course.session
    session.sync(exam.prompt)
    course.decode(exam.context + LENGTH)
    accepted, proposed = session.stats.accepted, session.stats.proposed
    share = accepted / proposed if proposed else 0.0
    if exam.lab.is_exact:
        worst, (same, detail) = 0.0, exam.judge(course)
        same = same and share == 1
    else:
        worst, detail = exam.says(course)
        same = share > SELF_DRAFT_SHARE
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
    engine = lab.engine
    windows = [window(cache) for cache in Reference(lab.engine.model).caches()]
    long = max(engine.chunk_tokens, *windows) + engine.settings.horizon_tokens + 64
    room = (engine.context_tokens or long + LENGTH + ONWARD) - LENGTH - ONWARD
    return sorted({min(n, room) for n in (16, 96, long)})


def window(cache: Any) -> int:
    """Positions that a cache looks back on, where that is limited; else 0."""
    sizes = ("max_size", "chunk_size", "window_size")
    parts = [window(part) for part in getattr(cache, "caches", ())]
    return max([getattr(cache, name, 0) for name in sizes] + parts)


def examine(lab: Lab, wanted: Sequence[int], case: str | None = None) -> Iterator[Finding]:
    """All findings, from short contexts to long ones; with `case`, only that one."""
    names = list(CHECKS)
    if case is not None:
        names, wanted = _parse(case)
    engine = lab.engine
    reference = Reference(engine.model, engine.settings.kv_bits, engine.settings.kv_group_size)
    for context in wanted:
        lab.refuse_beyond(context + LENGTH + ONWARD)
        exam = Examiner(lab, reference, context)
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
