"""The models of this machine in the `llm` tool: `pip install "ds4cli[llm]"`, then
`llm -m ds4cli/builtin "..."`, or `ds4cli/OWNER/NAME` for what lies in the hub's cache.

One session is kept for all that a process asks a model, so a conversation goes on where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import llm
from pydantic import Field

from ds4cli import inventory, settings
from ds4cli.errors import DS4Error
from ds4cli.settings import Settings

PREFIX = "ds4cli/"
Message = dict[str, Any]


@llm.hookimpl
def register_models(register: Any) -> None:
    """The built-in model, and those in the hub's cache."""
    for name in ("builtin", *(each.name for each in inventory.cached())):
        register(LocalModel(name))


@dataclass(frozen=True)
class _Said:
    """A conversation with its last reply, and its tokens, of which so many are the prompt's."""

    drawn_with: Any  # tools, thinking
    system: str | None
    messages: list[Message]
    tokens: list[int]
    prompt_tokens: int

    def is_begun_by(self, drawn_with: Any, system: str | None, messages: list[Message]) -> bool:
        """Whether `messages` are this conversation and more of the user's."""
        known, new = messages[: len(self.messages)], messages[len(self.messages) :]
        is_ours = (self.drawn_with, self.system) == (drawn_with, system)
        same = [_told(m) for m in known] == [_told(m) for m in self.messages]
        return is_ours and same and bool(new) and all(m["role"] != "assistant" for m in new)


def _told(message: Message) -> tuple[Any, ...]:
    """What two forms of one message have in common."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    called = [(call["name"], _arguments(call["arguments"])) for call in calls]
    return message["role"], message["content"].strip(), called


def _arguments(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _option(name: str) -> Any:
    return Field(default=None, description=settings.OPTIONS[name].help)


class LocalModel(llm.Model):
    """One model; loaded when it is first asked."""

    can_stream = True
    supports_schema = True
    supports_tools = True

    class Options(llm.Options):
        """Settings of ds4cli for one prompt."""

        temp: float | None = _option("temp")
        top_p: float | None = _option("top_p")
        top_k: int | None = _option("top_k")
        seed: int | None = _option("seed")
        max_tokens: int | None = _option("max_tokens")
        think: bool | None = _option("think")

    def __init__(self, name: str):
        self.model_id = PREFIX + name
        self._name = name
        self._session: Any = None
        self._said: _Said | None = None

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[str]:
        """The answer, piece by piece; calls and counts go into `response`."""
        try:
            yield from self._reply(prompt, response)
        except DS4Error as error:
            hint = f"; {error.hint}" if error.hint else ""
            raise llm.ModelError(error.message + hint) from None

    def _reply(self, prompt: Any, response: Any) -> Iterator[str]:
        from ds4cli import generate
        from ds4cli.structured import guards

        session, chosen = self._loaded(), self._settings(prompt)
        engine = session.engine
        tools, wanted = _tools(prompt), _wanted(prompt)
        system, messages = _conversation(prompt)
        template = engine.template(chosen, [tool.spec for tool in tools])
        drawn_with = ([tool.spec for tool in tools], chosen.think)
        tokens = self._tokens(template, drawn_with, system, messages)
        thinks = generate.opens_thinking(engine, tokens)
        guard = guards.make_guard(
            engine, tools, wanted, thinks=thinks, max_repairs=chosen.max_repairs
        )
        session.use(chosen)
        session.sync(tokens)
        completion, split = generate.Completion(), generate.splitter(engine, thinks)
        for event in session.stream(max_tokens=chosen.max_tokens, guard=guard):
            before = len(completion.text)
            generate.take(completion, event, split)
            yield completion.text[before:]
        for call in completion.calls:
            form = call.openai()
            name, arguments = form["function"]["name"], json.loads(form["function"]["arguments"])
            response.add_tool_call(llm.ToolCall(name, arguments, form["id"]))
        calls = [call.openai() for call in completion.calls]
        reply = {"role": "assistant", "content": completion.text, "tool_calls": calls}
        self._said = _Said(drawn_with, system, [*messages, reply], session.tokens, len(tokens))
        response.set_usage(input=len(tokens), output=session.pos - len(tokens))

    def _tokens(
        self, template: Any, drawn_with: Any, system: str | None, messages: list[Message]
    ) -> list[int]:
        """The prompt; in a conversation that goes on, the reply stays as it was sampled."""
        said = self._said
        if said is None or not said.is_begun_by(drawn_with, system, messages):
            return list(template.opening(system, messages))
        known = len(said.messages)
        reply = said.tokens[said.prompt_tokens :]
        text = self._session.engine.decode(reply) if messages[known - 1].get("tool_calls") else ""
        new = template.following(system, messages[:known], reply, messages[known:], text)
        return [*said.tokens, *new]

    def _loaded(self) -> Any:
        """The session, over the loaded model."""
        if self._session is None:
            from ds4cli.engine.engine import Engine

            self._session = Engine.load(self._name, offline=True).session()
        return self._session

    def _settings(self, prompt: Any) -> Settings:
        """What a chat has, and what was asked for."""
        given = {k: v for k, v in vars(prompt.options).items() if v is not None}
        engine = self._session.engine
        plain = Settings(model=self._name)
        return replace(plain, **given).filled({"temp": settings.CHAT_TEMP, **engine.sampling})


def _tools(prompt: Any) -> list[Any]:
    from ds4cli.tools import tools_of

    declared = [
        {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema or {"type": "object", "properties": {}},
        }
        for tool in prompt.tools
    ]
    return tools_of(declared, "the tools of llm") if declared else []


def _wanted(prompt: Any) -> Any:
    from ds4cli.structured import asked

    if prompt.schema is None:
        return None
    return asked.from_request({"type": "json_schema", "json_schema": {"schema": prompt.schema}})


def _conversation(prompt: Any) -> tuple[str | None, list[dict[str, Any]]]:
    """The system text, and all messages in OpenAI's form."""
    system, messages = None, []
    for message in prompt.messages:
        parts = [part.to_dict() for part in message.parts]
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        if message.role == "system":
            system = text
        elif message.role == "tool":
            messages += [_result(part) for part in parts if part["type"] == "tool_result"]
        else:
            calls = [_call(part) for part in parts if part["type"] == "tool_call"]
            told = {"tool_calls": calls} if calls else {}
            messages.append({"role": message.role, "content": text, **told})
    return system, messages


def _call(part: dict[str, Any]) -> dict[str, Any]:
    function = {"name": part["name"], "arguments": part["arguments"]}
    return {"id": part.get("tool_call_id") or "", "type": "function", "function": function}


def _result(part: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": part["name"],
        "content": part.get("exception") or part["output"],
        "tool_call_id": part.get("tool_call_id") or "",
    }
