"""What a text that was cut still needs, in words. Pure."""

from __future__ import annotations

import json

from ds4cli.structured.wanted import Wanted

_CLOSES = {"{": "}", "[": "]"}


def missing(wanted: Wanted, text: str) -> str:
    """For a note to the user: the keys and brackets that `text` lacks to be whole."""
    if wanted.kind != "json":
        return f"it does not match {wanted.name} yet"
    closers, keys = _open(text)
    needed = _required(wanted) if closers[-1:] == ["}"] else []
    lacking = [f"`{key}`" for key in needed if key not in keys]
    parts = [f"the keys {', '.join(lacking)}"] if lacking else []
    parts += [f"`{''.join(closers)}`"] if closers else []
    return f"{' and '.join(parts) or 'the rest of the value'} {_are(parts)} missing"


def _are(parts: list[str]) -> str:
    return "are" if len(parts) > 1 or (parts and parts[0].startswith("the keys")) else "is"


def _required(wanted: Wanted) -> list[str]:
    schema = wanted.source
    return [str(key) for key in schema.get("required", ())] if isinstance(schema, dict) else []


def _open(text: str) -> tuple[list[str], set[str]]:
    """What closes the strings and brackets that are open, innermost first; the outermost keys."""
    closers: list[str] = []
    keys: set[str] = set()
    begun: int | None = None  # where an open string begins
    last, skip = "", False
    for i, c in enumerate(text):
        if skip or (begun is not None and c not in '"\\'):
            skip = False
        elif c == "\\":
            skip = begun is not None
        elif c == '"':
            last, begun = (text[begun : i + 1], None) if begun is not None else ("", i)
        elif c == ":" and len(closers) == 1:
            keys.add(_spelled(last))
        elif c in _CLOSES:
            closers.append(_CLOSES[c])
        elif c in closers[-1:]:
            closers.pop()
    return ([] if begun is None else ['"']) + closers[::-1], keys


def _spelled(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return literal
