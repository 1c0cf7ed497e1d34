"""The engine of vLLM, version 0.32. Another version of vLLM is a change to this file and to `process.py` alone.

Importing this file does not import vLLM; building an engine does.
"""

# pyright: reportMissingImports=false

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.random import fork_rng

from hybridflow.errors import RolloutError, WeightSyncError
from hybridflow.models.loading import model_config
from hybridflow.rollout import base
from hybridflow.rollout.vllm.arguments import EngineOptions, engine_arguments
from hybridflow.rollout.vllm.families import pack_experts, renew_tied_head, require_windows, separate_model_code
from hybridflow.rollout.vllm.process import (
    clean_up,
    join_own_group_if_none,
    require_vllm,
    restored_process_state,
    unique_shared_memory,
)
from hybridflow.runtime.allocator import paused_collector
from hybridflow.runtime.boxes import Box, whole_box
from hybridflow.runtime.device import free_cached_memory
from hybridflow.runtime.partial_tensor import PartialTensor
from hybridflow.runtime.random_streams import derive_seed

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Valid temperatures besides 0. vLLM silently raises lower ones to 0.01 and rejects higher ones."""

NEVER_COMPLETE = -(2**62)
"""Number of loaded elements of a layer with which vLLM waits for more weights, however many are loaded."""


@dataclass(frozen=True)
class Progress:
    """Tokens of a sequence so far; `finish_reason` is None until it ends.

    `num_reused` counts the tokens of its prompt whose keys and values were in the prefix cache, 0 until it ends.
    `routes`: what vLLM returned of its routes.
    """

    name: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None = None
    num_reused: int = 0
    routes: Any = None


_open: WeakSet["VLLMEngine"] = WeakSet()
"""The engines of this process, which share the process groups of vLLM."""


class VLLMEngine:
    """The engine of vLLM in this process, which generates named sequences. vLLM's exceptions pass through.

    On a GPU vLLM schedules asynchronously: while the results of a step are read, the next one is in flight. It has no
    effect on a sequence that ends or is aborted meanwhile.
    """

    _sleep_level = 2  # the trainer sends all weights again
    _lora_request: Any = None
    """The adapters that sequences are generated with."""

    def __init__(self, options: EngineOptions) -> None:
        require_vllm()
        on_gpu = torch.cuda.is_available()
        with restored_process_state(), paused_collector():  # a quarter of the time is import
            join_own_group_if_none(on_gpu)
            from vllm import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine

            # The context sets the tokens of a step on a GPU: 16,384 of prompts on one of 70 GB, where the default of an
            # engine is 2,048.
            context = UsageContext.LLM_CLASS if on_gpu else UsageContext.ENGINE_CONTEXT
            memory = unique_shared_memory() if options.in_group and not on_gpu else nullcontext()
            with memory, separate_model_code(model_config(options.path), on_gpu):
                arguments = EngineArgs(**engine_arguments(options, on_gpu))
                self._engine: Any = LLMEngine.from_engine_args(arguments, usage_context=context)
        # When it is garbage-collected, an engine would destroy all process groups of the process, also training's.
        self._engine.engine_core._finalizer.detach()
        _open.add(self)
        self._on_gpu, self._can_sleep = on_gpu, options.can_sleep
        self._sequences: dict[str, str] = {}  # name -> vLLM's name
        self._seed_requests = options.seed_requests
        self._seed, self._num_steps = 0, 0

    def require_steps(self) -> None:
        """Raise the error of a first step, where kernels for CPUs refuse sizes and dtypes of a model, and close."""
        try:
            require_windows(self._engine.vllm_config)
            if self._on_gpu:
                return
            self.add("first", [0, 0], base.SamplingParams(2, temperature=0.0), seed=0, cache_salt="")
            while self._sequences:
                self.step()
        except BaseException:
            self.close()
            raise
        self.forget_prompts()

    def add(
        self, name: str, prompt_ids: Sequence[int], sampling: base.SamplingParams, *, seed: int, cache_salt: str
    ) -> None:
        """Queue a sequence; the keys and values of its prompt are shared only under the same `cache_salt`."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        vllm_sampling = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed if self._seed_requests else None,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids names all stop tokens
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # an object for each token would take 10% of the time
            skip_clone=True,
        )
        prompt = tokens_input(list(prompt_ids), cache_salt=cache_salt)
        self._sequences[name] = self._engine.add_request(name, prompt, vllm_sampling, lora_request=self._lora_request)

    def seed(self, seed: int) -> None:
        """Set the noise of the next steps, unless sequences have seeds; ranks of one engine must give equal seeds."""
        self._seed, self._num_steps = seed, 0

    def step(self) -> list[Progress]:
        """Add a token to each running sequence; return the sequences that it finished.

        With asynchronous scheduling the next step is in flight afterwards, unless all sequences are finished.
        """
        with self._random_state():
            if self._is_asynchronous and not self._in_flight:
                self._engine.step()  # starts a step, and returns no results
            done = self._done(self._engine.step())
        if not self._sequences:
            self._drop_step_in_flight()
        return done

    def finish_step_in_flight(self) -> list[Progress]:
        """Wait for the step in flight, if there is one, and start no other; return the sequences that it finished.

        Call it before the weights change: these tokens are of the current weights.
        """
        done: list[Progress] = []
        with self._random_state():
            while self._in_flight:
                self._core.pause_scheduler("keep", clear_cache=False)  # so that it starts no step of a sequence
                try:
                    done += self._done(self._engine.step())
                finally:
                    self._core.resume_scheduler()
        return done

    def token_ids(self, name: str) -> Sequence[int]:
        """Return the tokens so far of an unfinished sequence: vLLM's own list, which must not be changed."""
        return self._state(name).detokenizer.output_token_ids

    def progress(self, name: str) -> Progress:
        """Return the tokens so far of an unfinished sequence."""
        state = self._state(name)
        routes = np.concatenate(state.routed_experts_chunks) if state.routed_experts_chunks else None
        log_probs = list(state.logprobs_processor.logprobs.logprobs)
        return Progress(name, list(self.token_ids(name)), log_probs, routes=routes)

    def abort(self, names: Iterable[str]) -> None:
        """Remove these sequences; their tokens of a step in flight are dropped."""
        known = [self._sequences.pop(name) for name in names if name in self._sequences]
        self._engine.abort_request(known, internal=True)
        if not self._sequences:
            self._drop_step_in_flight()

    def forget_prompts(self) -> None:
        """Drop keys and values of earlier prompts, so that later results do not depend on them."""
        self._engine.reset_prefix_cache()

    def retract(self) -> None:
        """Free the keys and values of all sequences, which the next steps compute again; no step may be in flight."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[Progress]]:
        """Return the log-probs of all tokens but the first, at temperature 1, and the sequences that have finished.

        Running sequences advance by a token in each step of vLLM that this takes.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        found: dict[str, list[float]] = {}
        names, added = [str(i) for i in range(len(sequences))], []  # vLLM gives a request a longer name
        done: list[Progress] = []
        try:
            for name, sequence in zip(names, sequences, strict=True):
                sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, detokenize=False)
                prompt, lora = tokens_input(list(sequence)), self._lora_request
                added.append(self._engine.add_request(name, prompt, sampling, lora_request=lora))
            with self._random_state():
                while len(found) < len(names):
                    for output in self._engine.step():
                        if output.request_id not in names:
                            done += self._done([output])
                        elif output.finished:
                            tokens = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                            found[output.request_id] = [entry[token].logprob for token, entry in tokens]
        except BaseException:
            self._engine.abort_request(added, internal=True)
            raise
        finally:
            if not self._sequences:
                self._drop_step_in_flight()
        return [found[name] for name in names], done

    def start_loading(self) -> None:
        """Prepare the layers for new weights; a layer is replaced when all its weights are loaded.

        vLLM's `reload_weights` does the same in one call with all weights, and its weight-transfer sessions in several,
        but those cannot be abandoned.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._on_model(lambda model, config: initialize_layerwise_reload(model))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some weights by their Hugging Face names; each rank takes its part of a whole tensor.

        Of a PartialTensor only that part is in memory. Weights are buffered until their layer is complete.
        """
        self._on_model(lambda model, config: model.load_weights(weights))

    def boxes_to_load(self, shapes: Mapping[str, torch.Size]) -> dict[str, Box]:
        """Return the part of each weight that this rank loads, as recorded while vLLM's loaders run without contents.

        A weight is left out if this rank loads all of it, not one box, or not by views and copies. Layers are on the
        meta device meanwhile, so that no weight changes.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        found: dict[str, Box] = {}

        def record(model: Any, config: Any) -> None:
            try:
                initialize_layerwise_reload(model)
                _load_nothing(model, config)
                for name, shape in shapes.items():
                    weight = PartialTensor(shape, config.dtype, name)
                    with suppress(WeightSyncError):
                        model.load_weights([(name, weight)])
                        boxes = set(weight.boxes_read)
                        box = boxes.pop() if len(boxes) == 1 else None
                        if box is not None and box != whole_box(shape):
                            found[name] = box
            finally:
                finalize_layerwise_reload(model, config)

        self._on_model(record)
        return found

    def finish_loading(self) -> None:
        """Generate with the weights that were loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._on_model(finalize_layerwise_reload)
        self._on_model(renew_tied_head)
        if not self._on_gpu:
            self._on_model(pack_experts)
        self.forget_prompts()

    def abandon_loading(self) -> None:
        """Restore every layer that waits for weights, so that loading can start again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._on_model(_load_nothing)
        self._on_model(finalize_layerwise_reload)

    def sleep(self) -> bool:
        """Free weights, keys and values on a GPU, nothing on a CPU; return whether the weights were freed."""
        if not self._can_sleep:
            raise RolloutError("this vLLM engine was built without can_sleep=True: it cannot sleep; close it instead.")
        if self._on_gpu:
            self._engine.sleep(level=self._sleep_level)
        return self._on_gpu

    def wake(self, part: str) -> None:
        """Allocate memory for "weights" or for the "kv_cache" again."""
        if self._on_gpu and self._can_sleep:
            self._engine.wake_up([part])

    def close(self) -> None:
        """Free the memory of the engine, and vLLM's process groups with the last engine of the process.

        It cannot be used afterwards. An engine that sleeps wakes first: vLLM cannot free memory that is asleep.
        """
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        free_cached_memory()
        if self._engine.is_sleeping():
            self._engine.wake_up()
        self.abandon_loading()
        # What vLLM's reloads keep in the process has come to refer to the layers; recorded anew it does not.
        self._on_model(lambda model, config: record_metadata_for_reloading(model))
        executor = self._engine.model_executor
        del self._engine
        _open.discard(self)
        executor.shutdown()  # it also unfreezes the objects that vLLM froze at its start for the garbage collector
        del executor
        if not _open:
            clean_up()
            return
        gc.collect()
        free_cached_memory()

    def _done(self, outputs: Iterable[Any]) -> list[Progress]:
        """Return the finished sequences of vLLM's outputs, and forget their names."""
        done = []
        for output in outputs:
            (part,) = output.outputs
            self._sequences.pop(output.request_id, None)
            tokens, log_probs = list(part.token_ids), list(part.logprobs.logprobs)
            num_reused = output.num_cached_tokens or 0
            reason, routes = part.finish_reason, part.routed_experts
            done.append(Progress(output.request_id, tokens, log_probs, reason, num_reused, routes))
        return done

    def _state(self, name: str) -> Any:
        return self._engine.output_processor.request_states[self._sequences[name]]

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    @property
    def _is_asynchronous(self) -> bool:
        return self._engine.vllm_config.scheduler_config.async_scheduling

    @property
    def _in_flight(self) -> int:
        """The number of steps that are scheduled and not yet read."""
        return len(self._core.batch_queue or ())

    def _drop_step_in_flight(self) -> None:
        """Wait for the step in flight, of which no sequence is left, so that it cannot use memory or weights later."""
        for _ in range(2 * self._in_flight):  # vLLM takes a step from its queue before it can fail, and may add one
            with suppress(Exception):
                self.finish_step_in_flight()

    @contextmanager
    def _random_state(self) -> Iterator[None]:
        """Leave the process's random state unchanged by vLLM, and set it from the seed if sequences have none.

        Then vLLM draws a step's noise, or the seeds of new sequences, from the generators of torch and numpy.
        """
        if self._seed_requests:
            with fork_rng(devices=()):  # vLLM also draws from the process's generator
                yield
            return
        numpy_state = np.random.get_state()
        with fork_rng(devices=range(torch.cuda.device_count()) if self._on_gpu else ()):
            torch.manual_seed(derive_seed(self._seed, self._num_steps, 0))
            np.random.seed(derive_seed(self._seed, self._num_steps, 1) % 2**32)
            self._num_steps += 1
            try:
                yield
            finally:
                np.random.set_state(numpy_state)

    def _on_model(self, function: Callable[[Any, Any], object]) -> None:
        """Call the function with the model and its configuration, in the context of vLLM's worker."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._engine.vllm_config), torch.no_grad():
            self._engine.apply_model(lambda model: function(model, self._engine.model_config))


def _load_nothing(model: Any, config: Any) -> None:
    """Let the layers that wait for weights keep those which they have, when loading ends."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        get_layerwise_info(layer).load_numel = NEVER_COMPLETE
