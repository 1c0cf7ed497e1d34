import pytest

from hybridflow.environments.rewards import format_score, length_score, shaped_reward
from hybridflow.errors import RewardError

WRONG = [
    *("<think>a</think> so <answer>c</answer>", "<think>a</think><answer>c</answer> done", "<think>a</think>", ""),
    *("<answer>c</answer><think>a</think>", "<think>a</think><think>b</think><answer>c</answer>"),
    *("<think>a<think>b</think><answer>c</answer>", "<think>a</think><answer>c</answer><answer>d</answer>"),
]


def test_the_default_format_is_one_thought_and_one_answer():
    for text in ("<think>a\nb</think><answer>c</answer>", " <think></think>\n\n<answer></answer>\n"):
        assert format_score(text) == 1.0
    assert {text: format_score(text) for text in WRONG} == dict.fromkeys(WRONG, 0.0)


def test_a_pattern_must_match_the_whole_text():
    assert format_score("#### 72", r"####\s\d+") == 1.0
    assert format_score("#### 72.", r"####\s\d+") == 0.0
    assert format_score("a\nb", "a.b") == 1.0


@pytest.mark.parametrize("pattern", ["(", "[a", "a{2,1}", None])
def test_an_invalid_regular_expression_is_an_error(pattern):
    with pytest.raises(RewardError, match="is not a regular expression"):
        format_score("text", pattern)


@pytest.mark.timeout(120)
def test_a_long_text_never_matches_and_the_default_is_linear():
    assert format_score("a" * 200_000, "a*") == 1.0
    assert format_score("a" * 200_001, "a*") == 0.0
    for text in ("<think>" * 28_000, "<think>" + "<" * 190_000, " " * 200_000, "<think></think>" + " " * 190_000):
        assert all(format_score(text) == 0.0 for _ in range(100))  # a quadratic time would be minutes


def test_length_score_is_one_up_to_a_bound_then_decays_linearly():
    for length, expected in ((0, 1.0), (100, 1.0), (125, 0.75), (150, 0.5), (200, 0.0), (10**9, 0.0)):
        assert length_score(length, 100, 200) == expected
    assert length_score(100, 100, 100) == 1.0
    assert length_score(101, 100, 100) == 0.0


@pytest.mark.parametrize("bounds", [(200, 100), (-1, 100), (0, float("inf")), (float("nan"), 1), ("0", 1)])
def test_invalid_length_bounds_are_an_error(bounds):
    with pytest.raises(RewardError, match="must be finite, at least 0, and in this order"):
        length_score(10, *bounds)


def shaped(solution, data_source="multiplication", truth: object = "6", **settings):
    return shaped_reward(
        data_source=data_source, solution_str=solution, ground_truth=truth, extra_info=None, **settings
    )


def test_shaped_reward_scores_correctness_format_and_length():
    right = "<think>2 * 3</think><answer>6</answer>"  # 38 characters
    assert shaped(right) == {"score": 1.0, "correct": 1.0, "format": 1.0, "length": 1.0}
    assert shaped("<answer>7</answer>") == {"score": 0.0, "correct": 0.0, "format": 0.0, "length": 1.0}
    halfway = {"score": 1.0, "correct": 1.0, "format": 0.0, "length": 0.5}
    assert shaped(right, pattern="x", max_chars=28, falls_to_zero_at=48) == halfway


def test_shaped_reward_reads_the_score_of_a_dict_and_rejects_an_unknown_source():
    assert shaped("no program", "code", {"tests": ["assert f(1) == 1"]})["correct"] == 0.0
    with pytest.raises(RewardError, match="no built-in reward function serves data_source 'poems'; known are"):
        shaped("x", "poems")
