"""The README.md of an exported model: where it came from."""

from pathlib import Path
from typing import Any

from hybridflow.checkpoint.store import Checkpoint

SHOWN = (
    *("data.train_files", "algorithm.advantage", "actor.policy_loss", "rollout.group_size"),
    *("lora.rank", "trainer.seed", "model.dtype"),
)
"""Keys of the run's configuration that a card lists."""


def model_card(model_dir: Path, checkpoint: Checkpoint | None, lora: Any = None) -> str:
    """Markdown with the front matter that model hubs read. Directories are named by their last part only."""
    base = model_dir.resolve().name
    lines = ["---", "library_name: " + ("peft" if lora else "transformers"), f"base_model: {base}"]
    lines += ["tags:", "- reinforcement-learning", "- hybridflow", "---", "", f"# {base}, trained with hybridflow", ""]
    what = f"Adapters of rank {lora['rank']} for `{base}`" if lora else f"`{base}` with trained weights"
    if checkpoint is None:
        return "\n".join([*lines, f"{what}.", ""])
    info = checkpoint.info
    kind = {"train": "reinforcement learning", "sft": "supervised training"}.get(str(info.get("kind")), "training")
    lines.append(f"{what}, after step {checkpoint.step} of {kind}.")
    config = info.get("config")
    if isinstance(config, dict):
        rows = [f"| `{key}` | `{config[key]}` |" for key in SHOWN if key in config]
        lines += ["", "| key | value |", "|---|---|", *rows]
    models = info.get("models")
    if isinstance(models, dict) and "model.path" in models:
        lines += ["", f"Fingerprint of the weights that training started from: `{models['model.path']}`."]
    return "\n".join([*lines, ""])
