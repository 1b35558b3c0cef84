"""Rank 0 of several: the same walk through a session on the whole model and on a shared one.

`python tests/rank_run.py RANKS FOLDER STEPS WHAT...` starts the other ranks, makes walks of so many
moves, and prints one JSON line per WHAT: a model of `MODELS`, how it is shared, and perhaps one of
`MORE`, with `+` between; or a command, as a JSON list of its words, the first of them what it
reads; or `messages`: what is told for a step.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
import tiny
from folder import MARKERS, TEMPLATE, VOCAB_SIZE, save_folder
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.tuner.utils import linear_to_lora_layers
from typer.testing import CliRunner

from ds4cli import Engine
from ds4cli.drafters import block_config, dspark, mtp
from ds4cli.drafters.target import Target
from ds4cli.ranks import meeting, wire
from ds4cli.settings import Settings
from ds4cli.structured.asked import from_settings
from ds4cli.structured.guards import make_guard
from ds4cli.tools import Tool

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
EVEN_VOCAB = VOCAB_SIZE + VOCAB_SIZE % 2
# Settings of the tiny models where they are not those of tests/tiny.py.
MODELS = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "wide": (
        "llama",
        {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
        | {"num_key_value_heads": 4},
    ),
    "wide_windows": (
        "llama",
        {"layer_types": WINDOWS, "sliding_window": 8, "hidden_size": 128}
        | {"num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "windows": ("llama", {"layer_types": WINDOWS, "sliding_window": 8}),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": {**tiny.CFG["qwen3_5"]["text_config"], "vocab_size": EVEN_VOCAB}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
}
DSPARK = {
    **tiny.HEAD_BLOCK,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 1,
    "block_size": 4,
    "mask_token_id": 3,
    "target_layer_ids": [2, 0],
    "num_target_layers": 4,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
}
tiny.CFG["deepseek_v3"] = {
    name: value for name, value in tiny.CFG["deepseek_v32"].items() if not name.startswith("index")
} | {"model_type": "deepseek_v3"}
SETTINGS = {"horizon_tokens": 24, "prefill_step_size": 16, "drafter": "ngram"}
SETTINGS |= {"speculate": "always", "num_draft_tokens": 3}  # what calls cost is not measured
# What a case may add to them.
OPENS = VOCAB_SIZE - len(MARKERS) + MARKERS.index("<tool_call>")
MORE = {
    "kv": lambda folder: {"kv_bits": 8, "kv_group_size": 32},
    "draft": lambda folder: {"drafter": "model", "draft_model": str(folder / "llama")},
    "mtp": lambda folder: {"drafter": "mtp"},
    "dspark": lambda folder: {"drafter": "dspark", "draft_model": str(folder / "dspark")},
    "calls": lambda folder: {"logit_bias": {OPENS: 4.0}},
    "adapter": lambda folder: {"adapter_path": str(folder / "adapter")},
}
CALLS = """{% for c in message.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}"""
# A template that draws calls.
DRAWS = TEMPLATE.replace(
    "(message.content or '') + '<", "(message.content or '') }}" + CALLS + "{{- '<"
)
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
TOOL = Tool("weather", "", {**PARAMETERS, "required": ["city"], "additionalProperties": False})
METERED = 12
MOVES = "say", "draft", "back", "far", "fork", "switch", "other", "disk", "form", "call"


def save_mtp(folder: Path, model) -> None:
    """An MTP head in the model's own folder, which shares the model's output projection."""
    args = model.language_model.args
    args.full_attention_interval = 1
    head = mtp.MtpHead(DecoderLayer(args, 0), Target(model), 1e-5)
    save(folder / "mtp.safetensors", head, "mtp.")


def save_dspark(folder: Path, model) -> None:
    """A DSpark head beside the model, which shares its embedding and output projection."""
    target, place = Target(model), folder.parent / "dspark"
    config = {**DSPARK, "vocab_size": target.vocab_size}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    head = dspark.DSparkHead(block_config.read(config, "dspark", "x"), target)
    save(place / "model.safetensors", head)


def save_adapter(folder: Path, model) -> None:
    """A LoRA adapter beside the model, of weights that are not small."""
    keys = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    lora = {"rank": 2, "scale": 4.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 2, lora)
    own = {n: x for n, x in tree_flatten(model.parameters()) if "lora_" in n}
    place = folder.parent / "adapter"
    place.mkdir()
    tensors = {name: 0.1 * mx.random.normal(x.shape) for name, x in own.items()}
    mx.save_safetensors(str(place / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora}
    (place / "adapter_config.json").write_text(json.dumps(config))


def save(path: Path, module, prefix: str = "") -> None:
    tensors = {prefix + name: x for name, x in tree_flatten(module.parameters())}
    mx.save_safetensors(str(path), tensors, {"format": "mlx"})


BESIDE = {"mtp": save_mtp, "dspark": save_dspark, "adapter": save_adapter}


def load(folder: Path, group, **settings) -> Engine:
    """An engine on this rank's part of the model; on all of it without a group."""
    settings = {"model": str(folder), "dtype": "float32", **SETTINGS, **settings}

    def begin(vocabulary) -> None:
        if group is not None:
            group.begin(settings)

    return Engine.load(before_weights=begin, group=group, **settings)


def walk(engine: Engine, seed: int, folder: Path, steps: int):
    """Random moves through sessions; yields what was done and where it led."""
    chance = random.Random(seed)
    session, branches = engine.session(), []
    session.sync([chance.randrange(256) for _ in range(50)])
    for _ in range(steps):
        do = chance.choice(MOVES)
        room = chance.random()
        if do == "say":
            list(session.stream(max_tokens=1 + int(room * 20)))
        elif do == "form":
            form = from_settings(Settings(regex="[0-9]{3}(,[a-f]{1,4}){1,3}"))
            guard = make_guard(engine, (), form, thinks=False, max_repairs=3)
            list(session.stream(max_tokens=1 + int(room * 20), guard=guard))
        elif do == "call":
            guard = make_guard(engine, (TOOL,), None, thinks=False, max_repairs=3)
            list(session.stream(max_tokens=10 + int(room * 20), guard=guard))
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
        yield do, session


def compare(whole: Engine, shared: Engine, *how) -> dict:
    """How far the walks agree: the largest difference of logits, and the first other text. What
    the shared model was asked for on the way."""
    worst, met = 0.0, {}
    walks = walk(whole, *how), walk(shared, *how)
    for at, ((do, one), (_, other)) in enumerate(zip(*walks, strict=True)):
        if one.tokens != other.tokens:
            return {"text": f"step {at}, {do}: {one.tokens[-5:]}, {other.tokens[-5:]}"}
        row = one.logits
        size = max(1.0, mx.abs(row).max().item())
        worst = max(worst, mx.abs(row - other.logits).max().item() / size)
        met[id(other)] = other
    stats = [session.stats for session in met.values()]
    repairs = sum(len(each.repairs) for each in stats)
    proposed = Counter()
    for each in stats:
        proposed.update({name: counts[0] for name, counts in each.by_drafter.items()})
    return {"text": "equal", "logits": worst, "repairs": repairs, "proposed": proposed}


def walked(case: str, group, seed: int, folder: Path, steps: int) -> dict:
    """A walk, on the whole model and on the shared one."""
    name, how, *more = case.split("+")
    model, over = MODELS[name]
    place = folder / name
    if not place.exists():
        save_folder(place, model, template=DRAWS, **over)
    given: dict = {how: True, **MORE[more[0]](folder)} if more else {how: True}
    alone = {k: v for k, v in given.items() if k != how}
    if more and more[0] in BESIDE:
        BESIDE[more[0]](place, tiny.build(model, **over))
    whole = load(place, None, **alone)
    shared = load(place, group, **given)
    return compare(whole, shared, seed, folder, steps)


def metered(folder: Path, group) -> dict:
    """What rank 0 tells the others for a step, plain and with three guesses: messages, bytes, and
    seconds of its processor time."""
    engine = load(folder / "llama", group, tensor_parallel=True, speculate="never")
    session, flush, found = engine.session(), group.flush, {}
    session.sync([*range(20, 40)])
    list(session.stream(max_tokens=8))
    for kind in ("plain", "drafted"):
        counts = [0, 0, 0.0]

        def count(counts=counts) -> None:
            counts[0] += bool(group._due)
            counts[1] += len(wire.lines(group._due))
            begin = time.thread_time()
            flush()
            counts[2] += time.thread_time() - begin

        group.flush = count
        if kind == "plain":
            list(session.stream(max_tokens=METERED))
        else:
            for _ in range(METERED):
                session.step(drafts=[1, 2, 3])
        found[kind] = [n / METERED for n in counts]
    group.flush = flush
    return found


def main(ranks: int, folder: Path, steps: int, cases: list[str]) -> None:
    """All cases with one set of followers."""
    group = meeting.meet(Settings(local_ranks=ranks))
    meeting.meet = lambda settings: group
    from ds4cli.cli import app  # what it imports meets those, too

    for seed, case in enumerate(cases):
        if case.startswith("["):
            said, *words = json.loads(case)
            run = CliRunner().invoke(app, words, input=said)
            found = {"code": run.exit_code, "said": run.stdout, "errors": run.stderr}
        elif case == "messages":
            found = metered(folder, group)
        else:
            found = walked(case, group, seed, folder, steps)
        print(json.dumps({"case": case, **found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
