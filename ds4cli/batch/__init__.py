"""`ds4cli generate --batch`: JSON lines in, JSON lines out.

lines.py     input lines from a file or a pipe
requests.py  a line -> Item, checked
grouping.py  working order, and where prompts branch
runner.py    plans items, has them answered, puts the results where they belong
desk.py      reads prompts and writes completions, one or several at a time
others.py    other ranks that answer lines
width.py     how many at a time
replies.py   output lines, and what made them
results.py   output, durable and resumable
progress.py  how far it is
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ds4cli import generate, signals, terminal
from ds4cli.batch import replies
from ds4cli.batch.desk import Desk
from ds4cli.batch.lines import Lines, file_id, open_lines, take_block
from ds4cli.batch.progress import BatchProgress
from ds4cli.batch.requests import Item, Names, Warnings, is_blank, name_key, parse
from ds4cli.batch.results import Results, open_results
from ds4cli.batch.runner import Planner, Runner, model_fingerprint
from ds4cli.batch.width import Width
from ds4cli.errors import Interrupted, UsageError
from ds4cli.settings import Settings
from ds4cli.structured.asked import inlined

if TYPE_CHECKING:
    from ds4cli.batch.others import Others
    from ds4cli.engine.engine import Engine
    from ds4cli.structured.wanted import Wanted
    from ds4cli.tools import Tool


@dataclass(frozen=True)
class BatchRequest:
    """A batch. source, output: file names, or `-`. plain: every line is a prompt.

    group: answer prompts with a common beginning one after the other. resume: keep the good results
    in `output`; force: even if other settings made them, or without `resume`, write over them.
    data_parallel: other ranks answer some of the lines.
    """

    source: str
    output: str = "-"
    plain: bool = False
    group: bool = False
    resume: bool = False
    force: bool = False
    fail_fast: bool = False
    data_parallel: bool = False
    quiet: bool = False
    verbose: bool = False


def run(request: BatchRequest, settings: Settings) -> int:
    """Check the input, load, answer. Returns the exit code: 1 if a line failed."""
    tools = generate.read_tools(settings.tools)
    form = generate.read_form(settings)
    settings = inlined(settings)
    if not request.quiet:
        generate.say_form(form)
    with ExitStack() as files:
        lines = files.enter_context(closing(open_lines(request.source)))
        source = file_id(0 if request.source == "-" else request.source)
        results = open_results(request.output, request.resume, request.force, source)
        files.enter_context(closing(results))
        items = _look_through(lines, request.plain, results)
        results.begin(replies.made_with(settings, tools))
        if items is not None and results.are_all(items):
            words = f"nothing to do: {len(items):,} of {len(items):,} are done already"
            _say(request, words if items else "nothing to do: there is no prompt in the input")
            return 0
        engine, others = _load(request, settings, tools)
        results.check_model(model_fingerprint(engine))
        total = None if items is None else len(items)
        return _answer(request, engine, others, tools, form, lines, results, total)


def _load(
    request: BatchRequest, settings: Settings, tools: Sequence[Tool]
) -> tuple[Engine, Others | None]:
    """The engine, and the ranks that answer lines too."""
    others = None
    if request.data_parallel:
        from ds4cli.batch.others import Others

        others = Others.meet(settings, request.plain)
    engine = generate.load_engine(
        settings,
        lambda vocabulary: None if others is None else others.begin(settings, tools),
        tools=tools,
        quiet=request.quiet,
        verbose=request.verbose,
        shares=others is None,
    )
    if others is not None:
        others.check(engine)
    return engine, others


def _look_through(lines: Lines, plain: bool, results: Results) -> Sequence[int] | None:
    """Check the names of all lines, or of what has arrived from a pipe; returns their keys, None
    where more may come."""
    names, keys = Names(), array("Q")
    for number, raw in lines.preview():
        if is_blank(raw):
            continue
        item = parse(number, raw, plain)
        if not names.add(item):
            raise UsageError(
                f"line {number}: `custom_id` `{item.custom_id}` is taken by an earlier line",
                "every line needs its own",
            )
        results.check(item)
        keys.append(name_key(item.custom_id))
    return None if lines.is_pipe else keys


def _answer(
    request: BatchRequest,
    engine: Engine,
    others: Others | None,
    tools: Sequence[Tool],
    form: Wanted | None,
    lines: Lines,
    results: Results,
    total: int | None,
) -> int:
    warn = partial(_say, request)
    planner = Planner(engine, engine.settings, tools, request.group, form, warn)
    with signals.Interrupts() as interrupted:
        desk = Desk(engine, Width.of(engine), warn)
        runner = Runner(engine, planner, results, interrupted, desk, request.fail_fast, others)
        progress = BatchProgress(runner.tally, total, not request.quiet)
        blocks = Blocks(request, engine.settings, lines, interrupted)
        try:
            with progress:
                runner.run(blocks, progress)
        except Interrupted:
            _say(request, f"stopped: {progress.summary()}")
            _say(request, results.resume_hint)
            return terminal.EXIT_INTERRUPTED
    unused = results.finish()
    _say(request, progress.summary())
    if others is not None:
        _say(request, f"other ranks answered {others.answered:,} of these lines")
    if unused:
        _say(request, f"{unused:,} results of earlier runs belong to no line of the input; "
             f"they are in `{request.output}.waiting`")  # fmt: skip
    return 1 if runner.tally.failed else 0


def _say(request: BatchRequest, text: str) -> None:
    if text and not request.quiet:
        terminal.note(text)


class Blocks:
    """The items of the input, block by block."""

    def __init__(
        self, request: BatchRequest, settings: Settings, lines: Lines, cancel: Callable[[], bool]
    ):
        self._request, self._lines, self._cancel = request, lines, cancel
        self._warnings = Warnings(partial(_say, request), settings.model)
        self._names = Names() if lines.is_pipe else None

    def take(self, wait: bool) -> list[Item] | None:
        """The next items; [] if there are none without waiting, None at the end."""
        taken = take_block(self._lines, self._request.group, self._cancel, wait)
        if not taken:
            return None if wait else []
        items = [self._item(number, raw) for number, raw in taken if not is_blank(raw)]
        if self._names is not None:
            items = [_refuse_second(item, self._names) for item in items]
        for item in items:
            self._warnings.look_at(item)
        return items

    def _item(self, number: int, raw: bytes) -> Item:
        item = parse(number, raw, self._request.plain)
        return replace(item, raw=raw) if self._request.data_parallel else item


def _refuse_second(item: Item, names: Names) -> Item:
    """The item, or an error in its place if its name came before: on a pipe, that shows late."""
    if names.add(item):
        return item
    error = f"`custom_id` `{item.custom_id}` is taken by an earlier line"
    return replace(item, custom_id=f"line-{item.number}", error=error)
