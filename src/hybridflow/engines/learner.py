"""Learning: gradients are added part by part, micro-batch by micro-batch, and then make one optimizer step.

Losses and metrics of micro-batches stay on the device until the step, when the host reads them all at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.config import OptimizerConfig
from hybridflow.engines.base import LossFunction, UpdateResult
from hybridflow.engines.device_copy import rows_to_device
from hybridflow.engines.gradient_reduction import GradientReduction
from hybridflow.engines.lost_step import StepGuard
from hybridflow.engines.optimizer import MasterParameters, build_adamw, clip_gradients, learning_rate
from hybridflow.engines.packing import ModelInput
from hybridflow.engines.ranks import DATA, SEQUENCE, Ranks
from hybridflow.engines.row_forward import RowForward
from hybridflow.errors import BatchError, NonFiniteError, OutOfMemoryError
from hybridflow.models.experts import ExpertLoad
from hybridflow.protocol import DataProto
from hybridflow.runtime.boxes import local
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.memory import naming_out_of_memory
from hybridflow.runtime.observe.metrics import find_metric
from hybridflow.runtime.progress import note_progress

PARTIAL_STEP = "an optimizer step, which may be applied in part (restart from the last checkpoint)"
"""Name in errors for the end of an update, where an error may leave the step partly applied."""

MAX_LISTED_ROWS = 8
"""Number of rows that the report of a rejected step lists."""


@dataclass(frozen=True)
class UpdatePart:
    """Rows of an optimizer step, and how their share of the loss is computed."""

    rows: DataProto
    loss_function: LossFunction
    with_entropy: bool = False
    temperature: float = 1.0


@dataclass(frozen=True)
class LossShare:
    """A micro-batch's share of the loss, and its metrics: tensors of one number each, or Python numbers."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float]


class StartedUpdate:
    """The parts whose gradients were added, in order; their weights stay on the device until `close`."""

    def __init__(self, on_device: AbstractContextManager[None]) -> None:
        self.parts: list[UpdatePart] = []
        self.shares: list[LossShare] = []
        self.counts = dict.fromkeys(("num_tokens", "num_computed_tokens", "num_padding_tokens"), 0)
        self._on_device = ExitStack()
        self._on_device.enter_context(on_device)

    def note(self, share: LossShare, model_input: ModelInput) -> None:
        """Remember a micro-batch's share of the loss, and count its tokens."""
        self.shares.append(share)
        self.counts = {name: count + getattr(model_input, name) for name, count in self.counts.items()}

    def close(self) -> None:
        """Let the weights leave the device; gradients that no optimizer step used are lost."""
        self._on_device.close()


class Learner:
    """The optimizer of a model, and the update that was started.

    `model` is the one that `forward` computes; `masters` are what the optimizer changes. `recomputes`: activations
    are recomputed in the backward pass. `on_device` keeps all state on the device inside its context.
    """

    def __init__(
        self,
        forward: RowForward,
        model: PreTrainedModel,
        masters: MasterParameters,
        reduction: GradientReduction,
        config: OptimizerConfig,
        *,
        total_updates: int,
        recomputes: bool,
        guard: StepGuard,
        on_device: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.masters, self.reduction = masters, reduction
        self.parameters = {name: p for name, p in masters.by_name.items() if p.requires_grad}
        self.optimizer = build_adamw(self.parameters, config)
        self._forward, self._model, self._ranks = forward, model, forward.ranks
        self._config, self._total_updates, self._recomputes = config, total_updates, recomputes
        self._guard, self._on_device = guard, on_device
        self._started: StartedUpdate | None = None
        self._expert_load = forward.expert_load = ExpertLoad.of(model, forward.device)

    def add(self, part: UpdatePart, *, number: int, is_last: bool) -> None:
        """Add the gradients of part `number` of an update; see `TrainEngine.add_to_update`."""
        started = self._start() if number == 0 else self._require_next(number)
        try:
            with naming_out_of_memory(PARTIAL_STEP, self._forward.device, kind=OutOfMemoryError), self._guard():
                self._accumulate(started, part, is_last=is_last)
        except BaseException:
            self._end()
            raise

    def finish(self, num_parts: int, scale: float, num_updates: int) -> UpdateResult:
        """Make the optimizer step that follows `num_updates` others; see `TrainEngine.finish_update`."""
        started = self._require_next(num_parts)
        try:
            with naming_out_of_memory(PARTIAL_STEP, self._forward.device, kind=OutOfMemoryError):
                return self._step(started, scale, num_updates)
        finally:
            self._end()

    def learn(
        self, rows: DataProto | None, loss_function: LossFunction, with_entropy: bool, temperature: float
    ) -> tuple[LossShare, ModelInput]:
        """Add the gradient of one micro-batch; return its share of the loss, and the model input.

        A rank without rows takes part in the collective operations.
        """
        model_input = self._forward.arrange(rows)
        with self._training_mode():
            outputs = self._forward.compute(model_input, with_entropy=with_entropy, temperature=temperature)
            if rows is None:
                share, extra = torch.stack([output.sum() for output in outputs.values()]).sum() * 0.0, {}
            else:
                share, extra = loss_function(outputs, rows_to_device(rows, self._forward.device))
            share.backward()
        return LossShare(share.detach(), extra), model_input

    def _accumulate(self, started: StartedUpdate, part: UpdatePart, *, is_last: bool) -> None:
        """Add the gradients of all micro-batches of a part, and note their shares of the loss.

        The host does not wait for the device, so that it prepares a micro-batch while the device computes another.
        """
        is_first = not started.parts
        started.parts.append(part)
        micro_batches = self._forward.micro_batches(part.rows)
        for indices in self.reduction.of_micro_batches(micro_batches, is_first_part=is_first, is_last_part=is_last):
            rows = part.rows.select_idxs(indices) if len(indices) else None
            share, model_input = self.learn(rows, part.loss_function, part.with_entropy, part.temperature)
            fault_point("backward")
            started.note(share, model_input)
            note_progress()

    def _start(self) -> StartedUpdate:
        """Begin an optimizer step without gradients."""
        self._end()  # one that failed
        self._started = StartedUpdate(self._on_device())
        self.optimizer.zero_grad(set_to_none=True)  # gradients of an update that failed
        if self._expert_load:
            self._expert_load.reset()
        return self._started

    def _end(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.close()

    def _require_next(self, number: int) -> StartedUpdate:
        """Return the started update if part `number` is the next one. Raises BatchError."""
        added = len(self._started.parts) if self._started else 0
        if self._started is None or number != added:
            raise BatchError(
                f"part {number} of an update cannot follow {added} added parts: a part failed or is missing, and the "
                "gradients of a failed update are dropped; begin again with part 0."
            )
        return self._started

    def _step(self, started: StartedUpdate, scale: float, num_updates: int) -> UpdateResult:
        with self._guard():
            loss, metrics = add_up(started.shares)
            if scale != 1:
                loss *= scale
                self._scale_gradients(scale)
            (summed_loss,) = self._ranks.sum_floats([loss])
            # A rank without rows in this mini-batch contributes 0 to each metric.
            names = [name for names_of_rank in self._ranks.gather(list(metrics)) for name in names_of_rank]
            metrics = {name: metrics.get(name, 0.0) for name in dict.fromkeys(names)}
            norm = clip_gradients(self.parameters.values(), self._config.clip_grad_norm, self._ranks)
            load = self._expert_load
            experts = load.figures(partial(self._ranks.sum_floats, axes=(DATA, SEQUENCE))) if load else {}
        if not (math.isfinite(norm) and math.isfinite(summed_loss)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(self._report(started.parts, summed_loss, norm, num_updates))
        lr = learning_rate(self._config, num_updates, self._total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        fault_point("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.cast()
        return UpdateResult(loss, norm, lr, metrics, **started.counts, experts=experts)

    @torch.no_grad()
    def _scale_gradients(self, scale: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """Set training mode of the layers if their activations are recomputed, as transformers requires.

        Their parts stay as they are in every other pass: in training mode, routers of some families add noise.
        """
        layers = [self._model, *(each for each in self._model.modules() if hasattr(each, "gradient_checkpointing"))]
        try:
            for module in layers:
                module.training = self._recomputes
            yield
        finally:
            for module in layers:
                module.training = False

    def _loss_of_row(self, part: UpdatePart, row: DataProto | None) -> float:
        """Add the gradient of one row of a part, and return its loss."""
        return float(self.learn(row, part.loss_function, part.with_entropy, part.temperature)[0].loss)

    def _report(self, parts: Sequence[UpdatePart], loss: float, norm: float, num_updates: int) -> str:
        """Describe the rejected step. All ranks compute the rows again, one at a time, to find those at fault."""
        rows = [
            text
            for part in parts
            for text in find_non_finite_rows(part.rows, partial(self._loss_of_row, part), self.optimizer, self._ranks)
        ]
        listed = "; ".join(rows[:MAX_LISTED_ROWS]) or "no single row, only their sum"
        more = f"; and {len(rows) - MAX_LISTED_ROWS} more" if len(rows) > MAX_LISTED_ROWS else ""
        return (
            f"{self._forward.head} update {num_updates}: loss {loss}, gradient norm {norm}. The step was rejected, "
            f"nothing was applied. Samples: {listed}{more}. Check their rewards and log-probs; a lower learning rate "
            "or model.dtype = float32 often helps."
        )


def add_up(shares: Sequence[LossShare]) -> tuple[float, dict[str, float]]:
    """Return loss and metrics of the whole mini-batch, read from the device in one transfer.

    Metrics are summed; those whose reduction is "max" are combined by their maximum.
    """
    numbers = iter(read_numbers([value for share in shares for value in (share.loss, *share.metrics.values())]))
    loss, metrics = 0.0, {}
    for share in shares:
        loss += next(numbers)
        for name in share.metrics:
            metrics[name] = _join(name, metrics.get(name, 0.0), next(numbers))
    return loss, metrics


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return the values as Python numbers; the host waits for the device once."""
    unread = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(unread).tolist() if unread else ())
    return [next(read) if isinstance(value, Tensor) else value for value in values]


def _join(name: str, one: float, other: float) -> float:
    metric = find_metric(name)
    return max(one, other) if metric and metric.reduction == "max" else one + other


def find_non_finite_rows(
    rows: DataProto, learn: Callable[[DataProto | None], float], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> list[str]:
    """Describe the rows, on all ranks, whose loss or gradient is not finite.

    `learn` adds the gradient of one row, or of none, and returns its loss. All ranks compute one row each at the same
    time, and their gradients are summed. If the sum is not finite although all losses are, the ranks take turns.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = []

    def try_row(index: int | None) -> tuple[float, bool]:
        """Return the loss of a row, and whether the gradient, summed over the ranks' rows, is finite."""
        loss = learn(None if index is None else rows.select_idxs(torch.tensor([index])))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        finite = all(bool(local(gradient).isfinite().all()) for gradient in gradients)
        optimizer.zero_grad(set_to_none=True)
        return loss, ranks.count_all(not finite) == 0

    for index in range(max(ranks.gather(len(rows)))):
        mine = index if index < len(rows) else None
        loss, finite = try_row(mine)
        losses = ranks.gather(loss)
        if not finite and ranks.data > 1 and all(map(math.isfinite, losses)):
            turns = [try_row(mine if turn == ranks.place(DATA) else None)[1] for turn in range(ranks.data)]
            finite = turns[ranks.place(DATA)]
        elif ranks.data > 1:
            finite = finite or math.isfinite(loss)
        if mine is not None and not (finite and math.isfinite(loss)):
            row = rows.batch[index]
            row_id = int(row["row_ids"]) if "row_ids" in row.keys() else index  # noqa: SIM118
            found.append(f"row {row_id}: loss {loss}, gradient {'finite' if finite else 'not finite'}")
    return [text for of_rank in ranks.gather(found) for text in of_rank]
