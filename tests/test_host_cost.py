"""What the host does for a decoded token, counted, beside mlx-lm's own loop on the same weights.

Counts are exact, so these bounds cannot flicker; `examples/host_cost.py` prints them for any model.
"""

import gc
import sys
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator
from oracle import Letters, prompt
from tiny import build
from toolkit import TOOLS, tokenizer

from ds4cli.bench.reference import stock
from ds4cli.drafters.drafter import Drafter
from ds4cli.engine.engine import Engine
from ds4cli.engine.group import Group
from ds4cli.hooks.convolutions import by_products
from ds4cli.settings import Settings
from ds4cli.tools import Guard

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import host_cost

LAYERS = 32
TOKENS = 16
# What the guard, or a drafter that has no guess, may add, of mlx-lm's calls.
EXTRA = 0.15


@pytest.fixture(autouse=True)
def uncollected():
    """Whoever asked to hear of collections, as hypothesis does, is called in each: a count would
    depend on what ran before."""
    gc.disable()
    yield
    gc.enable()


@lru_cache
def engine(name, guarded=False):
    """One per model: with the tokenizer of the tools tests, for a guard, or a plain one."""
    words = tokenizer() if guarded else Letters()
    model = build(name, num_hidden_layers=LAYERS, vocab_size=len(words))
    made = Engine(model, words, Settings(drafter="none"))
    made.stop_ids = set()
    return made


@lru_cache
def stock_calls(name, guarded=False):
    return calls(host_cost.mlx_lm(engine(name, guarded), prompt(64), TOKENS + 12))


def calls(steps):
    return host_cost.calls_per_token(steps, TOKENS)


@lru_cache
def our_calls(name, guarded=False):
    return calls(stream(engine(name, guarded)))


def stream(made, recording=True, drafter=None, **options):
    session = made.session()
    session.recording = recording
    session.drafter = drafter or session.drafter
    session.sync(prompt(64))
    return session.stream(max_tokens=TOKENS + 12, stop=[], **options)


@pytest.mark.parametrize(("name", "most"), [("llama", 1.10), ("qwen3_next", 1.25)])
def test_a_token_makes_few_calls_beside_the_models_own(name, most):
    """2.6 times mlx-lm's calls were a fifth of the time where a token takes 3 ms."""
    assert our_calls(name) <= most * stock_calls(name)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_recording_adds_no_node_to_a_one_row_call(name):
    """Slices, copies and outputs of a recorder cost a part of a token each, on a fast GPU."""
    plain, recorded = (
        host_cost.graph_per_call(stream(engine(name), recording)) for recording in (False, True)
    )
    assert recorded == plain


@pytest.mark.parametrize(("rows", "most"), [(1, 4), (3, 7)])
def test_a_short_convolution_is_few_nodes(rows, most):
    """Its weight cut with a slice and a shape for each of four taps: 13 nodes a layer and token."""
    conv = nn.Conv1d(6, 6, 4, groups=6, bias=False)
    x = mx.zeros((1, rows + 3, 6))
    mx.eval(x, conv.parameters())
    assert host_cost.nodes([by_products(x, conv.weight, None)]) <= most


class Mute(Drafter):
    """Is asked, and has no guess."""

    name = "mute"


def test_a_drafter_without_a_guess_costs_little():
    """Looking for guesses at every token took more than the loop around it."""
    asked = calls(stream(engine("llama"), drafter=Mute()))
    assert asked - our_calls("llama") <= EXTRA * stock_calls("llama")


def test_a_guard_costs_little_while_no_call_is_open():
    """Every token of a reply with tools passes the guard."""
    made = engine("llama", guarded=True)
    guard = Guard(made.tokenizer, TOOLS)
    guarded = calls(stream(made, guard=guard))
    assert guarded - our_calls("llama", guarded=True) <= EXTRA * stock_calls("llama", guarded=True)


def rounds(made, lanes):
    """Lanes over branches of one text, round by round."""
    group, reader = Group(made), made.session()
    for i in range(lanes):
        reader.sync(prompt(64, seed=i))
        group.join(reader.fork(), max_tokens=TOKENS + 12, stop=[])
    while group.lanes:
        group.call()
        for lane in [lane for lane in group.lanes if lane.has_step]:
            next(lane.events)
        yield


def stock_rounds(made, lanes):
    """The same by mlx-lm's batches."""
    texts = [prompt(64, seed=i) for i in range(lanes)]
    batch = BatchGenerator(stock(made.model), max_tokens=TOKENS + 12, stop_tokens=[])
    batch.insert(texts)
    while batch.next_generated():
        yield


@pytest.mark.parametrize(("name", "most"), [("llama", 1.9), ("qwen3_next", 1.88)])
def test_a_round_of_lanes_makes_few_calls_beside_mlx_lms_batches(name, most):
    """What undoes a call, cursors, states and tapes were moved lane by lane and layer by layer: 4.9
    times mlx-lm's calls at 16 lanes, and a third of a step on a fast GPU."""
    made = engine(name)
    try:
        assert calls(rounds(made, 8)) <= most * calls(stock_rounds(made, 8))
    finally:
        engine.cache_clear()  # its model is armed for lanes


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_nothing_runs_per_lane_and_layer(name):
    """What is called for each lane in each layer is most of a step where there are many of both."""
    found = {}
    gc.freeze()  # what other tests left would be looked through each time
    for layers in (4, 8):
        model = build(name, num_hidden_layers=layers, vocab_size=len(Letters()))
        made = Engine(model, Letters(), Settings(drafter="none"))
        made.stop_ids = set()
        for lanes in (2, 4):
            found[layers, lanes] = calls(rounds(made, lanes))
            gc.collect()  # the lanes' seats
    alike = found[8, 4] - found[4, 4] - (found[8, 2] - found[4, 2])
    assert abs(alike) < 0.5
