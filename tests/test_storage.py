"""Session files: whole or absent, and refused with the reason where they do not fit."""

import json
import os
import random
import subprocess
from functools import lru_cache

import mlx.core as mx
import pytest
from oracle import engine, prompt
from tiny import build

from ds4cli.errors import StateError
from ds4cli.rewind import storage
from ds4cli.rewind.storage import FORMAT, OLD_FORMAT


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
    if subprocess.run(mount, capture_output=True, timeout=300).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        session_of(60).save(disk / "s")
        with pytest.raises(StateError, match="cannot save"):
            session_of(1500).save(disk / "s")
        assert load(disk / "s").pos == 60
        assert [p.name for p in disk.iterdir()] == ["s"]
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=300)


def test_a_file_that_came_out_short_is_no_success(tmp_path, monkeypatch):
    """MLX says nothing when the disk is full: half a file took the place of the old one."""
    storage.write(tmp_path / "s", {"tokens": [1]}, "f")
    save = mx.save_safetensors

    def cut(path, arrays, metadata):
        save(path, arrays, metadata)
        os.truncate(path, 1000)

    monkeypatch.setattr(mx, "save_safetensors", cut)
    with pytest.raises(StateError, match="disk is full"):
        storage.write(tmp_path / "s", {"row": mx.zeros(1000)}, "f")
    assert storage.read(tmp_path / "s", "f") == {"tokens": [1]}
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_file_of_the_first_format_is_refused(tmp_path):
    """It has no digest, so nothing tells whether it is whole."""
    mx.save_safetensors(
        str(tmp_path / "f.safetensors"),
        {"a0": mx.zeros(3)},
        {"format": OLD_FORMAT, "fingerprint": "", "body": json.dumps({"dict": {}})},
    )
    with pytest.raises(StateError, match="earlier ds4cli"):
        load(tmp_path / "f.safetensors")


def flip(data, dice):
    """Another bit in one byte, in the header every other time."""
    header = 8 + int.from_bytes(data[:8], "little")
    at = dice.randrange(header if dice.random() < 0.5 else len(data))
    data[at] ^= 1 << dice.randrange(8)


def renumber(data, dice):
    """Another digit in the header."""
    header = 8 + int.from_bytes(data[:8], "little")
    at = dice.choice([i for i in range(8, header) if chr(data[i]).isdigit()])
    data[at] = dice.choice([d for d in b"0123456789" if d != data[at]])


def zero(data, dice):
    at = dice.randrange(len(data) - 8)
    data[at : at + 8] = bytes(8)


def cut(data, dice):
    at = dice.randrange(len(data))
    del data[at : at + dice.choice([1, 4, 100])]


def double(data, dice):
    at = dice.randrange(len(data))
    data[at:at] = data[at : at + dice.choice([1, 4, 100])]


def swap(data, dice):
    a, b = (dice.randrange(len(data) // 4) * 4 for _ in range(2))
    data[a : a + 4], data[b : b + 4] = data[b : b + 4], data[a : a + 4]


def corrupt_and_load(tmp_path, times, seed):
    """Every corruption is refused, or changed nothing that is read (as spaces behind a header)."""
    session, dice = session_of(), random.Random(seed)
    session.save(tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    refused = 0
    for i in range(times):
        data = bytearray(whole)
        dice.choice([flip, renumber, zero, cut, double, swap])(data, dice)
        (tmp_path / "bad").write_bytes(data)
        try:
            loaded = load(tmp_path / "bad")
        except StateError:
            refused += 1
        else:
            assert loaded.tokens == session.tokens, i
            assert mx.array_equal(loaded.logits, session.logits), i
            loaded.rewind(10), loaded.sync([*loaded.tokens, 1, 2])
            fresh = session_of(10)
            fresh.sync([*fresh.tokens, 1, 2])
            assert mx.array_equal(loaded.logits, fresh.logits), i
    assert refused > 0.9 * times


def test_a_corrupted_file_is_refused(tmp_path):
    """Changed digits and flipped bits loaded without a word, or ended in bare exceptions."""
    corrupt_and_load(tmp_path, 60, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_corrupted_files_are_refused(tmp_path, seed):
    """The long run of the same."""
    corrupt_and_load(tmp_path, 200, seed)


def change(path, change_tree):
    """Write the state at `path` anew, whole but with another tree."""
    tree = storage.read(path, "")
    change_tree(tree)
    storage.write(path, tree, "")


WRONG = {
    "no tokens": lambda tree: tree.pop("tokens"),
    "one token more": lambda tree: tree["tokens"].append(1),
    "text for tokens": lambda tree: tree.update(tokens=["a"] * 20),
    "one layer less": lambda tree: tree["layers"].pop(),
    "no arrays": lambda tree: tree["layers"][1]["arrays"].clear(),
    "one row less": lambda tree: _replace(tree, lambda x: x[..., 1:, :]),
    "another head": lambda tree: _replace(tree, lambda x: mx.concatenate([x, x], axis=1)),
    "another type": lambda tree: _replace(tree, lambda x: x.astype(mx.float16)),
    "a short row": lambda tree: tree.update(logits=tree["logits"][1:]),
    "a list of layers": lambda tree: tree.update(layers=[[], []]),
    "odd marks": lambda tree: tree.update(frontiers=[{"pos": 1}]),
}


def _replace(tree, change_rows):
    arrays = tree["layers"][0]["arrays"]
    arrays["keys"] = change_rows(arrays["keys"])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_of_another_shape_is_refused(tmp_path, wrong):
    """A whole file with another tree or other shapes ended in a `KeyError`, or in odd logits."""
    session_of().save(tmp_path / "s")
    change(tmp_path / "s", lambda tree: None)
    assert load(tmp_path / "s").pos == 20
    change(tmp_path / "s", WRONG[wrong])
    with pytest.raises(StateError):
        load(tmp_path / "s")


def test_the_digest_covers_names_types_and_shapes():
    """Rows that change their places, or numbers read as other ones, with the same bytes."""
    facts, x = {"format": "f", "fingerprint": "p", "body": "b"}, mx.arange(6, dtype=mx.int32)
    others = {"a": x.reshape(2, 3)}, {"a": x.reshape(3, 2)}, {"a": mx.view(x, mx.uint32)}, {"b": x}
    found = [storage.digest(facts, arrays) for arrays in ({"a": x}, *others)]
    found += [storage.digest({**facts, key: "x"}, {"a": x}) for key in facts]
    assert len(set(found)) == len(found)


def test_another_models_file_is_named(tmp_path):
    """Of several files, which one is wrong?"""
    storage.write(tmp_path / "mine", {"tokens": []}, "one")
    assert storage.read(tmp_path / "mine", "one") == {"tokens": []}
    with pytest.raises(StateError, match="mine` belongs to another model"):
        storage.read(tmp_path / "mine", "two")
