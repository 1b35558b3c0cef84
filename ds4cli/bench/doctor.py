"""What a machine does with a model, as plain data that a user can send; none of the user's texts.

Each function measures one thing and returns numbers and words that JSON holds.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ds4cli.arrays import integer, integers, named_leaves, number
from ds4cli.backend import disk, memory
from ds4cli.bench import machine, tiny
from ds4cli.caches.build import build_caches
from ds4cli.engine.engine import Armed
from ds4cli.sampling import Noise
from ds4cli.tape.check import arrays_caches, long_error, self_check
from ds4cli.tape.recorder import Recorder

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine

FAMILY_ROWS = (5, 64, 256)
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
BLOCKS = (2, 4, 5, 8, 16)
PROMPT_TOKENS, REPLY_TOKENS = 16, 32
PROMPTS = 20
# Beyond the tokens after which calls are timed, for those calls.
SPARE_TOKENS = 128
REPEATS = 3


def system(engine: Engine) -> dict[str, Any]:
    """Machine, versions, model, and the memory that the GPU may use and that is wired."""
    facts = {key: str(value) for key, value in mx.device_info(mx.default_device()).items()}
    wired = memory.WIRING.nbytes if memory.on_metal() else None
    return {**machine.environment(engine), "device_info": facts, "wired_bytes": wired}


def replay(engine: Engine) -> dict[str, Any]:
    """How far replayed recurrences are from this model's, in units of what is allowed."""
    used = Armed.of(engine.model).recorder
    recorder = used or Recorder.arm(engine.model)
    verdict = self_check(engine.model, recorder, lambda: build_caches(engine.model, 0))
    names = list(recorder.families)
    if used is None:
        recorder.disarm()
    decays = [v for name, v in named_leaves(engine.model.parameters()) if name.endswith("A_log")]
    return {
        "families": names,
        "difference": verdict.difference,
        "problem": verdict.problem,
        "refused_at_load": engine.refusal,
        "A_log": sorted({str(v.dtype) for v in decays}),
    }


def families(rows: Sequence[int] = FAMILY_ROWS) -> dict[str, dict[str, dict[str, float | str]]]:
    """By family and type of weights, how far recurrences that are replayed over so many single rows
    are from a tiny model's own, in units of what is allowed; or what was raised."""
    return {name: _by_type(name, rows) for name in _recurrent()}


def _recurrent() -> list[str]:
    """The tiny models with a recurrence."""
    return [name for name in tiny.CFG if ":" not in name and _replayed(name)]


def _replayed(name: str) -> bool:
    try:
        model = tiny.build(name)
    except ImportError:  # this mlx-lm has no such family
        return False
    return bool(arrays_caches(build_caches(model, 0)))


def _by_type(name: str, rows: Sequence[int]) -> dict[str, dict[str, float | str]]:
    makers = {
        "float32": lambda: tiny.build(name),
        "bfloat16": lambda: tiny.build(name, dtype=mx.bfloat16),
        "4 bit": lambda: tiny.quantise(tiny.build(name, dtype=mx.bfloat16)),
    }
    return {kind: _replay_errors(make, rows) for kind, make in makers.items()}


def _replay_errors(make: Callable[[], Any], rows: Sequence[int]) -> dict[str, float | str]:
    try:
        model = make()
        recorder = Recorder.arm(model)
        return {str(n): long_error(model, recorder, build_caches(model, 0), n) for n in rows}
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


# -- one row and many ------------------------------------------------------------------------------


def row_invariance(width: int = 512) -> dict[str, dict[int, float]]:
    """By kind of product and number of rows, how far the first row is from that row alone: 0 where
    both come from the same sums."""
    mx.random.seed(0)
    linear = nn.Linear(width, width, bias=False)
    half = nn.Linear(width, width, bias=False)
    half.set_dtype(mx.bfloat16)
    forms = {
        "float32": _rows_of(linear, mx.float32, width),
        "bfloat16": _rows_of(half, mx.bfloat16, width),
        "4 bit": _rows_of(nn.QuantizedLinear.from_linear(half, 64, 4), mx.bfloat16, width),
        "attention": _attention_rows(width // 8),
    }
    return {name: {k: _apart(form(k), form(1)) for k in ROWS} for name, form in forms.items()}


def _rows_of(linear: nn.Module, dtype: mx.Dtype, width: int) -> Callable[[int], mx.array]:
    x = mx.random.normal((1, max(ROWS), width)).astype(dtype)
    return lambda k: linear(x[:, :k])


def _attention_rows(dim: int, keys: int = 256) -> Callable[[int], mx.array]:
    """The first of k rows after `keys` others, in a block with a causal mask."""
    shape = (1, 8, keys + max(ROWS), dim)
    q, k, v = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(3))

    def first(rows: int) -> mx.array:
        end = keys + rows
        parts = q[:, :, keys:end], k[:, :, :end], v[:, :, :end]
        out = mx.fast.scaled_dot_product_attention(*parts, scale=dim**-0.5, mask="causal")
        return out.swapaxes(1, 2)

    return first


def _apart(block: mx.array, alone: mx.array) -> float:
    """The largest difference of the first rows (1, n, ...), relative to the largest entry."""
    a, b = (x[:, 0].astype(mx.float32) for x in (block, alone))
    return number(mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6))


# -- texts -----------------------------------------------------------------------------------------


def divergence(engine: Engine, prompts: int = PROMPTS, tokens: int = REPLY_TOKENS) -> list[dict]:
    """Greedy replies to made-up prompts, row by row, again, and in blocks: where a text leaves the
    plain one first, and how far apart the two best logits were there."""
    return [_parted(engine, _prompt(engine, i), tokens) for i in range(prompts)]


def _parted(engine: Engine, prompt: list[int], tokens: int) -> dict[str, Any]:
    text, gaps = _plain(engine, prompt, tokens)
    again, _ = _plain(engine, prompt, tokens)
    found: dict[str, Any] = {"again": _first_other(text, again, gaps)}
    for size in BLOCKS:
        picks = _picks_in_blocks(engine, prompt, text, size)
        found[f"block {size}"] = _first_other(text, picks, gaps)
    return found


def _plain(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """A greedy text fed row by row, and the gap of the two best logits at each token."""
    timeline = engine.scratch_timeline()
    text: list[int] = []
    gaps: list[float] = []
    timeline.sync(prompt)
    for _ in range(tokens):
        row = timeline.logits
        assert row is not None, "a text was read"
        best = mx.sort(row.astype(mx.float32))[-2:]
        gaps.append(number(best[1] - best[0]))
        text.append(integer(mx.argmax(row)))
        timeline.sync([*prompt, *text])
    return text, gaps


def _picks_in_blocks(engine: Engine, prompt: list[int], text: list[int], size: int) -> list[int]:
    """What the model picks for each token of `text` when it is fed in blocks of `size`."""
    timeline = engine.scratch_timeline()
    timeline.sync(prompt)
    assert timeline.logits is not None, "a text was read"
    picks = [integer(mx.argmax(timeline.logits))]
    for start in range(0, len(text), size):
        feed = text[start : start + size]
        rows = timeline.feed(feed)
        timeline.evaluate()
        picks += integers(mx.argmax(rows, axis=-1))
        timeline.commit(len(feed))
    return picks[: len(text)]


def _first_other(text: Sequence[int], other: Sequence[int], gaps: Sequence[float]) -> dict | None:
    pairs = enumerate(zip(text, other, strict=True))
    at = next((i for i, (a, b) in pairs if a != b), None)
    return None if at is None else {"token": at, "gap": gaps[at]}


def _prompt(engine: Engine, number: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    key = mx.random.key(number)
    return integers(mx.random.randint(0, engine.token_limit, (tokens,), key=key))


# -- times and sizes -------------------------------------------------------------------------------


def noise_hashes(width: int = 1000) -> dict[str, str]:
    """The noise of a few positions: the same on every machine, or texts there are not."""
    found = {}
    for pos in (0, 1, 31, 32, 1000):
        noise = mx.view(Noise(7, width).rows(0, pos, 1).reshape(-1), mx.uint8)
        data = memoryview(noise)  # type: ignore[arg-type]  # the stubs hide that it is one
        found[str(pos)] = hashlib.sha256(data).hexdigest()[:16]
    return found


def call_seconds(
    engine: Engine, contexts: Sequence[int] = (64, 4096, 32768)
) -> dict[int, dict[int, float]]:
    """Seconds of a call by the tokens before it and its rows; the best of a few."""
    most = (engine.context_tokens or max(contexts) + SPARE_TOKENS) - SPARE_TOKENS
    return {n: dict(_seconds_after(engine, n)) for n in contexts if n <= most}


def _seconds_after(engine: Engine, context: int) -> Iterator[tuple[int, float]]:
    timeline = engine.scratch_timeline()
    timeline.sync(_prompt(engine, 0, context))
    for rows in ROWS:
        feed = _prompt(engine, rows, rows)
        yield rows, min(_one_call(timeline, feed) for _ in range(1 + REPEATS))


def _one_call(timeline: Any, feed: list[int]) -> float:
    begin = time.perf_counter()
    timeline.feed(feed)
    timeline.evaluate()
    timeline.commit(1)
    return time.perf_counter() - begin


def recording_seconds(engine: Engine, tokens: int = REPLY_TOKENS) -> dict[str, float]:
    """Seconds a plain token, recording and not, in turns; the best of a few."""
    taken: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(REPEATS):
        for name, each in taken.items():
            session = engine.session()
            session.recording = name == "on"
            session.sync(_prompt(engine, 0))
            begin = time.perf_counter()
            for _ in range(tokens):
                session.step(1, drafts=[])
            each.append((time.perf_counter() - begin) / tokens)
    return {name: min(each) for name, each in taken.items()}


def memory_bytes(engine: Engine, tokens: int = 4 * REPLY_TOKENS) -> dict[str, int]:
    """What a session with recording holds more than one without, and what it says that it keeps."""
    held, kept = {}, 0
    for name in ("off", "on"):
        session = engine.session()
        session.recording = name == "on"
        mx.clear_cache()
        before = mx.get_active_memory()
        session.sync(_prompt(engine, 0, tokens))
        for _ in range(tokens):
            session.step(1, drafts=[])
        mx.synchronize()
        held[name], kept = mx.get_active_memory() - before, sum(session.kept_bytes().values())
    return {"held": held["on"] - held["off"], "counted": kept}


def sync_seconds(folder: Path | None = None, times: int = 20) -> dict[str, float]:
    """Seconds that a line of 200 bytes takes to be on disk: the median, and the most."""
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(times):
            begin = time.perf_counter()
            os.write(file.fileno(), b"x" * 200)
            disk.sync(file.fileno())
            taken.append(time.perf_counter() - begin)
    return {"median": sorted(taken)[times // 2], "most": max(taken)}


# -- all -------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Engine], Any]] = {
    "system": system,
    "doubts": lambda engine: machine.doubts(),
    "replay": replay,
    "families": lambda engine: families(),
    "row_invariance": lambda engine: row_invariance(),
    "divergence": divergence,
    "noise": lambda engine: noise_hashes(),
    "call_seconds": call_seconds,
    "recording_seconds": recording_seconds,
    "memory_bytes": memory_bytes,
    "sync_seconds": lambda engine: sync_seconds(),
}


def report(engine: Engine, begin: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All of it. A part that fails says how, and the others go on. begin: told what comes next."""
    found = {}
    for name, measure in PARTS.items():
        begin(name)
        found[name] = _part(measure, engine)
    return found


def _part(measure: Callable[[Engine], Any], engine: Engine) -> Any:
    try:
        return measure(engine)
    except Exception as error:  # the report is for finding out what fails there
        return {"failed": f"{type(error).__name__}: {error}"}
