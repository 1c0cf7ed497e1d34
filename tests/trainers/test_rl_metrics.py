import math

import pytest
import torch

from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.rl_metrics import (
    batch_metrics,
    explained_variance,
    extra_metrics,
    log_prob_metrics,
    staleness_metrics,
    zero_variance_share,
)


def rollouts(**tensors):
    """Return two prompts with two responses each, of 1, 2, 3 and 3 tokens."""
    lengths = torch.tensor([1, 2, 3, 3])
    columns = {
        "prompt_mask": torch.tensor([[False, True]] * 2 + [[True, True]] * 2),
        "response_mask": torch.arange(3) < lengths[:, None],
        "scores": torch.tensor([1.0, 0.0, 0.5, 0.5]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "reward_failed": torch.tensor([False, False, False, True]),
        "reward_timed_out": torch.tensor([False, False, False, False]),
        "advantages": torch.tensor([[1.0], [-1.0], [0.0], [0.0]]),
        "returns": torch.tensor([[1.0], [-1.0], [0.0], [0.0]]),
    }
    texts = {
        "raw_prompts": [[{"role": "user", "content": text}] for text in ("p", "p", "q", "q")],
        "prompt_texts": ["<u>p", "<u>p", "<u>q", "<u>q"],
        "ground_truths": [{"target": 3}, {"target": 3}, "4", "4"],
        "solution_texts": ["a", "b", "c", "d"],
        "reward_extras": [{"x": 1.0}, {"x": 3.0, "y": 5.0}, {}, {}],
    }
    return DataProto.from_dict({**columns, **tensors}, texts)


def test_metrics_of_a_batch_by_hand():
    metrics = batch_metrics(rollouts(), max_response_length=3)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["response_length/mean"] == 9 / 4
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/mean"] == 1.5
    assert metrics["critic/zero_variance_groups"] == 0.5
    assert metrics["reward/error_rate"] == metrics["reward/zero_rate"] == 0.25
    assert metrics["reward/timeout_rate"] == 0
    late = batch_metrics(rollouts(reward_timed_out=torch.tensor([False, False, False, True])), 3)
    assert (late["reward/error_rate"], late["reward/timeout_rate"]) == (0, 0.25)
    assert metrics["critic/advantages/mean"] == pytest.approx((1 - 2) / 9)  # over tokens
    assert metrics["reward/x/mean"] == 2.0
    assert "critic/values/mean" not in metrics
    assert "critic/rewards/mean" not in metrics


def test_ages_of_tokens_by_hand():
    versions = torch.tensor([[20, 0, 0], [19, 18, 0], [17, 13, 12], [4, 2, -1]])  # 1, 2, 3 and 3 tokens
    metrics = staleness_metrics(rollouts(rollout_versions=versions), version=20, updates=2)
    assert metrics == {
        "staleness/mean": (0 + 1 + 2 + 3 + 7 + 8 + 16 + 18 + 21) / 9,
        "staleness/max": 21,
        "staleness/off_policy_updates": 22,
        "staleness/age_0": 1 / 9,
        "staleness/age_1": 1 / 9,
        "staleness/age_2_to_3": 2 / 9,
        "staleness/age_4_to_7": 1 / 9,
        "staleness/age_8_to_15": 1 / 9,
        "staleness/age_16_or_more": 3 / 9,
    }


def test_metrics_of_a_critic_by_hand():
    values = torch.tensor([[1.0, 9.0, 9.0], [2.0, 2.0, 9.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    returns = torch.tensor([[1.0, 9.0, 9.0], [2.0, 4.0, 9.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    metrics = batch_metrics(rollouts(values=values, returns=returns, token_level_rewards=returns), 3)
    assert metrics["critic/values/max"] == 2.0
    assert metrics["critic/returns/max"] == 4.0
    # errors 0, 0, 2 and six 0: variance 4/9 - (2/9)^2; returns 1, 2, 4 and six 0: variance 21/9 - (7/9)^2
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - (36 - 4) / (189 - 49))
    assert metrics["critic/rewards/max"] == 19.0


def test_entropy_and_mismatch_are_means_over_the_tokens_of_all_ranks():
    sums = {"num_tokens": [3, 1], "entropy_sum": [6.0, 2.0], "mismatch_sum": [0.5, 1.5], "mismatch_max": [0.25, 1.5]}
    sums |= {"mismatch_kl_sum": [0.0, 1.0], "mismatch_share_sum": [2.0, 1.0]}
    of_ranks = DataProto.from_dict({name: torch.tensor(values) for name, values in sums.items()})
    assert log_prob_metrics([DataProtoFuture.of(of_ranks)]) == {
        "actor/entropy": 2.0,
        "rollout/log_prob_mismatch": 0.5,
        "rollout/log_prob_mismatch_max": 1.5,
        "rollout/log_prob_mismatch_share": 0.75,
        "rollout/log_prob_kl": 0.25,
    }


def test_explained_variance_and_equal_scores_and_extras_by_hand():
    assert math.isnan(explained_variance(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])))
    assert explained_variance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0])) == 1.0
    scores, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0]), torch.tensor([7, 7, 3, 3, 4])
    assert zero_variance_share(scores, groups) == pytest.approx(2 / 3)
    assert extra_metrics(rollouts()) == {"reward/x/mean": 2.0, "reward/y/mean": 5.0}  # over the rows that have them
