"""The two pools of a weight sync without their models: what is measured is the way, not training or generation."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.config import Config
from hybridflow.controller import Dispatch, Worker, register
from hybridflow.models import build_without_weights
from hybridflow.runtime import keep_freed_memory, set_num_threads
from hybridflow.weight_sync import CheckedReceiver, Probe, Sent, WeightSpec, fill_buckets, plan_buckets
from hybridflow.workers.weight_ways import Offer, SendingEnd, receiving_end


def random_weights(path: str | Path) -> dict[str, Tensor]:
    """Weights of the shapes of a model directory, float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = {n: p.shape for n, p in build_without_weights(path, "policy", torch.float32).named_parameters()}
    return {name: torch.empty(shape).uniform_(-1, 1, generator=generator) for name, shape in shapes.items()}


class NoEngine:
    """A rollout engine that looks at nothing it is given."""

    version: int | None = None

    def start_loading(self, shapes: Any) -> None: ...

    def load(self, weights: Any) -> None:
        for _ in weights:
            pass

    def finish_loading(self, version: int) -> None: ...

    def abandon_loading(self) -> None: ...

    def log_probs(self, sequences: Any) -> list[list[float]]:
        return [[0.0]]


class PeakMemory:
    """The memory that a process held at most since `start`, beyond what it held then."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def extra(self) -> int:
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Sender(Worker):
    """What an ActorWorker does for a sync."""

    def __init__(self, config: Config) -> None:
        keep_freed_memory()
        set_num_threads(config.controller.threads)
        self.config, self.version = config, 0
        self.weights = random_weights(config.model.path)
        self.specs = [WeightSpec(name, tuple(tensor.shape), "float32") for name, tensor in self.weights.items()]
        self.plan = plan_buckets(self.specs, config.rollout.sync_bucket_bytes)
        self.end: SendingEnd | None = None
        self.peak = PeakMemory()

    @register(Dispatch.ONE_TO_ALL)
    def offer_weights(self, num_receivers: int) -> Offer:
        self.end = self.end or SendingEnd(self.config, self.rank, num_receivers)
        self.version += 1
        self.peak.start()
        self.buckets = fill_buckets(self.plan, self.weights.items(), self.version)
        return Offer(self.specs, len(self.plan), self.version, self.end.address, self.end.port)

    @register(Dispatch.ONE_TO_ALL)
    def join_receivers(self) -> None:
        assert self.end is not None
        self.end.join()

    @register(Dispatch.ONE_TO_ALL)
    def send_bucket(self) -> Any:
        assert self.end is not None
        return self.end.send(next(self.buckets)).apart()

    @register(Dispatch.ONE_TO_ALL)
    def compute_probe(self) -> Probe:
        return Probe([[0, 0]], [[0.0]])

    @register(Dispatch.ONE_TO_ALL)
    def finish_sending(self) -> None:
        assert self.end is not None
        self.end.finish()

    @register(Dispatch.ONE_TO_ALL)
    def extra_memory(self) -> int:
        return self.peak.extra()


class Receiver(Worker):
    """What a RolloutWorker does for a sync."""

    def __init__(self, config: Config) -> None:
        keep_freed_memory()
        set_num_threads(config.controller.threads)
        self.config, self.receiver, self.peak = config, CheckedReceiver(NoEngine(), "float32"), PeakMemory()

    @register(Dispatch.ONE_TO_ALL)
    def join_sender(self, offer: Offer) -> None:
        self.way = receiving_end(self.config, self.rank, self.world_size, offer)

    @register(Dispatch.ONE_TO_ALL)
    def start_receiving(self, offer: Offer) -> None:
        self.peak.start()
        self.receiver.start(offer.specs, offer.version)

    @register(Dispatch.ONE_TO_ALL)
    def receive_bucket(self, sent: Any) -> None:
        self.receiver.accept(self.way.receive(Sent.joined(sent)))

    @register(Dispatch.ONE_TO_ALL)
    def finish_receiving(self, probe: Probe) -> dict[str, float]:
        self.receiver.finish()
        return self.receiver.check(probe)

    @register(Dispatch.ONE_TO_ALL)
    def extra_memory(self) -> int:
        return self.peak.extra()
