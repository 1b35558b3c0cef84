"""Train the built-in model on one GPU for a fixed time, then write its weights.

    python train.py TOKENIZER_FOLDER OUT_FOLDER --seconds 540

The schedule follows the clock: whatever the GPU, the learning rate has decayed to zero when the
time is up. `--start` continues from the weights of an earlier run.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path


def common_arguments(about: str, *folders: str) -> argparse.ArgumentParser:
    """What the training of the model and that of its heads have in common, after these folders."""
    parser = argparse.ArgumentParser(description=about)
    for folder in folders:
        parser.add_argument(folder, type=Path)
    parser.add_argument("--start", type=Path, help="folder of an earlier run to continue from")
    parser.add_argument("--seconds", type=float, default=540, help="wall clock, start to saving")
    parser.add_argument(
        "--config", default="{}", help="JSON: fields of the configuration to change"
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--text-share", type=float, default=0.08)
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.003)
    parser.add_argument("--decay-from", type=float, default=0.5)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--store", type=int, default=32768, help="rows kept on the device")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too (to try it)")
    parser.add_argument("--report", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def arguments() -> argparse.Namespace:
    parser = common_arguments(__doc__.splitlines()[0], "tokenizer", "out")
    parser.add_argument("--mix", default="", help="JSON: share of each dialogue group")
    parser.add_argument("--thinking-share", type=float, default=0.5)
    parser.add_argument("--text-weight", type=float, default=0.3)
    return parser.parse_args()


def carry_out(module: str, args: argparse.Namespace) -> None:
    """Make the run that a module describes, and stop its workers when it is done.

    The module is loaded only now: without PyTorch nothing but `--help` works.
    """
    kind = import_module(module).Run
    args.out.mkdir(parents=True, exist_ok=True)
    run = kind(args)
    run.go()
    for worker in run.workers:
        worker.kill()


if __name__ == "__main__":
    carry_out("training", arguments())
