"""The embedded rollout engine: generation with the trainer's own model and weights, in its process.

Requests wait until there is room. Running sequences decode on a CPU in `DecodingBatches`, elsewhere in `PagedDecoding`.
If memory runs out, they start again, half as many at a time.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import RolloutConfigError, RolloutError
from hybridflow.models.forward_of import forward_of
from hybridflow.models.kernels.library import serves
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.loading import placeholder
from hybridflow.models.support import num_positions
from hybridflow.rollout.base import Completion, Request, SleepingPart
from hybridflow.rollout.decoding import Decoding
from hybridflow.rollout.decoding_batches import DecodingBatches
from hybridflow.rollout.kept_sequences import KeptSequences
from hybridflow.rollout.loading import Loading, require_announced
from hybridflow.rollout.page_memory import PageMemory
from hybridflow.rollout.paged_decoding import READ_EVERY, PagedDecoding
from hybridflow.rollout.requests import StopStrings, TokenDecoder, require_servable
from hybridflow.rollout.step_graphs import DecodingSteps
from hybridflow.runtime.boxes import Box
from hybridflow.runtime.device import free_cached_memory
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.memory import is_out_of_memory, naming_out_of_memory
from hybridflow.runtime.progress import note_progress

logger = logging.getLogger(__name__)

LESS_MEMORY = (
    "set a smaller rollout.max_running_sequences or data.max_response_length, or memory.offload for roles that can wait"
)
"""Advice if generation runs out of memory."""


class EmbeddedRollout:
    """An engine that generates with `model` and shares its parameters.

    `shares_model`: the model is the trainer's own, so its weights are never freed here. With `pack_weights`, a CPU
    generates from a copy of the weights in the memory order of its matrix products, which exists while sequences run.
    `paged`: keys and values in pages, and steps of fixed shapes; None: on every device except a CPU. `kv_cache_bytes`
    is the memory of keys, values and states; 0: what the sequences need, with pages the share `memory_share` of the
    free memory (1 GiB on a CPU). `records_routes`: completions of a mixture of experts have routes.
    `exact`: log-probs are those of an exact trainer, bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running_sequences: int = 1024,
        pack_weights: bool = True,
        shares_model: bool = True,
        tokenizer: TokenDecoder | None = None,
        kv_cache_bytes: int = 0,
        memory_share: float = 0.5,
        paged: bool | None = None,
        records_routes: bool = False,
        exact: bool = False,
    ) -> None:
        if max_running_sequences < 1:
            raise RolloutConfigError(
                f"max_running_sequences={max_running_sequences} is invalid: it must be at least 1."
            )
        self.model = model
        self._forward = forward_of(model, records_routes=records_routes, exact=exact)
        needs_pages = not serves(next(model.parameters()))  # compiled kernels attend without pages
        if exact and paged not in (None, needs_pages):
            raise RolloutConfigError(
                f"paged={paged} is not supported with exact=True on {model.device.type}: its attention adds in another "
                "order than training; leave paged out."
            )
        self.routes_shape = self._forward.routes_shape
        self._paged = paged
        self._memory = PageMemory(kv_cache_bytes, memory_share)
        self._pack_weights = pack_weights
        self._is_packed = False  # True while sequences run, until the weights change
        self._shares_model = shares_model
        self._owns_weights = False  # they are in memory that this object has allocated
        self._stop_strings = StopStrings(tokenizer)
        self.version: int | None = 0 if shares_model else None
        self._loading: Loading | None = None
        self._loaded: dict[str, Tensor] = {}
        self.max_running_sequences = max_running_sequences
        self._limit = max_running_sequences  # that memory has held
        self._waiting: deque[Request] = deque()
        self._kept = KeptSequences[Any]()  # in the memory of `_running`
        self._running: Decoding | None = None  # from the first step on, while requests are unfinished or sequences kept
        self._steps: DecodingSteps | None = None  # of PagedDecoding, for later ones too
        self._finished: dict[tuple[int, int], Completion] = {}  # by request_id and index
        self._unfinished: dict[int, _Progress] = {}  # in the order of submission
        self._num_submitted = 0
        self._idle_addresses: list[int] = []  # of the weights since the engine is idle with sequences kept

    def submit(self, request: Request) -> None:
        """Queue a request, see `RolloutEngine.submit`."""
        if request.request_id in self._unfinished:
            raise RolloutError(
                f"request {request.request_id} is waiting or running already; give each request a unique id."
            )
        config = self.model.config.get_text_config()
        require_servable(
            request,
            max_running_sequences=self.max_running_sequences,
            max_len=num_positions(config),
            vocabulary=config.vocab_size,
        )
        self._stop_strings.require_served(request)
        if request.group_size > self._limit:
            self._limit = request.group_size
            self._restart_requests()  # they run where there is room for fewer sequences
        self._waiting.append(request)
        self._unfinished[request.request_id] = _Progress(request, self._num_submitted)
        self._num_submitted += 1

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens of requests that have started, see `KeptSequences`."""
        return self._kept.prompt_tokens

    @property
    def reused_tokens(self) -> int:
        """The number of these tokens that were not computed, because their keys and values were kept."""
        return self._kept.reused_tokens

    def has_unfinished(self) -> bool:
        """Return whether requests are waiting or running."""
        return bool(self._unfinished)

    @torch.no_grad()
    def step(self) -> None:
        """Advance every running sequence by one token, see `RolloutEngine.step`.

        If memory runs out, half as many sequences start again; RolloutError if one group alone does not fit.
        """
        if self.version is None:
            raise RolloutError("the engine has no weights to generate with; load them first.")
        try:
            with naming_out_of_memory("generation", self.model.device, LESS_MEMORY, RolloutError):
                self._running = self._running or self._new_decoding()
                if self._idle_addresses and self._idle_addresses != self._addresses():
                    self._use_new_weights()
                self._idle_addresses = []
                if self._pack_weights and not self._is_packed and not self._is_paged():
                    self._forward.pack_weights()
                    self._is_packed = True
                self._running.admit(self._waiting, self._limit - self._running.num_running)
                self._finish(self._running.advance(self.version))
                note_progress()
                if self._unfinished:
                    fault_point("generate")
        except BaseException as error:
            self._restart_requests()
            is_memory = error.__cause__ is not None and is_out_of_memory(error.__cause__)
            if not (is_memory and self._halve_limit()):
                raise

    def finished(self) -> list[Completion]:
        """Return the completions since the last call."""
        done, self._finished = self._finished, {}
        return list(done.values())

    def abort(self, request_id: int) -> None:
        """Stop a request, see `RolloutEngine.abort`."""
        if request_id not in self._unfinished:
            raise RolloutError(f"request {request_id} is neither waiting nor running; it cannot be aborted.")
        try:
            stopped = self._running.abort(request_id) if self._running else []
            for request in self._waiting:
                if request.request_id == request_id:
                    stopped += [Completion(request_id, i, finish_reason="abort") for i in range(request.group_size)]
            self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
            self._finish(stopped)
        except BaseException:
            self._restart_requests()
            raise

    def forget_kept(self) -> None:
        """Free kept keys and values, see `RolloutEngine.forget_kept`."""
        if self._kept:
            self._kept.clear()
            if not (self._running and self._running.num_running):
                self._free()

    def start_loading(self, shapes: Mapping[str, torch.Size]) -> None:
        """Announce weights, see `RolloutEngine.start_loading`."""
        own = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        self._loading, self._loaded, self.version = Loading(own, shapes), {}, None
        self.forget_kept()

    def boxes_to_load(self) -> Mapping[str, Box]:
        """Return no boxes: every rank has the whole model."""
        return {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the announced weights, see `RolloutEngine.load`."""
        self._loaded.update(require_announced(self._loading).checked(weights))

    def finish_loading(self, version: int) -> None:
        """Use the loaded weights from the next step on, without a copy if dtype and device are the model's.

        An own copy whose graphs exist, since it did not sleep before, is made and then overwritten, so that the graphs
        of later versions stay.
        """
        require_announced(self._loading).require_complete()
        self.forget_kept()  # of requests aborted since `start_loading`
        copies = not self._shares_model and self._steps is not None and self._steps.graphs.num_captured > 0
        for name, parameter in self.model.named_parameters():
            new = self._loaded[name].detach()
            if copies and self._owns_weights:
                parameter.data.copy_(new)
            else:
                parameter.data = new.to(parameter, copy=copies).contiguous()
        self._owns_weights = copies
        self._loading, self._loaded = None, {}
        self._use_new_weights()
        self.version = version

    @torch.no_grad()
    def retract(self) -> None:
        """Compute keys and values again, see `RolloutEngine.retract`."""
        if not self._running:
            return
        try:
            with naming_out_of_memory("generation", self.model.device, LESS_MEMORY, RolloutError):
                self._finish(self._running.retract())
        except BaseException:
            self._restart_requests()
            raise
        self.forget_kept()

    def abandon_loading(self) -> None:
        """Discard the weights, see `RolloutEngine.abandon_loading`."""
        self._loading, self._loaded, self.version = None, {}, None
        self.forget_kept()

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of given tokens, see `RolloutEngine.log_probs`."""
        device, found = self.model.device, []
        for sequence in sequences:
            tokens, positions = torch.tensor(sequence, device=device), torch.arange(len(sequence), device=device)
            logits = self._forward(
                tokens[None],
                position_ids=positions[None],
                attention_plan=PrefillPlan([len(sequence)]),
                logits_to_keep=positions[:-1],
            )[0]
            wide = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            found.append(wide.gather(-1, tokens[1:, None]).squeeze(-1).tolist())
        return found

    def wake(self, part: SleepingPart) -> None:
        """Do nothing: memory is allocated when it is used."""

    def sleep(self) -> None:
        """Free the weights until they are loaded again; weights shared with the trainer stay.

        Graphs of decoding steps stay only if the weights do, and not if these are offloaded.
        """
        self.forget_kept()
        if not self._shares_model:
            for parameter in self.model.parameters():
                parameter.data = placeholder(parameter.shape, parameter.dtype, parameter.device)
            self._forward.drop_packed_weights()
            self._is_packed = False
            self.version = None
        if self._steps:
            self._steps.rest()

    def _is_paged(self) -> bool:
        """Whether keys and values are in pages: on the device of the weights, which an idle trainer may offload."""
        return self.model.device.type != "cpu" if self._paged is None else self._paged

    def _new_decoding(self) -> Decoding:
        """Return the way to decode on the device of the weights, without memory for sequences."""
        if not self._is_paged():
            model, num_bytes = self.model, self._memory.num_bytes
            return DecodingBatches(self._forward, model.device, model.dtype, self._stop_strings, self._kept, num_bytes)
        if self._steps is None or self._steps.place != (self.model.device, self.model.dtype, self._limit):
            self._forget_steps()
            self._steps = DecodingSteps(self._forward, self.model, self._limit, READ_EVERY)
        return PagedDecoding(
            self._forward,
            self.model.device,
            steps=self._steps,
            kept=self._kept,
            max_running_sequences=self._limit,
            stop_strings=self._stop_strings,
            memory=self._memory,
        )

    def _halve_limit(self) -> bool:
        """Let half as many sequences run from now on, at least one group; return whether they are fewer than before."""
        groups = [progress.request.group_size for progress in self._unfinished.values()]
        tried = min(self._limit, sum(groups))
        limit = max(tried // 2, max(groups, default=1))
        if limit >= tried:
            return False
        logger.warning(
            "generation ran out of memory with %d sequences at a time: at most %d from now on; a smaller "
            "rollout.max_running_sequences avoids the second try",
            tried,
            limit,
        )
        self._limit = limit
        return True

    def _finish(self, completions: list[Completion]) -> None:
        """Record the completions of one step or of an abort.

        A sequence that was finished before its request restarted is ignored, and stopped where it would end last.
        """
        completions = [completion for completion in completions if completion.request_id in self._unfinished]
        for completion in sorted(completions, key=lambda c: (self._unfinished[c.request_id].order, c.index)):
            progress = self._unfinished[completion.request_id]
            if completion.index in progress.finished:
                continue
            self._finished[completion.request_id, completion.index] = completion
            progress.finished.add(completion.index)
        complete = [key for key in {each.request_id for each in completions} if self._unfinished[key].is_complete()]
        for request_id in complete:
            del self._unfinished[request_id]
        if complete:
            self._waiting = deque(request for request in self._waiting if request.request_id in self._unfinished)
        for request_id in complete:
            if self._running:
                self._finish(self._running.abort(request_id))
        if not self._unfinished:
            self._free()

    def _free(self) -> None:
        """Free the memory of running sequences."""
        if self._running and self._kept:  # which no change of the weights outlives
            self._idle_addresses = self._addresses()
            return
        self._running = None
        self._forward.drop_packed_weights()
        self._is_packed = False
        if self._steps:
            self._steps.rest()
        free_cached_memory()

    def _addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self.model.parameters()]

    def _use_new_weights(self) -> None:
        self._forward.drop_packed_weights()  # of the old ones
        self._is_packed = False
        if self._running:
            self._running.use_new_weights()

    def _forget_steps(self) -> None:
        if self._steps:
            self._steps.graphs.clear()
        self._steps = None

    def _restart_requests(self) -> None:
        """Stop all sequences after an error and queue every unfinished request again.

        Its tokens will be the same, since noise depends only on request, index and position.
        """
        self._unfinished = {key: progress for key, progress in self._unfinished.items() if not progress.is_complete()}
        self._waiting = deque(progress.request for progress in self._unfinished.values())
        self._kept.discard()
        self._forget_steps()
        self._free()


class _Progress:
    """A request, its number in the order of submission, and the indices of its finished sequences."""

    def __init__(self, request: Request, order: int) -> None:
        self.request, self.order = request, order
        self.finished: set[int] = set()

    def is_complete(self) -> bool:
        return len(self.finished) == self.request.group_size
