import math

import pytest
import torch

from hybridflow.algorithms import PREFERENCE_LOSSES, bradley_terry_loss, dpo_loss, ipo_loss, slopes_of
from hybridflow.errors import AlgorithmError

PAIRS = {
    "chosen_log_probs": torch.tensor([-3.0, -5.0], dtype=torch.float64),
    "rejected_log_probs": torch.tensor([-4.0, -2.0], dtype=torch.float64),
    "chosen_ref_log_probs": torch.tensor([-3.5, -5.0], dtype=torch.float64),
    "rejected_ref_log_probs": torch.tensor([-4.0, -4.0], dtype=torch.float64),
}
"""Log-ratios of the first pair: 0.5 and 0, of the second: 0 and 2."""


def test_dpo_by_hand():
    loss = dpo_loss(**PAIRS, beta=0.2)
    assert loss.chosen_rewards.tolist() == pytest.approx([0.1, 0.0])
    assert loss.rejected_rewards.tolist() == pytest.approx([0.0, 0.4])
    assert loss.losses.tolist() == pytest.approx([math.log(1 + math.exp(-0.1)), math.log(1 + math.exp(0.4))])


def test_ipo_by_hand():
    # margins of log-ratios 0.5 and -2, to be 1 / (2 * 0.2) = 2.5
    loss = ipo_loss(**PAIRS, beta=0.2)
    assert loss.losses.tolist() == pytest.approx([(0.5 - 2.5) ** 2, (-2 - 2.5) ** 2])
    assert loss.chosen_rewards.tolist() == pytest.approx([0.1, 0.0])


def test_bradley_terry_by_hand():
    scores = {"chosen_scores": torch.tensor([1.0, 0.0]), "rejected_scores": torch.tensor([0.0, 3.0])}
    assert bradley_terry_loss(**scores).losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), 3.04858735])


def test_a_policy_equal_to_its_reference_has_loss_log_2():
    equal = dict.fromkeys(PAIRS, torch.tensor([-7.0]))
    assert dpo_loss(**equal, beta=3.0).losses.tolist() == pytest.approx([math.log(2)])


def test_losses_of_extreme_margins_stay_finite():
    far = {
        "chosen_log_probs": torch.tensor([-1e5, 0.0]),
        "rejected_log_probs": torch.tensor([0.0, -1e5]),
        "chosen_ref_log_probs": torch.zeros(2),
        "rejected_ref_log_probs": torch.zeros(2),
    }
    assert dpo_loss(**far, beta=1.0).losses.tolist() == [1e5, 0.0]


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_slopes_are_the_gradient_of_the_mean_loss(name):
    loss = PREFERENCE_LOSSES[name]
    sums = torch.stack([PAIRS["chosen_log_probs"], PAIRS["rejected_log_probs"]], dim=1)
    references = {key: PAIRS[key] for key in ("chosen_ref_log_probs", "rejected_ref_log_probs")}
    at, slopes = slopes_of(loss, sums, beta=0.3, **references)
    assert torch.equal(at.losses, loss(**PAIRS, beta=0.3).losses)
    for pair in range(2):
        for side in range(2):
            step = torch.zeros_like(sums)
            step[pair, side] = 1e-6
            up, down = (slopes_of(loss, sums + s, beta=0.3, **references)[0].losses.mean() for s in (step, -step))
            assert slopes[pair, side].item() == pytest.approx(float(up - down) / 2e-6, rel=1e-6, abs=1e-8)


def test_slopes_of_scores_by_hand():
    _, slopes = slopes_of(bradley_terry_loss, torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    first_slope = 1 / (1 + math.exp(1)) / 2  # probability that it is not preferred, averaged over two pairs
    assert slopes.flatten().tolist() == pytest.approx([-first_slope, first_slope, -0.25, 0.25])


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_a_beta_not_above_0_is_rejected(beta):
    with pytest.raises(AlgorithmError, match="must be above 0"):
        dpo_loss(**PAIRS, beta=beta)
