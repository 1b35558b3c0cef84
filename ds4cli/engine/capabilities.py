"""What a loaded model can do: how each kind of layer goes back, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from ds4cli.caches.adapter import LayerAdapter
from ds4cli.rewind.timeline import Timeline
from ds4cli.tape.recorder import Recorder


@dataclass(frozen=True)
class LayerKind:
    """All layers of one cache kind: how many, how they go back, what a position costs them all.

    bytes_per_token: cache rows, and for recurrent layers the tape's rows within the horizon; 0 for
    a window, whose size is fixed. seekable: a cursor moves them; else they are recurrent.
    """

    kind: str
    count: int
    how: str
    bytes_per_token: int
    seekable: bool = True

    def __str__(self) -> str:
        cost = f" ({self.bytes_per_token:,} bytes a token)" if self.bytes_per_token else ""
        return f"{self.count} x {self.kind}: {self.how}{cost}"


@dataclass(frozen=True)
class Capabilities:
    """How a model rewinds.

    layers: per cache kind. recurrences: what the tape replays. max_rollback: positions that are
    always free to go back to (None: any depth, by a cut). refusal: why nothing is replayed.
    """

    layers: list[LayerKind]
    recurrences: list[str]
    max_rollback: int | None
    refusal: str = ""

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers hold a state that no cursor moves."""
        return not all(layer.seekable for layer in self.layers)

    @property
    def cache_bytes_per_token(self) -> int:
        """What a position costs in the caches alone, without what is recorded to go back by."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.seekable)

    def __str__(self) -> str:
        lines = [str(layer) for layer in self.layers]
        if self.recurrences:
            lines.append("replayed recurrences: " + ", ".join(self.recurrences))
        if self.refusal:
            lines.append(self.refusal)
        free = "any depth" if self.max_rollback is None else f"the last {self.max_rollback} tokens"
        return "\n".join([*lines, f"free to go back: {free}"])


def survey(timeline: Timeline, recorder: Recorder | None, refusal: str = "") -> Capabilities:
    """Find the capabilities out with one model call on two tokens. `timeline` is used up."""
    timeline.sync([0, 0])
    kinds: dict[str, list[LayerAdapter]] = {}
    for adapter in timeline.adapters:
        kinds.setdefault(adapter.kind, []).append(adapter)
    layers = [_layer_kind(timeline, kind, adapters) for kind, adapters in kinds.items()]
    recurrences = [] if recorder is None else list(recorder.families)
    return Capabilities(layers, recurrences, timeline.free_tokens(), refusal)


def _layer_kind(timeline: Timeline, kind: str, adapters: list[LayerAdapter]) -> LayerKind:
    how, cost = adapters[0].describe(), sum(a.bytes_per_token() for a in adapters)
    if not adapters[0].seekable:
        cost = timeline.tape_bytes_per_token
        if timeline.recorder is None:
            how = "a kept state restored, what follows fed again (replay is refused)"
    return LayerKind(kind, len(adapters), how, cost, adapters[0].seekable)
