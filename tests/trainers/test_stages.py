import pytest
import torch

from hybridflow.config import AlgorithmConfig, Config, load_config
from hybridflow.protocol import DataProto
from hybridflow.trainers.stages import (
    add_advantages,
    mini_batch_rows,
    needs_old_log_probs,
    needs_token_level_rewards,
    rollout_as_old_log_probs,
    token_level_rewards,
    with_group_ids,
    with_row_ids,
)

MASK = torch.tensor([[True, True, True], [True, False, False]])


def batch(**tensors):
    return DataProto.from_dict(tensors)


def groups(*group_ids):
    return with_row_ids(batch(group_ids=torch.tensor(group_ids)))


def test_group_ids_number_prompts_and_row_ids_number_rows():
    prompts = with_group_ids(batch(prompts=torch.zeros(2, 1, dtype=torch.int64)))
    rows = with_row_ids(prompts.repeat(3, interleave=True))
    assert rows.batch["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.batch["row_ids"].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_score_is_the_reward_of_the_last_token_that_counts():
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [True, False, True, False]])
    scores = torch.tensor([0.5, 2.0, 3.0])
    rewards, kl = token_level_rewards(
        batch(scores=scores, response_mask=mask), AlgorithmConfig(advantage="gae"), kl_coef=0.1
    )
    expected = [[0.0, 0.0, 0.5, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0]]
    for name in ("token_level_scores", "token_level_rewards"):
        assert rewards.batch[name].tolist() == expected
    assert len(kl) == 0


def test_the_kl_penalty_is_per_token_and_its_mean_over_tokens():
    config = AlgorithmConfig(advantage="gae", kl_in_reward=True, kl_estimator="k1")
    rewards, kl = token_level_rewards(
        batch(
            scores=torch.tensor([0.5, 2.0]),
            response_mask=MASK,
            old_log_probs=torch.tensor([[-1.0, -2.0, -1.0], [-1.0, 9.0, 9.0]]),
            ref_log_probs=torch.tensor([[-2.0, -2.0, -4.0], [-1.5, -9.0, -9.0]]),
        ),
        config,
        kl_coef=0.5,
    )
    # log(p / q): 1, 0, 3 and 0.5
    assert rewards.batch["token_level_rewards"].tolist() == [[-0.5, 0.0, -1.0], [1.75, 0.0, 0.0]]
    assert kl.tolist() == pytest.approx([1.0, 0.0, 3.0, 0.5])
    assert float(kl.mean()) == pytest.approx(4.5 / 4)


def test_advantages_come_from_the_configured_estimator():
    scores, group_ids = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    result = add_advantages(
        batch(scores=scores, group_ids=group_ids), Config(algorithm=AlgorithmConfig(norm_by_std=False))
    )
    assert result.batch["advantages"].tolist() == [[-1.0], [1.0], [0.0], [0.0]]
    assert result.batch["returns"].tolist() == [[-1.0], [1.0], [0.0], [0.0]]

    columns = batch(
        token_level_rewards=torch.tensor([[0.0, 1.0]]),
        values=torch.tensor([[0.5, 0.5]]),
        response_mask=torch.tensor([[True, True]]),
    )
    result = add_advantages(
        columns, Config(algorithm=AlgorithmConfig(advantage="gae", whiten_advantages=False, gamma=1.0, lam=0.5))
    )
    assert result.batch["advantages"].tolist() == [[0.25, 0.5]]
    assert result.batch["returns"].tolist() == [[0.75, 1.0]]


@pytest.mark.parametrize(
    ("overrides", "needs_old", "needs_rewards"),
    [
        ([], False, False),
        (["actor.epochs=2"], True, False),
        (["actor.mini_batch_size=32"], True, False),
        (["algorithm.advantage=gae"], False, True),
        (["algorithm.kl_in_reward=true"], True, True),
        (["algorithm.kl_in_loss=true"], False, False),
    ],
)
def test_old_log_probs_and_rewards_of_tokens_are_computed_if_needed(overrides, needs_old, needs_rewards):
    config = load_config(None, overrides)
    assert (needs_old_log_probs(config), needs_token_level_rewards(config)) == (needs_old, needs_rewards)


def test_rollout_log_probs_become_the_old_log_probs():
    rollouts = batch(rollout_log_probs=torch.tensor([[-1.0, -2.0]]))
    old = rollout_as_old_log_probs(rollouts)
    assert old.columns == ("old_log_probs",)
    assert old.get().batch["old_log_probs"].tolist() == [[-1.0, -2.0]]


def test_mini_batches_are_whole_groups_each_once_an_epoch():
    rows = groups(*[group for group in range(8) for _ in range(2)])
    steps = mini_batch_rows(rows, 2, 3, (5, 7))
    assert [len(step) for step in steps] == [4] * 12
    for epoch in (steps[:4], steps[4:8], steps[8:]):
        assert sorted(row for step in epoch for row in step) == list(range(16))
    for step in steps:
        assert {row ^ 1 for row in step} == set(step)  # rows 2g and 2g + 1 are of one group
    assert steps[:4] != steps[4:8]
    assert mini_batch_rows(groups(0, 0, 1, 1), 0, 2, (0, 0)) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert mini_batch_rows(groups(0, 0, 1, 1), 2, 1, (0, 0)) == [[0, 1, 2, 3]]


def test_mini_batches_depend_only_on_seed_and_step():
    rows = groups(*range(16))
    first = mini_batch_rows(rows, 4, 1, (0, 3))
    torch.manual_seed(99)
    assert mini_batch_rows(rows, 4, 1, (0, 3)) == first
    assert mini_batch_rows(rows, 4, 1, (0, 4)) != first
    assert mini_batch_rows(rows, 4, 1, (1, 3)) != first
