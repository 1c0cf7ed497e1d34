"""`make rlhf`: reinforcement learning from preferences, from nothing, on a task whose right answer is known.

    random weights ──SFT──> warm start ──┬── reward model from pairs ──> PPO against it
                                         └── DPO on the same pairs

The model learns to write digits in ascending order, though no reward function ever says so: a reward model that was
trained on pairs does. Afterwards each policy is measured by the right answer, which training never saw.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rlhf_task import write_data, write_model

from hybridflow.checkpoint import CheckpointStore, export_model
from hybridflow.config import Config, load_config
from hybridflow.observability import read_jsonl
from hybridflow.trainers import (
    OfflineTrainer,
    PPOTrainer,
    build_dpo_trainer,
    build_reward_model_trainer,
    build_sft_trainer,
    build_trainer,
    build_validator,
)

RECIPES = Path(__file__).parent.parent / "recipes" / "rlhf"
TRUTH = f"reward.function={Path(__file__).parent / 'rlhf_task.py'}:is_ascending"
RUN = Path("runs/rlhf")
console = Console()


def train(name: str, build: Callable[[Config], OfflineTrainer | PPOTrainer], overrides: list[str]) -> float:
    """Run recipes/rlhf/NAME.toml and export its result to runs/rlhf/NAME_model; returns the seconds."""
    console.rule(name)
    start = time.perf_counter()
    config = load_config(RECIPES / f"{name}.toml", overrides)
    with build(config) as trainer:
        trainer.fit()
    checkpoint = CheckpointStore(RUN / name / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint, Path(config.model.path), RUN / f"{name}_model")
    return time.perf_counter() - start


def accuracy(model: str) -> float:
    """The share of held-out prompts that a model answers in ascending order."""
    changes = [f"model.path={RUN / model}", "reward.model_path=", TRUTH]
    with build_validator(load_config(RECIPES / "ppo.toml", changes)) as validator:
        return validator.run()[0]["val/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="override of a recipe, as ppo.trainer.seed=1",
    )
    args = parser.parse_args()

    recipes = ("sft", "reward_model", "ppo", "dpo")
    if unknown := [text for text in args.set if text.partition(".")[0] not in recipes]:
        parser.error(f"--set {unknown[0]}: begin with the name of a recipe, one of {', '.join(recipes)}")

    def changes(name: str) -> list[str]:
        return [text.removeprefix(f"{name}.") for text in args.set if text.startswith(f"{name}.")]

    shutil.rmtree(RUN, ignore_errors=True)
    write_data(RUN / "data", num_demonstrations=8000, num_pairs=4000, num_prompts=4000, num_test=500)
    num_parameters = write_model(RUN / "model")
    console.print(f"made a model of {num_parameters:,} parameters, a tokenizer and data in {RUN}/")
    seconds = {"sft": train("sft", build_sft_trainer, changes("sft"))}
    seconds["reward_model"] = train("reward_model", build_reward_model_trainer, changes("reward_model"))
    seconds["ppo"] = train("ppo", build_trainer, changes("ppo"))
    seconds["dpo"] = train("dpo", build_dpo_trainer, changes("dpo"))

    right_pairs = read_jsonl(RUN / "reward_model" / "metrics.jsonl")[-1]["reward_model/val_accuracy"]
    table = Table("what", "right", "seconds", title="digits in ascending order")
    rows = {"warm start": ("sft", accuracy("sft_model"))}
    rows |= {"reward model, of held-out pairs": ("reward_model", right_pairs)}
    rows |= {"PPO against it": ("ppo", accuracy("ppo_model")), "DPO on the pairs": ("dpo", accuracy("dpo_model"))}
    for what, (name, share) in rows.items():
        table.add_row(what, f"{share:.3f}", f"{seconds[name]:.0f}")
    console.print(table)
    summary = dict(rows.values())
    (RUN / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
