"""A comparison of two float32 optimizer steps of hybridflow with TRL's, on the same ragged rows from the same weights.

The rows make every part of the loss visible: responses have different lengths, prompts are padded, the clip range and
the dual clip act, KL, temperature and gradient clipping are on, and several micro-batches make up a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hybridflow.config import load_config
from support.errors import BenchmarkError
from support.grpo_record import NUM_STEPS, Record, draw_inputs, record_hybridflow
from support.planted_errors import PLANTED_ERRORS
from support.report import Row, figure, print_table
from support.side import Side
from support.trl_settings import trl_settings

SETTINGS = (
    "model.dtype=float32",
    "memory.max_tokens_per_micro_batch=64",
    "rollout.temperature=0.7",
    "algorithm.kl_in_loss=true",
    "algorithm.kl_coef=0.1",
    "actor.epochs=2",  # more than one step: the old log-probs are those of the batch
    "actor.clip_ratio_high=0.28",
    "actor.clip_ratio_dual=2.0",
    "actor.optimizer.lr=1e-3",
    "actor.optimizer.epsilon=1e-5",  # like the clipped gradients: otherwise AdamW enlarges rounding errors
    "actor.optimizer.weight_decay=2",
    "actor.optimizer.clip_grad_norm=0.1",
)
"""Overrides of the benchmark's recipe for the comparison."""

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


@dataclass(frozen=True)
class Agreement:
    """The comparisons with TRL, and for each planted error the comparisons that fail because of it."""

    comparisons: list[Comparison]
    planted: dict[str, list[Comparison]]


def compare_with_trl(recipe: Path, directory: Path, threads: int, make_target: str) -> Agreement:
    """Compute two steps on both sides and compare them, then again with each of PLANTED_ERRORS on our side.

    Writes files to `directory`. The model of `recipe` has the weights from which both sides start.
    """
    config = load_config(recipe, SETTINGS)
    inputs, recorded = draw_inputs(config), directory / "trl_record.safetensors"
    save_file(inputs, directory / "inputs.safetensors")
    options = {"path": config.model.path, "settings": trl_settings(config)}
    with Side(
        "trl", "float32", task="agreement", threads=threads, directory=directory, make_target=make_target, **options
    ) as trl:
        trl.ask(inputs=str(directory / "inputs.safetensors"), record=str(recorded))
    peer = load_file(recorded)
    planted = {
        error.name: [
            c
            for c in compare(
                record_hybridflow(load_config(recipe, [*SETTINGS, *error.overrides]), error.change(inputs)), peer
            )
            if not c.agrees
        ]
        for error in PLANTED_ERRORS
    }
    return Agreement(compare(record_hybridflow(config, inputs), peer), planted)


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


def print_agreement(agreement: Agreement) -> None:
    """Print all figures, ours beside TRL's, and what notices each planted error."""
    print_table(
        "two optimizer steps on identical ragged rows and weights, float32 (errors are relative; of an element of a "
        "gradient to the largest of its parameter; the worst of all parameters and tokens)",
        ("", "ours", "TRL", "error", "tolerance", "where"),
        [
            (c.name, f"{c.ours:.8f}", f"{c.peer:.8f}", f"{c.error:.1e}", f"{c.tolerance:.0e}", c.where)
            for c in agreement.comparisons
        ],
    )
    print_table(
        "errors planted on our side, and the figure that fails most clearly",
        ("", "failing figures", "error / tolerance", "of"),
        [
            (name, f"{len(failed)} of {len(agreement.comparisons)}", figure(excess), worst)
            for name, failed in agreement.planted.items()
            for excess, worst in [max(((c.error / c.tolerance, c.name) for c in failed), default=(0.0, "-"))]
        ],
    )


def require_agreement(comparisons: Sequence[Comparison]) -> None:
    """Raise BenchmarkError if a figure differs by more than its tolerance, or is NaN."""
    if wrong := [c for c in comparisons if not c.agrees]:
        listed = "; ".join(
            f"{c.name} {c.where} {c.ours:.8g} against {c.peer:.8g} (error {c.error:.1e})".replace("  ", " ")
            for c in wrong
        )
        raise BenchmarkError(f"hybridflow and TRL differ on identical samples: {listed}; one of them is wrong.")


def require_noticed(planted: dict[str, list[Comparison]]) -> None:
    """Raise BenchmarkError if a planted error made no comparison fail."""
    if unnoticed := [name for name, failed in planted.items() if not failed]:
        raise BenchmarkError(
            f"the comparison with TRL did not notice planted errors: {', '.join(unnoticed)}; it does not test them."
        )


def rows_of(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return the errors as rows, with their tolerances as limits."""
    names = {c.name: c.name.replace(",", "").replace(" ", "_").replace("-", "_") for c in comparisons}
    return [Row(f"error_of_{names[c.name]}", "1", c.error, None, c.tolerance) for c in comparisons]


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
    return next((c for c in comparisons if not c.error <= c.tolerance), max(comparisons, key=lambda c: c.error))
