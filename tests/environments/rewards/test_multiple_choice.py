import numpy as np
import pytest

from hybridflow.environments.rewards import chosen_letter, multiple_choice_reward
from hybridflow.errors import RewardError

CHOICES = {"choices": ["red", "green", "blue", "none"]}


def score(solution: str, truth: object = "B", extra_info: object = None) -> float:
    return multiple_choice_reward(
        data_source="multiple_choice", solution_str=solution, ground_truth=truth, extra_info=extra_info
    )


STATED = [
    *("B", " (b). ", "**B**", "<answer>B</answer>", "<answer> (B) green </answer>", "<answer>b</answer>"),
    *("<answer>B. green</answer>", r"so $\boxed{B}$.", r"\boxed{\text{(B)}}", r"\boxed{\textbf{B}}"),
    *("Answer: (B)", "Answer: b", "**Answer:** B", "**Answer: B**", "The correct answer is B."),
    *("The answer is B because grass is green.", "The answer is option B", "Answer:\n\nB", "The correct choice: B"),
    *("The answer is: (b), as grass is green.", "The answer is A. No: the answer is B.", "The answer should be B"),
    *("<answer>A</answer> or rather <answer>B</answer>", r"The answer is A, or \boxed{B}", "The answer is clearly B"),
    *(r"\boxed{A} no, the answer is B", "Answer: B\n\nNote that answer C is a distractor.", "Final answer B"),
    *("The answer is B, not answer A.", "the answer to this question is B", "Answer: $B$"),
]
NOT_STATED = [
    *("", "A", "Plan B is good", "B is a letter, and so is C", "BB", "The answer is not B"),
    *("The answer is Bob", "The answer is B-complex", "<answer>Bob</answer>", "<answer>B or C</answer>"),
    *("<answer>B</answer> no, <answer>blue</answer>", "<answer>B", "The answer is B. No: the answer is C."),
    *(r"\boxed{AB}", r"\boxed{}"),
]


def test_the_last_stated_answer_counts():
    for solution in STATED + NOT_STATED:
        assert score(solution) == score(solution, "B", CHOICES) == (solution in STATED), solution
    assert chosen_letter("The answer is not B") is None
    assert chosen_letter("An answer (C) would be wrong") == "C"


def test_one_letter_words_are_not_answers():
    for solution in ("A good idea", "The answer is A good idea", "I think", "The answer is I do not know"):
        assert score(solution, "A") == score(solution, "I") == 0.0


def test_ground_truth_may_be_an_index_if_the_choices_are_known():
    assert score("B", 1, CHOICES) == 1.0
    assert score("B", np.int64(1), {"choices": np.array(["red", "green"], dtype=object)}) == 1.0
    assert score("A", 1, CHOICES) == 0.0
    for truth in ("b", "(B)", "B.", r"\boxed{B}", "$B$"):
        assert score("B", truth, CHOICES) == 1.0


def test_a_letter_beyond_the_choices_is_not_an_answer():
    assert score("The answer is B. The answer is Z.", "B", CHOICES) == 1.0
    assert score("<answer>B</answer><answer>Z</answer>", "B", CHOICES) == 0.0


@pytest.mark.parametrize(
    ("truth", "extra_info", "message"),
    [
        ("BC", None, "must be a letter from A to Z, got 'BC'"),
        (None, CHOICES, "must be a letter from A to D or an index from 0 to 3, got None"),
        (1, {}, r"got 1\. An index needs extra_info=\{'choices'"),
        (4, CHOICES, "an index from 0 to 3, got 4"),
        (True, CHOICES, "got True"),
        ("E", CHOICES, "a letter from A to D"),
        ("A", {"choices": "red, green"}, "must be a list of 1 to 26 choices"),
        ("A", {"choices": {"text": ["red"], "label": ["A"]}}, "must be a list of 1 to 26 choices"),
    ],
)
def test_ground_truth_must_be_one_of_the_choices(truth, extra_info, message):
    with pytest.raises(RewardError, match=message):
        score("B", truth, extra_info)


def test_a_vote_is_the_letter():
    assert chosen_letter("Answer: (c)") == "C"
    assert chosen_letter("I do not know") is None
    assert chosen_letter("Answer: (C)", 2) is None


@pytest.mark.timeout(120)
def test_a_long_response_is_parsed_in_linear_time():
    for text in ("answer " * 100_000, "answer is" + " " * 500_000, "<answer>" * 100_000, "(" * 500_000, "*" * 500_000):
        assert score(text) == 0.0
