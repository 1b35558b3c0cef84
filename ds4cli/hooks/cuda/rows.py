"""Many short arrays as one, in one kernel.

Going back joins rows that were kept one by one, for every layer. `mx.concatenate` copies each piece
with a kernel of its own, thousands together; here a kernel takes up to 32 pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import mlx.core as mx

from ds4cli.hooks import cuda

# Pieces of one launch: where there are fewer, the last is named again.
PIECES = (8, 32)
# From so many pieces on; `concatenate` takes one kernel for each.
MIN_PIECES = 3
THREADS = 256

_SOURCE = """
  long width = 1;
  for (int i = 0; i < x0_ndim; ++i) width *= x0_shape[i];
  const TX* pieces[] = {%s};
  const long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at < width) y[blockIdx.y * width + at] = pieces[blockIdx.y][at];
"""


def joined(arrays: Sequence[mx.array]) -> mx.array:
    """`arrays`, (1, n, ...) each, one after the other along axis 1; always a copy."""
    if len(arrays) == 1:
        return mx.contiguous(arrays[0])
    if not (cuda.is_on() and pays(arrays)):
        return mx.concatenate(arrays, axis=1)
    most = PIECES[-1]
    parts = [_gathered(arrays[i : i + most]) for i in range(0, len(arrays), most)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def pays(arrays: Sequence[mx.array]) -> bool:
    """Whether the kernel can join them, and with fewer launches."""
    first = arrays[0]
    alike = all(x.shape == first.shape and x.dtype == first.dtype for x in arrays)
    return alike and first.shape[0] == 1 and len(arrays) >= MIN_PIECES


def _gathered(arrays: Sequence[mx.array]) -> mx.array:
    """At most PIECES[-1] arrays of one shape and type, joined by one launch."""
    count, first = len(arrays), arrays[0]
    size = next(n for n in PIECES if n >= count)
    width = prod(first.shape)
    (y,) = _kernel(size)(
        inputs=[*arrays, *[arrays[-1]] * (size - count)],
        template=[("TX", first.dtype)],
        grid=(-(-width // THREADS) * THREADS, count, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1, count * first.shape[1], *first.shape[2:])],
        output_dtypes=[first.dtype],
    )
    return y


@cache
def _kernel(size: int):
    names = [f"x{i}" for i in range(size)]
    return mx.fast.cuda_kernel(
        name=f"ds4cli_join_{size}",
        input_names=names,
        output_names=["y"],
        source=_SOURCE % ", ".join(names),
    )
