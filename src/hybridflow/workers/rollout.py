"""Generation in a separate resource pool: the rollout engine receives its weights from the training pool."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridflow.config import Config
from hybridflow.data import load_tokenizer, stop_token_ids
from hybridflow.errors import RolloutError
from hybridflow.models import DTYPES, build_with_placeholders
from hybridflow.rewards.closure import Closure
from hybridflow.rollout.weight_sync import ReceivesWeights, WeightReceiver, build_transport
from hybridflow.runtime import own_device, require_dtype
from hybridflow.workers.episodes import episode_worker
from hybridflow.workers.generating import GeneratingWorker
from hybridflow.workers.rollout_engine import build_rollout_engine
from hybridflow.workers.worker_process import prepare_worker_process


class RolloutWorker(ReceivesWeights, GeneratingWorker):
    """A worker that generates with the weights of the last weight sync."""

    def __init__(self, config: Config, environments: Sequence[Closure] = ()) -> None:
        config = prepare_worker_process(self, config)
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_ids = stop_token_ids(self.tokenizer, config.model.path)
        model = None
        if config.rollout.backend == "embedded":
            dtype, device = DTYPES[config.model.dtype], own_device()
            require_dtype(dtype, device)
            model = build_with_placeholders(config.model.path, "policy", dtype, device)
        self.episodes = episode_worker(config, self.tokenizer, self.stop_ids, self.rank, environments)
        in_group = self.has_collectives and self.world_size > 1
        self.rollout = build_rollout_engine(config, self.tokenizer, model, in_group=in_group)
        self.weight_receiver = WeightReceiver(
            self.rollout, config.model.dtype, build_transport(config), self.rank, self.world_size
        )

    @contextmanager
    def ready_to_generate(self) -> Iterator[None]:
        """Raise RolloutError if the engine has no weights yet."""
        if self.rollout.version is None:
            raise RolloutError("the rollout engine has no weights yet; sync weights before generating.")
        yield
