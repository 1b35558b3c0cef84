"""How a chat template is told to think or not to, and what it reads. No mlx."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from ds4cli.errors import UsageError

SWITCHES = ("enable_thinking", "thinking", "think", "reasoning")
EFFORT = "reasoning_effort"
# The first of these that the template knows stands for on, or off.
EFFORTS = {True: ("medium", "high"), False: ("none",)}
# Only transformers knows these tags.
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def options(think: bool | None, template: str, parameters: Set[str]) -> dict[str, Any]:
    """What to pass to a template that is told to think or not; nothing where nobody says so.

    template: its text; parameters: what a function that stands for one reads. UsageError where it
    reads no such switch: to pass another one would have no effect.
    """
    if think is None:
        return {}
    names = parameters or variables(template)
    for name in SWITCHES:
        if name in names:
            return {name: think}
    flag = "--think" if think else "--no-think"
    if EFFORT not in names:
        raise UsageError(
            f"`{flag}`: the chat template has no switch for thinking",
            "leave it out, or give what the template reads with `--template-args`",
        )
    for word in EFFORTS[think]:
        if re.search(rf"""["']{word}["']""", template):
            return {EFFORT: word}
    raise UsageError(
        f"`{flag}`: the chat template only sets how much is thought",
        f"""as in `--template-args '{{"{EFFORT}": "low"}}'`""",
    )


def variables(template: str) -> Set[str]:
    """The names that a template reads from outside; none where it cannot be parsed."""
    from jinja2 import TemplateError, meta

    try:
        return meta.find_undeclared_variables(_parsed(template))
    except TemplateError:  # rendering it says why
        return frozenset()


def fault(template: str) -> str:
    """Why a text is no template; "" for one that can be parsed."""
    from jinja2 import TemplateSyntaxError

    try:
        _parsed(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def _parsed(template: str) -> Any:
    from jinja2 import Environment

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION.sub("", template))
