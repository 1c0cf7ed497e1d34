"""A few sequences whose log-probs trainer and rollout engine both compute after each sync.

What fingerprints cannot see, an engine that puts a tensor into the wrong place or does not use it, shows here: in
log-probs that are further from the trainer's than rounding, or in log-probs that stay what they were while the
trainer's move.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.runtime import derive_seed

NUM_SEQUENCES, SEQUENCE_LEN = 4, 24
SEED = 11

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.05}
"""Of the mean difference of log-probs, relative to their mean size where that is above 1."""

FIRST_TIMES = 8.0
FLOORS = {"float64": 1e-9, "float32": 2e-6, "bfloat16": 5e-3}
"""Once an engine has proved itself, its mean difference may be so many times that of then, and this much besides:
rounding stays of one size, while a weight that is not renewed adds to it with every step."""

MOVED = 0.5
"""If this share of the trainer's log-probs changed since the last sync, those of the engine must not all be equal."""


@dataclass(frozen=True)
class Probe:
    """Token sequences, and the trainer's log-probs of their tokens but the first."""

    sequences: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]


def probe_sequences(vocabulary: int, max_len: int) -> list[list[int]]:
    """The same for the same model: tokens drawn from the whole vocabulary."""
    generator = torch.Generator().manual_seed(derive_seed(SEED, vocabulary))
    length = max(2, min(SEQUENCE_LEN, max_len))
    return torch.randint(vocabulary, (NUM_SEQUENCES, length), generator=generator).tolist()


class ProbeCheck:
    """Compares the engine's log-probs with the trainer's, and both with those of the sync before."""

    def __init__(self, dtype: str) -> None:
        self._tolerance, self._floor = TOLERANCES[dtype], FLOORS[dtype]
        self._first: float | None = None
        self._last: tuple[list[float], list[float]] | None = None

    def __call__(self, probe: Probe, found: Sequence[Sequence[float]], version: int) -> dict[str, float]:
        """Raises WeightSyncError if they differ by more than rounding, or if the engine's did not move."""
        ours = [value for row in probe.log_probs for value in row]
        theirs = [value for row in found for value in row]
        differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        scale = max(1.0, sum(map(abs, ours)) / len(ours))
        mean, largest = sum(differences) / len(differences), max(differences)
        if self._last is not None:
            old_ours, old_theirs = self._last
            moved = sum(a != b for a, b in zip(ours, old_ours, strict=True)) / len(ours)
            if moved >= MOVED and theirs == old_theirs:
                raise WeightSyncError(
                    f"after loading version {version} the rollout engine's log-probs of the probe are what they were "
                    f"before, while {moved:.0%} of the trainer's changed: it still has the old weights."
                )
        allowed = self._tolerance * scale
        if self._first is not None:
            allowed = min(allowed, FIRST_TIMES * self._first + self._floor * scale)
        if not mean <= allowed:  # which NaN is not either
            at_first = "" if self._first is None else f" (it was {self._first:.3g} at the first sync)"
            raise WeightSyncError(
                f"after loading version {version} the rollout engine's log-probs of the probe differ from the "
                f"trainer's by {mean:.3g} in the mean{at_first} and {largest:.3g} at most, allowed is a mean of "
                f"{allowed:.3g}: a weight is in the wrong place, or was not loaded."
            )
        if self._first is None:
            self._first = mean
        self._last = ours, theirs
        return {"weight_sync/probe_diff_mean": mean, "weight_sync/probe_diff_max": largest}
