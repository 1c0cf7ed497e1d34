"""Reinforcement learning from preferences: runs examples/rlhf.py and reports its results as figures.

A reward model from pairs, PPO against it, and DPO on the same pairs, from random weights; each policy is measured by
the right answer, which training never sees. Writes to runs/rlhf; takes two minutes on a CPU.
"""

import os
import sys
import tempfile

from support.arguments import parser_of
from support.environments import ROOT
from support.program import run
from support.report import Row, print_rows

sys.path.insert(0, str(ROOT / "examples"))  # first: this file has the name of the example
import rlhf

TINY = [
    *(f"{name}.trainer.total_steps=2" for name in ("sft", "reward_model", "ppo", "dpo")),
    *(f"{name}.controller.threads=1" for name in ("sft", "reward_model", "ppo", "dpo")),
    *("ppo.critic.warmup_steps=0", "ppo.trainer.val_every=0", "ppo.trainer.val_before_train=false"),
    "ppo.validation.max_samples=16",
]


def main() -> None:
    parser = parser_of(__doc__, None, smoke={"set": TINY})
    parser.add_argument("--set", action="append", default=[], metavar="NAME.KEY=VALUE", help="override of a recipe")
    args = parser.parse_args()
    arguments = [f"--set={change}" for change in args.set]
    if args.smoke:  # a user's runs/rlhf stays as it is
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            results = rlhf.main(arguments)
            os.chdir(ROOT)
    else:
        results = rlhf.main(arguments)
    rows = [Row(f"{name}_accuracy", "1", accuracy) for name, (accuracy, _) in results.items()]
    rows += [Row(f"{name}_seconds", "s", seconds) for name, (_, seconds) in results.items()]
    print_rows("rlhf", rows, smoke=args.smoke)


if __name__ == "__main__":
    run(main)
