import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import gsm8k_flexible_reward, gsm8k_reward


def strict(solution: str, truth: object = "72") -> float:
    return gsm8k_reward(data_source="openai/gsm8k", solution_str=solution, ground_truth=truth, extra_info={})


def flexible(solution: str, truth: object = "72") -> float:
    return gsm8k_flexible_reward(data_source="openai/gsm8k", solution_str=solution, ground_truth=truth, extra_info={})


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("48 + 24 = 72\n#### 72", "72"),
        ("####72", "72"),
        ("#### 72.", "72"),
        ("#### 72.0 clips", "72"),
        ("#### 1 and no: #### 72", "72"),
        ("#### $1,450", "1450"),
        ("#### 1450.00", "1,450"),
        ("#### -5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5.", "-5"),
        ("#### .5", "0.5"),
        ("#### +7", 7),
    ],
)
def test_strict_reads_the_number_after_the_last_mark(solution, truth):
    assert strict(solution, truth) == 1.0


def test_strict_scores_zero_without_the_mark():
    for solution in (
        "",
        "72",
        "the answer is 72",
        "#### 73",
        "#### x 72",
        "72 ####",
        "#### 72 #### 73",
        "### 72",
        "#### 7 2",
    ):
        assert strict(solution) == 0.0, solution


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("so the answer is 72.", "72"),
        ("#### 72", "72"),
        ("it costs $1,450, in all", "1450"),
        ("from 80-8", "8"),
        ("which is -8", "-8"),
        ("lists 1,2,3", "3"),
        ("(72)", "72"),
        ("**72**", "72"),
    ],
)
def test_flexible_reads_the_last_number_of_the_text(solution, truth):
    assert flexible(solution, truth) == 1.0


def test_flexible_scores_zero_for_a_wrong_or_missing_number():
    for solution in ("", "none", "72 or 73", "1" * 5000, "٧٢"):
        assert flexible(solution) == 0.0


def test_ground_truth_must_be_a_number():
    for truth in ("many", None, ""):
        with pytest.raises(RewardError, match="must be a number"):
            strict("#### 72", truth)
