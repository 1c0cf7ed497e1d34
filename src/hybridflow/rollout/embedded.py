"""The embedded rollout engine: generation with the trainer's own model and weights, in its process.

Requests wait here until there is room; sequences that draw alike then decode together in a wave.
Needs nothing but the model.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import RolloutConfigError, RolloutError
from hybridflow.models import forward_of, placeholder
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.rollout.base import Completion, Request, SamplingParams, SleepingPart
from hybridflow.rollout.loading import Loading, announced
from hybridflow.rollout.requests import require_servable
from hybridflow.rollout.stop_strings import Decoder, StopStrings
from hybridflow.rollout.wave import Wave


class EmbeddedRollout:
    """Generates with `model`, whose parameters it shares.

    `shares_model`: the model is the trainer's own, whose weights are never freed here. With `pack_weights`, a CPU
    generates from a copy of them in the order that its products read; the copy is there while sequences run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running_sequences: int = 1024,
        pack_weights: bool = True,
        shares_model: bool = True,
        tokenizer: Decoder | None = None,
    ) -> None:
        if max_running_sequences < 1:
            raise RolloutConfigError(f"max_running_sequences={max_running_sequences}; it must be at least 1.")
        self.model = model
        self._forward = forward_of(model)
        self._pack_weights = pack_weights
        self._is_packed = False  # while it is at work, until the weights change
        self._shares_model = shares_model
        self._stop_strings = StopStrings(tokenizer)
        self.version: int | None = 0 if shares_model else None
        self._loading: Loading | None = None
        self._loaded: dict[str, Tensor] = {}
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
        config = self.model.config.get_text_config()
        require_servable(
            request,
            max_running_sequences=self.max_running_sequences,
            max_len=getattr(config, "max_position_embeddings", None),
            vocabulary=config.vocab_size,
        )
        self._stop_strings.require_served(request)
        self._waiting.append(request)
        self._unfinished[request.request_id] = _Progress(request, self._num_submitted)
        self._num_submitted += 1

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @torch.no_grad()
    def step(self) -> None:
        if self.version is None:
            raise RolloutError("the engine has no weights to generate with; load them first.")
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

    def start_loading(self, shapes: Mapping[str, torch.Size]) -> None:
        own = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        self._loading, self._loaded, self.version = Loading(own, shapes), {}, None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._loaded.update(announced(self._loading).counted(weights))

    def finish_loading(self, version: int) -> None:
        """Share the given tensors' memory; where the model is the trainer's own they are its own already."""
        announced(self._loading).require_complete()
        for name, parameter in self.model.named_parameters():
            parameter.data = self._loaded[name].detach().to(parameter)
        self._loading, self._loaded = None, {}
        self._is_packed = False
        self.version = version

    def abandon_loading(self) -> None:
        self._loading, self._loaded, self.version = None, {}, None

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        if self._unfinished:
            raise RolloutError("log_probs needs an idle engine, but requests are waiting or running.")
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
        """Memory is there where it is needed."""

    def sleep(self) -> None:
        """Free weights that were loaded, until they are loaded again; not those of a model that the trainer has."""
        if self._shares_model:
            return
        for parameter in self.model.parameters():
            parameter.data = placeholder(parameter.shape, parameter.dtype, parameter.device)
        self._forward.drop_packed_weights()
        self._is_packed = False
        self.version = None

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
                wave = Wave(self._forward, self.model.device, self.model.dtype, sampling, self._stop_strings)
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
