"""One file per recurrence. To add one: write its file, then list it in FAMILIES.

A family is a module or object with

    name            what people read
    owns(module)    whether this module is handed a recurrent cache that the family understands
    arm(module, swaps)   put the module, and helpers inside it, into recording subclasses

and a `Track` subclass that says how its state moves (see `tracks.py`).
"""

from __future__ import annotations

from ds4cli.tape.families import (
    baichuan,
    delta_rule,
    griffin,
    lightning,
    mamba,
    ngram,
    rwkv7,
    short_conv,
    ssd,
)

# Order matters once: a short convolution is what remains when no recurrence function is called.
FAMILIES = (
    delta_rule,
    ssd,
    mamba,
    rwkv7,
    griffin,
    lightning,
    baichuan,
    ngram,
    short_conv,
)
