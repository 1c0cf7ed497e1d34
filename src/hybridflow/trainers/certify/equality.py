"""Whether two run directories hold the same results, bit for bit: rows, metrics, and the state of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.checkpoint.state_files import read_tree
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointError
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.trainers.run.run_states import comparable
from hybridflow.trainers.run.training_state import CONTROLLER

_NOTHING = object()
ROW = "row "


@dataclass(frozen=True)
class Equality:
    """What was compared, as a text, and the first `difference`; empty if there is none."""

    compared: str
    difference: str = ""


def equality_of(first: Path, other: Path, *, after: int = 0, with_controller: bool = True) -> Equality:
    """Compare the steps of two runs after step `after`, and the checkpoints of the last one.

    The difference names the first step that differs and in it the row or the metric with both values, or else the first
    tensor. Metrics of weight syncs are left out, since engines of new processes get the weights again.
    `with_controller`: also compare the state of the controller, which has that of Python's random number generator.
    """
    runs = RunFiles(first), RunFiles(other)
    step, num_rows, num_tensors, names, difference = 0, 0, 0, set[str](), ""
    of_steps = [{row["step"]: comparable(row) for row in run.metrics} for run in runs]
    steps = sorted(step for step in {*of_steps[0], *of_steps[1]} if step > after)
    for step in steps:
        metrics, rows = [each.get(step, {}) for each in of_steps], [_rows(run, step) for run in runs]
        num_rows, names = num_rows + len(rows[0]), names | metrics[0].keys()
        if not all(metrics):
            difference = f"it is missing in the {'other' if metrics[0] else 'first'} run"
        else:
            difference = difference_within(ROW, *rows) or difference_within("", *metrics)
        if difference:
            break
    else:
        try:
            checkpoints = [CheckpointStore(run / "checkpoints").open(steps[-1]) for run in (first, other)]
            left_out = set() if with_controller else {CONTROLLER}
            num_tensors, difference = _difference_of_checkpoints(checkpoints, left_out)
        except CheckpointError as error:
            difference = str(error)
    numbers = {"step": len(steps), "row": num_rows, "metric": len(names), "tensor": num_tensors}
    compared = ", ".join(counted(number, what) for what, number in numbers.items() if number)
    return Equality(compared, difference and f"step {step}: {difference}")


def _difference_of_checkpoints(checkpoints: list[Checkpoint], left_out: set[str]) -> tuple[int, str]:
    """Return the number of compared tensors, and what differs in the first state that does, a tensor or a value."""
    count = 0
    states = [_states(each) - left_out for each in checkpoints]
    if only := sorted(states[0] ^ states[1]):
        return count, f"only one of the checkpoints has the state {only[0]}"
    for state in sorted(states[0]):
        places = [checkpoint.directory / state for checkpoint in checkpoints]
        with StoredTensors(places[0]) as stored, StoredTensors(places[1]) as others:
            if only := sorted(stored.keys() ^ others.keys()):
                return count, f"only one of the checkpoints has the tensor {only[0]} of {state}"
            for name in stored:
                count += 1
                if found := different_elements(stored[name], others[name]):
                    return count, f"tensor {name} of {state}: {found}"
        if state in checkpoints[0].components:
            trees = (read_tree(place.with_name(f"{state}.json")) for place in places)
            if found := difference_within(f"{state}.", *trees):
                return count, found
    return count, ""


def _states(checkpoint: Checkpoint) -> set[str]:
    """Return the states with tensors in a checkpoint: those of groups, and the batches that are sampled ahead."""
    files = (path.relative_to(checkpoint.directory) for path in checkpoint.directory.rglob("*.safetensors"))
    return {file.parts[0].removesuffix(".safetensors") for file in files}


def different_elements(one: Tensor, other: Tensor) -> str:
    """Return how many elements of two tensors differ in their bits, the first, and by how much at most; "" if none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{other.dtype} {tuple(other.shape)}, not {one.dtype} {tuple(one.shape)}"
    bits = [each.detach().contiguous().reshape(-1, 1).view(torch.uint8) for each in (one, other)]
    different = (bits[0] != bits[1]).any(-1)
    if not different.any():
        return ""
    largest = float((one.double() - other.double()).abs().max())
    return (
        f"{int(different.sum()):,} of {one.numel():,} elements differ, by at most {largest:.3g}; the first is element "
        f"{int(different.nonzero()[0])}"
    )


def difference_within(name: str, one: Any, other: Any) -> str:
    """Return the name and both values of the first part of two values that differs; "" if none does.

    The values are as in JSON; lists of rows of unequal length name the first row that differs, and the lengths.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        parts = [(f"{name}{key}", one.get(key, _NOTHING), other.get(key, _NOTHING)) for key in sorted({*one, *other})]
    elif isinstance(one, list) and isinstance(other, list):
        parts = [(f"{name}{place}", *pair) for place, pair in enumerate(zip(one, other, strict=False))]
    else:
        return "" if repr(one) == repr(other) else f"{name} is {_both(one, other)}"  # also of -0.0 and 0.0
    is_cut = isinstance(one, list) and len(one) != len(other)
    lengths = f" ({len(other)} values, not {len(one)})" if is_cut else ""
    for place, ours, theirs in parts:
        is_nested = isinstance(ours, Mapping | list) and isinstance(theirs, Mapping | list)
        end = "" if not is_nested else ": " if name == ROW else "."
        if found := difference_within(f"{place}{end}", ours, theirs):
            return f"{found}{lengths}"
    return f"{name}{lengths}" if is_cut else ""


def _both(one: Any, other: Any) -> str:
    texts = ["missing" if value is _NOTHING else repr(value) for value in (other, one)]
    shown = ", not ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in texts)
    numbers = all(isinstance(value, int | float) for value in (one, other))
    return f"{shown} (by {abs(other - one):.3g})" if numbers else shown


def _rows(run: RunFiles, step: int) -> list[dict[str, Any]]:
    """Return the responses of a step: the numbers of each, and the tokens of those that were kept."""
    columns = next((row for row in run.rollouts if row["step"] == step), {"score": []})
    rows = [
        {name: column[i] for name, column in columns.items() if name != "step"} for i in range(len(columns["score"]))
    ]
    for sample in run.samples:
        if sample["step"] == step and 0 <= sample.get("row", -1) < len(rows):
            rows[int(sample["row"])]["sample"] = sample
    return rows


def counted(count: int, what: str) -> str:
    """Return a number of things as a text."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
