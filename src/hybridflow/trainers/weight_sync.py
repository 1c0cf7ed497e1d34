"""The controller's part of a weight sync: it calls the steps of both sides before generation.

trainer   announce ── join ── send, send, ...           ── compute_probe ──┐        ── finish
rollout               join ── start, receive, receive, ...── finish ── check
"""

from collections.abc import Callable

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.observability import timed
from hybridflow.weight_sync import IN_FLIGHT, Announcement, WeightReceiver, WeightSender

WeightSync = Callable[[], dict[str, float]]
"""A function that loads the current weights into the rollout engines and returns metrics."""


def weight_sync_of(config: Config, trainer: WorkerGroup, rollout: WorkerGroup | None) -> WeightSync:
    """Return the weight sync of a program; a no-op if the embedded engine generates in the training process."""
    if rollout is not None:
        return BetweenPools(trainer, rollout)
    if config.rollout.backend == "vllm":
        return InEachProcess(trainer)
    return dict


class InEachProcess:
    """Weight sync of each rank with the rollout engine in its own process."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __call__(self) -> dict[str, float]:
        """Sync and return the metrics."""
        return _worst_of_ranks(self._group.sync_weights())


class BetweenPools:
    """Weight sync from rank 0 of the trainer to all ranks of another pool, unless they have this version already."""

    def __init__(self, trainer: WorkerGroup, rollout: WorkerGroup) -> None:
        self._trainer, self._rollout = trainer, rollout
        self._version: int | None = None
        self._has_joined = False

    def __call__(self) -> dict[str, float]:
        """Sync, if the rollout engines have an older version, and return the metrics."""
        send, receive = self._trainer.send_weights, self._rollout.receive_weights
        announced = send(WeightSender.announce)[0]
        if announced.version == self._version:
            return {}
        self._version = None
        if not self._has_joined:
            self._join(announced)
        metrics = {"weight_sync/bytes": float(announced.num_bytes)}
        with timed("weight_sync", metrics):
            receive(WeightReceiver.start, announced)
            self._send(announced.num_buckets)
            receive(WeightReceiver.finish)
            metrics |= _worst_of_ranks(receive(WeightReceiver.check, send(WeightSender.compute_probe)[0]))
            send(WeightSender.finish)
        self._version = announced.version
        return metrics

    def _join(self, announced: Announcement) -> None:
        """Join both sides at the same time, since each waits for the other."""
        joining = self._trainer.execute_all_async("send_weights", WeightSender.join, self._rollout.world_size)
        joining += self._rollout.execute_all_async("receive_weights", WeightReceiver.join, announced)
        self._trainer.backend.wait(joining)
        self._has_joined = True

    def _send(self, num_buckets: int) -> None:
        backend, in_flight = self._trainer.backend, []
        for _ in range(num_buckets):
            sent = self._trainer.execute_all_async("send_weights", WeightSender.send)
            received = self._rollout.execute_all_async("receive_weights", WeightReceiver.receive, sent[0])
            in_flight.append([*sent, *received])
            if len(in_flight) > IN_FLIGHT:
                done = in_flight.pop(0)
                backend.wait(done)
                backend.release(done)
        for done in in_flight:
            backend.wait(done)
            backend.release(done)


def _worst_of_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest value over the ranks, for each metric."""
    return {name: max(of_rank[name] for of_rank in metrics) for name in metrics[0]}
