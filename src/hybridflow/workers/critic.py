"""The critic: values of response tokens, trained on returns."""

from hybridflow.config import Config
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import critic_loss
from hybridflow.workers.model_worker import MODEL_COLUMNS, ModelWorker, on_replicas
from hybridflow.workers.updates import run_updates
from hybridflow.workers.worker_process import prepare_worker_process


class CriticWorker(ModelWorker):
    """A worker with a model and a scalar head; the value of a response token is computed before that token is seen."""

    component = "critic"
    role = "critic"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        config = prepare_worker_process(self, config)
        self.config = config
        self.engine = self.build_engine(
            config, config.critic.model_path or config.model.path, "value", config.critic.optimizer, total_updates
        )

    @on_replicas(reads=MODEL_COLUMNS, writes=("values",))
    def compute_values(self, batch: DataProto) -> DataProto:
        """Compute the estimated return at every response token."""
        return DataProto.from_dict(self.engine.forward(batch))

    @on_replicas(reads=(*MODEL_COLUMNS, "row_ids", "values", "returns"), writes=(), rows="one")
    def update_critic(self, batch: DataProto) -> DataProto:
        """Run one optimizer step for each mini-batch."""
        self.require_collectives("sum gradients")
        return run_updates(
            self.engine,
            batch,
            lambda step: critic_loss(self.config, step.num_tokens, step.num_sequences),
            "critic",
        )
