"""The guard that a reply needs: for calls, for a form, for either, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4cli.errors import ModelError
from ds4cli.structured.either import CallOrForm
from ds4cli.structured.grammar import NoForm, form_of
from ds4cli.structured.guard import FormGuard
from ds4cli.structured.wanted import Wanted
from ds4cli.tools import Guard, Tool

if TYPE_CHECKING:
    from ds4cli.text.tokenizer import Vocabulary

AnyGuard = Guard | FormGuard | CallOrForm


def make_guard(
    vocabulary: Vocabulary,
    tools: Sequence[Tool],
    wanted: Wanted | None,
    *,
    thinks: bool,
    max_repairs: int,
    resumable: bool = False,
) -> AnyGuard | None:
    """What watches a reply; None where nothing is asked of it. ModelError where the model's
    vocabulary cannot be held to a form.

    thinks: the prompt opened reasoning. resumable: a reply that was cut may go on.
    """
    tokenizer = vocabulary.tokenizer
    calls = Guard(tokenizer, tools, thinks, max_repairs, resumable=resumable) if tools else None
    if wanted is None:
        return calls
    try:
        form = FormGuard(tokenizer, form_of(tokenizer, wanted), vocabulary.markers, thinks)
    except NoForm as error:
        raise ModelError(f"this model cannot be held to `{wanted.name}`: {error}") from None
    return form if calls is None else CallOrForm(calls, form)
