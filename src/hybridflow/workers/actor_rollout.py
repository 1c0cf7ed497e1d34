"""The hybrid worker: the trained policy and the rollout engine that generates with its weights, in one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.environments.processes.closure import Closure
from hybridflow.rollout import load_weights
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender
from hybridflow.runtime.device import free_cached_memory
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.episodes import episode_worker
from hybridflow.workers.generating import GeneratingWorker
from hybridflow.workers.rollout import build_rollout_engine, generation_dtype


class ActorRolloutWorker(GeneratingWorker, ActorWorker):
    """A worker that generates responses, computes their log-probs, and trains the policy on them.

    A rollout engine with a separate copy of the weights sleeps while the policy trains. On waking, its weights are
    allocated first; the KV cache gets the memory that is left after the trainer's weights have been gathered.
    """

    def __init__(self, config: Config, total_updates: int = 1, environments: Sequence[Closure] = ()) -> None:
        self._environments = environments
        super().__init__(config, total_updates)
        config = self.config
        is_embedded = config.rollout.backend == "embedded"
        self._shares_weights = is_embedded and self.engine.shares_weights
        self.rollout = build_rollout_engine(
            config,
            self.tokenizer,
            self.engine.rollout_model() if is_embedded else None,
            shares_model=self._shares_weights,
            in_group=self.has_collectives and self.world_size > 1,
            beside_trainer=True,
        )
        boxes = self.rollout.boxes_to_load() if config.rollout.tensor > 1 else None
        self.weight_sender = WeightSender(self.engine, config, InProcess, boxes)
        self.weight_receiver = WeightReceiver(self.rollout, generation_dtype(config), InProcess())
        self._version: int | None = None  # version of the weights that the rollout engine has received
        self._is_awake = True
        self._sleep()

    def prepare(self) -> None:
        """Start the environments, whose tools the chat template must write."""
        self.episodes = episode_worker(self.config, self.tokenizer, self.stop_ids, self.rank, self._environments)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, directory: str) -> None:
        """Load the actor's state; the next `sync_weights` sends the loaded weights to the rollout engine."""
        super().load(directory)
        self._version = None

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> dict[str, float]:
        """Wake the rollout engine and sync the current weights into it; return metrics of the sync.

        Without new weights, or with shared ones, there are no metrics. The engine sleeps again after generating.
        """
        if self._shares_weights:
            self._share_weights()
            return {}
        if not self._is_awake:
            free_cached_memory()  # memory of training, for the rollout engine
            self.rollout.wake("weights")
        version, num_bytes = self.engine.num_updates, 0
        if is_new := (self._version, self.rollout.version) != (version, version):
            self._version = None
            num_bytes = hand_over(self.weight_sender, self.weight_receiver)
        if not self._is_awake:
            free_cached_memory()  # memory of the gathered weights
            self.rollout.wake("kv_cache")
        self._is_awake = True
        if not is_new:
            return {}
        metrics = self.weight_receiver.check(self.weight_sender.compute_probe())
        self._version = version
        received = float(self.engine.bytes_received)
        return {"weight_sync/bytes": float(num_bytes), "weight_sync/bytes_received": received, **metrics}

    @contextmanager
    def ready_to_generate(self) -> Iterator[None]:
        """Sync the weights on entry, let the rollout engine sleep on exit."""
        self.sync_weights()
        try:
            if self._shares_weights:
                with self.engine.on_device(with_optimizer=False):  # the rollout engine uses the trainer's weights
                    yield
            else:
                yield
        finally:
            self._sleep()

    def _share_weights(self) -> None:
        if self._version != self.engine.num_updates:
            with self.engine.on_device(with_optimizer=False):  # so that these are the trainer's own tensors
                load_weights(self.rollout, self.engine.weights(), version=self.engine.num_updates)
            self._version = self.engine.num_updates

    def _sleep(self) -> None:
        if self._is_awake:
            self.rollout.sleep()
            self._is_awake = self._shares_weights
