import pytest

from hybridflow.trainers import pass_at_k
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
def test_pass_at_k_is_the_chance_that_k_of_the_samples_hold_a_correct_one(num_samples, num_correct, k, chance):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(chance)


def test_powers_of_two_reach_up_to_the_limit():
    assert powers_of_two(1) == [1]
    assert powers_of_two(6) == [1, 2, 4]
    assert powers_of_two(8) == [1, 2, 4, 8]


def test_a_score_of_one_or_more_is_correct():
    assert validation_metrics(samples("a", [0.0], [0.5], [1.0], [2.5]), group_size=1) == {
        "val/score/mean": 1.0,
        "val/accuracy": 0.5,
        "val/a/score/mean": 1.0,
        "val/a/accuracy": 0.5,
    }


def test_several_samples_give_pass_at_k_overall_and_for_each_source():
    rows = samples("a", [1.0, 0.0], [0.0, 0.0]) + samples("b", [1.0, 1.0], first=2)
    metrics = validation_metrics(rows, group_size=2)
    assert metrics["val/a/pass@1"] == 0.25
    assert metrics["val/a/pass@2"] == 0.5
    assert metrics["val/b/pass@1"] == metrics["val/b/pass@2"] == 1.0
    assert metrics["val/pass@1"] == metrics["val/accuracy"] == 0.5
    assert metrics["val/pass@2"] == pytest.approx(2 / 3)
