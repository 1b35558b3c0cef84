"""Real processes for tests of batches, without paying for imports each time.

As a script: imports everything, then forks one process per job that it reads from standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Much more than any of these processes needs on a busy machine.
LIMIT_S = 120


class Zygote:
    """Starts `ds4cli` with arguments, one process at a time."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def start(self, args: Sequence[Any], folder: Path, **job: Any) -> int:
        """The pid of a new process; its standard streams are files in `folder`.

        job: stdin and stdout (names of files, `/dev/null` and `stdout` by default), fsize (largest
        file it may write, bytes).
        """
        words = [str(arg) for arg in args]
        for name in ("stdout", "stderr"):
            (folder / name).write_bytes(b"")
        request = {"args": words, "folder": str(folder), **job}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._child = self._read()
        return self._child

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = self._read()
        self._child = None
        return code

    def _read(self) -> int:
        """The next number; without a buffer, in which a second one could hide from `select`."""
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        assert ready, f"nothing came in {LIMIT_S} s"
        return int(self._process.stdout.readline())

    def stop(self) -> None:
        """End a process that a failed test left."""
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def serve() -> None:
    from ds4cli import batch, cli  # noqa: F401 - imported once, for all children
    from ds4cli.engine import engine  # noqa: F401 - imported once, for all children

    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(child(cli, job))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def child(cli: Any, job: dict[str, Any]) -> int:
    import resource

    os.chdir(job["folder"])
    streams = (
        (job.get("stdin", "/dev/null"), os.O_RDONLY),
        (job.get("stdout", "stdout"), os.O_RDWR | os.O_APPEND),
        ("stderr", os.O_RDWR),
    )
    for number, (name, mode) in enumerate(streams):
        os.dup2(os.open(name, mode), number)
    if "fsize" in job:
        sys.dont_write_bytecode = True  # Python would take half a file for a whole one
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["fsize"], job["fsize"]))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a new buffer: the old one has our jobs
    try:
        cli.app(job["args"])
    except SystemExit as end:
        return end.code or 0
    return 1


if __name__ == "__main__":
    serve()
