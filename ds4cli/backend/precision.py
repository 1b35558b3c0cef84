"""float32 that is float32.

On CUDA, and on GPUs of Apple's with matrix units, MLX rounds the inputs of float32 products to TF32
(10 bits of fraction) unless MLX_ENABLE_TF32 is 0 at the first product. What is lost depends on the
length of the call: drafts would change the text, and replayed recurrences would not be the model's.
"""

from __future__ import annotations

import os

_VARIABLE = "MLX_ENABLE_TF32"


def keep_float32() -> None:
    """Turn TF32 off, unless the user said otherwise; before anything is computed."""
    os.environ.setdefault(_VARIABLE, "0")


def notices() -> list[str]:
    """What a user who asked for TF32 should know."""
    if os.environ.get(_VARIABLE, "0") == "0":
        return []
    return [
        f"{_VARIABLE} is set: where the GPU rounds float32 to TF32, drafts may change the text, "
        "and going back may feed tokens again"
    ]
