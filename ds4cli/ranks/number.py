"""Whether this process is one of several ranks, and which; known without loading anything."""

from __future__ import annotations

import os

# Who starts ranks tells each its number: MLX's launchers, and MPI.
VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def own_rank() -> int | None:
    """This process's number among several, as its launcher says; None for a process alone."""
    given = next((os.environ[name] for name in VARIABLES if name in os.environ), "")
    return int(given) if given.isdigit() else None
