"""What a loaded model can do: how each kind of layer goes back, and what that costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ds4cli.timeline import Timeline


@dataclass(frozen=True)
class LayerKind:
    """All layers of one cache kind: how many, how they go back."""

    kind: str
    count: int
    how: str


@dataclass(frozen=True)
class Capabilities:
    """How a model rewinds.

    layers: per cache kind. recurrences: what the tape replays. max_rollback: positions that are
    always free to go back to (None: any depth). refused: what this model cannot do, and why.
    """

    layers: list[LayerKind]
    recurrences: list[str]
    max_rollback: int | None
    refused: list[str]

    def __str__(self) -> str:
        lines = [f"{layer.count} x {layer.kind}: {layer.how}" for layer in self.layers]
        if self.recurrences:
            lines.append("replayed recurrences: " + ", ".join(self.recurrences))
        free = "any depth" if self.max_rollback is None else f"the last {self.max_rollback} tokens"
        return "\n".join([*lines, f"free to go back: {free}", *self.refused])


def survey(timeline: Timeline, recorder: Any) -> Capabilities:
    """Read the capabilities off an empty timeline."""
    counts = Counter(a.kind for a in timeline.adapters)
    how = {a.kind: a.describe() for a in timeline.adapters}
    layers = [LayerKind(kind, n, how[kind]) for kind, n in counts.items()]
    recurrences = list(recorder.families) if recorder is not None else []
    rollback = None if timeline.can_cut else timeline.limits.horizon_tokens
    return Capabilities(layers, recurrences, rollback, [])
