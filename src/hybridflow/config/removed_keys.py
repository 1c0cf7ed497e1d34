"""Keys that were removed: with the value that all runs have now they are left out, so that earlier runs resume."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """`value`: that of a run without the feature. `advice`: what to use in its place, or why there is nothing."""

    value: Any
    advice: str


def _fixed(value: Any) -> Removed:
    return Removed(value, f"its value is fixed at {value}; leave it out")


_FAULTS = "faults are injected by benchmarks/support/faults.py, see docs/recovery.md"

REMOVED = {
    "advice.chat_template": _fixed(0.1),
    "advice.contradictory_prompts": _fixed(0.0),
    "advice.micro_batches": Removed(64, "no finding uses it; see `hybridflow report-performance`"),
    "advice.padding": _fixed(0.5),
    "advice.repeated_prompts": Removed(0.1, "no finding uses it; remove repeated rows from data.train_files"),
    "advice.warmup": Removed(0.5, "no finding uses it; compare warmup_steps with trainer.total_steps"),
    "faults.delay_s": Removed(5.0, _FAULTS),
    "faults.plan": Removed((), _FAULTS),
    "faults.random": Removed(0, _FAULTS),
    "faults.seed": Removed(0, _FAULTS),
    "placement.lend": Removed(False, "training ranks do not generate for another pool; use trainer.lag"),
    "rollout.order": Removed("sampled", "batches are trained on as they began; use trainer.stream, or a larger lag"),
    "rollout.schedule": Removed("even", "engines get equal numbers of prompts; use trainer.stream or trainer.lag"),
}

SECTIONS = ("faults",)
"""Sections that were removed."""

RENAMED = {
    "sft": "renamed to [offline]",
    "data.shuffle": "replaced by data.order = 'shuffled' or 'sequential'",
    **{key: f"it was removed: {removed.advice}" for key, removed in REMOVED.items()},
}
"""What to write in place of old names in recipes and in config.toml of earlier runs."""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe without removed keys that have the value of all runs."""
    kept = dict(values)
    for key, removed in REMOVED.items():
        section, _, name = key.partition(".")
        own = kept.get(section)
        if isinstance(own, dict) and name in own and own[name] == removed.value:
            kept[section] = {other: value for other, value in own.items() if other != name}
    return {section: own for section, own in kept.items() if own or section not in SECTIONS}
