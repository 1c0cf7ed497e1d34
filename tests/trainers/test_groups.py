"""The resource pools of a configuration."""

import pytest

from hybridflow.config import load_config
from hybridflow.controller import Role
from hybridflow.trainers.groups import build_pool


@pytest.mark.ray
def test_pool_reserves_the_configured_share_of_a_gpu(monkeypatch):
    from hybridflow.controller.ray import RayBackend

    monkeypatch.setattr(RayBackend, "has_gpus", lambda self: True)
    config = load_config(None, ["controller.backend=ray", "controller.gpus_per_worker=0.5"])
    pool = build_pool(config, RayBackend(), "main", (1,), [Role.ActorRollout])
    assert pool.share == {"CPU": 1.0, "GPU": 0.5}
