"""A fast BLAS under MLX on a Linux CPU: which one, and that results stay equal."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4cli.backend import openblas

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux wheels link a slow BLAS"
)

# Prints the chosen BLAS, whether it is mapped, and a product.
PRODUCT = """
from ds4cli.backend import blas
chosen = blas.preload()
import mlx.core as mx
mx.set_default_device(mx.cpu)
a = mx.arange(64 * 48).reshape(64, 48).astype(mx.float32) / 1000
product = (a @ a.T).sum().item()
mapped = chosen is not None and chosen in open("/proc/self/maps").read()
print(chosen, mapped, repr(product), blas.name(), sep="|")
"""


def run(code: str, **environ: str) -> str:
    environment = {**os.environ, **environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.strip()


@linux_only
def test_the_library_is_mapped_and_results_are_equal():
    """Guards: a preload that MLX does not see, or a BLAS that computes something else."""
    chosen, mapped, product, name = run(PRODUCT).split("|")
    if chosen == "None":
        pytest.skip("no fast BLAS is installed here")
    assert mapped == "True" and name == chosen
    own_chosen, _, own_product, own_name = run(PRODUCT, DS4CLI_BLAS="none").split("|")
    assert (own_chosen, own_name) == ("None", "mlx's own")
    assert float(product) == pytest.approx(float(own_product), rel=1e-6)


@linux_only
def test_a_bad_path_never_fails():
    """Guards: a mistyped `DS4CLI_BLAS` stops the program."""
    assert run(PRODUCT, DS4CLI_BLAS="/no/such/library.so").startswith("None|False|")


# Runs an import, and prints whether MLX is there and which BLAS is, as the system and as we see it.
AFTER = """
import sys, {}
blas = sys.modules.get("ds4cli.backend.blas")
maps = open("/proc/self/maps").read()
print("mlx.core" in sys.modules, blas and blas._loaded, "{}" in maps)
"""


@pytest.fixture(scope="module")
def library() -> str:
    """The BLAS that is chosen here."""
    found = run("from ds4cli.backend import blas; print(blas.preload())")
    if found == "None":
        pytest.skip("no fast BLAS is installed here")
    return found


@linux_only
@pytest.mark.parametrize(
    "imported", ["ds4cli, mlx.core", "mlx, ds4cli, mlx.nn", "ds4cli.tape.tracks"]
)
def test_it_is_loaded_before_mlx(library, imported):
    """Guards: scripts that import only a part of the package, or MLX by themselves, get the slow
    BLAS. Loading it is refused after MLX, so a name says that it came first."""
    assert run(AFTER.format(imported, library)) == f"True {library} True"


@linux_only
def test_what_needs_no_mlx_loads_none(library):
    """Guards: `--help` and wrong arguments wait for a library of tens of megabytes."""
    assert run(AFTER.format("ds4cli, ds4cli.cli", library)) == "False None False"
    asked = "importlib.util; find_spec = importlib.util.find_spec; import ds4cli; find_spec('mlx')"
    assert run(AFTER.format(asked, library)) == "False None False"


@linux_only
def test_it_is_too_late_after_mlx():
    """Guards: a report names a BLAS that MLX, loaded before it, does not use."""
    assert run("import mlx.core; from ds4cli.backend import blas; print(blas.preload())") == "None"


def numpys_own() -> Path | None:
    """numpy's wheel has an OpenBLAS with the same prefix, for 64-bit sizes."""
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    return next(folder.glob("libscipy_openblas64_*.so"), None)


@linux_only
def test_a_name_loses_its_prefix():
    """Guards: a library that cannot be loaded, or whose other names are not found any more."""
    path = numpys_own()
    if path is None:
        pytest.skip("this numpy has no OpenBLAS of its own")
    library = ctypes.CDLL(openblas.in_memory(path, [b"cblas_sgemm64_"]))
    assert not hasattr(library, "scipy_cblas_sgemm64_") and hasattr(library, "scipy_dgemm_64_")
    a, b = (np.arange(12, dtype=np.float32).reshape(shape) for shape in ((3, 4), (4, 3)))
    product = np.zeros((3, 3), np.float32)
    left, right, out = (array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, product))
    m, k, one, none = ctypes.c_int64(3), ctypes.c_int64(4), ctypes.c_float(1), ctypes.c_float(0)
    library.cblas_sgemm64_(101, 111, 111, m, m, k, one, left, k, right, m, none, out, m)
    assert np.array_equal(product, a @ b)


@linux_only
@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01" + bytes(90), b"\x7fELF\x01\x01"])
def test_what_is_no_library_is_not_loaded(tmp_path, data):
    """Guards: a crash at the start because a wheel has another form now."""
    path = tmp_path / openblas.FILE
    path.write_bytes(data)
    with pytest.raises(ValueError, match="library"):
        openblas.in_memory(path)
    assert run(PRODUCT, DS4CLI_BLAS=str(path)).startswith("None|False|")


@linux_only
def test_the_wheel_multiplies_for_mlx():
    """Guards: `[cpu-small]` that installs a library which MLX does not use."""
    path = openblas.installed()
    if path is None:
        pytest.skip("it is not installed here")
    chosen, mapped, product, _ = run(PRODUCT, DS4CLI_BLAS=str(path)).split("|")
    own = run(PRODUCT, DS4CLI_BLAS="none").split("|")[2]
    assert (chosen, mapped) == (openblas.FILE, "True")
    assert float(product) == pytest.approx(float(own), rel=1e-6)
