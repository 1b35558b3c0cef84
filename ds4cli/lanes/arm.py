"""Lanes: finds where to cut a model's call into lanes, proves it, and runs such calls.

Attention modules of the plain kind run once on all rows, recurrent ones as a batch, all others that
are handed a cache lane by lane. Which module is of which kind shows when it is called with
stand-ins: where that fails, the module runs lane by lane, or the one around it does, until a call
on several lanes can be built, or nothing is left to try. Then each lane's numbers are compared with
those of a call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from inspect import isfunction, signature
from itertools import accumulate, chain, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ds4cli.arrays import number
from ds4cli.caches.arena import Place, Seating
from ds4cli.errors import ModelError
from ds4cli.hooks.rebind import Swaps, names_used
from ds4cli.lanes import attention
from ds4cli.lanes.batch import Batch
from ds4cli.lanes.call import Call, Feed, LaneCache, call_of, ids
from ds4cli.lanes.mixers import SHARED, by_lane, sharing
from ds4cli.lanes.stacked import stacked
from ds4cli.lanes.stacks import Stacks

# How a module runs on several lanes. "stacked" is by lane where its cache is no recurrent one.
JOINED, STACKED, BY_LANE = "joined", "stacked", "by lane"
WORSE = {JOINED: STACKED, STACKED: BY_LANE}
# Rows that lanes are tried with, after lanes of START_ROWS: ragged, all of one, equally many.
TRIALS = ((3, 1, 2), (1, 1, 1), (1, 1, 1), (2, 2, 2), (1, 4, 1))
START_ROWS = (5, 9, 3)
# Largest accepted difference of a logits row, relative to its largest entry.
_TOLERANCE = 1e-4
_TOLERANCE_HALF = 5e-2
# In half precision lanes may differ as far as the model's own calls do, times this; what goes to a
# wrong lane is off by as much as the logits are large.
SPREADS, SPREAD_ROWS = 3, 8


class Lanes:
    """A model whose calls may carry several lanes. Make one with `arm`."""

    def __init__(self, model: Any, new_caches: Callable[[], list[Any]]):
        self.model = model
        self._arming = _Arming(model, new_caches)
        self._users = 0
        self._forget()

    def _forget(self) -> None:
        """No lane is known."""
        places = self._arming.places
        self._seating, self._stacks, self._batch = Seating(places), Stacks(), self._arming.batch()

    @classmethod
    def arm(cls, model: Any, new_caches: Callable[[], list[Any]]) -> Lanes:
        """Put the model's modules that use a cache into subclasses that know lanes.

        new_caches: makes what one lane passes as `cache`. ModelError, with the model untouched and
        the reason in words, where it cannot be run so. Arm it after all that changes the model's
        modules, the recorder too, and disarm it first.
        """
        lanes = cls(model, new_caches)
        lanes.arm_again()
        return lanes

    @property
    def fits(self) -> bool:
        """Whether `arm_again` is possible: the model's modules are what they were."""
        return self._users > 0 or self._arming.fits()

    def arm_again(self) -> None:
        """The same after `disarm`, or for one more user, without trying the model again."""
        if not self._users:
            self._arming.arm()
        self._users += 1

    def disarm(self) -> None:
        """Give every instance its own class back, after the last user. The caches of the lanes go
        on alone."""
        self._users -= 1
        if not self._users:
            self._arming.undo()
            self._forget()

    def seat(self, caches: Sequence[list[Any]]) -> list[int]:
        """Before each call: seats for the lanes whose caches these are. Returns the order in which
        the call is to have them, as their numbers."""
        return self._seating.seat(caches)

    def unseat(self, caches: list[Any]) -> None:
        """The lane whose caches these are has rows of its own, until a call seats it again."""
        self._seating.unseat(caches)

    def batch(self, sizes: Sequence[int], caches: Sequence[list[Any]]) -> Batch | None:
        """What makes the call on so many rows of each lane as a batch; None where it is none."""
        batch = self._batch
        if batch is None or len({*sizes}) > 1 or not batch.ready(caches, self._seating):
            return None
        return batch

    def call(self, feeds: Sequence[Feed], caches: Sequence[list[Any]]) -> tuple[mx.array, Any]:
        """One model call. feeds: a lane's tokens, int32 arrays (n,) where not known yet; caches: a
        lane's caches. Returns the logits of all rows (N, V), those of the first lane first, and a
        tree of what is to be evaluated with them."""
        return run(self.model, feeds, caches, self._stacks)[:2]


def run(
    model: Any, feeds: Sequence[Feed], caches: Sequence[list[Any]], stacks: Stacks
) -> tuple[mx.array, Any, Call]:
    call = Call([len(feed) for feed in feeds], stacks)
    stand_ins = [LaneCache(own, call, (i,)) for i, own in enumerate(zip(*caches, strict=True))]
    try:
        logits = model(ids(feeds)[None], cache=stand_ins)[0]
    finally:
        call.close()
    return logits, [own.live() for own in stand_ins], call


class _Arming:
    """The way in which each class of modules runs on lanes, found by trial and proved.

    places: the caches that may have an arena. has_batch: whether calls on equally many tokens
    of each lane may be a batch's.
    """

    def __init__(self, model: Any, new_caches: Callable[[], list[Any]]):
        self._model = model
        self._new_caches = new_caches
        self._own = {id(m): type(m) for m in model.modules()}  # classes before arming
        self._mixers = {id(m) for m in model.modules() if _is_mixer(m)}
        self._ways = {type(m): _first_way(type(m)) for m in model.modules() if _is_mixer(m)}
        self._swaps = Swaps()
        self.places: list[Place] = []
        self._has_batch = True
        try:
            self._search()
        finally:
            self.undo()

    def arm(self) -> None:
        self._swaps = self._armed()

    def undo(self) -> None:
        self._swaps.undo()

    def fits(self) -> bool:
        """Whether the model's modules are what they were."""
        return self._own == {id(m): type(m) for m in self._model.modules()}

    def batch(self) -> Batch | None:
        """What runs calls on equally many tokens of each lane; None where no batch can."""
        if not self._has_batch:
            return None
        return Batch.of(self._model, self._new_caches(), self.places)

    def _search(self) -> None:
        self.places = self._probe()
        reason = self._difference()
        if reason and self._has_batch:
            self._has_batch = False
            reason = self._difference()
        if reason and set(self._ways.values()) != {BY_LANE}:
            self._ways = dict.fromkeys(self._ways, BY_LANE)
            self.places = self._probe()
            reason = self._difference()
        if reason:
            raise ModelError(reason)

    def _probe(self) -> list[Place]:
        """Arm the model so that calls can be built; nothing is evaluated. Returns which caches may
        have an arena: those that take the rows of all lanes at once."""
        while True:
            self.undo()
            self.arm()
            caches = [self._new_caches() for _ in START_ROWS]
            for own, n in zip(caches, START_ROWS, strict=True):
                self._model(mx.zeros((1, n), mx.int32), cache=own)
            try:
                for sizes in TRIALS:
                    *_, call = run(self._model, [[1] * n for n in sizes], caches, Stacks())
                return [place for place, kind in call.joined.items() if kind is KVCache]
            except Exception as error:
                if not self._grow(error):
                    raise ModelError(_reason(self._model, error)) from error

    def _armed(self) -> Swaps:
        """The model with its mixers in the ways wanted, but for those inside one that runs apart
        from other lanes."""
        swaps, ways = Swaps(), self._ways
        modules = [m for m in self._model.modules() if id(m) in self._mixers]
        separate = [m for m in modules if ways[type(m)] != JOINED]
        inside = {id(part) for m in separate for part in m.modules() if part is not m}
        done: set[int] = set()
        for module in modules:
            for part, cls in () if id(module) in inside else _parts(module, ways[type(module)]):
                if id(part) not in done:
                    swaps.swap(part, cls)
                    done.add(id(part))
        return swaps

    def _grow(self, error: Exception) -> bool:
        """Run lane by lane what failed, or what is around it; False where nothing is left."""
        modules = list(_modules_of(error))[::-1]
        for module in modules:
            way = self._ways.get(self._own[id(module)])
            if id(module) in self._mixers and way in WORSE:
                self._ways[self._own[id(module)]] = WORSE[way]
                return True
        for module in modules:
            own = self._own[id(module)]
            if id(module) not in self._mixers:
                self._mixers |= {i for i, cls in self._own.items() if cls is own}
                self._ways[own] = STACKED
                return True
        return False

    def _difference(self) -> str:
        """Where lanes differ from calls alone by more than rounding, in words; empty if nowhere."""
        lengths = [sum(sizes) for sizes in zip(START_ROWS, *TRIALS, strict=True)]
        texts = [[lane + i for i in range(1, n + 1)] for lane, n in enumerate(lengths)]
        alone = [self._model(mx.array([text]), cache=self._new_caches())[0] for text in texts]
        together, done = [self._new_caches() for _ in texts], list(START_ROWS)
        for text, caches, n in zip(texts, together, done, strict=True):
            self._model(mx.array([text[:n]]), cache=caches)
        seating, batch, stacks, far = Seating(self.places), self.batch(), Stacks(), 0.0
        for sizes in TRIALS:
            order = seating.seat(together)
            feeds = [texts[i][done[i] : done[i] + sizes[i]] for i in order]
            own = [together[i] for i in order]
            if batch is not None and len({*sizes}) == 1 and batch.ready(own, seating):
                try:
                    rows, _ = batch.call(feeds, own)
                except Exception as error:  # whatever a model does with what it is given
                    return _reason(self._model, error)
            else:
                rows = run(self._model, feeds, own, stacks)[0]
            spans = pairwise(accumulate(map(len, feeds), initial=0))
            for i, (a, b) in zip(order, spans, strict=True):
                far = max(far, _difference(rows[a:b], alone[i][done[i] : done[i] + b - a]))
                done[i] += b - a
        far /= max(1.0, SPREADS * self._spread()) if far > 1 else 1.0
        problem = f"its lanes differ from calls alone by {far:.2g} times what is allowed"
        return problem if far > 1 else ""

    def _spread(self) -> float:
        """How far the model's own calls of one row and of many differ in half precision, in units
        of what is allowed: their products round otherwise, and every layer adds to that."""
        at_once, one_by_one = self._new_caches(), self._new_caches()
        rows = self._model(mx.arange(1, SPREAD_ROWS + 1)[None], cache=at_once)[0]
        if rows.dtype == mx.float32:
            return 0.0
        single = [
            self._model(mx.array([[i]]), cache=one_by_one)[0] for i in range(1, SPREAD_ROWS + 1)
        ]
        return _difference(mx.concatenate(single), rows)


def _difference(rows: mx.array, expected: mx.array) -> float:
    """In units of what is allowed."""
    allowed = _TOLERANCE if expected.dtype == mx.float32 else _TOLERANCE_HALF
    a, b = rows.astype(mx.float32), expected.astype(mx.float32)
    error = mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)
    return number(error) / allowed if mx.isfinite(error).item() else float("inf")


def _parts(module: nn.Module, way: str) -> Iterator[tuple[nn.Module, type]]:
    """The module and what inside it takes part, each with the class that knows lanes."""
    cls = _class(module)
    if way == JOINED:
        yield module, attention.joined(cls)
        for part in attention.rotations(module):
            yield part, attention.at_positions(_class(part))
        return
    yield module, stacked(cls) if way == STACKED else by_lane(cls)
    for part in module.modules():
        if part is not module and type(part) in SHARED:
            yield part, sharing(_class(part))


def _is_mixer(module: nn.Module) -> bool:
    """Whether it is handed a cache and nothing inside it is."""
    takers = [part for part in module.modules() if _takes_cache(_class(part))]
    return len(takers) == 1 and takers[0] is module


def _class(module: nn.Module) -> type:
    return type(module)


@cache
def _takes_cache(cls: type) -> bool:
    """Whether calls of it are given a cache; what records them takes any arguments."""
    own = (vars(base).get("__call__") for base in cls.__mro__)
    return any("cache" in signature(call).parameters for call in own if isfunction(call))


def _first_way(cls: type) -> str:
    if attention.is_plain(cls):
        return JOINED
    return BY_LANE if "update_and_fetch" in names_used(cls) else STACKED


def _modules_of(error: Exception) -> Iterator[nn.Module]:
    """The modules in whose calls it was raised and that were handed stand-ins of one layer,
    outermost first."""
    trace = error.__traceback__
    while trace is not None:
        values = list(chain.from_iterable(map(_arguments, trace.tb_frame.f_locals.values())))
        module = trace.tb_frame.f_locals.get("self")
        is_stack = any(isinstance(v, list) and call_of(v) is not None for v in values)
        if isinstance(module, nn.Module) and call_of(values) is not None and not is_stack:
            yield module
        trace = trace.tb_next


def _arguments(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


def _reason(model: Any, error: Exception) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return f"`{type(model).__module__}` cannot run several texts in one call: {words[0]}"
