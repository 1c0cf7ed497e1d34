"""The training engine in PyTorch: a Hugging Face model on one process or sharded over many."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hybridflow.algorithms import (
    candidate_log_probs_from_logits,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
    sum_squared_probs_from_logits,
    top_log_probs_from_logits,
)
from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OffloadName, OptimizerConfig, ParallelConfig
from hybridflow.engines.base import LossFunction, Outputs, UpdateResult
from hybridflow.engines.device_copy import rows_to_device, wait_for_copies
from hybridflow.engines.engine_state import description_of, require_fitting_state, require_same_adapters
from hybridflow.engines.gradient_norm import clip_gradients
from hybridflow.engines.gradient_reduction import GradientReduction, fits_unsharded
from hybridflow.engines.loss_shares import LossShare, add_up
from hybridflow.engines.lost_step import StepGuard
from hybridflow.engines.micro_batches import agree_on_micro_batches, plan_micro_batches, spread_micro_batches
from hybridflow.engines.non_finite_rows import find_non_finite_rows
from hybridflow.engines.offload import Offload
from hybridflow.engines.optimizer import build_adamw, empty_step_count, learning_rate
from hybridflow.engines.packing import ModelInput, idle_input, pack, pad, prompt_families, sequence_lengths
from hybridflow.engines.precision import MasterParameters
from hybridflow.engines.process_group import join_alone
from hybridflow.engines.ranks import SEQUENCE, TENSOR, Ranks
from hybridflow.engines.resharding import Resharding
from hybridflow.engines.sequence_shard import sequence_shard_of
from hybridflow.engines.sharding import shard_model
from hybridflow.engines.started_update import StartedUpdate, UpdatePart, require_next
from hybridflow.engines.token_budget import find_token_budget
from hybridflow.errors import BatchError, ModelConfigError, ModelError, NonFiniteError, OutOfMemoryError
from hybridflow.kernels import fused_log_probs
from hybridflow.models import (
    DTYPES,
    AttentionCase,
    AttentionName,
    FusedForward,
    TensorRanks,
    add_adapters,
    attention_for,
    build_with_placeholders,
    build_without_weights,
    decoder_shape,
    fill_adapters,
    forward_of,
    is_adapter,
    load_causal_lm,
    load_shards,
    load_value_model,
    merged_weights,
    plain_name,
    require_planned_attention,
    require_tensor_parallel,
    sequence_costs,
    without_adapters,
)
from hybridflow.protocol import DataProto
from hybridflow.runtime import (
    can_compile_for_gpu,
    naming_out_of_memory,
    note_progress,
    own_device,
    preferred_dtype,
    require_dtype,
)
from hybridflow.runtime.boxes import Box
from hybridflow.runtime.fault_points import fault_point

Head = Literal["policy", "value"]

DEFAULT_BUDGET = 16384
"""Tokens per micro-batch if the configuration is "auto" and no budget was determined: generation needs none."""

PARTIAL_STEP = "an optimizer step, which may be applied in part (restart from the last checkpoint)"
"""What the error calls the end of an update, after which a step is no longer applied as a whole or not at all."""

MAX_LISTED_ROWS = 8
"""Number of rows that the report of a rejected step lists."""


class TorchEngine:
    """A policy (log-probs of response tokens) or a critic (values at response tokens).

    `optimizer` None makes an engine that only computes, as a reference does. `total_updates` is where the schedule
    of the learning rate ends. If the process is in a group of several ranks when the engine is built, parameters are
    sharded over these ranks (FSDP2), and every call is one that all ranks make.
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
        parallel: ParallelConfig | None = None,
        offload: OffloadName | None = None,
        lora: LoRAConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.head: Head = head
        self.memory = memory
        budget = memory.max_tokens_per_micro_batch
        self.max_tokens = DEFAULT_BUDGET if budget == "auto" else budget
        self.optimizer_config = optimizer
        self.total_updates = total_updates
        self.num_updates = self.bytes_received = 0
        self.device = own_device()
        if needs_mesh := offload == "host" and self.device.type != "cpu":
            join_alone()  # unless there are others: it is FSDP2 that computes with weights of the host
        self.ranks = Ranks(parallel or ParallelConfig(), self.device, needs_mesh=needs_mesh)
        self._step_guard = StepGuard(self.ranks, self.device)
        self._started: StartedUpdate | None = None
        self.compute_dtype, self.path = DTYPES[preferred_dtype() if model.dtype == "auto" else model.dtype], path
        require_dtype(self.compute_dtype, self.device)
        self.lora = lora if lora and lora.rank else None
        learns_in_float32 = optimizer is not None and self.compute_dtype == torch.bfloat16
        learning_dtype = torch.float32 if learns_in_float32 else self.compute_dtype
        # With adapters, the base weights are frozen and keep the compute dtype.
        dtype = self.compute_dtype if self.lora else learning_dtype
        self._build_model(path, dtype, learning_dtype, on_host=offload == "host")
        self._fuses_log_probs = self.device.type == "cuda" and bool(model.compile) and can_compile_for_gpu()
        if self._compiles(model.compile):
            self.model_forward.compile()
        if self.lora:
            fill_adapters(self.model, seed, self.device)
        self.shape = decoder_shape(path, has_lm_head=head == "policy")
        self._offload: Offload | None = None
        is_idle = offload == "idle" and self.device.type != "cpu"
        self.recomputes_activations = model.gradient_checkpointing
        if optimizer is None:
            self.model.requires_grad_(False)
            self.parameters = dict(self.model.named_parameters())
            if is_idle:
                self._start_offload()
            return
        if self.recomputes_activations and not isinstance(self.model_forward, FusedForward):  # it does so by itself
            # The first is the newer name of the second. Without dropout there is no random state to preserve.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable = next(getattr(self.model, name) for name in names if hasattr(self.model, name))
            enable({"use_reentrant": False, "preserve_rng_state": False})
        # FSDP2 trains the sharded parameters directly, and casts them when it gathers them.
        has_masters = self.ranks.is_alone and not self.lora
        self.master = MasterParameters(self.model, self.compute_dtype if has_masters else learning_dtype)
        self.parameters = {name: p for name, p in self.master.by_name.items() if p.requires_grad}
        self.optimizer = build_adamw(self.parameters, optimizer)
        fits = fits_unsharded(self.parameters.values(), self.ranks, self.device)
        self.reduction = GradientReduction(self.model, self.is_sharded and offload != "host" and fits)
        if is_idle:
            self._start_offload()

    def _build_model(self, path: str, dtype: torch.dtype, learning_dtype: torch.dtype, *, on_host: bool) -> None:
        """Load the model, whole or this rank's shards, and choose its forward pass."""
        if self.ranks.is_alone:
            load = load_causal_lm if self.head == "policy" else load_value_model
            self.model = load(path, dtype)
            torch.nn.Module.to(self.model, self.device)
            if self.lora:
                add_adapters(self.model, self.lora, learning_dtype)
            self.model_forward = forward_of(self.model)
        else:
            self.model = build_without_weights(path, self.head, dtype)
            require_tensor_parallel(self.model.config, self.ranks.tensor)
            if self.lora:
                add_adapters(self.model, self.lora, learning_dtype)
            shard_model(self.model, self.ranks, self.device, self.compute_dtype, on_host=on_host)
            load_shards(self.model, path)
            tensor = TensorRanks(self.ranks.group(TENSOR)) if self.ranks.tensor > 1 else None
            self.model_forward = forward_of(self.model, is_sharded=True, tensor=tensor)
            if not isinstance(self.model_forward, FusedForward):
                self._require_own_forward()

    def _compiles(self, compile: bool | Literal["auto"]) -> bool:
        """Return whether to compile the layers: as configured, or with "auto" where it is supported and faster."""
        if compile != "auto":
            return compile
        is_supported = isinstance(self.model_forward, FusedForward) and self.ranks.tensor == 1
        return is_supported and self.device.type == "cuda" and can_compile_for_gpu()

    def _start_offload(self) -> None:
        """Keep weights and optimizer state on the device only inside `with self.on_device():` from now on."""
        learns = self.optimizer_config is not None
        moments = self.optimizer.state if learns else {}
        self._offload = Offload(self.model, self.parameters.values(), moments, self.device)
        if learns:
            self.optimizer.register_step_pre_hook(lambda *_: self._wait_for_optimizer_state())

    def _wait_for_optimizer_state(self) -> None:
        """Let the device wait until optimizer state that was offloaded is there."""
        if self._offload:
            self._offload.wait()

    def forward(
        self,
        rows: DataProto,
        *,
        with_entropy: bool = False,
        with_sum_squared_probs: bool = False,
        top_k: int = 0,
        top_k_below: int | None = None,
        temperature: float = 1.0,
    ) -> Outputs:
        """Compute outputs of every row; see `TrainEngine`."""
        parts: list[tuple[Tensor, Outputs]] = []
        with torch.no_grad(), self.on_device(with_optimizer=False), self._step_guard("a forward pass"):
            for indices in self._micro_batches(rows):
                fault_point("forward")
                model_input = self._arrange(self._part(rows, indices))
                outputs = self._compute(
                    model_input, with_entropy, temperature, with_sum_squared_probs, top_k, top_k_below
                )
                if len(indices):  # the host reads them when all micro-batches are under way
                    parts.append((indices, {name: x.to("cpu", non_blocking=True) for name, x in outputs.items()}))
                note_progress()
            if isinstance(self.model, FSDPModule):
                self.model.reshard()  # as a backward pass does
            wait_for_copies(self.device)
        results: Outputs = {}
        for indices, outputs in parts:
            for name, values in outputs.items():
                if name not in results:
                    results[name] = values.new_zeros(*rows.batch["response_mask"].shape, *values.shape[2:])
                results[name][indices] = values
        return results

    def update(
        self, rows: DataProto, loss_function: LossFunction, *, with_entropy: bool = False, temperature: float = 1.0
    ) -> UpdateResult:
        """Make one optimizer step on `rows`; see `TrainEngine`."""
        part = UpdatePart(rows, loss_function, with_entropy, temperature)
        started = self._start_update()
        try:
            with naming_out_of_memory(PARTIAL_STEP, self.device, kind=OutOfMemoryError):
                self._add_part(started, part, is_last=True)
                return self._finish_update(started)
        finally:
            self._end_update()

    def add_to_update(
        self,
        rows: DataProto,
        loss_function: LossFunction,
        *,
        number: int,
        is_last: bool,
        with_entropy: bool = False,
        temperature: float = 1.0,
    ) -> None:
        """Add the gradients of one part of an optimizer step; see `TrainEngine`."""
        started = self._start_update() if number == 0 else require_next(number, self._started)
        try:
            with naming_out_of_memory(PARTIAL_STEP, self.device, kind=OutOfMemoryError):
                self._add_part(started, UpdatePart(rows, loss_function, with_entropy, temperature), is_last=is_last)
        except BaseException:
            self._end_update()
            raise

    def finish_update(self, num_parts: int, scale: float) -> UpdateResult:
        """Make the optimizer step of the parts that were added; see `TrainEngine`."""
        started = require_next(num_parts, self._started)
        try:
            with naming_out_of_memory(PARTIAL_STEP, self.device, kind=OutOfMemoryError):
                return self._finish_update(started, scale)
        finally:
            self._end_update()

    def _start_update(self) -> StartedUpdate:
        """Begin an optimizer step without gradients."""
        if self.optimizer_config is None:
            raise ModelError("this engine has no optimizer; build it with optimizer=... to train it.")
        self._end_update()  # one that failed
        self._started = StartedUpdate(self.on_device())
        self.optimizer.zero_grad(set_to_none=True)  # gradients of an update that failed
        return self._started

    def _end_update(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.close()

    def _finish_update(self, started: StartedUpdate, scale: float = 1.0) -> UpdateResult:
        assert self.optimizer_config is not None
        with self._step_guard():
            loss, metrics = add_up(started.shares)
            if scale != 1:
                loss *= scale
                self._scale_gradients(scale)
            (summed_loss,) = self.ranks.sum_floats([loss])
            # A rank without rows in this mini-batch contributes 0 to each metric.
            names = [name for names_of_rank in self.ranks.gather(list(metrics)) for name in names_of_rank]
            metrics = {name: metrics.get(name, 0.0) for name in dict.fromkeys(names)}
            norm = clip_gradients(self.parameters.values(), self.optimizer_config.clip_grad_norm, self.ranks)
        if not (math.isfinite(norm) and math.isfinite(summed_loss)):
            self.optimizer.zero_grad(set_to_none=True)
            found = [text for part in started.parts for text in find_non_finite_rows(self, part)]
            raise NonFiniteError(self._report(summed_loss, norm, found))
        lr = learning_rate(self.optimizer_config, self.num_updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        fault_point("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.cast()
        self.num_updates += 1
        return UpdateResult(loss, norm, lr, metrics, **started.counts)

    def _add_part(self, started: StartedUpdate, part: UpdatePart, *, is_last: bool) -> None:
        """Add the gradients of a part, and note its shares of the loss."""
        with self._step_guard():
            is_first = not started.parts
            started.parts.append(part)
            shares, counts = self._accumulate(
                part.rows, part.loss_function, part.with_entropy, part.temperature, is_first=is_first, is_last=is_last
            )
            started.note(shares, counts)

    def _accumulate(
        self,
        rows: DataProto,
        loss_function: LossFunction,
        with_entropy: bool,
        temperature: float,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> tuple[list[LossShare], dict[str, int]]:
        """Add the gradients of all micro-batches, and return their shares of the loss and their numbers of tokens.

        The host does not wait for the device, so that it prepares a micro-batch while the device computes another.
        """
        shares: list[LossShare] = []
        counts = {"num_tokens": 0, "num_computed_tokens": 0, "num_padding_tokens": 0}
        micro_batches = self._micro_batches(rows)
        for indices in self.reduction.of_micro_batches(micro_batches, is_first_part=is_first, is_last_part=is_last):
            share, model_input = self._learn(self._part(rows, indices), loss_function, with_entropy, temperature)
            fault_point("backward")
            shares.append(share)
            note_progress()
            counts = {name: count + getattr(model_input, name) for name, count in counts.items()}
        return shares, counts

    @torch.no_grad()
    def _scale_gradients(self, scale: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def on_device(self, *, with_optimizer: bool = True) -> AbstractContextManager[None]:
        """Keep the weights on the device inside the context, and the optimizer state if `with_optimizer`."""
        return self._offload(with_optimizer=with_optimizer) if self._offload else nullcontext()

    def find_token_budget(self, prompt_len: int, response_len: int, processes_on_node: int) -> int:
        """Return the number of tokens per micro-batch that fits into the memory of every rank; see `TrainEngine`."""
        with self.on_device():
            return find_token_budget(self, prompt_len, response_len, processes_on_node)

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of `value` over the data-parallel ranks."""
        with self._step_guard():
            return self.ranks.sum(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all data-parallel ranks, in rank order."""
        with self._step_guard():
            return self.ranks.gather(value)

    def weights(self, boxes: Mapping[str, Box] | None = None) -> Iterable[tuple[str, Tensor]]:
        """Yield parameter names and tensors in the compute dtype, with adapters merged; see `TrainEngine`."""
        parameters = dict(self.model.named_parameters())
        must_copy = self._offload is not None and not self._offload.is_in_use
        self.bytes_received = 0

        def whole(name: str) -> Tensor:
            parameter: Any = parameters[name].detach()
            dtype = parameter.dtype if is_adapter(name) else self.compute_dtype
            if isinstance(parameter, DTensor):
                shard: Any = parameter.to(dtype)  # before it is sent
                parameter = shard.full_tensor()
                self.bytes_received += parameter.nbytes - shard.to_local().nbytes
            return parameter.to(self.device, dtype, copy=must_copy)

        with self.on_device(with_optimizer=False):
            if self.lora:
                yield from merged_weights(parameters, whole, self.lora.scaling)
                return
            slices = Resharding(parameters, boxes) if boxes is not None and self.is_sharded else None
            for place, (name, parameter) in enumerate(parameters.items(), 1):
                if slices and name in slices:
                    weight, num_bytes = slices.receive(name, parameter, self.device, self.compute_dtype)
                    self.bytes_received += num_bytes
                else:
                    weight = whole(name)
                if slices and place == len(parameters):
                    slices.verify()
                yield name, weight

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the names and shapes of the tensors of `weights`, in its order."""
        names = ((name, parameter.shape) for name, parameter in self.model.named_parameters())
        return {plain_name(name): shape for name, shape in names if not is_adapter(name)}

    @property
    def vocabulary_size(self) -> int:
        """The number of entries of the model's vocabulary."""
        return self.model.config.get_text_config().vocab_size

    @property
    def num_positions(self) -> int | None:
        """The length of the longest sequence that the model supports; None if its configuration has no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def is_sharded(self) -> bool:
        """Whether the state is sharded over ranks."""
        return not self.ranks.is_alone

    @property
    def shares_weights(self) -> bool:
        """Whether generation can use the trained tensors directly."""
        return self.ranks.is_alone and not self.lora

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute with the base model inside the context. Raises ModelError without adapters."""
        if not self.lora:
            raise ModelError("this model has no adapters, so it cannot compute with its base model; set lora.rank.")
        return without_adapters(self.model)

    def rollout_model(self) -> PreTrainedModel:
        """Return a model for generation: this one, or one with placeholders for weights."""
        if self.shares_weights:
            return self.model
        return build_with_placeholders(self.path, "policy", self.compute_dtype, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the training state. Its tensors are the engine's: save or copy them before the next update.

        What is offloaded stays on the host.
        """
        self._wait_for_optimizer_state()
        stored = self._offload.stored if self._offload else lambda tensor: tensor
        state: dict[str, Any] = {
            "num_updates": self.num_updates,
            "model": {name: stored(parameter.detach()) for name, parameter in self.parameters.items()},
        }
        if self.lora:
            state["lora"] = description_of(self.lora)
        if self.optimizer_config is not None:
            moments = self.optimizer.state
            state["optimizer"] = {
                name: {key: stored(moment) for key, moment in moments[parameter].items()}
                for name, parameter in self.parameters.items()
                if parameter in moments
            }
        return state

    def load_shards(self, described: dict[str, Any], read_into: Callable[[dict[str, Any]], None]) -> None:
        """Load a state with each rank reading only its shards; see `TrainEngine`."""
        learns = self.optimizer_config is not None
        require_same_adapters(self.lora, described)
        require_fitting_state(self.parameters, described, with_optimizer=learns)
        moments = described.get("optimizer", {})
        with self.on_device():
            self._wait_for_optimizer_state()  # before its memory is freed
            if learns:
                self.optimizer.state.clear()
                for name in moments:
                    parameter = self.parameters[name].detach()
                    self.optimizer.state[self.parameters[name]] = {
                        key: torch.zeros_like(parameter) if value.ndim else empty_step_count(parameter)
                        for key, value in moments[name].items()
                    }
            read_into({key: value for key, value in self.state_dict().items() if key in described})
        self.num_updates = described["num_updates"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`. Raises CheckpointError, with nothing loaded, if it is of another model."""
        learns = self.optimizer_config is not None
        require_same_adapters(self.lora, state)
        require_fitting_state(self.parameters, state, with_optimizer=learns)
        with torch.no_grad(), self.on_device():
            self._wait_for_optimizer_state()
            for name, parameter in self.parameters.items():
                parameter.copy_(state["model"][name])
            if learns:
                self.optimizer.state.clear()
                for name, moments in state["optimizer"].items():
                    parameter = self.parameters[name]
                    self.optimizer.state[parameter] = {
                        key: value.to(parameter, copy=True) if value.ndim else empty_step_count(parameter).copy_(value)
                        for key, value in moments.items()
                    }
                self.master.cast()
        self.num_updates = state["num_updates"]

    def _require_own_forward(self) -> None:
        """Raise ModelError unless a family without a fused forward pass is supported; all ranks run it."""
        if self.ranks.sequence > 1:
            raise ModelConfigError(
                f"parallel.sequence={self.ranks.sequence} is not supported for {self.model.config.model_type} models, "
                "whose code computes whole sequences; use parallel.sequence = 1, or a Llama, Qwen2 or Qwen3 model."
            )
        require_planned_attention(self.model)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()

    def _micro_batches(self, rows: DataProto) -> list[Tensor]:
        """Return the row indices of each micro-batch; equally many on all ranks, empty if a rank has no more rows."""
        packing, budget = self.memory.packing, self.max_tokens * self.ranks.sequence
        lengths, families, shared = sequence_lengths(rows), None, None
        if packing and self.memory.share_prompts:
            families, shared = prompt_families(rows, attention=self._shared_attention())

        def plan() -> list[Tensor]:
            self._require_known_tokens(rows)
            return plan_micro_batches(lengths, budget, packing=packing, families=families, shared=shared)

        def spread(plan: list[Tensor], count: int) -> list[Tensor]:
            costs = sequence_costs(self.shape, lengths.tolist())
            sharing = {"families": families, "shared": shared}
            return spread_micro_batches(plan, count, lengths, costs, budget, packing=packing, **sharing)

        return agree_on_micro_batches(plan, spread, self.ranks)

    def _require_known_tokens(self, rows: DataProto) -> None:
        """Raise BatchError for token ids without an embedding in the model."""
        embedding: Any = self.model.get_input_embeddings()
        ids, entries = rows.batch["input_ids"], embedding.weight.shape[0]
        if ids.numel() and (int(ids.max()) >= entries or int(ids.min()) < 0):
            raise BatchError(
                f"'{self.path}' has a vocabulary of {entries} entries, but the rows have token ids from "
                f"{int(ids.min())} to {int(ids.max())}; the rows were made with a different tokenizer."
            )

    def _part(self, rows: DataProto, indices: Tensor) -> DataProto | None:
        """Select rows, in host memory; None if there are no rows."""
        return rows.select_idxs(indices) if len(indices) else None

    def _arrange(self, rows: DataProto | None) -> ModelInput:
        """Return the model input of some rows, in host memory, where its shapes are known without waiting."""
        if rows is None:
            return idle_input(2 * self.ranks.sequence)
        if self.memory.packing:
            arranged = pack(rows, share_prompts=self.memory.share_prompts, attention=self._shared_attention())
        else:
            arranged = pad(rows)
        if "candidate_ids" not in rows.batch:
            return arranged
        return replace(arranged, candidates=rows.batch["candidate_ids"][arranged.response_mask].long())

    def _shared_attention(self) -> AttentionName:
        """Return the implementation of attention for shared prompts."""
        case = AttentionCase.of_model(self.model.config, self.compute_dtype, self.device)
        return attention_for(case, shares_prompts=True)

    def _learn(
        self, part: DataProto | None, loss_function: LossFunction, with_entropy: bool, temperature: float
    ) -> tuple[LossShare, ModelInput]:
        """Add the gradient of some rows; return their share of the loss, and the model input."""
        model_input = self._arrange(part)
        with self._training_mode():
            outputs = self._compute(model_input, with_entropy, temperature)
            if part is None:
                share, extra = torch.stack([output.sum() for output in outputs.values()]).sum() * 0.0, {}
            else:
                share, extra = loss_function(outputs, rows_to_device(part, self.device))
            share.backward()
        return LossShare(share.detach(), extra), model_input

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """Set training mode if activations are recomputed, as transformers requires; nothing else depends on it."""
        self.model.train(self.recomputes_activations)
        try:
            yield
        finally:
            self.model.eval()

    def _compute(
        self,
        inputs: ModelInput,
        with_entropy: bool,
        temperature: float,
        with_sum_squared_probs: bool = False,
        top_k: int = 0,
        top_k_below: int | None = None,
    ) -> Outputs:
        if self.ranks.sequence == 1:
            mine = inputs.to(self.device)
            to_rows = mine.to_rows
        else:
            shard = sequence_shard_of(inputs, self.ranks.group(SEQUENCE)).to(self.device)
            mine, to_rows = shard.input, shard.to_rows
        settings = {"temperature": temperature or 1.0, "shared": self.model_forward.vocabulary}

        def of_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            """Return log-probs, and entropies if wanted."""
            if self._fuses_log_probs and settings["shared"] is None and len(logits):
                results = fused_log_probs(logits, labels, temperature=temperature or 1.0, with_entropy=with_entropy)
                return tuple(result for result in results if result is not None)
            if with_entropy:
                return log_probs_and_entropy_from_logits(logits, labels, **settings)
            return (log_probs_from_logits(logits, labels, **settings),)

        def read(logits: Tensor, which: slice) -> Sequence[Tensor]:
            if self.head == "value":
                return (logits.flatten().to(torch.promote_types(logits.dtype, torch.float32)),)
            labels = mine.labels[which]
            more = [sum_squared_probs_from_logits(logits, **settings)] if with_sum_squared_probs else []
            if mine.candidates is not None:
                more.append(candidate_log_probs_from_logits(logits, mine.candidates[which], **settings))
            if top_k:
                more += top_log_probs_from_logits(logits, top_k, below=top_k_below, **settings)
            return *of_labels(logits, labels), *more

        arguments = {"position_ids": mine.position_ids, "attention_plan": mine.plan}
        results = self.model_forward.read_logits(mine.input_ids, mine.positions, read, **arguments)
        names = ["values"]
        if self.head == "policy":
            names = ["log_probs", *["entropies"] * with_entropy, *["sum_squared_probs"] * with_sum_squared_probs]
            names += ["candidate_log_probs"] * (mine.candidates is not None) + ["top_ids", "top_log_probs"] * (
                top_k > 0
            )
        return {name: to_rows(result) for name, result in zip(names, results, strict=True)}

    def _report(self, loss: float, norm: float, rows: list[str]) -> str:
        listed = "; ".join(rows[:MAX_LISTED_ROWS]) or "no single row, only their sum"
        more = f"; and {len(rows) - MAX_LISTED_ROWS} more" if len(rows) > MAX_LISTED_ROWS else ""
        return (
            f"{self.head} update {self.num_updates}: loss {loss}, gradient norm {norm}. The step was rejected, nothing "
            f"was applied. Samples: {listed}{more}. Check their rewards and log-probs; a lower learning rate or "
            "model.dtype = float32 often helps."
        )
