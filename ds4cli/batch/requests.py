"""Input lines become items: parsed, checked, and named. Pure: no model, no mlx.

A line is an OpenAI batch line (`custom_id`, `url`, `body`), a body alone (`{"prompt": ...}` or
`{"messages": [...]}`, with or without `custom_id`), or, with `--lines`, the prompt itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ds4cli import settings as all_settings
from ds4cli.errors import UsageError
from ds4cli.generate import MOST_TOP
from ds4cli.settings import OPTIONS, Settings
from ds4cli.text.chat_template import SYSTEM_ROLES

if TYPE_CHECKING:
    from ds4cli.structured.wanted import Wanted
    from ds4cli.tools import Tool

# A body's fields that set something for this line only, and the settings they set. Where both names
# of one setting are given, the later one here counts.
OVERRIDES = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop": "stop",
}
BODY_FIELDS = {
    *OVERRIDES,
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "n",
    "model",
    "response_format",
    "logprobs",
    "top_logprobs",
}
LINE_FIELDS = {"custom_id", "method", "url", "body"}
CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
MAX_COMPLETIONS = 128

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Item:
    """One input line. digest: hex, of all that the line asks for. raw: the line itself, where
    another process may answer it.

    Either `error` says what is wrong with it, or one of `messages` and `prompt` is there.
    is_chat: the answer has the shape of a chat completion, not of a text completion.
    unknown: names of fields that nothing reads. tools: None where the line says nothing.
    has_form: it says itself which form the answer has: `wanted`, or plain text. top_logprobs: how
    many likely tokens to tell in place of each; None: no log-probabilities.
    """

    number: int
    custom_id: str
    digest: str
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    is_chat: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    tools: tuple[Tool, ...] | None = None
    wanted: Wanted | None = None
    has_form: bool = False
    top_logprobs: int | None = None
    model: str | None = None
    unknown: tuple[str, ...] = ()
    error: str = ""
    raw: bytes = field(default=b"", repr=False)

    @property
    def texts(self) -> list[str]:
        """What is to be read, without what a template adds."""
        said = [message["content"] for message in self.messages]
        return said if self.prompt is None else [self.prompt]

    def settings(self, base: Settings) -> Settings:
        """The settings that answer this item. Its seed comes from the run's seed and its name,
        so it does not depend on what else is answered, or when."""
        seed = derived_seed(base.seed, self.custom_id)
        return replace(base, **{"seed": seed, **self.overrides})


def derived_seed(seed: int, custom_id: str) -> int:
    """63 bits from a run's seed and a request's name, the same everywhere."""
    digest = hashlib.blake2b(f"{seed}:{custom_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def is_blank(raw: bytes) -> bool:
    """Whether a line holds no request at all: such lines have no answer."""
    return not raw.strip()


def parse(number: int, raw: bytes, plain: bool = False) -> Item:
    """The item of one line. Whatever is wrong with it stands in `error`; nothing is raised."""
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    custom_id = f"line-{number}"
    try:
        line = _line(raw, plain)
        given = line.get("custom_id")
        if isinstance(given, str) and given and _is_unicode(given):
            custom_id = given
        digest = _digest(custom_id, line)
    except UsageError as error:
        return Item(number, custom_id, _digest(custom_id, repr(raw)), error=error.message)
    try:
        return _item(number, custom_id, digest, _given(line))
    except UsageError as error:
        return Item(number, custom_id, digest, error=error.message)
    except Exception as error:  # nothing that one line brings about may end the run
        reason = f"cannot be read: {type(error).__name__}: {error}"
        return Item(number, custom_id, digest, error=reason)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given: clients write null for those that are not."""
    return {name: value for name, value in fields.items() if value is not None}


def _line(raw: bytes, plain: bool) -> dict[str, Any]:
    """The line as an object. UsageError unless it is one."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8: byte {error.start}") from None
    if plain:
        return {"prompt": text.rstrip("\r\n")}
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}, at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from None
    if not isinstance(line, dict):
        raise UsageError("not a JSON object")
    return line


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON may hold one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(custom_id: str, content: Any) -> str:
    """Stands for a request. UsageError for one that cannot be written again."""
    try:
        text = json.dumps([custom_id, content], ensure_ascii=False, sort_keys=True).encode()
    except UnicodeEncodeError:
        raise UsageError("half of a surrogate pair stands alone in it") from None
    except RecursionError as error:
        raise UsageError(f"not JSON: {error}") from None
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def _item(number: int, custom_id: str, digest: str, line: dict[str, Any]) -> Item:
    if line.get("custom_id", custom_id) != custom_id:
        raise UsageError("`custom_id` wants text")
    body, is_chat, unknown = _body(line)
    body = _given(body)
    messages, prompt = _content(body, is_chat)
    return Item(
        number,
        custom_id,
        digest,
        messages,
        prompt,
        is_chat=is_chat,
        overrides=_overrides(body),
        n=_count(body.get("n", 1)),
        tools=_tools(body),
        wanted=_wanted(body),
        has_form="response_format" in body,
        top_logprobs=_top_logprobs(body),
        model=body.get("model"),
        unknown=tuple(unknown + _unknown(body, BODY_FIELDS)),
    )


def _body(line: dict[str, Any]) -> tuple[dict[str, Any], bool, list[str]]:
    """What is asked for, whether as a chat, and unknown fields around it."""
    if "body" not in line:
        return {k: v for k, v in line.items() if k != "custom_id"}, True, []
    url, body = line.get("url", CHAT_URL), line["body"]
    if not isinstance(body, dict):
        raise UsageError("`body` is not an object")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise UsageError(f"`url` is `{url}`, not `{CHAT_URL}` or `{COMPLETION_URL}`")
    if line.get("method", "POST") != "POST":
        raise UsageError(f"`method` is `{line['method']}`, not `POST`")
    return body, url == CHAT_URL, _unknown(line, LINE_FIELDS)


def _unknown(given: dict[str, Any], known: set[str]) -> list[str]:
    # `"stream": false` is what happens anyway.
    return [
        name for name in given if name not in known and (name, given[name]) != ("stream", False)
    ]


def _content(body: dict[str, Any], is_chat: bool) -> tuple[tuple[dict[str, Any], ...], str | None]:
    if ("messages" in body) == ("prompt" in body):
        raise UsageError("it needs `messages` or `prompt`, and not both")
    if "prompt" in body:
        prompt = body["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise UsageError("`prompt` wants text, and some of it")
        return (), prompt
    if not is_chat:
        raise UsageError(f"`{COMPLETION_URL}` wants a `prompt`")
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise UsageError("`messages` wants a list of messages")
    return tuple(_message(m, i) for i, m in enumerate(messages)), None


def _message(message: Any, index: int) -> dict[str, Any]:
    where = f"`messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UsageError(f"{where}` wants a `role` and a `content`")
    message = _given(message)
    content = _text(message.get("content"), where)
    if content is None and message["role"] != "assistant":
        raise UsageError(f"{where}.content` wants text")
    message["content"] = content or ""
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise UsageError(f"{where}.tool_calls` wants a list of calls")
    return {**message, "tool_calls": [_call(c, where) for c in calls]} if calls else message


def _text(content: Any, where: str) -> str | None:
    """Text, or the joined texts of parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where}.content` wants text")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}.content` may hold text parts only")
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier turn, its arguments as an object, which is what templates take."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}.tool_calls` are not calls in OpenAI's form")
    arguments = _arguments(function.get("arguments"))
    if arguments is None:
        raise UsageError(
            f"{where}.tool_calls`: the arguments of `{function['name']}` are no object"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any) -> dict[str, Any] | None:
    """A call's arguments; missing or blank ones are none. None for what is no object."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def _overrides(body: dict[str, Any]) -> dict[str, Any]:
    """Settings that the body changes, checked."""
    found = {}
    for name, setting in OVERRIDES.items():
        value = _as_set(name, body.get(name))
        if value is not None:
            if OPTIONS[setting].kind in (int, float):
                _refuse_quoted(name, value)
            found[setting] = all_settings.check(setting, value, name)
    return found


def _refuse_quoted(name: str, value: Any) -> None:
    """UsageError for a number that came as a text: shown as it is, it would look right."""
    if isinstance(value, str):
        raise UsageError(f"`{name}` wants a number, not the text `{value}`")


def _as_set(name: str, value: Any) -> Any:
    """A body's value as our settings have it; None for one that sets nothing.

    JavaScript knows no integers; an empty stop string stops nothing; to other servers -1 is no
    limit or no seed.
    """
    if OPTIONS[OVERRIDES[name]].kind is int:
        value = _whole(value)
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        return [text for text in stops if text != ""] if isinstance(stops, list) else stops
    if value == -1 and name in ("top_k", "seed"):
        return 0 if name == "top_k" else None
    return value


def _whole(value: Any) -> Any:
    """3 for 3.0; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _count(n: Any) -> int:
    n = _whole(n)
    _refuse_quoted("n", n)
    if type(n) is not int or not 1 <= n <= MAX_COMPLETIONS:
        raise UsageError(f"`n` cannot be `{n}`: it wants a number from 1 to {MAX_COMPLETIONS}")
    return n


def _top_logprobs(body: dict[str, Any]) -> int | None:
    """A chat says whether, and how many; a text completion just how many."""
    wanted, top = body.get("logprobs", False), _whole(body.get("top_logprobs"))
    if isinstance(wanted, bool):
        if not wanted and top:
            raise UsageError("`top_logprobs` needs `logprobs`")
        top = (top or 0) if wanted else None
    else:
        top = _whole(wanted)
    if top is not None and (type(top) is not int or not 0 <= top <= MOST_TOP):
        raise UsageError(
            f"`top_logprobs` cannot be `{top}`: it wants a number from 0 to {MOST_TOP}"
        )
    return top


def _wanted(body: dict[str, Any]) -> Wanted | None:
    if "response_format" not in body:
        return None
    from ds4cli.structured import asked

    return asked.from_request(body["response_format"])


def _tools(body: dict[str, Any]) -> tuple[Tool, ...] | None:
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return ()
    if choice != "auto":
        raise UsageError("`tool_choice` may be `auto` or `none`")
    if not body.get("tools"):
        return None
    from ds4cli.tools import tools_of

    return tuple(tools_of(body["tools"], "`tools`"))


class Warnings:
    """Says once for each name that a field is not read."""

    def __init__(self, warn: Warn, model: str):
        self._warn = warn
        self._model = model
        self._said: set[str] = set()

    def look_at(self, item: Item) -> None:
        for name in item.unknown:
            self._once(name, f"line {item.number}: nothing reads `{name}`; it is ignored")
        if item.model not in (None, self._model):
            self._once("model", f"line {item.number}: `{self._model}` answers, not `{item.model}`")

    def _once(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._warn(text)


class Names:
    """The names used so far: a second use is refused."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, item: Item) -> bool:
        """False if an earlier line has the same name."""
        key = name_key(item.custom_id)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def name_key(custom_id: str) -> int:
    """64 bits of a name: what is remembered of each of very many."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "big")


def conversation(item: Item, system: str | None) -> tuple[str | None, list[dict[str, Any]]]:
    """The item's system text, else `system`, and the messages behind it."""
    if item.prompt is not None:
        return system, [{"role": "user", "content": item.prompt.rstrip("\n")}]
    first, *rest = item.messages
    if first["role"] in SYSTEM_ROLES and first["content"] and rest:
        return first["content"], rest
    return (None if first["role"] in SYSTEM_ROLES else system), list(item.messages)


def is_continued(item: Item) -> bool:
    """Whether the item ends with a text of the model's, which its answer goes on with."""
    last = item.messages[-1] if item.messages else {}
    return last.get("role") == "assistant" and not last.get("tool_calls")
