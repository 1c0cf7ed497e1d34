import pytest
import torch

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES, ppo_policy_loss
from hybridflow.config import ActorConfig, AlgorithmConfig, Config, RewardConfig
from hybridflow.errors import ConfigError
from hybridflow.workers.algorithm_functions import advantage_estimator, policy_loss

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


def test_columns_are_the_arguments_that_the_glossary_knows():
    assert advantage_estimator(with_advantage("grpo")).columns == ("scores", "group_ids")
    assert policy_loss(Config()).columns == ("old_log_probs", "advantages", "response_mask")


def test_parameters_are_the_arguments_that_are_keys_of_the_section_and_those_given_beside_the_name():
    config = Config(actor=ActorConfig(clip_ratio_low=0.1, clip_ratio_dual=5.0))
    assert policy_loss(config).function is ppo_policy_loss
    assert policy_loss(config).parameters == {"clip_ratio_dual": 5.0, "clip_ratio_high": 0.2, "clip_ratio_low": 0.1}
    assert advantage_estimator(with_advantage("pass@k", k=2)).parameters == {"k": 2}
    weighted = Config(algorithm=AlgorithmConfig(advantage="gdpo"), reward=RewardConfig(weights={"a": 1.0, "b": 0.5}))
    assert advantage_estimator(weighted).parameters == {"component_weights": (1.0, 0.5)}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_of_the_table_needs_columns_and_keys_only(name):
    assert advantage_estimator(with_advantage(name)).columns


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_of_the_table_needs_columns_and_keys_only(name):
    assert policy_loss(Config(actor=ActorConfig(policy_loss=name))).columns


def test_an_estimator_of_the_users_is_called_with_what_its_signature_names(user_file):
    estimator = advantage_estimator(with_advantage(f"{user_file}:half_the_score", factor=4.0))
    assert estimator.columns == ("scores", "group_ids")
    advantages, _ = estimator(scores=torch.tensor([1.0, 3.0]), group_ids=torch.tensor([0, 0]))
    assert advantages.tolist() == [[2.0], [6.0]]


def test_a_loss_of_the_users_is_called_with_what_its_signature_names(user_file):
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
        ("gae", {"gamma": 0.9}, r"advantage_kwargs.gamma is a key of its own; set algorithm.gamma"),
        ("{file}:needs_a_temperature", {}, "takes temperature, which is neither a column .* give it in algorithm.adv"),
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
def test_what_does_not_fit_is_said_with_the_key(user_file, name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        advantage_estimator(with_advantage(name.format(file=user_file), **kwargs))


def test_unknown_parameter_does_not_list_all_columns(user_file):
    with pytest.raises(ConfigError) as error:
        advantage_estimator(with_advantage(f"{user_file}:needs_a_temperature"))
    assert "rollout_log_probs" not in str(error.value)
    assert "or name a column of docs/data_proto.md" in str(error.value)
