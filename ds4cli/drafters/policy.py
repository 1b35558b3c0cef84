"""Whose guesses to feed, and how many: as many as pay, here and now.

A guess pays when the chance that it is kept is worth more tokens than its row (and its drafting)
costs in time at the rate the session runs at anyway: the rule that maximises tokens per second in
the long run. Chances are learnt by comparing every proposal with the text that followed, whether it
was fed or not, for each drafter, kind of text and confidence; costs by timing what runs. In float32
output never depends on any of it; where kernels differ by the rows of a call, ties may fall
otherwise, and `reproducible` decides by the text alone. No mlx.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter

from ds4cli.drafters.costs import CallCosts, DraftTimes
from ds4cli.drafters.drafter import Drafter
from ds4cli.settings import MAX_BLOCK_TOKENS, Settings

CHANCE_DECAY = 0.98
# Standard deviations that a first guess is taken to be better than what was seen of it: parking
# after a little bad luck ends what would show the mistake.
OPTIMISM = 0.7
# Share of the time spent on trying a costly drafter that does not pay: less after each try in vain.
MOST_PROBING, LEAST_PROBING, LESS_PROBING = 0.02, 0.002, 0.9
# Blocks that a costly drafter which does not pay is not even valued for, at most: until it is tried
# again nothing is learnt of it.
MOST_ASLEEP = 4
# How much the luck of a guess still counts after the next one, where cold, warm, hot begin, and
# for how many tokens it is remembered: a drafter that is not asked has no luck that could change.
HEAT_DECAY = 0.7
HEATS = (0.4, 0.7)
HEAT_TOKENS = 16
# What trying may cost at most, in plain tokens, where guesses were right of late.
MOST_CREDIT = 5.0
# Tries that the chance assumed of a first guess counts for, that of the first for all later ones
# together, and theirs for each of them: what is seen of one length alone is mostly luck.
ASSUMED_WEIGHT, FIRST_WEIGHT, LATER_WEIGHT = 2.0, 4.0, 8.0
ENOUGH_TRIES = 4
# A guess is likely right from here on; such guesses that are passed over until one is tried.
LIKELY = 0.5
FIRST_TRIAL = 24
# A chance below which no guess can pay.
HARDLY = 0.002
MAX_OPEN = 8
# Confidences are told apart by their bit length, up to this.
MOST_BITS = 6
# Tokens without guesses that pay after which not every one is asked about any more.
IDLE = 16
# With `reproducible`: guesses a block, and what a drafter that says how sure it is must say.
RULE_GUESSES, RULE_CONFIDENCE = 4, 4
# Blocks of a session until it is worth measuring what calls cost.
MEASURED_AFTER = 48


class DraftPolicy:
    """Asks a drafter's parts for guesses and decides whose to feed, and how many.

    known: what earlier sessions learnt of the same drafters. costs: what calls cost; `costs.use`
    gives it a measured list. parked: blocks where guesses were to be had and none was worth its
    row. source: the part whose guesses were last given. clock: to time the drafting by. chooses:
    whether the number of guesses is decided here, by what calls cost. runs_ahead: whether plain
    tokens may run one call ahead; `always` would miss guesses by that.
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
        self._by_rule = settings.reproducible
        self._pinned = settings.num_draft_tokens or (RULE_GUESSES if self._by_rule else None)
        self.chooses = self._pinned is None and self._mode != "never"
        self.runs_ahead = self._mode != "always"
        self._known = known or Experience()
        self._asked: set[str] = set()  # costly parts that gave a proposal here
        self._open: list[Offer] = []  # whose guesses wait for the text to show if they are right
        self._next_size = 0
        self._blocks = 0
        self._asleep = 0  # blocks that costly parts are not valued for
        self._tempted = False  # there were guesses
        self._passed_over: Offer | None = None  # the last guesses that were said not to pay
        self._untried, self._trial_after = 0, FIRST_TRIAL
        self._asks = self._idle = 0  # in a run ahead, and since one was in vain

    @property
    def wants_prices(self) -> bool:
        """Whether it is worth measuring what calls cost now, if nobody knows it."""
        return self.chooses and self._tempted and self._blocks >= MEASURED_AFTER

    def wants(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str = "prose"
    ) -> bool:
        """Whether to stop running ahead, to feed guesses from the next token on.

        Called in place of `choose` where the last of `tokens` is being read by a call of its own.
        While none has paid for long, every other token is looked at.
        """
        self._asks += 1
        if self._idle >= IDLE and self._asks % 2:
            return False
        wanted = self.choose(drafter, tokens, room, region) is not None
        self._idle = 0 if wanted else self._idle + 1
        return wanted

    def offer(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str = "prose"
    ) -> tuple[list[int], list[float]]:
        """Guesses that cost nothing to make, for a call whose rows others share out, and the chance
        that the first, the first two, ... are kept. Call `kept` with what the block commits."""
        self._compare(tokens)
        best: tuple[list[int], list[float]] = [], []
        if room <= 0 or (self._mode == "tools" and region != "tool"):
            return best
        for part in drafter.parts:
            drafts = part.propose(tokens, int(min(room, part.max_drafts))) if part.is_free else []
            if drafts:
                place = self._known.place(part, region, len(tokens))
                offer = Offer(part, place, place.sure(part.confidence), drafts)
                self._watch(offer, tokens, drafts, was_asked=False)
                alive = offer.chances.survival(len(drafts))
                if sum(alive) > sum(best[1]):
                    best, self.source = (drafts[: len(alive)], alive), part.name
        return best

    def hope(self, drafter: Drafter, pos: int, room: int, region: str = "prose") -> Offer | None:
        """What a part that takes time may have to offer at `pos` in such a call, if it is asked."""
        if room <= 0 or (self._mode == "tools" and region != "tool"):
            return None
        for part in drafter.parts:
            if not part.is_free:
                place = self._known.place(part, region, pos)
                offer = Offer(part, place, place.chances, None)
                offer.k = int(min(room, part.max_drafts))
                return offer
        return None

    def heard(self, hope: Offer, tokens: Sequence[int], drafts: list[int]) -> list[float]:
        """It was asked among others, and gave these guesses: the chance that the first, the first
        two, ... are kept."""
        self._watch(hope, tokens, drafts, was_asked=True)
        return hope.place.sure(hope.part.confidence).survival(len(drafts))

    def kept(self, tokens: int) -> None:
        """A block of a call for several committed so many tokens."""
        self._count(tokens)

    def observe(self, rows: int, kept: int, seconds: float) -> None:
        """A block of `rows` tokens took `seconds`, without drafting, and committed `kept`."""
        self._count(kept)
        self.costs.observe(rows, kept, seconds)

    def observe_plain(self, seconds: float, *, first: bool = False, last: bool = False) -> None:
        """A block without guesses; first, last: those that begin and end a run ahead."""
        self._next_size += 1
        self._blocks += 1
        self.costs.observe_plain(seconds, first=first, last=last)

    def _count(self, kept: int) -> None:
        self._next_size += kept
        self._blocks += 1

    # -- deciding ----------------------------------------------------------------------------------

    def choose(
        self, drafter: Drafter, tokens: Sequence[int], room: int, region: str = "prose"
    ) -> Offer | None:
        """Whose guesses are fed after `tokens`, at most `room`, and how many; None for nobody's.
        `give` makes guesses of it. Call it once a block, then observe.

        region: what kind of text this is ("tool" inside a tool call); chances are kept apart.
        """
        if self._by_rule:
            self._known = Experience()  # what earlier text showed depends on which was read here
        self._compare(tokens)
        outside = self._mode == "tools" and region != "tool"
        if room <= 0 or outside or self._mode == "never":
            return None
        if self._pinned is not None:
            room = min(room, self._pinned)
        offers = []
        for part in drafter.parts:
            if self._asleep and not part.is_free:
                self._asleep -= 1
                continue
            offer = self._offer(part, tokens, room, region)
            if offer is not None:
                offers.append(offer)
        if not offers:
            self.parked += not drafter.is_free  # a costly part rests
            return None
        self._tempted = True
        best = offers[0] if len(offers) == 1 else max(offers, key=attrgetter("gain"))
        if not self.chooses:
            weak = self._by_rule and 0 < best.part.confidence < RULE_CONFIDENCE
            return None if weak and self._mode != "always" else best
        if best.k and self.costs.known:
            best.place.rest()
            return self._due_probe(offers, best, room) or best
        if self._mode == "always":
            best.k = max(1, best.k)
            return best
        probe = self._due_probe(offers, best, room) or self._due_trial(best)
        self.parked += probe is None
        self._passed_over = best
        return probe

    def _due_trial(self, offer: Offer) -> Offer | None:
        """Now and then one guess that is likely right and yet said not to pay: a list of prices
        that is wrong is found out by that alone. Ever more rarely, as each one confirms the list.
        """
        if not self.costs.known or not offer.drafts or self._chance(offer) < LIKELY:
            return None
        self._untried += 1
        if self._untried < self._trial_after:
            return None
        offer.k, offer.is_trial = 1, True
        return offer

    @staticmethod
    def _chance(offer: Offer) -> float:
        return offer.chances.first

    @property
    def verdict(self) -> str:
        """Why guesses were passed over, in words; empty if none was."""
        offer = self._passed_over
        if offer is None:
            return ""
        return (
            f"guesses did not pay: a call of 2 rows costs {self.costs.price(2):.2f} plain tokens "
            f"here, and a first guess is right {100 * self._chance(offer):.0f} % of the time"
        )

    def _offer(self, part: Drafter, tokens: Sequence[int], room: int, region: str) -> Offer | None:
        """What a part has to offer: a free one is asked, and may have no guess; of a costly one
        all is expectation."""
        costs, place = self.costs, self._known.place(part, region, len(tokens))
        if room > part.max_drafts:
            room = int(part.max_drafts)
        if not costs.is_measured and self.chooses:
            room = min(room, part.worth_trying)
        if not part.is_free:
            offer = Offer(part, place, place.chances, None)
            offer.fixed, offer.each = place.times.prices(costs.plain.value)
            return self._valued(offer, room)
        if self.chooses:
            part.row_price = costs.rate * costs.slope
        drafts = part.propose(tokens, room)
        if not drafts:
            return None
        offer = Offer(part, place, place.sure(part.confidence), drafts)
        self._watch(offer, tokens, drafts, was_asked=False)
        return self._valued(offer, len(drafts))

    def _valued(self, offer: Offer, most: int) -> Offer:
        """With the best number of guesses and what they gain; pinned: all, and how many hold."""
        if self._pinned is None:
            offer.k, offer.gain = self._best(offer, offer.chances, most)
        else:
            offer.k, offer.gain = most, sum(offer.chances.survival(most))
        return offer

    def _best(self, offer: Offer, chances: Chances, most: int) -> tuple[int, float]:
        """The number of guesses with the largest expected gain over a plain token, and that gain
        in tokens."""
        prices, rate, left = self.costs.prices, self.costs.rate, most
        fixed, each = rate * (offer.fixed - 1), rate * offer.each
        best, best_gain, kept = 0, 0.0, 0.0
        if most * chances.first <= rate * prices[1] + fixed + each:
            return 0, 0.0  # not even if all the others were kept and free
        for k, alive in enumerate(chances.survival(most), 1):
            left -= 1
            kept += alive
            gain = kept - rate * prices[k] - fixed - k * each
            if gain > best_gain:
                best, best_gain = k, gain
            if gain + alive * left <= best_gain or not left:
                break
        return best, best_gain

    def _due_probe(self, offers: list[Offer], best: Offer, room: int) -> Offer | None:
        """Now and then a guess of a costly part that did not pay, or that the `best` one beat: ever
        more rarely."""
        for offer in offers if self.costs.known else ():
            if offer.drafts is not None or (offer is best and best.k):
                continue
            k = offer.part.probed
            price = self.costs.prices[k] - 1 + offer.place.times.trial(self.costs.plain.value, k)
            price += best.gain / self.costs.rate
            if offer.place.is_probe_due(price):
                offer.k, offer.is_probe = min(k, room), True
                return offer
            if not offer.k:
                self._asleep = offer.place.sleep(price)
        return None

    def give(self, offer: Offer, tokens: Sequence[int], said: list[int] | None = None) -> list[int]:
        """The guesses to feed. A costly part is asked now, unless it `said` something to who asked
        several, and how sure it is counts as well."""
        part, drafts, k = offer.part, offer.drafts, offer.k
        if offer.is_probe:
            offer.place.begin_probe()
        if offer.is_trial:
            self._untried, self._trial_after = 0, 2 * self._trial_after
        if drafts is None:
            drafts = self._ask(offer, tokens) if said is None else said
            self._watch(offer, tokens, drafts, was_asked=True)
            if part.confidence and self._mode != "always" and self.chooses and not offer.is_probe:
                chances = offer.place.sure(part.confidence)
                if chances.tries >= ENOUGH_TRIES:
                    offer.fixed = offer.each = 0.0  # they are made
                    k = self._best(offer, chances, len(drafts))[0]
        self.source = part.name
        return drafts[:k]

    def _ask(self, offer: Offer, tokens: Sequence[int]) -> list[int]:
        part, begin = offer.part, self._clock()
        drafts = part.propose(tokens, offer.k)
        took = self._clock() - begin
        times, reads_much = offer.place.times, part.name not in self._asked  # its prompt
        if offer.is_probe:  # what was written since the last one
            times.tried(took)
            expected = self.costs.plain.value * (offer.fixed + offer.k * offer.each)
            reads_much = reads_much or took > 2 * expected
        if not reads_much:
            times.observe(offer.k, took)
        self._asked.add(part.name)
        self.costs.spend(took)
        return drafts

    # -- learning from what followed ---------------------------------------------------------------

    def _watch(
        self, offer: Offer, tokens: Sequence[int], drafts: list[int], *, was_asked: bool
    ) -> None:
        """Learn, when it shows, whether these guesses for what follows `tokens` were right.
        was_asked: for them, by the chances of the offer."""
        if drafts and len(self._open) < MAX_OPEN:
            offer.expect(len(tokens), drafts, was_asked)
            self._open.append(offer)

    def _compare(self, tokens: Sequence[int]) -> None:
        """Learn from the proposals whose outcome `tokens` shows."""
        size = len(tokens)
        if size != self._next_size:
            # The session went elsewhere: what follows here is not their outcome.
            self._open, self._asleep = [], 0
            self._known.move()
        self._next_size = size
        if not self._open:
            return
        worth = 1 / self.costs.rate
        self._open = [offer for offer in self._open if not offer.settle(tokens, worth)]


class Experience:
    """What is known of drafters: how often they are right, by kind of text, and how long they take.

    The sessions of an engine share it, so a short reply goes by what earlier ones showed.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], _Place] = {}

    def place(self, part: Drafter, region: str, pos: int = 0) -> _Place:
        """Of a part in one kind of text, which has come to `pos`. A new one goes by how the part
        does where it is known."""
        place = self._places.get((part.name, region))
        if place is None:
            others = [p for (name, _), p in self._places.items() if name == part.name]
            times = others[0].times if others else DraftTimes(at_once=part.drafts_at_once)
            known = max((p.all for p in others), key=lambda chances: chances.tries, default=None)
            place = _Place(Chances(part.assumed_chance, known), times)
            self._places[part.name, region] = place
        if pos - place.heat_pos > HEAT_TOKENS:
            place.heat = None  # luck of long ago says nothing about what follows
        return place

    def move(self) -> None:
        """The session went elsewhere, or another one goes on."""
        for place in self._places.values():
            place.move()


class _Place:
    """What is known of one drafter in one kind of text, and when it is to be tried again.

    Text comes in stretches that can be guessed and others that cannot. A drafter that says how sure
    it is sees them itself; for others the luck of the last few guesses does, and of the very last.
    So chances are kept by either. all: of any proposal. times: what its drafts take, in any text.
    heat: its luck of late, as far as known; heat_pos: where that was last seen.
    """

    def __init__(self, chances: Chances, times: DraftTimes):
        self.all, self.times = chances, times
        self._by_luck = [chances.fresh() for _ in range(2 * len(HEATS) + 2)]
        self._by_confidence = [chances.fresh() for _ in range(MOST_BITS + 1)]
        self.heat: float | None = None
        self._was_right = False
        self.heat_pos = 0
        self._credit, self._share = 0.0, MOST_PROBING

    @property
    def chances(self) -> Chances:
        """Of a proposal whose confidence is not known."""
        felt = self._felt
        return felt if felt.tries >= ENOUGH_TRIES else self.all

    @property
    def _felt(self) -> Chances:
        if self.heat is None:
            return self.all
        return self._by_luck[2 * bisect_right(HEATS, self.heat) + self._was_right]

    def sure(self, confidence: int) -> Chances:
        """Of proposals that are about as sure as this."""
        if not confidence:
            return self.chances
        bits = confidence.bit_length()
        return self._by_confidence[bits if bits < MOST_BITS else MOST_BITS]

    def about(self, confidence: int) -> list[Chances]:
        """What the outcome of such a proposal, by someone who has luck, tells about."""
        told = [self.all]
        if self.heat is not None:
            told.append(self._felt)
        if confidence:
            told.append(self.sure(confidence))
        return told

    def feel(self, pos: int, right: bool, worth: float) -> None:
        """A guess for `pos` was right or wrong; only the first verdict on a position counts.

        worth: of a right guess, in plain tokens, at the rate the session runs at.
        """
        if pos > self.heat_pos:
            self.heat_pos = pos
            if self.heat is None:
                self.heat = self.all.first
            self.heat = HEAT_DECAY * self.heat + (1 - HEAT_DECAY) * right
            self._was_right = right
            self._credit = min(self._credit + right * worth, MOST_CREDIT)

    def move(self) -> None:
        """The session went elsewhere."""
        self.heat, self.heat_pos = None, 0

    def rest(self) -> None:
        """It pays: there is nothing to find out."""
        self._share = MOST_PROBING

    def is_probe_due(self, price: float) -> bool:
        """Asked once a block. price: what a probe costs, in plain tokens."""
        self._credit += self._share
        return self._credit >= price

    def sleep(self, price: float) -> int:
        """Blocks until such a probe is due, `MOST_ASLEEP` at most: they count as asked."""
        blocks = min(MOST_ASLEEP, int((price - self._credit) / self._share))
        self._credit += blocks * self._share
        return blocks

    def begin_probe(self) -> None:
        self._credit, self._share = 0.0, max(LEAST_PROBING, LESS_PROBING * self._share)


class Offer:
    """A part of the drafter, its guesses (None: not asked yet), how many to feed, and what they
    would gain, in tokens. fixed, each: what a draft, and each guess of it, takes still, in plain
    tokens. Once there are guesses, whoever has it learns their outcome."""

    k = 0
    gain = fixed = each = 0.0
    is_probe = is_trial = False

    def __init__(self, part: Drafter, place: _Place, chances: Chances, drafts: list[int] | None):
        self.part, self.place, self.chances, self.drafts = part, place, chances, drafts

    def expect(self, pos: int, drafts: list[int], was_asked: bool) -> None:
        """These guesses stand for position `pos` on. The luck of who says himself how sure he is
        does not count, unless he was asked for it."""
        place, sure = self.place, self.part.confidence
        self._pos, self._guesses, self._right = pos, drafts, 0
        self._has_luck = was_asked or not sure
        self._told = place.about(sure) if self._has_luck else [place.all, self.chances]

    def settle(self, tokens: Sequence[int], worth: float) -> bool:
        """Learn the outcome; False while `tokens` do not show it. worth: as for `feel`."""
        pos, size = self._pos, len(tokens)
        for guess in self._guesses[self._right :]:
            if pos + self._right >= size:
                return False
            is_right = tokens[pos + self._right] == guess
            if self._has_luck:
                self.place.feel(pos + self._right, is_right, worth)
            if not is_right:
                break
            self._right += 1
        for chances in self._told:
            chances.learn(len(self._guesses), self._right)
        return True


class Chances:
    """How often the first, second, ... guess is right when all before it were: moving averages.

    prior: what to assume instead of `assumed`, once that is known.
    """

    def __init__(self, assumed: float, prior: Chances | None = None):
        self._assumed, self._prior = assumed, prior
        self._right, self._tried = [0.0], [0.0]  # by position: of so many tries
        self._first: float | None = None  # what `first` found
        self._alive: list[float] | None = None  # and `survival`

    def fresh(self) -> Chances:
        """One of which nothing is known but this."""
        return Chances(self._assumed, self)

    @property
    def tries(self) -> float:
        """How much was seen of the first guess."""
        return self._tried[0]

    def learn(self, proposed: int, right: int) -> None:
        """Of `proposed` guesses the first `right` were right."""
        rights, tries = self._right, self._tried
        self._first = self._alive = None
        for i in range(right + 1 if right < proposed else proposed):
            if i == len(tries):
                tries.append(0.0)
                rights.append(0.0)
            tries[i] = tries[i] * CHANCE_DECAY + 1
            rights[i] = rights[i] * CHANCE_DECAY + (i < right)

    def survival(self, most: int = MAX_BLOCK_TOKENS) -> list[float]:
        """Chance that guess 1 is kept, guesses 1 and 2, ...; no further than it matters."""
        if self._alive is None:
            self._alive = self._survival()
        return self._alive[:most]

    def _survival(self) -> list[float]:
        """Each guess counts for itself, and as one of all later ones."""
        rights, tries = self._right, self._tried
        product = chance = self.first
        alive = [product]
        right, tried = sum(rights[1:]), sum(tries[1:])
        later = (right + FIRST_WEIGHT * chance) / (tried + FIRST_WEIGHT)
        for i in range(1, MAX_BLOCK_TOKENS):
            if product < HARDLY:
                break
            chance = later
            if i < len(tries):
                chance = (rights[i] + LATER_WEIGHT * later) / (tries[i] + LATER_WEIGHT)
            product *= chance
            alive.append(product)
        return alive

    @property
    def first(self) -> float:
        """Chance that the first guess is kept."""
        if self._first is None:
            self._first = self._likely()
        return self._first

    def _likely(self) -> float:
        """At the upper end of what so many tries leave open; before any, what is assumed."""
        tried, prior, chance = self._tried[0], self._prior, self._assumed
        if prior is not None and tried < ENOUGH_TRIES <= prior.tries:
            chance = prior.first
        if not tried:
            return chance
        tries = tried + ASSUMED_WEIGHT
        chance = (self._right[0] + ASSUMED_WEIGHT * chance) / tries
        return min(1.0, chance + OPTIMISM * math.sqrt(max(0.0, chance * (1 - chance)) / tries))
