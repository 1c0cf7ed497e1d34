"""The rollout engine's end of a weight sync: checks the version and the fingerprint of each tensor, then the probe."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.errors import WeightSyncError
from hybridflow.weight_sync.base import Announcement, Sent, WeightTransport
from hybridflow.weight_sync.buckets import Bucket, WeightSpec, spec_of
from hybridflow.weight_sync.fingerprint import fingerprint
from hybridflow.weight_sync.probe import Probe, ProbeCheck


class LoadsWeights(Protocol):
    """What a receiver needs of a rollout engine."""

    def start_loading(self, shapes: Mapping[str, torch.Size]) -> None: ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    def finish_loading(self, version: int) -> None: ...

    def abandon_loading(self) -> None: ...

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...


class WeightReceiver:
    """The session of one rank that generates. For each sync: join, start, receive each bucket, finish, check.

    `rank` is that among the `num_receivers`. Raises WeightSyncError for a tensor that is not what was sent, or
    log-probs that are not the trainer's: the engine then has no weights to generate with.
    """

    def __init__(
        self, engine: LoadsWeights, dtype: str, transport: WeightTransport, rank: int = 0, num_receivers: int = 1
    ) -> None:
        self._engine, self._transport = engine, transport
        self._rank, self._num_receivers = rank, num_receivers
        self._probe_check = ProbeCheck(dtype)
        self._expected: dict[str, WeightSpec] = {}
        self._fingerprints: dict[str, int] = {}
        self._version = 0

    def join(self, announced: Announcement) -> None:
        """Connect to the sender, which joins at the same time."""
        self._transport.join(announced.address, self._rank + 1, self._num_receivers + 1)

    def start(self, announced: Announcement) -> None:
        """Expect these tensors of a version, each once.

        Raises RolloutError, with nothing changed, unless they are the model's.
        """
        specs = announced.specs
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightSyncError(f"weight '{twice}' was announced twice.")
        self._engine.start_loading({spec.name: torch.Size(spec.shape) for spec in specs})
        self._expected, self._fingerprints = {spec.name: spec for spec in specs}, {}
        self._version = announced.version

    def receive(self, sent: tuple[Sent, Any]) -> None:
        """Receive what `WeightSender.send` returned, compare it with the fingerprints and load it."""
        with self._abandoning_on_error():
            bucket = self._transport.receive(Sent.joined(sent))
            self._require_as_sent(bucket)
            self._engine.load(bucket.weights.items())

    def finish(self) -> None:
        """Complete the loading: the engine has all weights of the version, which `check` is to prove."""
        with self._abandoning_on_error():
            if missing := sorted(set(self._expected) - set(self._fingerprints)):
                raise WeightSyncError(f"weights did not come: {', '.join(missing[:5])}.")
            self._engine.finish_loading(self._version)

    def check(self, probe: Probe) -> dict[str, float]:
        """Compare the engine's log-probs with the trainer's, for which it needs all of its memory; metrics."""
        with self._abandoning_on_error():
            return self._probe_check(probe, self._engine.log_probs(probe.sequences), self._version)

    @contextmanager
    def _abandoning_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._engine.abandon_loading()
            raise

    def _require_as_sent(self, bucket: Bucket) -> None:
        if bucket.version != self._version:
            raise WeightSyncError(
                f"weights of version {bucket.version} came ('{next(iter(bucket.weights), '')}', ...), expected are "
                f"those of version {self._version}."
            )
        for name, tensor in bucket.weights.items():
            if self._expected.get(name) != spec_of(name, tensor):
                raise WeightSyncError(
                    f"weight '{name}' came as {spec_of(name, tensor)}, announced was {self._expected.get(name)}."
                )
            if name in self._fingerprints:
                raise WeightSyncError(f"weight '{name}' came twice.")
            if (found := fingerprint(tensor)) != bucket.fingerprints[name]:
                raise WeightSyncError(
                    f"weight '{name}' changed on its way: its fingerprint is {found:016x}, that of the trainer's is "
                    f"{bucket.fingerprints[name]:016x}."
                )
            self._fingerprints[name] = found
