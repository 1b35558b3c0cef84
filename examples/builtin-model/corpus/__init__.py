"""The generated corpus: which dialogues there are, how often, and in which surroundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .chat import CHAT, conversation, draw_weighted, short_task
from .code import CODE
from .instructions import INSTRUCTIONS
from .sample import Message, Sample
from .toolcalls import (
    answer_from_result,
    chained_calls,
    draw_tool,
    missing_parameter,
    no_fitting_tool,
    question_about_result,
    several_calls,
    single_call,
    tool_session,
)
from .words import Pool

TOOLS: list[tuple[float, Callable[[Pool], Sample]]] = [
    (3.5, single_call), (2.0, several_calls), (3.0, tool_session), (1.0, no_fitting_tool),
    (1.1, missing_parameter), (1.0, answer_from_result), (0.9, question_about_result), (1.6, chained_calls),
]  # fmt: skip
GROUPS = {
    "tools": TOOLS,
    "instructions": INSTRUCTIONS,
    "code": CODE,
    "chat": CHAT,
    "conversations": [(1.0, conversation)],
}
# By dialogue; tool dialogues are three times as long as the others.
MIX = {"tools": 0.38, "instructions": 0.24, "code": 0.12, "chat": 0.12, "conversations": 0.14}

SYSTEM_TEXTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a concise assistant.", "Answer briefly.",
    "You are a small demo model.", "Be polite and brief.", "You are a coding assistant.", "Help the user.", "Today is {date}.",
    "You help people in {city}.", "The user's name is {person}.", "You are an assistant for the {noun} team.",
)  # fmt: skip

__all__ = ["GROUPS", "MIX", "Message", "Pool", "Sample", "draw"]


def draw(pool: Pool, mix: dict[str, float] | None = None) -> Sample:
    """One dialogue of the mix, in random surroundings."""
    mix = mix or MIX
    group = pool.rng.choices(list(mix), list(mix.values()))[0]
    sample = draw_weighted(GROUPS[group], pool)
    return with_system(with_unused_tools(with_history(sample, pool), pool), pool)


def with_history(sample: Sample, pool: Pool) -> Sample:
    """Earlier turns of a conversation before a dialogue that needs none of them."""
    if sample.tools is None or pool.rng.random() > 0.15:
        return sample
    earlier = short_task(pool).messages
    return replace(sample, messages=[*earlier, *sample.messages])


def with_unused_tools(sample: Sample, pool: Pool) -> Sample:
    """Tools are declared although the request needs none."""
    if sample.tools is not None or sample.family == "unknown" or pool.rng.random() > 0.07:
        return sample
    tools = {
        tool.name: tool.schema(pool.rng)
        for tool, _ in (draw_tool(pool) for _ in range(pool.rng.randint(1, 3)))
    }
    return replace(sample, tools=list(tools.values()))


def with_system(sample: Sample, pool: Pool) -> Sample:
    if sample.messages[0]["role"] == "system" or pool.rng.random() > 0.25:
        return sample
    text = pool.rng.choice(SYSTEM_TEXTS)
    text = text.format(
        date=pool.date(), city=pool.city(), person=pool.person(), noun=pool.word("noun")
    )
    return replace(sample, messages=[{"role": "system", "content": text}, *sample.messages])
