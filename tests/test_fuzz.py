"""Files that anything may have written: every one is read, or refused in one line that we chose."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import talk
from folder import save_folder

from ds4cli import batch, settings
from ds4cli.chat import journal
from ds4cli.engine.engine import Engine
from ds4cli.errors import DS4Error
from ds4cli.rewind import storage
from ds4cli.settings import Settings
from ds4cli.tools import load_tools

FEW, MANY = 60, 2000  # of each of five kinds: ten thousand in the long run
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]

ODD = [
    None, True, 0, -1, 1.5, 10**30, -(10**30), 10**400, 1e308, float("nan"), float("-inf"), "", "x",
    "\0",
    "\ud800", "é" * 200, "\x1b[2J", [], {}, [[]], [None], {"": None}, {"a": {"a": 1}}, "1", "-1",
]  # fmt: skip
NESTED = "[" * 20_000, '{"a":' * 20_000
BYTES = (
    b"\0",
    b"\xff",
    b"\xf0\x9f",
    b"\n",
    b"\r",
    b"\x1b",
    b'"',
    b"\\",
    b"{",
    b"}",
    b",",
    b"9" * 500,
)


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree: what holds it, and under which key."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from nodes(value)


def bent(tree: Any, rng: random.Random) -> Any:
    """`tree` with one to three of its values, keys or items otherwise."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        places = list(nodes(tree))
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "x", "role", "custom_id", "\ud800"])] = holder.pop(key)
        elif kind == 1:
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return tree


def bent_bytes(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, added, dropped or repeated, or cut."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            out[at:at] = rng.choice(BYTES)
        elif kind == 1:
            del out[at : at + rng.randint(1, 8)]
        elif kind == 2 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            out[at:at] = out[at : at + rng.randint(1, 40)]
        elif rng.random() < 0.1:
            del out[at:]
    return bytes(out)


def bent_line(seed: Any, rng: random.Random) -> bytes:
    """A JSON line, bent as a tree or as bytes."""
    if rng.random() < 0.02:
        return rng.choice(NESTED).encode()
    text = json.dumps(bent(seed, rng)) if rng.random() < 0.7 else json.dumps(seed)
    line = text.encode("utf-8", "surrogatepass")
    return bent_bytes(line, rng) if rng.random() < 0.4 else line


def check(count: int, make: Callable[[random.Random], Any], read: Callable[[Any], Any]) -> None:
    """Read `count` bent inputs. Whatever is raised must be an error of ours."""
    refused = 0
    for number in range(count):
        made = make(random.Random(number))
        try:
            read(made)
        except DS4Error as error:
            assert error.message
            refused += 1
        except Exception as error:
            raise AssertionError(f"input {number}: {made!r:.500}") from error
    assert 0 < refused < count


# -- what each kind looks like --------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "what it does",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "enum": [1, 2]}, "b": {"items": {"$ref": "#"}}},
            "required": ["a"],
            "$defs": {"x": {"anyOf": [{"type": "null"}, {"pattern": "^a+$"}]}},
        },
    },
    "command": ["cat", "-n"],
    "env": ["HF_TOKEN"],
}
REQUESTS = [
    {"prompt": "hi", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "seed": 1},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], "n": 2},
    {
        "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
        "body": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "c"},
            ],
            "logit_bias": {"5": 1}, "top_p": 0.5, "top_k": 4, "model": "m",
        },
    },
    {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "hi", "presence_penalty": 1}},
]  # fmt: skip
TURNS = [
    {"branch": "main", "system": None, "head": [1]},
    {"branch": "main", "at": 0, "role": "user", "content": "hi", "cue": 1, "tokens": [5, 6, 7]},
    [
        {"branch": "main", "at": 1, "role": "assistant", "content": "x", "finish_reason": "tool",
         "attempt": 0, "calls": [CALL], "tokens": [8, 9]},
        {"branch": "other", "system": "s", "head": [1, 2]},
    ],
    {"branch": "main", "keep": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A tiny model that reads few tokens, so that no line runs for long."""
    folder = save_folder(tmp_path_factory.mktemp("m") / "llama", max_position_embeddings=64)
    return Engine.load(str(folder), drafter="none")


@pytest.mark.parametrize("count", [20, COUNTS[1]])
def test_batch_lines(engine, monkeypatch, count):
    """Guards: one line that brings about anything but its own error."""
    loaded = type("Loaded", (), {"load": classmethod(lambda cls, **_: engine)})
    monkeypatch.setattr("ds4cli.generate._engine_class", lambda: loaded)
    chosen = Settings(model=engine.settings.model, max_tokens=2, drafter="none")
    for first in range(0, count, 50):
        rng = random.Random(first)
        lines = [
            bent_line(rng.choice(REQUESTS), rng).replace(b"\n", b" ") for _ in range(min(count, 50))
        ]
        lines = [line for line in dict.fromkeys(lines) if line.strip()]
        unique = [line.replace(b'"custom_id"', b'"custom_ix"') for line in lines]
        Path("in").write_bytes(b"\n".join(unique))
        batch.run(batch.BatchRequest("in", "out", quiet=True, force=True), chosen)
        found = [json.loads(line) for line in Path("out").read_bytes().splitlines()]
        assert len(found) == len(unique)
        codes = {result["error"]["code"] for result in found if result["error"]}
        assert codes <= {"invalid_request", "failed"}, first


@pytest.mark.parametrize("count", COUNTS)
def test_journals(engine, tmp_path, count):
    """Guards: a session file that ends a chat in a traceback, or a chat that begins from one."""
    scribe = talk.chat(engine).conversation.scribe
    header = {"format": 1, "model": "m", "fingerprint": "f", "settings": {}}
    path = tmp_path / "s.jsonl"

    def make(rng: random.Random) -> bytes:
        records: list[Any] = [header, *TURNS]
        at = rng.randrange(len(records))
        lines = [json.dumps(record).encode() for record in records]
        lines[at] = bent_line(records[at], rng)
        return b"\n".join(lines) + b"\n"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert not (journal.is_session(path) and journal.is_unbegun(path))
        for line in journal.read(path).transcript.branches().values():
            engine.check_stored(line.tokens, path)
            scribe.retokenised(line)

    check(count, make, read)


@pytest.mark.parametrize("count", COUNTS)
def test_states(engine, tmp_path, count):
    """Guards: a damaged state that is loaded, or whose error is not ours."""
    session = engine.session()
    session.sync(list(range(5, 40)))
    path = tmp_path / "s.safetensors"
    session.save(path)
    whole = path.read_bytes()
    tree = session._timeline.state()

    def make(rng: random.Random) -> Any:
        if rng.random() < 0.5:
            return bent_bytes(whole, rng)
        return bent_state(tree, rng)

    def read(made: Any) -> None:
        if isinstance(made, bytes):
            path.write_bytes(made)
        else:  # whole, with a right digest, and still not what a session writes
            storage.write(path, made, engine.fingerprint)
        engine.load_session(path)

    check(count, make, read)


def bent_state(tree: Any, rng: random.Random) -> Any:
    """A state with one of its values otherwise; its arrays are left alone."""
    places = [
        (holder, key)
        for holder, key in nodes(tree)
        if isinstance(holder, dict) and not hasattr(holder[key], "shape")
    ]
    holder, key = rng.choice(places)
    odd = rng.choice([value for value in ODD if value == value and value != "\ud800"])
    return _with(tree, holder, key, odd)


def _with(tree: Any, holder: Any, key: Any, value: Any) -> Any:
    if tree is holder:
        return {**tree, key: value}
    if isinstance(tree, dict):
        return {name: _with(item, holder, key, value) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_with(item, holder, key, value) for item in tree)
    return tree


@pytest.mark.parametrize("count", COUNTS)
def test_configs(tmp_path, count):
    """Guards: a config whose error is not ours."""
    defaults = (Path(__file__).parents[1] / "configs" / "default.toml").read_bytes()
    given = b"\n".join(line.lstrip(b"# ") for line in defaults.splitlines() if b" = " in line)
    path = tmp_path / "c.toml"

    def make(rng: random.Random) -> bytes:
        lines = given.splitlines()
        some = rng.sample(lines, min(4, len(lines)))
        odd = json.dumps(rng.choice(ODD)).encode()
        at = rng.randrange(len(some))
        some[at] = some[at].partition(b"=")[0] + b"= " + odd
        return bent_bytes(b"\n".join(some), rng) if rng.random() < 0.6 else b"\n".join(some)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        settings.resolve({}, settings.read_config(path), None, {})

    check(count, make, read)


@pytest.mark.parametrize("count", COUNTS)
def test_tools_files(tmp_path, count):
    """Guards: a tools file whose error is not ours."""
    path = tmp_path / "t.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for tool in load_tools(path):
            assert tool.spec and tool.notices is not None and tool.arguments_schema is not None

    check(count, lambda rng: bent_line([TOOL, {"name": "g"}], rng), read)
