"""Rank 0 of several: the same walk through a session on the whole model and on a shared one.

`python tests/rank_run.py RANKS FOLDER WHAT...` starts the other ranks, and prints one JSON line per
WHAT: a model of `MODELS`, how it is shared, and perhaps one of `MORE`, with `+` between.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import mlx.core as mx
import tiny
from folder import VOCAB_SIZE, save_folder

from ds4cli import Engine
from ds4cli.ranks.meeting import meet
from ds4cli.settings import Settings
from ds4cli.structured.asked import from_settings
from ds4cli.structured.guards import make_guard

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
EVEN_VOCAB = VOCAB_SIZE + VOCAB_SIZE % 2
# Settings of the tiny models where they are not those of tests/tiny.py.
MODELS = {
    "llama": ("llama", {}),
    "wide": (
        "llama",
        {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "windows": ("llama", {"layer_types": WINDOWS, "sliding_window": 8}),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": {**tiny.CFG["qwen3_5"]["text_config"], "vocab_size": EVEN_VOCAB}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
}
tiny.CFG["deepseek_v3"] = {
    name: value for name, value in tiny.CFG["deepseek_v32"].items() if not name.startswith("index")
} | {"model_type": "deepseek_v3"}
SETTINGS = {"horizon_tokens": 24, "prefill_step_size": 16, "drafter": "ngram"}
# What a case may add to them.
MORE = {
    "kv": lambda folder: {"kv_bits": 8, "kv_group_size": 32},
    "draft": lambda folder: {
        "drafter": "model",
        "draft_model": str(folder / "llama"),
        "speculate": "always",
    },
}
STEPS = 20


def load(folder: Path, group, **settings) -> Engine:
    """An engine on this rank's part of the model; on all of it without a group."""
    settings = {"model": str(folder), "dtype": "float32", **SETTINGS, **settings}

    def begin(vocabulary) -> None:
        if group is not None:
            group.begin(settings)

    return Engine.load(before_weights=begin, group=group, **settings)


def walk(engine: Engine, seed: int, folder: Path):
    """Random moves through sessions; yields what was done and where it led."""
    chance = random.Random(seed)
    session, branches = engine.session(), []
    session.sync([chance.randrange(256) for _ in range(50)])
    for _ in range(STEPS):
        do = chance.choice(
            ["say", "say", "draft", "back", "far", "fork", "switch", "other", "disk"]
        )
        room = chance.random()
        if do == "say":
            list(session.stream(max_tokens=1 + int(room * 20)))
        elif do == "form":
            form = from_settings(Settings(regex="[0-9]{3}(,[a-f]{1,4}){1,3}"))
            guard = make_guard(engine, (), form, thinks=False, max_repairs=3)
            list(session.stream(max_tokens=1 + int(room * 20), guard=guard))
        elif do == "draft":
            session.step(drafts=[int(room * 250)] * 3)
        elif do == "back":
            session.rewind(max(1, session.pos - int(room * 8)))
        elif do == "far":
            session.rewind(max(1, int(session.pos * room)))
        elif do == "fork":
            branches.append(session.fork())
            session.checkpoint("turn")
        elif do == "switch" and branches:
            branches.append(session)
            session = branches.pop(0)
        elif do == "other":
            keep = int(session.pos * room)
            session.sync([*session.tokens[:keep], *range(20, 40)])
        elif do == "disk":
            session.save(str(folder / f"state{id(engine)}"))
            session = engine.load_session(folder / f"state{id(engine)}")
        if session.logits is None:
            session.next_token()
        yield do, session.tokens, session.logits


def compare(whole: Engine, shared: Engine, seed: int, folder: Path) -> dict:
    """How far the walks agree: the largest difference of logits, and the first other text."""
    worst, steps = 0.0, 0
    for (do, tokens, row), (_, others, other) in zip(
        walk(whole, seed, folder), walk(shared, seed, folder), strict=True
    ):
        if tokens != others:
            return {"text": f"step {steps}, {do}: {tokens[-5:]}, {others[-5:]}"}
        size = max(1.0, mx.abs(row).max().item())
        worst = max(worst, mx.abs(row - other).max().item() / size)
        steps += 1
    return {"text": "equal", "logits": worst, "steps": steps}


def main(ranks: int, folder: Path, cases: list[str]) -> None:
    """All cases with one set of followers."""
    group = meet(Settings(local_ranks=ranks))
    for seed, case in enumerate(cases):
        name, how, *more = case.split("+")
        given: dict = {how: True, **MORE[more[0]](folder)} if more else {how: True}
        model, over = MODELS[name]
        place = folder / name
        if not place.exists():
            save_folder(place, model, **over)
        whole = load(place, None, **{k: v for k, v in given.items() if k != how})
        shared = load(place, group, **given)
        print(json.dumps({"case": case, **compare(whole, shared, seed, folder)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
