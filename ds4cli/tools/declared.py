"""The tools a user declares: read from a JSON file, checked before anything is loaded."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4cli.errors import UsageError
from ds4cli.tools import checking
from ds4cli.tools import schema as json_schema

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_OPENS = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")


@dataclass(frozen=True)
class Tool:
    """One declared tool. `parameters` is a JSON schema of type object.

    env: names of the environment variables with secrets that the command needs.
    """

    name: str
    description: str
    parameters: dict
    command: tuple[str, ...] | None = None
    env: tuple[str, ...] = ()

    @property
    def spec(self) -> dict:
        """The OpenAI form, for the chat template: nothing in it that the model must not see.

        In the order in which everybody writes it: templates draw it so, and a model that has always
        seen the description first may not know the tool otherwise.
        """
        told = {"description": self.description} if self.description else {}
        inner = {"name": self.name, **told, "parameters": self.parameters}
        return {"type": "function", "function": inner}

    @property
    def arguments_schema(self) -> dict:
        """`parameters`, closed: what is not declared is no argument, unless the schema says so."""
        schema = self.parameters
        if "properties" not in schema or any(word in schema for word in _OPENS):
            return schema
        return {"additionalProperties": False, **schema}

    @property
    def notices(self) -> list[str]:
        """Schema keywords that nothing checks."""
        return [f"tool `{self.name}`: `{path}` is not checked"
                for path in checking.unchecked(self.parameters)]  # fmt: skip


def load_tools(path: str | Path) -> list[Tool]:
    """Read a JSON list of tools, in the OpenAI form or as its inner objects.

    Raises UsageError that names the file and the path inside the JSON.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the tools file `{path}`: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the tools file `{path}` is not JSON: {error}", "it wants a list of OpenAI's tools"
        ) from error
    return tools_of(data, f"tools file `{path}`")


def tools_of(data: Any, origin: str) -> list[Tool]:
    """Check tools that were read from JSON. UsageError names `origin` and the path inside."""
    if not isinstance(data, list) or not data:
        raise _bad(origin, "$", "must be a list with at least one tool")
    tools = [_read_tool(entry, f"[{i}]", origin) for i, entry in enumerate(data)]
    for i, tool in enumerate(tools):
        if tool.name in {other.name for other in tools[:i]}:
            raise _bad(origin, f"[{i}].name", f"`{tool.name}` is declared twice")
    return tools


def _bad(origin: str, where: str, what: str) -> UsageError:
    return UsageError(
        f"{origin}: `{where}` {what}",
        hint='a tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}',
    )


def _read_tool(entry: Any, where: str, origin: str) -> Tool:
    if not isinstance(entry, dict):
        raise _bad(origin, where, "must be an object")
    inner, inside = entry, where
    if "function" in entry:
        inner, inside = entry["function"], f"{where}.function"
        if not isinstance(inner, dict):
            raise _bad(origin, inside, "must be an object")
    name = inner.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(origin, f"{inside}.name", "must be a name of letters, digits, `_`, `.`, `-`")
    description = inner.get("description", "")
    if not isinstance(description, str):
        raise _bad(origin, f"{inside}.description", "must be a string")
    parameters = inner.get("parameters", {"type": "object", "properties": {}})
    _check_parameters(parameters, f"{inside}.parameters", origin)
    command = _read_command(entry.get("command", inner.get("command")), where, origin)
    env = _read_env(entry.get("env", inner.get("env", [])), where, origin)
    return Tool(name, description, parameters, command, env)


def _check_parameters(parameters: Any, where: str, origin: str) -> None:
    if not isinstance(parameters, dict):
        raise _bad(origin, where, "must be a JSON schema object")
    if parameters.get("type", "object") != "object":
        raise _bad(origin, f"{where}.type", "must be `object`")
    for inside, what in json_schema.problems(parameters):
        raise _bad(origin, f"{where}{inside}", what)


def _read_command(command: Any, where: str, origin: str) -> tuple[str, ...] | None:
    if command is None:
        return None
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError as error:
            raise _bad(origin, f"{where}.command", f"is no command line: {error}") from None
    if not isinstance(command, list) or not command or not all(isinstance(a, str) for a in command):
        raise _bad(origin, f"{where}.command", "must be a command line, or a list of strings")
    if any("\0" in word for word in command):
        raise _bad(origin, f"{where}.command", "has a NUL in it, which no program can be given")
    return tuple(command)


def _read_env(names: Any, where: str, origin: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _bad(origin, f"{where}.env", "must be a list of names")
    return tuple(names)
