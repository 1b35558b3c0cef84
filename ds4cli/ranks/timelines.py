"""A timeline whose moves the other ranks do too, and what does them there.

Each rank has its own layers, horizon and checkpoints; rank 0 decides, and tells what it does before
it does it. A step is one message: what leads to a model call waits for that call.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ds4cli.errors import RankError, StateError
from ds4cli.models.parts import embedding_rows
from ds4cli.ranks.group import Following, Group, Leading
from ds4cli.rewind import storage
from ds4cli.rewind.plan import RewindPlan
from ds4cli.rewind.timeline import Limits, Timeline


class LeadingTimeline(Timeline):
    """Rank 0's side. It computes with this rank's part of the model, as the others do."""

    def __init__(self, group: Leading, *args: Any, **kwargs: Any):
        self._group, self._is_told, self._is_recording = group, False, True
        self._name("new")
        super().__init__(*args, **kwargs)
        self._ids = embedding_rows(self.model)

    def _name(self, *how: Any) -> None:
        """A number for the others to know it by; they forget it when it is gone."""
        self._number = self._group.number()
        self._group.tell(*how, self._number)
        weakref.finalize(self, self._group.tell, "drop", self._number).atexit = False

    @contextmanager
    def _telling(self, *move: Any, now: bool = False) -> Iterator[None]:
        """Around a move that the others do too, unless it is a part of one. now: they do it while
        this rank does it, since both wait for each other."""
        if self._is_told:
            yield
            return
        self._is_told = True
        try:
            with self._group.together():
                self._group.tell(move[0], self._number, *move[1:])
                if now:
                    self._group.flush()
                yield
        finally:
            self._is_told = False

    @property
    def recording(self) -> bool:
        """Whether what going back needs is kept."""
        return self._is_recording

    @recording.setter
    def recording(self, value: bool) -> None:
        if value != self._is_recording:
            self._group.tell("record", self._number, value)
        self._is_recording = value

    def feed(
        self, tokens: list[int] | mx.array, *, record: bool = True, inner_every: int = 0
    ) -> mx.array:
        """As a timeline's; a token that is not known yet reaches the others in the graph."""
        if isinstance(tokens, mx.array):
            known: Any = len(tokens)
            tokens = self._group.spread(tokens, self._ids)
        else:
            known = tokens
        with self._telling("feed", known, record, inner_every):
            return super().feed(tokens, record=record, inner_every=inner_every)

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """As a timeline's."""
        with self._telling("evaluate", now=True):
            _start_token(self._now.open[-1].feed)
            super().evaluate(*arrays, wait=wait)

    def abort(self) -> None:
        """As a timeline's."""
        if self.open_blocks:
            with self._telling("abort"):
                super().abort()

    def commit(self, rows: int) -> list[int]:
        """As a timeline's."""
        with self._telling("commit", rows, now=self._feeds_again(rows)):
            return super().commit(rows)

    def _feeds_again(self, rows: int) -> bool:
        """Whether committing so many rows takes another model call."""
        block = self._now.open[0]
        is_cut = rows < len(block.feed)
        return is_cut and block.tape is None and bool(self._now.layers.recurrent)

    def checkpoint(self, kind: str) -> None:
        """As a timeline's."""
        with self._telling("checkpoint", kind):
            super().checkpoint(kind)

    def plan(self, pos: int, *, needs_row: bool = True) -> RewindPlan:
        """As a timeline's: a way that every rank has. Where they keep more or less than others,
        that is to read all again."""
        own = super().plan(pos, needs_row=needs_row)
        digest = digest_of(self._now.known[:pos])
        answers = self._ask("plan", pos, needs_row, digest)
        for rank, answer in answers.items():
            if answer is None:
                raise RankError(f"rank {rank} stands in another text than rank 0")
        if all(tuple(way) == (own.source, own.base) for way in answers.values()):
            return own
        return self._from_nothing(own)

    def _from_nothing(self, step: RewindPlan) -> RewindPlan:
        forwards = len(self._call_sizes(0, step.pos))
        return replace(step, source="rebuild", base=0, checkpoint=None, forwards=forwards)

    def _move(self, step: RewindPlan) -> None:
        with self._telling("move", step.source == "rebuild"):
            super()._move(step)

    def _feed_chunk(self, tokens: list[int], record: bool) -> None:
        with self._telling("chunk", tokens, record, now=True):
            super()._feed_chunk(tokens, record)

    def fork(self, limits: Limits | None = None) -> LeadingTimeline:
        """As a timeline's."""
        self.abort()
        twin = super().fork(limits)
        assert isinstance(twin, LeadingTimeline)
        twin._name("fork", self._number, None if limits is None else vars(limits))
        return twin

    def write(self, path: str | Path, fingerprint: str) -> None:
        """Write each rank's part beside its own copy of `path`; this rank's comes last."""
        self.abort()
        self._refuse(self._ask("write", str(Path(path).absolute()), fingerprint))
        super().write(path, fingerprint)

    def read(self, path: str | Path, fingerprint: str) -> None:
        """As a timeline's: every rank reads its part, and all have to be of one text."""
        state = storage.read(path, fingerprint)
        digest = digest_of(state["tokens"])
        self._refuse(self._ask("read", str(Path(path).absolute()), digest, fingerprint))
        with self._group.together():
            self._group.tell("stand", self._number)
            self._group.flush()
        problem = None
        try:
            self._load(path, state)
        except StateError as error:
            problem = error
        with self._group.together():
            answers = self._group.answers()
        if problem is not None:
            raise problem
        self._refuse(answers)

    def _ask(self, name: str, *rest: Any) -> dict[int, Any]:
        """What each of the others answers to a move."""
        with self._group.together():
            self._group.tell(name, self._number, *rest)
            self._group.flush()
            return self._group.answers()

    def _refuse(self, answers: dict[int, str]) -> None:
        """StateError for what another rank could not do."""
        for rank, problem in answers.items():
            if problem:
                raise StateError(f"rank {rank}: {problem}")


class FollowingTimeline(Timeline):
    """The others' side: one method a move, named as it is told."""

    def __init__(self, group: Following, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._group, self._ids = group, embedding_rows(self.model)
        self._planned: RewindPlan | None = None
        self._read_state: tuple[Path, dict[str, Any]] | None = None

    def do_record(self, value: bool) -> None:
        """Keep what going back needs, or do not."""
        self.recording = value

    def do_feed(self, tokens: list[int] | int, record: bool, inner_every: int) -> None:
        """Open a block. tokens: how many, where they are not known yet."""
        if isinstance(tokens, int):
            known: Any = self._group.spread(mx.zeros((tokens,), mx.int32), self._ids)
        else:
            known = tokens
        self.feed(known, record=record, inner_every=inner_every)

    def do_evaluate(self) -> None:
        """Compute the newest block; what follows need not wait for it."""
        _start_token(self._now.open[-1].feed)
        self.evaluate(wait=False)

    def do_abort(self) -> None:
        """Undo the open blocks."""
        self.abort()

    def do_commit(self, rows: int) -> None:
        """Publish the first rows of the oldest block."""
        self.commit(rows)

    def do_checkpoint(self, kind: str) -> None:
        """Keep a checkpoint."""
        self.checkpoint(kind)

    def do_plan(self, pos: int, needs_row: bool, digest: str) -> tuple[str, int] | None:
        """Its own way to `pos`; None where it stands in another text."""
        if pos > self._now.end or digest_of(self._now.known[:pos]) != digest:
            return None
        self._planned = self.plan(pos, needs_row=needs_row)
        return self._planned.source, self._planned.base

    def do_move(self, rebuild: bool) -> None:
        """Go where it planned to go."""
        assert self._planned is not None, "a move is planned first"
        step = self._planned
        self._move(replace(step, source="rebuild", base=0, checkpoint=None) if rebuild else step)

    def do_chunk(self, tokens: list[int], record: bool) -> None:
        """One call of a long feed."""
        self._feed_chunk(tokens, record)

    def do_write(self, path: str, fingerprint: str) -> str:
        """Write this rank's part. What went wrong, in words."""
        try:
            self.write(part_of(path, self._group.rank), fingerprint)
        except StateError as error:
            return error.message
        return ""

    def do_read(self, path: str, digest: str, fingerprint: str) -> str:
        """Read this rank's part, without going there yet. What went wrong, in words."""
        part = part_of(path, self._group.rank)
        try:
            state = storage.read(part, fingerprint)
        except StateError as error:
            return error.message
        if digest_of(state["tokens"]) != digest:
            return f"session file `{part}` holds another text than rank 0's"
        self._read_state = part, state
        return ""

    def do_stand(self) -> str:
        """Go where what was read stands. What went wrong, in words."""
        assert self._read_state is not None, "a file is read first"
        (path, state), self._read_state = self._read_state, None
        try:
            self._load(path, state)
        except StateError as error:
            return error.message
        return ""


def maker(group: Group) -> Callable[..., Timeline]:
    """What makes the timelines of the model that `group` holds."""
    if isinstance(group, Leading):
        return partial(LeadingTimeline, group)
    assert isinstance(group, Following), "there is no third kind"
    return partial(FollowingTimeline, group)


def _start_token(feed: list[int] | mx.array) -> None:
    """Let a token that is not known yet be on its way before the call on it. The last stage of a
    pipeline does not need it to begin, and ranks that wait for each other need one order."""
    if isinstance(feed, mx.array):
        mx.async_eval(feed)


def digest_of(tokens: Sequence[int]) -> str:
    """Stands for a text."""
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=8).hexdigest()


def part_of(path: str, rank: int) -> Path:
    """Where a rank keeps its part of what rank 0 keeps at `path`, on its own machine."""
    return Path(f"{path}.rank{rank}")
