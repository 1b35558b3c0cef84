"""`ds4cli generate`: one prompt, one reply.

What the user gave is checked before anything is loaded; MLX is imported only after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ds4cli import prompt_cache, signals, terminal
from ds4cli.backend import blas, precision
from ds4cli.errors import ModelError, UsageError
from ds4cli.ranks.number import own_rank
from ds4cli.settings import Settings
from ds4cli.text import reasoning
from ds4cli.text.reasoning import ReasoningSplitter
from ds4cli.tokens import common_prefix

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine
    from ds4cli.engine.generation import Event
    from ds4cli.engine.session import Session, Stats
    from ds4cli.ranks.group import Leading
    from ds4cli.structured.guards import AnyGuard
    from ds4cli.structured.wanted import Wanted
    from ds4cli.text.tokenizer import Vocabulary
    from ds4cli.tools import Tool

MOST_TOP = 20  # log-probabilities in place of one token, as OpenAI has them
BUILTIN_NOTE = "built-in demo model; -m takes a folder or a hub id"
# A block that is not closed ends with the reply.
_CODE_BLOCK = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n(?P<code>.*?)(^ {0,3}(?P=fence)|\Z)", re.M | re.S
)
NO_BACKEND_HINT = 'on Linux install one: `pip install "ds4cli[cpu]"`, or `ds4cli[cuda13]`'


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate from, and what to print.

    extract: the first code block only. prompt_cache: keeps what was read of the prompt; question:
    the end of the prompt, in place of which another may stand the next time. prefill: what the
    reply begins with. top_logprobs: how many likely tokens to tell in place of each; None: no
    log-probabilities.
    """

    prompt: str
    tools: Sequence[Tool] = ()
    wanted: Wanted | None = None
    as_json: bool = False
    stream: bool = True
    quiet: bool = False
    verbose: bool = False
    extract: bool = False
    prompt_cache: Path | None = None
    question: str = ""
    prefill: str = ""
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        top = self.top_logprobs
        if top is not None and not self.as_json:
            raise UsageError("`--logprobs` needs `--json`", "a text has no place for them")
        if top is not None and not 0 <= top <= MOST_TOP:
            raise UsageError(f"`--logprobs` cannot be `{top}`", f"it wants 0 to {MOST_TOP}")

    @property
    def is_live(self) -> bool:
        """Whether the reply is shown while it is made."""
        return self.stream and not self.as_json and not self.extract


class WrittenCall(Protocol):
    """A tool call of a reply."""

    def openai(self) -> dict[str, Any]:
        """It in OpenAI's form."""


@dataclass
class Completion:
    """A reply as it stands: answer, reasoning, tool calls, why it ended (None while it goes on).

    note: what is wrong with a call that stayed unusable, or with a text of a wanted form. parsed:
    the value of a text that was to be JSON, where a batch asks for it. logprobs: of each token, its
    reasoning's too, as OpenAI has them; None where nobody asked.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: tuple[WrittenCall, ...] = ()
    note: str = ""
    parsed: Any = None
    logprobs: list[dict[str, Any]] | None = None


def run(request: GenerateRequest, settings: Settings) -> int:
    """Load, read the prompt, write the reply. Returns the exit code."""
    if not request.quiet:
        say_form(request.wanted)
    if request.prompt_cache is not None:
        prompt_cache.check(request.prompt_cache)
    tokens: list[int] = []

    def read_prompt(vocabulary: Vocabulary) -> None:
        tokens.extend(prompt_tokens(vocabulary, settings, request))
        vocabulary.check_context(len(tokens))

    engine = load_engine(
        settings, read_prompt, tools=request.tools, quiet=request.quiet, verbose=request.verbose
    )
    thinks = opens_thinking(engine, tokens)
    guard = make_guard(engine, request, thinks)
    said = len(engine.notices)
    shows_reasoning = request.is_live and not request.quiet and not settings.hide_reasoning
    writer = terminal.ReplyWriter(shows_reasoning)
    with signals.Interrupts() as interrupted:
        with terminal.PrefillBar(not request.quiet) as bar:
            session = _read(engine, request, tokens, interrupted, bar)
        split, live = splitter(engine, thinks), writer if request.is_live else None
        session.score(request.top_logprobs)
        prefill = len(engine.encode_part(request.prefill)) if request.prefill else 0
        limits = {"since": len(tokens) - prefill} if prefill else {}
        completion = complete(
            session, split, interrupted, live, guard, begun=request.prefill, **limits
        )
    if request.top_logprobs is not None:
        completion.logprobs = engine.spelling.openai(session.scores(len(tokens)))
    if request.verbose:
        terminal.notes([*engine.notices[said:], *filter(None, [session.why_no_drafts])])
    print_end(request, engine, session, completion, writer)
    return terminal.EXIT_INTERRUPTED if completion.finish_reason == "cancelled" else 0


def _read(
    engine: Engine,
    request: GenerateRequest,
    tokens: list[int],
    cancel: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> Session:
    """A session that has read the prompt, and kept it where the user wants that."""
    path = request.prompt_cache
    if path is None:
        session = engine.session()
        session.sync(tokens, cancel=cancel, progress=progress)
        return session
    other = request.prompt.removesuffix(request.question) + ("?" if request.question else "")
    branch = common_prefix(
        tokens, prompt_tokens(engine, engine.settings, replace(request, prompt=f"{other}."))
    )
    session = prompt_cache.session(engine, path, request.quiet)
    report = session.sync(tokens, cancel=cancel, progress=progress, checkpoints=[branch])
    if report.prefilled and session.pos == len(tokens):
        prompt_cache.keep(session, path)
    return session


# --- what the user gave -------------------------------------------------------------------------


def gather_prompt(prompts: Sequence[str], files: Sequence[Path], stdin: TextIO | None) -> str:
    """The prompt: piped text, then files, then the prompt itself, with blank lines between.

    `-` as prompt or as file means stdin. UsageError if there is no text at all.
    """
    if len(prompts) > 1:
        raise UsageError("the prompt was given twice", "give one, as an argument or with `-p`")
    prompt = prompts[0] if prompts else None
    names = [str(file) for file in files]
    nothing_given = prompt is None and not names
    if nothing_given and (stdin is None or not _is_for_us(stdin)):
        hint = "give one as an argument, with `-p`, `-f FILE` or a pipe; or try `ds4cli chat`"
        raise UsageError("no prompt", hint)
    pieces = []
    if "-" in (prompt, *names) or (stdin is not None and _is_for_us(stdin)):
        pieces.append(_read_stdin(stdin))
    pieces += [_read_file(name) for name in names if name != "-"]
    pieces += [_utf8(prompt, "the prompt")] if prompt not in (None, "-") else []
    return _join(pieces)


def _is_for_us(stdin: TextIO) -> bool:
    """Whether somebody piped text. Launchers of ranks hold a pipe open and never write to it."""
    if stdin.isatty() or own_rank() is None:
        return not stdin.isatty()
    is_open = stat.S_ISFIFO(os.fstat(stdin.fileno()).st_mode)
    ready = select.poll()
    ready.register(stdin, select.POLLHUP)
    return not is_open or bool(ready.poll(0))


def _join(pieces: Sequence[str]) -> str:
    """Blank lines between the pieces; a single piece stays as it is."""
    given = [piece for piece in pieces if piece.strip()]
    if not given:
        raise UsageError("the prompt is empty", "give some text")
    return "\n\n".join([piece.rstrip("\n") for piece in given[:-1]] + given[-1:])


def _read_stdin(stdin: TextIO | None) -> str:
    if stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    if not stdin.isatty() and not _is_for_us(stdin):
        terminal.note("standard input is read to its end, which MLX's launcher does not pass on")
    try:
        data = stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"cannot read standard input: {_reason(error)}") from None
    return _decode(data, "standard input")


def _read_file(name: str) -> str:
    try:
        data = Path(os.path.expanduser(name)).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read `{name}`: {_reason(error)}", "name a text file") from None
    return _decode(data, f"`{name}`")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _decode(data: bytes, what: str) -> str:
    """UTF-8 text, with or without a byte order mark; any line ends."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        hint = f"byte {error.start} is not UTF-8"
        raise UsageError(f"{what} is not UTF-8 text", hint) from None


def _utf8(text: str, what: str) -> str:
    """An argument that was not valid UTF-8 reaches Python as lone surrogates."""
    text = terminal.argument_text(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8 text") from None
    return text


def read_tools(path: str | None) -> list[Tool]:
    """The declared tools of a JSON file; none without a file."""
    if path is None:
        return []
    from ds4cli.tools import load_tools

    return load_tools(path)


def check_tools(
    vocabulary: Vocabulary, tools: Sequence[Tool], verbose: bool = False, quiet: bool = False
) -> None:
    """UsageError where the model's calls of `tools` could not be read; what of them cannot is said,
    unless `quiet`."""
    if not tools:
        return
    from ds4cli.tools.detect import drawn_wrongly, require_format

    fmt = require_format(vocabulary.tokenizer)
    if verbose:
        terminal.note(f"tool calls are read as `{fmt.name}`")
    for what in drawn_wrongly(vocabulary.tokenizer) if not quiet else ():
        terminal.note(f"the chat template shows past calls wrongly to the model: {what}")


# --- the model ----------------------------------------------------------------------------------


def load_engine(
    settings: Settings,
    before_weights: Callable[[Vocabulary], None] = lambda vocabulary: None,
    *,
    tools: Sequence[Tool] = (),
    quiet: bool = False,
    verbose: bool = False,
    shares: bool = True,
) -> Engine:
    """Load the engine, with a spinner unless `quiet` and notices if `verbose`. What takes from the
    model what this program is for is said without `verbose` too. shares: other ranks, if there are
    any, hold a part of the model each.

    UsageError before the weights where calls of `tools` could not be read from this model.
    """
    begin = time.perf_counter()
    group = _other_ranks(settings) if shares else None
    together: dict[str, Any] = {} if group is None else {"group": group}

    def check(vocabulary: Vocabulary) -> None:
        check_tools(vocabulary, tools, verbose, quiet)
        vocabulary.template(settings, [tool.spec for tool in tools])
        for name in vocabulary.unread_args(settings, bool(tools)) if not quiet else ():
            terminal.note(f"the chat template does not read `{name}`; it is ignored")
        before_weights(vocabulary)
        if group is not None:
            group.begin(_fields(settings))

    with terminal.status(f"loading {settings.model}") if not quiet else contextlib.nullcontext():
        engine = _engine_class().load(before_weights=check, **together, **_fields(settings))
    if settings.model == "builtin" and not quiet:
        terminal.note(BUILTIN_NOTE)
    for line in engine.warnings if not quiet else ():
        terminal.note(line)
    if verbose:
        loaded = f"loaded {settings.model} in {time.perf_counter() - begin:.1f} s"
        notices = [loaded, *blas.notices(), *precision.notices(), *engine.notices]
        terminal.notes([*notices, *str(engine.capabilities).splitlines()])
    return engine


def _other_ranks(settings: Settings) -> Leading | None:
    """The ranks that share the model with this process, which leads them; None for none."""
    if own_rank() is None and settings.hostfile is None and settings.local_ranks == 1:
        return None
    from ds4cli.ranks.meeting import meet

    return meet(settings)


def _engine_class() -> type[Engine]:
    try:
        return _import_engine()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mlx":
            raise
        raise UsageError("MLX has no backend on this machine", NO_BACKEND_HINT) from error


def _import_engine() -> type[Engine]:
    from ds4cli.engine.engine import Engine

    return Engine


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def prompt_tokens(
    vocabulary: Vocabulary, settings: Settings, request: GenerateRequest
) -> list[int]:
    """The token ids to read: through the chat template, or as they are with `raw`."""
    vocabulary.check_length(request.prompt)
    if settings.raw:
        tokens = vocabulary.encode(request.prompt)
    else:
        template = vocabulary.template(settings, [tool.spec for tool in request.tools])
        message = {"role": "user", "content": request.prompt.rstrip("\n")}
        tokens = list(template.opening(settings.system, [message]))
    if not tokens:
        raise ModelError("the prompt became no tokens at all")
    return [*tokens, *vocabulary.encode_part(request.prefill)] if request.prefill else tokens


def opens_thinking(engine: Engine, tokens: Sequence[int]) -> bool:
    """Whether the prompt ends inside a think section that its template opened."""
    markers = None if engine.settings.raw else engine.markers
    return reasoning.opens_thinking(engine.decode, tokens, markers)


def splitter(engine: Engine, inside: bool) -> ReasoningSplitter:
    """A splitter for a reply; `inside`: its prompt opened a think section."""
    return ReasoningSplitter(None if engine.settings.raw else engine.markers, inside)


def read_form(settings: Settings) -> Wanted | None:
    """The form that a reply is to have, checked; None for plain text."""
    from ds4cli.structured import asked

    return asked.from_settings(settings)


def say_form(wanted: Wanted | None) -> None:
    """What of a schema is not enforced while a reply is written."""
    for notice in wanted.notices if wanted is not None else ():
        terminal.note(notice)


def make_guard(engine: Engine, request: GenerateRequest, thinks: bool) -> AnyGuard | None:
    """What watches the reply for calls of the declared tools and for its form; None for neither."""
    if not request.tools and request.wanted is None:
        return None
    from ds4cli.structured import guards

    guard = guards.make_guard(
        engine,
        request.tools,
        request.wanted,
        thinks=thinks,
        max_repairs=engine.settings.max_repairs,
    )
    if guard is not None and request.verbose:
        terminal.notes(guard.notices)
    return guard


def complete(
    session: Session,
    split: ReasoningSplitter,
    cancel: Callable[[], bool],
    writer: terminal.ReplyWriter | None,
    guard: AnyGuard | None = None,
    begun: str = "",
    **limits: Any,
) -> Completion:
    """Generate to the end; `writer` sees every piece when it is made.

    begun: what the prompt already holds of the reply. limits: `max_tokens`, `stop` and `raw`, where
    they are not the session's own.
    """
    completion = Completion()
    for piece in split.push(begun):
        _add(completion, piece.text, piece.is_reasoning, writer)
    if cancel():
        completion.finish_reason = "cancelled"
        return completion
    for event in session.stream(cancel=cancel, guard=guard, **limits):
        take(completion, event, split, writer)
    return completion


def take(
    completion: Completion,
    event: Event,
    split: ReasoningSplitter,
    writer: terminal.ReplyWriter | None = None,
) -> None:
    """The reply goes on with `event`; `writer` sees every piece."""
    pieces = split.push(event.text)
    if event.finish_reason is not None:
        pieces += split.flush()
        completion.finish_reason = event.finish_reason
        completion.calls, completion.note = event.calls, event.note
    for piece in pieces:
        _add(completion, piece.text, piece.is_reasoning, writer)


def _add(
    completion: Completion, text: str, is_reasoning: bool, writer: terminal.ReplyWriter | None
) -> None:
    if is_reasoning:
        completion.reasoning += text
    else:
        completion.text += text
    if writer is not None:
        (writer.reasoning if is_reasoning else writer.answer)(text)


# --- what is printed at the end -----------------------------------------------------------------


def print_end(
    request: GenerateRequest,
    engine: Engine,
    session: Session,
    completion: Completion,
    writer: terminal.ReplyWriter,
) -> None:
    if request.as_json:
        writer.answer(_json(report(engine, session, completion)))
        writer.end()
    else:
        _print_text(request, completion, writer)
    if request.quiet:
        return
    if completion.note:
        terminal.note(completion.note)
    elif completion.finish_reason == "length" and not request.as_json:
        terminal.note(_why_cut(engine.settings.max_tokens, session.stats.generated_tokens))
    if engine.settings.stats:
        terminal.note(terminal.stats_line(session.stats, peak_bytes(), terminal.width()))


def _why_cut(most: int, written: int) -> str:
    return f"cut at `--max-tokens {most}`" if 0 < most <= written else "cut: the context is full"


def _print_text(
    request: GenerateRequest, completion: Completion, writer: terminal.ReplyWriter
) -> None:
    """What streaming has not printed: the text, if it was held back, and one line per call."""
    if request.extract:
        writer.answer(_first_code_block(completion.text))
    elif not request.stream:
        writer.answer(completion.text)
    if completion.text or not completion.calls:
        writer.end()
    for call in completion.calls:
        writer.answer(_json(call.openai()) + "\n")


def _json(value: Any) -> str:
    """As JSON, which can say everything in ASCII where standard output holds no more."""
    return json.dumps(value, ensure_ascii=not terminal.is_unicode(sys.stdout))


def _first_code_block(text: str) -> str:
    """What stands between the first fences, without its last newline; all of it, and a word, where
    there are none."""
    found = _CODE_BLOCK.search(text)
    if found is None:
        terminal.note("there is no code block in the reply: all of it is printed")
        return text
    return found["code"].removesuffix("\n")


def peak_bytes() -> int:
    """The most memory MLX has held."""
    import mlx.core as mx

    return mx.get_peak_memory()


def report(engine: Engine, session: Session, completion: Completion) -> dict[str, Any]:
    """One reply as a JSON object: OpenAI's names for usage, llama-server's for timings."""
    stats, settings, kept = session.stats, engine.settings, session.kept_bytes()
    return {
        "model": settings.model,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "tool_calls": [call.openai() for call in completion.calls],
        "repairs": [asdict(repair) for repair in stats.repairs],
        "note": completion.note,
        "finish_reason": completion.finish_reason,
        "logprobs": None if completion.logprobs is None else {"content": completion.logprobs},
        "usage": _usage(stats),
        "timings": _timings(stats),
        "speculative": {
            "drafter": stats.drafter,
            "num_draft_tokens": settings.num_draft_tokens,
            "proposed": stats.proposed,
            "accepted": stats.accepted,
            "parked": stats.parked,
            "why_none": session.why_no_drafts,
            "accept_counts": stats.accept_counts,
            "by_drafter": stats.by_drafter,
        },
        "rewind": {
            "count": stats.rewinds,
            "discarded_tokens": stats.discarded_tokens,
            "replayed_tokens": stats.replayed_tokens,
            "tape_bytes": kept["horizon"] + kept["checkpoints"],
            "replay_refused": engine.refusal,
        },
        "seed": settings.seed,
        "settings": asdict(settings),
    }


def _usage(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def _timings(stats: Stats) -> dict[str, Any]:
    read = stats.prompt_tokens - stats.cached_tokens
    return {
        "prompt_n": read,
        "prompt_ms": round(1e3 * stats.prompt_s, 3),
        "prompt_per_second": _per_second(read, stats.prompt_s),
        "predicted_n": stats.generated_tokens,
        "predicted_ms": round(1e3 * stats.decode_s, 3),
        "predicted_per_second": _per_second(stats.generated_tokens, stats.decode_s),
        "draft_n": stats.proposed,
        "draft_n_accepted": stats.accepted,
    }


def _per_second(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if seconds > 0 else None
