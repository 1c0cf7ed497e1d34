"""A comparison of two records of optimizer steps (see grpo_record.py), number by number, each with its tolerance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from support.errors import BenchmarkError
from support.grpo_record import NUM_STEPS, Record

RELATIVE_TOLERANCE = 2e-5
CHANGE_TOLERANCE = 5e-4
"""Of the change of a parameter: AdamW divides by the size of the gradient, which enlarges the error of small ones."""
COUNT_TOLERANCE = 1e-6
"""Of a share of the tokens: a single token is 1e-2."""


@dataclass(frozen=True)
class Comparison:
    """One figure of both sides, of which `where` names the parameter; `error` must be at most `tolerance`."""

    name: str
    ours: float
    peer: float
    error: float
    tolerance: float
    where: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


def compare(ours: Record, peer: Record) -> list[Comparison]:
    """Compare two records (see grpo_record.py), the gradients and changes of all parameters by the worst one.

    An error is relative: of log-probs to the mean size of the peer's; of an element of a gradient to the largest
    element of its parameter; of the change of a parameter, as a vector, to its length. Raises BenchmarkError if the
    records have different tensors.
    """
    if different := sorted(ours.keys() ^ peer.keys()) or [n for n in ours if ours[n].shape != peer[n].shape]:
        raise BenchmarkError(f"the two sides recorded different tensors: {', '.join(different)}; compare equal models.")
    comparisons = [
        _scalars(f"{name}.{step}", label.format(step + 1), ours, peer, tolerance)
        for step in range(NUM_STEPS)
        for name, label, tolerance in (
            ("loss", "loss, step {}", RELATIVE_TOLERANCE),
            ("grad_norm", "gradient norm, step {}", RELATIVE_TOLERANCE),
            ("clipped_share", "share of clipped tokens, step {}", COUNT_TOLERANCE),
        )
    ]
    comparisons.append(_largest_difference("log_probs", "log-prob", ours, peer, peer["log_probs"].abs().mean()))
    gradients = [name for name in peer if name.startswith("gradient.")]
    comparisons.append(
        _worst(
            [_largest_difference(name, "gradient element", ours, peer, peer[name].abs().max()) for name in gradients]
        )
    )
    changes = [name for name in peer if name.startswith("change.")]
    comparisons.append(_worst([_vectors(name, "change by both steps", ours, peer) for name in changes]))
    return comparisons


def require_agreement(comparisons: Sequence[Comparison]) -> None:
    """Raise BenchmarkError if a figure differs by more than its tolerance, or is NaN."""
    if wrong := [c for c in comparisons if not c.agrees]:
        listed = "; ".join(
            f"{c.name} {c.where} {c.ours:.8g} against {c.peer:.8g} (error {c.error:.1e})".replace("  ", " ")
            for c in wrong
        )
        raise BenchmarkError(f"hybridflow and TRL differ on identical samples: {listed}; one of them is wrong.")


def _scalars(name: str, label: str, ours: Record, peer: Record, tolerance: float) -> Comparison:
    mine, theirs = ours[name].item(), peer[name].item()
    return Comparison(label, mine, theirs, _relative(abs(mine - theirs), abs(theirs)), tolerance)


def _largest_difference(name: str, label: str, ours: Record, peer: Record, scale: torch.Tensor) -> Comparison:
    difference = (ours[name] - peer[name]).abs().flatten()
    index = int(difference.argmax())  # of a NaN, if there is one
    mine, theirs = ours[name].flatten()[index].item(), peer[name].flatten()[index].item()
    error = _relative(difference[index].item(), scale.item())
    return Comparison(label, mine, theirs, error, RELATIVE_TOLERANCE, name.partition(".")[2])


def _vectors(name: str, label: str, ours: Record, peer: Record) -> Comparison:
    mine, theirs = ours[name].norm().item(), peer[name].norm().item()
    error = _relative((ours[name] - peer[name]).norm().item(), theirs)
    return Comparison(label, mine, theirs, error, CHANGE_TOLERANCE, name.partition(".")[2])


def _relative(error: float, scale: float) -> float:
    """Return error / scale; infinite if there is nothing to compare with."""
    return error / scale if scale else float("inf")


def _worst(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda c: math.inf if math.isnan(c.error) else c.error)
