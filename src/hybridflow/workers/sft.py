"""The supervised worker: a policy that learns to imitate the responses of a batch."""

from hybridflow.config import Config
from hybridflow.controller import register
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import sft_loss
from hybridflow.workers.mini_batches import iterate_mini_batches, mean_metrics
from hybridflow.workers.model_worker import MODEL_COLUMNS, TO_REPLICAS, ModelWorker
from hybridflow.workers.process import prepare_process


class SFTWorker(ModelWorker):
    """Shares the actor's component name: what it saves is a policy."""

    component = "actor"
    role = "actor"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        prepare_process(self, config)
        self.engine = self.build_engine(config, config.model.path, "policy", config.sft.optimizer, total_updates)

    @register(TO_REPLICAS, reads=(*MODEL_COLUMNS, "row_ids"), writes=(), rows="one")
    def update_sft(self, batch: DataProto) -> DataProto:
        """One optimizer step for each mini-batch."""
        self.require_collectives("sum gradients")
        steps = []
        for mini_batch in iterate_mini_batches(batch, self.engine):
            result = self.engine.update(mini_batch.rows, sft_loss(mini_batch.num_tokens))
            steps.append(
                {
                    "sft/loss": result.loss,
                    "sft/grad_norm": result.grad_norm,
                    "sft/lr": result.lr,
                    "sft/padding_computed": result.padding_share,
                }
            )
        return DataProto(meta_info={"metrics": mean_metrics(steps)})

    @register(TO_REPLICAS, reads=MODEL_COLUMNS, writes=("old_log_probs",))
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probs of the responses, for a validation loss."""
        return DataProto.from_dict({"old_log_probs": self.engine.forward(batch)["log_probs"]})
