"""Reward functions whose parameters name what they get: of one sample or of a batch, here and in processes."""

from contextlib import nullcontext

import pytest

from hybridflow.environments.processes.arguments import (
    arguments_of,
    as_batch,
    check_names,
    check_signature,
    takes_batches,
    takes_names,
)
from hybridflow.environments.rewards import RewardScorer, load_reward_function
from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.runtime.declared_function import declared_function

PROMPT = [{"role": "user", "content": "2 + 2?"}]
SAMPLE = {
    "data_source": "sums",
    "solution_str": "4",
    "ground_truth": "four",
    "extra_info": {"level": 3, "level_name": "easy"},
    "prompt": PROMPT,
}
OTHER = {**SAMPLE, "solution_str": "5", "ground_truth": "five", "extra_info": {"level": 1, "answer": "V"}}
CLASSIC = {name: value for name, value in SAMPLE.items() if name != "prompt"}


def test_a_function_gets_what_its_parameters_name():
    def score(completion, answer, *, prompt, level, missing="default"): ...

    expected = {"completion": "4", "answer": "four", "prompt": PROMPT, "level": 3}
    assert arguments_of(score, SAMPLE, {}) == expected
    assert arguments_of(score, OTHER, {})["answer"] == "V"
    assert arguments_of(score, SAMPLE, {"missing": 1, "level": 9}) == expected | {"missing": 1, "level": 9}


def test_keyword_arguments_get_all_that_can_be_named():
    def score(completion, **everything): ...

    sample = {name: value for name, value in SAMPLE.items() if name != "solution_str"}
    named = {"completion": "4", "answer": "four", "level": 3, "level_name": "easy", "factor": 2}
    assert arguments_of(score, SAMPLE, {"factor": 2}) == sample | named


def test_a_function_for_a_batch_gets_lists_by_plurals_and_columns():
    def score(prompts, completions, answers, level, levels, level_names): ...

    assert takes_batches(score)
    named = {"prompts": [PROMPT, PROMPT], "completions": ["4", "5"], "answers": ["four", "V"]}
    columns = {"level": [3, 1], "levels": [3, 1], "level_names": ["easy", None]}
    assert arguments_of(score, as_batch([SAMPLE, OTHER]), {}) == named | columns

    def of_trl(completions, answer, **_): ...

    assert arguments_of(of_trl, as_batch([SAMPLE, OTHER]), {})["answer"] == ["four", "V"]


@pytest.mark.parametrize("kwargs", [{}, {"factor": 2}])
def test_the_four_arguments_are_passed_as_they_are(kwargs):
    def one(data_source, solution_str, ground_truth, extra_info, factor=1): ...

    def batch(data_sources, solution_strs, ground_truths, extra_infos, factor=1): ...

    def anything(**_): ...

    assert not any(map(takes_names, (one, batch, anything, print)))
    for function in (one, anything):
        assert not takes_batches(function)
        assert arguments_of(function, CLASSIC, kwargs) == CLASSIC | kwargs
    assert arguments_of(batch, as_batch([CLASSIC]), kwargs) == as_batch([CLASSIC]) | kwargs


def test_a_parameter_that_names_nothing_or_is_a_part_of_the_sample_is_an_error():
    def score(completion, dificulty): ...

    def replacing(completion, prompt): ...

    with pytest.raises(TypeError, match="'dificulty' names nothing of the sample, which has answer, level, level_name"):
        arguments_of(score, SAMPLE, {})
    with pytest.raises(TypeError, match=r"reward.kwargs.prompt is a part of the sample"):
        arguments_of(replacing, SAMPLE, {"prompt": "mine"})


FUNCTIONS = """
def one(completion, answer, prompt, level, bonus=0.0):
    return float(completion == answer) + level + bonus + 100 * len(prompt)

def batch(completions, answers, prompts, level, bonus=0.0):
    return [one(*row, bonus) for row in zip(completions, answers, prompts, level)]

def wrong(completion, nothing): ...
"""

COLUMNS = {
    "solution_texts": ["4", "5"],
    "data_sources": ["sums"] * 2,
    "ground_truths": ["4", "4"],
    "extra_infos": [{"level": 10}, {"level": 20}],
    "raw_prompts": [PROMPT, PROMPT * 2],
}


@pytest.mark.runs
@pytest.mark.own_run("grpo: its reward function takes the four arguments")
@pytest.mark.parametrize(("name", "bonus"), [("one", 0.0), ("batch", 0.5)])
def test_scores_are_the_same_in_this_process_and_in_others(file, runner, name, bonus):
    kwargs = {"bonus": bonus} if bonus else {}
    for scorer in (RewardScorer(f"{file}:{name}", kwargs=kwargs), RewardScorer(runner=runner(name, kwargs=kwargs))):
        assert scorer.score(**COLUMNS).scores.tolist() == [111.0 + bonus, 220.0 + bonus]


def test_wrong_names_are_errors_of_samples_wrong_settings_of_the_start(file):
    with pytest.raises(RewardError, match="function wrong raised TypeError: its parameter 'nothing' names nothing"):
        RewardScorer(f"{file}:wrong").score(**COLUMNS)
    with pytest.raises(RewardConfigError, match=r"is one\(completion, answer, prompt, level, bonus=0.0\)"):
        load_reward_function(f"{file}:one", {"bonnus": 1.0})


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ("completion, anwser", "'anwser' names nothing of .*did you mean 'answer'"),
        ("completions, levls", "'levls' names nothing of .*did you mean 'levels'"),
        ("completon, answer", r"none is the response \(did you mean 'completion' instead of 'completon'\?\)"),
        ("response", "none is the response; name it completion"),
        ("completion, level, *, other, **_", "'other' names nothing"),
        ("completion, level, answer='', *, other=[1], bonus=1.0, **_", None),
        ("completion, answer", "'answer', but in all rows: 'answer' is missing; the row has level, other"),
        ("solution_str, **_", None),
        ("**_", None),
    ],
)
def test_parameters_are_checked_without_running_the_file(tmp_path, declared, problem):
    (tmp_path / "own.py").write_text(f"raise SystemExit\nasync def score({declared}) -> float: ...\n")
    function = declared_function(f"{tmp_path}/own.py:score")
    samples = [
        {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": info}
        for info in ({"level": 1, "other": 2}, {"level": 1})
    ]
    with pytest.raises(RewardConfigError, match=problem) if problem else nullcontext():
        check_signature(function, "score", {"bonus": 1.0} if "bonus" in declared else {})
        check_names(function, "score", {}, samples)


def test_only_a_plain_function_of_a_file_is_read_without_running_it(file, tmp_path):
    (tmp_path / "own.py").write_text("@decorated\ndef score(): ...\nother = print\n")
    (tmp_path / "broken.py").write_text("def score(")
    names = ("own.py:score", "own.py:other", "own.py:none", "broken.py:score", "none.py:score", "package.module:score")
    assert {declared_function(f"{tmp_path}/{name}" if ".py" in name else name) for name in names} == {None}
