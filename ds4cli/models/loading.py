"""Finding and loading a model: folders, hub ids, weights in the right dtype, tokenizers.

Everything that can be wrong with what the user named is found before weights are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, dequantize_model, load_model, load_tokenizer

from ds4cli.errors import ModelError, UsageError

if TYPE_CHECKING:
    from ds4cli.text.tokenizer import Vocabulary

BUILTIN = Path(__file__).parents[1] / "builtin"
# What a model needs of a hub repository. No code: none of it would be run.
WANTED = (
    "*.json", "*.jsonl", "*.jinja", "*.txt", "*.tiktoken", "tiktoken.model", "tokenizer.model",
    "model*.safetensors",
)  # fmt: skip
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
# What mlx-lm's models call the table of their tokens' vectors.
EMBEDDINGS = (
    "embed_tokens", "tok_embeddings", "token_embeddings", "word_embeddings", "embeddings",
    "embedding", "embed", "embed_in", "wte",
)  # fmt: skip
# Share of the free memory that float32 weights may take on a CPU before we keep them as stored.
FLOAT32_MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Source:
    """A model folder that was found, and its config.json."""

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def context_tokens(self) -> int | None:
        """The longest context its config states; None where it states none."""
        for table in (self.config, self.config.get("text_config") or {}):
            for key in CONTEXT_KEYS:
                if isinstance(table.get(key), int):
                    return table[key]
        return None

    @property
    def vocab_size(self) -> int | None:
        """How many token ids its config states; None where it states none."""
        tables = (self.config, self.config.get("text_config") or {})
        sizes = (table.get("vocab_size") for table in tables)
        return next((size for size in sizes if isinstance(size, int)), None)

    def fingerprint(self) -> str:
        """Changes when config, tokenizer or the size of the weights change."""
        digest = hashlib.sha256()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            path = self.folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
        for path in sorted(self.folder.glob("model*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
        return digest.hexdigest()[:32]


def find(name: str, offline: bool = False) -> Source:
    """The model folder for a folder, a hub id or `builtin`. UsageError if there is none, or if
    mlx-lm has no code for its type."""
    source = locate(name, offline)
    check_type(source)
    return source


def locate(name: str, offline: bool = False) -> Source:
    """Like `find`, for a folder that may hold a drafting head instead of a model."""
    folder = _folder(name, offline)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"`{name}` is not a model folder: it has no config.json",
            "give an mlx-lm folder, a hub id such as `mlx-community/NAME`, or `builtin`",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read `{path}`: {error}") from None
    if not isinstance(config, dict) or not {"model_type", "architectures"} & config.keys():
        raise UsageError(f"`{path}` names no model_type")
    if "model_file" in config:
        raise _needs_code(f"`{name}`", f"model_file: {config['model_file']}")
    return Source(name, folder, config)


def check_vocabulary(source: Source, vocabulary: Vocabulary) -> list[str]:
    """Notices about a tokenizer that knows more ids than its model. UsageError where those are not
    just special tokens that were added: then the two do not belong together.
    """
    size, ids = source.vocab_size, vocabulary.token_limit
    if size is None or ids <= size:
        return []
    base = getattr(vocabulary.tokenizer, "vocab_size", ids)
    if base > size:
        raise UsageError(
            f"the tokenizer of `{source.name}` has `{base}` tokens, its model only `{size}`",
            "use the tokenizer files that came with these weights",
        )
    return [f"`{source.name}` has {size} token ids, its tokenizer {ids}: it cannot read the rest"]


def embedding_rows(model: Any) -> int | None:
    """How many token ids the model's embedding holds; None where none has a known name."""
    modules = sorted(model.named_modules(), key=lambda item: item[0].count("."))
    named = (m for path, m in modules if path.rsplit(".", 1)[-1] in EMBEDDINGS)
    return next((m.weight.shape[0] for m in named if "weight" in m), None)


def _needs_code(what: str, where: str) -> UsageError:
    return UsageError(
        f"{what} wants to run code of its own (`{where}`), which ds4cli never does",
        "use a conversion that mlx-lm reads by itself, with a tokenizer.json",
    )


def check_type(source: Source) -> None:
    """UsageError for a type that mlx-lm has no code for, before the tokenizer is read."""
    if "model_type" not in source.config:
        raise UsageError(f"`{source.folder / 'config.json'}` names no model_type")
    try:
        _get_classes(source.config)
    except ValueError as error:
        name, hint = source.name, _unsupported_hint(error)
        raise UsageError(f"cannot load `{name}`: {error}", hint) from None


def _folder(name: str, offline: bool) -> Path:
    if name == "builtin":
        if not (BUILTIN / "config.json").exists():
            raise UsageError(
                "this installation has no built-in model",
                "name one with `-m`: an mlx-lm folder or a hub id",
            )
        return BUILTIN
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"`{name}` is a file, not a model folder")
    if name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise UsageError(f"there is no model folder `{name}`", "a hub id looks like `OWNER/NAME`")
    return _from_hub(name, offline)


def _from_hub(name: str, offline: bool) -> Path:
    """A hub repository's local copy, downloaded as mlx-lm does, but no code, unless `offline`."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from mlx_lm.utils import snapshot_download

    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        patterns = list(WANTED)
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except HFValidationError:
        raise UsageError(f"`{name}` is neither a folder nor a hub id") from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        hint = "run once without --offline" if offline else "check the network and the name"
        raise UsageError(f"`{name}` is not on this machine", hint) from None
    except Exception as error:  # the hub's client raises many kinds
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"cannot get `{name}`: {first}", "check the network and the name"
        ) from None


def tokenizer(source: Source) -> Any:
    """The folder's tokenizer, wrapped by mlx-lm.

    UsageError for one that needs code from the folder: unless told not to, transformers asks on
    standard input whether to run it, and piped text would answer.
    """
    _refuse_templates_elsewhere(source)
    eos, extra = source.config.get("eos_token_id"), {"trust_remote_code": False}
    try:
        return load_tokenizer(source.folder, extra, eos_token_ids=eos)
    except Exception as error:  # transformers raises many kinds
        if "trust_remote_code" in str(error):
            raise _needs_code(f"the tokenizer of `{source.name}`", "auto_map") from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"`{source.name}` has no usable tokenizer: {first}") from None


def _refuse_templates_elsewhere(source: Source) -> None:
    """UsageError for a template that links out of its folder: any file of the user's could become
    part of the prompt. In the hub's cache files are links to `blobs` two folders up."""
    homes = [source.folder.resolve()]
    blobs = source.folder.parent.parent / "blobs"
    if source.folder.parent.name == "snapshots" and not blobs.is_symlink():
        homes.append(blobs.resolve())
    for path in (*source.folder.glob("*.jinja"), *source.folder.glob("*/*.jinja")):
        target = path.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise UsageError(
                f"the chat template `{path}` is a link to `{target}`, outside its model's folder",
                "put a copy of the file there if you trust it",
            )


def weights(source: Source, dtype: str) -> tuple[Any, list[str]]:
    """The model with its weights evaluated, and notices about them.

    dtype: "stored", "float32", or "auto": float32 on a CPU when that fits, else as stored.
    """
    try:
        model, _ = load_model(source.folder, lazy=True)
    except FileNotFoundError:
        raise UsageError(f"`{source.name}` has no weights (model*.safetensors)") from None
    except ValueError as error:
        raise UsageError(
            f"cannot load `{source.name}`: {error}", _unsupported_hint(error)
        ) from None
    except Exception as error:  # a config that its model class cannot read, a broken file
        raise ModelError(f"cannot load `{source.name}`: {error}") from None
    notices = _to_float32(model, source.name) if _wants_float32(model, dtype) else []
    mx.eval(model.parameters())
    model.eval()
    return model, notices


def _unsupported_hint(error: Exception) -> str | None:
    return "this mlx-lm does not know that model type" if "not supported" in str(error) else None


def _wants_float32(model: Any, dtype: str) -> bool:
    if dtype != "auto":
        return dtype == "float32"
    # Half-precision and quantised products are 10 to 100 times slower on MLX's CPU backend.
    if mx.default_device() != mx.Device(mx.cpu):
        return False
    return float32_bytes(model) < FLOAT32_MEMORY_SHARE * free_memory_bytes()


def float32_bytes(model: Any) -> int:
    """Bytes of the weights as float32 (quantised ones unpacked)."""
    from mlx_lm.utils import get_total_parameters

    return 4 * get_total_parameters(model)


def free_memory_bytes() -> int:
    """Memory that is free now; a large number where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


def is_float32(model: Any) -> bool:
    """Whether all weights are float32, none of them packed."""
    dtypes = {v.dtype for _, v in tree_flatten(model.parameters())}
    floats = {dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)}
    return floats <= {mx.float32} and mx.uint32 not in dtypes


def _to_float32(model: Any, name: str) -> list[str]:
    if is_float32(model):
        return []
    unpack(model, mx.float32)
    gigabytes = 4 * sum(v.size for _, v in tree_flatten(model.parameters())) / 1e9
    return [f"`{name}`: weights held as float32 ({gigabytes:.1f} GB), the fast type here"]


def unpack(module: Any, dtype: mx.Dtype) -> None:
    """Hold all weights of a model or head as `dtype`, quantised ones too."""
    module.set_dtype(dtype)  # scales first, so that unpacking rounds nothing
    dequantize_model(module)
    module.set_dtype(dtype)  # formats without scales of that type unpack to another


def check_same_tokenizer(target: Any, draft: Any, draft_name: str) -> None:
    """A draft model must speak the target's tokens: compared by content, padding apart."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = sorted(
        (i, t) for t, i in (ours.items() ^ theirs.items()) if ours.get(t) != theirs.get(t)
    )
    token_id, token = differing[0]
    raise UsageError(
        f"draft model `{draft_name}` has another tokenizer: token `{token}` is "
        f"{ours.get(token, 'missing')} in the target, {theirs.get(token, 'missing')} in the draft",
        f"{len(differing)} entries differ, the first at id {token_id}; "
        "use a draft of the same family",
    )
