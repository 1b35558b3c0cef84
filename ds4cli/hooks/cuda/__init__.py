"""Other forms of what MLX and mlx-lm run slowly on CUDA, and the one switch for all of them.

MLX's attention makes a plan for every new number of rows and keys, so each block of a growing text
pays for one; and mlx-lm has kernels for its recurrences on Metal only. `use` gives a loaded model's
own modules attention as products for calls of a few rows, and a kernel for each recurrence.
`DS4CLI_CUDA_FORMS=none` leaves everything as mlx-lm has it.
"""

from __future__ import annotations

import mlx.core as mx

from ds4cli import settings


def is_backend() -> bool:
    """Whether models run on CUDA here."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def is_on() -> bool:
    """Whether these forms are used here."""
    return is_backend() and settings.variable("CUDA_FORMS") != "none"
