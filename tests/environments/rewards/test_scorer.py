import logging
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from hybridflow.environments.rewards import RewardScorer
from hybridflow.errors import RewardError

COUNTDOWN = {"target": 5, "numbers": [2, 3]}


def test_data_source_chooses_the_function_of_each_row_by_default():
    result = RewardScorer().score(
        solution_texts=["#### 72", "<answer>2 + 3</answer>", "<answer>12</answer>", "#### 71"],
        data_sources=["openai/gsm8k", "countdown", "multiplication", "openai/gsm8k"],
        ground_truths=["72", COUNTDOWN, "12", "72"],
    )
    assert result.scores.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert result.scores.dtype == torch.float32
    assert (result.extras, result.failed.tolist()) == ([{}] * 4, [False] * 4)


def test_a_user_function_gets_the_four_keyword_arguments():
    seen = []

    def reward(**row):
        seen.append(row)
        return 0.5

    RewardScorer(reward).score(["s"], ["mine"], [{"a": 1}], [{"index": 7}])
    RewardScorer(reward).score(["s"], ["mine"], ["1"])
    assert seen[0] == {"data_source": "mine", "solution_str": "s", "ground_truth": {"a": 1}, "extra_info": {"index": 7}}
    assert seen[1]["extra_info"] == {}


def test_numbers_of_many_types_are_scores():
    of_libraries = (np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0))
    for value in (1, 1.0, True, Fraction(1), {"score": 1}, *of_libraries):
        assert RewardScorer(lambda value=value, **row: value).score(["s"], ["x"], ["1"]).scores.tolist() == [1.0]


def test_other_numbers_of_a_dict_become_extras():
    def reward(solution_str, **row):
        result = {"score": 1.0, "format": solution_str == "a", "pred": solution_str, "answer": 10**20 + 1}
        return result if solution_str == "a" else {**result, "length": np.int64(3)}

    result = RewardScorer(reward).score(["a", "b", "c"], ["x"] * 3, ["1"] * 3)
    assert result.extras == [{"format": 1.0}, {"format": 0.0, "length": 3.0}, {"format": 0.0, "length": 3.0}]
    assert result.answers == ["100000000000000000001"] * 3


def test_a_function_gets_copies_of_its_arguments():
    def reward(ground_truth, extra_info, **row):
        ground_truth["numbers"].pop()
        extra_info["seen"] = True
        return len(ground_truth["numbers"])

    truth, info = {"numbers": [1, 2, 3]}, {}
    assert RewardScorer(reward).score(["a", "b"], ["x"] * 2, [truth] * 2, [info] * 2).scores.tolist() == [2.0, 2.0]
    assert (truth, info) == ({"numbers": [1, 2, 3]}, {})


BAD_RESULTS = [
    None, float("nan"), float("inf"), "1.0", [1.0], [1.0, 2.0], np.array([1.0]), torch.ones(2), 1j, 1e39, 10**400,
    {},    {"score": None}, {"score": "1"}, {"score": float("nan")}, {"score": 1.0, "length": float("nan")},
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_RESULTS, ids=[str(i) for i in range(len(BAD_RESULTS))])
def test_an_invalid_score_stops_and_shows_the_sample_and_the_value(value):
    def my_reward(**row):
        return value

    with pytest.raises(RewardError) as error:
        RewardScorer(my_reward).score(["because 7"], ["mine"], [{"target": 7}], raw_prompts=["what is 7?"])
    message = str(error.value)
    assert "reward function my_reward returned " in message
    for part in ("data_source: 'mine'", "prompt: 'what is 7?'", "solution: 'because 7'", "ground_truth: {'target': 7}"):
        assert part in message
    assert RewardScorer(my_reward, on_error="zero").score(["s"], ["x"], ["1"]).num_errors == 1


def test_an_exception_stops_and_shows_the_sample():
    def reward(solution_str, **row):
        return float(solution_str)

    with pytest.raises(RewardError, match=r"raised ValueError: could not convert.*The sample:") as error:
        RewardScorer(reward).score(["1", "x" * 5000], ["mine"] * 2, ["1"] * 2)
    assert isinstance(error.value.__cause__, ValueError)
    assert len(str(error.value)) < 6500
    assert str(error.value).endswith('set reward.on_error="zero" to give such samples the score reward.error_score.')
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_on_error_zero_counts_scores_and_logs_failures(caplog):
    def reward(solution_str, **row):
        if solution_str == "exit":
            raise SystemExit(3)
        return {"score": 1 / int(solution_str), "ok": 1}

    with caplog.at_level(logging.WARNING):
        result = RewardScorer(reward, on_error="zero", error_score=-1.0).score(["2", "0", "exit"], ["x"] * 3, ["1"] * 3)
    assert result.scores.tolist() == [0.5, -1.0, -1.0]
    assert result.extras == [{"ok": 1.0}, {}, {}]
    assert result.failed.tolist() == [False, True, True]
    assert result.num_errors == 2
    assert "2 of 3 rewards failed and score -1.0. The first:" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_unknown_data_source_is_an_error_with_any_on_error():
    with pytest.raises(RewardError, match=r"'poems'; known are .*countdown, .*openai/gsm8k. Set reward.function="):
        RewardScorer(on_error="zero").score(["s"], ["poems"], ["1"])


def test_invalid_arguments_are_rejected():
    with pytest.raises(RewardError, match="2 solution_texts, but 1 data_sources, 2 ground_truths"):
        RewardScorer().score(["a", "b"], ["x"], ["1", "2"])
    with pytest.raises(RewardError, match="on_error='ignore' is not one of stop, zero"):
        RewardScorer(on_error="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RewardError, match="error_score=nan"):
        RewardScorer(error_score=float("nan"))
    with pytest.raises(RewardError, match="is called with the keyword arguments"):
        RewardScorer(lambda solution_str: 1.0)


def test_an_empty_batch_has_no_scores_and_a_function_may_be_a_path(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def f(solution_str, **row):\n    return len(solution_str)\n")
    scorer = RewardScorer(f"{path}:f")
    assert scorer.score(["abc"], ["x"], [None]).scores.tolist() == [3.0]
    assert scorer.score([], [], []).scores.shape == (0,)
    assert RewardScorer("").score(["#### 1"], ["openai/gsm8k"], ["1"]).scores.tolist() == [1.0]
