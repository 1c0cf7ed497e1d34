"""Offline training: of the policy by SFT and DPO, and of a reward model (`RewardModelWorker` scores with it)."""

from transformers import AutoModelForSequenceClassification

from hybridflow.config import Config
from hybridflow.models.loading import model_config
from hybridflow.models.support import require_classifier
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import sft_loss, slope_loss
from hybridflow.workers.model_worker import MODEL_COLUMNS, ModelWorker, on_replicas
from hybridflow.workers.updates import FIGURES_WITHOUT_LOSS, run_updates
from hybridflow.workers.worker_process import prepare_worker_process


class OfflinePolicyWorker(ModelWorker):
    """A worker that trains a policy offline; its checkpoint has the actor's component name, as it holds a policy."""

    component = "actor"
    role = "actor"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        config = prepare_worker_process(self, config)
        self.engine = self.build_engine(config, config.model.path, "policy", config.offline.optimizer, total_updates)

    @on_replicas(reads=(*MODEL_COLUMNS, "row_ids"), writes=(), rows="one")
    def update_sft(self, batch: DataProto) -> DataProto:
        """Run one optimizer step for each mini-batch."""
        self.require_collectives("sum gradients")
        figures = ("loss", *FIGURES_WITHOUT_LOSS)
        return run_updates(self.engine, batch, lambda step: sft_loss(step.num_tokens), "sft", figures=figures)

    @on_replicas(reads=(*MODEL_COLUMNS, "row_ids", "loss_slopes"), writes=(), rows="one")
    def update_dpo(self, batch: DataProto) -> DataProto:
        """Run one optimizer step per mini-batch on the sum of `loss_slopes` times the log-prob of each response."""
        self.require_collectives("sum gradients")
        loss = slope_loss("log_probs")
        return run_updates(self.engine, batch, lambda _: loss, "dpo", figures=FIGURES_WITHOUT_LOSS)

    @on_replicas(reads=MODEL_COLUMNS, writes=("old_log_probs",))
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the policy before the update."""
        return DataProto.from_dict({"old_log_probs": self.engine.forward(batch)["log_probs"]})

    @on_replicas(reads=MODEL_COLUMNS, writes=("ref_log_probs",))
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the base model, without its adapters (lora.rank)."""
        with self.engine.without_adapters():
            return DataProto.from_dict({"ref_log_probs": self.engine.forward(batch)["log_probs"]})


class PreferenceModelWorker(ModelWorker):
    """A worker that trains a reward model: a zero-initialized scalar head on the body of model.path.

    The score of a conversation is the value at its last token.
    """

    component = "reward_model"
    role = "actor"

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        config = prepare_worker_process(self, config)
        require_classifier(model_config(config.model.path), AutoModelForSequenceClassification)  # as it is exported
        self.engine = self.build_engine(config, config.model.path, "value", config.offline.optimizer, total_updates)

    @on_replicas(reads=MODEL_COLUMNS, writes=("scores",))
    def compute_scores(self, batch: DataProto) -> DataProto:
        """Compute the score of each conversation, (batch,)."""
        return DataProto.from_dict({"scores": self.engine.forward(batch)["values"][:, 0]})

    @on_replicas(reads=(*MODEL_COLUMNS, "row_ids", "loss_slopes"), writes=(), rows="one")
    def update_reward_model(self, batch: DataProto) -> DataProto:
        """Run one optimizer step per mini-batch on the sum of `loss_slopes` times the score of each conversation."""
        self.require_collectives("sum gradients")
        loss = slope_loss("values")
        return run_updates(self.engine, batch, lambda _: loss, "reward_model", figures=FIGURES_WITHOUT_LOSS)
