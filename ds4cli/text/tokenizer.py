"""Between text and token ids: the tokenizer, its chat template, the length a model can read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from ds4cli.errors import UsageError
from ds4cli.models import mlx_lm
from ds4cli.settings import Settings
from ds4cli.text import template_limits, thinking
from ds4cli.text.chat_template import ChatTemplate, Message
from ds4cli.text.detokenizer import REPLACEMENT
from ds4cli.text.reasoning import Markers, find_markers, template_text

# More than tokens stand for in any text but one of endless spaces.
CHARS_PER_TOKEN = 32
SHORTEN_HINT = "shorten it, or use a model with a longer context"
# Where `decode` and `_decode` are written that add nothing to what the tokenizer's library makes of
# ids: transformers 5, and 4.
DIRECT = (
    ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"),
    ("transformers.tokenization_utils_base", "transformers.tokenization_utils_fast"),
)


class Vocabulary:
    """A model's tokenizer and context length; usable before any weights are read.

    tokenizer: mlx-lm's TokenizerWrapper (or alike). stop_ids: tokens that end a reply.
    context_tokens: the longest context; None where the model states none.
    """

    def __init__(
        self, tokenizer: Any, context_tokens: int | None = None, settings: Settings | None = None
    ):
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.settings = settings or Settings()
        self.stop_ids = set(tokenizer.eos_token_ids)

    @property
    def token_limit(self) -> int:
        """Ids at or above this are padding of the vocabulary. mlx-lm before 0.32 has no `len`."""
        tokenizer = self.tokenizer
        is_sized = hasattr(type(tokenizer), "__len__")
        return len(tokenizer if is_sized else mlx_lm.inner_tokenizer(tokenizer))

    # -- raw text ---------------------------------------------------------------------------------

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The ids that belong in front of every text, as a BOS does. What a tokenizer would add
        behind a text, an EOS, ends it: nothing can follow."""
        bare = self._encode_bare("a")
        ids = list(self.tokenizer.encode("a"))
        places = range(len(ids) - len(bare) + 1)
        at = next((i for i in places if ids[i : i + len(bare)] == bare), 0)
        return tuple(ids[:at])

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text: special tokens in it are such, and what belongs in front of every
        text stands there once."""
        ids = self._encode_bare(text)
        return ids if tuple(ids[: len(self.start)]) == self.start else [*self.start, *ids]

    def _encode_bare(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_data(self, text: str) -> list[int]:
        """Ids of text that stands inside another one; what spells a special token stays text."""
        anchor = self._encode_split("\n")
        joined = self._encode_split("\n" + text)
        # Some tokenizers put a space in front of all that they encode.
        if anchor and joined[: len(anchor)] == anchor:
            return joined[len(anchor) :]
        return self._encode_split(text)

    def _encode_split(self, text: str) -> list[int]:
        plain = mlx_lm.inner_tokenizer(self.tokenizer)
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return list(plain.encode(text, **options))

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """Finds what spells a special token."""
        added = mlx_lm.inner_tokenizer(self.tokenizer).added_tokens_decoder.values()
        spelled = [re.escape(str(token)) for token in added if token.special]
        return re.compile("|".join(sorted(spelled, key=len, reverse=True)) or r"(?!)")

    def spells_specials(self, text: str) -> bool:
        """Whether a special token is spelled in a text."""
        return self._specials.search(text) is not None

    def encode_part(self, text: str) -> list[int]:
        """Token ids of text that goes on: without special tokens in front."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special tokens included; each broken character is one U+FFFD."""
        text = self._decode(tokens)
        return self._decode_runs(tokens) if REPLACEMENT in text and self._bytes else text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decoder([*tokens], skip_special_tokens=False)

    @cached_property
    def _decoder(self) -> Callable[..., str]:
        """What makes text of ids: the tokenizer's own library, without the hundred calls around it
        in transformers, where a tokenizer adds nothing else there."""
        plain = mlx_lm.inner_tokenizer(self.tokenizer)
        if tuple(_module_of(type(plain), name) for name in ("decode", "_decode")) in DIRECT:
            return plain.backend_tokenizer.decode
        return partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Tokens that stand for bytes (`<0x0A>`), where a tokenizer spells with them."""
        vocab: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        if not names.keys() <= vocab.keys() or self._decode([vocab["<0x0A>"]]) != "\n":
            return {}
        return {vocab[name]: byte for name, byte in names.items()}

    def _decode_runs(self, tokens: Sequence[int]) -> str:
        """Tokenizers give up a whole run of bytes when one character in it is broken."""
        newline = next(token for token, byte in self._bytes.items() if byte == 10)
        parts = []
        for is_bytes, run in groupby(tokens, lambda token: token in self._bytes):
            if is_bytes:
                parts.append(bytes(self._bytes[token] for token in run).decode(errors="replace"))
            elif parts:  # at the beginning of a text, some decoders drop a space
                parts.append(self._decode([newline, *run]).removeprefix("\n"))
            else:
                parts.append(self._decode(list(run)))
        return "".join(parts)

    # -- conversations ----------------------------------------------------------------------------

    @cached_property
    def markers(self) -> Markers | None:
        """What opens and closes the model's reasoning."""
        return find_markers(self.tokenizer)

    @property
    def has_template(self) -> bool:
        return getattr(self.tokenizer, "has_chat_template", False)

    def template(
        self, settings: Settings, tools: Sequence[dict[str, Any]] | None = None
    ) -> ChatTemplate:
        """The model's chat template; without one, or with `raw`, texts one after the other.

        UsageError where it has no room for `tools`, or no switch that `think` could turn.
        """
        allowed = settings.special or settings.raw
        data = () if allowed else (self.encode_data, self.spells_specials)
        stops = frozenset(self.stop_ids)
        if settings.raw or not self.has_template:
            if tools:
                raise UsageError(
                    "this model has no chat template, so it cannot be given tools",
                    "`--chat-template FILE` names one" if not settings.raw else "leave out `--raw`",
                )
            return ChatTemplate(_render_plain, self._encode_bare, stops, self.start, *data)
        options = self._options(settings, list(tools or ()))

        def render(messages: list[Message], add_generation_prompt: bool) -> str:
            draw = partial(mlx_lm.render, self.tokenizer, messages, **options)
            return template_limits.render(
                lambda: draw(add_generation_prompt=add_generation_prompt), (messages, options)
            )

        return ChatTemplate(render, self._encode_bare, stops, (), *data)

    def unread_args(self, settings: Settings, has_tools: bool) -> list[str]:
        """Names in `template_args` that the chat template does not read, as far as can be told."""
        if not settings.template_args or mlx_lm.renderer_parameters(self.tokenizer):
            return []
        known = thinking.variables(self._template_text(has_tools))
        return [name for name in settings.template_args if known and name not in known]

    def _template_text(self, has_tools: bool) -> str:
        return template_text(self.tokenizer, "tool_use" if has_tools else "default")

    def _options(self, settings: Settings, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """What the template is given besides messages."""
        own = mlx_lm.renderer_parameters(self.tokenizer)
        options = thinking.options(settings.think, self._template_text(bool(tools)), own)
        options |= settings.template_args
        return {**options, "tools": tools} if tools else options

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        think: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template.

        Without a template the contents are joined by blank lines. UsageError where the template
        refuses the messages, or has no room for `tools`.
        """
        chosen = replace(self.settings, think=think, raw=False)
        template = self.template(chosen, tools)
        return list(template.opening(None, messages, add_generation_prompt))

    def check_length(self, text: str) -> None:
        """UsageError for a text that no model of this context reads, before it becomes tokens: they
        take many times its memory."""
        limit = (self.context_tokens or len(text)) * CHARS_PER_TOKEN
        if len(text) > limit:
            raise UsageError(
                f"the prompt has `{len(text)}` characters, this model reads at most "
                f"`{self.context_tokens}` tokens",
                SHORTEN_HINT,
            )

    def check_context(self, tokens: int) -> None:
        """UsageError if `tokens` do not fit the model's context."""
        if self.context_tokens is not None and tokens > self.context_tokens:
            raise UsageError(
                f"the prompt has `{tokens}` tokens, this model reads at most "
                f"`{self.context_tokens}`",
                SHORTEN_HINT,
            )


def _module_of(cls: type, name: str) -> str:
    """Where a method of a class is written."""
    return next((base.__module__ for base in cls.__mro__ if name in vars(base)), "")


def _render_plain(messages: list[Message], add_generation_prompt: bool) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)
