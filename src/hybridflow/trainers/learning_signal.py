"""One warning when steps of reinforcement learning have no learning signal, and what to look at."""

from collections.abc import Mapping
from typing import Any

from hybridflow.config import Config
from hybridflow.observability import get_logger
from hybridflow.workers.algorithm_functions import advantage_estimator

logger = get_logger(__name__)

STEPS_IN_A_ROW = 10
"""Number of successive steps with the same finding after which it is logged again."""


class LearningSignalMonitor:
    """Logs equal rewards and truncated responses at step 1 and after `STEPS_IN_A_ROW` such steps, not at each step."""

    def __init__(self, config: Config) -> None:
        self._config = config
        estimator = advantage_estimator(config)
        self._reads_rewards = not {"scores", "token_level_rewards"}.isdisjoint(estimator.columns)
        self._has_greedy_baseline = "baseline_scores" in estimator.columns
        self._rewards_are_equal = self._responses_are_cut = 0  # successive steps

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log a warning if all groups have equal rewards or all responses are cut, judging by a step's metrics."""
        equal = self._reads_rewards and self._have_no_difference(metrics)
        self._rewards_are_equal = self._rewards_are_equal + 1 if equal else 0
        cut = metrics["response_length/clip_ratio"] == 1.0
        self._responses_are_cut = self._responses_are_cut + 1 if cut else 0
        due = 1 if step == 1 else STEPS_IN_A_ROW
        if due in (self._rewards_are_equal, self._responses_are_cut):
            steps = "step 1" if step == 1 else f"steps {step - STEPS_IN_A_ROW + 1} to {step}"
            logger.warning("%s: %s", steps, self._describe(metrics["critic/score/mean"], due))

    def _have_no_difference(self, metrics: Mapping[str, Any]) -> bool:
        if self._config.algorithm.estimator.compares_groups:
            return metrics["critic/zero_variance_groups"] == 1.0
        if self._has_greedy_baseline:  # equal rewards may still differ from those of the greedy responses
            return metrics["critic/advantages/min"] == metrics["critic/advantages/max"] == 0.0
        if self._config.data.train_batch_size * self._config.rollout.group_size == 1:
            return False
        return metrics["critic/score/min"] == metrics["critic/score/max"]

    def _describe(self, mean_score: float, due: int) -> str:
        config, seen, look_at = self._config, [], ["the reward function"]
        are_equal = self._rewards_are_equal == due
        if are_equal:
            same = "all responses to each prompt" if config.algorithm.estimator.compares_groups else "all responses"
            seen.append(f"{same} have the same reward (mean {mean_score:.3g})")
        if self._responses_are_cut == due:
            limit = config.data.max_response_length
            seen.append(f"all responses are cut at data.max_response_length={limit}")
            look_at.append(f"data.max_response_length={limit}")
        means = "there is no learning signal" if are_equal else "rewards are those of unfinished responses"
        samples = "samples.jsonl" if config.trainer.log_samples else "samples.jsonl (set trainer.log_samples above 0)"
        return (
            f"{' and '.join(seen)}, so {means}; read {config.trainer.run_dir}/{samples}, "
            f"then check {' and '.join(look_at)}"
        )
