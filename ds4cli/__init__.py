"""ds4cli: speculative generation with cheap rewind on MLX.

`Engine`, `Session` and `Settings` are the public names. They are imported on first use, so that
`ds4cli --help` does not wait for MLX.
"""

from __future__ import annotations

from importlib import import_module

from ds4cli.backend import blas, precision

# Here, because every import of a part of this package passes here before it can import mlx.
blas.preload()
precision.keep_float32()

__version__ = "0.1.0"

_HOMES = {"Engine": "engine.engine", "Session": "engine.session", "Settings": "settings"}
__all__ = ["Engine", "Session", "Settings", "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
