"""Interpreters that cannot run this are told so."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ds4cli.backend import interpreter

PACKAGE = Path(interpreter.__file__).parents[1]


@pytest.mark.parametrize(
    ("version", "system", "machine", "words"),
    [
        ((3, 9, 6), "Darwin", "arm64", "needs Python 3.10 or newer, not `3.9`"),  # Apple's own
        ((3, 12, 1), "Darwin", "x86_64", "Rosetta"),
        ((3, 12, 1), "Darwin", "arm64", ""),
        ((3, 10, 0), "Linux", "x86_64", ""),
    ],
)
def test_what_cannot_run_is_named_with_what_to_do(version, system, machine, words):
    """Guards: a syntax error, or `no module named mlx`, where the interpreter is the reason."""
    said = interpreter.problem(version, system, machine)
    assert words in said and bool(said) == bool(words)
    assert not said or said.count("\nhint: ") == 1


def test_it_is_said_before_anything_is_imported():
    """Guards: the line comes after what it is to explain."""
    code = (
        "import sys; sys.modules['mlx'] = None; import ds4cli.backend.interpreter as i; "
        "del sys.modules['ds4cli']; i.problem = lambda: 'too old\\nhint: x'; import ds4cli"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, "error: too old\nhint: x\n")


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        *(f"backend/{n}" for n in ("__init__", "before_mlx", "graphs", "interpreter", "precision")),
    ],
)
def test_old_interpreters_can_read_as_far_as_the_line(name):
    """Guards: syntax of a newer Python in what runs before the check."""
    ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 8))
