"""Sampling ahead of training: a batch is sampled with weights that are `trainer.lag` steps old.

    step        0            1            2              lag = 1
    sampled     0, 1         2            3              each with the weights before the step
    trained     0            1            2

Batches begin in order, and each is trained on once, in the same order. With `rollout.on_new_weights` other than "wait",
the weights before the step are those of a response's first token; later tokens may be of later weights.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import Checkpoint
from hybridflow.errors import BatchError, CheckpointError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.sampling.generation import Begun
from hybridflow.trainers.sampling.sampled import NextPrompts, Sampled
from hybridflow.trainers.sampling.sampling import Sampling


class Ahead:
    """A replacement of `Sampling` that returns batch n sampled with the weights of step max(0, n - lag).

    No batch of a step from `total_steps` on is begun. `metrics` are of the last call.
    """

    def __init__(self, sampling: Sampling, lag: int, total_steps: int) -> None:
        self._sampling, self._lag, self._total_steps = sampling, lag, total_steps
        self._begun: deque[Begun] = deque()
        self._taken: tuple[float, Begun] | None = None
        self.metrics: dict[str, Any] = {}

    def __call__(self, next_prompts: NextPrompts, step: int) -> Sampled:
        """Begin every batch up to the one of step + lag, with the current weights; return the parts of `step`."""
        first = self._begun[-1].step + 1 if self._begun else step
        for begins in range(first, min(step + self._lag + 1, self._total_steps)):
            self._begun.append(self._sampling.begin(next_prompts(), begins))
        begun = self._begun.popleft()
        self._taken = time.time(), begun
        sampled = self._sampling.finish(begun, next_prompts)
        self.metrics = {"sampling/queue_length": float(len(self._begun))} | self._sampling.metrics
        return sampled

    def take_wait(self) -> dict[str, float]:
        """Return `timing_s/queue_wait`: seconds from the end of generation of the last batch to its return, or 0.

        Call it when this batch is generated. Return an empty dictionary for a batch restored from a checkpoint.
        """
        assert self._taken is not None
        (taken, begun), self._taken = self._taken, None
        ends = [handle.duration.ended for part in begun.parts for handle in part.handles()]
        known = [end for end in ends if end is not None]
        return {"timing_s/queue_wait": max(taken - max(known), 0.0)} if known else {}

    def pending(self) -> list[Begun]:
        """Return the batches that have begun and were not returned yet, in order."""
        return list(self._begun)

    def restore(self, checkpoint: Checkpoint, pending: list[dict[str, Any]]) -> None:
        """Continue with the pending batches that `save_pending` described and wrote. Raises BatchError."""
        self._begun = deque(_load_begun(checkpoint.directory, each) for each in pending)


def describe_pending(pending: list[Begun]) -> list[dict[str, Any]]:
    """Return the files of pending batches in a checkpoint, as values that JSON can hold."""
    return [
        {
            "step": begun.step,
            "parts": _part_files(begun),
            "greedy": f"batch_{begun.step:06d}_greedy.safetensors" if begun.greedy else "",
        }
        for begun in pending
    ]


def wait_for(pending: list[Begun]) -> None:
    """Wait until the pending batches are generated. Raises the errors of generation."""
    for begun in pending:
        for part in begun.parts:
            part.get(())


def save_pending(pending: list[Begun], directory: Path) -> None:
    """Wait until the pending batches are generated, and write them.

    Raises CheckpointError if one cannot be written, and the errors of generation.
    """
    for begun, files in zip(pending, describe_pending(pending), strict=True):
        for part, file in zip(begun.parts, files["parts"], strict=True):
            _save(part, directory / file)
        if begun.greedy:
            _save(begun.greedy, directory / files["greedy"])


def _part_files(begun: Begun) -> list[str]:
    """Return a file for each part: joined, the shorter ones would be padded, and bits could change."""
    name, count = f"batch_{begun.step:06d}", len(begun.parts)
    return [f"{name}.safetensors"] if count == 1 else [f"{name}_{part}.safetensors" for part in range(count)]


def _save(batch: DataProtoFuture, path: Path) -> None:
    contents = batch.get()
    try:
        contents.save_to_disk(path)
    except BatchError as error:
        raise CheckpointError(f"a batch that has begun is not saved: {error}") from error


def _load_begun(directory: Path, files: dict[str, Any]) -> Begun:
    parts = tuple(_load(directory / part) for part in files["parts"])
    return Begun(files["step"], lambda: parts, _load(directory / files["greedy"]) if files["greedy"] else None)


def _load(path: Path) -> DataProtoFuture:
    return DataProtoFuture.of(DataProto.load_from_disk(path))
