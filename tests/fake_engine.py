"""An engine without a model, for tests of the command: it replies with scripted pieces of text."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ds4cli.errors import UsageError
from ds4cli.settings import Settings
from ds4cli.text.chat_template import ChatTemplate
from ds4cli.text.reasoning import Markers


class FakeEngine:
    """Stands where `engine.Engine` stands. `pieces` is the reply; `loaded` records every load."""

    pieces: tuple[str, ...] = ("Hello", " world")
    loaded: list[Settings]
    refusal = ""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.loaded.append(self.settings)
        self.notices = ["a notice"]
        self.warnings = [self.refusal] if self.refusal else []
        self.capabilities = "a capability"
        self.markers = Markers("<think>", "</think>")
        self.sampling = {"top_p": 0.95}

    @classmethod
    def load(cls, before_weights: Any = None, **settings: Any) -> FakeEngine:
        engine = cls(**settings)
        if before_weights is not None:
            before_weights(engine)
        return engine

    def unread_args(self, settings: Settings, has_tools: bool) -> list[str]:
        return [name for name in settings.template_args if name != "level"]

    def check_context(self, tokens: int) -> None: ...
    def check_length(self, text: str) -> None: ...

    def template(self, settings: Settings, tools: Any = None) -> ChatTemplate:
        def render(messages: list[dict], add_generation_prompt: bool) -> str:
            type(self).last_render = {"messages": messages, "tools": tools, "think": settings.think}
            return "".join(message["content"] for message in messages)

        return ChatTemplate(render, self.encode)

    def encode(self, text: str) -> list[int]:
        type(self).last_text = text
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def session(self) -> FakeSession:
        return FakeSession(self)


# What the last event of a reply says about tool calls.
ENDED = {"calls": (), "note": ""}


class FakeSession:
    """One scripted reply."""

    limit = 100
    ended_by = "stop"

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.stats = SimpleNamespace(
            prompt_tokens=0, cached_tokens=2, prompt_s=0.5, generated_tokens=0, decode_s=0.25,
            drafter="ngram", blocks=2, proposed=4, accepted=3, accept_counts=[1, 0, 1],
            parked=0, by_drafter={"ngram": [4, 3]},
            repairs=[], rewinds=0, discarded_tokens=0, replayed_tokens=0, back_s=0.0, forwards=3,
        )  # fmt: skip

    def sync(self, tokens: list[int], *, cancel: Any, progress: Any) -> None:
        if len(tokens) > self.limit:
            raise UsageError(f"the prompt has `{len(tokens)}` tokens, not `{self.limit}`")
        progress(len(tokens), len(tokens))
        self.stats.prompt_tokens = len(tokens)

    why_no_drafts = ""

    def score(self, top: int | None) -> None:
        assert top is None

    def kept_bytes(self) -> dict[str, int]:
        return {"last_block": 1, "horizon": 3, "checkpoints": 4}

    def stream(self, *, cancel: Any, guard: Any = None) -> Iterator[Any]:
        for piece in self.engine.pieces:
            if cancel():
                yield SimpleNamespace(tokens=[], text="", finish_reason="cancelled", **ENDED)
                return
            self.stats.generated_tokens += 1
            yield SimpleNamespace(tokens=[1], text=piece, finish_reason=None)
        yield SimpleNamespace(tokens=[], text="", finish_reason=self.ended_by, **ENDED)
