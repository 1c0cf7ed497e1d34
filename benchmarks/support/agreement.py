"""A comparison of hybridflow with TRL on TRL's samples, from the same weights, in float32."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow.config import Config
from hybridflow.engines import TorchEngine
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import actor_loss
from support.errors import BenchmarkError
from support.report import Row, print_table

RELATIVE_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
"""Absolute tolerance of the loss: the advantages of a group sum to zero, and with equal lengths so does the loss."""


@dataclass(frozen=True)
class Comparison:
    """One number of both sides; `error` must be at most `tolerance`."""

    name: str
    ours: float
    peer: float
    error: float
    tolerance: float


def compare_with_trl(recorded: Path, config: Config) -> list[Comparison]:
    """Compare loss, gradient norm before clipping and log-probs on the samples in `recorded` (see sides/trl_grpo.py).

    `config` is the configuration of a run; its model directory holds the weights that TRL started from.
    """
    theirs = load_file(recorded)
    rows = _rows(theirs)
    engine = TorchEngine(
        config.model.path, "policy", model=config.model, memory=config.memory, optimizer=config.actor.optimizer
    )
    log_probs = engine.forward(rows)["log_probs"]
    loss = actor_loss(config, 0.0, num_tokens=theirs["completion_ids"].numel(), num_sequences=len(rows))
    result = engine.update(rows, loss, with_entropy=True)
    peer_loss, peer_norm = theirs["loss"].item(), theirs["grad_norm"].item()
    difference = (log_probs - theirs["log_probs"]).abs().max().item()
    size = theirs["log_probs"].abs().mean().item()
    return [
        Comparison("loss", result.loss, peer_loss, abs(result.loss - peer_loss), LOSS_TOLERANCE),
        Comparison(
            "gradient norm", result.grad_norm, peer_norm, abs(result.grad_norm / peer_norm - 1), RELATIVE_TOLERANCE
        ),
        Comparison(
            "mean log-prob",
            log_probs.mean().item(),
            theirs["log_probs"].mean().item(),
            difference / size,
            RELATIVE_TOLERANCE,
        ),
    ]


def print_comparisons(comparisons: list[Comparison]) -> None:
    """Print all numbers, ours beside TRL's."""
    print_table(
        "identical samples and weights, float32 (error: absolute for the loss, relative for the gradient norm, the "
        "largest of all tokens for the log-probs)",
        ("", "ours", "TRL", "error", "tolerance"),
        [(c.name, f"{c.ours:.8f}", f"{c.peer:.8f}", f"{c.error:.1e}", f"{c.tolerance:.0e}") for c in comparisons],
    )


def require_agreement(comparisons: list[Comparison]) -> None:
    """Raise BenchmarkError if a number differs by more than its tolerance, or is NaN."""
    if wrong := [c for c in comparisons if not c.error <= c.tolerance]:
        listed = "; ".join(f"{c.name} {c.ours:.8g} against {c.peer:.8g} (error {c.error:.1e})" for c in wrong)
        raise BenchmarkError(f"hybridflow and TRL differ on identical samples: {listed}; one of them is wrong.")


def rows_of(comparisons: list[Comparison]) -> list[Row]:
    """Return the comparisons as rows without a ratio."""
    names = {c.name: f"identical_{c.name.replace(' ', '_').replace('-', '_')}" for c in comparisons}
    return [Row(names[c.name], "nats" if "log" in c.name else "1", c.ours, c.peer) for c in comparisons]


def _rows(theirs: dict[str, Tensor]) -> DataProto:
    """Build the input columns of an engine, (rows, prompt_len + response_len) without padding."""
    input_ids = torch.cat([theirs["prompt_ids"], theirs["completion_ids"]], dim=1)
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "response_mask": torch.ones_like(theirs["completion_ids"], dtype=torch.bool),
            "advantages": theirs["advantages"][:, None],
            "rollout_log_probs": theirs["log_probs"],
        }
    )
