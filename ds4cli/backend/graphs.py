"""What MLX plans on CUDA stays planned.

MLX launches its work as graphs of commands there, and keeps them by their form: one of another form
takes about a millisecond to make, and a call of a model is many of them. Guesses, lanes and ways
back make calls of many forms. MLX keeps 400, and after twice as many new ones in the life of a
process it raises an error that leaves it unusable, however well these served.
"""

from __future__ import annotations

import os

_VARIABLES = {"MLX_CUDA_GRAPH_CACHE_SIZE": "2000", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}


def keep() -> None:
    """Keep more graphs, and never end for that, unless the user said otherwise; before MLX looks,
    at the first thing that is computed."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
