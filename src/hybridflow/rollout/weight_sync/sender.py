"""The sender of a weight sync: it gathers weights in buckets, with fingerprints, a version and a probe."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.errors import WeightSyncError
from hybridflow.protocol import DataProto
from hybridflow.rollout.weight_sync.base import Announcement, Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket, WeightSpec, fill_buckets, plan_buckets
from hybridflow.rollout.weight_sync.probe import Probe, probe_sequences
from hybridflow.runtime.boxes import Box, empty_box, whole_box
from hybridflow.runtime.device import own_device, preferred_dtype
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.memory import naming_out_of_memory
from hybridflow.runtime.progress import note_progress

SMALLER_BUCKETS = "set a smaller rollout.sync_bucket_bytes, or memory.offload for roles that can wait"
"""Advice if there is no memory for the gathered weights."""


def boxes_of_sender(shapes: Mapping[str, Size], *, sends: bool) -> dict[str, Box]:
    """Return the boxes of weights of a rank that sends all of them, or of one that only has shards of them."""
    return {name: whole_box(shape) if sends else empty_box(shape) for name, shape in shapes.items()}


class HasWeights(Protocol):
    """The part of a training engine that a sender uses; see `hybridflow.engines.TrainEngine`."""

    @property
    def num_updates(self) -> int:
        """The number of optimizer steps, which is the version of the weights."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """The number of entries of the model's vocabulary."""
        ...

    def weight_shapes(self) -> Mapping[str, Size]:
        """Return the names and shapes of the weights, in the order of `weights`."""
        ...

    def weights(self, boxes: Mapping[str, Box] | None = None, at_once: int = 2**28) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights by name, gathered `at_once` bytes at a time; those with a box in part, as PartialTensor."""
        ...

    def forward(self, rows: DataProto) -> Mapping[str, Tensor]:
        """Return the column `log_probs` of the rows."""
        ...


class WeightSender:
    """The sending end of one rank that learns. For each sync: announce, join, send each bucket, compute_probe, finish.

    The first announcement calls `build_transport`. It is None on a rank that has shards of the weights but does not
    send them. `boxes`: the parts of weights that this rank sends, or that the receiver in this process loads; all ranks
    give theirs, or None for whole weights.
    """

    def __init__(
        self,
        engine: HasWeights,
        config: Config,
        build_transport: Callable[[], WeightTransport] | None,
        boxes: Mapping[str, Box] | None = None,
    ) -> None:
        self._engine, self._build_transport, self._boxes = engine, build_transport, boxes
        self._config = config.with_dtype(preferred_dtype())
        self._transport: WeightTransport | None = None
        self._store = ""
        self._buckets: Iterator[Bucket] = iter(())

    def announce(self) -> Announcement:
        """Return the description of the weights that `send` will send: those of the current version."""
        if self._transport is None and self._build_transport is not None:
            transport = self._build_transport()
            self._store = transport.new_store()
            self._transport = transport
        dtype, version = self._config.model.dtype, self._engine.num_updates
        specs = [WeightSpec(name, tuple(shape), dtype) for name, shape in self._engine.weight_shapes().items()]
        at_once, sends = self._config.rollout.sync_bucket_bytes, self._transport is not None
        plan, weights = plan_buckets(specs, at_once), self._engine.weights(self._boxes, at_once)
        self._buckets = fill_buckets(plan, weights, version, with_fingerprints=sends)
        return Announcement(specs, len(plan), version, self._store)

    def abandon(self) -> None:
        """Discard an unfinished sync, and connect anew for the next one."""
        if self._transport is not None:
            self._transport.close()
        self._buckets, self._transport = iter(()), None

    def join(self, num_receivers: int) -> None:
        """Connect to the receivers, which call `join` at the same time."""
        if self._transport is not None:
            self._transport.join(self._store, 0, num_receivers + 1)

    def send(self) -> tuple[Sent, Any]:
        """Gather the next bucket, start to send it, and return the message for `WeightReceiver.receive`."""
        with naming_out_of_memory("a weight sync", own_device(), SMALLER_BUCKETS, WeightSyncError):
            bucket = next(self._buckets)
            note_progress()
            fault_point("sync_send", bucket)
            return (self._transport.send(bucket) if self._transport else Sent((), {}, bucket.version)).apart()

    def compute_probe(self) -> Probe:
        """Compute the log-probs of the probe sequences, which a rollout engine with these weights must reproduce."""
        data = self._config.data  # the model has positions for the longest prompt and response
        sequences = probe_sequences(self._engine.vocabulary_size, data.max_prompt_length + data.max_response_length - 1)
        ids = torch.tensor(sequences)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": ids[:, 1:] >= 0}
        return Probe(sequences, self._engine.forward(DataProto.from_dict(columns))["log_probs"].tolist())

    def finish(self) -> None:
        """Wait until all buckets are received, and release the memory or files used to send them."""
        self._buckets = iter(())
        if self._transport is not None:
            self._transport.finish()


class SendsWeights:
    """The calls of a worker group whose ranks send their weights to another pool; a mixin of workers.

    They are the steps of `WeightSender`, in this order. Rank 0 gathers the shards of the ranks and sends them.
    """

    weight_sender: WeightSender

    @register(Dispatch.ONE_TO_ALL)
    def announce_weights(self) -> Announcement:
        """Return the description of the weights that follow."""
        return self.weight_sender.announce()

    @register(Dispatch.ONE_TO_ALL)
    def join_receivers(self, num_receivers: int) -> None:
        """Connect to the receivers, whose `join_sender` is called at the same time."""
        self.weight_sender.join(num_receivers)

    @register(Dispatch.ONE_TO_ALL)
    def send_bucket(self) -> tuple[Sent, Any]:
        """Send the next bucket of weights; return the message for `receive_bucket`."""
        return self.weight_sender.send()

    @register(Dispatch.ONE_TO_ALL)
    def compute_probe(self) -> Probe:
        """Return log-probs that the engines must reproduce."""
        return self.weight_sender.compute_probe()

    @register(Dispatch.ONE_TO_ALL)
    def finish_sending(self) -> None:
        """Wait until all buckets are received, and release what was used to send them."""
        self.weight_sender.finish()


SENDING = frozenset({"announce_weights", "join_receivers", "send_bucket", "compute_probe", "finish_sending"})
"""The names of these calls."""
