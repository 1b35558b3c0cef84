"""Output lines: OpenAI's shapes, and in each answer what made it. Pure; nothing here depends on
time or on what was answered before, so a line is the same in every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ds4cli.batch.requests import Item
from ds4cli.settings import OPTIONS, Settings

if TYPE_CHECKING:
    from ds4cli.generate import Completion
    from ds4cli.tools import Tool

# Settings that never change what an answer says; the model and its template are told by the
# fingerprint. Then those that change how fast it comes, and by that the rows of calls: with
# `reproducible` they are told.
WITHOUT_EFFECT = {
    "model", "chat_template", "offline", "tools", "stats", "parallel", "hostfile",
    "local_ranks", "tensor_parallel", "pipeline",
}  # fmt: skip
ON_CALLS = {
    "drafter", "draft_model", "num_draft_tokens", "speculate", "corpus", "rewind_mb",
    "horizon_tokens", "prefill_step_size",
}  # fmt: skip
# Longer texts are told by their hash.
SHOWN_CHARS = 64
# Of every output line.
BEGINNING = b'{"id": "batch_req_'
FINISH_REASONS = {"tool": "tool_calls"}


def made_with(settings: Settings, tools: Sequence[Tool]) -> dict[str, Any]:
    """The settings that have an effect on answers and are not the defaults, as JSON holds them."""
    settings, defaults, found = settings.filled(), Settings().filled(), {}
    silent = WITHOUT_EFFECT if settings.reproducible else WITHOUT_EFFECT | ON_CALLS
    for name in OPTIONS:
        value = getattr(settings, name)
        if name not in silent and value != getattr(defaults, name):
            found[name] = _short(value)
    if tools:
        found["tools"] = _hash([tool.spec for tool in tools])
    return found


def _short(value: Any) -> Any:
    value = json.loads(json.dumps(value))
    return _hash(value) if isinstance(value, str) and len(value) > SHOWN_CHARS else value


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return "hash:" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what is set otherwise now."""
    return [
        f"`{name} = {_shown(then, name)}` (now `{_shown(now, name)}`)"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]


def _shown(values: dict[str, Any], name: str) -> Any:
    return values[name] if name in values else getattr(Settings().filled(), name, None)


def request_id(item: Item) -> str:
    """The `id` of the item's output line: it names the request itself, not only its `custom_id`."""
    return "batch_req_" + item.digest


def success(item: Item, body: dict[str, Any]) -> bytes:
    """The output line of an answered item."""
    return _line(item, {"status_code": 200, "request_id": request_id(item), "body": body}, None)


def failure(item: Item, code: str, message: str) -> bytes:
    """The output line of an item that has no answer."""
    return _line(item, None, {"code": code, "message": f"line {item.number}: {message}"})


def _line(item: Item, response: Any, error: Any) -> bytes:
    line = {"id": request_id(item), "custom_id": item.custom_id}
    line |= {"response": response, "error": error}
    try:
        text = json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a model may write half a surrogate pair as a JSON escape
        text = json.dumps(line).encode()
    return text + b"\n"


def body(
    item: Item,
    completions: Sequence[Completion],
    *,
    model: str,
    as_text: bool,
    usage: dict[str, Any],
    fingerprint: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """A response's body. `as_text`: a text completion, not a chat."""
    kind, make = ("text_completion", _text_choice) if as_text else ("chat.completion", _chat_choice)
    return {
        "id": ("cmpl-" if as_text else "chatcmpl-") + item.digest,
        "object": kind,
        "model": model,
        "choices": [make(i, completion) for i, completion in enumerate(completions)],
        "usage": usage,
        "system_fingerprint": fingerprint,
        "settings": settings,
    }


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """OpenAI's token counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chat_choice(index: int, completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.reasoning:
        message["reasoning"] = completion.reasoning
    if completion.parsed is not None:
        message["parsed"] = completion.parsed
    if completion.calls:
        message["content"] = completion.text or None
        message["tool_calls"] = [call.openai() for call in completion.calls]
    choice = {"index": index, "message": message, "finish_reason": _reason(completion)}
    if completion.logprobs is not None:
        choice["logprobs"] = {"content": completion.logprobs}
    return {**choice, "note": completion.note} if completion.note else choice


def _text_choice(index: int, completion: Completion) -> dict[str, Any]:
    choice = {"index": index, "text": completion.text, "finish_reason": _reason(completion)}
    if completion.logprobs is not None:
        choice["logprobs"] = _text_logprobs(completion.logprobs)
    return choice


def _text_logprobs(content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`logprobs` of a text completion, from those of a chat completion."""
    texts = [entry["token"] for entry in content]
    return {
        "tokens": texts,
        "token_logprobs": [entry["logprob"] for entry in content],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            for entry in content
        ],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


def _reason(completion: Completion) -> str | None:
    reason = completion.finish_reason
    return None if reason is None else FINISH_REASONS.get(reason, reason)
