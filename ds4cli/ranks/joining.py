"""How ranks find each other: MLX's own group, and a pair of connections to rank 0.

Where rank 0 has started the others, the connections come first: until all are there, one that is
lost is noticed, which cannot be while MLX waits. Where a launcher has started all of them, MLX's
group comes first, and says where rank 0 is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ds4cli import signals
from ds4cli.errors import RankError
from ds4cli.ranks import wire
from ds4cli.ranks.group import Following, Leading
from ds4cli.ranks.number import own_rank
from ds4cli.ranks.wire import Wire

if TYPE_CHECKING:
    import mlx.core as mx

# Where rank 0 waits, for those that it has started itself.
DOOR = "DS4CLI_RANK_0"
JOIN_S = 120.0  # until all ranks have come
TEXT_BYTES = 1024
KINDS = MOVES, LIFE = "moves", "life"


class Door:
    """Where rank 0 takes the connections of the others. addresses: those it is reached at."""

    def __init__(self, addresses: Sequence[str]):
        self.addresses = addresses
        self._server = wire.listen(addresses)

    def where(self) -> str:
        """What the others need to find it, as text."""
        return json.dumps([*self.addresses, self._server.getsockname()[1]])

    def take_all(self, size: int) -> dict[str, dict[int, Wire]]:
        """Both connections of each rank. RankError if they have not come in time."""
        found: dict[str, dict[int, Wire]] = {kind: {} for kind in KINDS}
        last = time.monotonic() + JOIN_S
        while any(len(wires) < size - 1 for wires in found.values()):
            self._server.settimeout(max(0.1, last - time.monotonic()))
            try:
                came = wire.accept(self._server)
                kind, rank = came.receive(TEXT_BYTES)
                found[kind][int(rank)] = came
            except TimeoutError:
                missing = [str(r) for r in range(1, size) if r not in found[LIFE]]
                said = f"has not come within {JOIN_S:.0f} s"
                raise RankError(f"rank {', '.join(missing)} {said}") from None
            except (RankError, ValueError, TypeError, KeyError):
                continue  # a stranger on the network
        self._server.close()
        return found


def lead(door: Door | None, size: int) -> Leading | None:
    """Rank 0 of `size`, whose others come to `door`; of a launcher's ranks without one, and None if
    there are no others. RankError where they do not come."""
    if door is None:
        with _limited():
            comm = _init()
            if comm.size() == 1:
                return None
            door = Door(wire.own_addresses())
            _spread(comm, door.where())
        found = door.take_all(comm.size())
    else:
        found = door.take_all(size)
        for life in found[LIFE].values():
            life.send("all are here")
        with _limited():
            comm = _init()
    with _limited():
        _check_secret(comm, [came for wires in found.values() for came in wires.values()])
    return Leading(comm, found[MOVES], found[LIFE])


def _check_secret(comm: mx.distributed.Group, came: Sequence[Wire]) -> None:
    """RankError unless all who came are in the group: what is said there, others do not know."""
    secret = secrets.token_hex(16)
    _spread(comm, secret)
    for each in came:
        if each.receive(TEXT_BYTES) != secret:
            raise RankError(f"somebody at {each.peer} came in place of a rank")
        each.wait_at_most(None)


def follow() -> Following:
    """Another rank. RankError where rank 0 is not found."""
    where, comm = os.environ.get(DOOR), None
    if not where:
        with _limited():
            comm = _init()
            where = _spread(comm, "")
    *addresses, port = json.loads(where)
    moves, life = (wire.connect(addresses, port) for _ in KINDS)
    for kind, made in ((MOVES, moves), (LIFE, life)):
        made.send([kind, own_rank()])
        made.wait_at_most(None)
    if comm is None:
        life.receive()
    with _limited():
        comm = comm or _init()
        secret = _spread(comm, "")
    moves.send(secret)
    life.send(secret)
    return Following(comm, moves, life)


def _init() -> mx.distributed.Group:
    """MLX's group of all ranks."""
    import mlx.core as mx

    try:
        return mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise RankError(f"the ranks do not meet: {error}") from None


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Around what waits for the other ranks before the group watches them. MLX waits with Python
    standing still: a signal ends that at once, unless it is ignored, or a watch that is none of
    Python's."""
    before = {number: signal.getsignal(number) for number in (*signals.DEADLY, signal.SIGINT)}
    faulthandler.dump_traceback_later(JOIN_S, exit=True)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        faulthandler.cancel_dump_traceback_later()


def _spread(comm: mx.distributed.Group | None, text: str) -> str:
    """Rank 0's `text`, on every rank; the others give none."""
    import mlx.core as mx

    padded = mx.array(list(text.encode().ljust(TEXT_BYTES, b"\0")), mx.int32)
    sent: Any = mx.distributed.all_sum(padded, group=comm).tolist()
    return bytes(sent).rstrip(b"\0").decode()
