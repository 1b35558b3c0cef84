"""PyTorch, or one line that says what to install: all that trains imports it from here.

A machine that trains needs no ds4cli, so nothing else has asked for these packages.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("torch", "tokenizers", "safetensors", "numpy")
missing = " ".join(name for name in NEEDED if find_spec(name) is None)
if missing:
    print(f"error: not installed, and training needs it: pip install {missing}", file=sys.stderr)
    sys.exit(2)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

__all__ = ["F", "Tensor", "nn", "torch"]
