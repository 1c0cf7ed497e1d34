"""The training engine in PyTorch: a Hugging Face model on one process or sharded over many."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OffloadName, OptimizerConfig, ParallelConfig
from hybridflow.engines.base import LossFunction, Outputs, UpdateResult
from hybridflow.engines.build_model import build_model
from hybridflow.engines.device_copy import wait_for_copies
from hybridflow.engines.engine_state import description_of, require_fitting_state, require_same_adapters
from hybridflow.engines.gradient_reduction import GradientReduction, fits_unsharded
from hybridflow.engines.learner import Learner, UpdatePart
from hybridflow.engines.lost_step import StepGuard
from hybridflow.engines.offload import Offload
from hybridflow.engines.optimizer import MasterParameters, allocate_moments, moments_by_name
from hybridflow.engines.process_group import join_alone
from hybridflow.engines.ranks import Ranks
from hybridflow.engines.resharding import Resharding
from hybridflow.engines.row_forward import Head, RowForward
from hybridflow.engines.sharding import reshard
from hybridflow.engines.token_budget import find_token_budget
from hybridflow.errors import ModelConfigError, ModelError
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.loading import DTYPES, build_with_placeholders
from hybridflow.models.lora import (
    boxes_before_merging,
    fill_adapters,
    is_adapter,
    merged_weights,
    plain_name,
    separate_adapters,
    without_adapters,
)
from hybridflow.models.routes import Routers, has_routers
from hybridflow.models.support import num_positions
from hybridflow.protocol import DataProto
from hybridflow.runtime.boxes import Box, local, with_local
from hybridflow.runtime.device import can_compile_for_gpu, own_device, preferred_dtype, require_dtype
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.partial_tensor import PartialTensor
from hybridflow.runtime.progress import note_progress


class TorchEngine:
    """A policy (log-probs of response tokens) or a critic (values at response tokens).

    `optimizer` None makes an engine that only computes, as a reference does. `total_updates` is where the schedule
    of the learning rate ends. Without `merge_adapters`, `weights` are the adapters alone. `exact`: log-probs are those
    of decoding. If the process is in a group of several ranks when the engine is built, parameters are sharded over
    these ranks (FSDP2), and every call is one that all ranks make.
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
        merge_adapters: bool = True,
        exact: bool = False,
    ) -> None:
        self.head: Head = head
        self.num_updates = self.bytes_received = 0
        self.device = own_device()
        if needs_mesh := offload == "host" and self.device.type != "cpu":
            join_alone()  # unless there are others: it is FSDP2 that computes with weights of the host
        self.ranks = Ranks(parallel or ParallelConfig(), self.device, needs_mesh=needs_mesh)
        self._step_guard = StepGuard(self.ranks, self.device)
        self.compute_dtype, self.path = DTYPES[preferred_dtype() if model.dtype == "auto" else model.dtype], path
        require_dtype(self.compute_dtype, self.device)
        self.lora = lora if lora and lora.rank else None
        self._sends_adapters = self.lora is not None and not merge_adapters
        learns_in_float32 = optimizer is not None and self.compute_dtype == torch.bfloat16
        learning_dtype = torch.float32 if learns_in_float32 else self.compute_dtype
        self.model, self.model_forward = build_model(
            path,
            head,
            self.ranks,
            self.device,
            # With adapters, the base weights are frozen and keep the compute dtype.
            dtype=self.compute_dtype if self.lora else learning_dtype,
            compute_dtype=self.compute_dtype,
            lora=self.lora,
            adapter_dtype=learning_dtype,
            on_host=offload == "host",
            exact=exact,
        )
        if self._compiles(model.compile):
            self.model_forward.compile()
        if self.lora:
            fill_adapters(self.model, seed, self.device)
        self.row_forward = RowForward(
            path,
            head,
            self.model,
            self.model_forward,
            memory=memory,
            compute_dtype=self.compute_dtype,
            ranks=self.ranks,
            device=self.device,
            fuses_log_probs=self.device.type == "cuda" and bool(model.compile) and can_compile_for_gpu(),
        )
        self.learner: Learner | None = None
        if optimizer is None:
            self.model.requires_grad_(False)
            self.parameters = dict(self.model.named_parameters())
        else:
            recomputes = model.gradient_checkpointing
            if recomputes and not isinstance(self.model_forward, FusedForward):  # it does so by itself
                self._recompute_activations()
            # FSDP2 trains the sharded parameters directly, and casts them when it gathers them.
            has_masters = self.ranks.is_alone and not self.lora
            masters = MasterParameters(self.model, self.compute_dtype if has_masters else learning_dtype)
            learned = [p for p in masters.by_name.values() if p.requires_grad]
            fits = fits_unsharded(learned, self.ranks, self.device)
            self.learner = Learner(
                self.row_forward,
                self.model,
                masters,
                GradientReduction(self.model, self.is_sharded and offload != "host" and fits),
                optimizer,
                total_updates=total_updates,
                recomputes=recomputes,
                guard=self._step_guard,
                on_device=self.on_device,
            )
            self.parameters = self.learner.parameters
        self._offload: Offload | None = None
        if offload == "idle" and self.device.type != "cpu":
            self._start_offload()

    def _compiles(self, compile: bool | Literal["auto"]) -> bool:
        """Return whether to compile the layers: as configured, or with "auto" where it is supported and faster."""
        if compile != "auto":
            return compile
        is_supported = isinstance(self.model_forward, FusedForward) and not self.model_forward.is_exact
        return is_supported and self.device.type == "cuda" and can_compile_for_gpu()

    def _recompute_activations(self) -> None:
        """Let the model's code recompute activations in the backward pass."""
        # The first is the newer name of the second. Without dropout there is no random state to preserve.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(self.model, name) for name in names if hasattr(self.model, name))
        again = {"context_fn": Routers.of(self.model).contexts_of_checkpoint} if has_routers(self.model) else {}
        try:
            enable({"use_reentrant": False, "preserve_rng_state": False, **again})
        except ValueError as error:
            raise ModelConfigError(
                f"model.gradient_checkpointing=true is not supported for {self.model.config.model_type} models; set it "
                "to false."
            ) from error

    def _start_offload(self) -> None:
        """Keep weights and optimizer state on the device only inside `with self.on_device():` from now on."""
        moments = self.learner.optimizer.state if self.learner else {}
        self._offload = Offload(self.model, self.parameters.values(), moments, self.device)
        if self.learner:
            self.learner.optimizer.register_step_pre_hook(lambda *_: self._wait_for_optimizer_state())

    def _wait_for_optimizer_state(self) -> None:
        """Let the device wait until optimizer state that was offloaded is there."""
        if self._offload:
            self._offload.wait()

    @property
    def max_tokens(self) -> int:
        """The token budget of a micro-batch."""
        return self.row_forward.max_tokens

    @max_tokens.setter
    def max_tokens(self, max_tokens: int) -> None:
        self.row_forward.max_tokens = max_tokens

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
            for indices in self.row_forward.micro_batches(rows):
                fault_point("forward")
                outputs = self.row_forward.compute(
                    self.row_forward.arrange(rows.select_idxs(indices) if len(indices) else None),
                    with_entropy=with_entropy,
                    temperature=temperature,
                    with_sum_squared_probs=with_sum_squared_probs,
                    top_k=top_k,
                    top_k_below=top_k_below,
                )
                if len(indices):  # the host reads them when all micro-batches are under way
                    parts.append((indices, {name: x.to("cpu", non_blocking=True) for name, x in outputs.items()}))
                note_progress()
            reshard(self.model)
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
        learner = self._require_learner()
        learner.add(UpdatePart(rows, loss_function, with_entropy, temperature), number=0, is_last=True)
        return self.finish_update(1, 1.0)

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
        part = UpdatePart(rows, loss_function, with_entropy, temperature)
        self._require_learner().add(part, number=number, is_last=is_last)

    def finish_update(self, num_parts: int, scale: float) -> UpdateResult:
        """Make the optimizer step of the parts that were added; see `TrainEngine`."""
        result = self._require_learner().finish(num_parts, scale, self.num_updates)
        self.num_updates += 1
        return result

    def _require_learner(self) -> Learner:
        if self.learner is None:
            raise ModelError("this engine has no optimizer; build it with optimizer=... to train it.")
        return self.learner

    def on_device(self, *, with_optimizer: bool = True) -> AbstractContextManager[None]:
        """Keep the weights on the device inside the context, and the optimizer state if `with_optimizer`."""
        return self._offload(with_optimizer=with_optimizer) if self._offload else nullcontext()

    def find_token_budget(self, prompt_len: int, response_len: int, processes_on_node: int) -> int:
        """Return the number of tokens per micro-batch that fits into the memory of every rank; see `TrainEngine`."""
        with self.on_device():
            return find_token_budget(self.row_forward, self.learner, prompt_len, response_len, processes_on_node)

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of `value` over the data-parallel ranks."""
        with self._step_guard():
            return self.ranks.sum(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all data-parallel ranks, in rank order."""
        with self._step_guard():
            return self.ranks.gather(value)

    def weights(self, boxes: Mapping[str, Box] | None = None, at_once: int = 2**28) -> Iterable[tuple[str, Tensor]]:
        """Yield parameter names and tensors in the compute dtype, merged or adapters alone; see `TrainEngine`."""
        parameters, shapes = dict(self.model.named_parameters()), self.weight_shapes()
        must_copy = self._offload is not None and not self._offload.is_in_use
        self.bytes_received, sharing = 0, None

        def dtype_of(name: str) -> torch.dtype:
            return parameters[name].dtype if is_adapter(name) else self.compute_dtype

        def tensor_of(name: str) -> Tensor:
            if sharing and name in sharing:
                received, num_bytes = sharing.receive(name)
                self.bytes_received += num_bytes
                return received
            parameter, dtype = parameters[name].detach(), dtype_of(name)
            if isinstance(parameter, DTensor):
                # A shard of the host is gathered on the device, by NCCL; cast before it is sent.
                shard = local(parameter).to(self.device).to(dtype)
                gathered: Any = with_local(parameter, shard)
                parameter = gathered.full_tensor()
                self.bytes_received += parameter.nbytes - shard.nbytes
            return parameter.to(self.device, dtype, copy=must_copy)

        with self.on_device(with_optimizer=False):
            if boxes is not None and self.is_sharded:
                merges = self.lora and not self._sends_adapters
                wanted = boxes_before_merging(parameters, boxes) if merges else boxes
                sharing = Resharding(parameters, wanted, self.device, dtype_of, at_once)
            source = ((name, tensor_of(name)) for name in parameters)
            if self.lora and self._sends_adapters:
                source = separate_adapters(parameters, tensor_of, self.lora.scaling, self.compute_dtype)
            elif self.lora:
                source = merged_weights(parameters, tensor_of, self.lora.scaling)
            for place, (name, weight) in enumerate(source, 1):
                if sharing and place == len(shapes):
                    sharing.verify()
                if boxes is not None and weight.shape != shapes[name]:
                    weight = PartialTensor(shapes[name], weight.dtype, name, boxes[name], weight)
                yield name, weight

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the names and shapes of the tensors of `weights`, in its order."""
        names = ((name, parameter.shape) for name, parameter in self.model.named_parameters())
        return {plain_name(name): shape for name, shape in names if is_adapter(name) == self._sends_adapters}

    @property
    def vocabulary_size(self) -> int:
        """The number of entries of the model's vocabulary."""
        return self.model.config.get_text_config().vocab_size

    @property
    def num_positions(self) -> int | None:
        """The length of the longest sequence that the model supports; None if its configuration has no limit."""
        return num_positions(self.model.config)

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
        if self.learner:
            state["optimizer"] = moments_by_name(self.learner.optimizer, self.parameters, stored)
        return state

    def load_shards(self, described: dict[str, Any], read_into: Callable[[dict[str, Any]], None]) -> None:
        """Load a state with each rank reading only its shards; see `TrainEngine`."""
        require_same_adapters(self.lora, described)
        require_fitting_state(self.parameters, described, with_optimizer=self.learner is not None)
        with self.on_device():
            self._wait_for_optimizer_state()  # before its memory is freed
            if self.learner:
                allocate_moments(self.learner.optimizer, self.parameters, described["optimizer"])
            read_into({key: value for key, value in self.state_dict().items() if key in described})
            if self.learner:
                self.learner.masters.cast()
        self.num_updates = described["num_updates"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`. Raises CheckpointError, with nothing loaded, if it is of another model."""

        @torch.no_grad()
        def copy_into(own: dict[str, Any]) -> None:
            for name, parameter in own["model"].items():
                parameter.copy_(state["model"][name])
            for name, moments in own.get("optimizer", {}).items():
                for moment, value in moments.items():
                    value.copy_(state["optimizer"][name][moment])

        self.load_shards(state, copy_into)
