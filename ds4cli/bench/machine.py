"""What a measurement was made on, and what about it makes the numbers doubtful."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli import __version__
from ds4cli.backend import blas
from ds4cli.bench import macos

if TYPE_CHECKING:
    from ds4cli.engine.engine import Engine

BUSY_LOAD = 0.5  # other programs' load, per core, before anything was measured
LOW_MEMORY = 0.1  # share of the memory that should be free


def environment(engine: Engine) -> dict[str, Any]:
    """Machine, versions, model, settings: what must be equal for two runs to be compared."""
    return {
        "chip": chip(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "ds4cli": __version__,
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "blas": blas.name() if platform.system() == "Linux" else None,
        **_model(engine),
    }


def _model(engine: Engine) -> dict[str, Any]:
    import mlx.core as mx

    from ds4cli.arrays import named_leaves
    from ds4cli.bench.lab import dtypes

    settings = engine.settings
    weights = [v for _, v in named_leaves(engine.model.parameters())]
    return {
        "backend": str(mx.default_device()),
        "model": settings.model,
        "model_type": getattr(engine.model, "model_type", None),
        "model_bytes": sum(v.nbytes for v in weights),
        "weights": sorted(dtypes(engine.model)),
        "quantization_bits": bits(engine.model),
        "cache_kinds": {layer.kind: layer.count for layer in engine.capabilities.layers},
        "recurrences": engine.capabilities.recurrences,
        "replay_refused": engine.refusal,
        "settings": {
            "prefill_step_size": engine.chunk_tokens,
            **{
                name: getattr(settings, name)
                for name in ("horizon_tokens", "rewind_mb", "kv_bits", "dtype")
            },
        },
    }


def bits(model: Any) -> list[int]:
    """Bit widths of the quantised modules; empty where none is."""
    return sorted({m.bits for m in model.modules() if isinstance(getattr(m, "bits", None), int)})


def chip() -> str:
    """The processor's name, as far as the system tells."""
    if is_mac():
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_bytes() -> int | None:
    """Physical memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def doubts() -> list[str]:
    """What about the machine, right now, makes a measurement doubtful."""
    found = [_busy(), _short_of_memory(), _swapping(), _on_battery(), _slowed_down()]
    return [doubt for doubt in found if doubt]


def _busy() -> str | None:
    load = os.getloadavg()[0]
    if load > BUSY_LOAD * (os.cpu_count() or 1):
        return f"other programs are running: load {load:.1f}"
    return None


def _short_of_memory() -> str | None:
    total, free = memory_bytes(), available_bytes()
    if total and free is not None and free < LOW_MEMORY * total:
        return f"memory is short: {free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free"
    return None


def available_bytes() -> int | None:
    """Memory that a program can have now; None where the system does not say."""
    if is_mac():
        return macos.available_bytes(_output("vm_stat"))
    kilobytes = _meminfo().get("MemAvailable")
    return None if kilobytes is None else kilobytes << 10


def swap_bytes() -> int:
    """Swap in use."""
    if is_mac():
        return macos.swap_bytes(_output("sysctl", "-n", "vm.swapusage"))
    info = _meminfo()
    return (info.get("SwapTotal", 0) - info.get("SwapFree", 0)) << 10


def _swapping() -> str | None:
    used = swap_bytes()
    return f"swap is in use: {used / 1e9:.1f} GB" if used > 100 << 20 else None


def _on_battery() -> str | None:
    if is_mac():
        on = "Battery Power" in _output("pmset", "-g", "batt")
    else:
        states = [_lines(p) for p in Path("/sys/class/power_supply").glob("*/status")]
        on = ["Discharging"] in states
    return "on battery: the system may slow the processor down" if on else None


def _slowed_down() -> str | None:
    if not is_mac():
        return None
    if macos.is_low_power(_output("pmset", "-g")):
        return "low power mode is on"
    limit = macos.speed_limit(_output("pmset", "-g", "therm"))
    return f"hot: the processor is held to {limit} % of its speed" if limit < 100 else None


def is_mac() -> bool:
    return platform.system() == "Darwin"


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in kB; empty on other systems."""
    pairs = (line.split() for line in _lines("/proc/meminfo"))
    return {words[0].rstrip(":"): int(words[1]) for words in pairs}


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
