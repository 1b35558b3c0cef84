"""DFlash: block diffusion. All masked slots of a block are named at once (arXiv:2602.06036).

Slot i names the token at the anchor's position + i; the anchor's own slot is not read.
"""

from __future__ import annotations

from typing import Any

from ds4cli.drafters import block_config
from ds4cli.drafters.block import BlockDrafter, BlockHead


def check(config: dict[str, Any], target_config: dict[str, Any], name: str) -> None:
    """UsageError naming the field in which the head differs from its target, or is unknown."""
    block_config.check(config, target_config, "dflash", name)


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Fields that are ignored without knowing what they mean."""
    return block_config.unknown_fields(config)


class DFlashHead(BlockHead):
    """The backbone alone."""

    kind = "dflash"


class DFlashDrafter(BlockDrafter):
    """Drafts with a `DFlashHead`."""

    name = "dflash"
