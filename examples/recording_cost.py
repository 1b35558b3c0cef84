"""What keeping the last positions reachable costs a reply that never goes back.

python examples/recording_cost.py MODEL [--context TOKENS] [--seconds N]

Two sessions that have read the same text go on in turns, 16 tokens each, one of them without
recording. A machine's speed changes within seconds, so only neighbours are compared.
"""

import argparse
import gc
import math
import random
import statistics
import time

from ds4cli import Engine
from ds4cli.cli import COLLECT_AFTER

TURN_TOKENS = 16
HORIZON_TURNS = 16  # untimed: until what is recorded has its full size


def seconds(session):
    begin = time.perf_counter()
    for _ in session.stream(max_tokens=TURN_TOKENS):
        pass
    return time.perf_counter() - begin


def turns(on, off, run_s):
    """Logarithms of the ratio of times, with and without recording, and the times without."""
    ratios, plain = [], []
    end = None
    while end is None or len(ratios) < 2 or time.perf_counter() < end:
        order = [on, off]
        random.shuffle(order)
        taken = {session: seconds(session) for session in order}
        ratios.append(math.log(taken[on] / taken[off]))
        plain.append(taken[off])
        if end is None and len(ratios) == HORIZON_TURNS:
            ratios, plain, end = [], [], time.perf_counter() + run_s
    return ratios, plain


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=4096, help="tokens read before")
    parser.add_argument("--seconds", type=float, default=300, help="how long to measure")
    given = parser.parse_args()
    gc.set_threshold(COLLECT_AFTER)  # as the commands do
    engine = Engine.load(given.model, drafter="none")
    engine.stop_ids = set()
    on = engine.session()
    on.sync(random.choices(range(engine.token_limit), k=given.context))
    off = on.fork()
    off.recording = False
    ratios, plain = turns(on, off, given.seconds)
    share, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    token_ms = 1e3 * statistics.median(plain) / TURN_TOKENS
    print(f"{len(ratios)} pairs of {TURN_TOKENS} tokens; a token takes {token_ms:.1f} ms; with")
    print(f"recording {100 * share:+.2f} % +- {100 * error:.2f} % (standard error)")


if __name__ == "__main__":
    main()
