"""Every drafter, once: its name, what it guesses from, what it needs, and where its code is.

The choices and contradictions of the settings, what an engine looks for and loads, `make` and the
table in README follow from this list. It stands below the settings and imports no other
module of drafters.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ds4cli.errors import UsageError

# Where what a drafter needs comes from: the text so far and that of others, a whole model that is
# named, a head in a folder that is named or lies in the target's, a head among the target's own
# weights.
NOTHING, TEXT, MODEL, FOLDER, WEIGHTS = "nothing", "text", "model", "folder", "weights"
AUTO = "auto"
DRAFT_MODEL = "`--draft-model`, or a folder `{name}/` in the model's own"


@dataclass(frozen=True)
class Kind:
    """One drafter. module: has the class `drafter` and, of a head, the class `head` with `load`,
    and `check`; of a head among the target's weights `find` as well.
    """

    name: str
    guesses: str
    needs: str
    source: str
    module: str
    drafter: str
    head: str = ""

    @property
    def is_head(self) -> bool:
        return self.source in (FOLDER, WEIGHTS)

    @property
    def may_be_named(self) -> bool:
        """Whether `--draft-model` can name what it needs."""
        return self.source in (MODEL, FOLDER)

    def part(self, name: str) -> Any:
        """A name of its module, which is imported now."""
        return getattr(import_module(self.module), name)


# Heads in the order in which they are preferred where a target has several.
KINDS = (
    Kind("none", "nothing", "nothing", NOTHING, "ds4cli.drafters.drafter", "Drafter"),
    Kind(
        "ngram",
        "what followed the longest match in prompts, replies and tool results, here or elsewhere",
        "nothing",
        TEXT,
        "ds4cli.drafters.ngram",
        "NgramDrafter",
    ),
    Kind(
        "model",
        "a small model; hybrids too, its state goes back like the target's",
        "`--draft-model` with the same tokenizer",
        MODEL,
        "ds4cli.drafters.model",
        "ModelDrafter",
    ),
    Kind(
        "dspark",
        "a DSpark head: a block in one pass, Markov and confidence heads",
        DRAFT_MODEL.format(name="dspark"),
        FOLDER,
        "ds4cli.drafters.dspark",
        "DSparkDrafter",
        "DSparkHead",
    ),
    Kind(
        "dflash2",
        "a DFlash 2 head: a block in one pass, chosen among candidates one after another",
        DRAFT_MODEL.format(name="dflash2"),
        FOLDER,
        "ds4cli.drafters.dflash2",
        "DFlash2Drafter",
        "DFlash2Head",
    ),
    Kind(
        "dflash",
        "a DFlash head: a block in one pass",
        DRAFT_MODEL.format(name="dflash"),
        FOLDER,
        "ds4cli.drafters.dflash",
        "DFlashDrafter",
        "DFlashHead",
    ),
    Kind(
        "eagle3",
        "an EAGLE-3 head: token by token, from three of the target's layers",
        DRAFT_MODEL.format(name="eagle3"),
        FOLDER,
        "ds4cli.drafters.eagle3",
        "Eagle3Drafter",
        "Eagle3Head",
    ),
    Kind(
        "mtp",
        "the multi-token prediction head of Qwen3-Next, Qwen3.5, GLM-4.x, DeepSeek V3 and MiMo",
        "its tensors in the model's own folder",
        WEIGHTS,
        "ds4cli.drafters.mtp",
        "MtpDrafter",
        "MtpHead",
    ),
)
# Methods that are recognised and not built: what the architecture, model_type and alike say.
OTHERS = {
    "peagle": "P-EAGLE",
    "medusa": "Medusa",
    "mlp_speculator": "MLP speculator",
    "mlpspeculator": "MLP speculator",
    "hydra": "Hydra",
    "gemma4_assistant": "Gemma 4 assistant",
    "gemma4assistant": "Gemma 4 assistant",
    "domino": "Domino",
    "eagle": "EAGLE 1 or 2",
}
CHOICES = (AUTO, *(kind.name for kind in KINDS))
HEADS = tuple(kind for kind in KINDS if kind.is_head)


def named(name: str) -> Kind:
    """The drafter of this name; UsageError for one that is not known."""
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise UsageError(f"there is no drafter `{name}`", f"choose from {', '.join(CHOICES)}")
