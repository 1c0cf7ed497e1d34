"""The card of an exported model: what it was trained from, how, and with which settings."""

from pathlib import Path
from typing import Any

from hybridflow.checkpoint.store import Checkpoint
from hybridflow.models.hub.names import name_of

_ALWAYS = ("data.train_files", "lora.rank", "trainer.seed", "model.dtype")
_OFFLINE = ("offline.batch_size", "offline.optimizer.lr")
_DPO = ("offline.preference_loss", "offline.beta", "offline.average_log_probs", "reference.model_path")
SHOWN = {
    "train": ("algorithm.advantage", "actor.policy_loss", "rollout.group_size", "teacher.loss", *_ALWAYS),
    "sft": (*_OFFLINE, *_ALWAYS),
    "dpo": (*_DPO, *_OFFLINE, *_ALWAYS),
    "reward-model": (*_OFFLINE, *_ALWAYS),
}
"""Configuration keys that the card lists, by the kind of run."""

KINDS = {
    "train": "reinforcement learning",
    "sft": "supervised training",
    "dpo": "preference optimization",
    "reward-model": "learning from preferences",
}
"""Names of the kinds of runs in the card's text."""


def model_card(model_dir: Path, checkpoint: Checkpoint | None, lora: Any = None) -> str:
    """Return the card as Markdown, with the front matter that model hubs read.

    A model from the hub is named as there, and directories by their last part only. `lora` is the adapters' entry if
    adapters are exported alone.
    """
    name = name_of(model_dir)
    repository, _, revision = name.partition("@")
    base = repository if revision else model_dir.resolve().name
    lines = ["---", "library_name: " + ("peft" if lora else "transformers")]
    if revision:  # a hub refuses other values
        lines.append(f"base_model: {repository}")
    lines += ["tags:", "- reinforcement-learning", "- hybridflow", "---", "", f"# {base}, trained with hybridflow", ""]
    what = f"Adapters of rank {lora['rank']} for `{base}`" if lora else f"`{base}` with trained weights"
    if checkpoint is not None and checkpoint.info.get("kind") == "reward-model":
        what = f"A reward model on the body of `{base}`: one score for a whole conversation"
    if checkpoint is None:
        return "\n".join([*lines, f"{what}.", ""])
    info = checkpoint.info
    kind = KINDS.get(str(info.get("kind")), "training")
    lines.append(f"{what}, after step {checkpoint.step} of {kind}.")
    if config := info.get("config"):
        shown = SHOWN.get(str(info.get("kind")), SHOWN["train"])
        rows = [f"| `{key}` | `{config[key]}` |" for key in shown if key in config]
        lines += ["", "| key | value |", "|---|---|", *rows]
    if fingerprint := info.get("models", {}).get("model.path"):
        lines += ["", f"Fingerprint of the weights that training started from: `{fingerprint}`."]
    return "\n".join([*lines, ""])
