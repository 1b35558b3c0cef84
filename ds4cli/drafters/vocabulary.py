"""A head's own, smaller vocabulary: which ids of the target it stands for."""

from __future__ import annotations

import mlx.core as mx

from ds4cli.arrays import integers
from ds4cli.errors import ModelError


def target_ids(offsets: mx.array | None, mask: mx.array | None, size: int, most: int) -> mx.array:
    """The target's id of every draft id, int32 (size,), all below `most`: an id that is not would
    be written beyond the end of a row.

    offsets: the tensor `d2t`, the target's id less the draft id. mask: `t2d`, which of the target's
    ids the head knows, in order.
    """
    if offsets is not None:
        ids = [i + offset for i, offset in enumerate(_whole(offsets, "d2t"))]
    elif mask is not None:
        ids = [i for i, is_in in enumerate(_whole(mask, "t2d")) if is_in]
    else:
        raise ModelError("the head has a vocabulary of its own but no tensor `d2t` or `t2d`")
    name = "t2d" if offsets is None else "d2t"
    if len(ids) != size:
        raise ModelError(f"tensor `{name}` names {len(ids)} ids, `draft_vocab_size` is {size}")
    beyond = [i for i in ids if not 0 <= i < most]
    if beyond:
        raise ModelError(
            f"tensor `{name}` names id {beyond[0]}, the target has ids 0 to {most - 1}"
        )
    return mx.array(ids, mx.int32)


def _whole(x: mx.array, name: str) -> list[int]:
    if x.ndim != 1 or mx.issubdtype(x.dtype, mx.floating):
        raise ModelError(f"tensor `{name}` is {x.dtype} {x.shape}, not a list of whole numbers")
    return integers(x)


def spread(rows: mx.array, ids: mx.array, size: int) -> mx.array:
    """Logits (n, draft vocabulary) over the target's ids, so that both see the same noise."""
    wide = mx.full((len(rows), size), -mx.inf, rows.dtype)
    wide[:, ids] = rows
    return wide
