"""Finding a model: a folder, a hub id or `builtin`. What is wrong with it is found here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli.errors import UsageError
from ds4cli.models import config as configs
from ds4cli.models import identity, mlx_lm, shards
from ds4cli.models.shards import Shards

if TYPE_CHECKING:
    from ds4cli.models.sharding import Share

BUILTIN = Path(__file__).parents[1] / "builtin"
# What a model needs of a hub repository, beside its weights. No code: none of it would be run.
WANTED = (
    "*.json", "*.jsonl", "*.jinja", "*.txt", "*.tiktoken", "tiktoken.model", "tokenizer.model",
)  # fmt: skip
# Beside a model mlx-lm leaves it alone, too.
ADAPTERS = "adapters.safetensors"


@dataclass(frozen=True)
class Source:
    """A model folder that was found. config, generation: its config.json, with the end tokens that
    count, and its generation_config.json. notices: what is to be said about them. own_files: the
    weight files that this process reads, where that is not all of them."""

    name: str
    folder: Path
    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    own_files: tuple[str, ...] | None = None

    @property
    def context_tokens(self) -> int | None:
        """The longest context its config states; None where it states none."""
        return configs.context_tokens(self.config)

    @property
    def vocab_size(self) -> int | None:
        """How many token ids its config states; None where it states none."""
        return configs.vocab_size(self.config)

    @cached_property
    def shards(self) -> Shards:
        """Its weight files. UsageError where something is wrong with them."""
        return shards.find(self.folder, self.name, self.own_files)

    def fingerprint(self, template: str = "") -> str:
        """Stands for all that decides what the model writes. template: one in place of its own."""
        if self.own_files is None:
            return identity.fingerprint(self.folder, self.shards.files, template)
        # Ranks that read other files: the hub's own folder is named after the commit.
        revision = f"{self.name} {self.folder.name}"
        return identity.fingerprint(self.folder, (), template, revision)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings that it recommends."""
        return configs.sampling(self.generation)

    @property
    def warnings(self) -> list[str]:
        """What of the folder is not used, though somebody may think that it is."""
        if not (self.folder / ADAPTERS).exists():
            return []
        return [f"`{ADAPTERS}` in `{self.name}` is not used: `--adapter-path` takes its folder"]

    @property
    def origins(self) -> list[str]:
        """In words, which of its files said what."""
        eos = configs.end_tokens(self.config)
        file = "generation_config.json" if self.generation.get("eos_token_id") else "config.json"
        said = [f"eos {', '.join(map(str, eos))} from {file}"] if eos else []
        if self.sampling:
            values = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
            said.append(f"in chat {values} from generation_config.json")
        context = self.context_tokens
        return [*said, f"context {context:,} from config.json"] if context else said


def find(name: str, offline: bool = False, share: Share | None = None) -> Source:
    """The model folder for a folder, a hub id or `builtin`. share: what of a hub's model this
    process reads. UsageError if there is none, or if mlx-lm has no code for its type."""
    source = locate(name, offline, share)
    check_type(source)
    return source


def locate(name: str, offline: bool = False, share: Share | None = None) -> Source:
    """Like `find`, for a folder that may hold a drafting head instead of a model."""
    folder, own_files = _folder(name, offline, share)
    config, generation, notices = configs.read(folder, name)
    if "model_file" in config:
        raise needs_code(f"`{name}`", f"model_file: {config['model_file']}")
    own = None if own_files is None else tuple(own_files)
    return Source(name, folder, config, generation, tuple(notices), own)


def local_sampling(name: str) -> dict[str, Any]:
    """What a model that is on this machine recommends for sampling; nothing is downloaded."""
    folder = BUILTIN if name == "builtin" else Path(name).expanduser()
    if not folder.is_dir() and _may_be_hub_id(name):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else folder
    generation, _ = configs.generation_of(folder)
    return configs.sampling(generation)


def needs_code(what: str, where: str) -> UsageError:
    """The refusal of a folder that wants its own code to be run."""
    return UsageError(
        f"{what} wants to run code of its own (`{where}`), which ds4cli never does",
        "use a conversion that mlx-lm reads by itself, with a tokenizer.json",
    )


def check_type(source: Source) -> None:
    """UsageError for a type that mlx-lm has no code for, before the tokenizer is read."""
    if "model_type" not in source.config:
        raise UsageError(
            f"`{source.folder / 'config.json'}` names no model_type", configs.NO_TYPE_HINT
        )
    try:
        mlx_lm.check_type(source.config)
    except ValueError as error:
        name, hint = source.name, unsupported_hint(error)
        raise UsageError(f"cannot load `{name}`: {error}", hint) from None


def unsupported_hint(error: Exception) -> str | None:
    """What to add to mlx-lm's refusal of a model."""
    return "this mlx-lm does not know that model type" if "not supported" in str(error) else None


def _folder(name: str, offline: bool, share: Share | None) -> tuple[Path, list[str] | None]:
    """Where a model lies, and which of its weight files count here; None: all of them."""
    if name == "builtin":
        if not (BUILTIN / "config.json").exists():
            raise UsageError(
                "this installation has no built-in model",
                "name one with `-m`: an mlx-lm folder or a hub id",
            )
        return BUILTIN, None
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path, None
    if path.exists():
        raise UsageError(
            f"`{name}` is a file, not a model folder", "name the folder with its config.json"
        )
    if not _may_be_hub_id(name):
        raise UsageError(f"there is no model folder `{name}`", "a hub id looks like `OWNER/NAME`")
    if share is None:
        return _from_hub(name, (*WANTED, shards.PATTERN), offline), None
    from ds4cli.models import stages

    folder = _from_hub(name, WANTED, offline)
    config, _, _ = configs.read(folder, name)
    own = stages.own_files(folder, config, share)
    return _from_hub(name, (*WANTED, *(own or [shards.PATTERN])), offline), own


def _may_be_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "~", "/"))


def _from_hub(name: str, patterns: Sequence[str], offline: bool) -> Path:
    """A hub repository's local copy of such files, downloaded as mlx-lm does, unless `offline`."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from mlx_lm.utils import snapshot_download

    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        given = dict(allow_patterns=list(patterns), local_files_only=offline)
        return Path(snapshot_download(name, **given))
    except HFValidationError:
        raise UsageError(
            f"`{name}` is neither a folder nor a hub id", "a hub id looks like `OWNER/NAME`"
        ) from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        hint = "run once without --offline" if offline else "check the network and the name"
        raise UsageError(f"`{name}` is not on this machine", hint) from None
    except Exception as error:  # the hub's client raises many kinds
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"cannot get `{name}`: {first}", "check the network and the name"
        ) from None
