"""Files that are whole or absent."""

import os

import pytest

from ds4cli import atomic
from ds4cli.atomic import replacing


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    """A torn file in place of a good one, or a temporary one left beside it."""
    path = tmp_path / ("n" * 250 + ".json")
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as temporary:
        temporary.write_text("ne")
        raise OSError("full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0


def test_it_is_on_disk_before_it_takes_the_place(tmp_path, monkeypatch):
    """After a power cut the new name stood over an empty file."""
    path, synced = tmp_path / "f", []
    path.write_text("old")
    monkeypatch.setattr(
        atomic.disk, "sync", lambda fd: synced.append((os.pread(fd, 9, 0), path.read_text()))
    )
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert synced == [(b"new", "old")]
