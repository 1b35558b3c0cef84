"""Shared fixtures: an environment of its own for every test, and tiny models on disk."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile

# Before any test module imports mlx: one thread is fastest for products this small.
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# A hundred processes are started, and none is to do what another one has done: see `startup/`.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "TRANSFORMERS_NAMES" not in os.environ:
    _folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    os.environ["TRANSFORMERS_NAMES"] = os.path.join(_folder, "names")
    _path = (os.path.join(os.path.dirname(__file__), "startup"), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _path))
# Shells start what runs in the background with Ctrl-C ignored, and every process would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

import ds4cli  # noqa: F401 - chooses the BLAS
from ds4cli import terminal
from ds4cli.drafters import costs

import mlx.core as mx  # isort: skip

# Tolerances are those of a CPU; DS4CLI_TEST_DEVICE=gpu tries the models on Metal or CUDA. What runs
# as a process of its own takes the device that a user would get.
mx.set_default_device(mx.Device(getattr(mx, os.environ.get("DS4CLI_TEST_DEVICE", "cpu"))))

# Here, so that no test's screen or variables decide what they are for the tests after it.
terminal.out(), terminal.err()

# Seconds of a call by its rows, as a CPU has them.
PRICES = {0: 0.01, 1: 0.011, 2: 0.013, 4: 0.016, 8: 0.02, 16: 0.03, 32: 0.05}


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: to look through all of it again and again, for what
    could be freed, takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No settings, files or caches of the user who runs the tests reach a test."""
    for name in [n for n in os.environ if n.startswith("DS4CLI_")]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    # Measured anew for every model, and differently each time; `test_costs.py` has the real thing.
    monkeypatch.setattr(costs, "measure", lambda *_: dict(PRICES))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny dense model as an mlx-lm folder."""
    from folder import save_folder

    return save_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory):
    """A tiny hybrid (short convolutions and attention) as an mlx-lm folder: its calls are cheap."""
    from folder import save_folder

    return save_folder(tmp_path_factory.mktemp("models") / "lfm2", "lfm2")
