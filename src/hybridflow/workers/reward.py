"""The reward worker: scores responses by rule, one score for each row."""

import numpy as np

from hybridflow.config import Config
from hybridflow.controller import Dispatch, Worker, register
from hybridflow.protocol import DataProto
from hybridflow.rewards import RewardScorer


class RewardWorker(Worker):
    """Runs `reward.function`, or the function that each row's data source names."""

    def __init__(self, config: Config) -> None:
        reward = config.reward
        self.scorer = RewardScorer(reward.function, on_error=reward.on_error, error_score=reward.error_score)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("solution_texts", "data_sources", "ground_truths", "extra_infos", "raw_prompts"),
        writes=("scores", "reward_failed", "reward_extras"),
    )
    def score(self, batch: DataProto) -> DataProto:
        """`scores`, which rows' function failed, and the further numbers it returned for each row."""
        columns = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
        result = self.scorer.score(
            columns["solution_texts"],
            columns["data_sources"],
            columns["ground_truths"],
            columns["extra_infos"],
            columns["raw_prompts"],
        )
        extras = np.empty(len(batch), dtype=object)
        extras[:] = result.extras
        return DataProto.from_dict({"scores": result.scores, "reward_failed": result.failed}, {"reward_extras": extras})
