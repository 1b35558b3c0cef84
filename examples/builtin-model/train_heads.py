"""Train the DSpark and the MTP head of the built-in model, both on one pass of the frozen target.

    python train_heads.py TOKENIZER_FOLDER TARGET_FOLDER OUT_FOLDER --seconds 540

TARGET_FOLDER is what `ship_heads.py thaw` writes. As in `train.py` the schedule follows the clock,
and the learning rate has decayed to zero when the time is up.
"""

from __future__ import annotations

import argparse

from train import carry_out, common_arguments


def arguments() -> argparse.Namespace:
    parser = common_arguments(__doc__.splitlines()[0], "tokenizer", "target", "out")
    parser.set_defaults(batch=32, text_share=0.05, prompt_weight=0.05, decay_from=0.4, report=60)
    parser.add_argument("--runs", type=int, default=4, help="of the MTP head in a chain")
    parser.add_argument("--anchors", type=int, default=192, help="chains a row")
    parser.add_argument("--held-out", type=int, default=16, help="rows of each group to report on")
    return parser.parse_args()


if __name__ == "__main__":
    carry_out("training_heads", arguments())
