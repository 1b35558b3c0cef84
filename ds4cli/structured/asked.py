"""What form a reply is to have, as a user or a request says it; checked before anything is loaded.

Four ways to say it, one at a time: a JSON Schema, any JSON object, a regular expression, a grammar
in llguidance's Lark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ds4cli.errors import UsageError
from ds4cli.settings import Settings
from ds4cli.structured.wanted import Wanted
from ds4cli.tools import checking
from ds4cli.tools.schema import lost_references

SETTINGS = ("json_schema", "json_object", "regex", "grammar")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def from_settings(settings: Settings) -> Wanted | None:
    """What the settings ask for; None for plain text. UsageError for more than one, for what
    cannot be read or compiled, and with `strict` for what no grammar can hold."""
    given = [name for name in SETTINGS if getattr(settings, name)]
    if len(given) > 1:
        flags = " and ".join(f"`--{name.replace('_', '-')}`" for name in given)
        raise UsageError(f"{flags} exclude each other", "a reply has one form")
    if not given:
        return None
    return checked(_read(given[0], settings), settings.strict)


def _read(name: str, settings: Settings) -> Wanted:
    if name == "json_object":
        return Wanted("json", ANY_OBJECT, "--json-object")
    if name == "regex":
        return Wanted("regex", settings.regex, "--regex")
    text = _text(name, getattr(settings, name))
    if name == "grammar":
        return Wanted("grammar", text, "--grammar")
    return Wanted("json", _json(text, "--json-schema"), "--json-schema")


def inlined(settings: Settings) -> Settings:
    """The settings with the text of the files that they name: it, not a name, makes answers."""
    schema, grammar = settings.json_schema, settings.grammar
    return replace(
        settings,
        json_schema=_text("json_schema", schema) if schema else schema,
        grammar=_text("grammar", grammar) if grammar else grammar,
    )


def _text(name: str, given: str) -> str:
    """A schema or grammar that was given itself, or the text of the file with that name."""
    is_inline = given.lstrip().startswith("{") if name == "json_schema" else "start:" in given
    return given if is_inline else _file(given, f"--{name.replace('_', '-')}")


def from_request(field: Any) -> Wanted | None:
    """OpenAI's `response_format`: `text`, `json_object`, or `json_schema` with `strict`.

    UsageError for anything else, and for a schema that cannot be used.
    """
    kind = field.get("type") if isinstance(field, Mapping) else None
    body = field.get("json_schema") if kind == "json_schema" else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Wanted("json", ANY_OBJECT, "response_format")
    if not isinstance(body, Mapping) or "schema" not in body:
        kinds = "`text`, `json_object`, or `json_schema` with a `schema`"
        raise UsageError(f"`response_format` wants a `type`: {kinds}")
    text = json.dumps([body["schema"], body.get("strict") is True])
    return _checked_schema(text)


@cache
def _checked_schema(text: str) -> Wanted:
    """A batch asks for the same schema in line after line."""
    schema, strict = json.loads(text)
    return checked(Wanted("json", schema, "response_format"), strict)


def checked(wanted: Wanted, strict: bool = False) -> Wanted:
    """`wanted`, with what its grammar cannot hold. UsageError where there can be no grammar, or
    `strict` asks for one that holds everything."""
    from ds4cli.structured import grammar

    if wanted.kind == "json" and not isinstance(wanted.source, (dict, bool)):
        raise UsageError(f"`{wanted.name}` is no JSON Schema: it wants an object")
    try:
        unheld = grammar.unheld(wanted)
    except grammar.NoForm as error:
        raise UsageError(f"`{wanted.name}` cannot be used: {error}") from None
    if unheld and strict:
        words = "; ".join(unheld)
        raise UsageError(
            f"`{wanted.name}` cannot be enforced whole: {words}", "leave out what cannot be held"
        )
    unchecked = _unchecked(wanted.source, unheld)
    late = tuple(word for word in unheld if word not in unchecked)
    return replace(wanted, unheld=late, unchecked=unchecked)


def _unchecked(schema: Any, unheld: list[str]) -> tuple[str, ...]:
    """Of what no grammar holds, the words that the check of a finished reply does not know, and
    where it cannot follow a reference on the way to one that it does."""
    known = [word for word in unheld if checking.is_checked(word.split("`")[1])]
    lost = [f"`$ref` `{ref}`" for ref in lost_references(schema)] if known else []
    return (*(word for word in unheld if word not in known), *dict.fromkeys(lost))


def _file(name: str, flag: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"`{name}` is not UTF-8 text", f"`{flag}` wants a text file") from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(f"cannot read `{name}`: {reason}", f"`{flag}` wants a file") from None


def _json(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the schema of `{flag}` is no JSON: {error}") from None
