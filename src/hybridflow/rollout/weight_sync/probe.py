"""The probe: a few sequences whose log-probs both trainer and rollout engine compute after each sync.

It detects faults that fingerprints cannot: an engine that loads a tensor into the wrong parameter, or does not use it.
Its log-probs then differ from the trainer's by more than rounding, or stay equal while the trainer's change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.runtime.random_streams import derive_seed

NUM_SEQUENCES, SEQUENCE_LEN = 4, 24
SEED = 11

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.05, "fp8": 0.15}
"""Largest allowed mean difference of log-probs, relative to their mean absolute value if that is above 1."""

FIRST_TIMES = 8.0
FLOORS = {"float64": 1e-9, "float32": 2e-6, "bfloat16": 5e-3, "fp8": 0.02}
"""Largest allowed mean difference after the first sync: FIRST_TIMES the difference at the first sync, plus the floor.
Rounding differences stay constant, while a weight that is not updated adds to the difference with every step."""

MOVED = 0.5
"""Share of the trainer's log-probs that must have changed for an engine without any change to be an error."""


@dataclass(frozen=True)
class Probe:
    """Token sequences, and the trainer's log-probs of all their tokens but the first."""

    sequences: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]


def probe_sequences(vocabulary: int, max_len: int) -> list[list[int]]:
    """Return token sequences drawn from the whole vocabulary; equal arguments give equal sequences."""
    generator = torch.Generator().manual_seed(derive_seed(SEED, vocabulary))
    length = max(2, min(SEQUENCE_LEN, max_len))
    return torch.randint(vocabulary, (NUM_SEQUENCES, length), generator=generator).tolist()


class ProbeCheck:
    """The comparison of the engine's log-probs with the trainer's, and of both with those of the previous sync."""

    def __init__(self, dtype: str) -> None:
        self._tolerance, self._floor = TOLERANCES[dtype], FLOORS[dtype]
        self._first: float | None = None
        self._last: tuple[list[float], list[float]] | None = None

    def __call__(self, probe: Probe, found: Sequence[Sequence[float]], version: int) -> dict[str, float]:
        """Return metrics of the difference.

        Raises WeightSyncError if the log-probs differ by more than rounding, or if the engine's did not change.
        """
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
                    f"after loading version {version} the rollout engine's log-probs of the probe did not change, "
                    f"but {moved:.0%} of the trainer's did: the engine still has the old weights."
                )
        allowed = self._tolerance * scale
        if self._first is not None:
            allowed = min(allowed, FIRST_TIMES * self._first + self._floor * scale)
        if not mean <= allowed:  # also true for NaN
            at_first = "" if self._first is None else f" ({self._first:.3g} at the first sync)"
            raise WeightSyncError(
                f"after loading version {version} the rollout engine's log-probs of the probe differ from the "
                f"trainer's: mean difference {mean:.3g}{at_first}, largest {largest:.3g}, but the allowed mean is "
                f"{allowed:.3g}; a weight was loaded into the wrong parameter, or not loaded."
            )
        if self._first is None:
            self._first = mean
        self._last = ours, theirs
        return {"weight_sync/probe_diff_mean": mean, "weight_sync/probe_diff_max": largest}
