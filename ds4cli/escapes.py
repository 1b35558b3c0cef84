"""Text that is not ours, made safe to show: what steers a terminal or hides becomes an escape."""

from __future__ import annotations

import re

# Controls but tab and newline (and the carriage return before one), what sets the direction of
# text, the two Unicode line ends, annotations, tags (an invisible alphabet), and lone surrogates,
# which no stream can write.
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f"
    r"\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]|\r(?!\n)"
)


def visible(text: str) -> str:
    """`text` with all that steers a terminal, or hides, as an escape such as `\\x1b`."""
    return _HIDDEN.sub(lambda found: escaped(found[0]), text)


def escaped(char: str) -> str:
    """The escape of one character, as Python writes it."""
    code = ord(char)
    width, letter = (2, "x") if code < 0x100 else (4, "u") if code < 0x10000 else (8, "U")
    return f"\\{letter}{code:0{width}x}"
