"""One model, its caches and the tokens they have consumed: the only place where that state changes.

Invariants: every layer stands at `pos`; `logits` is the row that predicts the token at `pos`;
`len(tokens) == pos`. State moves forward in `commit`, once per model call and after evaluation, and
moves elsewhere in `_move`. A call that fails, in any layer, leaves everything where it was.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ds4cli.caches import LayerAdapter, adapt, build_caches, nest
from ds4cli.errors import StateError
from ds4cli.hooks import last_row
from ds4cli.hooks.taps import Taps
from ds4cli.rewind.checkpoints import Checkpoint, Checkpoints
from ds4cli.rewind.horizon import Horizon, Segment
from ds4cli.rewind.plan import Reach, RewindPlan, RewindReport, call_sizes, plan
from ds4cli.settings import MAX_BLOCK_TOKENS
from ds4cli.tape import Recorder, Tape
from ds4cli.tokens import common_prefix

# Rows between the checkpoints inside a long call, where recurrences hand out their inner states.
STOP_ROWS = 128
# Cache kinds that never drop a row.
EVERY_ROW = ("kv", "quantized kv", "concatenate")


@dataclass(frozen=True)
class Limits:
    """How far back is kept, and how a long feed is cut.

    horizon_tokens: positions reached without a model call. budget_bytes: horizon and checkpoints
    together. chunk_tokens: tokens of one prefill call.
    """

    horizon_tokens: int = 256
    budget_bytes: int = 512 << 20
    chunk_tokens: int = 512

    @property
    def slack_tokens(self) -> int:
        """Rows that a sliding window holds beyond its own length: the horizon and one block."""
        return self.horizon_tokens + MAX_BLOCK_TOKENS


@dataclass
class _Block:
    """An open model call: fed but not committed."""

    start: int
    feed: Sequence[int] | mx.array
    holds: list[Any]
    slots: list[list[mx.array | None]]
    tape: Tape | None
    logits: mx.array  # (n, V), or only the last row (1, V); lazy until `evaluate`
    hidden: list[mx.array]  # (n, H) per tapped layer

    def row(self, rows: int) -> mx.array:
        """The logits row (V,) after the first `rows` tokens of the feed."""
        return self.logits[rows - 1 - len(self.feed) + self.logits.shape[0]]


@dataclass
class Counters:
    """Model calls and tokens fed, ever; what tests and benchmarks read."""

    forwards: int = 0
    fed_tokens: int = 0


@dataclass(frozen=True)
class _Snapshot:
    holds: list[Any]
    tokens: list[int]
    redo_tokens: list[int]
    logits: mx.array | None
    last_block: tuple[int, int]
    horizon: Horizon
    checkpoints: Checkpoints
    adapters: list[LayerAdapter]
    caches: list[Any]


class Timeline:
    """One model's tokens and caches, with a horizon and checkpoints to go back by.

    model: an mlx-lm model, called as `model(tokens (1, n), cache=caches) -> logits (1, n, V)`.
    recorder: the armed tape recorder; None means that recurrent layers go back by feeding tokens.
    taps: layers that a drafter reads. observer: called with the position and, per tapped layer, the
    residual rows (n, H) of what was committed from there on.
    """

    def __init__(
        self,
        model: Any,
        recorder: Recorder | None,
        limits: Limits,
        *,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        taps: Taps | None = None,
    ):
        self.model = model
        self.recorder = recorder
        self.taps = taps
        self.observer: Callable[[int, list[mx.array]], None] | None = None
        self.limits = limits
        self.counters = Counters()
        self.recording = True
        self._kv = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
        self._logits_row_bytes = 0
        self._set_caches(build_caches(model, limits.slack_tokens, **self._kv))
        self._start_empty()

    def _set_caches(self, caches: list[Any], adapters: list[LayerAdapter] | None = None) -> None:
        self.caches = caches
        self.adapters = adapt(caches) if adapters is None else adapters
        self._recurrent = [a for a in self.adapters if not a.seekable]
        self._seekable = [a for a in self.adapters if a.seekable]
        # True when every layer keeps every row: a rewind is a cursor move, and no checkpoint helps.
        self.can_cut = all(a.kind in EVERY_ROW for a in self.adapters)

    def _start_empty(self) -> None:
        self.tokens: list[int] = []
        self.redo_tokens: list[int] = []  # tokens beyond pos whose rows still stand: redo
        self.logits: mx.array | None = None
        self.last_block = (0, 0)
        limits = self.limits
        self.horizon = Horizon(limits.horizon_tokens, limits.budget_bytes // 2, self.recorder)
        self.checkpoints = Checkpoints(limits.budget_bytes)
        self._open: list[_Block] = []  # oldest first

    @property
    def pos(self) -> int:
        return len(self.tokens)

    @property
    def _kv_kind(self) -> str:
        bits, group = self._kv["kv_bits"], self._kv["kv_group_size"]
        return "whole" if bits is None else f"{bits}-bit (groups of {group})"

    @property
    def open_blocks(self) -> int:
        """Model calls that are fed but not committed."""
        return len(self._open)

    # -- forward: one model call ------------------------------------------------------------------

    def feed(
        self,
        tokens: Sequence[int] | mx.array,
        *,
        record: bool = True,
        stop_rows: int = 0,
        again: bool = False,
    ) -> mx.array:
        """Open a block: one model call on `tokens`. Returns its logits rows (n, V), lazy.

        Nothing is published until `commit`. `record` False keeps no tape (early prefill chunks).
        `stop_rows`: keep states inside the call on the tape, so many rows apart.
        `again`: these tokens stood here before, so what was held beyond them stays restorable.
        A second block may be opened on top of one that is not committed yet, on a token that is
        not known yet (an unevaluated int32 (1,)): so the graph of the next step is built while
        this one runs.
        """
        self._forget_redo()
        holds, below = [a.hold() for a in self.adapters], list(self._open)
        slots = [holds[i] for i, a in enumerate(self.adapters) if not a.seekable]
        start = self.pos + sum(len(block.feed) for block in below)
        try:
            for a in self.adapters:
                a.before_write(same_rows=again)
            logits, tape, hidden = self._call(tokens, record and self.recording, stop_rows)
            self._open.append(_Block(start, tokens, holds, slots, tape, logits, hidden))
            return logits
        except BaseException:
            self._restore(holds)
            self._open = below
            raise

    def _call(
        self, tokens: Sequence[int] | mx.array, record: bool, stop_rows: int = 0
    ) -> tuple[mx.array, Tape | None, list[mx.array]]:
        self.counters.forwards += 1
        self.counters.fed_tokens += len(tokens)
        taped = record and self.recorder is not None and bool(self._recurrent)
        caches = [a.cache for a in self._recurrent]
        recording = self.recorder.recording(caches, stop_rows) if taped else nullcontext()
        noting = self.taps.noting() if self.taps is not None else nullcontext([])
        with recording as tape, noting as hidden:
            logits = self.model(mx.array(tokens, mx.int32)[None], cache=self.caches)
        return logits[0], tape, hidden

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """Evaluate the newest open block with `arrays` in one go; on failure it is undone.

        wait False only starts the work.
        """
        block = self._open[-1]
        tape = block.tape.pending() if block.tape is not None else []
        caches = [a.arrays() for a in self.adapters]
        try:
            run = mx.eval if wait else mx.async_eval
            run(*arrays, block.logits, tape, block.hidden, caches)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Undo all open blocks."""
        if self._open:
            self._restore(self._open[0].holds)
            self._open = []

    def commit(self, rows: int) -> list[int]:
        """Publish the first `rows` rows of the oldest open block; the rest never happened.

        Returns the tokens published. Only the newest block can be cut.
        """
        block = self._open[0]
        before = self.logits, self.last_block, self.horizon.copy(), self.checkpoints.copy()
        try:
            feed = block.feed.tolist() if isinstance(block.feed, mx.array) else list(block.feed)
            if rows < len(feed):
                assert len(self._open) == 1, "a later block stands on the rows to be cut"
                self._keep_head(block, rows)
            del self._open[0]
            self.tokens.extend(feed[:rows])
            # The record begins where its first logits row is: after a feed from a bare state, one
            # token later.
            start = block.start + (self.logits is None)
            self.logits, self.last_block = block.row(rows), (start, self.pos)
            self._remember(block, rows, before[0])
            if block.hidden and self.observer is not None:
                whole = rows == len(feed)
                hidden = block.hidden if whole else [x[:rows] for x in block.hidden]
                self.observer(block.start, hidden)
        except BaseException:
            self._restore(block.holds)
            self._open = []
            del self.tokens[block.start :]
            self.logits, self.last_block, self.horizon, self.checkpoints = before
            raise
        return feed[:rows]

    def _keep_head(self, block: _Block, rows: int) -> None:
        """Stand at row `rows` of the block: replay the recurrences, move the cursors."""
        end = block.start + rows
        if self._recurrent and block.tape is None:
            self._feed_head_again(block, rows)
            return
        self._stand(end, block.tape.replay(block.slots, rows) if self._recurrent else [])

    def _stand(self, pos: int, slots: list) -> None:
        """Bring the layers to `pos`: `slots` are those of the recurrent ones there."""
        for a in self._seekable:
            a.seek(pos)
        for a, layer in zip(self._recurrent, slots, strict=True):
            a.restore(layer)

    def _feed_head_again(self, block: _Block, rows: int) -> None:
        """Without a tape: back to the block's start, then a second model call."""
        self._restore(block.holds)
        self._call(block.feed[:rows], record=False)
        mx.eval([a.arrays() for a in self.adapters])

    def _remember(self, block: _Block, rows: int, row_before: Any) -> None:
        if not self.recording:
            return
        # A long feed's early calls: no tape, or one for checkpoints inside, and the last row only.
        if self._recurrent and (block.tape is None or len(block.logits) < len(block.feed)):
            self.horizon.clear()
            return
        base = block.slots if self._recurrent else None
        segment = Segment(block.start, len(block.feed), block.tape, (block.logits,), base)
        if rows < len(block.feed):
            segment = segment.head(rows)
        self.horizon.append(segment, row_before)
        if self.leaves_checkpoint(0):
            self.checkpoint("block")

    @property
    def tape_bytes_per_token(self) -> int:
        return 0 if self.recorder is None else self.recorder.row_bytes

    def _forget_redo(self) -> None:
        """The next write overwrites what lies beyond pos. The tokens go last: interrupted before,
        this is done again."""
        if self.redo_tokens:
            self.horizon.truncate(self.pos)
            self.checkpoints.drop_after(self.pos)
            self.redo_tokens = []

    def _restore(self, holds: list[Any]) -> None:
        for a, held in zip(self.adapters, holds, strict=True):
            a.restore(held)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint(self, kind: str) -> None:
        """Keep the current position cheap to come back to; no-op where all layers cut."""
        if self.pos == 0 or not self.recording or self.can_cut:
            return
        self.abort()  # the layers of an open block stand beyond pos
        self._add_checkpoint(self.pos, kind, self.logits)

    def _add_checkpoint(self, pos: int, kind: str, row: mx.array | None) -> None:
        """The layers stand at `pos`; `row` predicts the token there, if it is known."""
        payload = [a.checkpoint() for a in self.adapters]
        pairs = zip(self.adapters, payload, strict=True)
        arrays = [x for a, state in pairs for x in a.checkpoint_arrays(state)]
        logits = None if row is None else mx.contiguous(row)
        mx.async_eval(arrays, [] if logits is None else logits)
        nbytes = sum(x.nbytes for x in arrays) + (0 if logits is None else logits.nbytes)
        self.checkpoints.add(Checkpoint(pos, kind, payload, nbytes, logits), self.pos)
        budget = self.limits.budget_bytes
        if self.checkpoints.nbytes + self.horizon.held_bytes > budget:
            self.checkpoints.thin(self.pos, max(0, budget - self.horizon.nbytes))

    def _checkpoint_inside(self, block: _Block) -> None:
        """Marks in the middle of the call that was just committed, where its tape has the states:
        going back to before its end then replays a part of it only."""
        holds = [a.hold() for a in self.adapters]
        for rows in block.tape.stops():
            pos = block.start + rows
            if all(a.low() <= pos for a in self._seekable):
                self._stand(pos, block.tape.replay(block.slots, rows))
                self._add_checkpoint(pos, "chunk", None)
        self._restore(holds)

    def kept_bytes(self) -> dict[str, int]:
        """Bytes kept alive for going back: "last_block" (a part of "horizon"), "horizon",
        "checkpoints"."""
        segments = self.horizon.segments
        record = segments[-1].nbytes if segments else 0
        return {
            "last_block": record,
            "horizon": self.horizon.nbytes,
            "checkpoints": self.checkpoints.nbytes,
        }

    def leaves_checkpoint(self, rows: int) -> bool:
        """Whether committing `rows` more rows leaves a checkpoint: it needs the layers to stand
        there, so no further block may be open."""
        if not self.recording or self.can_cut:
            return False
        newest = self.checkpoints.kept[-1].pos if self.checkpoints.kept else 0
        return self.pos + rows - newest >= max(64, self.limits.horizon_tokens // 4)

    # -- back -------------------------------------------------------------------------------------

    def reach(self) -> Reach:
        """What is reached now, and from which checkpoints the rest."""
        low = max((a.low() for a in self._seekable), default=0)
        high = min((a.high() for a in self._seekable), default=self.pos + len(self.redo_tokens))
        rows = self.horizon.rows()
        if self._recurrent:
            held = self.horizon.low is not None and self.horizon.low <= self.pos
            low = max(low, self.horizon.low if held else self.pos)
            high = min(high, self.horizon.end if held else self.pos)
        if self.logits is not None and self.pos not in rows:
            rows = frozenset({*rows, self.pos})
        checkpoints = [f for f in self.checkpoints.kept if f.pos <= self.pos or self._restores(f)]
        return Reach(self.pos, low, high, rows, self.last_block, self.can_cut, checkpoints)

    def _restores(self, checkpoint: Checkpoint) -> bool:
        pairs = zip(self.adapters, checkpoint.payload, strict=True)
        return all(a.restores(state) for a, state in pairs)

    def plan(self, pos: int, *, needs_row: bool = True) -> RewindPlan:
        """How `rewind(pos)` would go. No side effect. StateError outside the known tokens."""
        known = self.pos + len(self.redo_tokens)
        if not 0 <= pos <= known:
            raise StateError(
                f"cannot rewind to position `{pos}`", f"positions 0 to {known} are known"
            )
        return plan(
            pos,
            self.reach(),
            chunk=self.limits.chunk_tokens,
            last=self._last_call_tokens(),
            needs_row=needs_row,
        )

    def rewind(self, pos: int) -> RewindReport:
        """Stand at `pos`, or raise with nothing changed. A rewind without a model call can be gone
        forward from again, until the next call."""
        self.abort()
        begin = time.perf_counter()
        step = self.plan(pos)
        before, counted = self.pos, self.counters.forwards
        replay = self._known()[step.base : pos]
        with self._all_or_nothing():
            self._move(step)
            self._feed_all(replay, again=True)
        return RewindReport(
            step.source,
            discarded=max(0, before - pos),
            replayed=len(replay),
            forwards=self.counters.forwards - counted,
            seconds=time.perf_counter() - begin,
        )

    def sync(
        self,
        target: Sequence[int],
        *,
        cancel: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] | None = None,
        checkpoints: Iterable[int] = (),
    ) -> RewindReport:
        """Make `tokens` equal `target`: keep the common prefix, go back to it, feed the rest.

        Stops between model calls when `cancel()` is true; what was read by then is kept.
        checkpoints: positions on the way that are to stay cheap to come back to.
        """
        self.abort()
        begin = time.perf_counter()
        target = list(target)
        known = self._known()
        common = common_prefix(known, target)
        step = self.plan(common, needs_row=common == len(target))
        before, counted = self.pos, self.counters.forwards
        with self._all_or_nothing():
            self._move(step)
        self._feed_all(self._feed_to_checkpoints(target, checkpoints, cancel), cancel, progress)
        replayed = min(self.pos, common) - step.base
        return RewindReport(
            step.source,
            discarded=max(0, before - common),
            replayed=replayed,
            prefilled=self.pos - step.base - replayed,
            forwards=self.counters.forwards - counted,
            seconds=time.perf_counter() - begin,
        )

    def _feed_to_checkpoints(
        self, target: list[int], checkpoints: Iterable[int], cancel: Callable[[], bool]
    ) -> list[int]:
        """Feed `target` up to the last of `checkpoints`, keeping each; returns the rest of it."""
        for pos in () if self.can_cut else sorted(set(checkpoints)):
            if self.pos <= pos < len(target) and not cancel():
                self._feed_all(target[self.pos : pos], cancel, last=False)
                if self.pos == pos and not self.checkpoints.has(pos, "system"):
                    self.checkpoint("system")
        return target[self.pos :]

    def _known(self) -> list[int]:
        return self.tokens + self.redo_tokens

    def _move(self, step: RewindPlan) -> None:
        """Bring every layer to `step.base` without a model call, then publish."""
        if step.base != self.pos or step.source in ("frontier", "rebuild"):
            if step.source == "rebuild":
                self._set_caches(build_caches(self.model, self.limits.slack_tokens, **self._kv))
            elif step.source == "frontier":
                self._restore_checkpoint(step.checkpoint)
            else:
                self._reach_without_call(step.base)
        self._publish(step)

    def _reach_without_call(self, pos: int) -> None:
        slots: list = []
        if self._recurrent:
            base, tape, rows = self.horizon.path(pos)
            slots = tape.replay(base, rows) if rows else base
            mx.eval(slots)
        self._stand(pos, slots)

    def _restore_checkpoint(self, checkpoint: Checkpoint) -> None:
        for a, state in zip(self.adapters, checkpoint.payload, strict=True):
            a.restore_checkpoint(state, checkpoint.pos)

    def _publish(self, step: RewindPlan) -> None:
        known = self._known()
        self.tokens, self.redo_tokens = known[: step.base], known[step.base :]
        if step.checkpoint is not None and step.checkpoint.logits is not None:
            self.logits = step.checkpoint.logits
        elif step.base in self.horizon.rows():
            self.logits = self.horizon.row(step.base)
        elif step.source != "live":
            self.logits = None
        if step.source == "rebuild":
            self.redo_tokens = []
            self.horizon.clear()
            self.checkpoints.drop_after(0)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put everything back, reference by reference, if the body raises."""
        was = _Snapshot(
            [a.hold() for a in self.adapters],
            list(self.tokens),
            list(self.redo_tokens),
            self.logits,
            self.last_block,
            self.horizon.copy(),
            self.checkpoints.copy(),
            self.adapters,
            self.caches,
        )
        try:
            yield
        except BaseException:
            self._set_caches(was.caches, was.adapters)
            self._restore(was.holds)
            self.tokens, self.redo_tokens, self.logits = was.tokens, was.redo_tokens, was.logits
            self.last_block, self.horizon, self.checkpoints = (
                was.last_block,
                was.horizon,
                was.checkpoints,
            )
            raise

    def free_tokens(self) -> int | None:
        """How far back is always free: no model call, whatever was generated. None: any depth, by
        a cursor. Known after the first call, which shows what a position costs."""
        if self.can_cut:
            return None
        if self._recurrent and self.recorder is None:
            return 0
        return min(self.limits.horizon_tokens, self._affordable_rows())

    # -- branches and files -----------------------------------------------------------------------

    def fork(self) -> Timeline:
        """An independent twin at the same position. Rows are shared until both have written."""
        self.abort()
        twin = copy.copy(self)
        adapters = [a.fork() for a in self.adapters]
        twin._set_caches(nest(self.caches, adapters), adapters)
        twin.tokens, twin.redo_tokens, twin._open = list(self.tokens), [], []
        twin.horizon, twin.checkpoints = self.horizon.copy(), self.checkpoints.copy()
        twin.horizon.truncate(self.pos)
        twin.checkpoints.drop_after(self.pos)
        twin.counters, twin.observer = Counters(), None
        return twin

    def state(self) -> dict[str, Any]:
        """Everything that `load_state` needs: plain containers, numbers and arrays.

        Marks beyond pos stay behind: they are good for `ahead` only, which is not kept.
        """
        self.abort()
        layers = [a.state_dict() for a in self.adapters]
        return {
            "tokens": list(self.tokens),
            "logits": self.logits,
            "kv": self._kv_kind,
            "layers": [{"arrays": arrays, "meta": meta} for arrays, meta in layers],
            "frontiers": [vars(f) for f in self.checkpoints.kept if f.pos <= self.pos],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken, on a new timeline of the same model. StateError if its
        layers are of another kind or shape; this timeline is of no use then."""
        if state["kv"] != self._kv_kind:
            raise StateError(
                f"the session was saved with a {state['kv']} KV cache, this one is {self._kv_kind}",
                "load it with the settings that wrote it: `--kv-bits`, `--kv-group-size`",
            )
        self._check_shapes(state)
        for a, layer in zip(self.adapters, state["layers"], strict=True):
            a.load_state(layer["arrays"], layer["meta"])
        self.tokens, self.logits = list(state["tokens"]), state["logits"]
        self.last_block = (self.pos, self.pos)
        checkpoints = [Checkpoint(**f) for f in state["frontiers"]]
        self.checkpoints = Checkpoints(self.limits.budget_bytes, checkpoints)
        self.checkpoints.drop_after(self.pos)  # those of a text that is not in the state
        self._check_positions()

    def _check_shapes(self, state: dict[str, Any]) -> None:
        """StateError unless the arrays of `state` are like those that one token leaves here."""
        like = Timeline(self.model, None, self.limits, **self._kv)
        row = like.feed([0], record=False)[0]
        like.evaluate()
        if len(state["layers"]) != len(self.adapters):
            raise StateError(
                f"the session has `{len(state['layers'])}` layers, this model {len(self.adapters)}"
            )
        if state["logits"] is not None:
            _check_like("logits", state["logits"], row)
        for i, (a, layer) in enumerate(zip(like.adapters, state["layers"], strict=True)):
            own, given, rows = a.state_dict()[0], layer["arrays"], a.saved_rows(layer["meta"])
            for name, x in own.items() if state["tokens"] else ():
                # A layer that looks token ids up keeps the last few, as many as there are.
                row_axis = a.row_axis if mx.issubdtype(x.dtype, mx.floating) or rows else -1
                _check_like(f"layer {i}: {name}", given[name], x, row_axis, rows)

    def _check_positions(self) -> None:
        """StateError unless all layers, and all checkpoints, stand where the tokens do."""
        known = all(type(token) is int and token >= 0 for token in self.tokens)
        if not known or any(not a.low() <= a.pos() == self.pos for a in self._seekable):
            raise StateError("the session's layers do not stand where its tokens do")
        if any(len(f.payload) != len(self.adapters) for f in self.checkpoints.kept):
            raise StateError("the session's checkpoints are of a model with other layers")

    # -- long feeds -------------------------------------------------------------------------------

    def _affordable_rows(self) -> int:
        """Rows whose tape and logits the horizon's budget holds, beside one base."""
        cost = self.tape_bytes_per_token + self._logits_row_bytes
        affordable = (self.horizon.budget_bytes - self.horizon.base_bytes) // max(1, cost)
        return max(0, min(affordable, self.horizon.most_rows))

    def _last_call_tokens(self) -> int:
        """How many rows the final call of a feed may keep tape and logits for."""
        most = min(self.limits.chunk_tokens, self._affordable_rows())
        if any(a.kind == "compressed" for a in self.adapters):  # a call drops all beyond its slack
            most = min(most, self.limits.slack_tokens)
        return max(1, most)

    def _feed_all(
        self,
        tokens: Sequence[int],
        cancel: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] | None = None,
        again: bool = False,
        last: bool = True,
    ) -> None:
        """Feed tokens in calls of at most one chunk. If these are the `last` tokens to feed, the
        final call becomes the record, and the calls within the horizon keep what it needs."""
        done, horizon = 0, min(self.limits.horizon_tokens, self._affordable_rows())
        sizes = call_sizes(len(tokens), self.limits.chunk_tokens, self._last_call_tokens())
        for i, size in enumerate(sizes):
            if cancel():
                return
            chunk = tokens[done : done + size]
            done += size
            final = last and i == len(sizes) - 1
            near = last and len(tokens) - done < horizon
            self._feed_chunk(chunk, final or near, again)
            if not final:
                self.checkpoint("chunk")
            if progress is not None:
                progress(done, len(tokens))

    def _feed_chunk(self, tokens: Sequence[int], record: bool, again: bool) -> None:
        """One call of a feed: with its tape and all its rows, or with its last row only."""
        stop_rows = self._stop_rows(len(tokens))
        with nullcontext() if record else last_row.only():
            logits = self.feed(
                tokens, record=record or stop_rows > 0, stop_rows=stop_rows, again=again
            )
        self._logits_row_bytes = logits.shape[-1] * logits.dtype.size
        self.evaluate()
        block = self._open[0]
        self.commit(len(tokens))
        if stop_rows and block.tape is not None:
            self._checkpoint_inside(block)

    def _stop_rows(self, rows: int) -> int:
        """How far apart the checkpoints inside a call lie: 0 where there are none, because it is
        short, no recurrence leaves its state there, or they, or its tape, cost much."""
        if rows <= STOP_ROWS or self.recorder is None or not self.recorder.has_stops:
            return 0
        affordable = rows * self.tape_bytes_per_token <= self.horizon.budget_bytes
        return STOP_ROWS if affordable and self.horizon.is_dense else 0


def _check_like(
    name: str, x: mx.array, like: mx.array, row_axis: int | None = None, rows: int | None = None
) -> None:
    """StateError unless `x` has the type and shape of `like`, but for its rows: these are `rows`,
    or, where that is None, any number."""
    have, want = list(x.shape), list(like.shape)
    if row_axis is not None and len(have) == len(want):
        want[row_axis] = have[row_axis] if rows is None else rows
    if (x.dtype, have) != (like.dtype, want):
        raise StateError(f"`{name}` is {x.dtype} {have}, this model needs {like.dtype} {want}")
