"""Session files: whole or absent, and refused with the reason where they do not fit."""

import subprocess
from functools import lru_cache

import mlx.core as mx
import pytest
from oracle import engine, prompt
from tiny import build

from ds4cli.errors import StateError
from ds4cli.rewind.storage import FORMAT


@lru_cache
def model():
    """Head size 64, which kv_bits can group."""
    return build("llama", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)


def session_of(n=20, **settings):
    session = engine("llama", model=model(), **settings).session()
    session.sync((prompt(500) * 3)[:n])
    return session


def load(path, **settings):
    return engine("llama", model=model(), **settings).load_session(path)


def test_a_torn_file_is_refused(tmp_path):
    """A file cut anywhere must neither load nor end in a traceback."""
    session_of().save(tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    for n in (0, 1, 8, 50, len(whole) // 2, len(whole) - 1):
        (tmp_path / "torn").write_bytes(whole[:n])
        with pytest.raises(StateError, match="torn"):
            load(tmp_path / "torn")
    (tmp_path / "torn").write_bytes(whole.replace(b'"a1"', b'"zz"', 1))
    with pytest.raises(StateError, match="torn"):
        load(tmp_path / "torn")


@pytest.mark.parametrize(
    "metadata",
    [{}, {"format": FORMAT, "fingerprint": ""}, {"format": FORMAT, "fingerprint": "", "body": "{"}],
)
def test_a_foreign_file_is_refused(tmp_path, metadata):
    """Any safetensors file, or half a session, loaded as if it were one."""
    mx.save_safetensors(str(tmp_path / "f.safetensors"), {"a0": mx.zeros(3)}, metadata)
    with pytest.raises(StateError):
        load(tmp_path / "f.safetensors")
    with pytest.raises(StateError, match="no session file"):
        load(tmp_path)


def test_another_kind_of_kv_cache_is_refused(tmp_path):
    """Quantised rows read as whole ones gave an empty cache at a position of 20, in silence."""
    kinds = {}, {"kv_bits": 8}, {"kv_bits": 4}, {"kv_bits": 8, "kv_group_size": 32}
    for i, kind in enumerate(kinds):
        session_of(**kind).save(tmp_path / str(i))
        for other in kinds:
            if other == kind:
                assert load(tmp_path / str(i), **other).pos == 20
            else:
                with pytest.raises(StateError, match="KV cache"):
                    load(tmp_path / str(i), **other)


def test_places_that_cannot_be_written(tmp_path):
    """No traceback for a bad path; the longest name that a file may have is a good one."""
    session = session_of()
    for path in ("", tmp_path, tmp_path / "nowhere" / "s", tmp_path / ("n" * 300)):
        with pytest.raises(StateError, match="cannot save"):
            session.save(path)
    session.save(tmp_path / ("n" * 255))
    assert [p.name for p in tmp_path.iterdir()] == ["n" * 255]


def test_a_full_disk_keeps_the_old_file(tmp_path):
    """Saving over a session on a full disk lost both."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        session_of(60).save(disk / "s")
        with pytest.raises(StateError, match="cannot save"):
            session_of(1500).save(disk / "s")
        assert load(disk / "s").pos == 60
        assert [p.name for p in disk.iterdir()] == ["s"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
