"""Files that only grow: whole pieces, synced, one process at a time."""

import errno
import os

import pytest

from ds4cli import appended
from ds4cli.appended import Appended, Taken, reason


@pytest.fixture
def log(tmp_path):
    file = Appended(tmp_path / "log", 0o600, create=True)
    yield file
    file.close()


def content(log):
    return os.pread(log.fd, 1000, 0)


@pytest.fixture
def synced(monkeypatch):
    """What each synced file or folder was at that time: its bytes, or None for a folder."""
    found = []

    def note(fd):
        size = os.fstat(fd).st_size
        found.append(None if os.path.isdir(f"/dev/fd/{fd}") else os.pread(fd, size, 0))

    monkeypatch.setattr(appended.disk, "sync", note)
    return found


def test_a_piece_is_on_disk_when_append_returns(log, synced):
    """A power cut took lines that a run had counted as written."""
    log.append(b"one\n", 0)
    log.append(b"two\n", 4)
    log.append(b"later\n", 8, sync=False)
    assert synced == [b"one\n", b"one\ntwo\n"]
    assert content(log) == b"one\ntwo\nlater\n" and log.size() == 14


def test_a_new_files_name_is_on_disk(tmp_path, synced):
    """A synced file whose folder does not know it is gone after a power cut."""
    Appended(tmp_path / "new", 0o600, create=True).close()
    assert synced == [None]
    Appended(tmp_path / "new", 0o600, create=True).close()
    assert synced == [None], "an old one's name is there"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_an_append_takes_away_what_an_earlier_one_left(log):
    """Half a line of a failed append in front of the next."""
    log.append(b"one\nhal", 0)
    log.append(b"two\n", 4)
    assert content(log) == b"one\ntwo\n"


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failed_append_leaves_the_file_as_it_was(log, monkeypatch, call):
    """Half a line on a full disk, in the middle of the file once there was room again."""
    log.append(b"one\n", 0)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "write") if call == "write" else (appended.disk, "sync")), fail)
        with pytest.raises(OSError) as error:
            log.append(b"two\n", 4)
    assert reason(error.value) == "no space left on device" and content(log) == b"one\n"
    assert reason(OSError("odd")) == "odd"


def test_what_failed_first_is_said(log, monkeypatch):
    """On a broken disk the line cannot be taken back either: the reason was that."""

    def fail(number):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", lambda *_: fail(errno.ENOSPC))
    cut = iter([lambda *_: None, lambda *_: fail(errno.EIO)])
    monkeypatch.setattr(os, "ftruncate", lambda *_: next(cut)())
    with pytest.raises(OSError) as error:
        log.append(b"two\n", 0)
    assert error.value.errno == errno.ENOSPC


def test_short_writes_are_completed(log, monkeypatch):
    """A disk that takes a few bytes at a time cut the line."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
    log.append(b"a line\n", 0)
    assert content(log) == b"a line\n"


def test_a_file_belongs_to_one_at_a_time(tmp_path, log, monkeypatch):
    """Two runs that append to one file, each over the other's lines."""
    with pytest.raises(Taken):
        Appended(tmp_path / "log", 0o600, create=True)
    closed, fd, close = [], log.fd, os.close
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
    log.close()
    log.close()
    assert closed == [fd]
    Appended(tmp_path / "log", 0o600, create=False).close()
    with pytest.raises(FileNotFoundError):
        Appended(tmp_path / "none", 0o600, create=False)
