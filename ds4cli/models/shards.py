"""The files that hold a model's weights: which ones count, and whether they are whole. No mlx."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4cli.errors import UsageError

INDEX = "model.safetensors.index.json"
PATTERN = "model*.safetensors"
POINTER = b"version https://git-lfs"
SHOWN_NAMES = 3


@dataclass(frozen=True)
class Shard:
    """A safetensors file. header: its JSON as bytes. spans: where in the file each tensor lies."""

    path: Path
    header: bytes
    spans: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Shards:
    """The weight files of a folder that count, and what was left out, in words."""

    files: tuple[Shard, ...]
    notices: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """All tensors, as they are stored."""
        return sum(end - start for shard in self.files for start, end in shard.spans.values())


def find(folder: Path, name: str, only: Sequence[str] | None = None) -> Shards:
    """The weight files of a model folder, which its user calls `name`. only: those that are to be
    read, where that is not all of them.

    Where there is an index, its files are the model: mlx-lm loads whatever lies beside them, too,
    and the last file read wins. UsageError where a file is missing, torn, no safetensors file, or
    where two files hold one tensor.
    """
    present = sorted(path.name for path in folder.glob(PATTERN))
    named = _named_by_index(folder / INDEX) if only is None else list(only)
    missing = [file for file in named if not (folder / file).is_file()]
    notices = []
    if missing and (only is not None or len(missing) < len(named)):
        raise UsageError(
            f"`{name}` lacks the weights `{missing[0]}`, which `{INDEX}` names",
            f"{len(missing)} of {len(named)} files are missing: get the folder again",
        )
    if missing:
        notices.append(f"`{INDEX}` names other files than those of `{name}`: it is not followed")
        named = []
    files = named or present
    if not files:
        raise UsageError(
            f"`{name}` has no weights ({PATTERN})", "is the download complete? GGUF is not read"
        )
    extra = [file for file in present if file not in files]
    if extra and only is None:
        notices.append(f"left out of `{name}`, as `{INDEX}` does not name them: {_some(extra)}")
    shards = tuple(_read(folder / file) for file in files)
    _refuse_doubles(shards)
    return Shards(shards, tuple(notices))


def _named_by_index(path: Path) -> list[str]:
    """The files that the index names; none without an index."""
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(Path(name).name == name for name in names):
            raise ValueError("it names files elsewhere")
        return sorted(names)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"cannot read `{path}`: {error}", "get the folder again") from None


def _read(path: Path) -> Shard:
    with path.open("rb") as file:
        start = file.read(8)
        if POINTER.startswith(start) and len(start) == 8:
            raise UsageError(
                f"`{path}` is a git-LFS pointer, not the weights",
                "run `git lfs pull` in the folder",
            )
        length, size = int.from_bytes(start, "little"), path.stat().st_size
        if len(start) < 8 or 8 + length > size:
            raise _torn(path, f"it ends after {size:,} bytes")
        header = file.read(length)
    spans = _spans(path, header)
    needed = max((end for _, end in spans.values()), default=8 + length)
    if needed > size:
        raise _torn(path, f"it has {size:,} of {needed:,} bytes")
    return Shard(path, header, spans)


def _spans(path: Path, header: bytes) -> dict[str, tuple[int, int]]:
    try:
        entries: dict[str, Any] = json.loads(header)
        offset = 8 + len(header)
        return {
            name: (offset + entry["data_offsets"][0], offset + entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _torn(path, "its header cannot be read") from None


def _torn(path: Path, why: str) -> UsageError:
    return UsageError(f"`{path}` is torn: {why}", "get the file again")


def _refuse_doubles(shards: tuple[Shard, ...]) -> None:
    seen: dict[str, str] = {}
    for shard in shards:
        for name in shard.spans:
            if name in seen:
                raise UsageError(
                    f"`{name}` is both in `{seen[name]}` and in `{shard.path.name}`",
                    "remove the file that does not belong to the model",
                )
            seen[name] = shard.path.name


def _some(names: list[str]) -> str:
    """The first few names, and how many there are."""
    shown = ", ".join(f"`{name}`" for name in names[:SHOWN_NAMES])
    more = len(names) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
