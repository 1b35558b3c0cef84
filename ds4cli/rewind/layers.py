"""All layers of one model's caches, moved together: the only loops over layers.

What runs once a token (`hold`, `before_write`, `live`) calls nothing per layer: on a fast machine
such calls are a good part of a token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ds4cli.backend.memory import taken_bytes
from ds4cli.caches.adapter import LayerAdapter
from ds4cli.caches.arena import Seat, SeatedKVCache, held, put_back
from ds4cli.caches.build import adapt, nest
from ds4cli.caches.stack import Stack, StackedCache, StackedSlots, slots_of, stack_of
from ds4cli.rewind.checkpoints import Checkpoint
from ds4cli.tape.tape import Slots


class Hold(NamedTuple):
    """What undoes a model call or a move: every cache and adapter, attribute by attribute, by
    reference. moved: of the seat, if the caches have one. slots: those of the recurrent layers.
    cursor: where all plain layers stand before a call; then `rows` are their keys and values."""

    rows: list[tuple[Any, Any]]
    moved: int
    slots: Slots
    cursor: int | None = None


class Layers:
    """The adapters of `caches`, in order.

    caches: what the model is given. can_cut: whether every layer goes back by itself to any
    position, so that no checkpoint helps.
    """

    def __init__(self, caches: list[Any], adapters: list[LayerAdapter] | None = None):
        self.caches = caches
        self.adapters = adapt(caches) if adapters is None else adapters
        self.recurrent = [a for a in self.adapters if not a.seekable]
        self.recurrent_caches: list[Any] = [a.cache for a in self.recurrent]
        self.can_cut = all(a.keeps_every_row for a in self.adapters)
        self.splits_long_calls = any(a.splits_long_calls for a in self.adapters)
        self._seekable = [a for a in self.adapters if a.seekable]
        self._is_plain = all(a.comes_with_logits and a.keeps_every_row for a in self._seekable)
        # Not in a list of a layer's caches, whose parts may have a use of their own.
        self._unread = [
            a for a in self.adapters
            if not (a.comes_with_logits and any(a.cache is cache for cache in caches))
        ]  # fmt: skip
        self._kin: weakref.WeakSet[Layers] | None = None  # all branches, once there are some
        self._is_apart = False  # no rows are shared with any of them
        # What `hold` takes of layers that all have seats, and the cursors of which it was taken.
        self._seated: tuple[object, list[tuple[dict[str, Any], dict[str, Any]]]] = (None, [])

    # -- around a model call ----------------------------------------------------------------------

    def hold(self, before_call: bool = False) -> Hold:
        """Free to take; good until the next move that is not undone. before_call: only a model call
        is to be undone, which moves all plain layers alike and knows nothing of adapters."""
        caches = self.recurrent_caches
        is_stacked = bool(caches) and type(caches[0]) is StackedCache
        slots = slots_of(caches) if is_stacked else [[*c.cache] for c in caches]
        own = [a.cache for a in self._seekable]
        for cache in own:
            if "seat" in cache.__dict__:
                return Hold(self._cursors(cache.seat), cache.seat.moved, slots)
        if before_call and own and self._is_plain:
            return Hold([(c.keys, c.values) for c in own], 0, slots, own[0].offset)
        return Hold([({**a.__dict__}, {**a.cache.__dict__}) for a in self._seekable], 0, slots)

    def _cursors(self, seat: Seat) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The rows of a `Hold` while the lane has a seat: where all layers have it, the same list
        until a cursor is set by itself."""
        cursors, rows = self._seated
        if cursors is not seat.cursors:
            rows = [({**a.__dict__}, held(a.cache)) for a in self._seekable]
            if all(isinstance(a.cache, SeatedKVCache) for a in self._seekable):
                self._seated = seat.cursors, rows
        return rows

    def restore(self, hold: Hold) -> None:
        """Undo what happened since `hold`: seeks, restored checkpoints, failed model calls."""
        for a, (first, second) in zip(self._seekable, hold.rows, strict=True):
            if hold.cursor is None:
                a.__dict__.update(first)
                put_back(a.cache, second, hold.moved)
            else:
                put_back(a.cache, dict(keys=first, values=second, offset=hold.cursor), 0)
        self._set_slots(hold.slots)
        for layers in self._kin or ():  # these may be the rows of long ago
            layers._is_apart = False

    def before_write(self, writers: Sequence[Layers] = ()) -> None:
        """Must precede every model call: stops sharing rows that the call could overwrite.

        writers: others that the same call writes to."""
        if self._kin is None or self._is_apart:
            return
        kin = [layers for layers in self._kin if layers is not self and not layers._is_apart]
        branches = [layers.adapters for layers in kin]
        writing = [layers.adapters for layers in writers if layers in kin]
        shared = [
            a.leave([b[i] for b in branches], [b[i] for b in writing])
            for i, a in enumerate(self.adapters)
        ]
        self._is_apart = not any(shared)

    def live(self) -> Any:
        """A tree for `mx.eval`, which skips what is no array: what the caches hold that is not
        computed with the logits of the call anyway. Each array more costs the host."""
        return [a.cache.__dict__ for a in self._unread]

    # -- moving -----------------------------------------------------------------------------------

    def low(self) -> int:
        """Lowest position that the seekable layers reach."""
        return max((a.low() for a in self._seekable), default=0)

    def high(self, end: int) -> int:
        """Highest position that the seekable layers reach, `end` if there are none."""
        return min((a.high() for a in self._seekable), default=end)

    def stand_at(self, pos: int) -> bool:
        """Whether the seekable layers stand at `pos`, with all rows that the next token needs."""
        return all(a.pos() == pos and a.low() <= pos for a in self._seekable)

    def stand(self, pos: int, slots: Slots) -> None:
        """Stand at `pos`; `slots` are those of the recurrent layers there."""
        for a in self._seekable:
            a.seek(pos)
        self._set_slots(slots)

    def cut(self, pos: int, slots: Slots) -> None:
        """The same, and the rows above are not gone forward to again."""
        seats = [a.cache.seat for a in self._seekable[:1] if isinstance(a.cache, SeatedKVCache)]
        if seats and self._seated[0] is seats[0].cursors:  # all layers, and nobody moved one
            seats[0].moved += pos - self._seekable[0].cache.offset
            self._set_slots(slots)
            return
        self.stand(pos, slots)
        self.forget_redo()

    def forget_redo(self) -> None:
        """Rows above the position are not gone forward to again."""
        self._seated = None, []
        for a in self._seekable:
            a.forget_redo()

    @property
    def stack(self) -> Stack | None:
        """Where the recurrent states lie together with those of other lanes, if all do."""
        return stack_of(self.recurrent_caches) if self.recurrent_caches else None

    def _set_slots(self, slots: Slots) -> None:
        if isinstance(slots, StackedSlots) and slots.are_in(self.recurrent_caches):
            return
        for cache, layer in zip(self.recurrent_caches, slots, strict=True):
            cache.cache = [*layer]

    # -- checkpoints ------------------------------------------------------------------------------

    def checkpoint(self, pos: int, kind: str, row: mx.array | None) -> Checkpoint:
        """The layers stand at `pos`; `row` predicts the token there, if it is known."""
        payload = [a.checkpoint() for a in self.adapters]
        pairs = zip(self.adapters, payload, strict=True)
        arrays = [x for a, state in pairs for x in a.checkpoint_arrays(state)]
        logits = None if row is None else mx.contiguous(row)
        mx.async_eval(arrays, [] if logits is None else logits)
        nbytes = taken_bytes([*arrays, *([] if logits is None else [logits])])
        return Checkpoint(pos, kind, payload, nbytes, logits)

    def restore_checkpoint(self, checkpoint: Checkpoint) -> None:
        for a, state in zip(self.adapters, checkpoint.payload, strict=True):
            a.restore_checkpoint(state, checkpoint.pos)

    def restores(self, checkpoint: Checkpoint) -> bool:
        """Whether `restore_checkpoint` is possible from here."""
        pairs = zip(self.adapters, checkpoint.payload, strict=True)
        return all(a.restores(state) for a, state in pairs)

    # -- branches and files -----------------------------------------------------------------------

    def fork(self) -> Layers:
        """Independent twins at the same position. Rows are shared until both have written."""
        adapters = [a.fork() for a in self.adapters]
        twin = Layers(nest(self.caches, [a.cache for a in adapters]), adapters)
        self._kin = twin._kin = self._kin or weakref.WeakSet([self])
        self._kin.add(twin)
        self._is_apart = False
        return twin

    def state(self) -> list[dict[str, Any]]:
        """What `load_state` needs: plain containers, numbers and arrays."""
        parts = [a.state_dict() for a in self.adapters]
        return [{"arrays": arrays, "meta": meta} for arrays, meta in parts]

    def load_state(self, state: Sequence[dict[str, Any]]) -> None:
        for a, layer in zip(self.adapters, state, strict=True):
            a.load_state(layer["arrays"], layer["meta"])
