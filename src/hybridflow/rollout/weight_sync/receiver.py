"""The receiver of a weight sync: it verifies the version and fingerprint of each tensor, then the probe."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hybridflow.controller import Dispatch, register
from hybridflow.errors import WeightSyncError
from hybridflow.rollout.base import RolloutEngine
from hybridflow.rollout.weight_sync.base import Announcement, Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket, WeightSpec, spec_of
from hybridflow.rollout.weight_sync.fingerprint import Fingerprints
from hybridflow.rollout.weight_sync.probe import Probe, ProbeCheck
from hybridflow.runtime.device import own_device
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.memory import naming_out_of_memory
from hybridflow.runtime.progress import note_progress

LESS_AT_ENGINE = (
    "set a smaller rollout.sync_bucket_bytes or rollout.gpu_memory_utilization, or memory.offload for roles that can "
    "wait"
)
"""Advice if a rollout engine has no memory for the weights that it receives."""


class WeightReceiver:
    """The receiving end of one rank that generates. For each sync: join, start, receive each bucket, finish, check.

    `rank` counts among the `num_receivers`. Raises WeightSyncError for a tensor that differs from the sent one, or for
    log-probs that differ from the trainer's; the engine then has no weights to generate with.
    """

    def __init__(
        self, engine: RolloutEngine, dtype: str, transport: WeightTransport, rank: int = 0, num_receivers: int = 1
    ) -> None:
        self._engine, self._transport = engine, transport
        self._rank, self._num_receivers = rank, num_receivers
        self._probe_check = ProbeCheck(dtype)
        self._expected: dict[str, WeightSpec] = {}
        self._fingerprints: dict[str, int] = {}
        self._version = 0

    def join(self, announced: Announcement) -> None:
        """Connect to the sender, which calls `join` at the same time."""
        self._transport.join(announced.store, self._rank + 1, self._num_receivers + 1)

    def start(self, announced: Announcement) -> None:
        """Expect the announced tensors, each once.

        Raises WeightSyncError for a duplicate, and RolloutError if they are not the model's tensors; nothing is changed
        then.
        """
        specs = announced.specs
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise WeightSyncError(f"weight '{duplicate}' was announced twice.")
        self._engine.start_loading({spec.name: torch.Size(spec.shape) for spec in specs})
        self._expected, self._fingerprints = {spec.name: spec for spec in specs}, {}
        self._version = announced.version

    def receive(self, sent: tuple[Sent, Any]) -> None:
        """Receive the bucket that `WeightSender.send` returned, verify its fingerprints, and load it."""
        with self._abandoning_on_error():
            fault_point("sync_receive")
            bucket = self._transport.receive(Sent.joined(sent))
            self._require_unchanged(bucket)
            self._engine.load(bucket.weights.items())
        note_progress()

    def finish(self) -> None:
        """Complete the loading of a version, which `check` verifies. Raises WeightSyncError if weights are missing."""
        with self._abandoning_on_error():
            if missing := sorted(set(self._expected) - set(self._fingerprints)):
                raise WeightSyncError(f"announced weights were not received: {', '.join(missing[:5])}.")
            self._engine.finish_loading(self._version)

    def check(self, probe: Probe) -> dict[str, float]:
        """Compare the engine's log-probs with the trainer's, and return metrics.

        The engine needs all of its memory for it, including the KV cache.
        """
        with self._abandoning_on_error():
            return self._probe_check(probe, self._engine.log_probs(probe.sequences), self._version)

    @contextmanager
    def _abandoning_on_error(self) -> Iterator[None]:
        try:
            with naming_out_of_memory("a weight sync", own_device(), LESS_AT_ENGINE, WeightSyncError):
                yield
        except BaseException:
            self._engine.abandon_loading()
            raise

    def _require_unchanged(self, bucket: Bucket) -> None:
        if bucket.version != self._version:
            raise WeightSyncError(
                f"received weights of version {bucket.version} ('{next(iter(bucket.weights), '')}', ...), but expected "
                f"version {self._version}."
            )
        fingerprints = Fingerprints(bucket.weights).read()
        for name, tensor in bucket.weights.items():
            if self._expected.get(name) != spec_of(name, tensor):
                raise WeightSyncError(
                    f"weight '{name}' was received as {spec_of(name, tensor)}, but announced as "
                    f"{self._expected.get(name)}."
                )
            if name in self._fingerprints:
                raise WeightSyncError(f"weight '{name}' was received twice.")
            if (found := fingerprints[name]) != bucket.fingerprints[name]:
                raise WeightSyncError(
                    f"weight '{name}' changed in transit: its fingerprint is {found:016x}, but "
                    f"{bucket.fingerprints[name]:016x} on the trainer."
                )
            self._fingerprints[name] = found


class ReceivesWeights:
    """The calls of a worker group whose engines load the weights of another pool; a mixin of workers.

    They are the steps of `WeightReceiver`, in this order. Each runs inside `receiving()`.
    """

    weight_receiver: WeightReceiver

    @register(Dispatch.ONE_TO_ALL)
    def join_sender(self, announced: Announcement) -> None:
        """Connect to the sender, whose `join_receivers` is called at the same time."""
        with self.receiving():
            self.weight_receiver.join(announced)

    @register(Dispatch.ONE_TO_ALL)
    def start_receiving(self, announced: Announcement) -> None:
        """Expect the announced weights."""
        with self.receiving():
            self.weight_receiver.start(announced)

    @register(Dispatch.ONE_TO_ALL)
    def receive_bucket(self, sent: tuple[Sent, Any]) -> None:
        """Receive and load the bucket that `send_bucket` returned."""
        with self.receiving():
            self.weight_receiver.receive(sent)

    @register(Dispatch.ONE_TO_ALL)
    def finish_receiving(self) -> None:
        """Complete the loading of a version."""
        with self.receiving():
            self.weight_receiver.finish()

    @register(Dispatch.ONE_TO_ALL)
    def check_weights(self, probe: Probe) -> dict[str, float]:
        """Compare the engine's log-probs with those of `compute_probe`; return metrics."""
        with self.receiving():
            return self.weight_receiver.check(probe)

    def receiving(self) -> AbstractContextManager[None]:
        """Return a context in which a step of a sync runs; it does nothing here."""
        return nullcontext()


RECEIVING = frozenset({"join_sender", "start_receiving", "receive_bucket", "finish_receiving", "check_weights"})
"""The names of these calls."""
