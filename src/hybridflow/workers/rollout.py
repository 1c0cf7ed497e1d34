"""Generation in a pool of its own: the engine's weights come from the pool that learns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.data import load_tokenizer, stop_token_ids
from hybridflow.errors import RolloutError
from hybridflow.models import DTYPES, build_with_placeholders
from hybridflow.runtime import own_device
from hybridflow.weight_sync import CheckedReceiver, Probe, Sent, WeightWay
from hybridflow.workers.generating import GeneratingWorker
from hybridflow.workers.process import prepare_process
from hybridflow.workers.rollout_engine import build_rollout_engine
from hybridflow.workers.weight_ways import Offer, receiving_end


class RolloutWorker(GeneratingWorker):
    """Generates with the weights that it received last."""

    def __init__(self, config: Config) -> None:
        prepare_process(self, config)
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_ids = stop_token_ids(self.tokenizer, config.model.path)
        model = None
        if config.rollout.backend == "embedded":
            dtype = DTYPES[config.model.dtype]
            model = build_with_placeholders(config.model.path, "policy", dtype, own_device())
        in_group = self.has_collectives and self.world_size > 1
        self.rollout = build_rollout_engine(config, self.tokenizer, model, in_group=in_group)
        self._receiver = CheckedReceiver(self.rollout, config.model.dtype)
        self._way: WeightWay | None = None

    @contextmanager
    def ready_to_generate(self) -> Iterator[None]:
        if self.rollout.version is None:
            raise RolloutError("the rollout engine has received no weights yet; synchronise them before generating.")
        yield

    @register(Dispatch.ONE_TO_ALL)
    def join_sender(self, offer: Offer) -> None:
        """Be ready to receive from whoever made the offer."""
        self._way = receiving_end(self.config, self.rank, self.world_size, offer)

    @register(Dispatch.ONE_TO_ALL)
    def start_receiving(self, offer: Offer) -> None:
        """Expect the weights of an offer."""
        self._receiver.start(offer.specs, offer.version)

    @register(Dispatch.ONE_TO_ALL)
    def receive_bucket(self, sent: tuple[Sent, Any]) -> None:
        """Receive the next bucket and load it. Raises WeightSyncError for a tensor that is not what was sent."""
        assert self._way is not None, "join_sender comes first"
        self._receiver.accept(self._way.receive(Sent.joined(sent)))

    @register(Dispatch.ONE_TO_ALL)
    def finish_receiving(self, probe: Probe) -> dict[str, float]:
        """Generate with what was received from now on, if its log-probs are the trainer's; metrics."""
        self._receiver.finish()
        return self._receiver.check(probe)
