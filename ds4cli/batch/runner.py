"""Plans the items of a batch, has them answered, and puts the results where they belong."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds4cli import generate
from ds4cli.batch import replies
from ds4cli.batch.desk import Answer, Choice, Desk, Job, PlannedJob
from ds4cli.batch.grouping import branch_points, shared_lengths, trie_order
from ds4cli.batch.progress import BatchProgress, Tally
from ds4cli.batch.requests import Item, Warn, conversation, is_continued
from ds4cli.batch.results import Results
from ds4cli.errors import DS4Error, Interrupted, UsageError

if TYPE_CHECKING:
    from ds4cli.batch import Blocks
    from ds4cli.batch.others import Given, Others
    from ds4cli.engine.engine import Engine
    from ds4cli.generate import Completion
    from ds4cli.settings import Settings
    from ds4cli.structured.guards import AnyGuard
    from ds4cli.structured.wanted import Wanted
    from ds4cli.text.chat_template import ChatTemplate
    from ds4cli.text.tokenizer import Vocabulary
    from ds4cli.tools import Tool


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

    def is_guarded(self, item: Item) -> bool:
        """Whether something watches the item's answer."""
        return bool(self.tools_of(item)) or self.form_of(item) is not None


class Runner:
    """Has steps answered at a desk and puts the results. cancel: whether the user wants to stop.
    fail_fast: begin no line after one failed. others: ranks that answer some of them.
    """

    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        results: Results | Given,
        cancel: Callable[[], bool],
        desk: Desk,
        fail_fast: bool = False,
        others: Others | None = None,
    ):
        self.engine, self.planner, self.results = engine, planner, results
        self.cancel, self.desk = cancel, desk
        self.tally = Tally()
        self._fail_fast, self._others = fail_fast, others
        self._failed: Item | None = None  # the first one, if no further line is to be begun
        self._ready: list[Choice] = []  # about to be begun
        self._held: Choice | None = None  # what there was no memory for yet
        self._is_last = False  # no line comes any more
        self._made_with = replies.made_with(planner.settings, planner.tools)

    def run(self, blocks: Blocks, progress: BatchProgress) -> None:
        """Answer all items. Interrupted if the user stops it; the lines in work are dropped."""
        self._progress, self._todo = progress, self._steps(blocks)
        choices = self._choices()
        with closing(self.desk):
            while self._hand_out() | self._begin_some(choices) or self.desk.writing:
                self._go_on()
                self._take_in()
                if self.cancel():
                    raise Interrupted("stopped")
        if self.cancel():
            raise Interrupted("stopped")
        if self._failed is not None:
            where = f"line {self._failed.number}"
            raise DS4Error(f"stopped at {where}, which failed", self.results.resume_hint)

    # -- what is to be done -----------------------------------------------------------------------

    def _steps(self, blocks: Blocks) -> Iterator[PlannedJob | None]:
        """What is to be answered, in working order; None where the next line has not come yet."""
        while self._failed is None:
            is_busy = self.desk.writing or self._ready or self._are_others_busy
            block = blocks.take(wait=not is_busy)
            if block is None:
                break
            if not block:
                yield None
            todo = {item.number for item in block if not self.results.expect(item)}
            self.tally.kept += len(block) - len(todo)
            for step in self._planned(block, todo):
                yield step
                if self._failed is not None:
                    break
        self._is_last = True

    def _planned(self, block: list[Item], todo: set[int]) -> Iterator[PlannedJob]:
        if not todo:
            self.planner.skip(block)
            return
        for step in self.planner.steps(block):
            if step.job.item.number in todo:
                yield step

    def _choices(self) -> Iterator[Choice | None]:
        """What is to be written here; None where there is nothing yet."""
        for step in self._todo:
            if step is None:
                yield None
            elif not self._is_refused(step):
                yield from self._choices_of(step)

    def _is_refused(self, step: PlannedJob) -> bool:
        """Whether the step cannot be answered; that is its result then."""
        if step.job.error:
            self._fail(Answer(step), UsageError(step.job.error))
        return bool(step.job.error)

    def _choices_of(self, step: PlannedJob) -> Iterator[Choice]:
        answer = Answer(step)
        answer.settings = step.job.item.settings(self.planner.settings)
        answer.is_raw = self.planner.is_raw(step.job.item)
        answer.is_guarded = self.planner.is_guarded(step.job.item)
        for index in range(step.job.item.n):
            yield Choice(answer, index)

    def _begin_some(self, choices: Iterator[Choice | None]) -> bool:
        """Begin what there is room for; False where nothing is left to begin."""
        self._fetch(choices)
        ready, self._ready = self._ready, []
        self.tally.read_tokens += self.desk.read_together([choice.answer for choice in ready])
        for choice in ready:
            if not choice.answer.has_failed and not self.cancel():
                self._guarded(choice, self._begin)
        return not self._is_last or self._held is not None

    def _fetch(self, choices: Iterator[Choice | None]) -> None:
        """Take in what there is room for, and has come."""
        while not self.cancel() and self.desk.has_room(self._ready):
            choice, self._held = self._held or next(choices, None), None
            if choice is None:
                break
            if not self.desk.fits(choice, self._ready):
                self._held = choice
                break
            self._ready.append(choice)

    def _begin(self, choice: Choice) -> None:
        answer = choice.answer
        thinks = not answer.is_raw and generate.opens_thinking(self.engine, answer.prompt)
        if not answer.is_raw:
            choice.split = generate.splitter(self.engine, thinks)
        guard = self._guard(answer.item, thinks)
        self.tally.prompt_tokens += 0 if choice.index else len(answer.prompt)
        self.tally.read_tokens += self.desk.begin(choice, guard, self.cancel)

    # -- what other ranks do ----------------------------------------------------------------------

    @property
    def _are_others_busy(self) -> bool:
        return self._others is not None and self._others.are_busy

    def _hand_out(self) -> bool:
        """Give lines to ranks that are free; whether any are with them."""
        while self._others is not None and not self.cancel():
            rank = self._others.free
            step = None if rank is None else next(self._todo, None)
            if rank is None or step is None:
                break
            if not self._is_refused(step):
                self._others.give(rank, step)
        return self._are_others_busy

    def _take_in(self) -> None:
        """Put what they have answered; wait a moment for that where nothing is to be done here."""
        if self._others is None:
            return
        for item, line, counts in self._others.finished(wait=not self.desk.writing):
            self.results.put(item, line)
            for name, count in counts.items():
                setattr(self.tally, name, getattr(self.tally, name) + count)
            self.tally.answered += not counts["failed"]
            if counts["failed"]:
                self._has_failed(item)
            self._count()

    # -- what is being written --------------------------------------------------------------------

    def _go_on(self) -> None:
        """One round: an event of every choice that has one."""
        if not self.desk.writing:
            return
        for choice in self.desk.round():
            is_taken = not choice.answer.has_failed and self._guarded(choice, self.desk.take)
            if is_taken and choice.completion.finish_reason is not None:
                self._finish(choice)

    def _guarded(self, choice: Choice, work: Callable[[Choice], None]) -> bool:
        """Whether `work` on a choice was done; what it raises is its line's result."""
        try:
            work(choice)
        except Interrupted:
            raise
        except Exception as error:  # whatever a line brings about, the others are not to suffer
            self.desk.drop(choice.answer)
            self._fail(choice.answer, error)
            return False
        return True

    def _finish(self, choice: Choice) -> None:
        answer, completion = choice.answer, choice.completion
        if completion.finish_reason == "cancelled":
            raise Interrupted("stopped")
        form = self.planner.form_of(answer.item)
        if form is not None and form.kind == "json":
            completion.parsed = _value(completion)
        if answer.settings.hide_reasoning:
            completion.reasoning = ""
        answer.finished[choice.index] = completion
        if len(answer.finished) == answer.item.n:
            self._put(answer)

    def _put(self, answer: Answer) -> None:
        """All completions of a line are there."""
        prompt = len(answer.prompt)
        # The last token of a prompt is never counted: its logits may have to be computed again.
        cached = min(answer.step.shared, prompt - 1)
        body = replies.body(
            answer.item,
            [answer.finished[index] for index in range(answer.item.n)],
            model=self.engine.settings.model,
            as_text=answer.is_raw,
            usage=replies.usage(prompt, cached, answer.generated),
            fingerprint=model_fingerprint(self.engine),
            settings=self._made_with,
        )
        self.results.put(answer.item, replies.success(answer.item, body))
        self.tally.generated += answer.generated
        self.tally.answered += 1
        self._count()

    def _fail(self, answer: Answer, error: Exception) -> None:
        answer.has_failed = True
        self.results.put(answer.item, self._failure(answer.item, error))
        self.tally.failed += 1
        self._has_failed(answer.item)
        self._count()

    def _has_failed(self, item: Item) -> None:
        if self._fail_fast and self._failed is None:
            self._failed = item

    def _count(self) -> None:
        self.tally.lanes = self.desk.lanes
        self._progress.update()

    def _failure(self, item: Item, error: Exception) -> bytes:
        if isinstance(error, UsageError):
            return replies.failure(item, "invalid_request", error.message)
        if isinstance(error, DS4Error):
            return replies.failure(item, "failed", error.message)
        self.desk.begin_anew()
        return replies.failure(item, "internal_error", f"{type(error).__name__}: {error}")

    def _guard(self, item: Item, thinks: bool) -> AnyGuard | None:
        if not self.planner.is_guarded(item):
            return None
        from ds4cli.structured import guards

        return guards.make_guard(
            self.engine,
            self.planner.tools_of(item),
            self.planner.form_of(item),
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
    return f"fp_{engine.held_fingerprint[:16]}"
