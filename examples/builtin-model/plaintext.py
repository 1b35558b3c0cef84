"""Plain text that is on the machine already: Python sources and the English in them.

Sources and licences: the running Python's standard library with its `pydoc` topics (PSF-2.0),
and, where installed, the packages this recipe needs anyway: PyTorch and NumPy (both BSD-3-Clause).
"""

from __future__ import annotations

import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from corpus.words import is_held_out

PACKAGES = ("torch", "numpy")
LARGEST = 200_000  # bytes; above this a file is a table, not a program
SKIP = {"site-packages", "lib2to3", "__pycache__", "idlelib"}


def package_folders() -> list[Path]:
    specs = (importlib.util.find_spec(name) for name in PACKAGES)
    return [Path(spec.origin).parent for spec in specs if spec and spec.origin]


def python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not SKIP & set(path.relative_to(folder).parts) and path.stat().st_size < LARGEST:
            yield path


def standard_library(held_out: bool) -> list[str]:
    """Library modules on one side of the split, decided by file name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [read(path) for path in python_files(folder) if is_held_out(path.name) == held_out]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def training_texts(megabytes: float = 60) -> list[str]:
    """The whole training side, library first, cut off at about `megabytes`."""
    texts = standard_library(held_out=False)
    room = megabytes * 1e6 - sum(map(len, texts))
    for folder in package_folders():
        for path in python_files(folder):
            if room < 0:
                break
            texts.append(read(path))
            room -= len(texts[-1])
    return [text for text in texts if text.strip()]


def excerpts(texts: list[str], rng: random.Random, length: int) -> Iterator[str]:
    """Random pieces of random files, weighted by file size, without end."""
    sizes = [len(text) for text in texts]
    while True:
        text = rng.choices(texts, sizes)[0]
        start = rng.randrange(max(1, len(text) - length))
        start = text.rfind("\n", 0, start) + 1
        yield text[start : start + length]
