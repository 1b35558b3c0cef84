"""Whose guesses to feed, and how many: as many as pay, here and now.

A guess pays when the chance that it is kept is worth more tokens than its row (and its drafting)
costs in time at the rate the session runs at anyway: the rule that maximises tokens per second in
the long run. Chances are learnt by comparing every proposal with the text that followed, whether it
was fed or not, for each drafter, kind of text and confidence; costs by timing what runs. Output
never depends on any of it. No mlx.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from operator import mul

from ds4cli.drafters.costs import CallCosts, DraftTimes
from ds4cli.drafters.drafter import Drafter
from ds4cli.settings import Settings

CHANCE_DECAY = 0.97
# The same for what was not reached: an old verdict on later guesses must not keep them from trial.
UNSEEN_DECAY = 0.995
# Standard deviations that a first guess is taken to be better than what was seen of it: parking
# after a little bad luck ends what would show the mistake.
OPTIMISM = 0.45
# Share of the time spent on trying a costly drafter that does not pay: less after each try in vain.
MOST_PROBING, LEAST_PROBING, LESS_PROBING = 0.02, 0.002, 0.9
# How much the luck of a guess still counts after the next one, where cold, warm, hot begin, and
# for how many tokens it is remembered: a drafter that is not asked has no luck that could change.
HEAT_DECAY = 0.8
HEATS = (0.4, 0.75)
HEAT_TOKENS = 16
# What trying may cost, in plain tokens: at first, and at most where guesses were right of late.
FIRST_CREDIT, MOST_CREDIT = 4.0, 5.0
# Chance that a first guess is kept, before any was seen, by the bit length of the confidence, from
# one bit on; a drafter that is not confident has its own `assumed_chance`.
ASSUMED_CHANCE = (0.15, 0.35, 0.6, 0.75, 0.85, 0.9)
ASSUMED_WEIGHT = 2.0
LATER_WEIGHT = 16.0
TAIL_WEIGHT = 8
# Expected gain, in tokens a block, below which plain decoding is kept: less is within the noise.
WORTHWHILE = 0.02
ENOUGH_TRIES = 6
MAX_OPEN = 8
# Blocks of a session until it is worth measuring what calls cost.
MEASURED_AFTER = 48


class DraftPolicy:
    """Asks a drafter's parts for guesses and decides whose to feed, and how many.

    known: what earlier sessions learnt of the same drafters. costs: what calls cost; `costs.use`
    gives it a measured list. parked: blocks where guesses were to be had and none was worth its
    row. source: the part whose guesses were last given. clock: to time the drafting by.
    """

    def __init__(
        self,
        settings: Settings,
        known: Experience | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.costs = CallCosts()
        self.parked = 0
        self.source = ""
        self._clock = clock
        self._mode = settings.speculate
        self._pinned = settings.num_draft_tokens
        self._known = known or Experience()
        self._asked: set[str] = set()  # costly parts that gave a proposal here
        self._open: list[_Proposal] = []
        self._next_size = 0
        self._blocks = 0
        self._tempted = False  # there were guesses

    @property
    def chooses(self) -> bool:
        """Whether the number of guesses is decided here, by what calls cost."""
        return self._pinned is None and self._mode != "never"

    @property
    def runs_ahead(self) -> bool:
        """Whether plain tokens may run one call ahead; `always` would miss guesses by that."""
        return self._mode != "always"

    @property
    def wants_prices(self) -> bool:
        """Whether it is worth measuring what calls cost now, if nobody knows it."""
        return self.chooses and self._tempted and self._blocks >= MEASURED_AFTER

    def draft(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str = "prose"
    ) -> list[int]:
        """The guesses to feed after `tokens`, at most `room`. Call it once a block, then observe.

        region: what kind of text this is ("tool" inside a tool call); chances are kept apart.
        """
        offer = self._choose(drafter, tokens, room, region)
        return [] if offer is None else self._give(offer, tokens)

    def wants(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str = "prose"
    ) -> bool:
        """Whether to stop running ahead, to feed guesses from the next token on.

        Called in place of `draft` where the last of `tokens` is being read by a call of its own.
        """
        # After such a block the run ahead has to be begun anew, which costs a part of a token.
        restart = self.costs.rate * (self.costs.price(1) - 1)
        return self._choose(drafter, tokens, room, region, restart) is not None

    def observe(self, rows: int, kept: int, seconds: float) -> None:
        """A block of `rows` tokens took `seconds`, without drafting, and committed `kept`."""
        self._count(kept)
        self.costs.observe(rows, kept, seconds)

    def observe_plain(self, seconds: float, *, first: bool = False, last: bool = False) -> None:
        """A block without guesses; first, last: those that begin and end a run ahead."""
        self._count(1)
        self.costs.observe_plain(seconds, first=first, last=last)

    def _count(self, kept: int) -> None:
        self._next_size += kept
        self._blocks += 1

    # -- deciding ----------------------------------------------------------------------------------

    def _choose(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str, restart: float = 0.0
    ) -> _Offer | None:
        """The offer to take, if any. restart: what taking one costs besides, in tokens."""
        self._compare(tokens)
        outside = self._mode == "tools" and region != "tool"
        if room <= 0 or outside or self._mode == "never":
            return None
        if self._pinned is not None:
            room = min(room, self._pinned)
        offers = [self._offer(part, tokens, room, region) for part in drafter.parts]
        offers = [offer for offer in offers if offer is not None]
        if not offers:
            return None
        self._tempted = True
        best = max(offers, key=lambda offer: offer.gain)
        if not self.chooses:
            return best
        if best.k and self.costs.known and best.gain > restart:
            best.place.rest()
            others = [offer for offer in offers if offer is not best]
            return self._due_probe(others, room, best.gain) or best
        if self._mode == "always":
            best.k = max(1, best.k)
            return best
        probe = self._due_probe(offers, room)
        self.parked += probe is None
        return probe

    def _offer(self, part: Drafter, tokens: Sequence[int], room: int, region: str) -> _Offer | None:
        """What a part has to offer: a free one is asked, of a costly one all is expectation."""
        place = self._known.place(part, region)
        place.visit(len(tokens))
        room = min(room, part.max_drafts)
        if not part.is_free:
            return self._valued(_Offer(part, place, place.chances, None), room)
        drafts = part.propose(tokens, room)
        if not drafts:
            return None
        chances = place.sure(part.confidence)
        self._watch(tokens, drafts, place, part.confidence)
        return self._valued(_Offer(part, place, chances, drafts), len(drafts))

    def _valued(self, offer: _Offer, most: int) -> _Offer:
        """With the best number of guesses and what they gain; pinned: all, and how many hold."""
        if self._pinned is None:
            asked = offer.part if offer.drafts is None else None
            offer.k, offer.gain = self._best(offer.chances, most, asked)
        else:
            alive = zip(offer.chances.survival(), range(most), strict=False)
            offer.k, offer.gain = most, sum(share for share, _ in alive)
        return offer

    def _best(self, chances: Chances, most: int, asked: Drafter | None) -> tuple[int, float]:
        """The number of guesses with the largest expected gain over a plain token, and that gain
        in tokens. asked: whom they would be drafted by, if that is still to be done."""
        most = min(most, chances.reach)
        rate, plain = self.costs.rate, self.costs.plain.value or 1.0
        best, best_gain, kept = 0, WORTHWHILE, 0.0
        for k, alive in enumerate(chances.survival(), 1):
            if k > most:
                break
            kept += alive
            price = self.costs.price(1 + k) - 1
            if asked is not None:
                price += self._known.draft_seconds(asked, k) / plain
            gain = kept - rate * price
            if gain > best_gain:
                best, best_gain = k, gain
            if gain + alive * (most - k) <= best_gain:
                break  # not even if all the others were kept and free
        return best, best_gain

    def _due_probe(self, offers: list[_Offer], room: int, forgone: float = 0.0) -> _Offer | None:
        """Now and then a few guesses of a costly part that did not pay, or that another one beat,
        which would gain `forgone` tokens: ever more rarely."""
        for offer in offers if self.costs.known else ():
            if offer.drafts is not None:
                continue
            price = forgone / self.costs.rate + self._probe_price(offer.part)
            if offer.place.is_probe_due(price):
                offer.k, offer.is_probe = min(offer.part.first_reach, room), True
                return offer
        return None

    def _probe_price(self, part: Drafter) -> float:
        drafting = self._known.draft_seconds(part, part.first_reach) / self.costs.plain.value
        return self.costs.price(1 + part.first_reach) - 1 + drafting

    def _give(self, offer: _Offer, tokens: Sequence[int]) -> list[int]:
        """The guesses to feed. A costly part is asked now, and how sure it is counts as well."""
        part, drafts, k = offer.part, offer.drafts, offer.k
        if offer.is_probe:
            offer.place.begin_probe()
        if drafts is None:
            drafts = self._ask(part, tokens, k)
            chances = offer.place.sure(part.confidence)
            self._watch(tokens, drafts, offer.place, part.confidence)
            if chances.is_known and self._mode != "always" and self.chooses and not offer.is_probe:
                k = self._best(chances, len(drafts), None)[0]
        self.source = part.name
        return drafts[:k]

    def _ask(self, part: Drafter, tokens: Sequence[int], n: int) -> list[int]:
        begin = self._clock()
        drafts = part.propose(tokens, n)
        took = self._clock() - begin
        if part.name in self._asked:
            self._known.observe_draft(part, n, took)
        self._asked.add(part.name)  # a session's first draft reads its prompt: not counted
        self.costs.spend(took)
        return drafts

    # -- learning from what followed ---------------------------------------------------------------

    def _watch(
        self, tokens: Sequence[int], drafts: list[int], place: _Place, confidence: int
    ) -> None:
        if drafts and len(self._open) < MAX_OPEN:
            self._open.append(_Proposal(len(tokens), drafts, place, place.about(confidence)))

    def _compare(self, tokens: Sequence[int]) -> None:
        """Learn from the proposals whose outcome `tokens` shows."""
        if len(tokens) != self._next_size:
            self._open = []  # the session went elsewhere: what follows here is not their outcome
            self._known.move()
        self._next_size = len(tokens)
        worth = 1 / self.costs.rate
        self._open = [proposal for proposal in self._open if not proposal.settle(tokens, worth)]


class Experience:
    """What is known of drafters: how often they are right, by kind of text, and how long they take.

    The sessions of an engine share it, so a short reply goes by what earlier ones showed.
    """

    def __init__(self):
        self._places: dict[tuple[str, str], _Place] = {}
        self._everywhere: dict[str, Chances] = {}
        self._times: dict[str, DraftTimes] = {}

    def place(self, part: Drafter, region: str) -> _Place:
        """Of a part in one kind of text. A new one goes by how the part does in all others."""
        if (part.name, region) not in self._places:
            fresh = Chances(part.assumed_chance, part.first_reach)
            everywhere = self._everywhere.setdefault(part.name, fresh)
            self._places[part.name, region] = _Place(part, everywhere)
        return self._places[part.name, region]

    def draft_seconds(self, part: Drafter, length: int) -> float:
        """Expected for a draft of `length`; 0 before anything is known."""
        return self._times_of(part).seconds(1 if part.drafts_at_once else length)

    def observe_draft(self, part: Drafter, length: int, seconds: float) -> None:
        self._times_of(part).observe(1 if part.drafts_at_once else length, seconds)

    def _times_of(self, part: Drafter) -> DraftTimes:
        return self._times.setdefault(part.name, DraftTimes())

    def move(self) -> None:
        """The session went elsewhere, or another one goes on."""
        for place in self._places.values():
            place.move()


class _Place:
    """What is known of one drafter in one kind of text, and when it is to be tried again.

    Text comes in stretches that can be guessed and others that cannot. A drafter that says how sure
    it is sees them itself; for others `heat` does, the share of the last few guesses that were
    right. So chances are kept by either.
    """

    def __init__(self, part: Drafter, everywhere: Chances):
        self._assumed, self._first_reach = part.assumed_chance, part.first_reach
        self._everywhere = everywhere
        self._any = Chances(self._assumed, self._first_reach, everywhere)
        self._buckets: dict[tuple[str, int], Chances] = {}
        self._heat: float | None = None
        self._heat_pos = 0
        self._credit, self._share = FIRST_CREDIT, MOST_PROBING

    @property
    def chances(self) -> Chances:
        """Of a proposal whose confidence is not known."""
        felt = self._felt
        return felt if felt.is_known else self._any

    @property
    def _felt(self) -> Chances:
        if self._heat is None:
            return self._any
        level = sum(self._heat >= h for h in HEATS)
        return self._bucket("heat", level, self._assumed)

    def visit(self, pos: int) -> None:
        """The text has come to `pos`: luck of long ago says nothing about what follows."""
        if pos - self._heat_pos > HEAT_TOKENS:
            self._heat = None

    def sure(self, confidence: int) -> Chances:
        """Of proposals that are about as sure as this."""
        if not confidence:
            return self.chances
        size = min(confidence.bit_length(), len(ASSUMED_CHANCE))
        return self._bucket("sure", size, ASSUMED_CHANCE[size - 1])

    def about(self, confidence: int) -> set[Chances]:
        """All that the outcome of such a proposal tells about."""
        return {self._everywhere, self._any, self._felt, self.sure(confidence)}

    def _bucket(self, kind: str, size: int, assumed: float) -> Chances:
        if (kind, size) not in self._buckets:
            self._buckets[kind, size] = Chances(assumed, self._first_reach)
        return self._buckets[kind, size]

    def feel(self, pos: int, right: bool, worth: float) -> None:
        """A guess for `pos` was right or wrong; only the first verdict on a position counts.

        worth: of a right guess, in plain tokens, at the rate the session runs at.
        """
        if pos > self._heat_pos:
            self._heat_pos = pos
            if self._heat is None:
                self._heat = next(self._any.each())
            self._heat = HEAT_DECAY * self._heat + (1 - HEAT_DECAY) * right
            self._credit = min(self._credit + right * worth, MOST_CREDIT)

    def move(self) -> None:
        """The session went elsewhere."""
        self._heat, self._heat_pos = None, 0

    def rest(self) -> None:
        """It pays: there is nothing to find out."""
        self._share = MOST_PROBING

    def is_probe_due(self, price: float) -> bool:
        """Asked once a block. price: what a probe costs, in plain tokens."""
        self._credit += self._share
        return self._credit >= price

    def begin_probe(self) -> None:
        self._credit, self._share = 0.0, max(LEAST_PROBING, LESS_PROBING * self._share)
        self.chances.fade()


@dataclass
class _Offer:
    """A part of the drafter, its guesses (None: not asked yet), how many to feed, and what they
    would gain, in tokens."""

    part: Drafter
    place: _Place
    chances: Chances
    drafts: list[int] | None
    k: int = 0
    gain: float = 0.0
    is_probe: bool = False


class _Proposal:
    """Guesses for position `pos` on, and the chances that their outcome will tell about."""

    def __init__(self, pos: int, drafts: list[int], place: _Place, chances: set[Chances]):
        self._pos, self._drafts, self._place, self._chances = pos, drafts, place, chances
        self._right = 0

    def settle(self, tokens: Sequence[int], worth: float) -> bool:
        """Learn the outcome; False while `tokens` do not show it. worth: as for `feel`."""
        drafts, right, size = self._drafts, self._right, len(tokens) - self._pos
        while right < len(drafts):
            if right >= size:
                self._right = right
                for chances in self._chances:
                    chances.extend(right)
                return False
            pos = self._pos + right
            is_right = tokens[pos] == drafts[right]
            self._place.feel(pos, is_right, worth)
            if not is_right:
                break
            right += 1
        for chances in self._chances:
            chances.learn(len(drafts), right)
        return True


class Chances:
    """How often the first, second, ... guess is right when all before it were: moving averages.

    reach: how many guesses are worth trying yet; twice what was ever right, so that a bad drafter
    is found out cheaply. prior: what to assume instead of `assumed`, once that is known.
    """

    def __init__(self, assumed: float, reach: int, prior: Chances | None = None):
        self._assumed, self._prior = assumed, prior
        self._right: list[float] = []
        self._tried: list[float] = []
        self._first_reach = self.reach = reach

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to go by."""
        return bool(self._tried) and self._tried[0] >= ENOUGH_TRIES

    def learn(self, proposed: int, right: int) -> None:
        """Of `proposed` guesses the first `right` were right."""
        tried = min(right + 1, proposed)
        missing = tried - len(self._tried)
        if missing > 0:
            self._tried += [0.0] * missing
            self._right += [0.0] * missing
        for i in range(tried):
            self._tried[i] = self._tried[i] * CHANCE_DECAY + 1
            self._right[i] = self._right[i] * CHANCE_DECAY + (i < right)
        for i in range(tried, len(self._tried)):
            self._tried[i] *= UNSEEN_DECAY
            self._right[i] *= UNSEEN_DECAY
        self.extend(right)

    def extend(self, right: int) -> None:
        """`right` guesses in a row were right; what comes after them is not known yet."""
        self.reach = max(self.reach, self._first_reach + 2 * right)

    def fade(self) -> None:
        """What is known is old: let the next outcomes count for more."""
        share = min(1.0, ENOUGH_TRIES / max([1.0, *self._tried[:1]]))
        self._tried = [tried * share for tried in self._tried]
        self._right = [right * share for right in self._right]

    def survival(self) -> Iterator[float]:
        """Chance that guess 1 is kept, guesses 1 and 2, ...; without end."""
        return accumulate(self.each(), mul)

    def each(self) -> Iterator[float]:
        """Chance of guess 1, 2, ... to be right if all before it were; without end.

        What was seen of a guess is mixed with what was seen of all later ones: they are alike, and
        a product of many noisy numbers would be noisier than any.
        """
        prior, chance = self._prior, self._assumed
        elsewhere = prior.each() if prior is not None and prior.is_known else iter(())
        right, tried = sum(self._right), sum(self._tried)
        seen = chain(zip(self._right, self._tried, strict=True), repeat((0.0, 0.0)))
        for i, (own_right, own_tried) in enumerate(seen):
            chance = next(elsewhere, chance)
            if i:
                chance = (right + TAIL_WEIGHT * chance) / (tried + TAIL_WEIGHT)
            weight = LATER_WEIGHT if i else ASSUMED_WEIGHT
            chance = (own_right + weight * chance) / (own_tried + weight)
            if own_tried and not i:
                chance = _hopeful(chance, own_tried + weight)
            right, tried = right - own_right, tried - own_tried
            yield chance


def _hopeful(chance: float, tries: float) -> float:
    """At the upper end of what so many tries leave open."""
    return min(1.0, chance + OPTIMISM * math.sqrt(max(0.0, chance * (1 - chance)) / tries))
