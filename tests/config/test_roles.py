import pytest

from hybridflow.config import load_config
from hybridflow.config.roles import ROLES

ON_RAY = ["controller.backend=ray", "placement.pools={learn=[1],gen=[1]}", "placement.roles.rollout=gen"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["actor_rollout", "reward"]),
        (ON_RAY, ["actor_rollout", "rollout", "reward"]),
        (["algorithm.advantage=gae"], ["actor_rollout", "reward", "critic"]),
        (["algorithm.kl_in_loss=true"], ["actor_rollout", "reward", "reference"]),
        (["algorithm.kl_in_loss=true", "lora.rank=8"], ["actor_rollout", "reward"]),
        (["teacher.model_path=m", "teacher.loss=reverse_kl"], ["actor_rollout", "reward", "teacher"]),
    ],
)
def test_roles_with_a_worker_group_follow_from_the_configuration(overrides, names):
    config = load_config(None, overrides)
    assert [name for name, traits in ROLES.items() if traits.has_group(config)] == names


@pytest.mark.parametrize(("overrides", "reward"), [([], "none"), (["reward.model_path=m"], "sharded")])
def test_models_of_roles_follow_from_the_configuration(overrides, reward):
    config = load_config(None, overrides)
    models = {name: traits.model(config) for name, traits in ROLES.items()}
    assert models == dict.fromkeys(ROLES, "sharded") | {"rollout": "engine", "reward": reward}


def test_each_role_that_cannot_be_offloaded_has_a_reason():
    config = load_config(None, [])
    without = [
        traits for traits in ROLES.values() if not (traits.has_group(config) and traits.has_sharded_model(config))
    ]
    assert [bool(traits.reason) for traits in without if not traits.offline] == [True] * 5
