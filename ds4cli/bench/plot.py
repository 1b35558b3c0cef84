"""Pictures of what going back costs: against distance, and against the length of the context.

With matplotlib a file, without it the same as bars in the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ds4cli.bench import files
from ds4cli.bench.measure import Row
from ds4cli.bench.report import amount
from ds4cli.errors import UsageError

SUFFIXES = (".svg", ".png")
COLOURS = {"reuse": "#0072b2", "rebuild": "#d55e00"}  # told apart by colour-blind readers too
BAR = 40


def refuse(path: Path) -> None:
    """UsageError for a picture of a kind that is not made, or where none can be written."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"`--plot` cannot write `{path}`", f"use {' or '.join(SUFFIXES)}")
    files.refuse_unwritable(path)


def _is_shown(row: Row) -> bool:
    return row.scenario == "rewind" and row.way in COLOURS


def curves(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of the rewind scenario by way and context, by distance."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda r: r.distance_tokens):
        if _is_shown(row):
            found.setdefault((row.way, row.context_tokens), []).append(row)
    return found


def by_context(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of the rewind scenario by way and distance, by context; where contexts differ."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda r: r.context_tokens):
        if _is_shown(row):
            found.setdefault((row.way, row.distance_tokens), []).append(row)
    return {key: line for key, line in found.items() if len(line) > 1}


def write(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Draw `rows` to `path`; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, curves(rows), "distance_tokens", "tokens back", "context {:,}")
    _draw(right, by_context(rows), "context_tokens", "context, tokens", "{:,} back")
    left.set_ylabel("until the next token is known, ms")
    figure.suptitle(title)
    figure.savefig(path)
    return True


def _draw(
    axes: Any, lines: dict[tuple[str, int], list[Row]], x: str, label: str, legend: str
) -> None:
    styles = {
        key: style for key, style in zip(sorted({n for _, n in lines}), _styles(), strict=False)
    }
    for (way, number), rows in lines.items():
        places = [getattr(r, x) for r in rows]
        axes.errorbar(
            places,
            [r.median for r in rows],
            yerr=[r.mad for r in rows],
            color=COLOURS.get(way),
            linestyle=styles[number],
            marker="o",
            markersize=3,
            label=f"{way}, {legend.format(number)}",
        )
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.grid(True, which="major", alpha=0.3)
    if lines:
        axes.legend(fontsize="x-small")
    else:
        axes.text(0.5, 0.5, "one context only", transform=axes.transAxes, ha="center")


def _styles() -> Iterable[Any]:
    yield from ("-", "--", ":", "-.")
    while True:
        yield (0, (1, 3))


def chart(rows: Sequence[Row]) -> str:
    """Bars on a logarithmic scale, one a row: the longer, the slower."""
    shown = [r for r in rows if _is_shown(r)]
    if not shown:
        return "nothing to draw: the picture shows the scenario `rewind`"
    low = min(math.log10(max(r.median, 1e-6)) for r in shown)
    high = max(math.log10(max(r.median, 1e-6)) for r in shown)
    lines = []
    for row in sorted(shown, key=lambda r: (r.context_tokens, r.distance_tokens)):
        share = (math.log10(max(row.median, 1e-6)) - low) / ((high - low) or 1)
        bar = "█" * (1 + round(share * (BAR - 1)))
        name = f"{row.context_tokens:>7,}  -{row.distance_tokens:<6,} {row.way:8}"
        lines.append(f"{name} {bar} {amount(row.median, row.unit)}")
    return "context  back    way      (logarithmic)\n" + "\n".join(lines)
