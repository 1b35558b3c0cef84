"""One model, its caches and the tokens they have consumed: the only place where that state changes.

Invariants: every layer stands at `pos`; `logits` is the row that predicts the token at `pos`;
`len(tokens) == pos`. State moves forward in `commit`, once per model call and after evaluation, and
moves elsewhere in `_move`. A call that fails, in any layer, leaves everything where it was.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ds4cli.arrays import integers
from ds4cli.backend import memory
from ds4cli.caches.adapter import LayerAdapter
from ds4cli.caches.build import build_caches
from ds4cli.caches.stack import Stack
from ds4cli.errors import StateError
from ds4cli.hooks.cuda import attention, switch
from ds4cli.hooks.last_row import LAST, Projections
from ds4cli.hooks.taps import Taps
from ds4cli.rewind import storage
from ds4cli.rewind.checkpoints import Checkpoint, Checkpoints
from ds4cli.rewind.horizon import Horizon, Segment
from ds4cli.rewind.layers import Hold, Layers
from ds4cli.rewind.plan import Reach, RewindPlan, RewindReport, call_sizes, plan, stepped_sizes
from ds4cli.rewind.room import Room
from ds4cli.settings import MAX_BLOCK_TOKENS, Settings
from ds4cli.tape.recorder import Recorder
from ds4cli.tape.tape import Slots, Tape
from ds4cli.tokens import common_prefix

# Rows between the checkpoints inside a long call, where recurrences hand out their inner states.
INNER_EVERY = 128


@dataclass(frozen=True)
class Limits:
    """How far back is kept, and how a long feed is cut.

    horizon_tokens: positions reached without a model call. budget_bytes: horizon and checkpoints
    together. chunk_tokens: tokens of one prefill call.
    """

    horizon_tokens: int
    budget_bytes: int
    chunk_tokens: int

    @property
    def slack_tokens(self) -> int:
        """Rows that a sliding window holds beyond its own length: the horizon and one block."""
        return self.horizon_tokens + MAX_BLOCK_TOKENS


# Told where tokens were committed, the row (V,) before them, and those (n, V) of their call.
Witness = Callable[[int, list[int], "mx.array | None", mx.array], None]


class _Block(NamedTuple):
    """An open model call: fed but not committed."""

    start: int
    feed: list[int] | mx.array
    hold: Hold  # the layers before the call
    tape: Tape | None
    logits: mx.array  # (n, V), or only the last row (1, V); lazy until `evaluate`
    hidden: list[mx.array]  # (n, H) per tapped layer
    live: Any  # a tree of what the call left in the layers
    replayed: tuple[int, Slots] = (0, [])  # rows, and the slots after them: known beforehand

    def row(self, rows: int) -> mx.array:
        """The logits row (V,) after the first `rows` tokens of the feed."""
        if self.logits.shape[0] == 1:
            return self.logits.squeeze(0)  # a third of what an index takes, for every token
        return self.logits[rows - 1 - len(self.feed) + self.logits.shape[0]]


@dataclass
class Counters:
    """Model calls and tokens fed, ever; what tests and benchmarks read."""

    forwards: int = 0
    fed_tokens: int = 0


class Moment(NamedTuple):
    """All that a timeline is at one moment. It is swapped whole: whoever fails puts the one before
    back, see `Timeline._back`.

    known: tokens, and up to `end` those beyond `pos` whose rows still stand (a rewind can be gone
    forward from); what stands behind `end` means nothing. open: model calls that are not committed,
    oldest first.
    """

    layers: Layers
    known: list[int]
    pos: int
    end: int
    logits: mx.array | None
    last_block: tuple[int, int]
    horizon: Horizon
    checkpoints: Checkpoints
    open: tuple[_Block, ...] = ()


class Opening(NamedTuple):
    """What a model call starts from: `hold` has the layers of `moment`, and `start` is the position
    of the call's first row."""

    moment: Moment
    hold: Hold
    start: int


class Timeline:
    """One model's tokens and caches, with a horizon and checkpoints to go back by.

    model: an mlx-lm model, called as `model(tokens (1, n), cache=caches) -> logits (1, n, V)`.
    recorder: the armed tape recorder; None means that recurrent layers go back by feeding tokens.
    projections: what makes the last row of a long call alone; None makes all. taps: layers that a
    drafter reads. observer: called with the position and, per tapped layer, the residual rows
    (n, H) of what was committed from there on. witness: called after each commit.
    """

    def __init__(
        self,
        model: Any,
        recorder: Recorder | None,
        limits: Limits,
        *,
        kv_bits: int | None = None,
        kv_group_size: int = Settings.kv_group_size,
        projections: Projections | None = None,
        taps: Taps | None = None,
    ):
        self.model = model
        self.recorder = recorder
        self._projections = projections
        self.taps = taps
        self.observer: Callable[[int, list[mx.array]], None] | None = None
        self.witness: Witness | None = None
        self.limits = limits
        self.counters = Counters()
        self.recording = True
        self._kv = kv_bits, kv_group_size
        self._logits_row_bytes = 0
        self._now = self._empty()

    def _empty(self) -> Moment:
        """New caches, nothing read."""
        layers = Layers(self.new_caches())
        return Moment(layers, [], 0, 0, None, (0, 0), *self._nothing_kept())

    def new_caches(self) -> list[Any]:
        """Empty ones, as those of this timeline."""
        return build_caches(self.model, self.limits.slack_tokens, *self._kv)

    def _nothing_kept(self) -> tuple[Horizon, Checkpoints]:
        """Nothing kept for going back yet."""
        limits = self.limits
        horizon = Horizon(limits.horizon_tokens, limits.budget_bytes // 2, self.recorder)
        return horizon, Checkpoints(limits.budget_bytes)

    @property
    def tokens(self) -> list[int]:
        """The tokens that every layer has consumed. It grows; do not keep it."""
        known, pos = self._now.known, self._now.pos
        return known if len(known) == pos else known[:pos]

    @property
    def redo_tokens(self) -> list[int]:
        """Tokens beyond pos whose rows still stand."""
        return self._now.known[self._now.pos : self._now.end]

    @property
    def pos(self) -> int:
        return self._now.pos

    @property
    def logits(self) -> mx.array | None:
        """The row (V,) that predicts the token at pos; None before the first token."""
        return self._now.logits

    @property
    def last_block(self) -> tuple[int, int]:
        return self._now.last_block

    @property
    def horizon(self) -> Horizon:
        return self._now.horizon

    @property
    def checkpoints(self) -> Checkpoints:
        return self._now.checkpoints

    @property
    def adapters(self) -> list[LayerAdapter]:
        return self._now.layers.adapters

    @property
    def caches(self) -> list[Any]:
        """What the model is given."""
        return self._now.layers.caches

    @property
    def can_cut(self) -> bool:
        """Whether every layer keeps every row: a rewind is a cursor move, no checkpoint helps."""
        return self._now.layers.can_cut

    @property
    def open_blocks(self) -> int:
        """Model calls that are fed but not committed."""
        return len(self._now.open)

    @property
    def open_tokens(self) -> int:
        """Tokens of the model calls that are not committed."""
        return sum(len(block.feed) for block in self._now.open)

    @property
    def _kv_kind(self) -> str:
        bits, group = self._kv
        return "whole" if bits is None else f"{bits}-bit (groups of {group})"

    # -- forward: one model call ------------------------------------------------------------------

    def feed(
        self, tokens: list[int] | mx.array, *, record: bool = True, inner_every: int = 0
    ) -> mx.array:
        """Open a block: one model call on `tokens`. Returns its logits rows (n, V), lazy.

        Nothing is published until `commit`. `record` False keeps no tape (early prefill chunks).
        `inner_every`: keep states inside the call on the tape, so many rows apart.
        A second block may be opened on top of one that is not committed yet, on a token that is
        not known yet (an unevaluated int32 (1,)): so the graph of the next step is built while
        this one runs.
        """
        opening = self.opening()
        try:
            logits, tape, hidden = self._call(tokens, record and self.recording, inner_every)
            self.open(opening, tokens, logits, tape, hidden, self._now.layers.live())
            return logits
        except BaseException:
            self.undo(opening)
            raise

    def opening(self) -> Opening:
        """Ready for a model call: nothing beyond the position is known any more."""
        if self._now.pos < self._now.end:
            self._forget_redo()
        now = self._now
        start = now.pos
        for below in now.open:
            start += len(below.feed)
        return Opening(now, now.layers.hold(before_call=True), start)

    def open(
        self,
        opening: Opening,
        feed: list[int] | mx.array,
        logits: mx.array,
        tape: Tape | None,
        hidden: list[mx.array],
        live: Any,
    ) -> None:
        """A model call was made on `feed`: its block is open."""
        block = _Block(opening.start, feed, opening.hold, tape, logits, hidden, live)
        self._now = Moment(*opening.moment[:-1], (*opening.moment.open, block))

    def undo(self, opening: Opening) -> None:
        """All stands as it did before the model call."""
        self._back(opening.moment, opening.hold)

    def _forget_redo(self) -> None:
        """The next write overwrites what lies beyond pos. Interrupted before the swap, this is done
        again."""
        self._now.layers.forget_redo()
        self._now = self._without_redo(self._now)

    def _without_redo(self, now: Moment) -> Moment:
        """`now` without what lies beyond its position. It shares nothing that grows with `now`, so
        that a rewind that fails while it feeds tokens, or the twin of a fork, can have that back.
        """
        horizon, checkpoints = now.horizon.copy(), now.checkpoints.copy()
        horizon.truncate(now.pos)
        checkpoints.drop_after(now.pos)
        known = now.known[: now.pos]
        return now._replace(known=known, end=now.pos, horizon=horizon, checkpoints=checkpoints)

    def _call(
        self, tokens: list[int] | mx.array, record: bool, inner_every: int = 0
    ) -> tuple[mx.array, Tape | None, list[mx.array]]:
        """One model call: its logits rows, its tape, and what the taps noted."""
        layers = self.before_call(len(tokens))
        if not (record and self.recorder is not None and layers.recurrent):
            logits, hidden = self._run(tokens, layers)
            return logits, None, hidden
        with self.recorder.recording(layers.recurrent_caches, inner_every) as tape:
            logits, hidden = self._run(tokens, layers)
        return logits, tape, hidden

    def before_call(self, rows: int, writers: Sequence[Layers] = ()) -> Layers:
        """The layers, ready to be written to by a call of so many rows; writers: those of other
        timelines that the same call writes to."""
        layers = self._now.layers
        self.counters.forwards += 1
        self.counters.fed_tokens += rows
        layers.before_write(writers)
        return layers

    def _run(self, tokens: list[int] | mx.array, layers: Layers) -> tuple[mx.array, list[mx.array]]:
        ids = tokens[None] if isinstance(tokens, mx.array) else mx.array([tokens], mx.int32)
        if self.taps is None:
            return self.model(ids, cache=layers.caches)[0], []
        with self.taps.noting() as hidden:
            logits = self.model(ids, cache=layers.caches)
        return logits[0], hidden

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """Evaluate the newest open block with `arrays` in one go; on failure it is undone.

        wait False only starts the work.
        """
        run = mx.eval if wait else mx.async_eval
        try:
            run(*arrays, self.pending())
        except BaseException:
            self.abort()
            raise

    def pending(self) -> tuple[Any, Any]:
        """Trees of all that the newest open block computes, for `mx.eval`: its rows, and what is in
        the layers."""
        block = self._now.open[-1]
        return (block.logits, block.hidden), block.live

    def abort(self) -> None:
        """Undo all open blocks."""
        now = self._now
        if now.open:
            self._back(now._replace(open=()), now.open[0].hold)

    def _back(self, moment: Moment, hold: Hold) -> None:
        """The one way to undo: all stands as it was at `moment`; `hold` has its layers."""
        self._now = moment
        moment.layers.restore(hold)
        moment.horizon.truncate(moment.end)
        moment.checkpoints.drop_after(moment.end)

    def commit(self, rows: int) -> list[int]:
        """Publish the first `rows` rows of the oldest open block; the rest never happened.

        Returns the tokens published. Only the newest block can be cut.
        """
        now = self._now
        block = now.open[0]
        try:
            feed = integers(block.feed) if isinstance(block.feed, mx.array) else list(block.feed)
            if rows < len(feed) or block.replayed[0] not in (0, rows):
                assert len(now.open) == 1, "a later block stands on the rows to be cut"
                self._keep_first(block, rows)
            after = self._after(now, block, feed[:rows])
            self._remember(now, after, block, rows)
            if block.hidden and self.observer is not None:
                whole = rows == len(feed)
                self.observer(
                    block.start, block.hidden if whole else [x[:rows] for x in block.hidden]
                )
            self._now = after
        except BaseException:
            self._back(now._replace(open=()), block.hold)
            raise
        if self.witness is not None:
            self.witness(block.start, feed[:rows], now.logits, block.logits)
        if block.start // memory.CLEAR_TOKENS != after.pos // memory.CLEAR_TOKENS:
            mx.clear_cache()  # what MLX keeps of freed arrays
        return feed[:rows]

    def _after(self, now: Moment, block: _Block, tokens: list[int]) -> Moment:
        """The moment when `tokens`, the first of the block, are published."""
        end = block.start + len(tokens)
        now.known[block.start :] = tokens  # behind the end of `now`, so it does not show there
        # The last block begins where its first logits row is: after a feed from a bare state, one
        # token later.
        start = block.start + (now.logits is None)
        return Moment(
            now.layers,
            now.known,
            end,
            end,
            block.row(len(tokens)),
            (start, end),
            now.horizon,
            now.checkpoints,
            now.open[1:],
        )

    def _keep_first(self, block: _Block, rows: int) -> None:
        """Stand at row `rows` of the block: replay the recurrences, move the cursors."""
        layers = self._now.layers
        known, slots = block.replayed
        if layers.recurrent and known != rows:
            if block.tape is None:
                self._feed_first_again(block, rows)
                return
            slots = block.tape.replay(block.hold.slots, rows)
            mx.async_eval(slots)
        layers.cut(block.start + rows, slots)

    def to_replay(self) -> tuple[Tape, Slots] | None:
        """What `commit` of a part of the oldest block replays, and from where; None where that is
        nothing."""
        block = self._now.open[0]
        is_recurrent = bool(self._now.layers.recurrent)
        return (block.tape, block.hold.slots) if is_recurrent and block.tape is not None else None

    @property
    def stack(self) -> Stack | None:
        """See `Layers.stack`."""
        return self._now.layers.stack

    def replayed(self, rows: int, slots: Slots) -> None:
        """`to_replay` gave that, and it led here: `commit` of so many rows need not do it again."""
        first, *others = self._now.open
        self._now = self._now._replace(open=(first._replace(replayed=(rows, slots)), *others))

    def _feed_first_again(self, block: _Block, rows: int) -> None:
        """Without a tape: back to the block's start, then a second model call."""
        layers = self._now.layers
        layers.restore(block.hold)
        logits, *_ = self._call(block.feed[:rows], record=False)
        mx.eval(logits, layers.live())

    def _remember(self, before: Moment, now: Moment, block: _Block, rows: int) -> None:
        """Keep what leads from `before` to `now`, and `now` itself where a checkpoint is due."""
        if not self.recording:
            return
        recurrent = bool(now.layers.recurrent)
        # A long feed's early calls: no tape, or one for checkpoints inside, and the last row only.
        if len(block.logits) < len(block.feed) or (recurrent and block.tape is None):
            now.horizon.clear()
            return
        start, end = block.hold.slots if recurrent else None, block.start + len(block.feed)
        segment = Segment(block.start, end, block.tape, (block.logits,), start)
        if rows < len(block.feed):
            segment = segment.first(rows)
        low = now.horizon.low
        now.horizon.append(segment, before.logits)
        if now.horizon.low != low and not now.layers.can_cut:
            self._keep_edge(now)

    def horizon_bytes(self, limits: Limits) -> int:
        """About what going back within `limits` keeps of a text that grows token by token. Known
        after the first call."""
        state = 0 if self.recorder is None else self.recorder.sizes.state
        row = self._logits_row_bytes + self.tape_bytes_per_token
        return limits.horizon_tokens * row + 2 * state

    @property
    def tape_bytes_per_token(self) -> int:
        return 0 if self.recorder is None else self.recorder.sizes.row

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint(self, kind: str) -> None:
        """Keep the current position cheap to come back to; no-op where all layers cut."""
        if self.pos == 0 or not self.recording or self.can_cut:
            return
        self.abort()  # the layers of an open block stand beyond pos
        now = self._now
        self._keep_checkpoint(now, now.layers.checkpoint(now.pos, kind, now.logits))

    def _keep_checkpoint(self, now: Moment, checkpoint: Checkpoint) -> None:
        now.checkpoints.add(checkpoint, now.pos)
        budget = self.limits.budget_bytes
        if now.checkpoints.nbytes + now.horizon.about_bytes > budget:
            now.checkpoints.thin(now.pos, max(0, budget - now.horizon.nbytes))

    def _checkpoint_inside(self, block: _Block, tape: Tape) -> None:
        """Checkpoints in the middle of the call that was just committed, where its tape has the
        states: going back to before its end then replays a part of it only."""
        now = self._now
        hold = now.layers.hold()
        for rows in tape.inner_rows():
            pos = block.start + rows
            if now.layers.low() <= pos:
                now.layers.stand(pos, tape.replay(block.hold.slots, rows))
                self._keep_checkpoint(now, now.layers.checkpoint(pos, "chunk", None))
        now.layers.restore(hold)

    def kept_bytes(self) -> dict[str, int]:
        """Bytes kept alive for going back: "last_block" (a part of "horizon"), "horizon",
        "checkpoints"."""
        segments = self.horizon.segments
        last = segments[-1].nbytes if segments else 0
        return {
            "last_block": last,
            "horizon": self.horizon.nbytes,
            "checkpoints": self.checkpoints.nbytes,
        }

    def _keep_edge(self, now: Moment) -> None:
        """Keep, now and then, what the horizon leaves behind: all that lies in it is free anyway.
        Blocks may be open meanwhile."""
        layers = now.layers
        edge = max(now.horizon.low or 0, layers.low())
        newest = max((f.pos for f in now.checkpoints.kept if f.pos <= edge), default=0)
        if edge - newest < max(64, self.limits.horizon_tokens // 4):
            return
        hold = layers.hold()
        layers.stand(edge, self._replayed(edge, now.horizon))
        self._keep_checkpoint(now, layers.checkpoint(edge, "block", now.horizon.row(edge)))
        layers.restore(hold)

    # -- back -------------------------------------------------------------------------------------

    def reach(self) -> Reach:
        """What is reached now, and from which checkpoints the rest."""
        now = self._now
        layers, horizon = now.layers, now.horizon
        low, high = layers.low(), layers.high(now.end)
        rows: range | frozenset[int] = horizon.rows()
        if layers.recurrent:
            kept = horizon.states(now.pos)
            low, high = max(low, kept[0]), min(high, kept[-1])
        if now.logits is not None and now.pos not in rows:
            rows = frozenset({*rows, now.pos})
        checkpoints = [f for f in now.checkpoints.kept if f.pos <= now.pos or layers.restores(f)]
        return Reach(now.pos, low, high, rows, now.last_block, layers.can_cut, checkpoints)

    def plan(self, pos: int, *, needs_row: bool = True) -> RewindPlan:
        """How `rewind(pos)` would go. No side effect. StateError outside the known tokens."""
        known = self._now.end
        if not 0 <= pos <= known:
            raise StateError(
                f"cannot rewind to position `{pos}`", f"positions 0 to {known} are known"
            )
        return plan(
            pos, self.reach(), calls=lambda *feed: len(self._call_sizes(*feed)), needs_row=needs_row
        )

    def rewind(self, pos: int) -> RewindReport:
        """Stand at `pos`, or raise with nothing changed. A rewind without a model call can be gone
        forward from again, until the next call."""
        self.abort()
        begin = time.perf_counter()
        step = self.plan(pos)
        before, counted = self._now.pos, self.counters.forwards
        replay = self._now.known[step.base : pos]
        with self._all_or_nothing():
            self._move(step)
            if replay:
                self._feed_all(replay)
        seconds = time.perf_counter() - begin
        return RewindReport(
            step.source,
            discarded=max(0, before - pos),
            replayed=len(replay),
            forwards=self.counters.forwards - counted,
            seconds=seconds,
            back_s=seconds,
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
        common = common_prefix(self._now.known[: self._now.end], target)
        step = self.plan(common, needs_row=common == len(target))
        before, counted = self.pos, self.counters.forwards
        with self._all_or_nothing():
            self._move(step)
        moved_s = time.perf_counter() - begin
        self._feed_all(self._feed_to_checkpoints(target, checkpoints, cancel), cancel, progress)
        seconds, replayed = time.perf_counter() - begin, min(self.pos, common) - step.base
        share = replayed / max(1, self.pos - step.base)  # of the feeding that was done again
        return RewindReport(
            step.source,
            discarded=max(0, before - common),
            replayed=replayed,
            prefilled=self.pos - step.base - replayed,
            forwards=self.counters.forwards - counted,
            seconds=seconds,
            back_s=moved_s + share * (seconds - moved_s),
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

    def _move(self, step: RewindPlan) -> None:
        """Bring every layer to `step.base` without a model call, then publish."""
        now, pos = self._now, step.base
        if step.source == "rebuild":
            self._now = self._empty()
            return
        if step.source == "frontier":
            assert step.checkpoint is not None, "a plan over a checkpoint names it"
            now.layers.restore_checkpoint(step.checkpoint)
        elif pos != now.pos:
            now.layers.stand(pos, self._replayed(pos, now.horizon))
        logits = now.horizon.row(pos)
        if step.checkpoint is not None and step.checkpoint.logits is not None:
            logits = step.checkpoint.logits
        elif logits is None and step.source == "live":
            logits = now.logits
        self._now = now._replace(pos=pos, logits=logits)

    def _replayed(self, pos: int, horizon: Horizon) -> Slots:
        """The recurrent layers' slots at `pos`, from the horizon."""
        if not self._now.layers.recurrent:
            return []
        slots, tape, rows = horizon.path(pos)
        assert slots is not None, "the plan stays within the horizon"
        if rows and tape is not None:
            slots = tape.replay(slots, rows)
        mx.eval(slots)
        return slots

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put everything back, reference by reference, if the body raises."""
        was = self._now
        hold = was.layers.hold()
        try:
            yield
        except BaseException:
            self._back(was, hold)
            raise

    def free_tokens(self) -> int | None:
        """How far back is always free: no model call, whatever was generated. None: any depth, by
        a cursor. Known after the first call, which shows what a position costs."""
        if self.can_cut:
            return None
        if self._now.layers.recurrent and self.recorder is None:
            return 0
        return min(self.limits.horizon_tokens, self._room().free_rows)

    # -- branches and files -----------------------------------------------------------------------

    def fork(self, limits: Limits | None = None) -> Timeline:
        """An independent twin at the same position. Rows are shared until both have written.

        limits: the twin's own; what was kept for going back from here then stays behind.
        """
        self.abort()
        twin = copy.copy(self)
        twin._now = self._without_redo(self._now)._replace(layers=self._now.layers.fork())
        twin.counters, twin.observer, twin.witness = Counters(), None, None
        if limits is not None:
            twin.limits = limits
            horizon, checkpoints = twin._nothing_kept()
            here = (self.pos, self.pos)
            twin._now = twin._now._replace(
                horizon=horizon, checkpoints=checkpoints, last_block=here
            )
        return twin

    def state(self) -> dict[str, Any]:
        """Everything that `load_state` needs: plain containers, numbers and arrays.

        Checkpoints beyond pos stay behind: they are good for the redo only, which is not kept.
        """
        self.abort()
        now = self._now
        return {
            "tokens": now.known[: now.pos],
            "logits": now.logits,
            "kv": self._kv_kind,
            "layers": now.layers.state(),
            "frontiers": [vars(f) for f in now.checkpoints.kept if f.pos <= now.pos],
        }

    def write(self, path: str | Path, fingerprint: str) -> None:
        """Write all to `path`, whole or not at all."""
        storage.write(path, self.state(), fingerprint)

    def read(self, path: str | Path, fingerprint: str) -> None:
        """Stand where the timeline stood that wrote `path`. StateError where that is damaged, or
        of another model; this timeline is of no use then."""
        self._load(path, storage.read(path, fingerprint))

    def _load(self, path: str | Path, state: dict[str, Any]) -> None:
        try:
            self.load_state(state)
        except StateError:
            raise
        except Exception as error:  # whole, but of another shape than anything this version writes
            reason = f"session file `{path}` does not fit this model: {error!r}"
            raise StateError(reason) from None

    def load_state(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken, on a new timeline of the same model. StateError if its
        layers are of another kind or shape; this timeline is of no use then."""
        if state["kv"] != self._kv_kind:
            raise StateError(
                f"the session was saved with a {state['kv']} KV cache, this one is {self._kv_kind}",
                "load it with the settings that wrote it: `--kv-bits`, `--kv-group-size`",
            )
        self._check_shapes(state)
        now = self._empty()
        now.layers.load_state(state["layers"])
        pos = len(state["tokens"])
        checkpoints = Checkpoints(
            self.limits.budget_bytes, [Checkpoint(**f) for f in state["frontiers"]]
        )
        checkpoints.drop_after(pos)  # those of a text that is not in the state
        self._now = now._replace(
            known=list(state["tokens"]),
            pos=pos,
            end=pos,
            logits=state["logits"],
            last_block=(pos, pos),
            checkpoints=checkpoints,
        )
        self._check_positions()

    def _check_shapes(self, state: dict[str, Any]) -> None:
        """StateError unless the arrays of `state` are like those that one token leaves here."""
        bits, group = self._kv
        like = Timeline(self.model, None, self.limits, kv_bits=bits, kv_group_size=group)
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
        if not known or not self._now.layers.stand_at(self.pos):
            raise StateError("the session's layers do not stand where its tokens do")
        if any(len(f.payload) != len(self.adapters) for f in self.checkpoints.kept):
            raise StateError("the session's checkpoints are of a model with other layers")

    # -- long feeds -------------------------------------------------------------------------------

    def _room(self) -> Room:
        return self.horizon.room_for(self._logits_row_bytes)

    def _call_sizes(self, start: int, n: int) -> list[int]:
        most = self.limits.chunk_tokens, self._last_call_tokens()
        if switch.is_on():
            return stepped_sizes(start, n, *most, step=attention.CHUNK)
        return call_sizes(n, *most)

    def _last_call_tokens(self) -> int:
        """How many rows the final call of a feed may keep tape and logits for."""
        most = min(self.limits.chunk_tokens, self._room().free_rows)
        if self._now.layers.splits_long_calls:
            most = min(most, self.limits.slack_tokens)
        return max(1, most)

    def _feed_all(
        self,
        tokens: list[int],
        cancel: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] | None = None,
        last: bool = True,
    ) -> None:
        """Feed tokens in calls of at most one chunk. If these are the `last` tokens to feed, the
        final call becomes the last block, and the calls within the horizon keep what it needs."""
        done, horizon = 0, min(self.limits.horizon_tokens, self._room().free_rows)
        sizes = self._call_sizes(self.pos, len(tokens))
        for i, size in enumerate(sizes):
            if cancel():
                return
            chunk = tokens[done : done + size]
            done += size
            final = last and i == len(sizes) - 1
            near = last and len(tokens) - done < horizon
            row_before = self.logits
            self._feed_chunk(chunk, final or near)
            mx.eval(row_before)  # no more than the call just begun still runs
            if not final:
                self.checkpoint("chunk")
            if progress is not None:
                progress(done, len(tokens))

    def _feed_chunk(self, tokens: list[int], record: bool) -> None:
        """One call of a feed: with its tape and all its rows, or with its last row only. On CUDA
        such an early call may still run when this returns, so that the next is built meanwhile."""
        inner_every = self._inner_every(len(tokens))
        with nullcontext() if record else self.last_rows():
            logits = self.feed(tokens, record=record or inner_every > 0, inner_every=inner_every)
        self._logits_row_bytes = logits.shape[-1] * logits.dtype.size
        self.evaluate(wait=record or not switch.is_on())
        block = self._now.open[0]
        self.commit(len(tokens))
        if inner_every and block.tape is not None:
            self._checkpoint_inside(block, block.tape)

    def last_rows(self, rows: Sequence[int] = LAST) -> AbstractContextManager[None]:
        """Calls of the model in here make these logits rows only, (1, len(rows), V); all of them
        where it is not known how it makes them."""
        return nullcontext() if self._projections is None else self._projections.only(rows)

    def _inner_every(self, rows: int) -> int:
        """How far apart the checkpoints inside a call lie: 0 where there are none, because it is
        short, no recurrence leaves its state there, or they, or its tape, cost much."""
        if rows <= INNER_EVERY or self.recorder is None or not self.recorder.has_inner_states:
            return 0
        affordable = rows * self.tape_bytes_per_token <= self.horizon.budget_bytes
        return INNER_EVERY if affordable and self._room().is_dense else 0


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
