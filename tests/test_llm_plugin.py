"""The models of this machine in the `llm` tool."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

llm = pytest.importorskip("llm")

from ds4cli import inventory, llm_plugin  # noqa: E402
from ds4cli.inventory import Cached  # noqa: E402
from ds4cli.llm_plugin import LocalModel  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return LocalModel("builtin")


def test_what_is_cached_is_registered(monkeypatch, tmp_path):
    """Guards: a plugin that llm does not find, or one that loads a model to name it."""
    cached = [Cached("owner/name", 1, tmp_path, {})]
    monkeypatch.setattr(inventory, "cached", lambda: cached)
    found = []
    llm_plugin.register_models(found.append)
    assert [each.model_id for each in found] == ["ds4cli/builtin", "ds4cli/owner/name"]
    points = importlib.metadata.entry_points(group="llm")
    assert all(point.value == "ds4cli.llm_plugin" for point in points if point.name == "ds4cli")


def test_a_conversation_goes_on_where_it_stands(model):
    """Guards: a conversation that is read again from its beginning, or not at all."""
    talk = model.conversation()
    first = talk.prompt("Hello, who are you?", temp=0, think=False)
    assert "ds4cli" in first.text() and first.usage().output > 0
    second = talk.prompt("What is the capital of France?", temp=0, think=False)
    assert second.text() == "The capital of France is Paris."
    assert second.usage().input > first.usage().input
    assert model._session.stats.cached_tokens >= first.usage().input


def test_a_schema_is_kept(model):
    """Guards: text where llm's user wanted JSON."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text = model.prompt("Give a number.", schema=schema, temp=0, think=False, max_tokens=40).text()
    assert isinstance(json.loads(text)["n"], int)


def test_a_tool_is_called_and_its_result_read(model):
    """Guards: calls or results that do not come through."""

    def get_weather(city: str) -> str:
        "Get the current weather for a city."
        asked.append(city)
        return json.dumps({"temperature": 7, "condition": "rain"})

    asked: list[str] = []
    options = {"temp": 0.0, "think": False}
    chain = model.chain("What is the weather in Oslo?", tools=[get_weather], options=options)
    assert chain.text() and asked == ["Oslo"]
    read = model._session.engine.decode(model._session.tokens)
    assert '<tool_response>\n{"temperature": 7, "condition": "rain"}' in read
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in read


def test_an_error_is_llms_own(model):
    """Guards: a traceback for a prompt that is too long."""
    with pytest.raises(llm.ModelError, match="8192"):
        model.prompt("word " * 9000, temp=0).text()
