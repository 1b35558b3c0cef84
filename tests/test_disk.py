"""What is written is on disk."""

import fcntl
import os

import pytest

from ds4cli import appended, atomic
from ds4cli.backend import disk
from ds4cli.batch.results import _Log
from ds4cli.rewind import storage


@pytest.fixture
def asked(monkeypatch):
    """macOS: the requests to the drive; `fails` makes it one that knows none."""
    calls = []

    def ask(fd, command):
        calls.append(command)
        if "fails" in calls:
            raise OSError("not supported")

    monkeypatch.setattr(disk, "_FULL", 51)
    monkeypatch.setattr(fcntl, "fcntl", ask)
    return calls


def test_macos_is_asked_to_write_what_the_drive_holds(asked, monkeypatch, tmp_path):
    """Guards: lines that are durable on paper: macOS's fsync leaves them in the drive's memory."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "f").open("wb") as file:
        disk.sync(file.fileno())
        assert asked == [51] and not synced
        asked.append("fails")
        disk.sync(file.fileno())
        assert synced == [file.fileno()], "a network's file system knows fsync only"


def test_everything_that_is_kept_is_synced_the_same_way(asked, tmp_path):
    """Guards: journals, batches or state files that call fsync themselves."""
    for module in (appended, atomic):
        assert module.disk is disk
    log = _Log(tmp_path / "out.jsonl")
    log.open(create=True)
    before = len(asked)
    log.append(b"{}\n")
    log.close()
    storage.write(tmp_path / "s.safetensors", {"a": 1}, "model")
    assert len(asked) >= before + 2


def test_elsewhere_it_is_fsync(monkeypatch, tmp_path):
    """Guards: nothing synced on Linux."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    disk.sync(7)
    assert synced == [7]
