"""The optimizer steps of one update call: one for each mini-batch, for any loss.

The controller lists the rows of each mini-batch by global row id in `meta_info["mini_batches"]`; a rank uses those
that it holds. Padded copies have row id -1 and belong to no mini-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hybridflow.engines import LossFunction, TrainEngine, UpdateResult
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto
from hybridflow.runtime.device import take_compilations
from hybridflow.runtime.observe.metrics import mean_metrics
from hybridflow.workers.log_prob_mismatch import KL, LARGEST, MEAN, SHARE

Figure = Literal["loss", "grad_norm", "lr", "padding_computed", "shared_prompts"]

ALL_FIGURES: tuple[Figure, ...] = ("loss", "grad_norm", "lr", "padding_computed", "shared_prompts")
FIGURES_WITHOUT_LOSS: tuple[Figure, ...] = ("grad_norm", "lr", "padding_computed")


@dataclass(frozen=True)
class MiniBatch:
    """This rank's rows of one optimizer step, with the number of response tokens and sequences of all ranks.

    `number`: index of the step in its call.
    """

    number: int
    rows: DataProto
    num_tokens: int
    num_sequences: int


def run_updates(
    engine: TrainEngine,
    batch: DataProto,
    loss_of: Callable[[MiniBatch], LossFunction],
    name: str,
    *,
    figures: Sequence[Figure] = ALL_FIGURES,
    rows_of: Callable[[MiniBatch], DataProto] | None = None,
    with_entropy: bool = False,
    temperature: float = 1.0,
) -> DataProto:
    """Run one optimizer step for each mini-batch of `batch.meta_info["mini_batches"]`.

    Returns `meta_info["metrics"]`: `figures` as `<name>/<figure>`, and the metrics of the loss, combined over the steps
    by `mean_metrics`; and the number of graphs that torch.compile compiled since the last update. `rows_of` adds
    columns to the rows of a mini-batch before its step.
    """
    steps = []
    with engine.on_device():
        for mini_batch in mini_batches_of(batch, engine):
            rows = rows_of(mini_batch) if rows_of else mini_batch.rows
            result = engine.update(rows, loss_of(mini_batch), with_entropy=with_entropy, temperature=temperature)
            steps.append(figures_of(result, name, figures) | result.metrics)
    return DataProto(meta_info={"metrics": metrics_of_steps(steps, name)})


def figures_of(result: UpdateResult, name: str, figures: Sequence[Figure] = ALL_FIGURES) -> dict[str, float]:
    """Return the figures of an optimizer step as `<name>/<figure>`, with those of experts."""
    values = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "padding_computed": result.padding_share,
        "shared_prompts": result.saved_share,
    }
    wanted: dict[str, float] = {figure: values[figure] for figure in figures}
    return {f"{name}/{figure}": value for figure, value in (wanted | result.experts).items()}


def metrics_of_steps(steps: list[dict[str, float]], name: str) -> dict[str, float]:
    """Return `mean_metrics` of the optimizer steps of a call, and the number of compilations since the last call.

    The log-prob mismatch is that of the first step: later ones have learned, so that their policy is not the sampler's.
    """
    first = {key: value for key, value in steps[0].items() if key in (MEAN, LARGEST, KL, SHARE)}
    return mean_metrics(steps) | first | {f"perf/{name}_compilations": take_compilations()}


def mini_batches_of(batch: DataProto, engine: TrainEngine) -> Iterator[MiniBatch]:
    """Yield the mini-batches of `batch.meta_info["mini_batches"]` in order, each with its rows in the batch's order.

    Raises BatchError if there are no mini-batches, or if a listed row is missing or held more than once.
    """
    memberships = batch.meta_info.get("mini_batches")
    if not memberships:
        raise BatchError("an update needs meta_info['mini_batches']: a list of row ids for each optimizer step.")
    row_ids = batch.batch["row_ids"]
    for number, members in enumerate(memberships):
        rows = batch.select_idxs(torch.isin(row_ids, torch.as_tensor(members)))
        if (num_rows := engine.all_reduce_sum(len(rows))) != len(members):
            raise BatchError(
                f"a mini-batch lists {len(members)} rows, but {num_rows} rows of the batch have these row_ids; "
                "each row must occur exactly once."
            )
        lengths = rows.batch["response_mask"].sum(-1)
        yield MiniBatch(
            number, rows, engine.all_reduce_sum(int(lengths.sum())), engine.all_reduce_sum(int((lengths > 0).sum()))
        )
