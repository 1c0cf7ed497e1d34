"""Quantized weights and speculative decoding: vLLM's arguments for them, and what its build cannot do."""

# pyright: reportMissingImports=false

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import RolloutConfigError

QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""vLLM's names: of fp8 the one with a scale for each output of a layer, and for each token of its input."""


def quantization_arguments(quantization: str, dtype: str) -> dict[str, Any]:
    """Return vLLM's arguments for weights that are quantized whenever they are loaded; none for ""."""
    if quantization and dtype != "bfloat16":
        raise RolloutConfigError(
            f"rollout.quantization={quantization!r} is not supported with model.dtype={dtype!r}: vLLM quantizes "
            "weights of bfloat16; use dtype = 'bfloat16', or quantization = ''."
        )
    return {"quantization": QUANTIZATIONS[quantization]} if quantization else {}


def speculation_arguments(speculative: Mapping[Any, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for speculative decoding, as in `rollout.speculative`; none if it is empty.

    Tokens are scheduled synchronously, so that none of a step in flight depends on drafts that are not verified yet.
    """
    if not speculative:
        return {}
    arguments: dict[str, Any] = {"speculative_config": dict(speculative), "async_scheduling": False}
    if draft := speculative.get("model"):
        if not Path(draft, "config.json").is_file():
            raise RolloutConfigError(
                f"rollout.speculative.model={draft!r} is not a model directory: config.json not found; give the "
                "directory of a smaller model with the same vocabulary."
            )
        # vLLM loads both models in the same way, and only the trained one gets weights from the trainer.
        arguments |= {"load_format": "auto", "sleep_preserve_parameter_names": ["draft.*"]}
        arguments["speculative_config"]["method"] = "draft_model"
    return arguments


def require_right_temperatures() -> None:
    """Raise RolloutConfigError if vLLM's build for CPUs verifies drafts at wrong temperatures, as that of 0.32.0 does.

    Its function that repeats the temperature of a request for each draft leaves the result as it was. It is there once
    an engine has started.
    """
    if torch.cuda.is_available():
        return
    from vllm.v1.sample.rejection_sampler import _expand

    found = torch.zeros(3)
    _expand(found, torch.tensor([0.5, 2.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    if found.tolist() != [0.5, 0.5, 2.0]:
        raise RolloutConfigError(
            "rollout.speculative is not supported by this build of vLLM for CPUs, which verifies drafts at wrong "
            "temperatures; remove it, or generate on a GPU."
        )
