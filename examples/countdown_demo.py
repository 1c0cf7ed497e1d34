"""`make demo`: a small model with random weights learns countdown by reinforcement learning, in minutes on a CPU.

    random weights --SFT--> warm start: knows the format, gives up early --GRPO--> searches and checks

`--control` trains the same warm start with more supervised steps for as long as GRPO took, as a comparison.
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from countdown_task import write_data, write_model  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from hybridflow.checkpoint import CheckpointStore, export_model  # noqa: E402
from hybridflow.config import Config, load_config  # noqa: E402
from hybridflow.observability import plot_curves, read_jsonl  # noqa: E402
from hybridflow.trainers import (  # noqa: E402
    OfflineTrainer,
    PPOTrainer,
    build_sft_trainer,
    build_trainer,
    build_validator,
)

RECIPES = Path(__file__).parent.parent / "recipes"
RUN = Path("runs/countdown")
MADE = ("data", "model", "sft", "warm_start", "grpo", "control", "control_model")
"""What the demo makes in `RUN`, and replaces when it starts again."""
SEED = 0
console = Console()


def make_everything() -> None:
    """Write data, tokenizer and a model with random weights."""
    for name in MADE:
        shutil.rmtree(RUN / name, ignore_errors=True)
    write_data(RUN / "data", num_examples=45_000, num_train=8_000, num_test=512, seed=SEED)
    num_parameters = write_model(RUN / "model", seed=SEED)
    console.print(f"created a model of {num_parameters / 1e6:.1f}M parameters, a tokenizer and problems in {RUN}/")


def warm_start(overrides: list[str]) -> None:
    """Teach the format by supervised training; the demonstrations mostly give up after one trial."""
    console.rule("warm start: supervised training on demonstrations that give up early")
    fit(build_sft_trainer(load_config(RECIPES / "countdown_sft.toml", overrides)))
    export("sft", "warm_start")


def fit(trainer: OfflineTrainer | PPOTrainer) -> None:
    """Train to the last step; on Ctrl-C the trainer finishes its step and saves, then the demo ends."""
    trainer.fit()
    if trainer.global_step < trainer.total_steps:
        console.print("the demo was stopped; started again, it begins anew")
        sys.exit(130)


def export(run: str, name: str) -> None:
    """Export the newest checkpoint of a run as a Hugging Face model."""
    checkpoint = CheckpointStore(RUN / run / "checkpoints").latest()
    if checkpoint is not None:
        shutil.rmtree(RUN / name, ignore_errors=True)
        export_model(checkpoint.directory, RUN / "model", RUN / name)


def reinforce(config: Config) -> dict[str, Any]:
    """Train with GRPO from the warm start; return the greedy accuracy on held-out problems before and after."""
    trainer = build_trainer(config)
    before, before_samples = trainer.validator.run()
    console.rule(f"GRPO from a greedy accuracy of {before['val/accuracy']:.3f}")
    start = time.perf_counter()
    fit(trainer)
    seconds = time.perf_counter() - start
    after, after_samples = trainer.validator.run()
    show_examples(before_samples, after_samples)
    rows = [{"step": 0, **before}, *read_jsonl(RUN / "grpo" / "metrics.jsonl")]
    curve = RUN / "reward_curve.png"
    plot_curves(
        rows, ["critic/score/mean", "val/accuracy"], curve, title="countdown: reward of samples, greedy accuracy"
    )
    console.print(f"curve: {curve}\nmodel: .venv/bin/hybridflow export {RUN / 'grpo'} DIRECTORY", soft_wrap=True)
    return {
        "before": before["val/accuracy"],
        "after": after["val/accuracy"],
        "num_problems": len(after_samples),
        "grpo_seconds": seconds,
    }


def show_examples(before: list[dict[str, Any]], after: list[dict[str, Any]], count: int = 6) -> None:
    """Print problems that the trained model solves and the warm start did not."""
    table = Table("problem", "before", "after", title="newly solved problems, greedy", show_lines=True)
    solved = [(b, a) for b, a in zip(before, after, strict=True) if b["score"] < 1 <= a["score"]]
    for old, new in solved[:count]:
        table.add_row(old["prompt"], old["response"], new["response"])
    console.print(table)


def control(seconds: float, sft_seconds_per_step: float, overrides: list[str], validation_overrides: list[str]) -> None:
    """Continue the warm start's run on its data for `seconds`, and evaluate the result like the demo."""
    shutil.rmtree(RUN / "control", ignore_errors=True)
    shutil.copytree(RUN / "sft", RUN / "control")
    config = load_config(RECIPES / "countdown_sft.toml", overrides)
    more = round(seconds / sft_seconds_per_step)
    steps = config.trainer.total_steps + more
    console.rule(f"control: {more} more supervised steps, for as long as GRPO took ({seconds:.0f} s)")
    changes = [f"trainer.run_dir={RUN / 'control'}", f"trainer.total_steps={steps}"]
    fit(build_sft_trainer(load_config(RECIPES / "countdown_sft.toml", [*overrides, *changes])))
    export("control", "control_model")
    grpo = RECIPES / "countdown_grpo.toml"
    before, _ = build_validator(load_config(grpo, validation_overrides)).run()
    overrides_of_control = [*validation_overrides, f"model.path={RUN / 'control_model'}"]
    after, samples = build_validator(load_config(grpo, overrides_of_control)).run()
    console.print(
        f"control: accuracy {before['val/accuracy']:.3f} -> {after['val/accuracy']:.3f} "
        f"on {len(samples)} held-out problems in {seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--control", action="store_true", help="more supervised training instead of GRPO; requires a finished demo"
    )
    parser.add_argument(
        "--sft", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe of the warm start"
    )
    parser.add_argument("--grpo", action="append", default=[], metavar="KEY=VALUE", help="override of the GRPO recipe")
    args = parser.parse_args()
    summary_file = RUN / "summary.json"
    if args.control:
        if not summary_file.is_file():
            parser.error(
                f"{summary_file} does not exist: the control runs as long as the demo's GRPO; run `make demo` first."
            )
        summary = json.loads(summary_file.read_text())
        control(summary["grpo_seconds"], summary["sft_seconds_per_step"], args.sft, args.grpo)
        return
    make_everything()
    start = time.perf_counter()
    warm_start(args.sft)
    sft_steps = read_jsonl(RUN / "sft" / "metrics.jsonl")
    sft_seconds = time.perf_counter() - start
    summary = reinforce(load_config(RECIPES / "countdown_grpo.toml", ["trainer.val_before_train=false", *args.grpo]))
    summary |= {"sft_seconds_per_step": sft_seconds / len(sft_steps), "seconds": time.perf_counter() - START}
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    console.print(
        f"demo: accuracy {summary['before']:.3f} -> {summary['after']:.3f} "
        f"on {summary['num_problems']} held-out problems in {summary['seconds']:.0f} s",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
