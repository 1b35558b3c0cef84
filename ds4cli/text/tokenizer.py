"""Between text and token ids: the tokenizer, its chat template, the length a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds4cli.errors import UsageError

# More than tokens stand for in any text but one of endless spaces.
CHARS_PER_TOKEN = 32


class Vocabulary:
    """A model's tokenizer and context length; usable before any weights are read.

    tokenizer: mlx-lm's TokenizerWrapper (or alike). stop_ids: tokens that end a reply.
    context_tokens: the longest context; None where the model states none.
    """

    def __init__(self, tokenizer: Any, context_tokens: int | None = None):
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.stop_ids = set(tokenizer.eos_token_ids)

    @property
    def token_limit(self) -> int:
        """Ids at or above this are padding of the vocabulary. mlx-lm before 0.32 has no `len`."""
        tokenizer = self.tokenizer
        return len(tokenizer if hasattr(type(tokenizer), "__len__") else tokenizer._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the tokenizer's own special tokens in front, if any."""
        return list(self.tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special tokens included."""
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        think: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template.

        Without a template the contents are joined by blank lines. UsageError where the template
        refuses the messages, or has no room for `tools`.
        """
        if not getattr(self.tokenizer, "has_chat_template", False):
            return self._render_plain(messages, tools)
        options: dict[str, Any] = {} if think is None else {"enable_thinking": think}
        if tools:
            options["tools"] = list(tools)
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:  # templates raise whatever they like
            raise UsageError(f"the chat template refuses these messages: {error}") from None
        return list(ids)

    def _render_plain(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[int]:
        if tools:
            raise UsageError("this model has no chat template, so it cannot be given tools")
        return self.encode("\n\n".join(str(m.get("content", "")) for m in messages))

    def check_length(self, text: str) -> None:
        """UsageError for a text that no model of this context reads, before it becomes tokens: they
        take many times its memory."""
        limit = (self.context_tokens or len(text)) * CHARS_PER_TOKEN
        if len(text) > limit:
            raise UsageError(
                f"the prompt has `{len(text)}` characters, this model reads at most "
                f"`{self.context_tokens}` tokens",
                "shorten it, or use a model with a longer context",
            )

    def check_context(self, tokens: int) -> None:
        """UsageError if `tokens` do not fit the model's context."""
        if self.context_tokens is not None and tokens > self.context_tokens:
            raise UsageError(
                f"the prompt has `{tokens}` tokens, this model reads at most "
                f"`{self.context_tokens}`",
                "shorten it, or use a model with a longer context",
            )
