"""Before generation: weights go from the group that learns to whoever generates, and prove to be the same there."""

from collections.abc import Callable

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.observability import timed

IN_FLIGHT = 2
"""Buckets that are on their way at the same time: one is received while the next is gathered."""

WeightSync = Callable[[], dict[str, float]]
"""Have the rollout engines generate with the weights of now; returns metrics."""


def weight_sync_of(config: Config, trainer: WorkerGroup, rollout: WorkerGroup | None) -> WeightSync:
    """What a program needs: nothing where the embedded engine generates in the process that learns."""
    if rollout is not None:
        return BetweenPools(trainer, rollout)
    if config.rollout.backend == "vllm":
        return InEachProcess(trainer)
    return dict


class InEachProcess:
    """Each rank gives its weights to the engine in its own process."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __call__(self) -> dict[str, float]:
        return _of_ranks(self._group.sync_weights())


class BetweenPools:
    """Bucket by bucket from rank 0 of the trainer to every rank of another pool; nothing if they have them already."""

    def __init__(self, trainer: WorkerGroup, rollout: WorkerGroup) -> None:
        self._trainer, self._rollout = trainer, rollout
        self._version: int | None = None
        self._has_joined = False

    def __call__(self) -> dict[str, float]:
        trainer, rollout = self._trainer, self._rollout
        offer = trainer.offer_weights(rollout.world_size)[0]
        if offer.version == self._version:
            return {}
        self._version = None
        if not self._has_joined:
            self._join(offer)
        metrics = {"weight_sync/bytes": float(sum(spec.num_bytes for spec in offer.specs))}
        with timed("weight_sync", metrics):
            rollout.start_receiving(offer)
            self._send(offer.num_buckets)
            metrics |= _of_ranks(rollout.finish_receiving(trainer.compute_probe()[0]))
            trainer.finish_sending()
        self._version = offer.version
        return metrics

    def _join(self, offer: object) -> None:
        """Both sides at the same time: where they meet, they wait for each other."""
        backend = self._trainer.backend
        meeting = self._trainer.execute_all_async("join_receivers")
        meeting += self._rollout.execute_all_async("join_sender", offer)
        backend.wait(meeting)
        self._has_joined = True

    def _send(self, num_buckets: int) -> None:
        backend, under_way = self._trainer.backend, []
        for _ in range(num_buckets):
            sent = self._trainer.execute_all_async("send_bucket")
            under_way.append([*sent, *self._rollout.execute_all_async("receive_bucket", sent[0])])
            if len(under_way) > IN_FLIGHT:
                done = under_way.pop(0)
                backend.wait(done)
                backend.release(done)
        for done in under_way:
            backend.wait(done)
            backend.release(done)


def _of_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The worst of the ranks."""
    return {name: max(of_rank[name] for of_rank in metrics) for name in metrics[0]}
