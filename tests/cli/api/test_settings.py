from pathlib import Path

import numpy as np
import pytest

from hybridflow.cli.api.settings import overrides, recipe_files
from hybridflow.config import load_config
from hybridflow.errors import ConfigError


def test_settings_are_keys_with_dots_or_tables():
    found = overrides({"trainer.total_steps": 5, "actor": {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}}})
    assert found == ["trainer.total_steps=5", "actor.optimizer.lr=0.0001", "actor.optimizer.betas=[0.9, 0.95]"]
    config = load_config(None, overrides({"reward": {"weights": {"a": 1.0}, "function": "a.py:f"}, "trainer": {}}))
    assert config.reward.weights == {"a": 1.0}


def test_values_of_numpy_and_paths_are_plain():
    found = overrides({"trainer.seed": np.int64(3), "data.train_files": [Path("a b"), "c"], "lora.rank": True})
    assert found == ["trainer.seed=3", 'data.train_files=["a b", "c"]', "lora.rank=true"]
    assert load_config(None, overrides({"model.path": 'a"\nb'})).model.path == 'a"\nb'


def test_a_value_that_toml_lacks_and_an_unknown_key_are_errors():
    with pytest.raises(ConfigError, match=r"trainer\.seed=<object .* is invalid: .*expected a number"):
        overrides({"trainer.seed": object()})
    with pytest.raises(ConfigError, match=r"trainer\.total_step"):
        load_config(None, overrides({"trainer": {"total_step": 3}}))


def test_recipes_are_named_or_files():
    (dapo,) = recipe_files("dapo")
    assert load_config([dapo]).algorithm.filter_groups
    assert recipe_files("dr-grpo")[0].name == "dr_grpo.toml"
    assert recipe_files(["grpo", "mine/own.toml"])[1] == Path("mine/own.toml")
    assert recipe_files(None) == []
    with pytest.raises(ConfigError, match=r"recipe='dapoo' is unknown; expected a file, or one of cispo,"):
        recipe_files("dapoo")
