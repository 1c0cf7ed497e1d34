import pytest

from hybridflow.config import load_config
from hybridflow.config.roles import ROLES, has_own_pool, ranks_of

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


@pytest.mark.parametrize(
    ("overrides", "own", "ranks"),
    [
        ([], False, 1),
        (["controller.num_workers=4"], False, 4),
        (["controller.backend=ray", "placement.pools={main=[1],score=[2]}", "placement.roles.reward=score"], True, 2),
        (
            [
                *("controller.backend=ray", "placement.pools={main=[1],other=[2]}", "algorithm.kl_in_loss=true"),
                "placement.roles={reward='other',reference='other'}",
            ],
            False,
            2,
        ),
    ],
)
def test_a_role_has_its_own_pool_if_no_other_role_is_there(overrides, own, ranks):
    config = load_config(None, overrides)
    assert has_own_pool(config, "reward") is own
    assert ranks_of(config, "reward") == ranks
