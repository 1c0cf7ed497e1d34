"""Workers of real processes whose engines wait for the time that a GPU would compute, so that schedules are measured.

Everything else is real: calls, batches, futures, weight syncs, rewards.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config import Config
from hybridflow.engines import LossFunction, Outputs, UpdateResult
from hybridflow.environments.processes.closure import Closure
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion, Request
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender
from hybridflow.rollout.weight_sync.transports import build_sending_transport, build_transport
from hybridflow.runtime.random_streams import uniform
from hybridflow.workers import ActorWorker, InFlightRolloutWorker, RolloutWorker
from hybridflow.workers.worker_process import prepare_worker_process

STEP_S = 1e-3
"""Seconds of a decoding step, whatever the number of sequences: decoding is bound by reading the weights."""
TOKEN_S = 2e-4
"""Seconds per token of an update; a forward pass takes a third."""
MEDIAN, TAIL = 128, 8
"""Median of the response lengths, and their 99th percentile as a multiple of it."""
INTERRUPTIBLE_STEPS = 16
"""Decoding steps in one wait of an engine whose sequences may be interrupted by new weights."""
WEIGHTS = torch.Size([1 << 18])


def response_length(noise_key: Sequence[int], index: int, longest: int) -> int:
    """Draw a length in tokens from a log-normal distribution; it depends on the request alone."""
    sigma = torch.tensor(float(TAIL)).log() / NormalDist().inv_cdf(0.99)
    normal = NormalDist().inv_cdf(float(uniform(*noise_key, index).clip(1e-12, 1 - 1e-12)))
    return max(1, min(longest, round(MEDIAN * float((sigma * normal).exp()))))


class WaitingEngine:
    """A train engine that waits TOKEN_S for each token of an update, and sums over ranks as a real one does."""

    is_sharded = shares_weights = False
    vocabulary_size, num_positions, max_tokens = 80, None, 0

    def __init__(self) -> None:
        self.num_updates = 0
        self._parts: list[tuple[int, Mapping[str, Any]]] = []

    def forward(self, rows: DataProto, **_: Any) -> Outputs:
        time.sleep(TOKEN_S / 3 * float(rows.batch["attention_mask"].sum()))
        zeros = torch.zeros(rows.batch["response_mask"].shape)
        return {"log_probs": zeros, "entropies": zeros}

    def update(self, rows: DataProto, loss_function: LossFunction, **_: Any) -> UpdateResult:
        num_tokens = int(rows.batch["attention_mask"].sum())
        time.sleep(TOKEN_S * num_tokens)
        zeros = torch.zeros(rows.batch["response_mask"].shape)
        _, metrics = loss_function({"log_probs": zeros, "entropies": zeros}, rows)
        self.all_reduce_sum(0)  # ranks wait for the slowest
        self.num_updates += 1
        return UpdateResult(0.0, 1.0, 0.0, metrics, num_tokens, num_tokens, 0)

    def add_to_update(self, rows: DataProto, loss_function: LossFunction, *, number: int, **_: Any) -> None:
        num_tokens = int(rows.batch["attention_mask"].sum())
        time.sleep(TOKEN_S * num_tokens)
        zeros = torch.zeros(rows.batch["response_mask"].shape)
        _, metrics = loss_function({"log_probs": zeros, "entropies": zeros}, rows)
        self._parts = [*self._parts[:number], (num_tokens, metrics)]
        self.all_reduce_sum(0)  # ranks wait for the slowest

    def finish_update(self, num_parts: int, scale: float) -> UpdateResult:
        assert len(self._parts) == num_parts, "every part was added"
        self.num_updates += 1
        num_tokens = sum(count for count, _ in self._parts)
        return UpdateResult(0.0, 1.0, 0.0, self._parts[-1][1], num_tokens, num_tokens, 0)

    def on_device(self) -> Any:
        return torch.no_grad()

    def all_reduce_sum(self, value: int) -> int:
        total = torch.tensor(value)
        if dist.is_initialized():
            dist.all_reduce(total)
        return int(total)

    def weights(self, boxes: Any = None, at_once: int = 0) -> Iterable[tuple[str, Tensor]]:
        return [("weight", torch.full(WEIGHTS, float(self.num_updates)))]

    def weight_shapes(self) -> dict[str, torch.Size]:
        return {"weight": WEIGHTS}

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "weight": torch.zeros(1)}


class WaitingActor(ActorWorker):
    """An actor whose engine waits."""

    def __init__(self, config: Config) -> None:
        prepare_worker_process(self, config)
        self.config, self.engine = config, WaitingEngine()
        self.weight_sender = WeightSender(self.engine, config, lambda: build_sending_transport(config))


class WaitingRollout:
    """A rollout engine that waits STEP_S for each decoding step, whatever the number of sequences.

    `step` ends when the next sequences end, and after `max_steps` decoding steps at the latest.
    """

    def __init__(self, max_steps: int = 1 << 30) -> None:
        self.version: int | None = None
        self.routes_shape = 0, 0
        self._max_steps = max_steps
        self._running: dict[tuple[int, int], tuple[int, int]] = {}  # request and index -> steps of its start and end
        self._versions: list[int] = []  # of each decoding step
        self._waited = 0.0  # seconds of the decoding steps
        self._done: list[Completion] = []

    def submit(self, request: Request) -> None:
        start = len(self._versions)
        for index in range(request.group_size):
            length = response_length(request.noise_key, index, request.sampling.max_new_tokens)
            self._running[request.request_id, index] = start, start + length

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> None:
        assert self.version is not None, "weights were loaded"
        began, before = time.perf_counter(), len(self._versions)
        decoded = min(before + self._max_steps, *(end for _, end in self._running.values()))
        time.sleep(max(0.0, STEP_S * decoded - self._waited))
        self._waited += time.perf_counter() - began
        self._versions += [self.version] * (decoded - before)
        for key in [key for key, (_, end) in self._running.items() if end == decoded]:
            versions = self._versions[slice(*self._running.pop(key))]
            self._done.append(Completion(*key, [1] * len(versions), [0.0] * len(versions), versions))

    def abort(self, request_id: int) -> None:
        self._running = {key: end for key, end in self._running.items() if key[0] != request_id}

    def finished(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def start_loading(self, shapes: Mapping[str, torch.Size]) -> None:
        self.version = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        list(weights)

    def finish_loading(self, version: int) -> None:
        self.version = version

    def retract(self) -> None:
        """Wait for a forward pass over the tokens of all running sequences."""
        time.sleep(TOKEN_S / 3 * sum(len(self._versions) - start for start, _ in self._running.values()))

    def abandon_loading(self) -> None:
        self.version = None

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]

    def sleep(self) -> None: ...

    def wake(self, part: str) -> None: ...


class WaitingGenerator(RolloutWorker):
    """A generating worker whose engine waits."""

    def __init__(self, config: Config, environments: Sequence[Closure] = ()) -> None:
        from hybridflow.data import load_tokenizer

        prepare_worker_process(self, config)
        self.config, self.tokenizer, self.stop_ids = config, load_tokenizer(config.model.path), ()
        self.rollout = WaitingRollout(*[INTERRUPTIBLE_STEPS] * config.updates_in_flight)
        transport = build_transport(config)
        self.weight_receiver = WeightReceiver(self.rollout, config.model.dtype, transport, self.rank, self.world_size)


class WaitingInFlightGenerator(InFlightRolloutWorker, WaitingGenerator):
    """A generating worker whose engine waits, and whose running sequences continue with new weights."""
