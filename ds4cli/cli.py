"""The command line, and one place that prints errors.

The commands are in `commands.py`, which is loaded when one is named, so that `--help` stays fast.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer import completion
from typer.exceptions import TyperException
from typer.main import get_command

from ds4cli import __version__, signals, terminal
from ds4cli.errors import DS4Error, UsageError
from ds4cli.help import TEXTS, Group
from ds4cli.ranks.number import own_rank

# Every token leaves small containers behind for going back, which Python's collector of cycles
# would walk every dozen tokens; nothing of theirs is in a cycle.
COLLECT_AFTER = 50_000
MEMORY_HINT = "a smaller model, a shorter prompt or less `--rewind-mb`; what is written is whole"
NO_MEMORY = (
    "out of memory", "insufficient memory", "cannot allocate memory", "unable to allocate",
    "bad_alloc", "resource temporarily unavailable",
)  # fmt: skip
# What Typer says of usage, in our words.
_VALUE = r"Invalid value for '(.*?)'.*: Input should be a valid "
SAID = (
    (r"Got unexpected extra argument\(s\) \((.*)\)", r"nothing takes `\1`"),
    (rf"{_VALUE}number\b.*", r"`\1` wants a number"),
    (rf"{_VALUE}integer\b.*", r"`\1` wants a whole number"),
    (r"Option '(.*)' requires an argument\.", r"`\1` wants a value"),
    (r"Option '(.*)' does not take a value\.", r"`\1` takes no value"),
)
WORDS_HINTS = {
    "generate": "a prompt of several words stands in quotes",
    "chat": "a message is typed once it runs; `ds4cli generate` takes one here",
}
# The reader has gone, the disk is full, standard output is closed.
OUTPUT_ERRORS = errno.EPIPE, errno.ENOSPC, errno.EBADF


class App(Group):
    """The Typer group, with every failure printed as one line and a hint."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run and exit: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        _fill_closed_streams()
        terminal.allow_other_encodings()
        completion.completion_init()
        _forget_missing_folders()
        with signals.Program():
            try:
                code = super().main(words, *rest, **extra)
                sys.stdout.flush()
            except Exception as error:
                if "--debug" in words:
                    terminal.show(traceback.format_exc())
                code = explain(error)
        sys.exit(code or 0)

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(TEXTS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name. UsageError if there is none, None while a line is completed."""
        if cmd_name in TEXTS:
            return _commands().get_command(ctx, cmd_name)
        if ctx.resilient_parsing:
            return None
        from ds4cli.settings import nearest

        hint = nearest(cmd_name, TEXTS) or f"see `{ctx.command_path} --help`"
        raise UsageError(f"there is no command `{cmd_name}`", hint)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No arguments ask for help, too."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)


@functools.cache
def _commands() -> Any:
    from ds4cli import commands

    return get_command(commands.app)


def _fill_closed_streams() -> None:
    """A file opened under the number of a closed stream is mistaken for it; mlx cannot read one
    that is number 0. What is written to a closed stdout fails as it does elsewhere."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _forget_missing_folders() -> None:
    """Temporary files go to the system's folder where the user's own is missing; MLX would fail."""
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        if name in os.environ and not os.path.isdir(os.environ[name]):
            terminal.note(f"{name} `{os.environ[name]}` is no folder: it is ignored")
            del os.environ[name]


def explain(error: Exception) -> int:
    """Print what went wrong; return the exit code."""
    if isinstance(error, DS4Error):
        terminal.fail(error.message, error.hint)
        return error.exit_code
    if isinstance(error, TyperException):
        return _explain_usage(error)
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        return _explain_output(error)
    if _is_out_of_memory(error):
        terminal.fail("memory ran out", MEMORY_HINT)
        return 1
    terminal.fail(
        f"unexpected {type(error).__name__}: {error}", "run again with `--debug` for a traceback"
    )
    return 1


def _is_out_of_memory(error: Exception) -> bool:
    """MLX and the system say it in words, each in its own."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, OSError)) and any(words in said for words in NO_MEMORY)
    )


def _explain_usage(error: TyperException) -> int:
    """Typer's own complaints, in the words of ours."""
    ctx = getattr(error, "ctx", None)
    hint = f"see `{ctx.command_path} --help`" if ctx is not None else None
    message = error.format_message()
    if message.startswith("Got unexpected extra") and ctx is not None:
        hint = WORDS_HINTS.get(ctx.info_name, hint)
    for theirs, ours in SAID:
        message = re.sub(theirs, ours, message, flags=re.DOTALL)
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        message = f"unknown option `{option}`"
        from ds4cli.settings import nearest

        hint = nearest(option, error.possibilities or ()) or hint
    terminal.fail(message, hint)
    return error.exit_code


def _explain_output(error: OSError) -> int:
    """Standard output takes no more."""
    _close_stdout()
    if error.errno != errno.EPIPE:
        terminal.fail(f"cannot write the output: {str(error.strerror).lower()}")
    return 1


def _close_stdout() -> None:
    """Send what is still buffered nowhere: Python writes it at exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=App,
    name="ds4cli",
    rich_markup_mode=None,  # help.py says why
    add_completion=False,  # ours takes the shell's name
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every setting can stand in ds4cli.toml, or in the environment as DS4CLI_NAME.",
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        parts = [f"ds4cli {__version__}", *(_version(name) for name in ("mlx", "mlx-lm"))]
        typer.echo(", ".join(parts))
        raise typer.Exit()


SHELLS = "bash, zsh, fish, powershell or pwsh"


def _install_completion(ctx: typer.Context, param: typer.CallbackParam, shell: str | None) -> None:
    _check_shell(shell)
    completion.install_callback(ctx, param, shell)


def _show_completion(ctx: typer.Context, param: typer.CallbackParam, shell: str | None) -> None:
    _check_shell(shell)
    completion.show_callback(ctx, param, shell)


def _check_shell(shell: str | None) -> None:
    if shell is not None and shell not in SHELLS.replace(" or ", ", ").split(", "):
        raise UsageError(f"there is no completion for `{shell}`", f"name {SHELLS}")


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} missing"


# Commands that several ranks may run together.
SHARED = ("generate", "chat")


@app.callback()
def main(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print versions.", is_eager=True, callback=_print_versions),
    ] = False,
    install_completion: Annotated[
        str | None,
        typer.Option(
            help=f"Install completion for a shell: {SHELLS}.",
            is_eager=True,
            metavar="SHELL",
            callback=_install_completion,
        ),
    ] = None,
    show_completion: Annotated[
        str | None,
        typer.Option(
            help="Print what that installs.",
            is_eager=True,
            metavar="SHELL",
            callback=_show_completion,
        ),
    ] = None,
) -> None:
    """Speculative generation with cheap rewind on MLX."""
    gc.set_threshold(COLLECT_AFTER)
    terminal.err()  # while there is memory for it: failures are said there
    if own_rank():
        raise typer.Exit(_follow() if ctx.invoked_subcommand in SHARED else 0)


def _follow() -> int:
    """This is not the first of several ranks: it has no terminal and does what rank 0 does."""
    from ds4cli.batch.others import BEGIN, answer_lines
    from ds4cli.ranks import follower

    return follower.run({BEGIN: answer_lines})
