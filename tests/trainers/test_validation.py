import math

import pytest

from hybridflow.trainers import majority_at_k, pass_at_k
from hybridflow.trainers.validation import powers_of_two, validation_metrics


def samples(source, *scores_of_prompts, first=0):
    return [
        {"index": first + index, "data_source": source, "score": score}
        for index, scores in enumerate(scores_of_prompts)
        for score in scores
    ]


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "chance"),
    [
        (4, 0, 2, 0.0),
        (4, 4, 2, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),
        (4, 2, 2, 5 / 6),  # of 6 pairs one misses both
        (4, 1, 4, 1.0),
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_pass_at_k_is_the_chance_of_a_correct_one_among_k(num_samples, num_correct, k, chance):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(chance)


def test_powers_of_two_reach_up_to_the_limit():
    assert [powers_of_two(limit) for limit in (1, 6, 8)] == [[1], [1, 2, 4], [1, 2, 4, 8]]


def test_a_score_of_one_or_more_is_correct():
    half_width = pytest.approx(1.96 * math.sqrt(1 / 3) / 2)  # the sample variance of 0, 0, 1, 1 is 1/3
    assert validation_metrics(samples("a", [0.0], [0.5], [1.0], [2.5]), group_size=1) == {
        "val/score/mean": 1.0,
        "val/accuracy": 0.5,
        "val/accuracy/ci95": half_width,
        "val/a/score/mean": 1.0,
        "val/a/accuracy": 0.5,
        "val/a/accuracy/ci95": half_width,
    }
    assert not any(name.endswith("ci95") for name in validation_metrics(samples("a", [0.0, 1.0]), group_size=2))


@pytest.mark.parametrize(
    ("answers", "correct", "majority"),
    [
        (["3", "3", "4"], [True, True, False], 1.0),
        (["3", "4", "4"], [True, False, False], 0.0),
        (["3", "4"], [True, False], 0.5),  # a tie
        (["3", "4", "5", None], [True, False, False, False], 1 / 3),
        ([None, None, "3"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_the_majority_is_the_most_frequent_answer(answers, correct, majority):
    assert majority_at_k(correct, answers) == pytest.approx(majority)


def test_the_majority_of_k_samples_is_a_mean_over_parts_of_them():
    correct, answers = [True, True, False, True, True], ["3", "3", "4", "3", "3"]
    assert majority_at_k(correct, answers, 2) == (1.0 + 0.5) / 2  # 3 3, 4 3; the last sample is in no part
    assert majority_at_k(correct, answers, 5) == majority_at_k(correct, answers) == 1.0


def test_maj_at_k_is_reported_if_answers_are_known():
    rows = samples("a", [1.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    assert "val/maj@3" not in validation_metrics(rows, group_size=3)
    for row, answer in zip(rows, ["x", "x", "y", "p", "p", "q"], strict=True):
        row["answer"] = answer
    metrics = validation_metrics(rows, group_size=3)
    assert metrics["val/maj@3"] == metrics["val/a/maj@3"] == 0.5
    assert metrics["val/maj@2"] == 0.5  # of the first two samples of each prompt
    assert metrics["val/pass@1"] == 0.5


def test_pass_at_k_is_reported_overall_and_for_each_source():
    rows = samples("a", [1.0, 0.0], [0.0, 0.0]) + samples("b", [1.0, 1.0], first=2)
    metrics = validation_metrics(rows, group_size=2)
    assert metrics["val/a/pass@1"] == 0.25
    assert metrics["val/a/pass@2"] == 0.5
    assert metrics["val/b/pass@1"] == metrics["val/b/pass@2"] == 1.0
    assert metrics["val/pass@1"] == metrics["val/accuracy"] == 0.5
    assert metrics["val/pass@2"] == pytest.approx(2 / 3)
