"""Connections between rank 0 and the others: JSON values, one a line.

The model's own sums travel through MLX; what is decided travels here, because a connection says at
once that its other end has gone, which a collective does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import Any

from ds4cli.errors import RankError

# A machine that was switched off says nothing: its silence is noticed after IDLE_S + TRIES * TRY_S.
IDLE_S, TRY_S, TRIES = 3, 2, 3
CONNECT_S = 5.0
PIECE_BYTES = 1 << 16
LOOPBACK = "127.0.0.1"


class Wire:
    """One connection. RankError where the other end has gone."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._read = b""
        self.peer = connection.getpeername()[0]

    def send(self, *messages: Any) -> None:
        """Send all of them in one go."""
        self.send_lines(lines(messages))

    def send_lines(self, data: bytes) -> None:
        """Send what `lines` made."""
        try:
            self._socket.sendall(data)
        except OSError:
            raise RankError("the connection is lost") from None

    def receive(self, limit_bytes: int | None = None) -> Any:
        """The next message; waits for it."""
        try:
            while not self.has_message:
                data = self._socket.recv(PIECE_BYTES)
                self._read += data
                if not data or (limit_bytes is not None and len(self._read) > limit_bytes):
                    raise OSError
            line, _, self._read = self._read.partition(b"\n")
            return json.loads(line)
        except (OSError, ValueError):
            raise RankError("the connection is lost") from None

    @property
    def has_message(self) -> bool:
        """Whether a whole message has been read already, and waits here."""
        return b"\n" in self._read

    def fileno(self) -> int:
        """For who waits for several."""
        return self._socket.fileno()

    def wait_at_most(self, seconds: float | None) -> None:
        """How long `receive` waits; None: until something comes."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Let the other end see that nothing more comes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def have_said(wires: Sequence[Wire], wait_s: float) -> list[Wire]:
    """Those that a message waits at, or begins to come in; waits so long for the first one."""
    ready = [each for each in wires if each.has_message]
    return ready or select.select(wires, [], [], wait_s)[0]


def lines(messages: Sequence[Any]) -> bytes:
    """Messages as they travel."""
    return b"".join(json.dumps(m, separators=(",", ":")).encode() + b"\n" for m in messages)


def listen(addresses: Sequence[str]) -> socket.socket:
    """A socket that takes connections; from this machine only, where nobody comes from another."""
    here = all(address == LOOPBACK for address in addresses)
    return socket.create_server((LOOPBACK if here else "", 0))


def accept(server: socket.socket) -> Wire:
    """The next connection. OSError where none comes in time."""
    connection, _ = server.accept()
    connection.settimeout(CONNECT_S)
    return Wire(_tuned(connection))


def connect(addresses: Sequence[str], port: int) -> Wire:
    """A connection to the first of `addresses` that takes one."""
    for address in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), CONNECT_S)
            return Wire(_tuned(connection))
    raise RankError(f"rank 0 is not reached at {', '.join(addresses)}, port {port}")


def _tuned(connection: socket.socket) -> socket.socket:
    """Small messages go at once, and a machine that has gone is missed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in ((idle, IDLE_S), ("TCP_KEEPINTVL", TRY_S), ("TCP_KEEPCNT", TRIES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def own_addresses() -> list[str]:
    """Where others may reach this process, likeliest first: as MLX's launchers say, by name."""
    found = [*_of_hostfile(), os.environ.get("NCCL_HOST_IP", "")]
    found.append(os.environ.get("MLX_JACCL_COORDINATOR", "").partition(":")[0])
    if not any(found):
        with contextlib.suppress(OSError):
            found += socket.gethostbyname_ex(socket.gethostname())[2]
        found.append(LOOPBACK)
    return list(dict.fromkeys(address for address in found if address))


def _of_hostfile() -> list[str]:
    """The addresses of rank 0 in the file that the ring reads."""
    try:
        with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as file:
            places = json.load(file)[0]
    except (KeyError, OSError, ValueError, IndexError):
        return []
    return [place.rpartition(":")[0] for place in places]
