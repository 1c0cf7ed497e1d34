"""The vLLM engine behind the Protocol: each response is a separate vLLM request with its own seed.

A seed is derived from the request's noise key, the index in the group, the version of the weights and the resume
offset. vLLM's groups (`n`) are not used: their seeds are consecutive numbers, so that neighboring prompts would share
samples.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import OutOfMemoryError, RolloutConfigError, RolloutError
from hybridflow.models.loading import build_with_placeholders
from hybridflow.models.lora import adapter_shapes
from hybridflow.models.model_files import LOADING_ERRORS
from hybridflow.models.parameters import persistent_buffers
from hybridflow.models.stored_model import PublishedForm, Waiting
from hybridflow.models.support import describe_positions, num_positions
from hybridflow.rollout.base import Completion, FinishReason, Request, SleepingPart
from hybridflow.rollout.loading import Loading, require_announced
from hybridflow.rollout.requests import StopStrings, TokenDecoder, not_finite, require_servable
from hybridflow.rollout.vllm.adapters import AdapterEngine
from hybridflow.rollout.vllm.arguments import DTYPES, EngineOptions
from hybridflow.rollout.vllm.process import require_right_temperatures
from hybridflow.rollout.vllm.routes import ReturnedRoutes
from hybridflow.rollout.vllm.versions import MAX_TEMPERATURE, MIN_TEMPERATURE, Progress, VLLMEngine
from hybridflow.runtime.boxes import Box
from hybridflow.runtime.device import own_device
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.memory import is_out_of_memory, out_of_memory
from hybridflow.runtime.progress import note_progress
from hybridflow.runtime.random_streams import derive_seed

LESS_MEMORY = "set a smaller rollout.gpu_memory_utilization or rollout.kv_cache_bytes"
"""Advice if vLLM runs out of memory in a step."""

logger = logging.getLogger(__name__)


@dataclass
class _Sequence:
    """One response: its request, its number in the order of submission, its seed, and its completion."""

    request: Request
    order: int
    seed: int
    completion: Completion

    @property
    def name(self) -> str:
        return f"{self.completion.request_id}.{self.completion.index}"


class VLLMRollout:
    """An engine that generates with vLLM in this process. It has no weights until they are loaded.

    `path` is the directory of the model's configuration. In a process that has joined a process group (`in_group`),
    `tensor_parallel` neighboring ranks share an engine: all of them build it, load weights and make the same calls at
    the same time.

    With `can_sleep`, an engine frees its memory while it sleeps on a GPU, where a process can have one such engine at a
    time. `close` it at the end: the process would keep its memory.

    Without `seed_requests`, the noise is seeded once when an idle engine gets a request, from its noise key and the
    version of the weights. A response then depends on the requests that run beside it, and differs after an error.

    `options` are those of `EngineOptions`.
    """

    def __init__(self, path: str | Path, *, tokenizer: TokenDecoder | None = None, **options: Any) -> None:
        start = EngineOptions(str(path), **options)
        if start.dtype not in DTYPES:
            raise RolloutConfigError(f"vLLM computes in {' or '.join(DTYPES)}, model.dtype is '{start.dtype}'.")
        described: Any = build_with_placeholders(path, "policy", torch.float32, torch.device("cpu"))
        described._weight_conversions = None  # vLLM loads tensors as they are published, whatever the files have
        config = described.config.get_text_config()
        positions = num_positions(config) or start.max_model_len
        if start.max_model_len > positions:
            raise RolloutConfigError(
                f"rollout.max_model_len={start.max_model_len} exceeds the {describe_positions(config)} of '{path}'; "
                f"use at most {positions}, or 0."
            )
        self._shapes = {name: parameter.shape for name, parameter in described.named_parameters()}
        self._buffers = persistent_buffers(described)  # which the trainer does not send: they do not learn
        if start.adapters:
            self._shapes, self._buffers = adapter_shapes(described, start.adapters), {}
        self._form = PublishedForm(described, [*self._shapes, *self._buffers])
        self._routes = ReturnedRoutes(described) if start.records_routes else None
        self.routes_shape = self._routes.shape if self._routes else (0, 0)
        self._waiting: Waiting = {}
        self._vocabulary: int = config.vocab_size
        start = replace(start, max_model_len=start.max_model_len or positions)
        self._max_model_len, self._max_running_sequences = start.max_model_len, start.max_running_sequences
        self._stop_strings = StopStrings(tokenizer)
        self._most_drafts = int((start.speculative or {}).get("num_speculative_tokens", 0))
        self.version: int | None = None
        self._loading: Loading | None = None
        self._sequences: dict[str, _Sequence] = {}  # unfinished, in the order of submission
        self._with_stop_strings: dict[str, None] = {}  # the ones to test for stop strings in every step
        self._num_unfinished: Counter[int] = Counter()  # unfinished sequences of each request
        self._finished: list[_Sequence] = []
        self._num_submitted = 0
        self._has_kept = False  # finished sequences that a later prompt may continue
        self.prompt_tokens = self.reused_tokens = 0  # of finished sequences; reused in whole blocks, also in a group
        if not start.seed_requests:
            logger.warning(
                "vLLM samples without a seed per response (trainer.deterministic=false): a response depends on the "
                "requests that run beside it; set trainer.deterministic = true for samples that do not"
            )
        try:
            self._open: VLLMEngine | None = AdapterEngine(start, self._shapes) if start.adapters else VLLMEngine(start)
            self._open.require_steps()
        except (*LOADING_ERRORS, ImportError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise RolloutError(
                f"vLLM could not be started for '{path}', a {config.model_type} model: {reason}; if vLLM does not "
                "compute it here, use rollout.backend = 'embedded' (vLLM's gpu_memory_utilization, max_model_len and "
                f"max_num_seqs are set by rollout.gpu_memory_utilization={start.gpu_memory_utilization}, "
                f"rollout.max_model_len={self._max_model_len} and rollout.max_running_sequences="
                f"{self._max_running_sequences}; rollout.kv_cache_bytes={start.kv_cache_bytes}, if not 0, is the "
                "memory of keys and values.)"
            ) from error
        if start.speculative:
            require_right_temperatures()

    def submit(self, request: Request) -> None:
        """Queue a request, see `RolloutEngine.submit`."""
        if self._num_unfinished[request.request_id]:
            raise RolloutError(
                f"request {request.request_id} is waiting or running already; give each request a unique id."
            )
        require_servable(
            request,
            max_running_sequences=self._max_running_sequences,
            max_len=self._max_model_len,
            vocabulary=self._vocabulary,
        )
        _require_temperature(request)
        self._stop_strings.require_served(request)
        version = self._require_weights()
        if not self._sequences:
            if not self._has_kept:
                self._engine.forget_prompts()  # so that results do not depend on earlier calls
            self._engine.seed(derive_seed(*request.noise_key, version))
        sequences: list[_Sequence] = []
        try:
            for index in range(request.group_size):
                seed = derive_seed(*request.noise_key, request.first_index + index, version, request.resume_offset)
                sequence = _Sequence(request, self._num_submitted, seed, Completion(request.request_id, index))
                self._add(sequence)
                sequences.append(sequence)
        except (RuntimeError, ValueError, AssertionError) as error:
            self._engine.abort([sequence.name for sequence in sequences])
            raise RolloutError(f"vLLM refuses request {request.request_id}: {' '.join(str(error).split())}") from error
        for sequence in sequences:
            self._sequences[sequence.name] = sequence
            if request.sampling.stop_strings:
                self._with_stop_strings[sequence.name] = None
        self._num_unfinished[request.request_id] = len(sequences)
        self._num_submitted += 1

    def has_unfinished(self) -> bool:
        """Return whether requests are waiting or running."""
        return bool(self._sequences)

    def step(self) -> None:
        """Run one step of vLLM's scheduler, see `RolloutEngine.step`."""
        if not self._sequences:
            return
        self._require_weights()
        self._advance(self._engine.step)
        note_progress()

    def finished(self) -> list[Completion]:
        """Return the completions since the last call."""
        done, self._finished = self._finished, []
        return [sequence.completion for sequence in sorted(done, key=lambda s: (s.order, s.completion.index))]

    def abort(self, request_id: int) -> None:
        """Stop a request, see `RolloutEngine.abort`."""
        stopped = [sequence for sequence in self._sequences.values() if sequence.request.request_id == request_id]
        if not stopped:
            raise RolloutError(f"request {request_id} is neither waiting nor running; it cannot be aborted.")
        for sequence in stopped:
            progress = self._engine.progress(sequence.name)
            self._engine.abort([sequence.name])
            self._finish(sequence, progress, "abort")

    def forget_kept(self) -> None:
        """Forget prompts and responses when the next request comes to an idle engine, which frees no memory."""
        self._has_kept = False

    def start_loading(self, shapes: Mapping[str, torch.Size]) -> None:
        """Announce weights, see `RolloutEngine.start_loading`."""
        loading = Loading(self._shapes, shapes)
        self._advance(self._engine.finish_step_in_flight)
        for sequence in self._sequences.values():  # their tokens so far are of the current version
            self._add_versions(sequence, len(self._engine.token_ids(sequence.name)))
        self.abandon_loading()
        self._loading = loading
        self._engine.start_loading()
        self._waiting = {}
        self._engine.load(self._form.stream(self._buffers.items(), self._waiting))

    def boxes_to_load(self) -> Mapping[str, Box]:
        """Return the part of each weight that this rank loads, see `RolloutEngine.boxes_to_load`."""
        if self._loading is not None:
            raise RolloutError("boxes_to_load was called while weights are being loaded; call it before start_loading.")
        unchanged = self._form.unchanged(self._shapes)
        return self._engine.boxes_to_load({name: shape for name, shape in self._shapes.items() if name in unchanged})

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the announced weights, see `RolloutEngine.load`."""
        loading = require_announced(self._loading)
        try:
            self._engine.load(self._form.stream(loading.checked(weights), self._waiting))
        except BaseException:
            self.abandon_loading()
            raise

    def finish_loading(self, version: int) -> None:
        """Use the loaded weights from the next step on, see `RolloutEngine.finish_loading`."""
        loading = require_announced(self._loading)
        try:
            loading.require_complete()
        except RolloutError:
            self.abandon_loading()
            raise
        self._engine.finish_loading()
        self._loading, self.version = None, version

    def retract(self) -> None:
        """Compute keys and values again, see `RolloutEngine.retract`."""
        if self._sequences:
            self._advance(self._engine.finish_step_in_flight)
            self._engine.retract()
        self.forget_kept()

    def abandon_loading(self) -> None:
        """Discard the weights, see `RolloutEngine.abandon_loading`."""
        if self._loading is not None:
            self._engine.abandon_loading()
        self.forget_kept()
        self._loading = self.version = None

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of given tokens, see `RolloutEngine.log_probs`."""
        self._require_weights()
        for number, sequence in enumerate(sequences):
            if not 2 <= len(sequence) < self._max_model_len:
                raise RolloutError(
                    f"sequence {number} has {len(sequence)} tokens; log_probs needs at least 2, and fewer than the "
                    f"{self._max_model_len} positions that vLLM was started with."
                )
            if min(sequence) < 0 or max(sequence) >= self._vocabulary:
                raise RolloutError(f"sequence {number} has token ids outside of [0, {self._vocabulary}).")
        found: list[list[float]] = []

        def probe() -> list[Progress]:
            try:
                log_probs, done = self._engine.log_probs(sequences)
            except (RuntimeError, ValueError, AssertionError) as error:
                raise RolloutError(f"vLLM failed to compute log-probs: {' '.join(str(error).split())}") from error
            found.extend(log_probs)
            return done

        self._advance(probe)
        return found

    def wake(self, part: SleepingPart) -> None:
        """Allocate memory, see `RolloutEngine.wake`."""
        self._engine.wake(part)

    def sleep(self) -> None:
        """Free memory, see `RolloutEngine.sleep`."""
        if self._sequences:
            raise RolloutError("an engine at work cannot sleep; finish or abort its requests.")
        self.forget_kept()
        if self._engine.sleep():
            self.version = None

    def close(self) -> None:
        """Free the engine's memory and drop its requests; it cannot be used afterwards. Closing twice is allowed.

        Ranks that share an engine close it at the same time.
        """
        if self._open is not None:
            engine, self._open = self._open, None
            for unfinished in (self._sequences, self._with_stop_strings, self._num_unfinished):
                unfinished.clear()
            engine.close()

    @property
    def _engine(self) -> VLLMEngine:
        if self._open is None:
            raise RolloutError("this vLLM engine was closed; build another VLLMRollout.")
        return self._open

    def _advance(self, advance: Callable[[], list[Progress]]) -> None:
        """Advance vLLM by a call that returns the sequences that it finished, and end those with a stop string."""
        try:
            done = {progress.name: progress for progress in advance()}
            for name in [name for name in self._with_stop_strings if name not in done]:
                if self._stopped_at(name, self._engine.token_ids(name)):
                    done[name] = self._engine.progress(name)
                    self._engine.abort([name])
            for progress in done.values():
                if not math.isfinite(math.fsum(progress.log_probs)):
                    raise not_finite(self._sequences[progress.name].request.request_id)
            for name, progress in done.items():
                if stop := self._stopped_at(name, progress.token_ids):  # drafts may have more tokens
                    tokens, log_probs = progress.token_ids[:stop], progress.log_probs[:stop]
                    progress = replace(progress, token_ids=tokens, log_probs=log_probs)
                is_cut = progress.finish_reason == "length" and not stop
                self._finish(self._sequences[name], progress, "length" if is_cut else "stop")
            if self._sequences:
                fault_point("generate")
        except (RuntimeError, ValueError, AssertionError) as error:
            self._restart_sequences()
            if is_out_of_memory(error):
                raise out_of_memory(error, "generation by vLLM", own_device(), LESS_MEMORY, OutOfMemoryError) from error
            raise RolloutError(f"vLLM failed in a step: {' '.join(str(error).split())}") from error
        except BaseException:
            self._restart_sequences()
            raise

    def _require_weights(self) -> int:
        version = self.version if self._engine else None  # a closed engine is another error
        if version is None:
            raise RolloutError(
                "the vLLM engine has no complete set of weights: none were loaded, or loading was interrupted; load "
                "all weights."
            )
        return version

    def _add(self, sequence: _Sequence) -> None:
        request = sequence.request
        stops = tuple(token for token in request.sampling.stop_token_ids if 0 <= token < self._vocabulary)
        sampling = replace(request.sampling, stop_token_ids=stops)
        salt = str(self.version)
        self._engine.add(sequence.name, request.prompt_ids, sampling, seed=sequence.seed, cache_salt=salt)

    def _finish(self, sequence: _Sequence, progress: Progress, reason: FinishReason) -> None:
        done = sequence.completion
        if self._routes and progress.token_ids:
            num_tokens = len(sequence.request.prompt_ids) + len(progress.token_ids) - 1
            done.routes = self._routes.checked(progress.routes, num_tokens)
        del self._sequences[sequence.name]
        self._num_unfinished[sequence.request.request_id] -= 1
        if not self._num_unfinished[sequence.request.request_id]:
            del self._num_unfinished[sequence.request.request_id]
        self._with_stop_strings.pop(sequence.name, None)
        done.token_ids, done.log_probs, done.finish_reason = progress.token_ids, progress.log_probs, reason
        self._add_versions(sequence, len(progress.token_ids))
        self._finished.append(sequence)
        self._has_kept |= sequence.request.keep and reason != "abort"
        self.prompt_tokens += len(sequence.request.prompt_ids)
        self.reused_tokens += progress.num_reused

    def _add_versions(self, sequence: _Sequence, num_tokens: int) -> None:
        """Give the current version to tokens without one."""
        versions = sequence.completion.versions
        if num_tokens > len(versions):
            versions += [self._require_weights()] * (num_tokens - len(versions))

    def _stopped_at(self, name: str, token_ids: Sequence[int]) -> int:
        """Return the number of tokens up to a stop string that ends among those of the last step, or 0."""
        stops, last = self._sequences[name].request.sampling.stop_strings, len(token_ids)
        for number in range(max(1, last - self._most_drafts), last + 1) if stops else ():
            if self._stop_strings.end(token_ids if number == last else token_ids[:number], stops):
                return number
        return 0

    def _restart_sequences(self) -> None:
        """Queue every unfinished sequence again after an error, with its seed, so that its tokens are the same."""
        self.forget_kept()
        self._engine.abort(self._sequences)
        for sequence in self._sequences.values():
            sequence.completion = Completion(sequence.completion.request_id, sequence.completion.index)
            self._add(sequence)


def _require_temperature(request: Request) -> None:
    temperature = request.sampling.temperature
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RolloutConfigError(
            f"request {request.request_id} has temperature={temperature}, but vLLM samples at 0, or from "
            f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE}; use a valid temperature, or rollout.backend = 'embedded'."
        )
