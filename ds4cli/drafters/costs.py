"""What a model call costs by its rows, and a draft by its length, on this machine.

Prices are in plain tokens: the time that plain decoding takes for one token as it runs here, with
its calls built ahead. A table of them is measured once per model and machine and kept in a file;
every block that runs corrects it. No mlx: a timeline and a sampler are driven from outside.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4cli.atomic import replacing
from ds4cli.settings import MAX_BLOCK_TOKENS

if TYPE_CHECKING:
    from ds4cli.rewind.timeline import Timeline
    from ds4cli.sampling import Sampler

# Rows that are measured, the most telling first: a slow model is given fewer of them. Metal's
# products of quantised weights read those once per 5 rows.
SIZES = (1, 2, 4, 8, 16, MAX_BLOCK_TOKENS, 5, 10, 3, 6, 12, 24)
# Turns in which each size is timed, and calls of it one after the other in each: on CUDA not only
# the very first call of a size is planned anew, but often one that follows calls of other sizes.
TURNS, CALLS = 2, 2
PLAIN_TOKENS = 4  # a turn
BUDGET_S = 2.0
# A first call of a kind may compile for seconds: that is no reason to know less of a fast model,
# but all of it must end some time.
MOST_S = 30.0
# Calls are timed after so many tokens, where what attention costs by the row begins to show, or as
# many as are read in READ_S.
CONTEXT_TOKENS, TRIED_TOKENS = 1024, 64
READ_S = 0.5
# A list is no good where a call is cheaper than one of fewer rows by more than this share, or
# dearer than as many calls of one row by half: it was measured while something else ran.
MOST_FALL, MOST_RISE = 1 / 3, 1.5
# Plain tokens of twice or half what the list says say so, too, once as many were timed, and at
# about the context that it was measured at. Less is what one process differs from the next by on
# some machines, and measuring takes as long as hundreds of tokens.
MOST_OFF, ENOUGH_PLAIN = 2.0, 16.0
# Prices assumed until they are measured: on the high side, so that only guesses that are nearly
# sure are tried. Beyond the sizes that were measured a row is assumed to cost little: a guess that
# is too low is found out.
ASSUMED = {1: 1.1, 2: 1.3, MAX_BLOCK_TOKENS: 3.7}
ASSUMED_SLOPE = 0.05
ASSUMED_WEIGHT, MEASURED_WEIGHT = 0.5, 2.0
# How much a measurement still counts after one more of its kind, or one more block.
PLAIN_DECAY, COST_DECAY = 0.95, 0.99
ORIGIN_WEIGHT = 0.25
# What a draft is taken to cost before one was timed, in plain tokens: a guess of a model that makes
# them one by one, and all of one that makes them at once. Many guesses that are thought to be free
# are what a text that cannot be guessed pays most for.
ASSUMED_GUESS, ASSUMED_DRAFT = 0.3, 0.6
# What a draft that is tried now and then is taken to cost at most, in plain tokens.
MOST_TRIAL = 4.0
# A drafter's first drafts, which are not timed: on a GPU they may compile kernels for seconds.
COMPILING = 2
# How many times what it took before a shape of a call may take, and count as that.
MOST_COLDER = 1.25
# What a file calls the prices of calls for several texts.
ROUNDS = "rounds"
# Blocks until prices are made anew.
SIGHTINGS = 8


# -- measured once ---------------------------------------------------------------------------------


@dataclass
class PriceList:
    """Seconds of a call by its rows; at 0 those of a plain token, one call ahead.

    Empty until it is measured. path: where it is kept; None keeps it in memory only. rounds:
    seconds of a call for several texts, a row each, by their number, as batches have seen them.
    """

    path: Path | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)
    took_s: float = 0.0
    problem: str = ""  # why it could not be kept

    @classmethod
    def kept(cls, folder: Path, key: Mapping[str, str]) -> PriceList:
        """The list that `folder` holds for `key`, or an empty one that will be kept there."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = folder / f"{digest[:32]}.json"
        return cls(path, *_read(path))

    def measure(self, timeline: Timeline, sampler: Sampler, tokens: Sequence[int]) -> None:
        """Time calls on an empty timeline of the model, after a few of `tokens`, and keep that."""
        begin = time.perf_counter()
        self.seconds = measure(timeline, sampler, tokens)
        self.took_s = time.perf_counter() - begin
        self._keep()

    def remember(self, rounds: Mapping[int, float]) -> None:
        """A batch has seen rounds take so long."""
        if rounds:
            self.rounds = {**self.rounds, **rounds}
            self._keep()

    def _keep(self) -> None:
        if self.path is not None:
            self.problem = _write(self.path, {**self.seconds, ROUNDS: self.rounds})

    def is_stale(self, plain: Mean, pos: int, *, runs_ahead: bool = True) -> bool:
        """Whether plain tokens take another time here than when the list was measured. One that
        this process measured is not doubted: twice would be no better."""
        if self.took_s or not self.seconds or plain.weight < ENOUGH_PLAIN or pos > CONTEXT_TOKENS:
            return False
        off = plain.value / self.seconds[0 if runs_ahead else 1]
        return not 1 / MOST_OFF <= off <= MOST_OFF

    @property
    def notice(self) -> str:
        """What to say of a list that was just measured."""
        took = f"{len(self.seconds) - 1} sizes cost here, once, in {self.took_s:.1f} s"
        kept = f"; it cannot be kept: {self.problem}" if self.problem else ""
        return f"measured what calls of {took}{kept}"


def _read(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of calls and of rounds. A file that is missing, torn or nonsense counts as none: it
    is written anew."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        rounds = _numbers(known.pop(ROUNDS, {}))
        seconds = _numbers(known)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}, {}
    is_whole = {0, 1} <= seconds.keys() and is_sound(seconds)
    return seconds if is_whole else {}, rounds


def _numbers(known: Mapping[str, Any]) -> dict[int, float]:
    """ValueError for what is no list of times."""
    found = {int(count): float(seconds) for count, seconds in known.items()}
    if not all(count >= 0 and 0 < s < math.inf for count, s in found.items()):
        raise ValueError("no times")
    return found


def is_sound(seconds: Mapping[int, float]) -> bool:
    """Whether calls cost more with more rows, and less than one by one."""
    highest = 0.0
    for rows in sorted(rows for rows in seconds if rows):
        if not (1 - MOST_FALL) * highest <= seconds[rows] <= MOST_RISE * rows * seconds[1]:
            return False
        highest = max(highest, seconds[rows])
    return True


def _write(path: Path, known: Mapping[Any, Any]) -> str:
    """Whole or not at all; returns why it could not be, and then the next run measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(known), encoding="utf-8")
    except OSError as error:
        return str(error)
    return ""


def measure(
    timeline: Timeline,
    sampler: Sampler,
    tokens: Sequence[int],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Seconds by rows, as many sizes as fit the budget; 0 and 1 always.

    All sizes are timed in turns, and the least that was seen of each counts: what the first call of
    a size pays for is in none, nor what a program took that ran beside this for a while. A size
    that still seems dearer than a longer one is left out.
    """
    last = clock() + MOST_S
    tokens = list(tokens[:CONTEXT_TOKENS])
    _read_context(timeline, tokens, clock)
    turns = [_first_turn(timeline, sampler, tokens, (budget_s, last), clock)]
    while len(turns) < TURNS and clock() < last:
        turns.append({rows: _seconds(timeline, sampler, tokens, rows, clock) for rows in turns[0]})
    return _undisturbed({rows: min(turn[rows] for turn in turns) for rows in sorted(turns[0])})


def _undisturbed(seconds: Mapping[int, float]) -> dict[int, float]:
    """Without sizes that would spoil the list: on a machine where some always seem to, each process
    measured anew."""
    longer, found = math.inf, {}
    for rows in sorted(seconds, reverse=True):
        if rows < 2 or (1 - MOST_FALL) * seconds[rows] <= longer:
            found[rows] = seconds[rows]
            longer = min(longer, seconds[rows])
    return dict(sorted(found.items()))


def _first_turn(
    timeline: Timeline,
    sampler: Sampler,
    tokens: list[int],
    limits: tuple[float, float],
    clock: Callable[[], float],
) -> dict[int, float]:
    """The sizes that fit, and a plain token at 0."""
    left, last = limits
    taken: dict[int, float] = {}
    for rows in SIZES:
        expected = taken.get(1, 0.0) * (1 + ASSUMED_SLOPE * rows)
        if TURNS * CALLS * expected > left or (taken and clock() > last):
            break
        taken[rows] = _seconds(timeline, sampler, tokens, rows, clock)
        left -= TURNS * CALLS * taken[rows]
    return {**taken, 0: _seconds(timeline, sampler, tokens, 0, clock)}


def _seconds(
    timeline: Timeline, sampler: Sampler, tokens: list[int], rows: int, clock: Callable[[], float]
) -> float:
    """Of a call of so many rows; 0 for a plain token."""
    if not rows:
        return _plain_seconds(timeline, sampler, tokens[:1], clock)
    feed = (tokens * rows)[:rows]
    return min(_call_seconds(timeline, sampler, feed, clock) for _ in range(CALLS))


def _read_context(timeline: Timeline, tokens: list[int], clock: Callable[[], float]) -> None:
    """Some tokens for whatever is compiled, some to see how fast it goes, then as many as fit."""
    timeline.sync(tokens[:TRIED_TOKENS])
    begin, tried = clock(), tokens[TRIED_TOKENS : 2 * TRIED_TOKENS]
    if tried:
        timeline.sync(tokens[: 2 * TRIED_TOKENS])
        token_s = max(1e-6, (clock() - begin) / len(tried))
        timeline.sync(tokens[: 2 * TRIED_TOKENS + int(READ_S / token_s)])


def _call_seconds(
    timeline: Timeline, sampler: Sampler, feed: list[int], clock: Callable[[], float]
) -> float:
    """A block whose last guess is wrong, as most are: so the way back is in the price."""
    begin = clock()
    rows = timeline.feed(feed)
    picks = sampler.pick(rows, timeline.pos + 1, [*timeline.tokens, *feed])
    timeline.evaluate(picks)
    picks.tolist()
    timeline.commit(max(1, len(feed) - 1))
    return clock() - begin


def _plain_seconds(
    timeline: Timeline, sampler: Sampler, token: list[int], clock: Callable[[], float]
) -> float:
    """A token of plain decoding, the next call being built while this one runs."""
    picks = [_open(timeline, sampler, token)]
    taken, begin = [], clock()
    for _ in range(PLAIN_TOKENS):
        picks.append(_open(timeline, sampler, picks[-1]))
        picks[-2].item()
        timeline.commit(1)
        taken.append(clock() - begin)
        begin = clock()
    timeline.abort()
    return statistics.median(taken[1:])


def _open(timeline: Timeline, sampler: Sampler, token: Any) -> Any:
    rows = timeline.feed(token)
    pick = sampler.pick(rows, timeline.pos + timeline.open_blocks, ())
    timeline.evaluate(pick, wait=False)
    return pick


# -- corrected while running -----------------------------------------------------------------------


class CallCosts:
    """Prices of calls by their rows, in plain tokens, and the rate at which the session runs.

    What is seen of a size is mixed with what the list says of it, times the factor by which the
    list was off of late. All are relative to plain decoding, which grows with the context as well.
    rate: tokens that the session makes in the time of a plain one; at least 1. prices: of calls of
    1, 2, ... MAX_BLOCK_TOKENS rows; they never fall, and are made anew after some blocks only.
    slope: of one row more, over all sizes.
    is_measured: whether there is a list of this machine. known: whether plain decoding was timed:
    nothing can be said to pay before.
    """

    def __init__(self) -> None:
        self.plain = Mean(PLAIN_DECAY)  # seconds of a token
        self.rate = 1.0
        self.is_measured = False
        self._listed = _line(ASSUMED)
        self._listed_weight = ASSUMED_WEIGHT
        self._seen: dict[int, Mean] = {}
        self._warm = Warm()
        self._off = Mean(COST_DECAY)
        self._tokens = self._time = 0.0  # both fading; the time in plain tokens
        self._first_s = 0.0  # what the first token of this run took
        self._sightings = 0
        self.known = False
        self._price_again()

    def use(self, seconds: Mapping[int, float], *, runs_ahead: bool = True) -> None:
        """Go by a measured list from here on. runs_ahead: whether plain decoding does."""
        plain = seconds[0 if runs_ahead else 1]
        prices = {rows: max(1.0, s / plain) for rows, s in seconds.items() if rows}
        self._listed = _line(_extended(prices))
        self._listed_weight, self.is_measured = MEASURED_WEIGHT, True
        self._off = Mean(COST_DECAY)
        if not self.known:
            self._assume_plain(plain)
        self._price_again()

    def price(self, rows: int) -> float:
        """A call of 1 to MAX_BLOCK_TOKENS rows, in plain tokens."""
        return self.prices[min(rows, MAX_BLOCK_TOKENS) - 1]

    def observe_plain(self, seconds: float, *, first: bool = False, last: bool = False) -> None:
        """A token of plain decoding; first, last: of a run that goes one call ahead.

        The first token waits for most of the second call as well, of which the last one then has
        little left to wait for: what the run costs beyond its tokens is in both together.
        """
        if not first and not last:
            self.plain.add(seconds)
            self.known = True
        elif not self.known:
            self._assume_plain(seconds / self.price(1))
        elif first and last:
            self._see(1, seconds / self.plain.value)
        elif last:
            self._see(1, max(1.0, (self._first_s + seconds) / self.plain.value - 1))
        if first:
            self._first_s = seconds
        self._run(1, seconds)

    def _assume_plain(self, seconds: float) -> None:
        """A first idea of what a plain token takes."""
        self.plain.add(seconds)
        self.plain.weight /= 4
        self.known = True

    def observe(self, rows: int, kept: int, seconds: float) -> None:
        """A block of `rows` rows took `seconds` and committed `kept` tokens."""
        if self.known:
            self._see(rows, seconds / self.plain.value)
            self._run(kept, seconds)

    def spend(self, seconds: float) -> None:
        """Time that went by beside the calls, for drafting."""
        self._run(0, seconds)

    def _run(self, kept: int, seconds: float) -> None:
        if self.known:
            fade = COST_DECAY if kept else 1.0
            self._tokens = self._tokens * fade + kept
            self._time = self._time * fade + min(seconds / self.plain.value, 100.0)
            self.rate = max(1.0, self._tokens / self._time)

    def _see(self, rows: int, price: float) -> None:
        warm = self._warm.of(rows, price)
        if warm is None:
            return
        price = self._seen.setdefault(rows, Mean(1.0)).add(warm)
        if rows > 1:
            self._off.add(price / self._listed[rows - 1])
        self._sightings += 1
        if self._sightings < SIGHTINGS or self._sightings % SIGHTINGS == 0:
            for mean in self._seen.values():
                mean.weight *= COST_DECAY**SIGHTINGS
            self._price_again()

    def _price_again(self) -> None:
        off, weight = self._off, self._listed_weight
        factor = (off.weight * off.value + 1) / (off.weight + 1)
        curve = [price * factor for price in self._listed]
        curve[0] = self._listed[0]
        for rows, seen in self._seen.items():
            price = curve[rows - 1]
            curve[rows - 1] = (seen.weight * seen.value + weight * price) / (seen.weight + weight)
        self.prices = list(accumulate(curve, max))
        self.slope = (self.prices[-1] - self.prices[0]) / (MAX_BLOCK_TOKENS - 1)


def _extended(prices: dict[int, float]) -> dict[int, float]:
    """With a price for the most rows, if it is but a guess."""
    last = max(prices)
    more = MAX_BLOCK_TOKENS - last
    return {MAX_BLOCK_TOKENS: prices[last] + more * ASSUMED_SLOPE, **prices}


def _line(known: Mapping[int, float]) -> list[float]:
    """The values for 1, 2, ... MAX_BLOCK_TOKENS rows, on straight lines between the known ones."""
    return [between(known, rows) for rows in range(1, MAX_BLOCK_TOKENS + 1)]


def between(known: Mapping[int, float], rows: int) -> float:
    """The value for so many rows, on a straight line between the two known ones next to it."""
    sizes = sorted(known)
    at = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return known[low] + (known[high] - known[low]) * (rows - low) / (high - low)


class DraftTimes:
    """Seconds that a drafter takes by the length of its draft: a line through what was seen.

    line: what a draft takes, and each guess of it; 0 before anything is known. While all drafts
    were of one length it starts at the origin: a short draft that is thought too cheap is tried,
    and found out. at_once: a long draft takes no longer than a short one.
    """

    def __init__(self, *, at_once: bool = False):
        self._at_once = at_once
        self.line = (0.0, 0.0)
        self._tries = 0
        self._trial_s = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # fading sums

    def tried(self, seconds: float) -> None:
        """A draft that is tried now and then took `seconds`, with reading what was written since
        the last one."""
        self._trial_s = seconds

    def trial(self, plain: float, guesses: int) -> float:
        """What the next such one is taken to take, in plain tokens of so many seconds: as long as
        the last one, but no more than `MOST_TRIAL`, for that may have compiled, or read a prompt.
        """
        fixed, each = self.prices(plain)
        assumed = fixed + guesses * each
        if not self._trial_s:
            return assumed
        last = min(self._trial_s / plain, MOST_TRIAL)
        return last if any(self.line) else max(last, assumed)

    def observe(self, length: int, seconds: float) -> None:
        """A draft of `length`, right behind another one, took `seconds`."""
        self._tries += 1
        if self._tries > COMPILING:
            self._add(1 if self._at_once else length, seconds)

    def _add(self, length: int, seconds: float) -> None:
        expected = self.seconds(length)
        if 2 * seconds < expected:
            self._n = self._x = self._y = self._xx = self._xy = 0.0  # those before compiled, too
        elif self._n > 3:
            seconds = min(seconds, 2 * expected)
        self._n = COST_DECAY * self._n + 1
        self._x = COST_DECAY * self._x + length
        self._y = COST_DECAY * self._y + seconds
        self._xx = COST_DECAY * self._xx + length * length
        self._xy = COST_DECAY * self._xy + length * seconds
        n = self._n + ORIGIN_WEIGHT
        x, y = self._x / n, self._y / n
        each = (self._xy - n * x * y) / (self._xx - n * x * x)
        each = min(max(each, 0.0), y / x)
        self.line = (y / x, 0.0) if self._at_once else (y - each * x, each)

    def prices(self, plain: float) -> tuple[float, float]:
        """What a draft takes, and each guess of it, in plain tokens of so many seconds."""
        fixed, each = self.line
        if plain and (fixed or each):
            return fixed / plain, each / plain
        return (ASSUMED_DRAFT, 0.0) if self._at_once else (0.0, ASSUMED_GUESS)

    def seconds(self, length: int) -> float:
        """Expected for a draft of `length`."""
        fixed, each = self.line
        return fixed + length * each


class Warm:
    """What counts of the times that one shape of a call takes: its first says nothing, and a later
    one not much more than the one before. So what is compiled or planned once is in no price."""

    def __init__(self) -> None:
        self._last: dict[Hashable, float] = {}

    def __contains__(self, shape: Hashable) -> bool:
        return shape in self._last

    def of(self, shape: Hashable, value: float) -> float | None:
        """What counts of `value`; None for nothing."""
        before, self._last[shape] = self._last.get(shape), value
        return None if before is None else min(MOST_COLDER * before, value)


class Mean:
    """A moving average: what was added counts `decay` times as much after the next."""

    def __init__(self, decay: float):
        self.value = self.weight = 0.0
        self._decay = decay

    def add(self, value: float) -> float:
        """Take in `value`, cut where it is far out; returns what was taken."""
        self.weight = self.weight * self._decay + 1
        if self.weight > 3:
            value = min(max(value, self.value / 2), 2 * self.value)
        self.value += (value - self.value) / self.weight
        return value
