"""Which numbers of processes a pool may have, and the ones that fit a cluster."""

from types import SimpleNamespace

import pytest

from hybridflow.config import Config
from hybridflow.config.roles import pools_of
from hybridflow.controller import Role
from hybridflow.controller.ray import RayResourcePool
from hybridflow.errors import ConfigError, LostWorkerError
from hybridflow.trainers.build.pool_sizes import PoolSizes, pool_sizes_of, shapes_of

ROLES = (Role.ActorRollout, Role.Rollout)


@pytest.mark.parametrize(
    ("processes", "fewest", "expected"),
    [
        ((1, 1, 1), 1, [(1, 1, 1), (1, 1), (1,)]),
        ((4,), 2, [(4,), (3,), (2,)]),
        ((2, 2), 1, [(2, 2), (2,), (1, 1), (1,)]),
        ((4, 2), 3, [(4, 2), (3, 2), (4,), (2, 2), (3,)]),
        ((2, 2), 4, [(2, 2)]),
    ],
)
def test_shapes_are_all_that_no_node_has_more_of(processes, fewest, expected):
    assert shapes_of(processes, fewest) == expected


class Cluster:
    """A backend whose cluster has room for so many processes."""

    def __init__(self, room):
        self.room = room
        self.connection = SimpleNamespace(has_gpus=lambda: False)

    def choose_fitting(self, options, instead_of=()):
        smallest = [pools[-1] for pools in options]
        for index, pools in enumerate(options):
            others = sum(pool.world_size for pool in smallest[:index] + smallest[index + 1 :])
            fits = [pool for pool in pools if pool.world_size + others <= self.room]
            if not fits:
                raise (LostWorkerError if instead_of else ConfigError)("no room")
            smallest[index] = fits[0]
        return smallest


@pytest.fixture
def config():
    return Config.model_validate(
        {
            "controller": {"backend": "ray"},
            "trainer": {"deterministic": False},
            "parallel": {"tensor": 2},
            "placement": {
                "pools": {"learn": (4,), "generate": (1, 1, 1)},
                "roles": {"rollout": "generate"},
                "min_processes": {"learn": 1, "generate": 1},
            },
        }
    )


@pytest.fixture
def sizes(config, monkeypatch):
    def build(config, backend, name, processes, roles):
        return RayResourcePool(processes, name_prefix=name)

    monkeypatch.setattr("hybridflow.trainers.build.pool_sizes.build_pool", build)
    return lambda room: PoolSizes(config, Cluster(room), ROLES)


@pytest.mark.parametrize(
    ("room", "learn", "generate"),
    [(9, (4,), (1, 1, 1)), (7, (4,), (1, 1, 1)), (6, (4,), (1, 1)), (4, (2,), (1, 1)), (3, (2,), (1,))],
)
def test_the_first_pool_is_served_first_with_ranks_that_suit_the_other_keys(sizes, room, learn, generate):
    with pytest.raises(ConfigError, match="no room"):
        sizes(2).fit()
    found = sizes(room)
    assert pools_of(found.fit()) == {"learn": learn, "generate": generate}
    assert found.metrics() == {"processes/learn": sum(learn), "processes/generate": sum(generate)}


def test_places_that_are_gone_again_are_a_lost_worker_which_a_run_survives(sizes, monkeypatch):
    def move(groups, pool, backend, meshes):
        raise ConfigError("does not fit the cluster")

    monkeypatch.setattr("hybridflow.trainers.build.pool_sizes.move_colocated", move)
    groups = {role: SimpleNamespace(workers=[]) for role in ROLES}
    found = sizes(2)
    with pytest.raises(LostWorkerError, match="the places of pool generate are gone again: does not fit"):
        found.refit(groups, ["rollout"])
    assert pools_of(found.config)["generate"] == (1, 1, 1)


def test_pools_have_fixed_sizes_unless_configured(config):
    fixed = config.model_copy(update={"placement": config.placement.model_copy(update={"min_processes": {}})})
    assert pool_sizes_of(fixed, Cluster(9), ROLES) is None
