"""Every setting and its default, once; where each value came from.

A setting has one name: field of `Settings`, key in TOML, `--flag` (with dashes), `DS4CLI_NAME` in
the environment. Precedence: flag > environment > profile > file > default. This is the only module
that reads the environment. It imports no MLX.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli.drafters import registry
from ds4cli.errors import UsageError

if TYPE_CHECKING:
    import tomli

PREFIX = "DS4CLI_"
# Variables that are no settings: of the machine, of ranks, of the tests.
OTHER_NAMES = ("BLAS", "CUDA_FORMS", "RANK_0", "TEST_DEVICE", "JSON_SCHEMA_SUITE")
# One model call while decoding: the next token and the guesses. Sliding windows have slack for it.
MAX_BLOCK_TOKENS = 32
MODEL, RANKS, SAMPLING, FORM, SPECULATION, REWIND, OUTPUT = PANELS = (
    "Model",
    "Several machines",
    "Sampling",
    "Form of the reply",
    "Speculation",
    "Rewind",
    "Output",
)


# Says 0 where a number may be left to the engine.
AUTO = "auto"
# Letters of a word that is taken for a part of another one.
LEAST_PART = 3


class Table(dict):
    """Named values of any kind, as JSON has them, but no null: TOML has none."""


@dataclass(frozen=True)
class Option:
    """How one setting is explained and checked. `kind` is str, int, float, bool, list, dict (token
    ids with numbers) or Table."""

    kind: type
    panel: str
    help: str
    flags: tuple[str, ...] = ()  # further spellings of the flag
    choices: tuple[str, ...] = ()
    valid: Callable[[Any], bool] = lambda value: True
    wants: str = ""  # the valid range in words, for messages and the README
    unset: str = ""  # what None means, in words
    auto: bool = False  # `auto` says 0

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        if self.choices:
            return "NAME"
        if self.auto:
            return f"N|{AUTO}"
        words = {str: "TEXT", int: "INT", float: "NUMBER", list: "TEXT", dict: "ID=VALUE"}
        words[Table] = "JSON"
        return words.get(self.kind, "")


def _setting(default: Any, kind: type, panel: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(kind, panel, help, **more)})


def _at_least(low: float) -> dict[str, Any]:
    return {"valid": lambda v: v >= low, "wants": f"at least {low}"}


def _between(low: float, high: float) -> dict[str, Any]:
    return {"valid": lambda v: low <= v <= high, "wants": f"from {low} to {high}"}


def _one_of(*values: int) -> dict[str, Any]:
    words = ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
    return {"valid": lambda v: v in values, "wants": words}


@dataclass(frozen=True)
class Settings:
    """All settings, checked and normalised; a bad value is a `UsageError` that names it.

    A field whose default is None may be None, which means that the engine decides.
    """

    model: str = _setting(
        "builtin", str, MODEL, "mlx-lm folder, hub id, or `builtin`.", flags=("-m",)
    )
    adapter_path: str | None = _setting(
        None, str, MODEL, "Folder of a LoRA or DoRA adapter, as mlx-lm trains them."
    )
    system: str | None = _setting(None, str, MODEL, "System text.", flags=("-s", "--system-prompt"))
    system_file: str | None = _setting(None, str, MODEL, "File with the system text.")
    think: bool | None = _setting(
        None, bool, MODEL, "Switch the template's thinking on or off.", unset="the template's own"
    )
    raw: bool = _setting(False, bool, MODEL, "Use the prompt as it is, with no chat template.")
    special: bool = _setting(
        False, bool, MODEL, "Let what spells a special token in a text be one; --raw does, too."
    )
    chat_template: str | None = _setting(
        None, str, MODEL, "File with a chat template, in place of the model's."
    )
    template_args: Table = field(
        default_factory=Table,
        metadata={"option": Option(Table, MODEL, "What else the chat template is given.")},
    )
    tools: str | None = _setting(None, str, MODEL, "JSON file with a list of tools in OpenAI form.")
    dtype: str = _setting(
        "auto", str, MODEL, "Weights in memory.", choices=("auto", "float32", "stored")
    )
    extra_eos_token: tuple[str, ...] = _setting(
        (), list, MODEL, "A token that ends the reply, too. Repeatable."
    )
    offline: bool = _setting(False, bool, MODEL, "Never download anything.")
    hostfile: str | None = _setting(
        None, str, RANKS, "Share the model with the hosts of this file, in MLX's form."
    )
    local_ranks: int = _setting(
        1, int, RANKS, "Share it among so many processes here.", **_between(1, 64)
    )
    tensor_parallel: bool = _setting(
        False, bool, RANKS, "Each computes a part of every layer: the default where that is known."
    )
    pipeline: bool = _setting(False, bool, RANKS, "Each computes some of the layers.")
    temp: float | None = _setting(
        None,
        float,
        SAMPLING,
        "Temperature; 0 is greedy.",
        flags=("--temperature",),
        unset="0; in chat the model's, or 0.7",
        **_at_least(0),
    )
    top_p: float | None = _setting(
        None,
        float,
        SAMPLING,
        "Keep the likeliest tokens up to this total.",
        unset="1; in chat the model's",
        valid=lambda v: 0 < v <= 1,
        wants="above 0, at most 1",
    )
    top_k: int | None = _setting(
        None,
        int,
        SAMPLING,
        "Keep this many tokens; 0 keeps all.",
        unset="0; in chat the model's",
        **_at_least(0),
    )
    min_p: float = _setting(
        0.0, float, SAMPLING, "Drop tokens below this share of the best.", **_between(0, 1)
    )
    xtc_probability: float = _setting(
        0.0, float, SAMPLING, "Chance to drop all likely tokens but the last.", **_between(0, 1)
    )
    xtc_threshold: float = _setting(
        0.1,
        float,
        SAMPLING,
        "From what probability on XTC calls a token likely.",
        **_between(0, 0.5),
    )
    repetition_penalty: float = _setting(
        1.0,
        float,
        SAMPLING,
        "Divide the score of tokens seen before; 1 is off.",
        valid=lambda v: v > 0,
        wants="above 0",
    )
    repetition_context_size: int = _setting(
        -1, int, SAMPLING, "Tokens the penalties look back on; -1 is all.", **_at_least(-1)
    )
    presence_penalty: float = _setting(
        0.0, float, SAMPLING, "Subtract once from tokens seen before."
    )
    frequency_penalty: float = _setting(0.0, float, SAMPLING, "Subtract per time a token was seen.")
    logit_bias: dict[int, float] = field(
        default_factory=dict,
        metadata={
            "option": Option(dict, SAMPLING, "Add VALUE to the score of token ID. Repeatable.")
        },
    )
    seed: int = _setting(
        0,
        int,
        SAMPLING,
        "Same seed, same text; on a GPU see `reproducible`.",
        **_between(0, 2**63 - 1),
    )
    max_tokens: int = _setting(
        1024,
        int,
        SAMPLING,
        "Longest reply in tokens; -1 has no limit.",
        flags=("-n",),
        valid=lambda v: v == -1 or v >= 1,
        wants="at least 1, or -1 for no limit",
    )
    stop: tuple[str, ...] = _setting(
        (),
        list,
        SAMPLING,
        "End the answer before this text. Repeatable.",
        valid=all,
        wants="no empty text",
    )
    json_schema: str | None = _setting(
        None, str, FORM, "Reply with JSON that fits this schema: a file, or the schema itself."
    )
    json_object: bool = _setting(False, bool, FORM, "Reply with any JSON object.")
    regex: str | None = _setting(None, str, FORM, "Reply with text that matches this pattern.")
    grammar: str | None = _setting(
        None, str, FORM, "Reply with text of a grammar in llguidance's Lark: a file."
    )
    strict: bool = _setting(
        False, bool, FORM, "Refuse a schema that cannot be enforced whole while writing."
    )
    drafter: str = _setting(
        "auto",
        str,
        SPECULATION,
        "Where guesses come from; auto: ngram, and the draft model or head if there is one.",
        choices=registry.CHOICES,
    )
    draft_model: str | None = _setting(
        None,
        str,
        SPECULATION,
        "Folder or hub id of a small model with the same tokenizer, or of a drafting head.",
    )
    num_draft_tokens: int | None = _setting(
        None,
        int,
        SPECULATION,
        "Guesses per step.",
        unset="what pays here",
        **_between(1, MAX_BLOCK_TOKENS - 1),
    )
    corpus: str | None = _setting(
        None, str, SPECULATION, "File that keeps what was said and read, to guess from later."
    )
    speculate: str = _setting(
        "auto",
        str,
        SPECULATION,
        "When to guess; auto stops while it loses time.",
        choices=("auto", "always", "tools", "never"),
    )
    reproducible: bool = _setting(
        False,
        bool,
        SPECULATION,
        "Guess by rule, not by clock: the same text again on a GPU too.",
    )
    parallel: int = _setting(
        0,
        int,
        SPECULATION,
        "Lines of a batch to answer at a time; auto: as many as pay here.",
        flags=("-np",),
        auto=True,
        valid=lambda v: 0 <= v <= 256,
        wants="auto (or 0), or from 1 to 256",
    )
    rewind_mb: int = _setting(512, int, REWIND, "Memory for going back, in MB.", **_at_least(0))
    horizon_tokens: int = _setting(
        256, int, REWIND, "Last tokens that are free to go back to.", **_at_least(0)
    )
    prefill_step_size: int = _setting(
        0,
        int,
        REWIND,
        "Prompt tokens per model call; auto: 512, on CUDA 2,048.",
        auto=True,
        valid=lambda v: v >= 0,
        wants="auto, or at least 1",
    )
    kv_bits: int | None = _setting(
        None, int, REWIND, "Quantise attention caches to this.", **_one_of(2, 4, 8)
    )
    kv_group_size: int = _setting(
        64, int, REWIND, "Group size for --kv-bits.", **_one_of(32, 64, 128)
    )
    max_repairs: int = _setting(
        3, int, REWIND, "Tries to repair a broken tool call.", **_at_least(0)
    )
    hide_reasoning: bool = _setting(
        False, bool, OUTPUT, "Do not print the model's reasoning.", flags=("-R",)
    )
    stats: bool | None = _setting(
        None, bool, OUTPUT, "Print speed and acceptance on stderr.", unset="in chat only"
    )

    def __post_init__(self) -> None:
        for name in OPTIONS:
            object.__setattr__(self, name, check(name, getattr(self, name)))

    def filled(self, own: Mapping[str, Any] | None = None) -> Settings:
        """These settings with every sampling setting that nobody set as `own` has it, else off."""
        values = {**GREEDY, **(own or {})}
        return replace(self, **{n: values[n] for n in GREEDY if getattr(self, n) is None})


# What sampling settings that nobody set stand for, but in chat, where replies are read one by one.
GREEDY: dict[str, Any] = {"temp": 0.0, "top_p": 1.0, "top_k": 0}
CHAT_TEMP = 0.7

OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(Settings)}


def defaults() -> Settings:
    """Settings as they are when nobody says anything."""
    return Settings()


# --- values -----------------------------------------------------------------------------------


def check(name: str, value: Any, label: str | None = None) -> Any:
    """`value` normalised to the setting's kind. A bad one is a `UsageError` that says `label`."""
    option, label = OPTIONS[name], label or name
    if value is None and _nullable(name):
        return None
    value = 0 if option.auto and value == AUTO else value
    typed = _typed(option.kind, value)
    shown = f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    if typed is None:
        raise UsageError(f"`{label}` wants {_kind_words(option)}, not {shown}")
    if option.choices and typed not in option.choices:
        raise UsageError(f"`{label}` cannot be {shown}", _choice_hint(typed, option.choices))
    if not option.valid(typed):
        raise UsageError(f"`{label}` cannot be {shown}", f"it wants {option.wants}")
    return typed


def _nullable(name: str) -> bool:
    return Settings.__dataclass_fields__[name].default is None


def _typed(kind: type, value: Any) -> Any:
    """The value as `kind`, or None when it is not one. Numbers are finite; a bool is no number."""
    if kind is list:
        return _texts(value)
    if kind is dict:
        return _biases(value)
    if kind is Table:
        return Table(value) if isinstance(value, dict) and not _has_null(value) else None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def _texts(value: Any) -> tuple[str, ...] | None:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        return None
    return tuple(values)


def _biases(value: Any) -> dict[int, float] | None:
    """Token id -> bias. TOML keys are text, so an id may be one."""
    try:
        biases = {int(token): _typed(float, bias) for token, bias in dict(value).items()}
    except (TypeError, ValueError):
        return None
    usable = all(token >= 0 and bias is not None for token, bias in biases.items())
    return biases if usable else None


def _has_null(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, inner))


def _kind_words(option: Option) -> str:
    words = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        list: "a list of texts",
        dict: "token ids with numbers",
        Table: "a JSON object without null",
    }
    return f"{AUTO}, or {words[option.kind]}" if option.auto else words[option.kind]


def _choice_hint(value: str, choices: tuple[str, ...]) -> str:
    return nearest(value, choices) or f"choose from {', '.join(choices)}"


def nearest(word: str, known: Any) -> str | None:
    """A hint that names the known word closest to `word`, if one is close, or the only one that it
    is a part of."""
    words = [str(k) for k in known]
    whole = [k for k in words if len(word) >= LEAST_PART and word in k]
    close = get_close_matches(word, words, n=1) or (whole if len(whole) == 1 else [])
    return f"did you mean `{close[0]}`?" if close else None


def parse_text(name: str, text: str, label: str | None = None) -> Any:
    """A setting's value from the text of an environment variable or of a flag."""
    option = OPTIONS[name]
    try:
        value = text if option.auto and text == AUTO else _PARSERS.get(option.kind, str)(text)
    except ValueError:
        message = f"`{label or name}` wants {_kind_words(option)}, not `{text}`"
        raise UsageError(message) from None
    return check(name, value, label)


def _parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _parse_biases(text: str) -> dict[int, float]:
    """`ID=VALUE`, several with commas."""
    pairs = (part.partition("=")[::2] for part in text.split(","))
    return {int(token): float(bias) for token, bias in pairs}


_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: _parse_bool,
    dict: _parse_biases,
    Table: json.loads,
}


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigFile:
    """A TOML file, read and checked: top-level settings and named profiles."""

    path: Path
    values: dict[str, Any]
    profiles: dict[str, dict[str, Any]]


HERE = Path("ds4cli.toml")


def find_config(environ: Mapping[str, str] | None = None) -> Path | None:
    """`./ds4cli.toml`, else `$XDG_CONFIG_HOME/ds4cli/config.toml` (`~/.config` on macOS too)."""
    folder = _folder(environ, "XDG_CONFIG_HOME", ".config")
    places = [HERE] if folder is None else [HERE, folder / "config.toml"]
    return next((place for place in places if os.path.isfile(place)), None)


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where history and sessions lie: `$XDG_STATE_HOME/ds4cli` (`~/.local/state` on macOS too)."""
    folder = _folder(environ, "XDG_STATE_HOME", ".local", "state")
    if folder is None:
        raise UsageError("there is no home folder to keep chats in", "set XDG_STATE_HOME or HOME")
    return folder


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """What can be made again: `$XDG_CACHE_HOME/ds4cli` (`~/.cache` on macOS too)."""
    return _folder(environ, "XDG_CACHE_HOME", ".cache")


def _folder(environ: Mapping[str, str] | None, variable: str, *below: str) -> Path | None:
    """Our part of one of the user's folders; None for a user who has no home."""
    given = (os.environ if environ is None else environ).get(variable)
    home = os.path.expanduser("~")  # itself where neither HOME nor the system knows one
    if given or home != "~":
        return Path(given or os.path.join(home, *below)) / "ds4cli"
    return None


def read_config(path: Path) -> ConfigFile:
    """Read and check a TOML file. Raises `UsageError` for anything wrong in it."""
    table = _read_toml(path)
    profiles = table.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise UsageError(f"`profiles` in `{path}` wants tables", "write `[profiles.NAME]`")
    checked = {
        name: _check_table(profile, f"[profiles.{name}] of `{path}`")
        for name, profile in profiles.items()
    }
    return ConfigFile(path, _check_table(table, f"`{path}`"), checked)


def _read_toml(path: Path) -> dict[str, Any]:
    import tomli

    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read config file `{path}`: {reason}") from None
    except tomli.TOMLDecodeError as error:
        message = f"config file `{path}` is not valid TOML: line {error.lineno}: {error.msg}"
        raise UsageError(message, _toml_hint(error)) from None
    except UnicodeDecodeError:
        raise UsageError(
            f"config file `{path}` is not UTF-8 text", "save it as UTF-8; `--config` names another"
        ) from None


def _toml_hint(error: tomli.TOMLDecodeError) -> str:
    """What the line at fault lacks."""
    line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
    key, equals, value = (part.strip() for part in line.partition("="))
    if line.lstrip().startswith("["):
        return "a table is written `[profiles.NAME]`"
    if not equals:
        return "a setting is written `name = value`"
    if not value:
        return f"`{key}` has no value: leave the line out, or write one"
    return 'texts need quotes, as in `model = "NAME"`; numbers, true and false have none'


def _unknown_key_hint(key: str, value: Any) -> str | None:
    """The setting that was meant, by its own name or by one of its flags."""
    if isinstance(value, dict):
        return "settings stand at the top of the file, or under `[profiles.NAME]`"
    spelled = {
        flag.lstrip("-").replace("-", "_"): name for name in OPTIONS for flag in OPTIONS[name].flags
    }
    close = get_close_matches(key.replace("-", "_"), [*OPTIONS, *spelled], n=1)
    return f"did you mean `{spelled.get(close[0], close[0])}`?" if close else None


def _check_table(table: dict[str, Any], where: str) -> dict[str, Any]:
    for key in table:
        if key not in OPTIONS:
            raise UsageError(f"unknown key `{key}` in {where}", _unknown_key_hint(key, table[key]))
    return {key: _check_in(where, key, value) for key, value in table.items()}


def _check_in(where: str, name: str, value: Any) -> Any:
    try:
        return check(name, value)
    except UsageError as error:
        raise UsageError(f"{error.message}, in {where}", error.hint) from None


# --- layers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """Settings, and for every field where its value came from, in words."""

    settings: Settings
    origins: dict[str, str]

    def given(self, name: str) -> bool:
        """Whether the user gave this value on the command line."""
        return self.origins[name] == "flag"


def resolve(
    flags: Mapping[str, Any],
    config: ConfigFile | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge all layers. `flags` holds only what was given (None counts as not given)."""
    environ = os.environ if environ is None else environ
    layers = [
        ("flag", {name: value for name, value in flags.items() if value is not None}),
        ("environment", _from_environment(environ)),
        *_config_layers(config, profile),
    ]
    values, origins = {}, dict.fromkeys(OPTIONS, "default")
    for origin, layer in reversed(layers):
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    _refuse_contradictions(values, origins)
    return Resolved(Settings(**values), origins)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {name: environ.get(PREFIX + name.upper()) for name in OPTIONS}
    return {name: _parse_variable(name, text) for name, text in found.items() if text is not None}


def unread_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """What to say of variables that look like ours and that nothing reads."""
    environ = os.environ if environ is None else environ
    known = [PREFIX + name.upper() for name in OPTIONS] + [PREFIX + name for name in OTHER_NAMES]
    said = []
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name not in known:
            hint = nearest(name, known)
            said.append(f"nothing reads `{name}`" + (f": {hint}" if hint else ""))
    return said


def _parse_variable(name: str, text: str) -> Any:
    return parse_text(name, text, "$" + PREFIX + name.upper())


def _config_layers(
    config: ConfigFile | None, profile: str | None
) -> list[tuple[str, dict[str, Any]]]:
    """The layers of a file, the stronger one first."""
    if config is None:
        if profile:
            raise UsageError(
                f"no config file has a profile `{profile}`",
                "write `[profiles.NAME]` in `./ds4cli.toml`, or name a file with `--config`",
            )
        return []
    layers = [(f"file {config.path}", config.values)]
    if profile:
        layers.insert(0, (f"profile {profile} in {config.path}", _profile(config, profile)))
    return layers


def _profile(config: ConfigFile, name: str) -> dict[str, Any]:
    if name in config.profiles:
        return config.profiles[name]
    known = ", ".join(f"`{known}`" for known in config.profiles) or "none"
    hint = nearest(name, config.profiles) or f"profiles in this file: {known}"
    raise UsageError(f"no profile `{name}` in `{config.path}`", hint)


def _takes_no_draft_model(drafter: Any) -> bool:
    return drafter != registry.AUTO and not registry.named(drafter).may_be_named


# Pairs that exclude each other. They count only within one layer: a flag may overrule a file.
_CONTRADICTIONS: tuple[tuple[str, Callable[[Any], bool], str, Callable[[Any], bool]], ...] = (
    ("draft_model", bool, "drafter", _takes_no_draft_model),
    ("raw", bool, "system", bool),
    ("raw", bool, "tools", bool),
    ("raw", bool, "think", lambda v: v is not None),
    ("raw", bool, "chat_template", bool),
    ("raw", bool, "template_args", bool),
    ("num_draft_tokens", bool, "drafter", lambda v: v == "none"),
    ("corpus", bool, "drafter", lambda v: v not in (registry.AUTO, "ngram")),
)


def _refuse_contradictions(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for one, is_set, other, excludes in _CONTRADICTIONS:
        both = one in values and other in values and origins[one] == origins[other]
        if both and is_set(values[one]) and excludes(values[other]):
            raise UsageError(
                f"`{one}` and `{other} = {values[other]}` contradict each other", "give one"
            )
    if values.get("drafter") == "model" and not values.get("draft_model"):
        raise UsageError("`drafter = model` needs a draft model", "add `--draft-model FOLDER`")


# --- the environment, for the other modules -----------------------------------------------------


def variable(name: str) -> str | None:
    """The environment variable `DS4CLI_NAME`, or None when it is unset or empty."""
    return os.environ.get(PREFIX + name) or None


def editor(environ: Mapping[str, str] | None = None) -> str:
    """The user's editor, as a command line."""
    environ = os.environ if environ is None else environ
    return environ.get("VISUAL") or environ.get("EDITOR") or "vi"


# --- printing -----------------------------------------------------------------------------------


def to_toml(settings: Settings, notes: Mapping[str, str]) -> str:
    """`settings` as TOML, each line with its note. TOML has no null: such a line is a comment."""
    lines = []
    for name in OPTIONS:
        value = getattr(settings, name)
        value = AUTO if OPTIONS[name].auto and value == 0 else value
        line = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{line}  # {notes[name]}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        pairs = ", ".join(f"{_toml_text(key)} = {_toml(inner)}" for key, inner in value.items())
        return "{ " + pairs + " }" if pairs else "{}"
    if isinstance(value, dict):
        pairs = ", ".join(f"{token} = {bias}" for token, bias in value.items())
        return "{ " + pairs + " }" if pairs else "{}"
    return repr(value)


def _toml_text(text: str) -> str:
    """A basic TOML string: JSON's escapes are TOML's too, except for DEL, which JSON leaves."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
