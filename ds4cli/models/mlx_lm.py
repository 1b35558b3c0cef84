"""What we use of mlx-lm, and of transformers, that they keep to themselves.

A test fails when one of these names moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The classes of a model and of its arguments. ValueError for a model type that mlx-lm has no
    code for."""
    from mlx_lm.utils import _get_classes

    return _get_classes(config)


def check_type(config: dict[str, Any]) -> None:
    """ValueError for a model type that mlx-lm has no code for."""
    classes(config)


def build(config: dict[str, Any]) -> Any:
    """The model of a config. Its weights are made up, and are not computed unless somebody asks."""
    model, arguments = classes(config)
    return model(arguments.from_dict(config))


def inner_tokenizer(tokenizer: Any) -> Any:
    """The transformers tokenizer in mlx-lm's wrapper; one that is not wrapped, as it is."""
    return getattr(tokenizer, "_tokenizer", tokenizer)


def own_renderer(tokenizer: Any) -> Callable[..., str] | None:
    """A function in place of a chat template, for the few models that have one."""
    return getattr(tokenizer, "_chat_template", None)


def renderer_parameters(tokenizer: Any) -> frozenset[str]:
    """The switch for thinking that such a function reads; nothing where a template is rendered."""
    if own_renderer(tokenizer) is None:
        return frozenset()
    return frozenset({tokenizer._thinking_kwarg})


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """A conversation as text. The wrapper's own method passes `enable_thinking` where nobody asked
    for it, so a template that does not think by default would."""
    own = own_renderer(tokenizer)
    if own is not None:
        return own(messages, **options)
    return inner_tokenizer(tokenizer).apply_chat_template(messages, tokenize=False, **options)


def use_sandbox(environment: type) -> None:
    """Let transformers compile chat templates for this environment of Jinja's from here on."""
    from transformers.utils import chat_template_utils

    name = "ImmutableSandboxedEnvironment"
    assert hasattr(chat_template_utils, name), "it has another name now"
    setattr(chat_template_utils, name, environment)
