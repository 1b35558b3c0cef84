"""Back inside the last accepted block, within the horizon, and deeper; against reading it all."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from ds4cli.bench.measure import Row, Sample, timed

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab

STEP = "one token decoded"


def rewind(lab: Lab) -> Iterator[Row]:
    """A prompt is read, a reply decoded in full blocks, and the session goes back by each distance
    and forward again."""
    for context in lab.contexts(lab.matrix.tail):
        yield from _in_context(lab, context)


def _in_context(lab: Lab, context: int) -> Iterator[Row]:
    matrix = lab.matrix
    trials = _Trials(lab, context)
    deeper = sorted({d for d in matrix.distances if matrix.block < d < context})
    for trial in lab.trials():
        trials.run([*range(1, matrix.block + 1), *deeper], trial)
    for distance in trials.back:
        yield from trials.rows(distance)
    yield timed(trials.step, "rewind", STEP, "decode", context_tokens=context)


class _Trials:
    """Samples by distance.

    A rebuild inside the block reads all but the same few tokens whatever the row, so only the
    block's start is rebuilt, and its time stands for all of them.
    """

    def __init__(self, lab: Lab, context: int):
        self.lab, self.context = lab, context
        self.truth = lab.truth(lab.text.take(context), lab.matrix.tail)
        self.session = lab.session(self.truth[:context])
        self.back: dict[int, list[Sample]] = {}
        self.rebuilt: dict[int, list[Sample]] = {}
        self.match: dict[int, bool] = {}
        self.step: list[Sample] = []

    def run(self, distances: list[int], trial: int) -> None:
        """One trial; every distance starts from the same end."""
        session = self.session
        session.sync(self.truth[: self.context])
        self.lab.decode_blocks(session, self.truth, len(self.truth))
        for distance in distances:
            self._go_back(distance, trial)
            session.sync(self.truth)
        step = self.lab.sample(session, lambda: session.step(drafts=[]))
        if trial >= 0:
            self.step.append(step)

    def _go_back(self, distance: int, trial: int) -> None:
        lab, session = self.lab, self.session
        pos = len(self.truth) - distance
        back = lab.sample(session, lambda: session.rewind(pos))
        if trial >= 0:
            self.back.setdefault(distance, []).append(back)
        fresh = None
        if distance >= lab.matrix.block:
            fresh, rebuilt = lab.rebuild(session.tokens)
            if trial >= 0:
                self.rebuilt.setdefault(distance, []).append(rebuilt)
        if lab.is_last(trial):
            self.match[distance] = lab.agree(session, fresh or lab.session(session.tokens))

    def rows(self, distance: int) -> Iterator[Row]:
        """The pair of rows of one distance."""
        block = self.lab.matrix.block
        inside = f", {block - distance} of {block} rows kept" if distance <= block else ""
        shared = {"context_tokens": self.context, "distance_tokens": distance}
        samples = self.back[distance]
        share = median(s.seconds for s in samples) / median(s.seconds for s in self.step)
        case = f"back {distance}{inside}"
        yield timed(
            samples,
            "rewind",
            case,
            "reuse",
            against="rebuild",
            match=self.match[distance],
            note=f"{share:.2g} decode steps",
            **shared,
        )
        rebuilt = self.rebuilt[max(distance, block)]
        yield timed(rebuilt, "rewind", case, "rebuild", **shared)
