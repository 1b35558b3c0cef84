"""What is loaded: model, tokenizer, draft model, and what they can do. Makes the sessions."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ds4cli import __version__
from ds4cli.arrays import named_leaves
from ds4cli.backend import address_space, blas, memory
from ds4cli.caches.build import adapt, build_caches, check_kv_bits, check_kv_group
from ds4cli.drafters import heads, registry
from ds4cli.drafters.corpus import Corpus
from ds4cli.drafters.costs import PriceList
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.heads import Head, HeadSource
from ds4cli.drafters.making import make
from ds4cli.drafters.policy import Experience
from ds4cli.drafters.target import Target
from ds4cli.engine.capabilities import Capabilities, survey
from ds4cli.engine.scores import Spelling
from ds4cli.engine.session import Session
from ds4cli.errors import ModelError, StateError, UsageError
from ds4cli.hooks import activations, convolutions, delta
from ds4cli.hooks.cuda import attention, recurrences, switch
from ds4cli.hooks.last_row import Projections
from ds4cli.hooks.taps import Taps
from ds4cli.lanes.arm import Lanes
from ds4cli.models import adapters, sharding
from ds4cli.models.parts import embedding_rows
from ds4cli.models.sharding import Share
from ds4cli.models.source import Source, check_type, find, locate
from ds4cli.models.tokenizers import (
    check_same_tokenizer,
    check_vocabulary,
    end_also,
    load_tokenizer,
)
from ds4cli.models.weights import is_float32, load_weights
from ds4cli.rewind.timeline import Limits, Timeline
from ds4cli.sampling import Sampler, check_bias
from ds4cli.settings import Settings, cache_folder
from ds4cli.tape.check import self_check
from ds4cli.tape.recorder import Recorder
from ds4cli.text.chat_template import read_template
from ds4cli.text.tokenizer import Vocabulary

if TYPE_CHECKING:
    from ds4cli.ranks.group import Group

# Prompt tokens of a model call: on CUDA, where a token takes 30 us, each call costs a part of that.
CHUNK_TOKENS = {False: 512, True: 2048}
# Tokens of context whose cache rows are kept in memory with the weights.
EXPECTED_TOKENS = 8192


@dataclass(frozen=True)
class Armed:
    """What was attached to a model's own modules, once: recording, and other forms of what is slow
    here."""

    projections: Projections
    recorder: Recorder | None
    notices: list[str]
    refusal: str = ""  # why the recurrences are not replayed

    @classmethod
    def of(cls, model: Any) -> Armed:
        """Arm `model`, or return what armed it before: engines may share one model."""
        armed = getattr(model, "ds4cli_armed", None)
        if armed is None:
            attention.use(model)
            delta.use(model)
            recurrences.use(model)
            convolutions.use(model)
            activations.use(model)
            armed = cls(Projections(model), *_recorder(model))
            model.ds4cli_armed = armed
        return armed


def _recorder(model: Any) -> tuple[Recorder | None, list[str], str]:
    """The model's recorder and notices; None, and why, where its replay differs from the model."""
    if all(a.seekable for a in adapt(build_caches(model, 0))):
        return None, [], ""
    recorder = Recorder.arm(model)
    notices = [f"recurrent layers replay whole modules: {n}" for n in leaves(recorder.families)]
    verdict = self_check(model, recorder, lambda: build_caches(model, 0))
    if verdict.accepts:
        return recorder, notices, ""
    recorder.disarm()
    return None, [], f"{verdict}, so going back feeds tokens again"


def leaves(families: Sequence[str]) -> list[str]:
    """The recurrences that no family knows and that are replayed module by module."""
    return [name for name in families if name.startswith("leaf")]


class Engine(Vocabulary):
    """Loaded, shared, read-only. One engine serves any number of sessions.

    model: an mlx-lm model; tokenizer: mlx-lm's TokenizerWrapper (or alike); draft: a draft model;
    head: a drafting head on this model. warnings: notices that everybody should see. group: the
    ranks that hold the model together with this process. fingerprint: stands for the model;
    held_fingerprint: for what this process holds of it, which its states and last digits are of.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        *,
        draft: Any = None,
        head: Head | None = None,
        context_tokens: int | None = None,
        fingerprint: str = "",
        held_fingerprint: str | None = None,
        notices: Sequence[str] = (),
        corpus: Corpus | None = None,
        sampling: Mapping[str, Any] | None = None,
        warnings: Sequence[str] = (),
        group: Group | None = None,
    ):
        super().__init__(tokenizer, context_tokens, settings)
        self.corpus = Corpus() if corpus is None else corpus
        self.fingerprint = fingerprint
        self.held_fingerprint = held_fingerprint or fingerprint
        self.notices = list(notices)
        self.corpus.notices = self.notices
        self.sampling = dict(sampling or {})
        self.model = model
        self._group = group
        self._draft = draft
        self._head = head
        self._lanes: Lanes | None = None
        self.experience = Experience()
        if settings.kv_bits is not None:
            check_kv_bits(model, settings.kv_bits, settings.kv_group_size)
        self.notices += Armed.of(model).notices
        self.warnings = [line for line in (self.refusal, *warnings) if line]
        rows = [embedding_rows(m) for m in (model, draft) if m is not None]
        self.id_limit = min((n for n in rows if n is not None), default=None)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold parts of the model: they follow every move of its timelines."""
        return self._group is not None

    @property
    def token_limit(self) -> int:
        """Ids at or above this are never picked: no token, or no row of an embedding."""
        limit = super().token_limit
        return limit if self.id_limit is None else min(limit, self.id_limit)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """UsageError for an id without a row in the embedding: MLX would read beyond its end."""
        limit = self.id_limit
        if limit is None or not len(tokens) or (min(tokens) >= 0 and max(tokens) < limit):
            return
        at = next(i for i, token in enumerate(tokens) if not 0 <= token < limit)
        raise UsageError(
            f"token id `{tokens[at]}` at position {at} is none of this model's",
            f"its ids are 0 to {limit - 1}",
        )

    @property
    def refusal(self) -> str:
        """Why this model's recurrences are not replayed; empty where they are, or it has none."""
        return Armed.of(self.model).refusal

    @cached_property
    def is_float32(self) -> bool:
        """Whether it computes in float32, so that no product depends on the rows of a call."""
        return is_float32(self.model)

    @cached_property
    def capabilities(self) -> Capabilities:
        """How this model goes back, and what that costs; found out when first asked for."""
        armed = Armed.of(self.model)
        return survey(self._timeline(self.model, Timeline), armed.recorder, armed.refusal)

    @classmethod
    def load(
        cls,
        model: str | Path = "builtin",
        *,
        before_weights: Callable[[Vocabulary], None] = lambda vocabulary: None,
        group: Group | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a model by folder, hub id or `builtin`; every other setting by keyword.

        before_weights: called with the tokenizer's side, to check a prompt before the long part.
        group: ranks that all load their part of the model now.
        UsageError for anything wrong with what was named (nothing is loaded then), ModelError for a
        model that cannot be used.
        """
        chosen = Settings(model=str(model), **settings).filled()
        share = None if group is None else group.share(sharding.asked(chosen))
        # An adapter counts the layers of the whole model.
        source = find(chosen.model, chosen.offline, None if chosen.adapter_path else share)
        if chosen.kv_bits is not None:
            check_kv_group(source.config, chosen.kv_group_size)
        draft_source, head_source, notices = _drafting(chosen, source)
        notices = [*source.origins, *source.notices, *notices]
        template = read_template(chosen.chat_template) if chosen.chat_template else None
        adapter = None if chosen.adapter_path is None else adapters.find(chosen.adapter_path)
        tokenizer = _tokenizer(chosen, source, draft_source, template)
        context_tokens = _context(source, draft_source)
        vocabulary = Vocabulary(tokenizer, context_tokens, chosen)
        notices += check_vocabulary(source, vocabulary)
        check_bias(chosen, vocabulary.token_limit)
        fingerprint = adapters.fingerprint(source.fingerprint(template or ""), adapter)
        corpus, of_corpus = _corpus(chosen, fingerprint)
        before_weights(vocabulary)
        address_space.check(source.shards.nbytes)
        if share is not None and head_source is not None:
            share.keeps_output = True
        weights, more = load_weights(source, chosen.dtype, share, adapter)
        draft, of_draft = _draft_model(draft_source, chosen)
        notices += more + of_draft
        engine = cls(
            weights,
            tokenizer,
            chosen,
            draft=draft,
            context_tokens=context_tokens,
            fingerprint=fingerprint,
            held_fingerprint=None if share is None else share.fingerprint(fingerprint, weights),
            corpus=corpus,
            notices=notices,
            sampling=source.sampling,
            warnings=[*source.warnings, *of_corpus],
            group=group,
        )
        if group is not None:
            engine._meet(group)
        engine._take_head(head_source, share)
        engine._wire()
        return engine

    def _meet(self, group: Group) -> None:
        """See that all ranks have loaded parts of one model, which go back alike."""
        from ds4cli.ranks.group import versions

        try:
            capabilities = self.capabilities
        except (ValueError, TypeError) as error:
            reason = f"mlx-lm cannot share this model out over {group.size} ranks: {error}"
            raise ModelError(reason) from None
        holds_all = sharding.stages(self.model) == 1
        group.check(
            {
                "model": self.held_fingerprint,
                "versions": versions(),
                "type of weights": f"float32={is_float32(self.model)}",
                "layers": [f"{x.count} x {x.kind}" for x in capabilities.layers if holds_all],
                "whether layers are recurrent": capabilities.is_recurrent,
                "way back": self.refusal,
            }
        )

    def _take_head(self, source: HeadSource | None, share: Share | None) -> None:
        """Load the head on this model. In `auto`, one that cannot run here gives a notice."""
        if source is None:
            return
        settings = self.settings
        try:
            _check_layers(source.kind, self.model)
            target = Target(self.model, self._read, None if share is None else share.output)
            head = source.load(target, mx.float32 if self.is_float32 else None)
            attention.use(head.module)
        except ModelError as error:
            if settings.drafter != registry.AUTO or settings.draft_model is not None:
                raise
            self.notices.append(f"drafting with ngram alone: {error}")
            return
        self._head = head
        self.notices += source.notices
        pinned, most = settings.num_draft_tokens, head.max_drafts
        if pinned is not None and pinned > most:
            self.notices.append(
                f"the head `{source.name}` guesses {most} tokens a step, not {pinned}"
            )

    def _read(self, tokens: Sequence[int]) -> mx.array:
        """The logits (n, V) of a text (n,); other ranks do their part of the call."""
        timeline = self.scratch_timeline()
        logits = timeline.feed([*tokens])
        timeline.evaluate(logits)
        return logits

    def _wire(self) -> None:
        """Where the system would page out what a session needs, keep that in memory."""
        if not memory.on_metal():
            return
        head = None if self._head is None else self._head.module
        parts = [part for part in (self.model, self._draft, head) if part is not None]
        weights = sum(v.nbytes for part in parts for _, v in named_leaves(part.parameters()))
        tokens = min(self.context_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
        rows = self.capabilities.cache_bytes_per_token
        more = tokens * rows + (self.settings.rewind_mb << 20)
        self.warnings += memory.WIRING.ask(self, weights, more)

    # -- what calls cost --------------------------------------------------------------------------

    @cached_property
    def prices(self) -> PriceList:
        """What calls cost on this machine; the first session that it matters to measures it."""
        folder = cache_folder()
        if not self.held_fingerprint or folder is None:
            return PriceList()
        return PriceList.kept(folder / "call-costs", self._price_key())

    def _price_key(self) -> dict[str, str]:
        """All that the cost of a call depends on, but for the load of the machine."""
        settings = self.settings
        threads = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
        return {
            "model": self.held_fingerprint,
            "weights": f"{settings.dtype} float32={is_float32(self.model)}",
            "kv": f"{settings.kv_bits} {settings.kv_group_size}",
            "taps": "none" if self._head is None else str(self._head.taps),
            "machine": f"{platform.machine()} {os.cpu_count()}",
            "device": f"{mx.default_device()} {_device_name()}",
            "forms": f"{blas.name()} cuda_forms={switch.is_on()}",
            "threads": " ".join(os.environ.get(name, "") for name in threads),
            "versions": f"ds4cli {__version__} mlx {version('mlx')} mlx-lm {version('mlx-lm')}",
        }

    def lanes(self) -> Lanes:
        """What lets timelines share model calls, armed. ModelError where they cannot, with the
        reason."""
        if self.is_shared:
            raise ModelError("other ranks hold parts of the model, and follow one text at a time")
        settings, limits = self.settings, self._limits
        kv = settings.kv_bits, settings.kv_group_size
        if self._lanes is None or not self._lanes.fits:
            new = partial(build_caches, self.model, limits.slack_tokens, *kv)
            self._lanes = Lanes.arm(self.model, new)  # tries the model, which takes many calls
        else:
            self._lanes.arm_again()
        return self._lanes

    def scratch_timeline(self) -> Timeline:
        """An empty timeline of the model, to try things on."""
        return self._timeline(self.model)

    # -- sessions ---------------------------------------------------------------------------------

    def session(self) -> Session:
        """A new, empty session."""
        return self.session_from(self._timeline(self.model))

    def session_from(self, timeline: Timeline, drafter: Drafter | None = None) -> Session:
        """A session that goes on from `timeline`, with a new drafter if none is given."""
        sampler = self.sampler(self.settings)
        if drafter is None:
            draft = None if self._draft is None else self._timeline(self._draft, Timeline)
            # What others said would decide what calls are made.
            corpus = None if self.settings.reproducible else self.corpus
            drafter = make(self.settings, sampler, draft=draft, head=self._head, corpus=corpus)
        return Session(self, timeline, sampler, drafter)

    @cached_property
    def spelling(self) -> Spelling:
        """How tokens are spelt in results."""
        return Spelling(self.decode, self.tokenizer)

    def sampler(self, settings: Settings) -> Sampler:
        """What picks this model's tokens. XTC spares what ends a line or a reply, as in mlx-lm."""
        spared = {*self.encode_part("\n"), *self.stop_ids} if settings.xtc_probability else ()
        return Sampler(settings, self.token_limit, spared)

    def load_session(self, path: str | Path) -> Session:
        """The session saved at `path`. StateError if it is damaged or another model's."""
        timeline = self._timeline(self.model)
        timeline.read(path, self.held_fingerprint)
        self.check_stored(timeline.tokens, path)
        return self.session_from(timeline)

    def check_stored(self, tokens: Sequence[int], path: str | Path) -> None:
        """StateError for a token in a file that is none of this model's."""
        try:
            self.check_tokens(tokens)
        except (UsageError, TypeError) as error:
            raise StateError(f"`{path}` holds what are no tokens: {error}") from None

    def save_session(self, timeline: Timeline, path: str | Path) -> None:
        """Write `timeline` to `path`, whole or not at all."""
        timeline.write(path, self.held_fingerprint)

    def rename_session(self, path: Path, new: Path) -> None:
        """Give a saved session another name, with what other ranks keep of it."""
        path.replace(new)
        if self._group is not None:
            self._group.rename(str(path.absolute()), str(new.absolute()))

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of one model call, at most."""
        return self.settings.prefill_step_size or CHUNK_TOKENS[switch.is_on()]

    @property
    def _limits(self) -> Limits:
        settings = self.settings
        return Limits(
            horizon_tokens=settings.horizon_tokens,
            budget_bytes=settings.rewind_mb << 20,
            chunk_tokens=self.chunk_tokens,
        )

    @cached_property
    def _make_timeline(self) -> Callable[..., Timeline]:
        if self._group is None:
            return Timeline
        from ds4cli.ranks import timelines

        return timelines.maker(self._group)

    def _timeline(self, model: Any, make: Callable[..., Timeline] | None = None) -> Timeline:
        """An empty timeline of `model`; of the engine's own one that all ranks follow."""
        make = make or self._make_timeline
        settings = self.settings
        head = self._head if model is self.model else None
        armed = Armed.of(model)
        return make(
            model,
            armed.recorder,
            self._limits,
            projections=armed.projections,
            kv_bits=settings.kv_bits,
            kv_group_size=settings.kv_group_size,
            taps=None if head is None else Taps.arm(model, head.taps),
        )


def _device_name() -> str:
    """The processor or GPU that computes: a host's name changes with the network."""
    return str(mx.device_info(mx.default_device()).get("device_name"))


def _tokenizer(
    settings: Settings, target: Source, draft: Source | None, template: str | None
) -> Any:
    """The target's tokenizer; a draft model's has to be the same."""
    tokenizer = load_tokenizer(target, template)
    end_also(tokenizer, settings.extra_eos_token)
    if draft is not None:
        check_same_tokenizer(tokenizer, load_tokenizer(draft), draft.name)
    return tokenizer


def _drafting(
    settings: Settings, target: Source
) -> tuple[Source | None, HeadSource | None, list[str]]:
    """The draft model or the drafting head to load, checked against the target, and notices."""
    kind = None if settings.drafter == registry.AUTO else registry.named(settings.drafter)
    loads_nothing = kind is not None and kind.source in (registry.NOTHING, registry.TEXT)
    if settings.speculate == "never" or loads_nothing:
        return None, None, []
    if settings.draft_model is not None:
        return *_named_drafter(kind, settings.draft_model, target, settings.offline), []
    if kind is not None and kind.source == registry.MODEL:
        raise UsageError("`--drafter model` needs a draft model", "name one with `--draft-model`")
    return None, *_own_head(kind, target)


def _named_drafter(
    wanted: registry.Kind | None, name: str, target: Source, offline: bool
) -> tuple[Source | None, HeadSource | None]:
    """What `--draft-model` names: an ordinary model, or a head that fits the target."""
    source = locate(name, offline)
    kind = heads.kind_of(source.config, source.name)
    found = kind or registry.named("model")
    if wanted not in (None, found):
        raise UsageError(
            f"`{source.name}` is a drafter of the kind `{found.name}`, not `{wanted.name}`",
            f"leave out `--drafter {wanted.name}`",
        )
    if kind is None:
        check_type(source)
        return source, None
    head = HeadSource(kind, source.name, source.folder, source.config)
    head.check(target.config)
    return None, head


def _own_head(wanted: registry.Kind | None, target: Source) -> tuple[HeadSource | None, list[str]]:
    """The head in the target's own folder. In `auto`, one that does not fit gives a notice."""
    for kind in registry.HEADS if wanted is None else (wanted,):
        try:
            head = heads.find(kind, target.name, target.folder, target.config)
            if head is not None:
                head.check(target.config)
        except UsageError as error:
            if wanted is not None:
                raise
            return None, [f"drafting with ngram alone: {error}"]
        if head is not None:
            return head, []
    if wanted is None:
        return None, []
    other = "name one with `--draft-model`, or " if wanted.may_be_named else ""
    raise UsageError(f"`{target.name}` has no {wanted.name} head", f"{other}use `--drafter ngram`")


def _draft_model(source: Source | None, settings: Settings) -> tuple[Any, list[str]]:
    return (None, []) if source is None else load_weights(source, settings.dtype)


def _corpus(settings: Settings, fingerprint: str) -> tuple[Corpus | None, list[str]]:
    """Where texts of other sessions are kept, if the user wants that; what to say of it."""
    if settings.corpus is None:
        return None, []
    if settings.reproducible:
        return None, ["`--corpus` is left alone: with `--reproducible` no guess is of other texts"]
    return Corpus.kept(Path(os.path.expanduser(settings.corpus)), fingerprint), []


def _check_layers(kind: registry.Kind, model: Any) -> None:
    """ModelError for a head that reads layers which other ranks hold."""
    if sharding.stages(model) > 1 and kind.source != registry.WEIGHTS:
        raise ModelError(
            f"a {kind.name} head reads layers that other ranks hold with `--pipeline`",
            "`--tensor-parallel`, or `--drafter ngram`",
        )


def _context(source: Source, draft: Source | None) -> int | None:
    """The longest context that every loaded model can read."""
    known = [s.context_tokens for s in (source, draft) if s is not None and s.context_tokens]
    return min(known, default=None)
