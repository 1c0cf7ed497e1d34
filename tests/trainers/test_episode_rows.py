"""Rows of an episode as one row: rewards and advantages by hand, also after the rows were put in another order."""

import math
from typing import get_args

import numpy as np
import torch

from hybridflow.config import AlgorithmConfig, Config, DataConfig, RewardConfig
from hybridflow.environments.episodes.environment import EndReason
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.episode_rows import EpisodeRows
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.rl_metrics import ENDS, batch_metrics, episode_metrics
from hybridflow.trainers.stages import add_advantages, corrected_rollouts, token_level_rewards, with_overlong_penalty

T, F = True, False
MASK = torch.tensor([[T, F, T], [T, T, F], [T, T, T], [F, F, F]])
"""Two episodes of two rows; the second one has used only one."""


def batch(order=(0, 1, 2, 3), **columns):
    tensors = {
        "response_mask": MASK,
        "scores": torch.tensor([1.0, 1.0, 0.0, 0.0]),
        "group_ids": torch.tensor([0, 0, 0, 0]),
        "episode_ids": torch.tensor([0, 0, 1, 1]),
        "row_ids": torch.arange(4),
        "turn_rewards": torch.tensor([[0.25, 0, 0], [0, 0, 0], [0, 0, -0.5], [0, 0, 0]]),
        **columns,
    }
    return DataProto.from_dict({name: column[list(order)] for name, column in tensors.items()})


def test_columns_of_an_episode_are_joined_and_split_again_in_any_order():
    values = torch.arange(12.0).reshape(4, 3)
    order = [2, 0, 3, 1]
    shuffled = batch(order, values=values)
    rows = EpisodeRows(shuffled)
    joined = rows.joined({name: shuffled.batch[name] for name in ("response_mask", "values", "scores")})
    assert joined["values"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert joined["scores"].tolist() == [1.0, 0.0]
    split = rows.split(joined)
    assert split["values"].equal(values[order])
    assert split["scores"].equal(shuffled.batch["scores"])


def test_a_batch_without_episodes_stays_as_it_is():
    plain = DataProto.from_dict({"scores": torch.tensor([1.0, 0.0])})
    rows = EpisodeRows(plain)
    assert rows.joined({"scores": plain.batch["scores"]})["scores"] is plain.batch["scores"]


def test_token_rewards_are_those_of_turns_and_the_rest_at_the_end():
    rewards, _ = token_level_rewards(batch(), AlgorithmConfig(), kl_coef=0.0)
    expected = [[0.25, 0, 0], [0, 0.75, 0], [0, 0, 0.0], [0, 0, 0]]
    assert rewards.batch["token_level_rewards"].tolist() == expected
    assert rewards.batch["token_level_scores"].sum(-1).reshape(2, 2).sum(-1).tolist() == [1.0, 0.0]


def test_advantages_compare_episodes_and_not_rows():
    config = Config(algorithm=AlgorithmConfig(advantage="grpo", norm_by_std=False))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        advantages = add_advantages(batch(order), config).batch["advantages"]
        whole = advantages.expand(4, 3)[torch.tensor(order).argsort()]
        assert whole[MASK].tolist() == [0.5] * 4 + [-0.5] * 3


def test_advantages_of_a_critic_go_on_in_the_next_row():
    config = Config(algorithm=AlgorithmConfig(advantage="gae", gamma=1.0, lam=1.0, whiten_advantages=False))
    values = torch.tensor([[0.1, 9.0, 0.2], [0.3, 0.4, 9.0], [0.5, 0.6, 0.7], [9.0, 9.0, 9.0]])
    rewards, _ = token_level_rewards(batch(), config.algorithm, kl_coef=0.0)
    found = add_advantages(batch(values=values).union(rewards), config).batch
    returns = torch.tensor([[1.0, 0, 0.75], [0.75, 0.75, 0], [0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(found["returns"], returns)
    torch.testing.assert_close(found["advantages"], torch.where(MASK, returns - values, 0.0))


def test_rollout_weights_of_sequences_are_those_of_episodes():
    config = AlgorithmConfig(rollout_weights="sequence", rollout_reject={"sequence_max_k3": (0.0, 1.0)})
    old = torch.tensor([[0.25, 9.0, 0.0], [0.25, -0.5, 9.0], [0.0, -2.0, 0.0], [9.0, 9.0, 9.0]])
    columns = {"old_log_probs": old, "rollout_log_probs": torch.zeros(4, 3)}
    one, none = math.exp(0.25 + 0.25 - 0.5), 0.0  # k3 of -2 is e^-2 + 1, which rejects the second episode
    expected = torch.tensor([[one, 0, one], [one, one, 0], [none] * 3, [none] * 3])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        weights, numbers = corrected_rollouts(batch(order, **columns), config)
        torch.testing.assert_close(weights.batch["rollout_weights"][torch.tensor(order).argsort()], expected)
        assert numbers[2].tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_metrics_count_episodes():
    data = batch(
        prompt_mask=torch.ones(4, 2, dtype=torch.bool),
        reward_failed=torch.zeros(4, dtype=torch.bool),
        reward_timed_out=torch.zeros(4, dtype=torch.bool),
        turn_ids=torch.tensor([[0, 0, 1], [2, 2, -1], [0, 0, 0], [-1, -1, -1]]),
        num_tool_calls=torch.tensor([3, 3, 1, 1]),
        num_tool_errors=torch.tensor([1, 1, 0, 0]),
    )
    ends, extras = np.empty(4, dtype=object), np.empty(4, dtype=object)
    ends[:] = ["done", "done", "turns", "turns"]
    extras[:] = [{"moves": 2.0}, {"moves": 2.0}, {"moves": 4.0}, {"moves": 4.0}]
    data.non_tensor_batch["finish_reasons"], data.non_tensor_batch["reward_extras"] = ends, extras
    metrics = episode_metrics(data)
    assert (metrics["episode/turns/max"], metrics["episode/turns/mean"]) == (3, 2)
    assert (metrics["episode/tool_calls"], metrics["episode/tool_error_rate"]) == (2, 0.25)
    assert (metrics["episode/ended_done"], metrics["episode/ended_turns"]) == (0.5, 0.5)
    metrics = batch_metrics(data, max_response_length=9)
    assert metrics["critic/score/mean"] == 0.5
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (3.5, 4)
    assert metrics["reward/moves/mean"] == 3.0
    assert metrics["critic/zero_variance_groups"] == 0


def test_the_overlong_penalty_is_that_of_the_longest_row():
    config = Config(
        data=DataConfig(max_response_length=3), reward=RewardConfig(overlong_buffer=2, overlong_penalty=1.0)
    )
    turn_ids = torch.tensor([[0, 0, 1], [2, 2, -1], [0, -1, -1], [-1, -1, -1]])  # with answers: 3 and 2 tokens, 1 and 0
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        found = with_overlong_penalty(DataProtoFuture.of(batch(order, turn_ids=turn_ids)), config)
        scores = read(found, ["scores"]).batch["scores"][torch.tensor(order).argsort()]
        assert scores.tolist() == [0.0, 0.0, 0.0, 0.0]  # 1 - 1 for the first episode


def test_each_reason_why_an_episode_ends_has_a_metric():
    assert get_args(EndReason) == ENDS
