"""Sessions stepped together: each says what it says alone, whatever happens to the others."""

from itertools import pairwise

import mlx.core as mx
import pytest
from oracle import KINDS as KINDS_OF_STATE
from oracle import Letters, OracleDrafter, check, engine, interrupts, prompt
from test_repair import PROMPT, ScriptedModel
from test_tools_exact import BAD, LENGTH, FakeModel
from tiny import V, build
from toolkit import TOOLS, tokenizer

from ds4cli.caches.arena import SeatedKVCache
from ds4cli.drafters.drafter import Together
from ds4cli.engine.engine import Engine
from ds4cli.engine.group import Group, Lane
from ds4cli.errors import ModelError
from ds4cli.lanes.arm import Lanes
from ds4cli.settings import Settings
from ds4cli.tape.tape import Tape
from ds4cli.tools import Guard

KINDS = (
    {"temp": 0.0},
    {"temp": 0.8, "seed": 3},
    {"temp": 1.3, "seed": 4, "top_p": 0.9, "min_p": 0.02},
    {"temp": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temp": 0.7, "logit_bias": {5: 2.0, 9: -50.0}, "presence_penalty": 0.4},
)
SIZES = (5, 12, 1, 9, 20)
# One for each way to keep state that lanes can have, and what replays otherwise.
FILLED = (
    *(name for name in KINDS_OF_STATE if name != "deepseek_v41"),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("falcon_h1", "kimi_linear", "mamba")),
)


def said(events):
    """Tokens, text and the reason of a whole reply."""
    events = list(events)
    tokens = [t for event in events for t in event.tokens]
    return tokens, "".join(event.text for event in events), events[-1].finish_reason


def sessions(made, attempts=(0,), kinds=KINDS):
    """One session a kind and attempt, over prompts of several lengths."""
    for attempt in attempts:
        for i, kind in enumerate(kinds):
            session = made.session()
            session.use(Settings(**kind))
            session.attempt = attempt
            session.sync(prompt(SIZES[i % len(SIZES)], seed=1 + i))
            yield session


def alone(made, limits, **how):
    return [said(s.stream(**limit)) for s, limit in zip(sessions(made, **how), limits, strict=True)]


def written(group, lanes):
    """Write lanes to their end, in rounds as a batch does."""
    found = {lane: [] for lane in lanes}
    while group.lanes:
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            event = next(lane.events, None)
            if event is not None:
                found[lane].append(event)
    return [said(found[lane]) for lane in lanes]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3_next",
        "mamba2",
        pytest.param("falcon_h1", marks=pytest.mark.slow),
        "gemma3_text",
    ],
)
def test_lanes_say_what_each_says_alone(name):
    """A row of another lane in a state, noise of another position, one lane's penalties for all."""
    made = engine(name)
    limits = [{"max_tokens": n} for n in (17, 9, 70, 6, 12, 1, 8, 20, 3, 10)]
    truth = alone(made, limits, attempts=(0, 1))
    group = Group(made)
    joined = list(sessions(made, attempts=(0, 1)))
    lanes = [group.join(s, **limit) for s, limit in zip(joined, limits, strict=True)]
    assert written(group, lanes) == truth
    for session in joined[:3]:
        check(made.model, session)


@pytest.mark.parametrize("speculate", ["auto", "always"])
def test_texts_of_one_token_are_lanes_as_others_are(speculate):
    """States that are longer behind longer texts were not to be stacked: all lanes were called one
    by one, to their end."""
    made, heard = engine("longcat_flash_ngram", speculate=speculate), []
    truth, group = alone(made, [{"max_tokens": 5}] * 5), Group(made, heard.append)
    joined = list(sessions(made))
    for session, (tokens, *_) in zip(joined, truth, strict=True):
        session.drafter = OracleDrafter([*session.tokens, *tokens], 0.6)
    lanes = [group.join(session, max_tokens=5) for session in joined]
    assert written(group, lanes) == truth and not heard
    check(made.model, joined[2])


def test_lanes_that_join_and_end_leave_the_others_alone():
    """A call that runs ahead belonged to a lane that had ended; a new one was given its row."""
    made, limits = engine("lfm2"), [{"max_tokens": n} for n in (4, 30, 11, 2, 19)]
    truth, group = alone(made, limits), Group(made)
    waiting = list(zip(sessions(made), limits, strict=True))
    found, lanes = {}, []
    while waiting or group.lanes:
        while waiting and len(group.lanes) < 3:
            session, limit = waiting.pop(0)
            lanes.append(group.join(session, **limit))
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            found.setdefault(lane, []).extend(filter(None, [next(lane.events, None)]))
    assert [said(found[lane]) for lane in lanes] == truth


def test_a_lane_can_be_read_without_the_others():
    """A lane that nobody reads was given one block after the other, or held up all."""
    made, limits = engine("llama"), [{"max_tokens": 9}] * 5
    truth, group = alone(made, limits), Group(made)
    lanes = [group.join(s, **limit) for s, limit in zip(sessions(made), limits, strict=True)]
    assert [said(lane.events) for lane in reversed(lanes)] == truth[::-1]


def test_plain_lanes_need_one_call_a_token_and_run_ahead(monkeypatch):
    """Waiting for each call before the next one is built leaves the machine idle."""
    made = engine("llama")
    group = Group(made)
    kinds = KINDS[:3]
    for session in sessions(made, kinds=kinds):
        group.join(session, max_tokens=10)
    ahead, calls, open_calls = [], [], type(group)._open

    def noted(self, due):
        calls.append(len(due))
        ahead.append([lane.timeline.open_blocks for lane in due])
        open_calls(self, due)

    monkeypatch.setattr(Group, "_open", noted)
    written(group, list(group.lanes))
    assert calls == [3] * 10
    assert ahead == [[0] * 3] + [[1] * 3] * 9


def test_stop_strings_and_ends_of_text_are_each_lanes_own():
    """A stop that goes back over tokens took the neighbours along."""
    made = engine("lfm2")
    first, *_ = alone(made, [{"max_tokens": 30}] * 5)
    made.stop_ids = {first[0][11]}
    limits = [{"max_tokens": 30, "stop": [first[1][5:8]]}, *[{"max_tokens": 30}] * 4]
    truth, group = alone(made, limits), Group(made)
    lanes = [group.join(s, **limit) for s, limit in zip(sessions(made), limits, strict=True)]
    assert written(group, lanes) == truth
    assert truth[0][2] == "stop" and truth[0][0] == first[0][:5]


def test_a_cancelled_lane_ends_and_the_others_go_on():
    made, stop = engine("lfm2"), []
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    limits = [{"max_tokens": 12}] * 5
    limits[1] = {"max_tokens": 12, "cancel": lambda: bool(stop)}
    lanes = [group.join(s, **limit) for s, limit in zip(sessions(made), limits, strict=True)]
    found = {lane: [] for lane in lanes}
    while group.lanes:
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            found[lane].append(next(lane.events, None))
        if len(found[lanes[1]]) == 4:
            stop.append(True)
        if len(found[lanes[2]]) == 6:
            group.leave(lanes[2])
    done = [said(filter(None, found[lane])) for lane in lanes]
    assert done[1][2] == "cancelled" and done[1][0] == truth[1][0][: len(done[1][0])]
    assert [done[i] for i in (0, 3, 4)] == [truth[i] for i in (0, 3, 4)]
    assert lanes[2].session.tokens[1:] == truth[2][0][:6]
    check(made.model, lanes[2].session)
    assert said(lanes[2].session.stream(max_tokens=6))[0] == truth[2][0][6:]


def test_a_lane_that_is_moved_goes_on_from_there():
    """What its call ahead had picked was taken for what follows the new place."""
    made = engine("gemma3_text")
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    lanes = [group.join(s, max_tokens=12) for s in sessions(made)]
    for i in range(40):
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            next(lane.events, None)
        if i == 5:
            lanes[1].session.rewind(lanes[1].session.pos - 2)
    assert [lane.session.tokens[-12:] for lane in lanes] == [tokens for tokens, *_ in truth]


def test_numbers_that_are_none_cost_one_lane():
    """The neighbours of a lane whose row is not a number stopped, or said token 0 for ever."""
    made = engine("lfm2")
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    joined = list(sessions(made))
    lanes = [group.join(s, max_tokens=12) for s in joined]
    for _ in range(4):
        group.call()
        for lane in lanes:
            if lane.has_step:
                next(lane.events)
    cache = joined[2]._timeline.adapters[0].cache
    cache.cache = [x * float("nan") for x in cache.cache]
    found = {lane: [] for lane in lanes}
    while group.lanes:
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            try:
                next(lane.events, None)
            except ModelError as error:
                found[lane] = str(error)
    assert [i for i, lane in enumerate(lanes) if found[lane]] == [2]
    for i in (0, 1, 3, 4):
        assert joined[i].tokens[-12:] == truth[i][0]


def rounds(group, most=None, expected=ModelError):
    """Read the lanes, so many rounds or to their end. Returns what each lane's reply raised, of the
    kind that is expected."""
    failed = {}
    while group.lanes and most != 0:
        most = None if most is None else most - 1
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            try:
                next(lane.events, None)
            except expected as error:
                failed[lane] = error
    return failed


def test_rows_that_a_guess_left_behind_are_cleared():
    """A guess whose values overflow leaves its lane without numbers, kept or not, as long as others
    are longer: masked, it counts 0 times what is none."""
    made = engine("llama")
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    joined = list(sessions(made))
    for session in joined:
        group.join(session, max_tokens=12)
    rounds(group, 4)
    row, behind = joined[1].timeline.caches[0], joined[1].pos + 3
    assert behind < joined[4].pos
    row.arena.values[row.seat.row, :, behind] = mx.nan
    assert not rounds(group)
    assert [s.tokens[-12:] for s in joined] == [tokens for tokens, *_ in truth]


def test_a_lane_without_numbers_leaves_a_clean_seat():
    """Who was given the row of a lane that had failed said nothing but token 0; one that failed and
    was kept held its row, and every call computed it."""
    made = engine("llama")
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    joined = list(sessions(made))
    lanes = [group.join(session, max_tokens=12) for session in joined[:4]]
    rounds(group, 4)
    row = joined[2].timeline.caches[0]
    arena, seat = row.arena, row.seat.row
    arena.values[seat] = mx.nan
    failed = rounds(group, 2)
    assert list(failed) == [lanes[2]] and not isinstance(row, SeatedKVCache)
    arena.values[seat] = mx.nan  # what else a call may have left there
    group.join(joined[4], max_tokens=12)
    assert not rounds(group, 1)
    taken = joined[4].timeline.caches[0]
    assert taken.arena is arena and taken.seat.row == seat and arena.rows == 4
    assert not rounds(group)
    for i in (0, 1, 3, 4):
        assert joined[i].tokens[-12:] == truth[i][0]


def test_an_exception_in_one_lanes_part_is_that_lanes_own(monkeypatch):
    """An error in a joint call ended every lane, or left a block open in some."""
    made = engine("lfm2")
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    joined = list(sessions(made))
    lanes = [group.join(s, max_tokens=12) for s in joined]
    assert not rounds(group, 4)
    bad = joined[3]._timeline
    monkeypatch.setattr(bad._now.layers, "before_write", lambda *_: 1 / 0)
    failed = rounds(group, expected=ZeroDivisionError)
    assert list(failed) == [lanes[3]]
    for i in (0, 1, 2, 4):
        assert joined[i].tokens[-12:] == truth[i][0]
        check(made.model, joined[i])


def test_a_call_of_the_only_lane_that_is_left_parts_nobody(monkeypatch):
    """A call that one lane ran ahead, when the others had left, failed: those that joined later
    were called one by one, because "a call for 0 failed"."""
    made, heard = engine("llama"), []
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made, heard.append)
    joined = list(sessions(made))
    lanes = [group.join(s, max_tokens=12) for s in joined[:2]]
    rounds(group, 3)
    group.leave(lanes[0])
    layers = joined[1].timeline._now.layers
    with monkeypatch.context() as failing:
        failing.setattr(layers, "before_write", lambda *_: 1 / 0)
        group.call()
    for session in joined[2:]:
        group.join(session, max_tokens=12)
    assert not rounds(group) and not heard and not group.is_apart
    assert [s.tokens[-12:] for s in joined[1:]] == [tokens for tokens, *_ in truth[1:]]


@pytest.mark.parametrize("when", ["fed", "evaluated"])
def test_a_joint_call_that_cannot_be_is_said_and_made_one_by_one(monkeypatch, when):
    """A batch ended because there was no memory for eight at a time."""
    made, heard = engine("lfm2"), []
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made, heard.append)
    joined = list(sessions(made))
    lanes = [group.join(s, max_tokens=12) for s in joined]
    calls = []

    def fail(*args, **how):
        calls.append(1)
        raise RuntimeError("no memory")

    for _ in range(3):
        group.call()
        for lane in lanes:
            if lane.has_step:
                next(lane.events)
    name = {"fed": "feed_together", "evaluated": "evaluate_together"}[when]
    monkeypatch.setattr(f"ds4cli.engine.group.{name}", fail)
    written(group, lanes)
    assert [s.tokens[-12:] for s in joined] == [tokens for tokens, *_ in truth]
    assert len(heard) == len(calls) == 1 and "no memory" in heard[0]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_lanes_with_guesses_say_what_they_say_without(name):
    """Blocks of unlike length in one call: a lane kept another one's guesses."""
    made = engine(name, speculate="always")
    truth, group = alone(made, [{"max_tokens": 25}] * 5), Group(made)
    joined = list(sessions(made))
    for i, (session, (tokens, *_)) in enumerate(zip(joined, truth, strict=True)):
        session.drafter = OracleDrafter([*session.tokens, *tokens], (0.9, 0.5, 0.8, 1.0, 0.3)[i])
    lanes = [group.join(s, max_tokens=25) for s in joined]
    assert written(group, lanes) == truth
    assert sum(s.stats.accepted for s in joined) > 30
    check(made.model, joined[1])


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", "mamba"])
def test_what_lanes_replay_is_replayed_at_once(name, monkeypatch):
    """Each lane that kept a part of its guesses ran the recurrences again by itself; replayed with
    others, it stood in their state, or where it was cut otherwise than they."""
    made = engine(name, speculate="always", num_draft_tokens=3)
    truth, group = alone(made, [{"max_tokens": 12}] * 5), Group(made)
    joined, replays, replay = list(sessions(made)), [], Tape.replay
    for i, (session, (tokens, *_)) in enumerate(zip(joined, truth, strict=True)):
        right = (0.3, 0.3, 0.3, 0.6, 0.9)[i]
        session.drafter = OracleDrafter([*session.tokens, *tokens], right)

    def noted(tape, starts, rows):
        replays.append((rows, len(starts)))
        return replay(tape, starts, rows)

    monkeypatch.setattr(Tape, "replay", noted)
    for session in joined:
        group.join(session, max_tokens=12)
    calls = []
    while group.lanes:
        group.call()
        calls.append(len(replays))
        for lane in [lane for lane in group.lanes if lane.has_step]:
            next(lane.events, None)
    calls = [replays[a:b] for a, b in pairwise([*calls, len(replays)])]
    several = len(made.model.layers) + 1
    if name != "mamba":  # whose replay runs projections of the model
        assert all(len({*rows}) == len(rows) for rows in ([n for n, _ in c] for c in calls))
        assert any(caches > several for _, caches in replays)
    assert [s.tokens[-12:] for s in joined] == [tokens for tokens, *_ in truth]
    assert sum(s.stats.accepted for s in joined) > 10
    check(made.model, joined[1])


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("qwen3_next", 90),  # one that records keeps checkpoints by then
        ("gemma3_text", 30),
        *(pytest.param(name, 90, marks=pytest.mark.slow) for name in ("llama", "gemma3_text")),
    ],
)
def test_lanes_that_record_nothing_say_the_same_and_take_no_further_call(name, n):
    """Lines that never go back paid for what going back needs; a guess that failed, without a
    tape, took a second call."""
    made = engine(name, speculate="always")
    truth, group = alone(made, [{"max_tokens": n}] * 5), Group(made)
    joined = list(sessions(made))
    for i, (session, (tokens, *_)) in enumerate(zip(joined, truth, strict=True)):
        session.recording = False
        if i % 2:
            session.drafter = OracleDrafter([*session.tokens, *tokens], 0.7)
    calls = [s.counters.forwards for s in joined]
    for session in joined:
        group.join(session, max_tokens=n)
    while group.lanes:
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            next(lane.events, None)
            assert not lane.session.recording or group.lanes == [lane]
    assert [s.tokens[-n:] for s in joined] == [tokens for tokens, *_ in truth]
    for s, before in zip(joined, calls, strict=True):
        assert s.counters.forwards - before <= s.stats.blocks + 2
        assert s.kept_bytes()["checkpoints"] == 0
    check(made.model, joined[1])


@pytest.mark.parametrize("lanes", [1, 2])
def test_who_records_nothing_does_not_after_an_interrupt_either(lanes):
    """Ctrl-C within a call with guesses left a session recording that was told not to."""
    made = engine("mamba2", speculate="always", num_draft_tokens=3)
    joined = list(sessions(made, kinds=KINDS[:lanes]))
    for session in joined:
        session.recording, session.drafter = False, OracleDrafter([5] * 90, 1.0)
    for interrupt in interrupts(Group._open, Lane.record, Lane._take):
        group = Group(made)
        for session in joined:
            group.join(session, max_tokens=9)
        with interrupt:
            rounds(group, 2)
        group.close()
        assert not any(session.recording for session in joined)


class Clock:
    """Tells what calls take that cost `row` plain calls for each row beyond one a lane."""

    def __init__(self, monkeypatch, row):
        self.now, self.calls = 0.0, []
        opened = Group._open

        def timed(group, due):
            rows = sum(lane.size for lane in due)
            self.calls.append(rows)
            self.now += 1 + row * (rows - len(due))
            opened(group, due)

        monkeypatch.setattr(Group, "_open", timed)

    def __call__(self):
        return self.now


class SlowOracle(OracleDrafter):
    """One that takes so many plain calls to ask, for one text or for many."""

    is_free, asked = False, 0

    def __init__(self, truth, right, clock, takes):
        super().__init__(truth, right)
        self.clock, self.takes = clock, takes

    def together(self):
        class Slowly(Together):
            def propose(asker, parts, texts, n):
                self.clock.now += self.takes
                for part in parts:
                    part.asked += 1
                return super().propose(parts, texts, n)

        return Slowly()


def guessed(made, truth, clock, right, takes=None):
    """Lanes whose guesses are right so often, written in `auto`. takes: to make them."""
    group, kinds = Group(made, clock=clock), KINDS[:3]
    joined = list(sessions(made, kinds=kinds))
    for session, (tokens, *_) in zip(joined, truth, strict=True):
        text = [*session.tokens, *tokens]
        drafter = OracleDrafter(text, right)
        session.drafter = drafter if takes is None else SlowOracle(text, right, clock, takes)
    lanes = [group.join(s, max_tokens=len(truth[0][0])) for s in joined]
    assert written(group, lanes) == truth
    return joined


@pytest.mark.parametrize("name", FILLED)
def test_blocks_that_are_filled_up_say_what_is_said_without(name, monkeypatch):
    """Blocks of all lanes are equally long, whatever each has to guess: a token that only fills one
    up was kept, or what it left in a state; or a lane stood in that of another one."""
    made = engine(name, speculate="auto")
    kinds = (*KINDS[:3], *KINDS[:2])
    truth = alone(made, [{"max_tokens": 40}] * 5, kinds=kinds)
    clock = Clock(monkeypatch, 0.001)
    group, joined, rounds = Group(made, clock=clock), list(sessions(made, kinds=kinds)), []
    for i, (session, (tokens, *_)) in enumerate(zip(joined, truth, strict=True)):
        if i != 1:  # which has nothing to guess
            right = (0.9, 0.0, 0.6, 0.3, 0.8)[i]
            session.drafter = OracleDrafter([*session.tokens, *tokens], right)
        session.recording = i != 2
    replay = Group.replay

    def noted(group, picks):
        if not picks.is_replayed:
            rounds.append([lane.kept_rows for lane in group.lanes if lane.waits_for(picks)])
        replay(group, picks)

    monkeypatch.setattr(Group, "replay", noted)
    lanes = [group.join(s, max_tokens=40) for s in joined]
    assert written(group, lanes) == truth
    assert any(len({*kept}) > 2 and 1 in kept for kept in rounds), "cut at unlike rows"
    assert sum(s.stats.accepted for s in joined) > 20 and joined[1].stats.proposed == 0
    for session in joined:
        check(made.model, session)
        if session.recording:
            session.rewind(session.pos - 7)
            check(made.model, session)


def test_rows_are_shared_out_where_guesses_pay(monkeypatch):
    """Lanes ran without guesses where those would have been free, or fed them at any price."""
    made = engine("llama", speculate="auto")
    truth = alone(made, [{"max_tokens": 120}] * 3, kinds=KINDS[:3])
    cheap = Clock(monkeypatch, 0.01)
    joined = guessed(made, truth, cheap, 0.95)
    assert len(cheap.calls) < 60 and all(s.stats.accepted > 60 for s in joined)
    monkeypatch.undo()
    dear = Clock(monkeypatch, 0.9)
    joined = guessed(made, truth, dear, 0.6)
    assert dear.now < 1.1 * 121
    assert sum(s.stats.parked for s in joined) > 0


def test_who_takes_time_is_asked_for_all_lanes_at_once_where_that_pays(monkeypatch):
    """Heads and draft models rested as soon as there were two lanes, or were asked at any price."""
    made = engine("llama", speculate="auto")
    truth = alone(made, [{"max_tokens": 60}] * 3, kinds=KINDS[:3])
    for right, row, takes, most in (
        (0.95, 0.01, 0.5, 45),
        (0.95, 0.3, 3.0, 78),
        (0.2, 0.3, 0.5, 66),
    ):
        clock = Clock(monkeypatch, row)
        joined = guessed(made, truth, clock, right, takes)
        assert clock.now < most, right
        assert all((s.stats.accepted > 20) == (most < 60) for s in joined)
        assert len({s.drafter.asked for s in joined}) < 3 and joined[0].drafter.asked > 0
        monkeypatch.undo()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if i else ()) for i, n in enumerate(list(BAD)[:4])],
)
def test_a_repair_stays_in_its_lane(name):
    """A lane that goes back to mend a tool call took its neighbours along."""

    def begun(seed, temp):
        wrapper = tokenizer(name)
        fake = FakeModel(wrapper, BAD[name], seed, 0.05)
        made = Engine(ScriptedModel(fake), wrapper, Settings(temp=temp, drafter="none"))
        return made, wrapper

    made, wrapper = begun(1, 1.0)
    temps, truth, joined = (0.0, 1.0, 0.0, 1.2), [], []
    for into in (truth, joined):
        for seed, temp in enumerate(temps):
            session = made.session()
            session.use(Settings(temp=temp, seed=seed))
            session.sync(PROMPT)
            into.append(session)
    expected = [said(s.stream(max_tokens=LENGTH, guard=Guard(wrapper, TOOLS))) for s in truth]
    group = Group(made)
    lanes = [group.join(s, max_tokens=LENGTH, guard=Guard(wrapper, TOOLS)) for s in joined]
    assert written(group, lanes) == expected
    repairs = [len(s.stats.repairs) for s in joined]
    assert repairs == [len(s.stats.repairs) for s in truth] and sum(repairs) > 2


def test_a_model_that_cannot_be_stepped_together_is_named():
    """A batch ended where one line at a time would do."""
    with pytest.raises(ModelError, match="llama4"):
        Group(engine("llama4"))


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "rwkv7"])
def test_texts_that_are_read_together_go_on_as_read_alone(name, monkeypatch):
    """Texts of a batch are read in one call, of which only the last row of each is wanted."""
    made = engine(name)
    truth = alone(made, [{"max_tokens": 8}] * 5)
    group, reader, joined = Group(made), made.session(), []
    texts = [session.tokens for session in sessions(made)]
    for kind in KINDS:
        joined.append(reader.fork(reader.limits))
        joined[-1].use(Settings(**kind))
    call, made_rows = Lanes.call, []

    def noted(*args):
        found = call(*args)
        made_rows.append(len(found[0]))
        return found

    monkeypatch.setattr(Lanes, "call", noted)
    assert group.read(joined, texts) == sum(map(len, texts))
    assert made_rows == [len(texts)]
    assert all(session.logits.shape == (V,) for session in joined)
    lanes = [group.join(session, max_tokens=8) for session in joined]
    assert written(group, lanes) == truth
    check(made.model, joined[1])


def test_letters_of_every_lane_are_its_own():
    """The text of an event came from the tokens of another lane."""
    made = Engine(build("llama", scale=2.0), Letters(), Settings(drafter="none"))
    group = Group(made)
    lanes = [group.join(s, max_tokens=8) for s in sessions(made)]
    for tokens, text, _ in written(group, lanes):
        assert text == Letters().decode(tokens)
