"""What a run of rewind-bench found, in sentences, and what the words in its tables mean. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ds4cli.bench.measure import Row, failed, mad, partner

DISTANCE_TOKENS = 64  # what the first sentence speaks of, or the nearest that was measured

WORDS = {
    "reuse": "going back with what the session kept",
    "rebuild": "reading everything up to there again",
    "block": "inside the last accepted block: no model call",
    "horizon": "within the recorded positions: no model call",
    "trim": "every layer of this model can simply be cut",
    "frontier": "an older checkpoint is restored, and what follows it read again",
    "decode steps": "the time as a multiple of one decoded token",
    "model calls": "how often the model ran, first way / second way",
    "tokens fed": "how many tokens it read then, first way / second way",
    "same text": "whether what is written afterwards is what a fresh session writes",
    "recording": "keeping what going back needs, while a reply is written",
}


def sentences(rows: Sequence[Row], findings: Sequence[Any], show: Callable[[float], str]) -> str:
    """The result in a line or two. show: milliseconds in words."""
    if findings:
        return _proof(findings)
    parts = [part for part in (_going_back(rows, show), _recording(rows)) if part]
    first = "; ".join(parts)
    said = [f"{first[0].upper()}{first[1:]}."] if first else []
    if compared := [row for row in rows if row.match is not None]:
        wrong = len(failed(rows))
        said.append(
            f"After {wrong} of {len(compared)} measurements the text was another."
            if wrong
            else "The text afterwards was the same every time."
        )
    return " ".join(said)


def _proof(findings: Sequence[Any]) -> str:
    bad = sum(not finding.is_ok for finding in findings)
    if bad:
        return f"{bad} of {len(findings)} cases do not hold: going back changes something."
    return f"All {len(findings)} cases hold: going back changed nothing."


def _going_back(rows: Sequence[Row], show: Callable[[float], str]) -> str:
    back = [row for row in rows if (row.scenario, row.way) == ("rewind", "reuse")]
    if not back:
        return ""
    row = min(back, key=lambda r: (abs(r.distance_tokens - DISTANCE_TOKENS), -r.context_tokens))
    other = partner(row, rows)
    steps = [r for r in rows if r.way == "decode" and r.context_tokens == row.context_tokens]
    share = _share(row.median / steps[0].median) if steps else ""
    tokens = f"{row.distance_tokens:,} token" + ("" if row.distance_tokens == 1 else "s")
    instead = f" instead of {show(other.median)}" if other is not None else ""
    return f"going back {tokens} takes {share}({show(row.median)}){instead}"


def _share(steps: float) -> str:
    """A time as a multiple of one decoded token."""
    return f"{steps:.2g} of a decoded token " if steps < 1 else f"{steps:.2g} decoded tokens "


def _recording(rows: Sequence[Row]) -> str:
    on = next((r for r in rows if (r.scenario, r.way) == ("control", "recording")), None)
    off = partner(on, rows) if on is not None else None
    if on is None or off is None:
        return ""
    percents = [100 * (a / b - 1) for a, b in zip(on.samples, off.samples, strict=True)]
    if median(percents) < mad(percents):
        return f"recording costs less than can be told here (± {mad(percents):.1f} %)"
    return f"recording costs {median(percents):.1f} %"


def words(text: str) -> str:
    """What the words in a report mean, those that occur in it."""
    return "\n".join(f"- {word}: {meaning}" for word, meaning in WORDS.items() if word in text)


def setting(environment: dict[str, Any]) -> str:
    """Machine and model in a line; `-o json` has the rest."""
    known = {name: value for name, value in environment.items() if value not in (None, "", [])}
    parts = [str(known[name]) for name in ("model", "chip", "backend") if name in known]
    parts += [f"{known['cores']} cores"] if "cores" in known else []
    parts += [", ".join(known["weights"])] if "weights" in known else []
    packages = [f"{name} {known[name]}" for name in ("ds4cli", "mlx", "mlx_lm") if name in known]
    return "Measured on " + " · ".join([*parts, *packages])
