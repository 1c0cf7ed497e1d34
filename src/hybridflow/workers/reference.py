"""The reference policy: a frozen model whose log-probs are used by the KL terms."""

from hybridflow.config import Config
from hybridflow.protocol import DataProto
from hybridflow.workers.model_worker import MODEL_COLUMNS, ModelWorker, on_replicas
from hybridflow.workers.worker_process import prepare_worker_process


class ReferenceWorker(ModelWorker):
    """A worker that computes log-probs of the frozen reference policy. It is not part of a checkpoint."""

    component = "reference"
    role = "reference"

    def __init__(self, config: Config, temperature: float | None = None) -> None:
        config = prepare_worker_process(self, config)
        self.config = config
        self.temperature = config.rollout.temperature if temperature is None else temperature
        path = config.reference.model_path or config.model.path
        self.engine = self.build_engine(config, path, "policy")

    @on_replicas(reads=MODEL_COLUMNS, writes=("ref_log_probs",))
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the reference policy, by default at the rollout temperature."""
        outputs = self.engine.forward(batch, temperature=self.temperature)
        return DataProto.from_dict({"ref_log_probs": outputs["log_probs"]})
