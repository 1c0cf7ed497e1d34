"""The embedded rollout engine: generation with the trainer's own model and weights, in its process.

Requests wait here until there is room; sequences that draw alike then decode together in a wave.
Needs nothing but the model.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import AlgorithmError, RolloutError
from hybridflow.models import forward_of, placeholder
from hybridflow.rollout.base import Completion, Request, SamplingParams
from hybridflow.rollout.wave import Wave
from hybridflow.runtime import derive_seed


class EmbeddedRollout:
    """Generates with `model`, whose parameters it shares.

    With `pack_weights`, a CPU generates from a copy of them in the order that its products read; the copy is there
    while sequences run.
    """

    def __init__(self, model: PreTrainedModel, *, max_running_sequences: int = 1024, pack_weights: bool = True) -> None:
        if max_running_sequences < 1:
            raise RolloutError(f"max_running_sequences={max_running_sequences}; it must be at least 1.")
        self.model = model
        self._forward = forward_of(model)
        self._pack_weights = pack_weights
        self._is_packed = False  # while it is at work, until the weights change
        self.version = 0
        self.max_running_sequences = max_running_sequences
        self._waiting: deque[Request] = deque()
        self._running: list[Wave] = []
        self._finished: dict[tuple[int, int], Completion] = {}  # by request_id and index
        self._unfinished: dict[int, _Progress] = {}  # in the order of submission
        self._num_submitted = 0

    def submit(self, request: Request) -> None:
        if request.request_id in self._unfinished:
            raise RolloutError(
                f"request {request.request_id} is waiting or running already; give each request an id of its own."
            )
        _require_servable(request, self.model, self.max_running_sequences)
        self._waiting.append(request)
        self._unfinished[request.request_id] = _Progress(request, self._num_submitted)
        self._num_submitted += 1

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @torch.no_grad()
    def step(self) -> None:
        try:
            if self._pack_weights and not self._is_packed:
                self._forward.pack_weights()
                self._is_packed = True
            self._admit()
            self._finish([done for wave in self._running for done in wave.advance(self.version)])
        except BaseException:
            self._start_again()
            raise

    def finished(self) -> list[Completion]:
        done, self._finished = self._finished, {}
        return list(done.values())

    def abort(self, request_id: int) -> None:
        if request_id not in self._unfinished:
            raise RolloutError(f"request {request_id} is neither waiting nor running; it cannot be aborted.")
        try:
            stopped = [done for wave in self._running for done in wave.abort(request_id)]
            for request in self._waiting:
                if request.request_id == request_id:
                    stopped += [Completion(request_id, i, finish_reason="abort") for i in range(request.group_size)]
            self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
            self._finish(stopped)
        except BaseException:
            self._start_again()
            raise

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Share the given tensors' memory; where the model is the trainer's own they are its own already."""
        own = dict(self.model.named_parameters())
        given = dict(weights)
        if unknown := sorted(set(given) - set(own)):
            raise RolloutError(f"the rollout model has no weights called {', '.join(unknown[:5])}.")
        if missing := sorted(set(own) - set(given)):
            raise RolloutError(f"weights are missing: {', '.join(missing[:5])}; every parameter must be given.")
        for name, tensor in given.items():
            if own[name].shape != tensor.shape:
                raise RolloutError(
                    f"weight '{name}' has shape {tuple(tensor.shape)}, in the rollout model {tuple(own[name].shape)}."
                )
        for name, tensor in given.items():
            own[name].data = tensor.detach().to(own[name])
        self._is_packed = False
        self.version = version

    def drop_weights(self) -> None:
        """Free the weights until they are loaded again. Not of a model that somebody else uses."""
        for parameter in self.model.parameters():
            parameter.data = placeholder(parameter.shape, parameter.dtype, parameter.device)
        self._forward.drop_packed_weights()
        self._is_packed = False

    def _admit(self) -> None:
        """Start waiting requests that fit, in order; those that draw alike, to whatever length, share a wave."""
        room = self.max_running_sequences - sum(wave.num_running for wave in self._running)
        admitted: dict[SamplingParams, list[Request]] = {}  # by what is equal in a wave
        while self._waiting and self._waiting[0].group_size <= room:
            request = self._waiting.popleft()
            room -= request.group_size
            admitted.setdefault(replace(request.sampling, max_new_tokens=1), []).append(request)
        for sampling, requests in admitted.items():
            wave = next((wave for wave in self._running if wave.sampling == sampling), None)
            if wave is None:
                wave = Wave(self._forward, self.model.device, self.model.dtype, sampling)
                self._running.append(wave)
            wave.admit(requests)

    def _finish(self, completions: list[Completion]) -> None:
        """Hand over what one step, or an abort, finished."""
        for completion in sorted(completions, key=lambda c: (self._unfinished[c.request_id].place, c.index)):
            progress = self._unfinished[completion.request_id]
            if completion.index in progress.finished:  # before its request was started again
                continue
            self._finished[completion.request_id, completion.index] = completion
            progress.finished.add(completion.index)
        for request_id in {completion.request_id for completion in completions}:
            if self._unfinished[request_id].is_complete():
                del self._unfinished[request_id]
        self._running = [wave for wave in self._running if wave.num_running]
        if not self._unfinished:
            self._forward.drop_packed_weights()
            self._is_packed = False

    def _start_again(self) -> None:
        """After an error at any point: nothing runs, and every request without all its completions waits.

        Its tokens will be the same: noise is a matter of request, index and position.
        """
        self._running = []
        self._unfinished = {key: progress for key, progress in self._unfinished.items() if not progress.is_complete()}
        self._waiting = deque(progress.request for progress in self._unfinished.values())
        self._forward.drop_packed_weights()
        self._is_packed = False


class _Progress:
    """A request, its place in the order of submission, and the indices of its sequences that are finished."""

    def __init__(self, request: Request, place: int) -> None:
        self.request, self.place = request, place
        self.finished: set[int] = set()

    def is_complete(self) -> bool:
        return len(self.finished) == self.request.group_size


def _require_servable(request: Request, model: PreTrainedModel, max_running_sequences: int) -> None:
    try:
        derive_seed(*request.noise_key)
    except AlgorithmError as error:
        raise RolloutError(f"request {request.request_id} has noise_key={request.noise_key!r}: {error}") from error
    name, prompt_len, new = f"request {request.request_id}", len(request.prompt_ids), request.sampling.max_new_tokens
    if not prompt_len:
        raise RolloutError(f"{name} has an empty prompt; give it at least one token.")
    if request.group_size < 1:
        raise RolloutError(f"{name} has group_size={request.group_size}; it must be at least 1.")
    if request.group_size > max_running_sequences:
        raise RolloutError(
            f"{name}: group_size={request.group_size} exceeds rollout.max_running_sequences={max_running_sequences}; "
            "raise the latter."
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt_len + new > limit:
        raise RolloutError(
            f"{name}: {prompt_len} prompt tokens and {new} new ones exceed the model's {limit} positions; shorten the "
            "prompt or data.max_response_length."
        )
    vocabulary = model.config.get_text_config().vocab_size
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if lowest < 0 or highest >= vocabulary:
        raise RolloutError(f"{name} has token ids from {lowest} to {highest}; they must be in [0, {vocabulary}).")
