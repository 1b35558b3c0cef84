"""The commands: one function each. `cli.py` loads this when one is named.

A command imports what it needs when it runs, so that bad input is refused soon. Settings and shared
switches come from `options.py`; to add a command, write a function here, and its help in `help.py`.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ds4cli import settings, terminal
from ds4cli.errors import UsageError
from ds4cli.help import TEXTS, Command
from ds4cli.options import Run, long_flag, refuse_both, with_settings
from ds4cli.settings import OPTIONS, OUTPUT, Settings

app = typer.Typer(rich_markup_mode=None, add_completion=False)

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object with everything.", rich_help_panel=OUTPUT),
]
NoStream = Annotated[
    bool, typer.Option("--no-stream", help="Print the reply when done.", rich_help_panel=OUTPUT)
]

Extract = Annotated[
    bool,
    typer.Option("--extract", help="Print the first code block only.", rich_help_panel=OUTPUT),
]

PromptTexts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="The prompt.", metavar="TEXT")
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", help="Read the prompt from a file. Repeatable."),
]
IntoSession = Annotated[
    str | None,
    typer.Option(
        help="Go on with, and into, a chat's session.",
        metavar="NAME",
        autocompletion=lambda: session_names(),
    ),
]
IntoLatest = Annotated[
    bool, typer.Option("--continue", "-c", help="The same with the latest session.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="With --json: log-probabilities of each token and of the N likeliest there.",
        metavar="N",
        rich_help_panel=OUTPUT,
    ),
]
Prefill = Annotated[
    str | None,
    typer.Option(help="The reply begins with this, which is printed too.", metavar="TEXT"),
]
PromptCache = Annotated[
    Path | None, typer.Option(help="Keep what is read of the prompt in FILE for the next run.")
]

BATCHES = "Batches"


def _batch(help: str, *flags: str, metavar: str | None = None) -> Any:
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=BATCHES)


BatchFile = Annotated[
    str | None,
    _batch("Answer each line of a JSONL file; - reads standard input.", "--batch", metavar="FILE"),
]
OutputFile = Annotated[
    str | None,
    _batch("Write the answers there, not to stdout.", "--output", "-o", metavar="FILE"),
]
PlainLines = Annotated[bool, _batch("Every line is a prompt, not JSON.", "--lines")]
Grouped = Annotated[bool, _batch("Answer prompts that begin alike one after the other.", "--group")]
Resume = Annotated[
    bool, _batch("Go on with --output: keep what is good, make the rest.", "--resume")
]
Force = Annotated[
    bool, _batch("Write over --output; with --resume, go on in spite of changes.", "--force")
]
FailFast = Annotated[bool, _batch("Stop at the first line that fails.", "--fail-fast")]
DataParallel = Annotated[
    bool, _batch("Every rank holds the whole model, and answers lines.", "--data-parallel")
]


@app.command("generate", cls=Command, help=TEXTS["generate"])
@with_settings()
def generate(
    run: Run,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompt_option: PromptTexts = None,
    file: PromptFiles = None,
    session: IntoSession = None,
    go_on: IntoLatest = False,
    prompt_cache: PromptCache = None,
    prefill_response: Prefill = None,
    as_json: Json = False,
    logprobs: Logprobs = None,
    no_stream: NoStream = False,
    extract: Extract = False,
    batch: BatchFile = None,
    output: OutputFile = None,
    lines: PlainLines = False,
    group: Grouped = False,
    resume: Resume = False,
    force: Force = False,
    fail_fast: FailFast = False,
    data_parallel: DataParallel = False,
) -> None:
    switches: dict[str, Any] = dict(output=output, lines=lines, group=group, resume=resume,
                                    force=force, fail_fast=fail_fast,
                                    data_parallel=data_parallel)  # fmt: skip
    if batch is not None:
        others = dict(prompt=prompt or prompt_option, file=file, json=as_json, extract=extract,
                      no_stream=no_stream, session=session, prompt_cache=prompt_cache,
                      prefill_response=prefill_response, logprobs=logprobs is not None)  # fmt: skip
        for name, value in {**others, "continue": go_on}.items():
            refuse_both(batch=True, **{name: bool(value)})
        raise typer.Exit(_run_batch(run, batch, **switches))
    for name in (name for name, value in switches.items() if value):
        raise UsageError(f"`{long_flag(name)}` needs `--batch`", "name the file with the prompts")
    from ds4cli import generate as task

    prompts = [*([] if prompt is None else [prompt]), *(prompt_option or ())]
    refuse_both(tools=run.settings.tools is not None, prefill_response=bool(prefill_response))
    request = task.GenerateRequest(
        prompt=task.gather_prompt(prompts, file or (), sys.stdin),
        tools=task.read_tools(run.settings.tools),
        wanted=task.read_form(run.settings),
        as_json=as_json,
        stream=not no_stream,
        quiet=run.quiet,
        verbose=run.verbose,
        extract=extract,
        prompt_cache=prompt_cache,
        question="".join(prompts).removeprefix("-"),
        prefill=prefill_response or "",
        top_logprobs=logprobs,
    )
    if session is not None or go_on:
        raise typer.Exit(_generate_in_session(run, request, session, go_on))
    raise typer.Exit(task.run(request, run.settings))


def _generate_in_session(run: Run, request: Any, name: str | None, go_on: bool) -> int:
    """One message into a kept chat. Returns the exit code."""
    refuse_both(session=True, prompt_cache=request.prompt_cache is not None)
    refuse_both(session=True, prefill_response=bool(request.prefill))
    refuse_both(session=True, logprobs=request.top_logprobs is not None)
    from ds4cli import generate
    from ds4cli.chat import request as asked

    chat = asked.ChatRequest(resume=go_on, name=name, quiet=run.quiet)
    chosen = asked.settings_for(chat, run.settings, run.resolved.origins["model"] != "default")
    engine = generate.load_engine(chosen, quiet=run.quiet, verbose=run.verbose)
    from ds4cli.chat import once

    shows_reasoning = request.is_live and not run.quiet and not chosen.hide_reasoning
    writer = once.Writer(request.is_live, shows_reasoning)
    reply = once.OneReply(engine, chat, chosen, request.tools, writer)
    turn = reply.say(request.prompt)
    if turn is None:
        return terminal.EXIT_INTERRUPTED
    completion = generate.Completion(
        turn.content,
        writer.thought,
        turn.finish_reason,
        tuple(once.StoredCall(call) for call in turn.calls),
        reply.conversation.remark,
    )
    generate.print_end(
        request, engine, reply.conversation.session, completion, terminal.ReplyWriter(False)
    )
    return terminal.EXIT_INTERRUPTED if turn.finish_reason == "cancelled" else 0


def _run_batch(run: Run, source: str, output: str | None, lines: bool, **switches: bool) -> int:
    from ds4cli import batch as task

    request = task.BatchRequest(
        source, output or "-", lines, quiet=run.quiet, verbose=run.verbose, **switches
    )
    return task.run(request, run.settings)


def scenario_names() -> list[str]:
    """What rewind-bench measures, for the shell's completion."""
    from ds4cli.bench.scenarios import SCENARIOS

    return list(SCENARIOS)


def session_names() -> list[str]:
    """Kept chats, for the shell's completion."""
    from ds4cli.chat import shelf

    return shelf.names()


def _chat_sampling(chosen: Settings) -> dict[str, tuple[Any, str]]:
    """What chat takes for sampling settings that nobody set, as far as this machine knows."""
    from ds4cli.models.source import local_sampling

    found = local_sampling(chosen.model)
    origin = "generation_config.json of the model"
    return {"temp": (settings.CHAT_TEMP, "default for chat")} | {
        name: (value, origin) for name, value in found.items()
    }


@app.command("chat", cls=Command, help=TEXTS["chat"])
@with_settings("raw", own=_chat_sampling)
def chat(
    run: Run,
    resume: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the latest session.")
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            help="Keep the chat under this name, or go on with it.", autocompletion=session_names
        ),
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
    yes_tools: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Tools of the file that may run unasked."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Show replies without colours.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    from ds4cli import generate
    from ds4cli.chat import request as asked

    refuse_both(no_save=no_save, with_cache=with_cache)
    asked.check_input()
    tools = generate.read_tools(run.settings.tools)
    request = asked.ChatRequest(
        resume=resume,
        name=session,
        with_cache=with_cache,
        save=not no_save,
        history=not no_history,
        single=single,
        colours=not raw,
        drop_reasoning=drop_reasoning,
        yes_tools=asked.unasked(yes_tools or (), tools),
        quiet=run.quiet,
    )
    chosen = asked.settings_for(request, run.settings, run.resolved.origins["model"] != "default")
    # What is typed while the model loads is the first message.
    with terminal.UnseenKeys() if sys.stdin.isatty() else contextlib.nullcontext():
        engine = generate.load_engine(chosen, tools=tools, quiet=run.quiet, verbose=run.verbose)
    from ds4cli.chat import loop

    chosen = chosen.filled({"temp": settings.CHAT_TEMP, **engine.sampling})
    raise typer.Exit(loop.run(engine, request, chosen, tools))


# What `rewind-bench` reads of the settings: it decodes greedily and brings its own drafts.
MEASURED = (
    "model", "dtype", "offline", "rewind_mb", "horizon_tokens", "prefill_step_size", "kv_bits",
    "kv_group_size",
)  # fmt: skip


Scenarios = Annotated[
    list[str] | None,
    typer.Argument(
        help="What to measure; everything if nothing is named.",
        autocompletion=lambda: scenario_names(),
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Prove that going back changes nothing, and exit.")
]
Case = Annotated[str | None, typer.Option(help="Check this case only.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: within a minute.")]
Matrix = Annotated[Path | None, typer.Option(help="TOML file with sizes and counts.")]
Contexts = Annotated[str | None, typer.Option(help="Prompt tokens, as 512,4095.")]
Depths = Annotated[str | None, typer.Option(help="Tokens to go back by, as 8,64.")]
NumTrials = Annotated[int | None, typer.Option("--num-trials", "-r", help="Samples.")]
Scale = Annotated[float | None, typer.Option(help="Factor on the agent's session.")]
Trace = Annotated[Path | None, typer.Option(help="Another agent's session.")]
Format = Annotated[str, typer.Option("--format", "-o", help="md, csv, json or jsonl.")]
Output = Annotated[Path | None, typer.Option(help="Write the table to a file.")]
Compare = Annotated[Path | None, typer.Option(help="Compare with a JSON report.")]
Tolerance = Annotated[float, typer.Option(help="Share that --compare forgives.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it, as .svg or .png.")]


@app.command("rewind-bench", cls=Command, help=TEXTS["rewind-bench"])
@with_settings(*(name for name in OPTIONS if name not in MEASURED))
def rewind_bench(
    run: Run,
    scenarios: Scenarios = None,
    check: Check = False,
    case: Case = None,
    quick: Quick = False,
    matrix: Matrix = None,
    context: Contexts = None,
    depth: Depths = None,
    num_trials: NumTrials = None,
    scale: Scale = None,
    trace: Trace = None,
    form: Format = "md",
    output: Output = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
    plot: Plot = None,
) -> None:
    from ds4cli import bench, generate

    sizes = {"contexts": context, "distances": depth, "num_trials": num_trials, "scale": scale}
    request = bench.BenchRequest(
        scenarios=scenarios or (), matrix=bench.sizes(matrix, quick, sizes),
        check=check or case is not None, case=case, own_contexts=context is not None, trace=trace,
        form=form, output=output, compare=compare, tolerance=tolerance, plot=plot, quiet=run.quiet,
    )  # fmt: skip
    chosen = bench.settings_for(run.settings)
    engine = generate.load_engine(chosen, quiet=run.quiet, verbose=run.verbose, shares=False)
    raise typer.Exit(bench.run(engine, request))


@app.command("models", cls=Command, help=TEXTS["models"])
def models(
    remove: Annotated[
        str | None, typer.Option(help="Delete this one from the cache.", metavar="NAME")
    ] = None,
) -> None:
    from ds4cli import inventory

    raise typer.Exit(inventory.run(remove))


@app.command("doctor", cls=Command, help=TEXTS["doctor"])
@with_settings(*(name for name in OPTIONS if name not in ("model", "offline", "dtype")))
def doctor(
    run: Run,
    reset_costs: Annotated[
        bool, typer.Option("--reset-costs", help="Forget what calls cost here, and exit.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Measure all in minutes, as JSON to send to us.", metavar="FILE"),
    ] = None,
) -> None:
    from ds4cli import doctor as task

    refuse_both(reset_costs=reset_costs, report=report is not None)
    raise typer.Exit(task.run(run.settings, reset_costs, report))
