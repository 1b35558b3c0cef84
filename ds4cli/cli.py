"""The command line: options, once; commands, each a few lines; one place that prints errors.

Every setting becomes an option through `with_settings`, which reads `settings.OPTIONS`. A command
imports what it needs when it runs, so that `--help` stays fast. To add a command, write one
function under "commands".
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from ds4cli import __version__, settings, terminal
from ds4cli.errors import DS4Error, UsageError
from ds4cli.settings import OPTIONS, OUTPUT, Option, Resolved, Settings

# Settings that no command reads yet are not options yet.
WITHOUT_OPTION = ("max_repairs",)


class App(TyperGroup):
    """The Typer group, with every failure printed as one line and a hint."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run and exit: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            code = super().main(words, *rest, **extra)
            sys.stdout.flush()
        except Exception as error:
            if "--debug" in words:
                traceback.print_exc()
            code = explain(error)
        sys.exit(code or 0)


def explain(error: Exception) -> int:
    """Print what went wrong; return the exit code."""
    if isinstance(error, DS4Error):
        terminal.fail(error.message, error.hint)
        return error.exit_code
    if isinstance(error, TyperException):
        return _explain_usage(error)
    if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
        return _explain_output(error)
    terminal.fail(
        f"unexpected {type(error).__name__}: {error}", "run again with `--debug` for a traceback"
    )
    return 1


def _explain_usage(error: TyperException) -> int:
    """Typer's own complaints, in the words of ours."""
    ctx = getattr(error, "ctx", None)
    hint = f"see `{ctx.command_path} --help`" if ctx is not None else None
    message = error.format_message()
    if hasattr(error, "possibilities"):
        message = f"unknown option `{error.option_name}`"
        hint = settings.nearest(error.option_name, error.possibilities or ()) or hint
    if message:  # empty when Typer has printed the help already
        terminal.fail(message, hint)
    return error.exit_code


def _explain_output(error: OSError) -> int:
    """The reader has gone, or the disk is full."""
    _close_stdout()
    if error.errno != errno.EPIPE:
        terminal.fail(f"cannot write the output: {error.strerror.lower()}")
    return 1


def _close_stdout() -> None:
    """Send what is still buffered nowhere: Python writes it at exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=App,
    name="ds4cli",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every setting can stand in ds4cli.toml, or in the environment as DS4CLI_NAME.",
)


# --- options ------------------------------------------------------------------------------------

Config = Annotated[
    Path | None, typer.Option(help="Settings file, instead of ./ds4cli.toml.", metavar="FILE")
]
NoConfig = Annotated[bool, typer.Option("--no-config", help="Read no settings file.")]
Profile = Annotated[
    str | None, typer.Option(help="Use \\[profiles.NAME] of the file.", metavar="NAME")
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print all settings and where each came from.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the reply only.", rich_help_panel=OUTPUT)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print notices too.", rich_help_panel=OUTPUT)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks, and notices.", rich_help_panel=OUTPUT)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object with everything.", rich_help_panel=OUTPUT),
]
NoStream = Annotated[
    bool, typer.Option("--no-stream", help="Print the reply when done.", rich_help_panel=OUTPUT)
]


def with_settings(*without: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command that takes `**given` one option per setting; None means not given."""
    names = [name for name in OPTIONS if name not in (*WITHOUT_OPTION, *without)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        extra = [_parameter(name, OPTIONS[name]) for name in names]
        command.__signature__ = signature.replace(parameters=own + extra)  # type: ignore
        return command

    return decorate


def _parameter(name: str, option: Option) -> inspect.Parameter:
    default = default_words(name)
    info = typer.Option(
        *flags(name, option),
        help=option.help + (f" [dim]\\[{default}][/dim]" if default else ""),
        metavar=option.metavar,
        rich_help_panel=option.panel,
        show_default=False,
        autocompletion=(lambda: list(option.choices)) if option.choices else None,
    )
    kinds = {bool: bool | None, list: list[str] | None, dict: list[str] | None}
    # Numbers arrive as text: `settings` parses them, with one message for flag, file and variable.
    annotation = Annotated[kinds.get(option.kind, str | None), info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


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
    if isinstance(value, str):
        return settings.parse_text(name, value, long_flag(name))
    return settings.check(name, value, long_flag(name))


def show_config(resolved: Resolved) -> None:
    """Print the settings as TOML, each with its origin."""
    sys.stdout.write(settings.to_toml(resolved.settings, resolved.origins))


def refuse_both(**switches: bool) -> None:
    """UsageError if more than one of these switches is on."""
    on = [long_flag(name) for name, is_on in switches.items() if is_on]
    if len(on) > 1:
        raise UsageError(f"`{on[0]}` and `{on[1]}` contradict each other", "give one")


def _print_versions(wanted: bool) -> None:
    if wanted:
        parts = [f"ds4cli {__version__}", *(_version(name) for name in ("mlx", "mlx-lm"))]
        typer.echo(", ".join(parts))
        raise typer.Exit()


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} missing"


# --- commands -----------------------------------------------------------------------------------


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print versions.", is_eager=True, callback=_print_versions),
    ] = False,
) -> None:
    """Speculative generation with cheap rewind on MLX."""


@app.command()
@with_settings()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt.", metavar="TEXT")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Read the prompt from a file. Repeatable."),
    ] = None,
    as_json: Json = False,
    no_stream: NoStream = False,
    config: Config = None,
    no_config: NoConfig = False,
    profile: Profile = None,
    show: ShowConfig = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **given: Any,
) -> None:
    """Answer one prompt. Piped text comes first, then files, then the prompt."""
    resolved = resolve(given, config, no_config, profile)
    if show:
        return show_config(resolved)
    refuse_both(quiet=quiet, verbose=verbose)
    from ds4cli import generate as task

    request = task.Request(
        prompt=task.gather_prompt(prompt, prompt_option, file or (), sys.stdin),
        tools=task.read_tools(resolved.settings.tools),
        as_json=as_json,
        stream=not no_stream,
        quiet=quiet,
        verbose=verbose or debug,
    )
    raise typer.Exit(task.run(request, resolved.settings))


@app.command()
@with_settings("raw")
def chat(
    resume: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the latest session.")
    ] = False,
    session: Annotated[
        str | None, typer.Option(help="Keep the chat under this name, or go on with it.")
    ] = None,
    with_cache: Annotated[
        bool,
        typer.Option("--with-cache", help="Keep the model's state too: nothing is read again."),
    ] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep no session file.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Keep no typed lines.")] = False,
    drop_reasoning: Annotated[
        bool,
        typer.Option("--drop-reasoning", help="Take reasoning out of earlier turns."),
    ] = False,
    single: Annotated[
        bool, typer.Option("--single", help="All of standard input is one message.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Show replies as they are, no Markdown.", rich_help_panel=OUTPUT
        ),
    ] = False,
    config: Config = None,
    no_config: NoConfig = False,
    profile: Profile = None,
    show: ShowConfig = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **given: Any,
) -> None:
    """Talk in the terminal, and go back: /undo, /edit, /retry, /branch."""
    resolved = resolve(given, config, no_config, profile)
    if show:
        return show_config(resolved)
    refuse_both(quiet=quiet, verbose=verbose)
    from ds4cli import chat as task
    from ds4cli import generate

    request = task.Request(
        resume=resume,
        name=session,
        with_cache=with_cache,
        save=not no_save,
        history=not no_history,
        single=single,
        markdown=not raw,
        drop_reasoning=drop_reasoning,
        quiet=quiet,
    )
    tools = generate.read_tools(resolved.settings.tools)
    chosen = task.settings_for(request, resolved.settings, resolved.origins["model"] != "default")
    engine = generate.load_engine(chosen, quiet=quiet, verbose=verbose or debug)
    raise typer.Exit(task.run(engine, request, chosen, tools))
