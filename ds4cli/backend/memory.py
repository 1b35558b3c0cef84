"""Memory as Metal gives it out: what of it stays wired, and whole pages to every array.

macOS takes memory of the GPU that is not wired away between calls; a model near the size of the
memory then runs 10 to 100 times slower. Wiring more than there is room for stops the whole machine
instead. So what a session needs is wired, never more than the system recommends, and nothing where
the weights alone do not fit.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

# What the rest of the system is left, at least.
SYSTEM_SHARE, SYSTEM_BYTES = 0.25, 4 << 30
# A freed array of at most so many bytes goes to a heap; every other one has pages of its own.
HEAP_BYTES = 256
# Tokens between two clearings of the memory that MLX keeps of freed arrays, as in mlx-lm.
CLEAR_TOKENS = 256


def on_metal() -> bool:
    """Whether arrays lie in Metal's memory here: the one switch for all that this module does."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


# -- wired -----------------------------------------------------------------------------------------


def wired_bytes(weights: int, more: int, recommended: int, total: int) -> int:
    """How much to wire for weights and `more` (caches, what going back keeps), of a machine with
    `total` bytes of which it recommends so many for the GPU; 0: the weights do not fit."""
    room = min(recommended, total - max(SYSTEM_BYTES, int(SYSTEM_SHARE * total)))
    return 0 if weights > room else min(weights + more, room)


class Wiring:
    """The wired limit of this process: the sum of what those who live ask for."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._before: int | None = None  # the limit before anybody asked

    @property
    def nbytes(self) -> int:
        """How much is wired now."""
        return sum(self._asked.values())

    def ask(self, owner: object, weights: int, more: int) -> list[str]:
        """Wire for `owner` until it is gone; returns what to say where nothing can be wired."""
        recommended, total = _room()
        held = self.nbytes
        nbytes = wired_bytes(held + weights, more, recommended, total) - held
        if nbytes <= 0:
            return [
                f"the weights take {weights / 1e9:.1f} GB, more than can be kept in the "
                f"{total / 1e9:.1f} GB of this machine: each token may wait for the disk"
            ]
        self._asked[id(owner)] = nbytes
        weakref.finalize(owner, self._release, id(owner))
        self._apply()
        return []

    def _release(self, key: int) -> None:
        self._asked.pop(key)
        self._apply()

    def _apply(self) -> None:
        mx.synchronize()  # the limit must not change under running work
        total = self.nbytes
        was = mx.set_wired_limit(total or self._before or 0)
        self._before = None if not total else was if self._before is None else self._before


WIRING = Wiring()


def _room() -> tuple[int, int]:
    """What the GPU may use, and the machine's memory."""
    recommended = mx.device_info(mx.default_device())["max_recommended_working_set_size"]
    return int(recommended), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """About how much memory is left for arrays."""
    if mx.default_device() == mx.cpu:
        return _available()
    known = mx.device_info(mx.default_device())
    names = "max_recommended_working_set_size", "total_memory", "memory_size"
    total = next((int(known[name]) for name in names if name in known), _available())
    return max(0, total - mx.get_active_memory())


def _available() -> int:
    """What the system would give without paging; half of all memory where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# -- pages -----------------------------------------------------------------------------------------


def page_bytes() -> int:
    """The unit in which an array takes memory; 1 where none is known."""
    return mmap.PAGESIZE if on_metal() else 1


def in_pages(nbytes: int, page: int) -> int:
    """What an array of so many bytes takes."""
    return nbytes if nbytes <= HEAP_BYTES else -(-nbytes // page) * page


def taken_bytes(arrays: Iterable[mx.array]) -> int:
    """What these arrays take, each on its own."""
    page = page_bytes()
    if page == 1:
        return sum(x.nbytes for x in arrays)
    return sum(in_pages(x.nbytes, page) for x in arrays)
