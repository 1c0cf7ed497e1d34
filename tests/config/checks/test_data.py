"""Values of the data, of validation and of rewards that another value makes wrong."""

import pytest

from hybridflow.config import load_config

CONTRADICTIONS = [
    ("reward.weights={a=1.0} reward.model_path=x", "reward.weights={'a': 1.0} needs the numbers of a reward"),
    ("reward.overlong_buffer=600", "reward.overlong_buffer=600 exceeds data.max_response_length=512"),
]


def test_validation_is_off_without_files_whatever_a_recipe_says():
    config = load_config("recipes/countdown_grpo.toml", ["data.val_files=[]"])
    assert config.trainer.val_every > 0
    assert config.data.val_files == ()


@pytest.mark.parametrize(("overrides", "problem"), CONTRADICTIONS)
def test_a_contradiction_of_the_data_shows_both_values_and_the_fix(only_problem, overrides, problem):
    assert problem in only_problem(overrides)
