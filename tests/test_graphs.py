"""Graphs of commands on CUDA: set before MLX can look, and the user's choice stays."""

import os

from ds4cli.backend import graphs

SIZE, CHECK = "MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_CACHE_THRASHING_CHECK"


def test_a_long_process_does_not_end_for_the_forms_that_its_calls_had(monkeypatch):
    """Guards: `Cache thrashing is happening`, after the 800th graph in the life of a process."""
    assert os.environ[CHECK] == "0" and int(os.environ[SIZE]) > 400  # by the import of the package
    monkeypatch.setenv(SIZE, "64")
    monkeypatch.delenv(CHECK)
    graphs.keep()
    assert (os.environ[SIZE], os.environ[CHECK]) == ("64", "0")
