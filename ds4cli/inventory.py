"""`ds4cli models`: what lies in the hub's cache on this machine, and what it can do here."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli import terminal
from ds4cli.errors import DS4Error, UsageError
from ds4cli.settings import nearest

if TYPE_CHECKING:
    from ds4cli.models.source import Source


@dataclass(frozen=True)
class Cached:
    """One repository in the cache; folder: its newest snapshot."""

    name: str
    size_bytes: int
    folder: Path
    config: dict[str, Any]


def cached() -> list[Cached]:
    """The repositories with a config.json, by name."""
    import json

    found = []
    for repo in _scan():
        newest = max(repo.revisions, key=lambda r: r.last_modified, default=None)
        if newest is None:
            continue
        config = newest.snapshot_path / "config.json"
        if config.is_file():
            values = json.loads(config.read_text(encoding="utf-8"))
            found.append(Cached(repo.repo_id, repo.size_on_disk, newest.snapshot_path, values))
    return sorted(found, key=lambda each: each.name)


def _scan() -> Sequence[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def run(remove: str | None = None) -> int:
    """List what is there, or remove one. Returns the exit code."""
    from rich.table import Table

    found = cached()
    if remove is not None:
        return _remove(remove, [each.name for each in found])
    if not found:
        terminal.note("no model in the hub's cache; `-m OWNER/NAME` downloads one, once")
        return 0
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("model", "type", "size", "layers", "tool calls", "heads that fit"):
        table.add_column(column, overflow="fold")
    for row in rows(found):
        table.add_row(*row)
    terminal.out().print(table)
    return 0


def rows(found: Sequence[Cached]) -> list[list[str]]:
    """A line of words for each model and head."""
    kinds = {each.name: _head_kind(each) for each in found}
    given = []
    for each in found:
        kind, size = kinds[each.name], f"{each.size_bytes / 1e9:.1f} GB"
        if kind is not None:
            given.append([each.name, f"{kind.name} head", size, "", "", ""])
            continue
        fitting = [
            other.name
            for other in found
            if (its := kinds[other.name]) is not None and _fits(its, other, each.config)
        ]
        can = _abilities(each)
        kind_name = str(each.config.get("model_type", "?"))
        given.append([each.name, kind_name, size, *can, ", ".join(fitting)])
    return given


def _head_kind(each: Cached) -> Any:
    """The kind of head that a repository holds; None for a model, or a head that is refused."""
    from ds4cli.drafters import heads

    try:
        return heads.kind_of(each.config, each.name)
    except DS4Error:
        return None


def _fits(kind: Any, head: Cached, target_config: dict[str, Any]) -> bool:
    from ds4cli.drafters.heads import HeadSource

    try:
        HeadSource(kind, head.name, head.folder, head.config).check(target_config)
    except DS4Error:
        return False
    return True


def _abilities(model: Cached) -> tuple[str, str]:
    """Its layers and its tool calls in words, without reading its weights; or why it cannot run."""
    from ds4cli.models import source as sources
    from ds4cli.models.tokenizers import load_tokenizer
    from ds4cli.tools import detect_format

    try:
        found = sources.find(str(model.folder), offline=True)
        form = detect_format(load_tokenizer(found))
        return _layers(found), form.name if form is not None else "none"
    except DS4Error as error:
        return terminal.one_line(error.message.replace(str(model.folder), model.name)), ""


def _layers(source: Source) -> str:
    from mlx_lm.utils import load_model

    from ds4cli.caches.build import adapt, build_caches

    model, _ = load_model(source.folder, lazy=True)
    adapters = adapt(build_caches(model, 0))
    fixed = sum(not adapter.seekable for adapter in adapters)
    return f"{len(adapters)}, {fixed} can't be cut" if fixed else f"{len(adapters)}, all can be cut"


def _remove(name: str, names: Sequence[str]) -> int:
    from huggingface_hub import scan_cache_dir

    if name not in names:
        raise UsageError(f"`{name}` is not in the hub's cache", nearest(name, names))
    repos = scan_cache_dir().repos
    repo = next(repo for repo in repos if repo.repo_id == name and repo.repo_type == "model")
    try:
        shutil.rmtree(repo.repo_path)  # a revision's hash may be another repository's too
    except OSError as error:
        raise UsageError(f"cannot remove `{name}`: {error.strerror or error}") from None
    terminal.note(f"removed `{name}`: {repo.size_on_disk / 1e9:.1f} GB")
    return 0
