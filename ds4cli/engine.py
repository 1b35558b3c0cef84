"""What is loaded: model, tokenizer, draft model, and what they can do. Makes the sessions."""

from __future__ import annotations

from ds4cli import blas

blas.preload()  # before anything imports mlx.core

# ruff: noqa: E402
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds4cli import delta, drafters, heads, loading, storage
from ds4cli.caches import adapt, build_caches, check_kv_bits
from ds4cli.capabilities import Capabilities, survey
from ds4cli.errors import UsageError
from ds4cli.sampling import Sampler
from ds4cli.session import Session
from ds4cli.settings import Settings
from ds4cli.tape import Recorder
from ds4cli.tape.check import self_check
from ds4cli.timeline import Limits, Timeline
from ds4cli.vocabulary import Vocabulary

# Rows of one block at most: what the slack of a sliding window allows beyond the horizon.
MAX_DRAFT_TOKENS = 31


@dataclass(frozen=True)
class Armed:
    """What was attached to a model's own modules, once: recording, chunked rule, head."""

    recorder: Recorder | None
    notices: list[str]

    @classmethod
    def of(cls, model: Any) -> Armed:
        """Arm `model`, or return what armed it before: engines may share one model."""
        armed = getattr(model, "ds4cli_armed", None)
        if armed is None:
            heads.arm(model)
            delta.use_chunked(model)
            armed = cls(*_recorder(model))
            model.ds4cli_armed = armed
        return armed


def _recorder(model: Any) -> tuple[Recorder | None, list[str]]:
    """The model's recorder; None, with a notice, where its replay differs from the model."""
    if all(a.seekable for a in adapt(build_caches(model, 0))):
        return None, []
    recorder = Recorder.arm(model)
    notices = [f"recurrent layers replay whole modules: {n}" for n in leaves(recorder.families)]
    difference = self_check(model, recorder, lambda: build_caches(model, 0))
    if difference <= 1:
        return recorder, notices
    recorder.disarm()
    return None, [
        "replaying the recurrences does not reproduce this model, so going back feeds tokens again"
    ]


def leaves(families: Sequence[str]) -> list[str]:
    """The recurrences that no family knows and that are replayed module by module."""
    return [name for name in families if name.startswith("leaf")]


class Engine(Vocabulary):
    """Loaded, shared, read-only. One engine serves any number of sessions.

    model: an mlx-lm model; tokenizer: mlx-lm's TokenizerWrapper (or alike); draft: a draft model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        *,
        draft: Any = None,
        context_tokens: int | None = None,
        fingerprint: str = "",
        notices: Sequence[str] = (),
    ):
        super().__init__(tokenizer, context_tokens)
        self.settings = settings
        self.fingerprint = fingerprint
        self.notices = list(notices)
        self.max_draft_tokens = MAX_DRAFT_TOKENS
        self.model = model
        self._draft = draft
        if settings.kv_bits is not None:
            check_kv_bits(model, settings.kv_bits, settings.kv_group_size)
        self.notices += Armed.of(model).notices

    @cached_property
    def capabilities(self) -> Capabilities:
        """How this model goes back, and what that costs; found out when first asked for."""
        return survey(self._timeline(self.model), Armed.of(self.model).recorder)

    @classmethod
    def load(
        cls,
        model: str | Path = "builtin",
        *,
        before_weights: Callable[[Vocabulary], None] = lambda vocabulary: None,
        **settings: Any,
    ) -> Engine:
        """Load a model by folder, hub id or `builtin`; every other setting by keyword.

        before_weights: called with the tokenizer's side, to check a prompt before the long part.
        UsageError for anything wrong with what was named (nothing is loaded then), ModelError for a
        model that cannot be used.
        """
        chosen = Settings(model=str(model), **settings)
        source = loading.find(chosen.model, chosen.offline)
        draft_source = _draft_source(chosen)
        tokenizer = loading.tokenizer(source)
        if draft_source is not None:
            draft_tokenizer = loading.tokenizer(draft_source)
            loading.check_same_tokenizer(tokenizer, draft_tokenizer, draft_source.name)
        context_tokens = _context(source, draft_source)
        before_weights(Vocabulary(tokenizer, context_tokens))
        weights, notices = loading.weights(source, chosen.dtype)
        draft = None
        if draft_source is not None:
            draft, more = loading.weights(draft_source, chosen.dtype)
            notices += more
        return cls(
            weights,
            tokenizer,
            chosen,
            draft=draft,
            context_tokens=context_tokens,
            fingerprint=source.fingerprint(),
            notices=notices,
        )

    # -- sessions ---------------------------------------------------------------------------------

    def session(self) -> Session:
        """A new, empty session."""
        return self.session_from(self._timeline(self.model))

    def session_from(self, timeline: Timeline) -> Session:
        """A session that goes on from `timeline`."""
        sampler = Sampler(self.settings, token_limit=self.token_limit)
        draft = None if self._draft is None else self._timeline(self._draft)
        drafter = drafters.make(self.settings, draft, sampler)
        return Session(self, timeline, sampler, drafter)

    def load_session(self, path: str | Path) -> Session:
        """The session saved at `path`. StateError if it is torn or another model's."""
        timeline = self._timeline(self.model)
        timeline.load_state(storage.read(path, self.fingerprint))
        return self.session_from(timeline)

    def save_session(self, timeline: Timeline, path: str | Path) -> None:
        """Write `timeline` to `path`, whole or not at all."""
        storage.write(path, timeline.state(), self.fingerprint)

    def _timeline(self, model: Any) -> Timeline:
        settings = self.settings
        limits = Limits(
            horizon_tokens=settings.horizon_tokens,
            budget_bytes=settings.rewind_mb << 20,
            chunk_tokens=settings.prefill_step_size,
        )
        return Timeline(
            model,
            Armed.of(model).recorder,
            limits,
            kv_bits=settings.kv_bits,
            kv_group_size=settings.kv_group_size,
        )


def _draft_source(settings: Settings) -> loading.Source | None:
    if settings.drafter == "model" and settings.draft_model is None:
        raise UsageError("`--drafter model` needs a draft model", "name one with `--draft-model`")
    if settings.draft_model is None or settings.drafter not in ("auto", "model"):
        return None
    return loading.find(settings.draft_model, settings.offline)


def _context(source: loading.Source, draft: loading.Source | None) -> int | None:
    """The longest context that every loaded model can read."""
    known = [s.context_tokens for s in (source, draft) if s is not None and s.context_tokens]
    return min(known, default=None)
