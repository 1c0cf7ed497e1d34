"""`make demo-tools`: a small model with random weights learns to call a calculator, and to play a text game.

random weights --SFT--> warm start: mostly answers a product at once --+--GRPO with a calculator--> calls it
and with --full also:                                                  +--GRPO without, as long--> the comparison
                                                                       +--GRPO in a maze--> finds the way
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from calculator import Calculator
from rich.console import Console
from tools_task import write_data, write_model

from hybridflow.checkpoint import CheckpointStore, export_model
from hybridflow.config import load_config
from hybridflow.environments import EnvironmentKind
from hybridflow.observability import plot_curves, read_jsonl
from hybridflow.trainers import OfflineTrainer, PPOTrainer, build_sft_trainer, build_trainer

RECIPES = Path(__file__).parent.parent / "recipes"
RUN = Path("runs/tools")
MADE = ("data", "model", "sft", "warm_start", "calculator", "single", "maze", "agent")
"""What the demo makes in `RUN`, and replaces when it starts again."""
WITHOUT_TOOLS = ("environment.classes={}", "reward.function=examples/calculator.py:exact")
HELD_OUT = 256
CONVERSATIONS = 38_400
"""Conversations of the warm start, 64 for each of its steps."""
console = Console()


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of what all demos of tools take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sft", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe of the warm start"
    )
    parser.add_argument("--grpo", action="append", default=[], metavar="KEY=VALUE", help="override of the GRPO recipes")
    parser.add_argument(
        "--conversations", type=int, default=CONVERSATIONS, metavar="N", help="conversations of the warm start"
    )
    return parser


def make_everything(tools: list[dict[str, Any]], num_conversations: int) -> None:
    """Write data with the schemas of some tools, a tokenizer and a model with random weights."""
    for name in MADE:
        shutil.rmtree(RUN / name, ignore_errors=True)
    write_data(RUN / "data", tools, num_examples=num_conversations, num_train=8_000, num_test=HELD_OUT)
    num_parameters = write_model(RUN / "model")
    console.print(f"created a model of {num_parameters / 1e6:.1f}M parameters, a tokenizer and problems in {RUN}/")


def fit(trainer: OfflineTrainer | PPOTrainer) -> float:
    """Train to the last step and return the seconds; on Ctrl-C the trainer saves, then the demo ends."""
    start = time.perf_counter()
    with trainer:
        trainer.fit()
    if trainer.global_step < trainer.total_steps:
        console.print("the demo was stopped; started again, it begins anew")
        sys.exit(130)
    return time.perf_counter() - start


def warm_start(overrides: list[str]) -> None:
    """Teach the form of conversations by supervised training."""
    console.rule("warm start: supervised training on conversations, of which few call the calculator")
    fit(build_sft_trainer(load_config(RECIPES / "tools_sft.toml", overrides)))
    checkpoint = CheckpointStore(RUN / "sft" / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint.directory, RUN / "model", RUN / "warm_start")


def reinforce(recipe: str, *overrides: str) -> tuple[list[dict[str, Any]], float]:
    """Train with GRPO; return the rows of metrics and the seconds."""
    config = load_config(RECIPES / f"{recipe}.toml", overrides)
    console.rule(f"GRPO: {Path(config.trainer.run_dir).name}")
    seconds = fit(build_trainer(config))
    return read_jsonl(Path(config.trainer.run_dir) / "metrics.jsonl"), seconds


def accuracies(rows: list[dict[str, Any]]) -> list[float]:
    """Return the accuracies on held-out problems, from the warm start to the end of a run."""
    return [row["val/accuracy"] for row in rows if "val/accuracy" in row]


def show_turns(run: str) -> None:
    """Print the turns of the newest sample of a run."""
    samples = read_jsonl(RUN / run / "samples.jsonl")
    sample = samples[-1]
    console.print(f"a sample of step {sample['step']}: {sample['prompt']}")
    for message in sample["messages"]:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
        console.print(f"  {message['role']:10} {message['content']}{' '.join(calls)}", markup=False, highlight=False)


def learn(recipe: str, overrides: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Train with GRPO and show what was learned; return the rows of metrics and the seconds."""
    rows, seconds = reinforce(recipe, *overrides)
    name = Path(load_config(RECIPES / f"{recipe}.toml", overrides).trainer.run_dir).name
    show_turns(name)
    draw(name, rows)
    return rows, seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--full", action="store_true", help="also the comparison without the calculator, and the maze")
    args = parser.parse_args()
    tools = [dict(schema) for schema in EnvironmentKind.of(Calculator, "calculator").schemas]
    make_everything(tools, args.conversations)
    warm_start(args.sft)
    with_tools, seconds = learn("tools_calculator", args.grpo)
    if args.full:
        compare(seconds, seconds / with_tools[-1]["step"], args.grpo)
        play(args.grpo)
    else:
        console.print("skipped: the comparison without the calculator, and the maze; ARGS=--full runs them")
    conclude("demo-tools", with_tools, args.grpo)


def conclude(demo: str, rows: list[dict[str, Any]], overrides: list[str]) -> None:
    """Print the accuracies before and after a run of GRPO, and the time since the program began."""
    problems = load_config(RECIPES / "tools_calculator.toml", overrides).validation.max_samples
    before, after = accuracies(rows)[0], accuracies(rows)[-1]
    seconds = time.time() - psutil.Process().create_time()
    console.print(
        f"{demo}: accuracy {before:.3f} -> {after:.3f} on {problems or HELD_OUT} held-out problems in {seconds:.0f} s",
        soft_wrap=True,
    )


def draw(name: str, rows: list[dict[str, Any]]) -> None:
    """Draw the rewards of a run."""
    plot_curves(rows, ["critic/score/mean", "val/score/mean"], RUN / f"{name}.png", title=name)
    console.print(f"curves: {RUN}/{name}.png", soft_wrap=True)


def compare(seconds: float, seconds_per_step: float, overrides: list[str]) -> None:
    """Train without the calculator for as long as with it."""
    single, single_seconds = _as_long(seconds, seconds_per_step, overrides)
    draw("single", single)
    console.print(
        f"without the calculator, trained for {single_seconds:.0f} s (with it {seconds:.0f} s): "
        f"accuracy {accuracies(single)[-1]:.3f}"
    )


def play(overrides: list[str]) -> None:
    """Train in the maze."""
    maze, _ = learn("tools_maze", overrides)
    start, end = at_both_ends(maze, "reward/reached/mean")
    console.print(f"maze: reached the goal in {start:.2f} of the games at the start, {end:.2f} at the end")


def at_both_ends(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return the means of a metric over the first and over the last tenth of a run's steps."""
    found = [row[name] for row in rows if name in row]
    few = max(1, len(found) // 10)
    return sum(found[:few]) / few, sum(found[-few:]) / few


def _as_long(seconds: float, seconds_per_step: float, overrides: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Train without the calculator, in one turn, for at least as long as with it."""
    steps = max(1, round(seconds / seconds_per_step))
    done = 0.0
    rows: list[dict[str, Any]] = []
    while done < seconds:
        changes = [f"trainer.run_dir={RUN}/single", f"trainer.total_steps={steps}"]
        rows, more = reinforce("tools_calculator", *overrides, *WITHOUT_TOOLS, *changes)
        done += more
        steps += max(1, round((seconds - done) * steps / done)) if done < seconds else 0
    return rows, done


if __name__ == "__main__":
    main()
