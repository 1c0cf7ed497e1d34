from pathlib import Path

import pytest
import torch

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES, ppo_policy_loss
from hybridflow.config import ActorConfig, AlgorithmConfig, Config, RewardConfig, load_config
from hybridflow.errors import ConfigError
from hybridflow.workers.algorithm_functions import advantage_estimator, keys_without_effect, policy_loss

RECIPES = Path(__file__).parents[2] / "recipes"

USER = """
import torch

def half_the_score(*, scores, group_ids, gamma, factor=0.5):
    return (gamma * factor * scores)[:, None], scores[:, None]

def needs_a_temperature(*, scores, temperature):
    ...

def misspelled(*, score, group_id, gama):
    ...

def plain(*, log_probs, advantages, response_mask, clip_ratio_low, sharpness=2.0):
    return -advantages * log_probs * sharpness
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def with_advantage(name: str, **kwargs) -> Config:
    return Config(algorithm=AlgorithmConfig(advantage=name, advantage_kwargs=kwargs, gamma=0.5))


def test_columns_are_the_arguments_in_the_glossary_and_parameters_the_others():
    assert advantage_estimator(with_advantage("grpo")).columns == ("scores", "group_ids")
    assert policy_loss(Config()).columns == ("old_log_probs", "advantages", "response_mask")
    config = Config(actor=ActorConfig(clip_ratio_low=0.1, clip_ratio_dual=5.0))
    assert policy_loss(config).function is ppo_policy_loss
    assert policy_loss(config).parameters == {"clip_ratio_dual": 5.0, "clip_ratio_high": 0.2, "clip_ratio_low": 0.1}
    assert advantage_estimator(with_advantage("pass@k", k=2)).parameters == {"k": 2}
    weighted = Config(algorithm=AlgorithmConfig(advantage="gdpo"), reward=RewardConfig(weights={"a": 1.0, "b": 0.5}))
    assert advantage_estimator(weighted).parameters == {"component_weights": (1.0, 0.5)}


def test_built_in_functions_need_only_columns_and_keys():
    for name in ADVANTAGES:
        assert advantage_estimator(with_advantage(name)).columns
    for name in POLICY_LOSSES:
        assert policy_loss(Config(actor=ActorConfig(policy_loss=name))).columns


def test_a_users_function_gets_the_arguments_of_its_signature(user_file):
    estimator = advantage_estimator(with_advantage(f"{user_file}:half_the_score", factor=4.0))
    assert estimator.columns == ("scores", "group_ids")
    advantages, _ = estimator(scores=torch.tensor([1.0, 3.0]), group_ids=torch.tensor([0, 0]))
    assert advantages.tolist() == [[2.0], [6.0]]
    loss = policy_loss(Config(actor=ActorConfig(policy_loss=f"{user_file}:plain", clip_ratio_low=0.3)))
    assert loss.columns == ("advantages", "response_mask")
    assert loss.parameters == {"clip_ratio_low": 0.3}


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "grpo",
            {"k": 2},
            "algorithm.advantage_kwargs.k: algorithm.advantage='grpo' has no such parameter; it has: eps",
        ),
        ("gae", {"gamma": 0.9}, r"advantage_kwargs.gamma is a separate key; set algorithm.gamma"),
        (
            "{file}:needs_a_temperature",
            {},
            r"takes temperature, which is neither a column .* or name a column of docs/data_proto.md",
        ),
        (
            "{file}:misspelled",
            {},
            r"takes score, group_id, gama \(did you mean 'scores' instead of 'score', 'group_ids' or .* instead of "
            r"'group_id', 'gamma' instead of 'gama'\?\), which is neither a column",
        ),
        (
            "{file}:half_the_score",
            {"facter": 1},
            r"has no such parameter \(did you mean 'factor' instead of 'facter'\?\); it has: factor",
        ),
        ("{file}:nothing", {}, "has no function 'nothing'; it has half_the_score, needs_a_temperature, misspelled"),
        ("{file}x:f", {}, "algorithm.advantage .*importing .* failed"),
    ],
)
def test_error_for_a_wrong_function_or_parameter_names_the_key(user_file, name, kwargs, message):
    with pytest.raises(ConfigError, match=message) as error:
        advantage_estimator(with_advantage(name.format(file=user_file), **kwargs))
    assert "rollout_log_probs" not in str(error.value)  # not all columns


def test_changed_keys_that_no_function_takes_are_named():
    def unused(*changes):
        return keys_without_effect(load_config(None, list(changes)))

    assert unused() == unused("algorithm.lam=0.9", "algorithm.advantage=gae", "actor.clip_ratio_high=0.3") == []
    assert unused("algorithm.lam=0.9", "algorithm.advantage=grpo") == [
        "algorithm.lam=0.9 has no effect: algorithm.advantage='grpo' has no such parameter."
    ]
    assert unused("actor.policy_loss=clip-cov", "actor.clip_ratio_low=0.1", "actor.clip_ratio_dual=none") == [
        f"actor.{key} has no effect: actor.policy_loss='clip-cov' has no such parameter."
        for key in ("clip_ratio_low=0.1", "clip_ratio_dual=None")
    ]


def test_no_recipe_sets_a_key_without_effect():
    recipes = sorted(RECIPES.rglob("*.toml"))
    assert recipes
    assert [(recipe, keys) for recipe in recipes if (keys := keys_without_effect(load_config(recipe)))] == []
