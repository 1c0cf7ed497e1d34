"""A comparison of two float32 optimizer steps of hybridflow with TRL's, on the same ragged rows from the same weights.

The rows make every part of the loss visible: responses have different lengths, prompts are padded, the clip range and
the dual clip act, KL, temperature and gradient clipping are on, and several micro-batches make up a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from hybridflow.config import load_config
from support.errors import BenchmarkError
from support.grpo_record import draw_inputs, record_hybridflow
from support.planted_errors import PLANTED_ERRORS
from support.record_comparison import Comparison, compare
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
    planted = {}
    for error in PLANTED_ERRORS:
        wrong = record_hybridflow(load_config(recipe, [*SETTINGS, *error.overrides]), error.change(inputs))
        planted[error.name] = [comparison for comparison in compare(wrong, peer) if not comparison.agrees]
    return Agreement(compare(record_hybridflow(config, inputs), peer), planted)


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
