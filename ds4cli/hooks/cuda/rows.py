"""Many short arrays as one, in one kernel.

Going back joins rows that were kept one by one, for every layer. `mx.concatenate` copies each piece
with a kernel of its own, thousands together; here a kernel takes up to 32 pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import mlx.core as mx

from ds4cli.hooks.cuda import compiler, switch

# Pieces of one launch: where there are fewer, the last is named again.
PIECES = 32
# From so many pieces on; `concatenate` takes one kernel for each.
MIN_PIECES = 3
THREADS = 256
# By the bytes of an element: it is moved, whatever it is.
_ELEMENTS = {2: "f16", 4: "float", 8: "double"}


def joined(arrays: Sequence[mx.array]) -> mx.array:
    """`arrays`, (1, n, ...) each, one after the other along axis 1; always a copy."""
    if len(arrays) == 1:
        return mx.contiguous(arrays[0])
    if not (switch.is_on() and pays(arrays)):
        return mx.concatenate([*arrays], axis=1)
    parts = [_gathered(arrays[i : i + PIECES]) for i in range(0, len(arrays), PIECES)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def pays(arrays: Sequence[mx.array]) -> bool:
    """Whether the kernel can join them, and with fewer launches."""
    first = arrays[0]
    alike = all(x.shape == first.shape and x.dtype == first.dtype for x in arrays)
    return alike and first.shape[0] == 1 and len(arrays) >= MIN_PIECES


def _gathered(arrays: Sequence[mx.array]) -> mx.array:
    """At most PIECES arrays of one shape and type, joined by one launch."""
    count, first = len(arrays), arrays[0]
    width = prod(first.shape)
    (y,) = mx.fast.precompiled_cuda_kernel(
        name="join",
        compiled_source=_compiled(first.dtype.size),
        inputs=[*arrays, *[arrays[-1]] * (PIECES - count)],
        output_shapes=[(1, count * first.shape[1], *first.shape[2:])],
        output_dtypes=[first.dtype],
        scalars=[width],
        grid=(-(-width // THREADS) * THREADS, count, 1),
        threadgroup=(THREADS, 1, 1),
        ensure_row_contiguous=True,
    )
    return y


@cache
def _compiled(size: int) -> bytes:
    kind = _ELEMENTS[size]
    names = [f"x{i}" for i in range(PIECES)]
    body = f"""
  const {kind}* pieces[] = {{{", ".join(names)}}};
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < width) y[(long long)blockIdx.y * width + at] = pieces[blockIdx.y][at];
"""
    inputs = [f"{kind} {name}" for name in names]
    return compiler.kernel("join", inputs, [f"{kind} y"], ("width",), body)
