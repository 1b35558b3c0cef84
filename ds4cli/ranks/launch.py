"""Starting the other ranks from rank 0, as MLX's own launcher starts all of them.

So rank 0 keeps the terminal. Processes on this machine are started directly, others by ssh; each is
told its number and where the rest are by the variables that MLX's backend reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4cli import signals
from ds4cli.errors import UsageError
from ds4cli.ranks import wire

# As in MLX's launcher.
FIRST_PORT, NCCL_PORT = 32323, 12345
HOSTS_HINT = "`mlx.distributed_config` writes such files"
COMMAND = ("-m", "ds4cli", "generate")  # a rank that is not the first follows, whatever the command
KEPT_LINES = 20
SSH_FAILED = 255  # ssh's own failure, not one of the command
END_S = 5.0  # for a follower to end by itself
LOCAL = (wire.LOOPBACK, "localhost")


@dataclass
class Place:
    """Where one rank runs. addresses: where others reach it. variables: what MLX reads; files:
    of those, names of files that hold what is given here."""

    host: str
    addresses: Sequence[str] = (wire.LOOPBACK,)
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def local(count: int) -> list[Place]:
    """So many ranks on this machine."""
    import mlx.core as mx

    places = [Place(wire.LOOPBACK) for _ in range(count)]
    if mx.cuda.is_available():
        _use_nccl(places, wire.LOOPBACK, _free_ports(1)[0])
        for rank, place in enumerate(places):
            place.variables["CUDA_VISIBLE_DEVICES"] = str(rank)
    else:
        _use_ring(places, [[f"{wire.LOOPBACK}:{port}"] for port in _free_ports(count)])
    return _numbered(places)


def listed(path: str) -> list[Place]:
    """The ranks of a host file, in MLX's form. UsageError for one that is none."""
    try:
        data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        data = data if isinstance(data, dict) else {"hosts": data}
        hosts = [(host["ssh"], host["ips"], host.get("rdma", [])) for host in data["hosts"]]
        for name, ips, _ in hosts:
            if not isinstance(ips, list) or not all(type(x) is str for x in (name, *ips)):
                raise ValueError("`ssh` has to be a name, `ips` a list of addresses")
        variables = dict(variable.split("=", 1) for variable in data.get("envs", []))
        if not all(map(str.isidentifier, variables)):
            raise ValueError("`envs` has to be a list of NAME=VALUE")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"cannot read the host file `{path}`: {_why(error)}"
        raise UsageError(reason, HOSTS_HINT) from None
    if len(hosts) < 2 or not all(ips for _, ips, _ in hosts):
        raise UsageError(f"`{path}` has to name two hosts or more, each with its `ips`", HOSTS_HINT)
    places = [Place(name, ips) for name, ips, _ in hosts]
    _tell_backend(places, data.get("backend") or "ring", [rdma for *_, rdma in hosts], path)
    for place in places:
        place.variables |= variables
    return _numbered(places)


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"`{error.args[0]}` is missing in it"
    return getattr(error, "strerror", None) or str(error)


def _tell_backend(places: Sequence[Place], backend: str, rdma: list[Any], path: str) -> None:
    if backend == "ring":
        ports = iter(range(FIRST_PORT, FIRST_PORT + sum(len(p.addresses) for p in places)))
        _use_ring(places, [[f"{ip}:{next(ports)}" for ip in place.addresses] for place in places])
    elif backend == "nccl":
        _use_nccl(places, places[0].addresses[0], NCCL_PORT)
    elif backend in ("jaccl", "jaccl-ring"):
        _use_jaccl(places, rdma, backend == "jaccl-ring")
    else:
        raise UsageError(f"`{path}`: the backend is `{backend}`", "ring, jaccl, jaccl-ring or nccl")


def addresses(places: Sequence[Place]) -> list[str]:
    """Where rank 0 is reached."""
    return list(places[0].addresses)


def _numbered(places: list[Place]) -> list[Place]:
    for rank, place in enumerate(places):
        place.variables["MLX_RANK"] = str(rank)
    return places


def _use_ring(places: Sequence[Place], doors: list[list[str]]) -> None:
    for place in places:
        place.files["MLX_HOSTFILE"] = json.dumps(doors)


def _use_nccl(places: Sequence[Place], host: str, port: int) -> None:
    for place in places:
        place.variables |= {
            "NCCL_HOST_IP": host,
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(len(places)),
        }


def _use_jaccl(places: Sequence[Place], rdma: list[Any], is_ring: bool) -> None:
    for place in places:
        place.variables["MLX_JACCL_COORDINATOR"] = f"{places[0].addresses[0]}:{FIRST_PORT}"
        place.files["MLX_IBV_DEVICES"] = json.dumps(rdma)
        if is_ring:
            place.variables["MLX_JACCL_RING"] = "1"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((wire.LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


class Follower:
    """One process that was started, here or by ssh."""

    def __init__(self, place: Place, folder: str):
        self.host = place.host
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        is_here = place.host in LOCAL
        command = [sys.executable, *COMMAND] if is_here else _by_ssh(place)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if is_here else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_written(place, folder)} if is_here else None,
            start_new_session=True,  # Ctrl-C is for rank 0
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._said.append(line.decode(errors="replace").strip())

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def epitaph(self) -> str:
        """Why it ended, in words: what it said last, and how it went. One that has not ended, as it
        hangs or is stopped, is ended."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self.kill()
            return ""
        self._reader.join(1)
        errors = [line for line in self._said if "rror" in line]
        if code == SSH_FAILED and self.host not in LOCAL:
            said = f": {self._said[-1]}" if self._said else ""
            return f"ssh does not reach it, or lost it{said}"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"it has ended ({how})" + (f": {errors[-1]}" if errors else "")

    def end(self) -> None:
        """Wait a little for its end, then end it."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()


def _written(place: Place, folder: str) -> dict[str, str]:
    """All variables of a process on this machine, its files written to `folder`."""
    found = dict(place.variables)
    for name, text in place.files.items():
        path = os.path.join(folder, f"{name}-{place.variables['MLX_RANK']}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        found[name] = path
    return found


def _by_ssh(place: Place) -> list[str]:
    """The command that starts a rank on another machine, in the same folder where there is one."""
    steps = [f"cd {shlex.quote(os.getcwd())} 2>/dev/null", "set -e"]
    steps += [f"export {name}={shlex.quote(value)}" for name, value in place.variables.items()]
    for name, text in place.files.items():
        steps.append(f"export {name}=$(mktemp); printf %s {shlex.quote(text)} > ${name}")
    steps.append(f"exec {shlex.join([sys.executable, *COMMAND])}")
    return [
        "ssh",
        "-tt",
        *("-o", "LogLevel=ERROR"),
        *("-o", "BatchMode=yes"),  # nobody can answer its questions
        place.host,
        f"bash -c {shlex.quote('; '.join(steps))}",
    ]


class Followers:
    """All processes that rank 0 has started; they end with it, however it ends."""

    def __init__(self, places: Sequence[Place]):
        self._folder = tempfile.TemporaryDirectory(prefix="ds4cli-ranks-")
        os.environ.update(_written(places[0], self._folder.name))
        self._all = {
            rank: Follower(place, self._folder.name)
            for rank, place in enumerate(places)
            if rank > 0
        }
        self._have_met = threading.Event()
        signals.at_end(self.end, self.leave)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Until all have met, one that ends is noticed here: the others would wait for it."""
        while not self._have_met.wait(0.2):
            for rank, follower in self._all.items():
                if follower.poll() is not None:
                    signals.fail_now(f"rank {rank} ({follower.host}): {follower.epitaph()}")

    def met(self) -> None:
        """From here on the group watches them."""
        self._have_met.set()

    def epitaph(self, rank: int) -> str:
        """Why a rank ended."""
        return self._all[rank].epitaph()

    def end(self) -> None:
        """Wait for all to end: they have been told to, if they have met."""
        if not self._have_met.is_set():
            self.leave()
        for follower in self._all.values():
            follower.end()
        self._folder.cleanup()

    def leave(self) -> None:
        """Those that have met hear from the group that it is over; others do not wait for it."""
        for follower in () if self._have_met.is_set() else self._all.values():
            follower.kill()
        self._have_met.set()
        self._folder.cleanup()
