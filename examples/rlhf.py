"""`make rlhf`: reinforcement learning from preferences, starting from random weights.

    random weights ──SFT──> warm start ──┬── reward model from pairs ──> PPO against it
                                         └── DPO on the same pairs

The model learns to write digits in ascending order. No reward function checks that; the only reward is a reward model
trained on pairs of responses. Afterwards each policy is measured by the right answer, which training never saw.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
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
LABELS = {
    "sft": "warm start",
    "reward_model": "reward model, on held-out pairs",
    "ppo": "PPO against it",
    "dpo": "DPO on the pairs",
}
console = Console()


def train(name: str, build: Callable[[Config], OfflineTrainer | PPOTrainer], overrides: list[str]) -> float:
    """Run recipes/rlhf/NAME.toml, export its result to runs/rlhf/NAME_model and return the seconds."""
    console.rule(name)
    start = time.perf_counter()
    config = load_config(RECIPES / f"{name}.toml", overrides)
    with build(config) as trainer:
        trainer.fit()
        if trainer.global_step < trainer.total_steps:  # on Ctrl-C, `fit` finishes its step, saves and returns
            sys.exit(130)
    checkpoint = CheckpointStore(RUN / name / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint, Path(config.model.path), RUN / f"{name}_model")
    return time.perf_counter() - start


def accuracy(model: str, overrides: list[str]) -> float:
    """Return the share of held-out prompts that a model answers in ascending order."""
    changes = [*overrides, f"model.path={RUN / model}", "reward.model_path=", TRUTH]
    with build_validator(load_config(RECIPES / "ppo.toml", changes)) as validator:
        return validator.run()[0]["val/accuracy"]


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    """Run everything; return the accuracy and the training seconds of each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="override of a recipe, for example ppo.trainer.seed=1",
    )
    args = parser.parse_args(arguments)

    recipes = ("sft", "reward_model", "ppo", "dpo")
    if unknown := [text for text in args.set if text.partition(".")[0] not in recipes]:
        parser.error(f"--set {unknown[0]} is invalid: expected NAME.KEY=VALUE with NAME one of {', '.join(recipes)}")

    def overrides(name: str) -> list[str]:
        return [text.removeprefix(f"{name}.") for text in args.set if text.startswith(f"{name}.")]

    shutil.rmtree(RUN, ignore_errors=True)
    write_data(RUN / "data", num_demonstrations=8000, num_pairs=4000, num_prompts=4000, num_test=500)
    num_parameters = write_model(RUN / "model")
    console.print(f"made a model of {num_parameters:,} parameters, a tokenizer and data in {RUN}/")
    seconds = {"sft": train("sft", build_sft_trainer, overrides("sft"))}
    seconds["reward_model"] = train("reward_model", build_reward_model_trainer, overrides("reward_model"))
    seconds["ppo"] = train("ppo", build_trainer, overrides("ppo"))
    seconds["dpo"] = train("dpo", build_dpo_trainer, overrides("dpo"))

    right_pairs = read_jsonl(RUN / "reward_model" / "metrics.jsonl")[-1]["reward_model/val_accuracy"]
    accuracies = {name: accuracy(f"{name}_model", overrides("ppo")) for name in ("sft", "ppo", "dpo")}
    accuracies["reward_model"] = right_pairs
    table = Table("model", "accuracy", "seconds", title="digits in ascending order")
    for name, label in LABELS.items():
        table.add_row(label, f"{accuracies[name]:.3f}", f"{seconds[name]:.0f}")
    console.print(table)
    (RUN / "summary.json").write_text(json.dumps({name: accuracies[name] for name in LABELS}, indent=1) + "\n")
    return {name: (accuracies[name], seconds[name]) for name in LABELS}


if __name__ == "__main__":
    main()
