"""Token lists. Pure; no mlx."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix, of tokens or of anything else in order."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:  # slices compare in C; a bisection beats a Python loop over tokens
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
