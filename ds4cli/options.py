"""Options: every setting as one, and what all commands share. Each is declared once.

`with_settings` gives a command one option per entry of `settings.OPTIONS` and the shared switches;
the command receives a `Run` instead of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ds4cli import settings, terminal
from ds4cli.backend import address_space
from ds4cli.errors import UsageError
from ds4cli.settings import OPTIONS, OUTPUT, Option, Resolved, Settings

# What a command takes for settings that nobody set: values and their origins.
Own = Callable[[Settings], dict[str, tuple[Any, str]]]
# Settings that are text: the others name files, in the system's own encoding, or are words of ours.
TEXTS = ("system", "stop", "template_args")
# Settings that name a file to trust.
TRUSTED = ("model", "adapter_path", "draft_model", "tools", "system_file")


@dataclass(frozen=True)
class Run:
    """What every command is told: the settings, where they came from, and how much to say."""

    resolved: Resolved
    quiet: bool = False
    verbose: bool = False

    @property
    def settings(self) -> Settings:
        """The settings of this run."""
        return self.resolved.settings


def _switch(help: str, *flags: str, panel: str | None = None) -> inspect.Parameter:
    """A shared switch, named after its long flag; off unless given."""
    info = typer.Option(*flags, help=help, rich_help_panel=panel)
    return _keyword(flags[0][2:].replace("-", "_"), Annotated[bool, info], False)


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


_CONFIG = typer.Option(help="Settings file, instead of ./ds4cli.toml.", metavar="FILE")
_PROFILE = typer.Option(
    help="Use [profiles.NAME] of the file.", metavar="NAME", autocompletion=lambda: profiles()
)
SHARED = (
    _keyword("config", Annotated[Path | None, _CONFIG]),
    _switch("Read no settings file.", "--no-config"),
    _keyword("profile", Annotated[str | None, _PROFILE]),
    _switch("Print all settings and where each came from.", "--show-config"),
    _switch("Print the result only.", "--quiet", "-q", panel=OUTPUT),
    _switch("Print notices too.", "--verbose", "-v", panel=OUTPUT),
    _switch("Show tracebacks, and notices.", "--debug", panel=OUTPUT),
)


def with_settings(
    *without: str, own: Own = lambda settings: {}
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a command with a `Run` and its own options; `without` names settings that it lacks.

    own: what the command takes for sampling settings that nobody set, each with its origin.
    """
    names = [name for name in OPTIONS if name not in without]
    added = [*SHARED, *(_parameter(name, OPTIONS[name]) for name in names)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            shared = {p.name: values.pop(p.name) for p in SHARED}
            given = {name: values.pop(name) for name in names}
            run = _run(given, own, **shared)
            return None if run is None else command(run, **values)

        signature = inspect.signature(command, eval_str=True)
        first = list(signature.parameters.values())[1:]
        wrapper.__signature__ = signature.replace(parameters=first + added)  # type: ignore
        return wrapper

    return decorate


def _run(
    given: dict[str, Any],
    own: Own,
    config: Path | None,
    no_config: bool,
    profile: str | None,
    show_config: bool,
    quiet: bool,
    verbose: bool,
    debug: bool,
) -> Run | None:
    """The run that the shared options describe; None when showing the settings was all."""
    resolved = resolve(given, config, no_config, profile)
    if show_config:
        found = own(resolved.settings)
        filled = resolved.settings.filled({name: value for name, (value, _) in found.items()})
        unset = [name for name in found if getattr(resolved.settings, name) is None]
        origins = {name: found[name][1] for name in unset}
        terminal.write(settings.to_toml(filled, {**resolved.origins, **origins}))
        return None
    address_space.check()
    refuse_both(quiet=quiet, verbose=verbose)
    refuse_both(quiet=quiet, stats=bool(given.get("stats")))
    for remark in () if quiet else settings.unread_variables():
        terminal.note(remark)
    if config is None and not quiet:
        _say_what_is_trusted_here(resolved)
    return Run(_with_system_file(resolved), quiet, verbose or debug)


def _with_system_file(resolved: Resolved) -> Resolved:
    """With the text of `system_file` as the system text; one that is given itself comes first."""
    name = resolved.settings.system_file
    if name is None:
        return resolved
    refuse_both(system_file=True, system=resolved.given("system"))
    try:
        text = Path(name).expanduser().read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"cannot read `{name}`: {reason.lower()}", "name a text file") from None
    return replace(resolved, settings=replace(resolved.settings, system=text.strip("\n")))


def _say_what_is_trusted_here(resolved: Resolved) -> None:
    """The settings file in the current folder was found, not named: it may be somebody else's."""
    for name in TRUSTED:
        if resolved.origins[name].endswith(f" {settings.HERE}"):
            value = getattr(resolved.settings, name)
            terminal.note(f"./{settings.HERE} sets {name} = `{value}`; --no-config ignores it")


def _parameter(name: str, option: Option) -> inspect.Parameter:
    default, choices = default_words(name), ", ".join(option.choices)
    info = typer.Option(
        *flags(name, option),
        help=option.help
        + (f" One of {choices}." if choices else "")
        + (f" [{default}]" if default else ""),
        metavar=option.metavar,
        rich_help_panel=option.panel,
        show_default=False,
        autocompletion=(lambda: list(option.choices)) if option.choices else None,
    )
    kinds: dict[type, Any] = {bool: bool | None, list: list[str] | None, dict: list[str] | None}
    # Numbers arrive as text: `settings` parses them, with one message for flag, file and variable.
    kind = kinds.get(option.kind, str | None)
    return _keyword(name, Annotated[kind, info])


def flags(name: str, option: Option) -> tuple[str, ...]:
    """All spellings of a setting's flag; a switch also has a `--no-` form."""
    long = long_flag(name)
    if option.kind is bool:
        long += f"/--no-{long[2:]}"
    return (long, *option.flags)


def long_flag(name: str) -> str:
    """`max_tokens` -> `--max-tokens`."""
    return "--" + name.replace("_", "-")


def default_words(name: str) -> str:
    """A setting's default in words; empty for empty values and for switches that are off."""
    default = Settings.__dataclass_fields__[name].default
    if OPTIONS[name].auto and default == 0:
        return settings.AUTO
    shown = isinstance(default, (str, int, float)) and default is not False
    return OPTIONS[name].unset or (str(default) if shown else "")


def resolve(
    given: dict[str, Any], config: Path | None, no_config: bool, profile: str | None
) -> Resolved:
    """The settings of one run, from all layers."""
    if config is not None and no_config:
        raise UsageError("`--config` and `--no-config` contradict each other", "give one")
    path = None if no_config else config or settings.find_config()
    values = {name: _flag_value(name, value) for name, value in given.items() if value is not None}
    return settings.resolve(values, settings.read_config(path) if path else None, profile)


def _flag_value(name: str, value: Any) -> Any:
    """A flag's value, checked; errors name the flag."""
    option = OPTIONS[name]
    if option.kind is dict:
        value = ",".join(value)
    if name in TEXTS:
        is_one = isinstance(value, str)
        value = terminal.argument_text(value) if is_one else [*map(terminal.argument_text, value)]
    if isinstance(value, str):
        return settings.parse_text(name, value, long_flag(name))
    return settings.check(name, value, long_flag(name))


def profiles() -> list[str]:
    """The profiles of the settings file that is found here, for the shell's completion."""
    path = settings.find_config()
    try:
        return list(settings.read_config(path).profiles) if path else []
    except UsageError:
        return []


def refuse_both(**switches: bool) -> None:
    """UsageError if more than one of these switches is on."""
    on = [long_flag(name) for name, is_on in switches.items() if is_on]
    if len(on) > 1:
        raise UsageError(f"`{on[0]}` and `{on[1]}` contradict each other", "give one")
