from inspect import unwrap

import pytest
import torch

from hybridflow.algorithms import gae_advantages, masked_whiten
from hybridflow.errors import AlgorithmError

NAN = float("nan")


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Compute A_t = sum over l of (gamma lam)^l delta_{t+l} (equation 16) for one trajectory without gaps."""
    values = [*values, 0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    return [sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def advantages_and_returns(rewards, values, mask, gamma, lam, whiten_advantages=False):
    return gae_advantages(
        token_level_rewards=torch.tensor(rewards),
        values=torch.tensor(values),
        response_mask=torch.tensor(mask),
        gamma=gamma,
        lam=lam,
        whiten_advantages=whiten_advantages,
    )


def test_three_tokens_by_hand():
    advantages, returns = advantages_and_returns(
        [[0.0, 0.0, 1.0]], [[0.5, 0.25, 0.5]], [[True, True, True]], gamma=0.5, lam=0.5
    )
    # deltas: 0 + .5*.25 - .5 = -.375;  0 + .5*.5 - .25 = 0;  1 - .5 = .5
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.125, 0.125, 0.5]]
    assert returns.tolist() == [[0.15625, 0.375, 1.0]]


def test_lambda_one_gives_rewards_to_go_minus_values():
    advantages, returns = advantages_and_returns(
        [[1.0, 2.0, 4.0]], [[8.0, 16.0, 32.0]], [[True, True, True]], gamma=1.0, lam=1.0
    )
    assert returns.tolist() == [[7, 6, 4]]
    assert advantages.tolist() == [[-1, -10, -28]]


def test_lambda_zero_gives_the_temporal_difference():
    advantages, _ = advantages_and_returns(
        [[1.0, 2.0, 4.0]], [[8.0, 16.0, 32.0]], [[True, True, True]], gamma=1.0, lam=0.0
    )
    assert advantages.tolist() == [[9, 18, -28]]


def test_masked_positions_have_no_reward_value_or_discount():
    dense, dense_returns = advantages_and_returns([[1.0, 2.0]], [[4.0, 8.0]], [[True, True]], gamma=0.5, lam=0.5)
    for filler in (0.0, 100.0, NAN):
        advantages, returns = advantages_and_returns(
            [[filler, 1.0, filler, filler, 2.0, filler]],
            [[filler, 4.0, filler, filler, 8.0, filler]],
            [[False, True, False, False, True, False]],
            gamma=0.5,
            lam=0.5,
        )
        assert advantages.tolist() == [[0, dense[0, 0], 0, 0, dense[0, 1], 0]]
        assert returns.tolist() == [[0, dense_returns[0, 0], 0, 0, dense_returns[0, 1], 0]]


def test_equals_the_scalar_reference_on_ragged_batches(ragged_batches):
    for i, (mask, (rewards, values)) in enumerate(ragged_batches(2)):
        gamma, lam = [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 0.5)][i % 4]
        advantages, returns = gae_advantages(
            token_level_rewards=torch.tensor(rewards, dtype=torch.float64),
            values=torch.tensor(values, dtype=torch.float64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            gamma=gamma,
            lam=lam,
            whiten_advantages=False,
        )
        for row, valid in enumerate(mask):
            steps = [t for t, is_valid in enumerate(valid) if is_valid]
            expected = reference_gae([rewards[row][t] for t in steps], [values[row][t] for t in steps], gamma, lam)
            assert advantages[row, steps].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
            expected_returns = [a + values[row][t] for a, t in zip(expected, steps, strict=True)]
            assert returns[row, steps].tolist() == pytest.approx(expected_returns, rel=1e-12, abs=1e-12)
            gaps = [t for t, is_valid in enumerate(valid) if not is_valid]
            assert advantages[row, gaps].tolist() == returns[row, gaps].tolist() == [0] * len(gaps)


def test_whitening_covers_the_batch_and_not_the_returns():
    columns = ([[1.0, 2.0], [4.0, 0.0]], [[0.5, 0.25], [1.0, 0.0]], [[True, True], [True, False]])
    advantages, returns = advantages_and_returns(*columns, gamma=0.9, lam=0.8)
    whitened, same_returns = advantages_and_returns(*columns, gamma=0.9, lam=0.8, whiten_advantages=True)
    assert torch.equal(returns, same_returns)
    assert torch.equal(whitened, masked_whiten(advantages, torch.tensor(columns[2])))


def test_a_fully_masked_batch_gives_zeros():
    advantages, returns = advantages_and_returns(
        [[1.0, NAN]], [[NAN, 2.0]], [[False, False]], gamma=1.0, lam=1.0, whiten_advantages=True
    )
    assert advantages.tolist() == returns.tolist() == [[0, 0]]


def test_no_gradient_flows_to_the_values():
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    advantages, returns = gae_advantages(
        token_level_rewards=torch.zeros(1, 2),
        values=values,
        response_mask=torch.ones(1, 2, dtype=torch.bool),
        gamma=1.0,
        lam=1.0,
        whiten_advantages=False,
    )
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("gamma", "lam", "message"), [(1.5, 1.0, "gamma=1.5"), (1.0, -0.1, "lam=-0.1"), (NAN, 1.0, "nan")]
)
def test_discounts_out_of_range_are_rejected(gamma, lam, message):
    with pytest.raises(AlgorithmError, match=message):
        advantages_and_returns([[1.0]], [[1.0]], [[True]], gamma=gamma, lam=lam)


def test_columns_of_different_shapes_name_both_shapes():
    settings = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
    values, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(AlgorithmError, match=r"token_level_rewards has shape \(2, 4\), but values has shape \(2, 3\)"):
        unwrap(gae_advantages)(token_level_rewards=torch.zeros(2, 4), values=values, response_mask=mask, **settings)
    with pytest.raises(AlgorithmError, match=r"response_mask has shape \(2, 1\), but values has shape \(2, 3\)"):
        unwrap(gae_advantages)(token_level_rewards=values, values=values, response_mask=mask[:, :1], **settings)
    with pytest.raises(AlgorithmError, match=r"values has shape \(3,\); it must be \(batch, response_len\)"):
        unwrap(gae_advantages)(token_level_rewards=values[0], values=values[0], response_mask=mask[0], **settings)
