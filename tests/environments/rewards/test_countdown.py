import numpy as np
import pytest

from hybridflow.environments.rewards import countdown_reward
from hybridflow.errors import RewardError

TRUTH = {"target": 98, "numbers": [44, 19, 35]}


def score(solution: str, truth: object = TRUTH) -> float:
    return countdown_reward(data_source="countdown", solution_str=solution, ground_truth=truth, extra_info={})


def test_the_last_answer_scores_one_if_it_solves_the_problem():
    for solution in (
        *("<answer>44 + 19 + 35</answer>", "I try <answer>44</answer>, no: <answer>(35+19)+44</answer> done"),
        *("<answer>\n 44 + (19 + 35) = 98 \n</answer></answer>", "<answer>44<answer>44 + 19 + 35</answer>"),
    ):
        assert score(solution) == 1.0, solution


def test_other_responses_score_zero_without_an_error():
    answers = (
        *("", "98", "44 + 19 - 35", "44 + 19 + 35 + 35 - 35", "44 + 54", "44 + 19 + 35 = 99", "98 = 44 + 19 + 35"),
        *("44 + 19 + 35 = 98 = 98", "44 / (35 - 35) + 19", "__import__('os').system('true')", "(" * 10_000),
        "44 + 19 + 35</answer> or rather <answer>44",
    )
    for solution in (
        *("", "44 + 19 + 35", "<answer>44 + 19 + 35", "44 + 19 + 35</answer>", "<answer>" * 200_000),
        *(f"<answer>{answer}</answer>" for answer in answers),
    ):
        assert score(solution) == 0.0, solution[:100]


def test_division_is_exact_and_repeated_numbers_are_counted():
    assert score("<answer>1 / 3 * 6</answer>", {"target": 2, "numbers": [1, 3, 6]}) == 1.0
    assert score("<answer>5 / 2 - 2</answer>", {"target": 0, "numbers": [5, 2, 2]}) == 0.0
    assert score("<answer>2 + 2</answer>", {"target": 4, "numbers": [2, 2]}) == 1.0
    assert score("<answer>2 + 2</answer>", {"target": 4, "numbers": [2]}) == 0.0


def test_numbers_may_be_an_array_and_bad_ground_truth_is_an_error():
    assert score("<answer>44+19+35</answer>", {"target": np.int64(98), "numbers": np.array([44, 19, 35])}) == 1.0
    for truth in ("98", None, {"target": 98}, {"target": 98, "numbers": 3}, {"target": 9.5, "numbers": [1]}):
        with pytest.raises(RewardError, match="must look like"):
            score("<answer>1</answer>", truth)
