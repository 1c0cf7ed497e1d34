"""The teacher of distillation: a frozen policy that computes log-probs of the student's responses."""

from hybridflow.config import Config
from hybridflow.models.loading import vocabulary_size
from hybridflow.protocol import DataProto
from hybridflow.workers.model_worker import MODEL_COLUMNS, ModelWorker, on_replicas
from hybridflow.workers.worker_process import prepare_worker_process

CANDIDATES = ("candidate_ids", "teacher_candidate_log_probs")


def teacher_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that the teacher computes; its most likely tokens only if `teacher.loss` uses them."""
    return ("teacher_log_probs", *(CANDIDATES if config.teacher.loss != "none" else ()))


class TeacherWorker(ModelWorker):
    """A worker that computes log-probs of the frozen teacher. It is not part of a checkpoint."""

    component = "teacher"
    role = "teacher"

    def __init__(self, config: Config) -> None:
        config = prepare_worker_process(self, config)
        self.config = config
        self.engine = self.build_engine(config, config.teacher.model_path, "policy")
        self.num_tokens = vocabulary_size(config.model.path)  # a larger model of the family may have more, as padding

    @on_replicas(reads=MODEL_COLUMNS, writes=teacher_columns)
    def compute_teacher_log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the teacher, at the rollout temperature.

        If `teacher.loss` is set, also the ids and log-probs of its `teacher.top_k` most likely tokens at each position.
        """
        top_k = self.config.teacher.top_k if self.config.teacher.loss != "none" else 0
        outputs = self.engine.forward(
            batch, top_k=top_k, top_k_below=self.num_tokens, temperature=self.config.rollout.temperature
        )
        columns = {"teacher_log_probs": outputs["log_probs"]}
        if top_k:
            columns |= {"candidate_ids": outputs["top_ids"], "teacher_candidate_log_probs": outputs["top_log_probs"]}
        return DataProto.from_dict(columns)
