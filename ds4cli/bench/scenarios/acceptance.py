"""What a partly accepted block costs, by rows kept: the tape against a second model call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds4cli.bench.measure import Row, Sample, timed

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.session import Session


def acceptance(lab: Lab) -> Iterator[Row]:
    """One block whose first drafts are right and whose others are wrong, and the one-token step
    after it, so that the state was really put at the kept row."""
    block = lab.matrix.block
    (context, *_) = lab.contexts(block + 1)
    truth = lab.truth(lab.text.take(context), block + 1)
    session = lab.session(truth[:context])
    ways = {"tape": True, "model call": False}
    samples: dict[tuple[int, str], list[Sample]] = {}
    for trial in lab.trials():
        for kept in range(1, block + 1):
            for way, recording in ways.items():
                sample, reached = _block(lab, session, truth, context, kept, recording)
                if trial >= 0 and reached:
                    samples.setdefault((kept, way), []).append(sample)
    for (kept, way), found in samples.items():
        against = "model call" if way == "tape" else ""
        case = f"{kept} of {block} rows kept"
        yield timed(found, "acceptance", case, way, against=against, context_tokens=context)


def _block(
    lab: Lab, session: Session, truth: list[int], start: int, kept: int, recording: bool
) -> tuple[Sample, bool]:
    """The sample, and whether exactly `kept` rows were kept (rounding may decide otherwise)."""
    session.rewind(start)
    session.next_token()
    session.recording = recording
    vocab = lab.engine.token_limit
    wrong = [(t + 1) % vocab for t in truth[start + kept : start + lab.matrix.block]]
    drafts = truth[start + 1 : start + kept] + wrong
    outcome = []

    def step() -> None:
        outcome.append(len(session.step(drafts=drafts).tokens))
        session.step(drafts=[])

    sample = lab.sample(session, step)
    session.recording = True
    return sample, outcome == [kept]
