"""Limits of the address space, under which MLX ends by a signal or waits for ever."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from ds4cli.backend import address_space
from ds4cli.errors import ModelError


@pytest.mark.parametrize("megabytes", [150, 500, 1000])
def test_a_limit_that_is_too_low_is_one_line(megabytes):
    """Guards: a segfault, a program that hangs and that SIGTERM does not end, numpy's long text."""
    ran = subprocess.run(
        [sys.executable, "-m", "ds4cli", "generate", "--no-config", "-n", "2", "Hello"],
        preexec_fn=lambda: _limit(megabytes),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (1, ""), ran.stderr
    first, hint = ran.stderr.splitlines()
    assert first.startswith(f"error: the address space is limited to {megabytes} MB here")
    assert "ulimit -v" in hint


def _limit(megabytes):
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 1_000_000, resource.RLIM_INFINITY))


def test_weights_count(monkeypatch):
    """Guards: room for the program, none for the model."""
    monkeypatch.setattr(address_space, "limit_bytes", lambda: 40_000_000_000)
    address_space.check(30_000_000_000)
    with pytest.raises(ModelError, match="limited to 40000 MB here, and about 5"):
        address_space.check(50_000_000_000)


def test_no_limit_is_no_limit(monkeypatch):
    monkeypatch.setattr(address_space, "limit_bytes", lambda: None)
    address_space.check(10**15)
