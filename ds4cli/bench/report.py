"""Rows and findings as Markdown, CSV, JSON or JSON lines, and back. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from ds4cli.bench import summary
from ds4cli.bench.files import read_text
from ds4cli.bench.measure import Change, Row, partner, ratio
from ds4cli.errors import UsageError


@dataclass(frozen=True)
class Report:
    """One run. environment: the machine and the model; warnings: why to doubt the numbers."""

    environment: dict[str, Any]
    matrix: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


# --- numbers --------------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    """A number with the digits a measurement is good for: `0.42 ms`, `1.31 s`, `12.2 MB`."""
    if unit == "bytes":
        unit, value = next(
            (
                (u, value / size)
                for u, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
                if value >= size
            ),
            ("B", value),
        )
    elif unit == "ms" and value >= 1000:
        unit, value = "s", value / 1e3
    elif unit == "ms" and value < 1:
        unit, value = "µs", value * 1e3
    return f"{digits(value)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, and no more than a thousand needs."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(row: Row) -> str:
    """Median and deviation, in one unit."""
    middle = amount(row.median, row.unit)
    if len(row.samples) < 2:
        return middle
    number, _, unit = middle.partition(" ")
    scale = {"s": 1e-3, "µs": 1e3}.get(unit, 1.0) if row.unit == "ms" else 1.0
    return f"{number} ± {digits(row.mad * scale)} {unit}"


def faster(row: Row, other: Row | None) -> str:
    """How many times faster than what it is paired with."""
    if other is None or not row.median or row.unit not in ("ms", "s"):
        return ""
    value = ratio(other, row).value
    return f"{digits(value)}x" if value >= 1.05 else f"{value:.2f}x"


def both(one: int | None, other: int | None) -> str:
    """Two counts, of both ways."""
    return "" if one is None or other is None else f"{one:,} / {other:,}"


def yes_no(match: bool | None) -> str:
    return "" if match is None else "yes" if match else "**no**"


# --- Markdown -------------------------------------------------------------------------------------

Cells = Callable[[Row, "Row | None"], str]
PAIRED: tuple[tuple[str, Cells], ...] = (
    ("faster by", lambda row, other: faster(row, other)),
    ("how", lambda row, other: row.source),
    ("model calls", lambda row, other: both(row.forwards, other.forwards if other else None)),
    ("tokens fed", lambda row, other: both(row.fed_tokens, other.fed_tokens if other else None)),
    ("same text", lambda row, other: yes_no(row.match)),
    ("note", lambda row, other: row.note),
)


def markdown(report: Report) -> str:
    """The result in sentences; tables by scenario and context; then what their words mean, notes,
    warnings and where it was measured."""
    tables = [_scenario(*key, list(rows)) for key, rows in groupby(report.rows, _section)]
    if report.findings:
        tables.append(_findings(report.findings))
    found = summary.sentences(report.rows, report.findings, lambda ms: amount(ms, "ms"))
    meanings = summary.words("\n".join(tables)) if report.rows else ""
    notes = "\n".join(report.notes)
    warnings = "\n".join(f"warning: {w}" for w in report.warnings)
    where = summary.setting(report.environment)
    parts = [found, *tables, meanings, notes, warnings, where]
    return "\n\n".join(filter(None, parts)) + "\n"


def _section(row: Row) -> tuple[str, int]:
    return row.scenario, row.context_tokens


def _scenario(name: str, context: int, rows: list[Row]) -> str:
    """Rows with their partners beside them, then those that have none."""
    pairs = [(row, other) for row in rows if (other := partner(row, rows)) is not None]
    inside = {row.key for pair in pairs for row in pair}
    alone = [[row.case, row.way, spread(row)] for row in rows if row.key not in inside]
    parts = [f"### {name}, context {context:,}"]
    parts += [_pairs(pairs)] if pairs else []
    parts += [table(["case", "what", "amount"], alone)] if alone else []
    return "\n\n".join(parts)


def _pairs(pairs: list[tuple[Row, Row]]) -> str:
    cells = [[make(*pair) for _, make in PAIRED] for pair in pairs]
    used = [i for i in range(len(PAIRED)) if any(line[i] for line in cells)]
    way, against = pairs[0][0].way, pairs[0][1].way
    lines = [
        [row.case, spread(row), spread(other), *(line[i] for i in used)]
        for (row, other), line in zip(pairs, cells, strict=True)
    ]
    return table(["case", way, against, *(PAIRED[i][0] for i in used)], lines)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _findings(findings: Sequence[Any]) -> str:
    lines = []
    for (context, name), group in groupby(findings, lambda f: (f.context, f.check)):
        cases = list(group)
        worst = max(f.worst for f in cases)
        details = next((f.detail for f in cases if f.detail), "")
        good = all(f.is_ok for f in cases)
        numbers = f"{worst:.1e}", f"{cases[0].limit:.1e}"
        lines.append([name, f"{context:,}", str(len(cases)), *numbers, yes_no(good), details])
    head = ["check", "context", "cases", "largest difference", "allowed", "holds", "note"]
    return "### check\n\n" + table(head, lines)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def live(row: Row) -> str:
    """One line, for when a row has just been measured."""
    calls = "" if row.forwards is None else f", {row.forwards} calls, {row.fed_tokens} tokens fed"
    where = f"{row.scenario} at {row.context_tokens:,}: {row.case}, {row.way}"
    mismatch = ", OTHER TEXT" if row.match is False else ""
    return f"{where}: {spread(row)}{calls}{mismatch}"


def changes(found: Sequence[Change]) -> str:
    """A comparison with an older run."""
    lines = [
        [
            c.row.scenario, c.row.case, c.row.way, spread(c.old), spread(c.row),
            f"{c.ratio.value:.2f} ± {c.ratio.spread:.2f}", "**worse**" if c.is_worse else "",
        ]
        for c in found
    ]  # fmt: skip
    return table(["scenario", "case", "way", "before", "now", "now / before", ""], lines) + "\n"


# --- data -----------------------------------------------------------------------------------------


def row_fields(row: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    return {**asdict(row), "samples": list(row.samples), "median": row.median, "mad": row.mad}


def finding_fields(finding: Any) -> dict[str, Any]:
    """A finding as JSON has it: no number at all where the difference is not finite."""
    worst = finding.worst if isfinite(finding.worst) else None
    return {**asdict(finding), "worst": worst, "is_ok": finding.is_ok}


def as_json(report: Report) -> str:
    """Everything, all samples included."""
    whole = {
        "environment": report.environment,
        "matrix": report.matrix,
        "warnings": report.warnings,
        "notes": report.notes,
        "rows": [row_fields(row) for row in report.rows],
        "findings": [finding_fields(f) for f in report.findings],
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def as_jsonl(report: Report) -> str:
    """One object a row or finding; each carries the environment."""
    whole = json.loads(as_json(report))
    lines = [*whole["rows"], *whole["findings"]]
    shared = {"environment": whole["environment"], "matrix": whole["matrix"]}
    return "".join(json.dumps({**line, **shared}, ensure_ascii=False) + "\n" for line in lines)


def as_csv(report: Report) -> str:
    """One line a row or finding; samples separated by blanks."""
    whole = json.loads(as_json(report))
    lines = whole["rows"] or whole["findings"]
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            samples = " ".join(map(str, line.get("samples", ())))
            writer.writerow({**line, **({"samples": samples} if "samples" in line else {})})
    return out.getvalue()


FORMATS: dict[str, Callable[[Report], str]] = {
    "md": markdown,
    "csv": as_csv,
    "json": as_json,
    "jsonl": as_jsonl,
}


def read(path: Path) -> Report:
    """A report that `as_json` wrote. UsageError for anything else."""
    text = read_text(path)
    try:
        whole = json.loads(text)
        return Report(whole["environment"], rows=[_row(fields) for fields in whole["rows"]])
    except (KeyError, TypeError, ValueError):
        hint = "write one with `-o json --output FILE`"
        raise UsageError(f"`{path}` is not a report of rewind-bench in JSON", hint) from None


def _row(fields: dict[str, Any]) -> Row:
    known = {name: fields[name] for name in Row.__dataclass_fields__ if name in fields}
    return Row(**{**known, "samples": tuple(known["samples"])})


def unlike(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two environments, in words."""
    keys = [key for key in old if key in new and old[key] != new[key]]
    return [f"{key} was `{_plain(old[key])}`, is `{_plain(new[key])}`" for key in keys]
