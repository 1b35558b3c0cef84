"""A model folder's tokenizer and chat template, in mlx-lm's wrapper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_lm.utils import load_tokenizer as load_wrapped

from ds4cli.errors import UsageError
from ds4cli.models import config as configs
from ds4cli.models.mlx_lm import inner_tokenizer
from ds4cli.models.source import Source, needs_code

if TYPE_CHECKING:
    from ds4cli.text.tokenizer import Vocabulary


def load_tokenizer(source: Source, template: str | None = None) -> Any:
    """The folder's tokenizer, wrapped by mlx-lm; `template` in place of its own.

    UsageError for one that needs code from the folder: unless told not to, transformers asks on
    standard input whether to run it, and piped text would answer.
    """
    _refuse_templates_elsewhere(source)
    eos = configs.end_tokens(source.config)
    extra: dict[str, bool | str] = {"trust_remote_code": False}
    try:
        template = template or _template_beside(source)
        if template is not None:
            extra["chat_template"] = template
        loaded = load_wrapped(source.folder, extra, eos_token_ids=eos or None)
    except Exception as error:  # transformers raises many kinds
        if "trust_remote_code" in str(error):
            raise needs_code(f"the tokenizer of `{source.name}`", "auto_map") from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"`{source.name}` has no usable tokenizer: {first}") from None
    _mend_decoder(inner_tokenizer(loaded))
    return loaded


def end_also(tokenizer: Any, texts: Sequence[str]) -> None:
    """Let more tokens end a reply. UsageError for a text that is not one token."""
    for text in texts:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        if len(ids) != 1:
            raise UsageError(
                f"`--extra-eos-token`: `{text}` is no token of this model, but {len(ids)}",
                "`--stop` ends a reply before any text",
            )
        tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, ids[0]}


def _template_beside(source: Source) -> Any:
    """The template of chat_template.json, where no file that transformers reads has one."""
    path, config = source.folder / "chat_template.json", source.folder / "tokenizer_config.json"
    known = config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))
    if known or not path.is_file() or (source.folder / "chat_template.jinja").is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["chat_template"]


def _mend_decoder(tokenizer: Any) -> None:
    """Some conversions give a byte-level vocabulary a SentencePiece decoder, which prints `Ċ`."""
    newline = tokenizer.get_vocab().get("Ċ")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if newline is None or backend is None or tokenizer.decode([newline]) != "Ċ":
        return
    from tokenizers import decoders

    backend.decoder = decoders.ByteLevel()


def _refuse_templates_elsewhere(source: Source) -> None:
    """UsageError for a template that links out of its folder: any file of the user's could become
    part of the prompt. In the hub's cache files are links to `blobs` two folders up."""
    homes = [source.folder.resolve()]
    blobs = source.folder.parent.parent / "blobs"
    if source.folder.parent.name == "snapshots" and not blobs.is_symlink():
        homes.append(blobs.resolve())
    patterns = ("*.jinja", "*/*.jinja", "chat_template.json")
    for path in (path for pattern in patterns for path in source.folder.glob(pattern)):
        target = path.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise UsageError(
                f"the chat template `{path}` is a link to `{target}`, outside its model's folder",
                "put a copy of the file there if you trust it",
            )


def check_vocabulary(source: Source, vocabulary: Vocabulary) -> list[str]:
    """Notices about a tokenizer that knows more ids than its model. UsageError where those are not
    just special tokens that were added: then the two do not belong together.
    """
    size, ids = source.vocab_size, vocabulary.token_limit
    if size is None or ids <= size:
        return []
    base = getattr(vocabulary.tokenizer, "vocab_size", ids)
    if base > size:
        raise UsageError(
            f"the tokenizer of `{source.name}` has `{base}` tokens, its model only `{size}`",
            "use the tokenizer files that came with these weights",
        )
    return [f"`{source.name}` has {size} token ids, its tokenizer {ids}: it cannot read the rest"]


def check_same_tokenizer(target: Any, draft: Any, draft_name: str) -> None:
    """A draft model must speak the target's tokens: compared by content, padding apart."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = sorted(
        (i, t) for t, i in (ours.items() ^ theirs.items()) if ours.get(t) != theirs.get(t)
    )
    token_id, token = differing[0]
    raise UsageError(
        f"draft model `{draft_name}` has another tokenizer: token `{token}` is "
        f"{ours.get(token, 'missing')} in the target, {theirs.get(token, 'missing')} in the draft",
        f"{len(differing)} entries differ, the first at id {token_id}; "
        "use a draft of the same family",
    )
