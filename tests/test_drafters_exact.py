"""The text never depends on a drafter, and a drafter's state never on how the session moved.

Every drafter, on every kind of cache, inside real sessions. Heads are random, so their guesses are
nearly always wrong: some are put right, to have blocks that are kept in part.
"""

from __future__ import annotations

import copy
import random
from functools import lru_cache

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from oracle import SCALE, Letters, check, engine, plain, prompt
from test_group import said, written
from tiny import CFG, HEAD_BLOCK, V, build

from ds4cli.drafters import block_config, dflash, dflash2, dspark, eagle3, mtp, nextn
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.heads import Head
from ds4cli.drafters.registry import named
from ds4cli.drafters.target import Target
from ds4cli.engine.engine import Engine
from ds4cli.engine.group import Group
from ds4cli.sampling import Sampler
from ds4cli.settings import Settings

FAMILIES = ("llama", "qwen3_5", "gemma3_text", "lfm2", "nemotron_h")
# Heads by their drafter; "nextn" is an MTP head of another layout.
HEADS = ("mtp", "nextn", "dspark", "dflash", "dflash2", "eagle3")
# Kinds of DSpark's Markov head; "dspark" has the vanilla one.
MARKOV = ("gated", "rnn")
DRAFTER_OF = {"nextn": "mtp", **dict.fromkeys(MARKOV, "dspark")}
DRAFTERS = ("none", "ngram", "model", "self", *HEADS)
# Every head on every other family, greedy on one; `test_exact.py` has the others on more families.
GRID = [
    pytest.param(kind, name, temp, marks=() if often else pytest.mark.slow)
    for i, kind in enumerate(DRAFTERS)
    for j, name in enumerate(FAMILIES)
    for temp in (0.0, 0.8)
    for often in [(temp and kind in HEADS and (i + j) % 2) or name == FAMILIES[1 + (temp > 0)]]
]
GRID += [(kind, name, 0.8) for kind, name in zip(MARKOV, FAMILIES[1:3], strict=True)]
PROMPT, LENGTH = 11, 18
BLOCK = {**HEAD_BLOCK, "num_hidden_layers": 2, "vocab_size": V, "block_size": 5}
DSPARK = {
    **BLOCK,
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": 3,
    "target_layer_ids": [2, 0],
    "num_target_layers": 4,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
}
EAGLE3 = {
    **{key: BLOCK[key] for key in BLOCK if key not in ("block_size", "model_type")},
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "target_layer_ids": [0, 1, 2],
}
DFLASH = {
    **BLOCK,
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3},
}
DFLASH2 = {
    **BLOCK,
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        "block_size": 5,
        "target_layer_ids": [1, 2],
        "mask_token_id": 3,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
    },
}


@lru_cache
def model(name, seed=0):
    return build(name, seed=seed, scale=SCALE)


@lru_cache
def truth(name, temp):
    """What plain decoding through stock caches gives."""
    sampler = Sampler(Settings(temp=temp), token_limit=len(Letters()))
    return tuple(plain(model(name), prompt(PROMPT), LENGTH, sampler))


@lru_cache
def head(kind, name):
    """A random head of a kind on the model `name`; any decoder layer will do for an MTP head."""
    target = Target(model(name))
    target.prove()
    if kind == "mtp":
        like = build("qwen3_next", num_hidden_layers=1, full_attention_interval=1)
        module = mtp.MtpHead(like.layers[0], target, 1e-5)
        return Head(named(kind), randomised(module), target)
    if kind == "nextn":
        layer = model("llama").layers[0]
        module = nextn.NextnHead(copy.deepcopy(layer), nextn.FAMILIES["mimo"], target, 1e-5)
        return Head(named("mtp"), randomised(module), target)
    if kind == "eagle3":
        config = eagle3.read(EAGLE3, target.num_layers, "x")
        module = eagle3.Eagle3Head(config, target, {})
        return Head(named(kind), randomised(module), target)
    if kind in ("dspark", *MARKOV):
        config = {**DSPARK, "markov_head_type": kind if kind in MARKOV else "vanilla"}
        module = dspark.DSparkHead(block_config.read(config, "dspark", "x"), target)
        return Head(named("dspark"), randomised(module), target)
    if kind == "dflash2":
        module = dflash2.DFlash2Head(block_config.read(DFLASH2, "dflash2", "x"), target)
        return Head(named(kind), randomised(module), target)
    module = dflash.DFlashHead(block_config.read(DFLASH, "dflash", "x"), target)
    return Head(named(kind), randomised(module), target)


def randomised(module):
    weights = tree_flatten(module.parameters())
    keys = mx.random.split(mx.random.key(3), len(weights))
    for (path, x), key in zip(weights, keys, strict=True):
        noise = mx.random.normal(x.shape, key=key)
        value = 1 + 0.2 * noise if x.ndim == 1 else noise * 1.5 / x.shape[-1] ** 0.5
        module.load_weights([(path, value)], strict=False)
    return module


def make_session(name, kind, temp=0.0, k=4, **settings):
    """A session on the model `name` whose guesses come from a drafter of this kind."""
    chosen = {"temp": temp, "num_draft_tokens": k, "speculate": "always", **settings}
    if kind in (*HEADS, *MARKOV):
        settings = Settings(drafter=DRAFTER_OF.get(kind, kind), **chosen)
        return Engine(model(name), Letters(), settings, head=head(kind, name)).session()
    if kind in ("model", "self"):
        draft = model("qwen3_next", seed=3) if kind == "model" else model(name)
        return engine(name, model=model(name), draft=draft, **chosen).session()
    return engine(name, model=model(name), drafter=kind, **chosen).session()


class Helped(Drafter):
    """Another drafter's guesses, of which some are put right."""

    is_free = False

    def __init__(self, drafter, text):
        self.inner, self.text, self.random = drafter, text, random.Random(1)
        self.name, self.taps = drafter.name, drafter.taps

    def propose(self, tokens, n):
        guesses = self.inner.propose(tokens, n)
        right = self.text[len(tokens) : len(tokens) + n]
        share = self.random.choice((0.0, 0.7, 1.0))
        pairs = zip(guesses, right, strict=False)
        return [t if self.random.random() < share else g for g, t in pairs]

    def observe(self, start, hidden):
        self.inner.observe(start, hidden)

    def rewind(self, pos):
        self.inner.rewind(pos)


@pytest.mark.parametrize(("kind", "name", "temp"), GRID)
def test_the_text_is_that_of_plain_decoding(kind, name, temp):
    """Guards: rows of a rejected guess left in a layer, a token that a drafter decided, a draw of
    noise that the number of guesses moves; with steps back, between blocks, of any length."""
    session = make_session(name, kind, temp)
    whole = [*prompt(PROMPT), *truth(name, temp)]
    if kind in (*HEADS, *MARKOV):
        session.drafter = Helped(session.drafter, whole)
    session.sync(prompt(PROMPT))
    moves, back = random.Random(len(name)), 4
    while session.pos < len(whole):
        session.step(max_tokens=len(whole) - session.pos)
        assert session.tokens == whole[: session.pos]
        if back and moves.random() < 0.4:
            back -= 1
            session.rewind(moves.randint(3, session.pos))
            check(model(name), session)
            session.sync(whole[: max(PROMPT, session.pos)])
    check(model(name), session)
    if kind == "self":
        assert session.stats.accepted == session.stats.proposed > 0
    if kind in (*HEADS, *MARKOV):
        assert 0 < session.stats.accepted < session.stats.proposed


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, kind in enumerate(HEADS)
        for j, name in enumerate(FAMILIES[1:4])
    ],
)
def test_a_moved_head_guesses_like_a_fresh_one(kind, name):
    """Guards: context rows that are missing, doubled or of a text that was taken back: the output
    stays right, and every guess is wrong."""
    session = make_session(name, kind, prefill_step_size=8)
    text, moves = prompt(80, seed=2), random.Random(3)
    session.sync(text[:20])
    for _ in range(8):
        move = moves.choice(("step", "back", "edit", "fork"))
        if move == "step":
            session.step()
        elif move == "back":
            session.rewind(moves.randint(2, session.pos))
        elif move == "edit":
            kept = session.tokens[: moves.randint(1, session.pos)]
            session.sync([*kept, moves.randrange(V), *text[: moves.randint(0, 12)]])
        else:
            session = session.fork()
        anchored = [*session.tokens, moves.randrange(V)]
        fresh = make_session(name, kind, prefill_step_size=8)
        fresh.sync(session.tokens)
        expected = fresh.drafter.propose(anchored, 4)
        assert len(expected) > 0
        assert session.drafter.propose(anchored, 4) == expected, move


@pytest.mark.parametrize("kind", ["model", *HEADS, *MARKOV])
def test_drafters_asked_together_guess_as_alone(kind):
    """Guards: a text's guesses made of the context, the position, the noise or the penalties of
    another one; rows that are made twice, or never."""
    name = "qwen3_next" if kind == "model" else "qwen3_5"
    lines, moves = [make_session(name, kind, temp=0.5) for _ in range(4)], random.Random(4)
    for i, session in enumerate(lines):
        session.use(Settings(temp=(0.0, 0.8)[i % 2], seed=i, repetition_penalty=(1.0, 1.4)[i // 3]))
        session.sync(prompt((9, 3, 40, 5)[i], seed=i))
    asker = lines[0].drafter.together()
    for turn in range(3):
        texts = [[*session.tokens, moves.randrange(V)] for session in lines]
        expected = [s.fork().drafter.propose(t, 4) for s, t in zip(lines, texts, strict=True)]
        assert all(len(guesses) == 4 for guesses in expected)
        assert asker.propose([s.drafter for s in lines], texts, 4) == expected, turn
        for i, (session, text, guesses) in enumerate(zip(lines, texts, expected, strict=True)):
            session.sync([*text, *guesses[: i if turn else 0]])
        lines[3].rewind(lines[3].pos - 2)
    asker.close()


@pytest.mark.parametrize("kind", ["model", "mtp", "dspark"])
def test_lanes_with_drafters_that_take_time_say_what_each_says_alone(kind):
    """Guards: guesses that were made for all lanes at once and fed to another one, or twice."""
    name, limits, truth = "qwen3_5", (14, 5, 20), []
    for how in ({}, {"speculate": "auto", "k": None}):
        lines = [make_session(name, kind, temp=0.7, **how) for _ in limits]
        for i, session in enumerate(lines):
            session.sync(prompt((9, 3, 40)[i], seed=i))
        made = lines[0].engine
        group, begun = Group(made, pytest.fail), [s.fork() for s in lines]
        truth = truth or [said(s.stream(max_tokens=n)) for s, n in zip(lines, limits, strict=True)]
        lanes = [group.join(s, max_tokens=n) for s, n in zip(begun, limits, strict=True)]
        assert written(group, lanes) == truth
        assert how or all(s.stats.proposed for s in begun)
        group.close()


def test_the_heads_are_of_one_width():
    """Guards: a tiny model that changes its size, and heads that are no longer tried on it."""
    assert all(CFG[name].get("hidden_size", 64) == 64 for name in FAMILIES)
