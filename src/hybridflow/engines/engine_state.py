"""Checks that a stored state fits an engine, before any of it is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.config import LoRAConfig
from hybridflow.errors import CheckpointConfigError, CheckpointError
from hybridflow.runtime.alike import require_alike

CHECK = "it is of a different model. Check model.path."


def require_fitting_state(parameters: Mapping[str, Tensor], state: dict[str, Any], *, with_optimizer: bool) -> None:
    """Raise CheckpointError unless `state` has exactly these parameters and, if requested, moments of their shapes.

    Both must be floats, of any precision: the parameters of a float32 run may be loaded as bfloat16.
    """
    wanted = {"num_updates": 0, "model": {}} | ({"optimizer": {}} if with_optimizer and "optimizer" in state else {})
    require_alike(state, wanted, "the state of the model")
    stored = state["model"]
    for name, parameter in parameters.items():
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no parameter '{name}'; {CHECK}")
        _require_like(f"parameter '{name}'", stored[name], parameter)
    if extra := sorted(set(stored) - set(parameters)):
        raise CheckpointError(f"the checkpoint has parameters the model lacks: {', '.join(extra[:5])}; {CHECK}")
    if not with_optimizer:
        return
    if "optimizer" not in state:
        raise CheckpointError("the checkpoint has no optimizer state: it was saved by an engine without an optimizer.")
    for name, moments in state["optimizer"].items():
        require_alike(moments, {}, f"the optimizer state of '{name}'")
        if name not in parameters:
            raise CheckpointError(f"the checkpoint has optimizer state of '{name}', which the model lacks; {CHECK}")
        for moment, value in moments.items():
            # The step count is a float without dimensions.
            _require_like(f"{moment} of '{name}'", value, torch.zeros(()) if moment == "step" else parameters[name])


def description_of(lora: LoRAConfig) -> dict[str, Any]:
    """Return the entry `lora` of a state."""
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}


def require_same_adapters(lora: LoRAConfig | None, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the state has the same adapters as the engine, or both have none."""
    require_alike(state, {}, "the state of the model")
    if state.get("lora"):
        require_alike(state["lora"], {"rank": 0, "targets": []}, "the state's adapters")
    stored, wanted = (
        {**lora, "targets": sorted(lora["targets"])} if lora else None
        for lora in (state.get("lora"), description_of(lora) if lora else None)
    )
    if stored == wanted:
        return
    if stored is None:
        assert wanted is not None
        raise CheckpointConfigError(
            f"the checkpoint was trained without adapters, but lora.rank={wanted['rank']}; use lora.rank = 0."
        )
    if wanted is None:
        raise CheckpointConfigError(
            f"the checkpoint has only adapters; set lora.rank = {stored['rank']}, lora.alpha = {stored['alpha']} and "
            f"lora.targets = {stored['targets']}, as in its training."
        )
    changed = (f"lora.{key}={stored[key]}, not {wanted[key]}" for key in wanted if stored[key] != wanted[key])
    raise CheckpointConfigError(f"the checkpoint's adapters were trained with {', '.join(changed)}; use these values.")


def _require_like(what: str, stored: Any, wanted: Tensor) -> None:
    """Raise CheckpointError unless `stored` is a tensor of floats with the shape of `wanted`."""
    if not isinstance(stored, Tensor) or not stored.dtype.is_floating_point:
        found = stored.dtype if isinstance(stored, Tensor) else type(stored).__name__
        raise CheckpointError(
            f"{what} is stored as {found}, but {wanted.dtype} or another float is expected; the checkpoint is damaged."
        )
    if stored.shape != wanted.shape:
        raise CheckpointError(
            f"{what} has shape {tuple(stored.shape)} in the checkpoint and {tuple(wanted.shape)} in the model; {CHECK}"
        )
