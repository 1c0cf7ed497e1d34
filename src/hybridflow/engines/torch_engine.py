"""The training engine of one process: plain PyTorch on a Hugging Face model."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.algorithms import log_probs_and_entropy_from_logits, log_probs_from_logits
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines.base import LossFunction, Outputs, UpdateResult
from hybridflow.engines.micro_batches import plan_micro_batches
from hybridflow.engines.optimizer import build_adamw, learning_rate
from hybridflow.engines.packing import ModelInput, pack, pad, sequence_lengths
from hybridflow.engines.precision import MasterParameters
from hybridflow.errors import CheckpointError, NonFiniteError
from hybridflow.models import DTYPES, load_causal_lm, load_value_model
from hybridflow.protocol import DataProto

Head = Literal["policy", "value"]


class TorchEngine:
    """A policy (log-probs of response tokens) or a critic (values at response tokens).

    `optimizer` None makes an engine that only computes, as a reference does.
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
        self.head = head
        self.memory = memory
        dtype = DTYPES[model.dtype]
        load = load_causal_lm if head == "policy" else load_value_model
        learns_in_float32 = optimizer is not None and dtype == torch.bfloat16
        self.model = load(path, torch.float32 if learns_in_float32 else dtype)
        if model.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train(model.gradient_checkpointing)  # dropout is off either way
        self.num_updates = 0
        self.total_updates = total_updates
        self.optimizer_config = optimizer
        if optimizer is None:
            self.model.requires_grad_(False)
            self.parameters = dict(self.model.named_parameters())
            return
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
        self, rows: DataProto, loss_function: LossFunction, *, with_entropy: bool = True, temperature: float = 1.0
    ) -> UpdateResult:
        if self.optimizer_config is None:
            raise CheckpointError("this engine has no optimizer; build it with optimizer=... to train it.")
        loss, metrics, num_tokens, num_computed = 0.0, {}, 0, 0
        for indices in self._micro_batches(rows):
            micro_batch = rows.select_idxs(indices)
            model_input = self._arrange(micro_batch)
            share, extra = loss_function(self._compute(model_input, with_entropy, temperature), micro_batch)
            share.backward()
            loss += share.item()
            for name, value in extra.items():
                metrics[name] = metrics.get(name, 0.0) + value
            num_tokens += model_input.num_tokens
            num_computed += model_input.num_computed_tokens
        lr = learning_rate(self.optimizer_config, self.num_updates, self.total_updates)
        grad_norm = self._apply(rows, loss, loss_function, with_entropy, temperature, lr)
        return UpdateResult(loss, grad_norm, lr, metrics, num_tokens, num_computed)

    def all_reduce_sum(self, value: int) -> int:
        return value

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "num_updates": self.num_updates,
            "model": {n: p.detach() for n, p in self.parameters.items()},
        }
        if self.optimizer_config is not None:
            moments = {n: self.optimizer.state[p] for n, p in self.parameters.items() if p in self.optimizer.state}
            state["optimizer"] = moments
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_same_parameters(self.parameters, state["model"])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["model"][name])
        self.num_updates = state["num_updates"]
        if self.optimizer_config is not None:
            self.optimizer.state.clear()
            for name, moments in state["optimizer"].items():
                self.optimizer.state[self.parameters[name]] = {k: v.clone() for k, v in moments.items()}
            self.master.cast()

    def _micro_batches(self, rows: DataProto) -> list[Tensor]:
        return plan_micro_batches(
            sequence_lengths(rows), self.memory.max_tokens_per_micro_batch, packing=self.memory.packing
        )

    def _arrange(self, rows: DataProto) -> ModelInput:
        return pack(rows) if self.memory.packing else pad(rows)

    def _compute(self, inputs: ModelInput, with_entropy: bool, temperature: float) -> Outputs:
        arguments = {"position_ids": inputs.position_ids, "attention_plan": inputs.plan, "use_cache": False}
        if self.head == "value":
            values = self.model(inputs.input_ids, **arguments).logits.flatten()[inputs.positions]
            return {"values": inputs.to_rows(_at_least_float32(values))}
        logits = self._response_logits(inputs, arguments)
        if temperature not in (0.0, 1.0):
            logits = logits / temperature
        if not with_entropy:
            return {"log_probs": inputs.to_rows(log_probs_from_logits(logits, inputs.labels))}
        log_probs, entropies = log_probs_and_entropy_from_logits(logits, inputs.labels)
        return {"log_probs": inputs.to_rows(log_probs), "entropies": inputs.to_rows(entropies)}

    def _response_logits(self, inputs: ModelInput, arguments: dict[str, Any]) -> Tensor:
        """Logits (num_response_tokens, vocabulary) of the positions that predict a response token, and no others."""
        if len(inputs.input_ids) == 1:
            return self.model(inputs.input_ids, logits_to_keep=inputs.positions, **arguments).logits[0]
        columns = inputs.input_ids.shape[1]
        first = int((inputs.positions % columns).min()) if len(inputs.positions) else columns - 1
        kept = torch.arange(first, columns)
        logits = self.model(inputs.input_ids, logits_to_keep=kept, **arguments).logits
        rows, column = inputs.positions // columns, inputs.positions % columns - first
        return logits[rows, column]

    def _apply(
        self,
        rows: DataProto,
        loss: float,
        loss_function: LossFunction,
        with_entropy: bool,
        temperature: float,
        lr: float,
    ) -> float:
        """Clip, step, cast; or refuse with nothing changed. Returns the gradient norm before clipping."""
        gradients = [p for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(gradients, self.optimizer_config.clip_grad_norm, foreach=True)  # pyright: ignore[reportOptionalMemberAccess]
        if not (norm.isfinite() and torch.tensor(loss).isfinite()):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(self._report(rows, loss, float(norm), loss_function, with_entropy, temperature))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.cast()
        self.num_updates += 1
        return float(norm)

    def _report(
        self,
        rows: DataProto,
        loss: float,
        norm: float,
        loss_function: LossFunction,
        with_entropy: bool,
        temperature: float,
    ) -> str:
        """Which rows are to blame: each is computed again alone."""
        blamed = []
        for index in range(len(rows)):
            row = rows.select_idxs([index])
            share, _ = loss_function(self._compute(self._arrange(row), with_entropy, temperature), row)
            share.backward()
            finite = all(bool(p.grad.isfinite().all()) for p in self.parameters.values() if p.grad is not None)
            if not (finite and share.isfinite()):
                row_id = int(row.batch["row_ids"][0]) if "row_ids" in row.batch else index  # pyright: ignore[reportOptionalMemberAccess]
                blamed.append(f"row {row_id}: loss {share.item()}, gradient {'finite' if finite else 'not finite'}")
            self.optimizer.zero_grad(set_to_none=True)
        listed = "; ".join(blamed[:8]) + (f"; and {len(blamed) - 8} more" if len(blamed) > 8 else "")
        return (
            f"{self.head} update {self.num_updates}: loss {loss}, gradient norm {norm}. The step was refused, nothing was applied. "
            f"Samples: {listed or 'none alone, only their sum'}. Look at their rewards and log-probs; a lower learning rate "
            "or float32 compute (model.dtype) often helps."
        )


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _require_same_parameters(parameters: dict[str, Any], stored: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if name not in stored:
            raise CheckpointError(
                f"the checkpoint has no parameter '{name}'; it is of another model. Check model.path."
            )
        if stored[name].shape != parameter.shape:
            raise CheckpointError(
                f"parameter '{name}' has shape {tuple(stored[name].shape)} in the checkpoint and {tuple(parameter.shape)} "
                "in the model; it is of another model. Check model.path."
            )
    if extra := sorted(set(stored) - set(parameters)):
        raise CheckpointError(
            f"the checkpoint has parameters the model lacks: {', '.join(extra[:5])}. Check model.path."
        )
