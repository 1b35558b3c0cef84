"""`ds4cli doctor`: what this machine gives ds4cli, a tiny proof, and what would be faster."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ds4cli import generate, signals, terminal
from ds4cli.backend import blas, precision
from ds4cli.bench import files
from ds4cli.settings import Settings, cache_folder

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine

PROOF_TOKENS = 24
PACKAGES = ("ds4cli", "mlx", "mlx-lm", "transformers", "llguidance", "typer", "rich")


def run(settings: Settings, reset_costs: bool = False, report: Path | None = None) -> int:
    """Say it all, or write the report. Returns the exit code: 1 if the proof fails."""
    if reset_costs:
        return _reset()
    if report is not None:
        return _report(settings, report)
    engine = generate.load_engine(settings, quiet=True, shares=False)
    for title, lines in (
        ("versions", versions()),
        ("machine", machine()),
        ("model", [settings.model, *str(engine.capabilities).splitlines(), *engine.notices]),
        ("prices of calls", prices(engine)),
        ("faster", list(faster()) or ["nothing that this program knows of"]),
    ):
        terminal.write(f"{title}\n" + "".join(f"  {line}\n" for line in lines))
    failed = proof(engine)
    word = failed or "going back and guessing change nothing"
    terminal.write(f"proof\n  {word}\n")
    return 1 if failed else 0


def _report(settings: Settings, path: Path) -> int:
    """Measure what this machine does, into a file that can be sent: none of the user's texts."""
    files.refuse_unwritable(path)  # before anything is measured
    engine = generate.load_engine(settings, quiet=True, shares=False)
    from ds4cli.bench import doctor as measurements

    with signals.interrupts_raised():
        found = measurements.report(engine, lambda part: terminal.note(f"measuring: {part}"))
    files.write_text(path, json.dumps(found, indent=1) + "\n")
    failed = [name for name, part in found.items() if isinstance(part, dict) and "failed" in part]
    terminal.note(f"written to {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def versions() -> list[str]:
    """Of Python and of what matters here."""
    return [f"Python {platform.python_version()}", *(_version(name) for name in PACKAGES)]


def _version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} missing"


def machine() -> list[str]:
    """The backend, and what is said about it with `-v`."""
    import mlx.core as mx

    device = mx.default_device()
    name = mx.device_info(device).get("device_name", "")
    return [f"backend {device} {name}".strip(), *blas.notices(), *precision.notices()]


def prices(engine: Engine) -> list[str]:
    """What calls cost here, as multiples of a plain token; `--reset-costs` forgets all lists."""
    known, path = engine.prices.seconds, engine.prices.path
    if not known:
        return ["not measured yet: the first reply with guesses that may pay does it"]
    plain_s = known[0]
    costs = ", ".join(f"{rows}: {known[rows] / plain_s:.2f}" for rows in sorted(known) if rows)
    return [f"by rows, in plain tokens of {1e3 * plain_s:.2f} ms: {costs}", f"kept in {path}"]


def _lists() -> list[Path]:
    folder = cache_folder()
    return [] if folder is None else sorted((folder / "call-costs").glob("*.json"))


def _reset() -> int:
    lists = _lists()
    for path in lists:
        path.unlink(missing_ok=True)
    terminal.note(f"forgotten: {terminal.counted(len(lists), 'list')} of prices")
    return 0


def faster() -> Iterator[str]:
    """What would make this quicker, and why."""
    import mlx.core as mx

    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and sys.platform == "linux" and blas.name() == "mlx's own":
        yield 'a fast BLAS: `pip install "ds4cli[cpu]"`; products take many times as long without'
    if on_cpu and sys.platform == "linux" and Path("/proc/driver/nvidia/version").exists():
        yield 'the NVIDIA card: `pip install "ds4cli[cuda13]"`; MLX runs on the CPU'
    if find_spec("llguidance") is None:
        yield "llguidance: tool calls are read, but cannot be kept inside their grammar"


def proof(engine: Engine) -> str:
    """A short text, one token a step and then, after going back, with guesses. What differs, or
    nothing."""
    prompt = engine.encode("one two three one two three one")
    end = len(prompt) + PROOF_TOKENS
    session = engine.session()
    session.sync(prompt)
    texts = []
    for step in (lambda: session.step(drafts=[]), session.step):
        while session.pos < end and not step().finish_reason:
            pass
        texts.append(session.tokens[:end])
        session.rewind(len(prompt))
    return "" if texts[0] == texts[1] else "other text after going back, or with guesses"
