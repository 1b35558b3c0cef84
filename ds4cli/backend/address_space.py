"""A process that may have only so much address space (`ulimit -v`, a job's limit).

MLX reserves some for each of its threads, and one that gets none ends the process by a signal or
waits for ever. So a limit that is too low is told before there is a thread.
"""

from __future__ import annotations

import os

from ds4cli.errors import ModelError

# What Python, MLX and its threads reserve before any weight (0.4 and 0.85 GB seen on two cores),
# and what each further core adds in stacks and heaps.
RESERVED_BYTES, CORE_BYTES = 1_000_000_000, 130_000_000
HINT = "raise it (`ulimit -v unlimited`): memory that is only reserved costs nothing"


def check(weights_bytes: int = 0) -> None:
    """ModelError where the limit of this process leaves too little for so large a model."""
    limit = limit_bytes()
    needed = RESERVED_BYTES + CORE_BYTES * (os.cpu_count() or 1) + weights_bytes
    if limit is not None and limit < needed:
        mega = 1_000_000
        raise ModelError(
            f"the address space is limited to {limit // mega} MB here, "
            f"and about {needed // mega} are needed",
            HINT,
        )


def limit_bytes() -> int | None:
    """None where there is no limit."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
