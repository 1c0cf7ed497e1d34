"""The controller's part of a weight sync: it calls the steps of both sides before generation.

trainer   announce_weights, join_receivers    send_bucket, send_bucket, ...       compute_probe      finish_sending
rollout                     join_sender       start_receiving, receive_bucket ... finish_receiving, check_weights
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import Handle
from hybridflow.rollout.weight_sync.base import IN_FLIGHT, Announcement
from hybridflow.runtime.observe import timed


class WeightSync(Protocol):
    """A function that loads the current weights into the rollout engines and returns metrics."""

    def __call__(self) -> dict[str, float]:
        """Load the weights, or begin to; generation that is called later uses them."""
        ...

    def finish(self) -> dict[str, float]:
        """Wait until the engines have the weights; return metrics of syncs that had not finished."""
        ...


def weight_sync_of(config: Config, trainer: WorkerGroup, rollout: WorkerGroup | None) -> WeightSync:
    """Return the weight sync of a program; a no-op if the embedded engine generates in the training process."""
    if rollout is not None:
        return BetweenPools(trainer, rollout, num_ahead=num_syncs_ahead(config))
    if config.rollout.backend == "vllm":
        return InEachProcess(trainer)
    return SharedWeights()


def num_syncs_ahead(config: Config) -> int:
    """Return how many syncs may be unfinished while engines generate; 0: a sync waits for the begun batches."""
    waits = config.updates_in_flight or config.rollout.weight_sync != "object_store" or config.trainer.lag < 2
    return 0 if waits else config.trainer.lag


class SharedWeights:
    """Weight sync of an engine that generates with the trainer's own weights: nothing to do."""

    def __call__(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    finish = __call__


class InEachProcess:
    """Weight sync of each rank with the rollout engine in its own process."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __call__(self) -> dict[str, float]:
        """Sync and return the metrics."""
        return _worst_of_ranks(self._group.sync_weights())

    def finish(self) -> dict[str, float]:
        """Return no metrics: a call waits."""
        return {}


@dataclass(frozen=True)
class _Unfinished:
    """A sync that was sent: the handles of the sender's calls, and those of each of the receivers' steps."""

    sent: list[Handle]
    calls: list[list[Handle]]


class BetweenPools:
    """Weight sync from rank 0 of the trainer to all ranks of another pool, unless they have this version already.

    `num_ahead`: how many syncs may be unfinished when a call returns, while engines generate batches that began before;
    their weights are in the object store. The first sync is waited for. An error of an unfinished sync is raised by a
    later call or by `finish`: before a batch is read whose generation was called `num_ahead` syncs ago.
    """

    def __init__(self, trainer: WorkerGroup, rollout: WorkerGroup, num_ahead: int = 0) -> None:
        self._trainer, self._rollout, self._num_ahead = trainer, rollout, num_ahead
        self._unfinished: deque[_Unfinished] = deque()
        self._version: int | None = None
        self._has_finished_one = False
        self._store: str | None = None

    def __call__(self) -> dict[str, float]:
        """Sync, if the rollout engines have an older version, and return the metrics."""
        announced = self._trainer.announce_weights()[0]
        if announced.version == self._version:
            return {}
        self._version = None
        if announced.store != self._store:  # the first one, or a sender that abandoned a sync
            self._join(announced)
        metrics = {"weight_sync/bytes": float(announced.num_bytes)}
        with timed("weight_sync", metrics):
            if self._num_ahead:
                self._unfinished.append(self._begin(announced))
                # Which sync has finished by now is another one after a resume, so that its metrics would differ.
                self._finish(keep=self._num_ahead if self._has_finished_one else 0)
                self._version = announced.version
                return metrics
            metrics |= self._sync(announced)
        self._version = announced.version
        return metrics

    def finish(self) -> dict[str, float]:
        """Wait for the unfinished syncs; return metrics of the last one. Raises the error of the first that failed."""
        return self._finish(keep=0)

    def _finish(self, keep: int) -> dict[str, float]:
        metrics, backend = {}, self._trainer.backend
        while len(self._unfinished) > keep:
            oldest = self._unfinished.popleft()
            try:
                for calls in oldest.calls:  # one after another: the first error is the cause of later ones
                    backend.wait(calls)
                metrics = _worst_of_ranks(backend.get(oldest.calls[-1]))
            except BaseException:
                self._version = None
                self._unfinished.clear()
                raise
            for calls in (*oldest.calls, oldest.sent):
                backend.release(calls)
            self._has_finished_one = True
        return metrics

    def _begin(self, announced: Announcement) -> "_Unfinished":
        """Send all weights without waiting for the receivers, whose calls run after the batches that they generate."""
        send, receive = self._send, self._receive
        sent, calls = [], [receive("start_receiving", announced)]
        for _ in range(announced.num_buckets):
            of_ranks = send("send_bucket")
            sent += of_ranks
            calls.append(receive("receive_bucket", of_ranks[0]))
        calls.append(receive("finish_receiving"))
        probe = send("compute_probe")
        calls.append(receive("check_weights", probe[0]))
        sent += [*probe, *send("finish_sending")]
        self._trainer.backend.wait(sent)
        return _Unfinished(sent, calls)

    def _join(self, announced: Announcement) -> None:
        """Join both sides at the same time, since each waits for the other."""
        joining = self._send("join_receivers", self._rollout.world_size)
        joining += self._receive("join_sender", announced)
        self._trainer.backend.wait(joining)
        self._store = announced.store

    def _sync(self, announced: Announcement) -> dict[str, float]:
        """Send the weights; return the metrics of their check.

        After the start, only the oldest bucket is waited for while IN_FLIGHT later ones are unread, and then the check:
        over a slow link each wait is a round trip.
        """
        self._rollout.start_receiving(announced)
        send, receive, backend = self._send, self._receive, self._trainer.backend
        unfinished: deque[list[Handle]] = deque()
        for _ in range(announced.num_buckets):
            of_ranks = send("send_bucket")
            unfinished.append([*of_ranks, *receive("receive_bucket", of_ranks[0])])
            if len(unfinished) > IN_FLIGHT:
                backend.wait(unfinished[0])
                backend.release(unfinished.popleft())
        unfinished.append(receive("finish_receiving"))
        unfinished.append(probe := send("compute_probe"))
        unfinished.append(checks := receive("check_weights", probe[0]))
        for calls in unfinished:  # one after another: the first error is the cause of later ones
            backend.wait(calls)
        metrics = _worst_of_ranks(backend.get(checks))
        for calls in unfinished:
            backend.release(calls)
        self._trainer.finish_sending()  # which removes what receivers have not read
        return metrics

    def _send(self, method: str, *args: Any) -> list[Handle]:
        """Call a method of `SendsWeights` on all ranks."""
        return self._trainer.execute_all_async(method, *args)

    def _receive(self, method: str, *args: Any) -> list[Handle]:
        """Call a method of `ReceivesWeights` on all ranks."""
        return self._rollout.execute_all_async(method, *args)


def _worst_of_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest value over the ranks, for each metric."""
    return {name: max(of_rank[name] for of_rank in metrics) for name in metrics[0]}
