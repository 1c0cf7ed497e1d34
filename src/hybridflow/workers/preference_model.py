"""Training of a reward model from preferences; `RewardModelWorker` scores with the trained model."""

from hybridflow.config import Config
from hybridflow.controller import register
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import slope_loss
from hybridflow.workers.model_worker import MODEL_COLUMNS, TO_REPLICAS, ModelWorker, parts_of_replicas
from hybridflow.workers.updates import FIGURES_WITHOUT_LOSS, run_updates
from hybridflow.workers.worker_process import prepare_worker_process


class PreferenceModelWorker(ModelWorker):
    """A worker that trains a reward model: a zero-initialized scalar head on the body of model.path.

    The score of a conversation is the value at its last token.
    """

    component = "reward_model"
    role = "actor"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        config = prepare_worker_process(self, config)
        self.engine = self.build_engine(config, config.model.path, "value", config.offline.optimizer, total_updates)

    @register(TO_REPLICAS, reads=MODEL_COLUMNS, writes=("scores",), parts=parts_of_replicas)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """Compute the score of each conversation, (batch,)."""
        return DataProto.from_dict({"scores": self.engine.forward(batch)["values"][:, 0]})

    @register(
        TO_REPLICAS, reads=(*MODEL_COLUMNS, "row_ids", "loss_slopes"), writes=(), rows="one", parts=parts_of_replicas
    )
    def update_reward_model(self, batch: DataProto) -> DataProto:
        """Run one optimizer step per mini-batch on the sum of `loss_slopes` times the score of each conversation."""
        self.require_collectives("sum gradients")
        loss = slope_loss("values")
        return run_updates(self.engine, batch, lambda _: loss, "reward_model", figures=FIGURES_WITHOUT_LOSS)
