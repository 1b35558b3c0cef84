"""float32 stays float32 on GPUs that could round it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ds4cli.backend import precision


def test_importing_the_engine_turns_tf32_off():
    """Guards: a variable set after MLX has read it, or one that only the command line sets."""
    code = "import ds4cli, os; ds4cli.Engine; print(os.environ['MLX_ENABLE_TF32'])"
    environment = {k: v for k, v in os.environ.items() if k != "MLX_ENABLE_TF32"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=300
    )
    assert run.stdout.strip() == b"0"


@pytest.mark.parametrize(("value", "notices"), [("0", 0), ("1", 1)])
def test_the_users_choice_stays_and_is_said(monkeypatch, value, notices):
    """TF32 changes texts under speculation, so whoever asks for it reads that it does."""
    monkeypatch.setenv("MLX_ENABLE_TF32", value)
    precision.keep_float32()
    assert os.environ["MLX_ENABLE_TF32"] == value
    assert len(precision.notices()) == notices
