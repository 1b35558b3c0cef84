"""A fast BLAS under MLX on a Linux CPU: which one, and that results stay equal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
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


@linux_only
def test_every_import_preloads():
    """Guards: scripts that import only a part of the package get the slow BLAS."""
    first = run("from ds4cli.backend import blas; print(blas.name())")
    for module in ("ds4cli.caches", "ds4cli.tape", "ds4cli.drafters.ngram"):
        assert run(f"import {module}; from ds4cli.backend import blas; print(blas.name())") == first


@linux_only
def test_it_is_too_late_after_mlx():
    """Guards: a report names a BLAS that MLX, loaded before it, does not use."""
    assert run("import mlx.core; from ds4cli.backend import blas; print(blas.preload())") == "None"
