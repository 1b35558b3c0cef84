"""Token lists."""

import random

from ds4cli.tokens import common_prefix


def test_common_prefix_against_the_plain_loop():
    """A bisection off by one would re-read, or worse keep, a differing token."""
    rng = random.Random(0)
    for _ in range(300):
        a = [rng.randrange(2) for _ in range(rng.randrange(12))]
        b = a[: rng.randrange(len(a) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(4))]
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        assert common_prefix(a, b) == n
