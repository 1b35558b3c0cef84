"""The clipboard: the system's own program if there is one, and the terminal's (OSC 52), which also
works over ssh."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys

PROGRAMS = (
    ("pbcopy",),
    ("wl-copy",),
    ("xclip", "-selection", "clipboard"),
    ("xsel", "--clipboard", "--input"),
    ("clip.exe",),
)
TIMEOUT_S = 3.0
MOST_BYTES = 74_000  # what terminals take at once


def copy(text: str) -> list[str]:
    """Where `text` was put, in words; empty where there is no clipboard."""
    data, places = text.encode("utf-8"), []
    if program := next((each for each in PROGRAMS if shutil.which(each[0])), None):
        places += [program[0]] if _piped(program, data) else []
    if sys.stdout.isatty() and len(data) <= MOST_BYTES:
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
        sys.stdout.flush()
        places.append("the terminal")
    return places


def _piped(program: tuple[str, ...], data: bytes) -> bool:
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(program, input=data, timeout=TIMEOUT_S, stdout=quiet, stderr=quiet)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
