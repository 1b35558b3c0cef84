"""The ranks of one run: how they meet, what they tell each other, how they end together.

Rank 0 leads: it runs the program, and tells the others each move of its timelines. A second
connection to each rank carries signs of life and its last words; a thread waits for these, so that
no rank outlives another, whatever the main threads wait for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ds4cli import __version__, signals
from ds4cli.errors import RankError
from ds4cli.ranks import wire
from ds4cli.ranks.wire import Wire

if TYPE_CHECKING:
    import mlx.core as mx

    from ds4cli.models.sharding import Share

LAST_WORDS_S = 2.0  # for a thread to say who is lost, when a collective has failed already
END_S = 5.0  # for the others to end by themselves
END = "end"
# A thread of each rank says so often that its process runs, whatever call it is in; a rank that
# says nothing for so long is lost. Loading a large tokenizer may hold up Python for seconds.
BEAT_S, SILENT_S = 1.0, 15.0
BEAT = 0


def versions() -> list[str]:
    """What has to be equal on all ranks."""
    return [f"ds4cli {__version__}", *(f"{n} {metadata.version(n)}" for n in ("mlx", "mlx-lm"))]


class Group:
    """What both kinds of rank have. comm: MLX's own group."""

    def __init__(self, comm: mx.distributed.Group):
        self.comm, self.rank, self.size = comm, comm.rank(), comm.size()

    def share(self, how: str) -> Share:
        """This rank's part of a model. how: see `Share`."""
        from ds4cli.models.sharding import Share

        return Share(self.comm, how)

    def spread(self, token: mx.array, limit: int | None) -> mx.array:
        """Rank 0's token ids (n,), int32, below `limit`, on every rank: the others give zeros. It
        is a part of the graph, so a token that is not known yet travels too."""
        import mlx.core as mx

        sent = mx.distributed.all_sum(token, group=self.comm)
        # With a rank that is lost the sum is anything, MLX goes on, and looks it up in a table.
        return sent if limit is None else mx.clip(sent, 0, limit - 1)

    def check(self, facts: dict[str, Any]) -> None:
        """RankError on rank 0 unless all say the same `facts`, JSON, of what they have loaded."""
        raise NotImplementedError

    def rename(self, path: str, new: str) -> None:
        """Give the others' parts of what rank 0 keeps at `path` another name."""
        raise NotImplementedError


class Leading(Group):
    """Rank 0's side. after: sees to a rank that has gone or is silent; what its launcher knows, in
    words. watch: the thread that waits for that."""

    def __init__(self, comm: mx.distributed.Group, moves: dict[int, Wire], lives: dict[int, Wire]):
        super().__init__(comm)
        self._moves, self._lives = moves, lives
        self._due: list[Any] = []
        self._is_over = False
        self._numbers = itertools.count()
        self.after: Callable[[int], str] = lambda rank: ""
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def begin(self, settings: dict[str, Any]) -> None:
        """Let the others load what this rank loads."""
        self.tell("load", settings)
        self.flush()

    def number(self) -> int:
        """A new name for a timeline."""
        return next(self._numbers)

    def tell(self, *move: Any) -> None:
        """Tell the others a move; it goes with the next `flush`."""
        self._due.append(move)

    def flush(self) -> None:
        """Send what is to be told."""
        due, self._due = self._due, []
        data = wire.lines(due)
        for rank in self._moves:
            self._moves[rank].send_lines(data)

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return list(self._moves)

    def tell_one(self, rank: int, what: Any) -> None:
        """Tell something to one rank only, now."""
        with self.together():
            self._moves[rank].send(what)

    def have_said(self, wait_s: float) -> list[int]:
        """The ranks that have something to say; waits so long for the first one."""
        ready = wire.have_said(list(self._moves.values()), wait_s)
        return [rank for rank, moves in self._moves.items() if moves in ready]

    def heard(self, rank: int) -> Any:
        """What a rank says, unasked."""
        with self.together():
            return self._moves[rank].receive()

    def answers(self) -> dict[int, Any]:
        """What each rank answers to the move that was told last."""
        return {rank: moves.receive() for rank, moves in self._moves.items()}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do now: where it fails here, they are no longer at one."""
        try:
            yield
        except Exception as error:
            time.sleep(LAST_WORDS_S)  # if a rank is lost, that thread ends all
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise RankError(f"the ranks are no longer at one: {said[0]}") from error

    def check(self, facts: dict[str, Any]) -> None:
        """See `Group.check`."""
        for rank, moves in self._moves.items():
            theirs = moves.receive()
            for name, own in facts.items():
                if theirs.get(name) != own:
                    raise RankError(
                        f"rank {rank} ({moves.peer}) and rank 0 differ in {name}: "
                        f"`{theirs.get(name)}`, `{own}`",
                        "all ranks need the same model, settings and versions",
                    )

    def rename(self, path: str, new: str) -> None:
        """See `Group.rename`."""
        with self.together():
            self.tell("rename", path, new)
            self.flush()

    def _watch(self) -> None:
        """Wait for a rank that says its last words, goes without, or is silent; at the end, for all
        to go."""
        heard = dict.fromkeys(self._lives, time.monotonic())
        with selectors.DefaultSelector() as waiting:
            for rank, life in self._lives.items():
                waiting.register(life.fileno(), selectors.EVENT_READ, rank)
            while heard:
                for key, _ in waiting.select(BEAT_S):
                    heard[key.data] = time.monotonic()
                    if not self._is_alive(key.data):
                        waiting.unregister(key.fileobj)
                        del heard[key.data]
                for rank in heard if not self._is_over else ():
                    self._check_heard(rank, heard[rank])

    def _check_heard(self, rank: int, when: float) -> None:
        """All ends here if a rank was heard too long ago. If this process was stopped, and goes on,
        it has only not been listened to."""
        is_silent = time.monotonic() - when > SILENT_S
        if is_silent and not wire.have_said([self._lives[rank]], 0.0):
            self._lost(rank, f"it has said nothing for {SILENT_S:.0f} s")

    def _is_alive(self, rank: int) -> bool:
        """Whether a rank's signs of life have been read. All ends here if it has gone too early."""
        words, life = "", self._lives[rank]
        with contextlib.suppress(RankError):
            words = life.receive()
            while words == BEAT and life.has_message:
                words = life.receive()
            if words == BEAT:
                return True
        if not self._is_over:
            self._lost(rank, words)
        return False

    def _lost(self, rank: int, words: str) -> None:
        said = self.after(rank)
        signals.fail_now(f"rank {rank} ({self._lives[rank].peer}): {words or said or 'it is gone'}")

    def close(self) -> None:
        """Let the others go when all is done, and wait for them."""
        import mlx.core as mx

        self._is_over = True
        with contextlib.suppress(RankError):
            self.tell(END)
            self.flush()
            mx.synchronize()  # a call that ran ahead needs all of them
        self.watch.join(END_S)

    def leave(self) -> None:
        """Let the others go at once: this process is being ended."""
        self._is_over = True
        for life in self._lives.values():
            with contextlib.suppress(RankError):
                life.send(END)


class Following(Group):
    """The side of the others."""

    def __init__(self, comm: mx.distributed.Group, moves: Wire, life: Wire):
        super().__init__(comm)
        self._moves, self._life = moves, life
        self._speaking = threading.Lock()
        for work in (self._watch, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def next(self) -> Any:
        """The next move; waits for it."""
        return self._moves.receive()

    @property
    def is_told(self) -> bool:
        """Whether the next move has come, or begun to."""
        return bool(wire.have_said([self._moves], 0.0))

    def answer(self, value: Any) -> None:
        """What rank 0 asked for."""
        self._moves.send(value)

    def check(self, facts: dict[str, Any]) -> None:
        """See `Group.check`."""
        self._moves.send(facts)

    def last_words(self, text: str) -> None:
        """Tell rank 0 why this rank ends."""
        with contextlib.suppress(RankError), self._speaking:
            self._life.send(text)

    def _beat(self) -> None:
        """Tell rank 0 that this process runs, until rank 0 has gone."""
        with contextlib.suppress(RankError):
            while True:
                with self._speaking:
                    self._life.send(BEAT)
                time.sleep(BEAT_S)

    def _watch(self) -> None:
        """Rank 0 says that it is over, or has gone."""
        try:
            self._life.receive()
        except RankError:
            signals.fail_now("rank 0 is gone")
        os._exit(0)
