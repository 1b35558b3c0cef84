"""The one switch for all forms: `DS4CLI_CUDA_FORMS=none` leaves everything as mlx-lm has it."""

from __future__ import annotations

import mlx.core as mx

from ds4cli import settings


def is_backend() -> bool:
    """Whether models run on CUDA here."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def is_on() -> bool:
    """Whether these forms are used here."""
    return is_backend() and settings.variable("CUDA_FORMS") != "none"
