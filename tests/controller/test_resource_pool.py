import pytest

from hybridflow.controller import ResourcePool, ResourcePoolManager, Role
from hybridflow.errors import ConfigError


def test_ranks_are_numbered_node_by_node():
    pool = ResourcePool(process_on_nodes=[2, 1, 3])
    assert pool.world_size == 6
    assert [pool.node(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [pool.local_rank(rank) for rank in range(6)] == [0, 1, 0, 0, 1, 2]
    assert [pool.local_world_size(rank) for rank in range(6)] == [2, 2, 1, 3, 3, 3]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        *((lambda shape=shape: ResourcePool(shape), "process_on_nodes=") for shape in ([], [0], [2, -1], [1.5])),
        (lambda: ResourcePool([1], max_colocate_count=0), "max_colocate_count=0"),
        (lambda: ResourcePoolManager({}), "resource_pool_spec is empty"),
        (lambda: ResourcePoolManager({"a": [1], "b": [1]}), "mapping is missing, but there are several pools"),
        (
            lambda: ResourcePoolManager({"global_pool": [1]}, {Role.Actor: "globl_pool"}),
            r"'globl_pool', the pool of Role\.Actor, is not.*did you mean 'global_pool'",
        ),
    ],
)
def test_pools_that_cannot_be_are_errors(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_each_role_gets_its_pool():
    manager = ResourcePoolManager(
        resource_pool_spec={"training": [4], "rollouts": [2, 2]},
        mapping={Role.Actor: "training", Role.Critic: "training", Role.Rollout: "rollouts"},
    )
    assert manager.get_resource_pool(Role.Rollout).process_on_nodes == [2, 2]
    assert manager.get_resource_pool(Role.Actor) is manager.get_resource_pool(Role.Critic)
    with pytest.raises(ConfigError, match=r"Role\.RewardModel has no resource pool"):
        manager.get_resource_pool(Role.RewardModel)


def test_all_roles_share_a_single_pool_without_a_mapping():
    manager = ResourcePoolManager({"global_pool": [2]})
    assert {manager.get_resource_pool(role).world_size for role in Role} == {2}


def test_pools_that_fit_the_gpus_are_accepted():
    spec, mapping = {"a": [4, 4], "b": [2]}, {Role.Actor: "a", Role.Rollout: "b"}
    assert ResourcePoolManager(spec, mapping, use_gpu=True, gpus_on_nodes=[4, 4, 2]).get_n_gpus() == 10


@pytest.mark.parametrize("gpus_on_nodes", [[8], [4, 4, 1], [2, 8], []])
def test_error_names_requested_and_available_gpus(gpus_on_nodes):
    spec, mapping = {"a": [4, 4], "b": [2]}, {Role.Actor: "a", Role.Rollout: "b"}
    with pytest.raises(ConfigError, match=r"requested .*a=\[4, 4\], b=\[2\].* the nodes have \["):
        ResourcePoolManager(spec, mapping, use_gpu=True, gpus_on_nodes=gpus_on_nodes)


def test_a_pool_of_cpu_processes_always_fits():
    assert ResourcePoolManager({"global_pool": [64]}, gpus_on_nodes=[0]).get_n_gpus() == 0
