"""What config.json and generation_config.json say, read as mlx-lm reads them. No mlx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds4cli import settings
from ds4cli.errors import UsageError

CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length",
    "max_sequence_length", "model_max_length",
)  # fmt: skip
# Where a folder that also sees or hears keeps the configuration of its language model.
TEXT_TABLES = ("text_config", "llm_config", "language_config")
# These stretch positions inside the context that the config states, instead of beyond it.
WITHIN_CONTEXT = ("llama3", "longrope", "su")
# generation_config.json's names of what our settings are called.
SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}

# Fields of which a model, or a drafting head, has one or more.
NAMES = {"model_type", "architectures", "speculators_model_type", "medusa_num_heads"}

NO_TYPE_HINT = "is it the config.json of a language model?"


def read(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """config.json with the end tokens that count, generation_config.json, and notices.

    UsageError for a folder without a usable config.json; `name` is what the user called it.
    """
    path = folder / "config.json"
    try:
        config = _table(path)
    except FileNotFoundError:
        raise UsageError(
            f"`{name}` is not a model folder: it has no config.json",
            "give an mlx-lm folder, a hub id such as `mlx-community/NAME`, or `builtin`",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read `{path}`: {error}") from None
    if not NAMES & config.keys():
        raise UsageError(f"`{path}` names no model_type", NO_TYPE_HINT)
    generation, notices = generation_of(folder)
    if generation.get("eos_token_id"):
        config["eos_token_id"] = generation["eos_token_id"]
    return config, generation, notices


def generation_of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """generation_config.json; one that cannot be read is as good as none, as in mlx-lm."""
    try:
        return _table(folder / "generation_config.json"), []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"generation_config.json is not used: {error}"]


def _table(path: Path) -> dict[str, Any]:
    """A JSON object. transformers tags floats that JSON lacks: `{"__float__": "Infinity"}`."""
    table = json.loads(path.read_text(encoding="utf-8"), object_hook=_untagged)
    if not isinstance(table, dict):
        raise ValueError("it is not a JSON object")
    return table


def _untagged(table: dict[str, Any]) -> Any:
    return float(table["__float__"]) if table.keys() == {"__float__"} else table


def end_tokens(config: dict[str, Any]) -> list[int]:
    """The ids that end a reply; none where the config names none."""
    ids = config.get("eos_token_id")
    given = ids if isinstance(ids, list) else [ids]
    return [i for i in given if type(i) is int]


def text_tables(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config, and the one of its language model."""
    yield config
    for name in TEXT_TABLES:
        if isinstance(config.get(name), dict):
            yield config[name]


def context_tokens(config: dict[str, Any]) -> int | None:
    """The longest context; None where none is stated."""
    for table in text_tables(config):
        for key in CONTEXT_KEYS:
            if type(table.get(key)) is int:
                return max([table[key], *_scaled(table)])
    return None


def _scaled(table: dict[str, Any]) -> Iterator[int]:
    """Contexts that position scaling reaches: its factor times what the model was trained on.

    Some configs state the result as their context, too, so the longest counts.
    """
    for rope in _ropes(table):
        kind = rope.get("rope_type") or rope.get("type")
        factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
        if kind not in WITHIN_CONTEXT and isinstance(factor, (int, float)) and type(trained) is int:
            yield int(factor * trained)


def _ropes(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables of position scaling; there may be one for each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = table.get(name)
        if isinstance(rope, dict):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, dict))


def vocab_size(config: dict[str, Any]) -> int | None:
    """How many token ids the model has; None where that is not stated."""
    sizes = (table.get("vocab_size") for table in text_tables(config))
    return next((size for size in sizes if type(size) is int), None)


def sampling(generation: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings that generation_config.json recommends, under our names. A value that
    no setting can have is left out; `do_sample: false` says that none of them counts."""
    if generation.get("do_sample") is False:
        return {}
    found = {}
    for theirs, ours in SAMPLING.items():
        value = generation.get(theirs)
        if value is not None and _fits(ours, value):
            found[ours] = settings.check(ours, value)
    return found


def _fits(name: str, value: Any) -> bool:
    try:
        settings.check(name, value)
    except UsageError:
        return False
    return True
