import pytest

from hybridflow.environments.rewards import multiplication_reward
from hybridflow.errors import RewardError


def test_the_last_answer_must_be_the_product():
    for solution in ("<answer>56088</answer>", "no <answer>1</answer> but <answer> 56,088. </answer>"):
        assert multiplication_reward("multiplication", solution, "56088", {}) == 1.0
    for answer in (
        "<answer>56087</answer>",
        "<answer>123 * 456</answer>",
        "<answer>56088</answer><answer></answer>",
        "56088",
    ):
        assert multiplication_reward("multiplication", answer, "56088", {}) == 0.0


def test_products_beyond_float_precision_compare_exactly():
    assert multiplication_reward("multiplication", "<answer>12193263113702179522374638011112635269</answer>",
                                 str(12193263113702179522374638011112635269)) == 1.0  # fmt: skip
    assert multiplication_reward("multiplication", "<answer>9007199254740993</answer>", "9007199254740992") == 0.0


def test_ground_truth_must_be_a_number():
    with pytest.raises(RewardError, match="must be a number"):
        multiplication_reward("multiplication", "<answer>1</answer>", "one")
