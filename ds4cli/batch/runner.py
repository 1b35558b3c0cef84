"""Answers the items of a batch with one session, which goes from prompt to prompt.

What two prompts have in common is not read again: the session goes back to where they part, by a
cursor, or on hybrids and windows by a checkpoint that was left there on the way.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds4cli import generate
from ds4cli.batch import replies
from ds4cli.batch.grouping import branch_points, shared_lengths, trie_order
from ds4cli.batch.progress import BatchProgress, Tally
from ds4cli.batch.requests import Item, Warn, conversation, is_continued
from ds4cli.batch.results import Results
from ds4cli.errors import DS4Error, Interrupted, UsageError
from ds4cli.text.reasoning import ReasoningSplitter

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.generate import Completion
    from ds4cli.settings import Settings
    from ds4cli.structured.guards import AnyGuard
    from ds4cli.structured.wanted import Wanted
    from ds4cli.text.chat_template import ChatTemplate
    from ds4cli.text.tokenizer import Vocabulary
    from ds4cli.tools import Tool


@dataclass(frozen=True)
class Job:
    """An item, and its prompt's token ids; none where the item cannot be answered: see `error`."""

    item: Item
    prompt: Sequence[int] = field(default=(), repr=False)
    error: str = ""


@dataclass(frozen=True)
class PlannedJob:
    """A job in working order. shared: prompt tokens it has in common with the job before it;
    checkpoints: where later prompts branch off."""

    job: Job
    shared: int = 0
    checkpoints: Sequence[int] = ()


class Planner:
    """Turns blocks of items into steps: prompts as tokens, in working order.

    tools: those that every chat item may call unless it brings its own. wanted: the form of answers
    to items that name none. warn: told once what a template does not show.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: Settings,
        tools: Sequence[Tool],
        group: bool,
        wanted: Wanted | None = None,
        warn: Warn = lambda text: None,
    ):
        self._warn: Warn | None = warn
        self.vocabulary, self.settings, self.tools = vocabulary, settings, tools
        self.wanted = wanted
        self.group = group
        self._before: Sequence[int] = ()
        self._skipped: list[Item] = []

    def skip(self, items: list[Item]) -> None:
        """These were answered by an earlier run."""
        self._skipped = items

    def steps(self, items: list[Item]) -> list[PlannedJob]:
        """The steps of one block. What a step shares with the one before it does not depend on
        which of them an earlier run has done."""
        if self._skipped:
            skipped, self._skipped = self._skipped, []
            self.steps(skipped)
        jobs = [self.job(item) for item in items]
        good = [job for job in jobs if not job.error]
        if self.group:
            good = [good[i] for i in trie_order([job.prompt for job in good])]
            jobs = [job for job in jobs if job.error] + good
        prompts = [job.prompt for job in good]
        shared = shared_lengths(prompts, self._before)
        self._before = prompts[-1] if prompts else self._before
        if self.settings.reproducible:  # calls are cut where the request alone says
            shared = [0] * len(shared)
        plans = {
            job.item.number: PlannedJob(job, shared[i], branch_points(shared, i))
            for i, job in enumerate(good)
        }
        return [plans.get(job.item.number) or PlannedJob(job) for job in jobs]

    def job(self, item: Item) -> Job:
        """The item with its prompt. What is wrong with it becomes the job's `error`."""
        if item.error:
            return Job(item, error=item.error)
        try:
            for text in item.texts:
                self.vocabulary.check_length(text)
            tokens = self._tokens(item)
            self.vocabulary.check_context(len(tokens))
        except DS4Error as error:
            return Job(item, error=error.message)
        except Exception as error:  # whatever a tokenizer makes of it, the others are not to suffer
            return Job(item, error=f"the prompt cannot be read: {type(error).__name__}: {error}")
        if not tokens:
            return Job(item, error="the prompt became no tokens at all")
        return Job(item, array("i", tokens))

    def _tokens(self, item: Item) -> list[int]:
        if self.is_raw(item):
            assert item.prompt is not None, "a body without messages has one"
            return self.vocabulary.encode(item.prompt)
        generate.check_tools(self.vocabulary, self.tools_of(item))
        template = self._template(item)
        system, messages = conversation(item, self.settings.system)
        self._look_for_dropped(item, template.dropped_system(messages))
        draw = template.continuing if is_continued(item) else template.opening
        return list(draw(system, messages))

    @cached_property
    def _common(self) -> ChatTemplate:
        return self.vocabulary.template(self.settings, [tool.spec for tool in self.tools])

    def _template(self, item: Item) -> ChatTemplate:
        if item.tools is None:
            return self._common
        return self.vocabulary.template(self.settings, [tool.spec for tool in item.tools])

    def _look_for_dropped(self, item: Item, dropped: list[int]) -> None:
        if dropped and self._warn is not None:
            self._warn(f"line {item.number}: the chat template leaves out a later system text")
            self._warn = None

    def form_of(self, item: Item) -> Wanted | None:
        """The form of the item's answer: its own, else that of all."""
        return item.wanted if item.has_form else self.wanted

    def is_raw(self, item: Item) -> bool:
        """Whether the prompt goes to the model as it is, without a chat template."""
        return item.prompt is not None and (self.settings.raw or not item.is_chat)

    def tools_of(self, item: Item) -> Sequence[Tool]:
        """The tools that an item's answer may call."""
        if self.is_raw(item):
            return ()
        return self.tools if item.tools is None else item.tools


class Runner:
    """Answers steps, one after the other. cancel: whether the user wants to stop."""

    def __init__(
        self, engine: Engine, planner: Planner, results: Results, cancel: Callable[[], bool]
    ):
        self.engine, self.planner, self.results = engine, planner, results
        self.cancel = cancel
        self.tally = Tally()
        self.session = engine.session()
        self._made_with = replies.made_with(planner.settings, planner.tools)

    def run(self, blocks: Iterable[list[Item]], progress: BatchProgress, fail_fast: bool) -> None:
        """Answer all items. Interrupted if the user stops it; the line in work is dropped."""
        for block in blocks:
            todo = {item.number for item in block if not self.results.expect(item)}
            self.tally.kept += len(block) - len(todo)
            for step in self._steps(block, todo):
                is_good = self._do(step)
                progress.update()
                if fail_fast and not is_good:
                    raise DS4Error(
                        f"stopped at line {step.job.item.number}, which failed",
                        "go on with the same command and `--resume`",
                    )
        if self.cancel():
            raise Interrupted("stopped")

    def _steps(self, block: list[Item], todo: set[int]) -> Iterator[PlannedJob]:
        if not todo:
            self.planner.skip(block)
            return
        for step in self.planner.steps(block):
            if step.job.item.number in todo:
                yield step

    def _do(self, step: PlannedJob) -> bool:
        """Answer a step and write its line; False if it failed."""
        item = step.job.item
        try:
            line = self._answer(step)
        except Interrupted:
            raise
        except Exception as error:  # whatever a line brings about, the others are not to suffer
            self.tally.failed += 1
            self.results.put(item, self._failure(item, error))
            return False
        self.tally.answered += 1
        self.results.put(item, line)
        return True

    def _failure(self, item: Item, error: Exception) -> bytes:
        if isinstance(error, UsageError):
            return replies.failure(item, "invalid_request", error.message)
        if isinstance(error, DS4Error):
            return replies.failure(item, "failed", error.message)
        self.session = self.engine.session()
        return replies.failure(item, "internal_error", f"{type(error).__name__}: {error}")

    def _answer(self, step: PlannedJob) -> bytes:
        job, engine = step.job, self.engine
        if job.error:
            raise UsageError(job.error)
        completions, generated = self._completions(step)
        self.tally.prompt_tokens += len(job.prompt)
        self.tally.generated += generated
        # The last token of a prompt is never counted: its logits may have to be computed again.
        cached = min(step.shared, len(job.prompt) - 1)
        body = replies.body(
            job.item,
            completions,
            model=engine.settings.model,
            as_text=self.planner.is_raw(job.item),
            usage=replies.usage(len(job.prompt), cached, generated),
            fingerprint=model_fingerprint(engine),
            settings=self._made_with,
        )
        return replies.success(job.item, body)

    def _completions(self, step: PlannedJob) -> tuple[list[Completion], int]:
        """The item's completions and the tokens in them. All go out from one reading of the
        prompt, each with the noise of its own attempt."""
        job, session = step.job, self.session
        settings = job.item.settings(self.planner.settings)
        if settings.reproducible:  # nothing of what was read before may shape the calls
            session = self.session = self.engine.session()
        session.use(settings)
        made, generated = [], 0
        for attempt in range(job.item.n):
            session.attempt = attempt
            self._read(step)
            made.append(self._complete(job, settings))
            generated += session.pos - len(job.prompt)
        return made, generated

    def _read(self, step: PlannedJob) -> None:
        """Bring the session to the end of the prompt."""
        prompt, session = step.job.prompt, self.session
        report = session.sync(prompt, cancel=self.cancel, checkpoints=step.checkpoints)
        self.tally.read_tokens += report.prefilled + report.replayed
        if self.cancel():
            raise Interrupted("stopped")
        if step.job.item.n > 1:
            session.checkpoint("prompt")

    def _complete(self, job: Job, settings: Settings) -> Completion:
        split, thinks = ReasoningSplitter(None), False
        is_raw = self.planner.is_raw(job.item)
        if not is_raw:
            thinks = generate.opens_thinking(self.engine, job.prompt)
            split = generate.splitter(self.engine, thinks)
        limits: dict[str, Any] = {"max_tokens": settings.max_tokens, "stop": settings.stop}
        limits["raw"] = is_raw
        guard = self._guard(job.item, thinks)
        completion = generate.complete(self.session, split, self.cancel, None, guard, **limits)
        if completion.finish_reason == "cancelled":
            raise Interrupted("stopped")
        form = self.planner.form_of(job.item)
        if form is not None and form.kind == "json":
            completion.parsed = _value(completion)
        if settings.hide_reasoning:
            completion.reasoning = ""
        return completion

    def _guard(self, item: Item, thinks: bool) -> AnyGuard | None:
        tools, form = self.planner.tools_of(item), self.planner.form_of(item)
        if not tools and form is None:
            return None
        from ds4cli.structured import guards

        return guards.make_guard(
            self.engine,
            tools,
            form,
            thinks=thinks,
            max_repairs=self.planner.settings.max_repairs,
        )


def _value(completion: Completion) -> Any:
    """The value of a finished text that is JSON; None for any other."""
    if completion.finish_reason != "stop":
        return None
    try:
        return json.loads(completion.text)
    except ValueError:
        return None


def model_fingerprint(engine: Engine) -> str:
    """What stands for the model in results."""
    return f"fp_{engine.fingerprint[:16]}"
