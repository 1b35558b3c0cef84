"""ds4cli: speculative generation with cheap rewind on MLX.

`Engine`, `Session` and `Settings` are the public names. They are imported on first use, so that
`ds4cli --help` does not wait for MLX.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from ds4cli.backend import graphs, interpreter, precision
from ds4cli.backend.before_mlx import Preloader

if interpreter.problem():
    print(f"error: {interpreter.problem()}", file=sys.stderr)
    raise SystemExit(2)
# As a program: no traceback for a Ctrl-C that comes while it starts.
_is_program = os.path.basename(sys.argv[0]) == "ds4cli" or sys.orig_argv[1:3] == ["-m", "ds4cli"]
if _is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Here, because every import of a part of this package passes here before it can import mlx.
sys.meta_path.insert(0, Preloader)
precision.keep_float32()
graphs.keep()

__version__ = "0.1.0"

_HOMES = {"Engine": "engine.engine", "Session": "engine.session", "Settings": "settings"}
__all__ = ["Engine", "Session", "Settings", "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
