"""A session's timeline in one safetensors file: tokens, every layer's state, the checkpoints.

Written to a temporary file, synced, then renamed, so that a file is whole or absent. A digest over
all of it tells a file that was damaged since; files of the first format had none and are refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ds4cli.atomic import replacing
from ds4cli.errors import StateError

FORMAT = "ds4cli session 2"
OLD_FORMAT = "ds4cli session 1"


def pack(tree: Any, arrays: dict[str, mx.array]) -> Any:
    """`tree` as JSON, its arrays moved to `arrays` and named there."""
    if isinstance(tree, mx.array):
        name = f"a{len(arrays)}"
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, dict):
        return {"dict": {key: pack(value, arrays) for key, value in tree.items()}}
    if isinstance(tree, (list, tuple)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [pack(item, arrays) for item in tree]}
    return tree


def unpack(node: Any, arrays: dict[str, mx.array]) -> Any:
    """The inverse of `pack`."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {key: unpack(item, arrays) for key, item in value.items()}
    items = [unpack(item, arrays) for item in value]
    return tuple(items) if kind == "tuple" else items


def write(path: str | Path, tree: Any, fingerprint: str) -> None:
    """Write `tree` (JSON-able with arrays in it) to `path`, or nothing at all."""
    path = Path(path)
    arrays: dict[str, mx.array] = {}
    body = json.dumps(pack(tree, arrays))
    arrays = {name: mx.contiguous(a) for name, a in arrays.items()} or {"a0": mx.zeros(1)}
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "body": body}
    try:
        metadata["digest"] = digest(metadata, arrays)
        with replacing(path, ".safetensors") as temporary:
            mx.save_safetensors(str(temporary), arrays, metadata)
            if temporary.stat().st_size < sum(a.nbytes for a in arrays.values()):
                raise OSError("the disk is full")
    except (OSError, RuntimeError) as error:
        raise StateError(f"cannot save the session to `{path}`: {error}") from None


def digest(metadata: dict[str, str], arrays: dict[str, mx.array]) -> str:
    """SHA-256 of the metadata and of the arrays: names, types, shapes, bytes."""
    names = sorted(arrays)
    shapes = [(name, str(arrays[name].dtype), arrays[name].shape) for name in names]
    facts = [metadata[key] for key in ("format", "fingerprint", "body")]
    total = hashlib.sha256(json.dumps([*facts, shapes]).encode())
    for name in names:
        flat = mx.view(arrays[name].reshape(-1), mx.uint8)
        total.update(memoryview(flat))  # type: ignore[arg-type]  # the stubs hide that it is one
    return total.hexdigest()


def read(path: str | Path, fingerprint: str) -> Any:
    """The tree that `write` was given. StateError for another model's or a damaged file."""
    path = Path(path)
    if not path.is_file():
        raise StateError(f"there is no session file `{path}`")
    try:
        loaded = mx.load(str(path), format="safetensors", return_metadata=True)
        assert isinstance(loaded, tuple)
        arrays, metadata = loaded
        mx.eval(list(arrays.values()))
        _check_origin(path, metadata, fingerprint)
        if metadata["digest"] != digest(metadata, arrays):
            raise ValueError("its digest is another")
        return unpack(json.loads(metadata["body"]), arrays)
    except StateError:
        raise
    except Exception as error:  # a damaged file may fail anywhere in the parsers, and in any way
        raise StateError(f"session file `{path}` is damaged or no session: {error}") from None


def _check_origin(path: Path, metadata: dict[str, str], fingerprint: str) -> None:
    """StateError for a file of another kind, version or model."""
    kind = metadata.get("format")
    if kind == OLD_FORMAT:
        raise StateError(f"session file `{path}` is of an earlier ds4cli and has no digest")
    if kind != FORMAT:
        raise StateError(f"`{path}` is not a session file of this version")
    if metadata.get("fingerprint") != fingerprint:
        raise StateError(
            f"session file `{path}` belongs to another model, tokenizer or number of ranks",
            "load it with the model that wrote it",
        )
