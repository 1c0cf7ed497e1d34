"""The two pools of a weight sync without their models: the transport is measured, not training or generation."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.config import Config
from hybridflow.controller import Dispatch, Worker, register
from hybridflow.models.loading import build_without_weights
from hybridflow.protocol import DataProto
from hybridflow.rollout.weight_sync.base import Announcement
from hybridflow.rollout.weight_sync.receiver import ReceivesWeights, WeightReceiver
from hybridflow.rollout.weight_sync.sender import SendsWeights, WeightSender
from hybridflow.rollout.weight_sync.transports import build_sending_transport, build_transport
from hybridflow.runtime.allocator import keep_freed_memory
from hybridflow.runtime.threads import set_num_threads


def random_weights(path: str | Path) -> dict[str, Tensor]:
    """Build random float32 weights with the shapes of a model directory."""
    generator = torch.Generator().manual_seed(0)
    shapes = {n: p.shape for n, p in build_without_weights(path, "policy", torch.float32).named_parameters()}
    return {name: torch.empty(shape).uniform_(-1, 1, generator=generator) for name, shape in shapes.items()}


class GivenWeights:
    """A training engine that holds weights and computes nothing."""

    num_updates, vocabulary_size = 0, 2

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def weight_shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._weights.items()}

    def weights(self, boxes: Any = None, at_once: int = 0) -> Iterable[tuple[str, Tensor]]:
        return self._weights.items()

    def forward(self, rows: DataProto) -> dict[str, Tensor]:
        return {"log_probs": torch.zeros(rows.batch["response_mask"].shape)}


class NoEngine:
    """A rollout engine that ignores its inputs."""

    version: int | None = None
    routes_shape = 0, 0

    def start_loading(self, shapes: Any) -> None: ...

    def load(self, weights: Any) -> None:
        for _ in weights:
            pass

    def finish_loading(self, version: int) -> None: ...

    def abandon_loading(self) -> None: ...

    def log_probs(self, sequences: Any) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]


class PeakMemory:
    """The peak memory of this process since `start`, beyond its memory at that time."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def extra(self) -> int:
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Sender(SendsWeights, Worker):
    """The part of an ActorWorker in a weight sync; each announcement has a new version."""

    def __init__(self, config: Config) -> None:
        keep_freed_memory()
        set_num_threads(config.controller.threads)
        self.engine, self.peak = GivenWeights(random_weights(config.model.path)), PeakMemory()
        self.weight_sender = WeightSender(self.engine, config, partial(build_sending_transport, config))

    @register(Dispatch.ONE_TO_ALL)
    def announce_weights(self) -> Announcement:
        self.engine.num_updates += 1
        self.peak.start()
        return super().announce_weights()

    @register(Dispatch.ONE_TO_ALL)
    def extra_memory(self) -> int:
        return self.peak.extra()


class Receiver(ReceivesWeights, Worker):
    """The part of a RolloutWorker in a weight sync."""

    def __init__(self, config: Config) -> None:
        keep_freed_memory()
        set_num_threads(config.controller.threads)
        self.weight_receiver, self.peak = WeightReceiver(NoEngine(), "float32", build_transport(config)), PeakMemory()

    @register(Dispatch.ONE_TO_ALL)
    def start_receiving(self, announced: Announcement) -> None:
        self.peak.start()
        super().start_receiving(announced)

    @register(Dispatch.ONE_TO_ALL)
    def extra_memory(self) -> int:
        return self.peak.extra()
