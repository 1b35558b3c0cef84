"""`ds4cli rewind-bench`: measures going back on the user's model and machine, and proves it.

What the user gave is checked before anything is loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli import settings as options
from ds4cli import signals, terminal
from ds4cli.bench import files, machine, measure, plot, report, trace
from ds4cli.bench.matrix import Matrix, numbers
from ds4cli.bench.matrix import read as read_matrix
from ds4cli.bench.scenarios import SCENARIOS, scenario
from ds4cli.errors import Interrupted, UsageError
from ds4cli.settings import OPTIONS, SAMPLING, SPECULATION, Settings

if TYPE_CHECKING:
    from ds4cli.bench.check import Finding
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.engine import Engine

CUT_NOTE = (
    "Every layer of this model keeps every row: going back is a cut, at any depth, and a cut is "
    "all there is. No tape and no checkpoints is kept for it."
)


@dataclass(frozen=True)
class BenchRequest:
    """What to measure or check, and what to do with the result. case: one case of `--check`.
    own_contexts: the user named the contexts; else a check takes those that it needs."""

    scenarios: Sequence[str] = ()
    matrix: Matrix = field(default_factory=Matrix)
    check: bool = False
    case: str | None = None
    own_contexts: bool = False
    trace: Path | None = None
    form: str = "md"
    output: Path | None = None
    compare: Path | None = None
    tolerance: float = 0.1
    plot: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in self.scenarios:
            if name not in SCENARIOS:
                hint = options.nearest(name, SCENARIOS)
                known = ", ".join(SCENARIOS)
                raise UsageError(f"there is no scenario `{name}`", hint or f"choose from {known}")
        if self.form not in report.FORMATS:
            known = ", ".join(report.FORMATS)
            raise UsageError(f"`--format` cannot be `{self.form}`", f"choose from {known}")
        for path, refuse in (
            (self.plot, plot.refuse),
            (self.output, files.refuse_unwritable),
            (self.trace, trace.read),
        ):
            if path is not None:
                refuse(path)
        _ = self.earlier  # read now, or refused

    @cached_property
    def earlier(self) -> report.Report | None:
        """What to compare with, as it was before this run."""
        return report.read(self.compare) if self.compare else None


def sizes(path: Path | None, quick: bool, given: dict[str, Any]) -> Matrix:
    """The matrix of one run; `given` holds the flags, None where one was not given."""
    lists = {name: numbers(given[name], name) for name in ("contexts", "distances")}
    matrix = read_matrix(path, quick=quick, given={**given, **lists})
    longest = max(matrix.contexts)
    if too_deep := [d for d in lists["distances"] or () if d >= longest]:
        hint = f"the longest context has {longest} tokens: `--context` gives another"
        raise UsageError(f"`--depth` cannot be `{too_deep[0]}`", hint)
    return matrix


def settings_for(chosen: Settings) -> Settings:
    """The user's settings, with sampling and speculation at what the scenarios need."""
    ours = [name for name, option in OPTIONS.items() if option.panel in (SAMPLING, SPECULATION)]
    plain = {name: getattr(options.defaults(), name) for name in ours}
    return replace(chosen, **{**plain, "drafter": "none"})


def run(engine: Engine, request: BenchRequest) -> int:
    """Measure or check, print, compare. Returns the exit code."""
    from ds4cli.bench.lab import Lab

    lab = Lab(engine, request.matrix, trace=request.trace)
    before = machine.doubts()
    try:
        with signals.interrupts_raised():
            found = _checked(lab, request) if request.check else _measured(lab, request)
    except KeyboardInterrupt:
        raise Interrupted("stopped before the end; nothing was written") from None
    notes = [*found.notes, *([CUT_NOTE] if lab.cuts else [])]
    found = replace(found, notes=notes, warnings=[*before, *found.warnings])
    _write(report.FORMATS[request.form](found), request.output)
    _draw(found.rows, request)
    failed = _failures(found, request, engine.settings)
    worse = request.earlier is not None and _compared(request.earlier, found, request)
    return 1 if failed or worse else 0


def _measured(lab: Lab, request: BenchRequest) -> report.Report:
    rows = []
    for name in request.scenarios or SCENARIOS:
        for row in scenario(name)(lab):
            rows.append(row)
            _note(report.live(row), request)
    environment = machine.environment(lab.engine)
    warnings = measure.doubts(rows)
    return report.Report(environment, asdict(request.matrix), rows, warnings=warnings)


def _checked(lab: Lab, request: BenchRequest) -> report.Report:
    from ds4cli.bench import check

    findings: list[Finding] = []
    contexts = lab.matrix.contexts if request.own_contexts else check.contexts(lab)
    for finding in check.examine(lab, contexts, request.case):
        findings.append(finding)
        if not finding.is_ok:
            _note(f"does not hold: {finding.case} {finding.detail}", request)
    if not findings:
        raise UsageError(f"there is no case `{request.case}`", "take one that a check printed")
    return report.Report(machine.environment(lab.engine), findings=findings)


def _failures(found: report.Report, request: BenchRequest, chosen: Settings) -> bool:
    """Say on stderr what is wrong, the smallest case as a command; whether anything is."""
    for row in measure.failed(found.rows):
        terminal.fail(f"other text after going back: {row.scenario}, {row.case}, {row.way}")
    if not found.findings:
        return bool(measure.failed(found.rows))
    from ds4cli.bench.check import smallest

    bad = smallest(found.findings)
    if bad is not None:
        count = sum(not f.is_ok for f in found.findings)
        terminal.fail(f"`{count}` of {len(found.findings)} cases do not hold", _again(bad, chosen))
    return bad is not None


def _again(finding: Finding, chosen: Settings) -> str:
    """The command that repeats one case."""
    words = ["ds4cli", "rewind-bench", "-m", chosen.model, "--check", "--case", finding.case]
    for name, option in OPTIONS.items():
        value = getattr(chosen, name)
        changed = value != getattr(options.defaults(), name)
        if changed and name != "model" and option.panel not in (SAMPLING, SPECULATION):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return f"the smallest: {shlex.join(words)}"


def _compared(old: report.Report, new: report.Report, request: BenchRequest) -> bool:
    """Print the comparison; whether something got worse."""
    for line in report.unlike(old.environment, new.environment):
        terminal.note(f"not like before: {line}")
    for row in measure.missing(old.rows, new.rows):
        terminal.note(f"not measured now: {row.scenario}, {row.case}, {row.way}")
    changes = measure.compare(old.rows, new.rows, request.tolerance)
    if not changes:
        raise UsageError(
            f"`{request.compare}` has no row in common with this run",
            "repeat what it measured: the same scenarios and contexts",
        )
    shown = report.changes(changes)
    if request.output is not None:
        terminal.write(shown)
    elif request.form == "md":
        terminal.write(f"\n{shown}")  # right behind a line it would be no table
    else:
        terminal.show(shown)  # stdout belongs to a program
    return any(change.is_worse for change in changes)


def _draw(rows: Sequence[Any], request: BenchRequest) -> None:
    if request.plot is None:
        return
    drawn = plot.write(rows, request.plot, "going back: reuse against rebuild")
    if not drawn:
        terminal.show(plot.chart(rows))
        terminal.note('no picture was written: `pip install "ds4cli[plot]"` draws it')


def _note(text: str, request: BenchRequest) -> None:
    if not request.quiet:
        terminal.note(text)


def _write(text: str, path: Path | None) -> None:
    if path is None:
        terminal.write(text)
    else:
        files.write_text(path, text)
