"""The identity of a run: each checkpoint records it, and a run resumes only from a checkpoint of the same identity.

The kind of run, the initial models, the adapters and the algorithm are fixed. The data loader checks the data itself.
Other keys may change when a run is resumed; changes are logged.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hybridflow.checkpoint import Checkpoint
from hybridflow.checkpoint.model_fingerprint import model_fingerprint
from hybridflow.config import Config, leaf_keys
from hybridflow.errors import CheckpointConfigError
from hybridflow.models.hub import with_names
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)

Kind = Literal["train", "sft", "dpo", "reward-model"]
"""The kind of a run, named after its command."""

FIXED_SECTIONS = {
    "train": ("model.dtype", "lora.", "algorithm.", "teacher.", "trainer.lag", "trainer.stream"),
    "sft": ("model.dtype", "lora."),
    "dpo": ("model.dtype", "lora.", "offline.preference_loss", "offline.beta", "offline.average_log_probs"),
    "reward-model": ("model.dtype",),
}
"""Keys, or prefixes of keys, that must be equal in the checkpoint, by kind of run."""


FALLBACKS = {"kernels": "controller.compiled_kernels", "layers": "model.compile"}
"""Facts of the arithmetic that change when a compiler or Triton is not found, with the keys that decide them too."""


def run_identity(config: Config, kind: Kind) -> dict[str, Any]:
    """Return the identity as JSON values: `kind`, `config` (all keys) and `models` (a fingerprint for each path)."""
    used = {"critic": config.uses_critic, "reference": config.uses_reference}
    used |= {"reward": bool(config.reward.model_path), "teacher": config.uses_teacher}
    names = [name for name in used if used[name]] if kind == "train" else ["reference"] if kind == "dpo" else []
    paths = {f"{name}.model_path": getattr(config, name).model_path or config.model.path for name in names}
    models = {key: model_fingerprint(path) for key, path in {"model.path": config.model.path, **paths}.items()}
    return json.loads(json.dumps({"kind": kind, "config": leaf_keys(with_names(config)), "models": models}))


def require_same_run(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Raise CheckpointConfigError, with all differences, if the checkpoint belongs to another run.

    model.dtype = "auto" stands for the recorded dtype (`settle_auto`).
    """
    before = checkpoint.info
    if before.get("kind") != identity["kind"]:
        made_by = f"made by `hybridflow {before['kind']}`" if "kind" in before else "not made by a training run"
        raise CheckpointConfigError(
            f"'{checkpoint.directory}' was {made_by}, so `hybridflow {identity['kind']}` cannot continue it; "
            "choose another trainer.run_dir."
        )
    changes = {
        key: f"{key} was {before['config'][key]!r} and is {value!r}"
        for key, value in identity["config"].items()
        if key in before["config"] and before["config"][key] != value and (key, value) != ("model.dtype", "auto")
    }
    fixed = FIXED_SECTIONS[identity["kind"]]
    if before["config"].get("lora.rank", 0) == identity["config"]["lora.rank"] == 0:
        fixed = tuple(key for key in fixed if key != "lora.")
    wrong = [line for key, line in changes.items() if key.startswith(fixed)]
    wrong += [
        f"the model of {key} differs from the one in '{before['config'][key] or before['config']['model.path']}'"
        for key, fingerprint in identity["models"].items()
        if before["models"].get(key, fingerprint) != fingerprint
    ]
    if wrong:
        raise CheckpointConfigError(
            f"'{checkpoint.directory}' belongs to another run: {'; '.join(wrong)}. "
            "Change it back to continue, or choose another trainer.run_dir."
        )
    if changes:
        logger.info("changed since '%s': %s", checkpoint.directory, "; ".join(changes.values()))


def arithmetic_of(ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the facts of `models.kernels.arithmetic` of all ranks, by name: the different values of each."""
    values: dict[str, set[str]] = {}
    for facts in ranks:
        for name, value in facts.items():
            values.setdefault(name, set()).add(value)
    return {name: ", ".join(sorted(of_ranks)) for name, of_ranks in values.items()}


def require_same_arithmetic(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Log what makes this start round otherwise than the checkpoint's: a device, a number of threads, a version.

    Raises CheckpointConfigError if a machine of the same kind lost or got a compiler or Triton, unless the key changed.
    """
    before, now = checkpoint.info.get("arithmetic", {}), identity["arithmetic"]
    changes = {
        name: f"{name}: {before[name]}, now {now[name]}" for name in now if before.get(name, now[name]) != now[name]
    }
    for name in sorted(FALLBACKS.keys() & changes.keys()) if not changes.keys() & {"device", "processor"} else ():
        key = FALLBACKS[name]
        if checkpoint.info["config"].get(key) == identity["config"][key]:
            raise CheckpointConfigError(
                f"'{checkpoint.directory}' was computed with other code, which rounds differently ({changes[name]}). "
                "Start with the same PATH and CC (a C compiler), packages, and cache of kernels (XDG_CACHE_HOME); or "
                f"accept other rounding with {key}=false."
            )
    if changes:
        logger.warning("'%s' was computed with other rounding; %s", checkpoint.directory, "; ".join(changes.values()))
