"""What going back keeps in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from ds4cli.bench.measure import Row

if TYPE_CHECKING:
    from ds4cli.bench.lab import Lab
    from ds4cli.engine.session import Session


def memory(lab: Lab) -> Iterator[Row]:
    """Bytes of the last block, horizon and checkpoints after a prompt and a reply; Python's own
    share; and the peak over the same work without any of it."""
    for context in lab.contexts(lab.matrix.generate):
        yield from _in_context(lab, context)


def _in_context(lab: Lab, context: int) -> Iterator[Row]:
    def row(case: str, way: str, nbytes: int, against: str = "", note: str = "") -> Row:
        size = (float(nbytes),)
        row = Row("memory", case, way, size, unit="bytes", context_tokens=context)
        return replace(row, against=against, note=note)

    kept, held = _kept(lab, context)
    for name, nbytes in kept.items():
        yield row("kept to go back", name, nbytes)
    yield row("kept to go back", "Python's own objects", held)
    with_it, without = _peak(lab, context, True), _peak(lab, context, False)
    note = f"{100 * (with_it / without - 1):+.1f} %"
    yield row("peak", "recording", with_it, against="not recording", note=note)
    yield row("peak", "not recording", without)


def _work(lab: Lab, context: int, recording: bool) -> Session:
    session = lab.session()
    session.recording = recording
    session.sync(lab.text.take(context))
    lab.decode(session, lab.matrix.generate)
    return session


def _kept(lab: Lab, context: int) -> tuple[dict[str, int], int]:
    """Bytes of arrays by purpose, and of the Python objects of one session, tokens included."""
    lab.text.take(1)  # what is read once for all sessions is not part of one
    tracemalloc.start()
    try:
        session = _work(lab, context, recording=True)
        return session.kept_bytes(), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _peak(lab: Lab, context: int, recording: bool) -> int:
    mx.clear_cache()
    mx.reset_peak_memory()
    _work(lab, context, recording)
    return mx.get_peak_memory()
