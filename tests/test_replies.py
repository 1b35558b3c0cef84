"""Output lines in the shapes that OpenAI's clients read."""

from __future__ import annotations

import json

from ds4cli.batch import replies
from ds4cli.batch.requests import parse
from ds4cli.generate import Completion
from ds4cli.tools.parse import ParsedCall

ITEM = parse(3, b'{"prompt": "x", "custom_id": "a"}\n')
TOKEN = {"token": "hé", "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -1.0}]}
CALL = ParsedCall("now", "{}", id="call_1")


def completion(**fields):
    made = Completion()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def choice(as_text=False, **fields):
    """The only choice of a body, as it is sent."""
    body = replies.body(
        ITEM, [completion(**fields)], model="m", as_text=as_text, usage={}, fingerprint="fp",
        settings={"temp": 1.0},
    )  # fmt: skip
    kind = "text_completion" if as_text else "chat.completion"
    assert {k: v for k, v in body.items() if k != "choices"} == {
        "id": ("cmpl-" if as_text else "chatcmpl-") + ITEM.digest,
        "object": kind,
        "model": "m",
        "usage": {},
        "system_fingerprint": "fp",
        "settings": {"temp": 1.0},
    }
    (only,) = body["choices"]
    return only


def test_a_choice_of_a_chat():
    """Guards: a key that no client reads, or one that is there without a value."""
    assert choice(text="hi", finish_reason="stop") == {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
    }
    full = choice(
        text="", reasoning="why", parsed=[1], calls=(CALL,), logprobs=[TOKEN], note="cut",
        finish_reason="tool",
    )  # fmt: skip
    assert full == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "reasoning": "why",
            "parsed": [1],
            "tool_calls": [CALL.openai()],
        },
        "finish_reason": "tool_calls",
        "logprobs": {"content": [TOKEN]},
        "note": "cut",
    }
    assert choice(text="so", calls=(CALL,))["message"]["content"] == "so"
    assert choice(text="so")["finish_reason"] is None


def test_a_choice_of_a_text():
    """Guards: the shape of a chat for a request of the older kind."""
    assert choice(True, text="hi", finish_reason="length") == {
        "index": 0,
        "text": "hi",
        "finish_reason": "length",
    }
    assert choice(True, text="hé" * 2, logprobs=[TOKEN, TOKEN])["logprobs"] == {
        "tokens": ["hé", "hé"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"x": -1.0}, {"x": -1.0}],
        "text_offset": [0, 2],
    }
    assert choice(True, text="", logprobs=[])["logprobs"]["text_offset"] == []


def test_a_line():
    """Guards: a line that clients take for a failure, letters as escapes, half a letter."""
    line = replies.success(ITEM, {"x": "é"})
    assert line.startswith(replies.BEGINNING) and line.endswith('é"}}, "error": null}\n'.encode())
    name = "batch_req_" + ITEM.digest
    assert json.loads(line) == {
        "id": name,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": name, "body": {"x": "é"}},
        "error": None,
    }
    failed = json.loads(replies.failure(ITEM, "failed", "no"))
    assert failed["response"] is None
    assert failed["error"] == {"code": "failed", "message": "line 3: no"}
    half = replies.success(ITEM, {"x": "\ud800"})
    assert json.loads(half)["response"]["body"] == {"x": "\ud800"} and b"\\ud800" in half
    assert replies.usage(5, 2, 3) == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
