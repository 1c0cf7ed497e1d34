"""The training engine of one process, or of several that add up their gradients: PyTorch on a Hugging Face model."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.algorithms import log_probs_and_entropy_from_logits, log_probs_from_logits
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines.base import LossFunction, Outputs, UpdateResult
from hybridflow.engines.data_parallel import gather_lists, sum_gradients, sum_over_ranks
from hybridflow.engines.engine_state import require_fitting_state
from hybridflow.engines.micro_batches import plan_micro_batches
from hybridflow.engines.optimizer import build_adamw, learning_rate
from hybridflow.engines.packing import ModelInput, pack, pad, prompt_families, sequence_lengths
from hybridflow.engines.precision import MasterParameters
from hybridflow.errors import ModelError, NonFiniteError
from hybridflow.kernels import serves
from hybridflow.models import DTYPES, forward_of, load_causal_lm, load_value_model
from hybridflow.protocol import DataProto

Head = Literal["policy", "value"]

MAX_BLAMED = 8
"""Rows that the report of a refused step lists."""


class TorchEngine:
    """A policy (log-probs of response tokens) or a critic (values at response tokens).

    `optimizer` None makes an engine that only computes, as a reference does. `total_updates` is where the schedule
    of the learning rate ends.
    """

    def __init__(
        self,
        path: str,
        head: Head,
        *,
        model: ModelConfig,
        memory: MemoryConfig,
        optimizer: OptimizerConfig | None = None,
        total_updates: int = 1,
    ) -> None:
        self.head: Head = head
        self.memory = memory
        self.optimizer_config = optimizer
        self.total_updates = total_updates
        self.num_updates = 0
        dtype = DTYPES[model.dtype]
        load = load_causal_lm if head == "policy" else load_value_model
        learns_in_float32 = optimizer is not None and dtype == torch.bfloat16
        self.model = load(path, torch.float32 if learns_in_float32 else dtype)
        self.model_forward = forward_of(self.model)
        self.recomputes_activations = model.gradient_checkpointing
        if optimizer is None:
            self.model.requires_grad_(False)
            self.parameters = dict(self.model.named_parameters())
            return
        if self.recomputes_activations:
            # The first is the newer name of the second. Without dropout there is no random state to repeat.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable = next(getattr(self.model, name) for name in names if hasattr(self.model, name))
            enable({"use_reentrant": False, "preserve_rng_state": False})
        self.master = MasterParameters(self.model, dtype)
        self.parameters = self.master.by_name
        self.optimizer = build_adamw(self.parameters, optimizer)

    def forward(self, rows: DataProto, *, with_entropy: bool = False, temperature: float = 1.0) -> Outputs:
        results: Outputs = {}
        with torch.no_grad():
            for indices in self._micro_batches(rows):
                outputs = self._compute(self._arrange(rows.select_idxs(indices)), with_entropy, temperature)
                for name, values in outputs.items():
                    if name not in results:
                        results[name] = values.new_zeros(rows.batch["response_mask"].shape)
                    results[name][indices] = values
        return results

    def update(
        self, rows: DataProto, loss_function: LossFunction, *, with_entropy: bool = False, temperature: float = 1.0
    ) -> UpdateResult:
        if self.optimizer_config is None:
            raise ModelError("this engine has no optimizer; build it with optimizer=... to train it.")
        loss, metrics = 0.0, {}
        counts = {"num_tokens": 0, "num_computed_tokens": 0, "num_padding_tokens": 0}
        self.optimizer.zero_grad(set_to_none=True)  # of an update that an error ended
        for indices in self._micro_batches(rows):
            part = rows.select_idxs(indices)
            model_input = self._arrange(part)
            with self._training_mode():
                share, extra = loss_function(self._compute(model_input, with_entropy, temperature), part)
                share.backward()
            loss += share.item()
            for name, value in extra.items():
                metrics[name] = metrics.get(name, 0.0) + value
            counts = {name: count + getattr(model_input, name) for name, count in counts.items()}
        summed_loss = sum_gradients(self.parameters.values(), loss)
        # A rank without rows in this mini-batch has no share of a metric: that is 0.
        metrics = {name: metrics.get(name, 0.0) for name in dict.fromkeys(gather_lists(list(metrics)))}
        learning = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(learning, self.optimizer_config.clip_grad_norm, foreach=True))
        if not (math.isfinite(norm) and math.isfinite(summed_loss)):
            self.optimizer.zero_grad(set_to_none=True)
            blamed = gather_lists(self._blame(rows, loss_function, with_entropy, temperature))
            raise NonFiniteError(self._report(summed_loss, norm, blamed))
        lr = learning_rate(self.optimizer_config, self.num_updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.cast()
        self.num_updates += 1
        return UpdateResult(loss, norm, lr, metrics, **counts)

    def all_reduce_sum(self, value: int) -> int:
        return sum_over_ranks(value)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """As the Protocol says; the tensors are the engine's own, to be written or copied before the next update."""
        state: dict[str, Any] = {
            "num_updates": self.num_updates,
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
        }
        if self.optimizer_config is not None:
            moments = self.optimizer.state
            state["optimizer"] = {n: dict(moments[p]) for n, p in self.parameters.items() if p in moments}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        learns = self.optimizer_config is not None
        require_fitting_state(self.parameters, state, with_optimizer=learns)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["model"][name])
        self.num_updates = state["num_updates"]
        if learns:
            self.optimizer.state.clear()
            for name, moments in state["optimizer"].items():
                parameter = self.parameters[name]
                self.optimizer.state[parameter] = {
                    key: value.to(parameter, copy=True) if value.ndim else value.clone()
                    for key, value in moments.items()
                }
            self.master.cast()

    def _micro_batches(self, rows: DataProto) -> list[Tensor]:
        packing = self.memory.packing
        families, shared = None, None
        if packing and self.memory.share_prompts:
            families, shared = prompt_families(rows, compiled=self._has_compiled_attention())
        budget = self.memory.max_tokens_per_micro_batch
        return plan_micro_batches(sequence_lengths(rows), budget, packing=packing, families=families, shared=shared)

    def _arrange(self, rows: DataProto) -> ModelInput:
        if not self.memory.packing:
            return pad(rows)
        return pack(rows, share_prompts=self.memory.share_prompts, compiled=self._has_compiled_attention())

    def _has_compiled_attention(self) -> bool:
        return serves(next(self.model.parameters()))

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """transformers recomputes activations in training mode only; nothing else here depends on the mode."""
        self.model.train(self.recomputes_activations)
        try:
            yield
        finally:
            self.model.eval()

    def _compute(self, inputs: ModelInput, with_entropy: bool, temperature: float) -> Outputs:
        arguments = {"position_ids": inputs.position_ids, "attention_plan": inputs.plan}
        if self.head == "value":
            values = self.model_forward(inputs.input_ids, **arguments).flatten()[inputs.positions]
            return {"values": inputs.to_rows(values if values.dtype == torch.float64 else values.float())}
        logits = self._response_logits(inputs, arguments)
        temperature = temperature or 1.0
        if not with_entropy:
            log_probs = log_probs_from_logits(logits, inputs.labels, temperature=temperature)
            return {"log_probs": inputs.to_rows(log_probs)}
        log_probs, entropies = log_probs_and_entropy_from_logits(logits, inputs.labels, temperature=temperature)
        return {"log_probs": inputs.to_rows(log_probs), "entropies": inputs.to_rows(entropies)}

    def _response_logits(self, inputs: ModelInput, arguments: dict[str, Any]) -> Tensor:
        """Logits (num_response_tokens, vocabulary) of the positions that predict a response token, and no others."""
        if len(inputs.input_ids) == 1:
            return self.model_forward(inputs.input_ids, logits_to_keep=inputs.positions, **arguments)[0]
        columns = inputs.input_ids.shape[1]
        rows, places = inputs.positions // columns, inputs.positions % columns
        first = int(places.min()) if len(places) else columns - 1
        kept = torch.arange(first, columns, device=places.device)
        logits = self.model_forward(inputs.input_ids, logits_to_keep=kept, **arguments)
        return logits[rows, places - first]

    def _blame(self, rows: DataProto, loss_function: LossFunction, with_entropy: bool, temperature: float) -> list[str]:
        """The rows whose loss or gradient is not finite; each is computed again alone."""
        blamed = []
        for index in range(len(rows)):
            row = rows.select_idxs([index])
            share, _ = loss_function(self._compute(self._arrange(row), with_entropy, temperature), row)
            share.backward()
            finite = all(bool(p.grad.isfinite().all()) for p in self.parameters.values() if p.grad is not None)
            self.optimizer.zero_grad(set_to_none=True)
            if not (finite and share.isfinite()):
                row_id = int(row.batch["row_ids"][0]) if "row_ids" in row.batch.keys() else index  # noqa: SIM118
                blamed.append(f"row {row_id}: loss {share.item()}, gradient {'finite' if finite else 'not finite'}")
        return blamed

    def _report(self, loss: float, norm: float, blamed: list[str]) -> str:
        listed = "; ".join(blamed[:MAX_BLAMED]) or "none alone, only their sum"
        more = f"; and {len(blamed) - MAX_BLAMED} more" if len(blamed) > MAX_BLAMED else ""
        return (
            f"{self.head} update {self.num_updates}: loss {loss}, gradient norm {norm}. The step was refused, nothing "
            f"was applied. Samples: {listed}{more}. Look at their rewards and log-probs; a lower learning rate or "
            "float32 compute (model.dtype) often helps."
        )
