import pytest

from hybridflow import workers
from hybridflow.config import load_config
from hybridflow.controller import Role
from hybridflow.controller.register import registered_methods
from hybridflow.errors import ModelConfigError
from hybridflow.runtime.observe.timing import STAGES
from hybridflow.trainers.build.groups import build_pool
from hybridflow.trainers.build.preconditions import require_model_directory


@pytest.mark.ray
def test_a_pool_reserves_the_configured_share_of_a_gpu(monkeypatch):
    from hybridflow.controller.ray import RayBackend
    from hybridflow.controller.ray.cluster import Connection

    monkeypatch.setattr(Connection, "has_gpus", lambda self: True)
    config = load_config(None, ["controller.backend=ray", "controller.gpus_per_worker=0.5"])
    pool = build_pool(config, RayBackend(), "main", (1,), [Role.ActorRollout])
    assert pool.share == {"CPU": 1.0, "GPU": 0.5}


@pytest.mark.parametrize("path", ["models/Qwen2.5-0.5B", "absent", "./a/b", "a/b/c", "models"])
def test_a_model_directory_has_a_configuration(path, tmp_path, monkeypatch, model_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelConfigError, match=r"is not a model directory: config\.json not found") as error:
        require_model_directory("model.path", path)
    assert f"a relative path starts at '{tmp_path}'" in str(error.value)
    require_model_directory("model.path", str(model_dir))


def test_methods_with_a_stage_are_registered_methods_of_workers():
    classes = [getattr(workers, name) for name in workers.__all__ if isinstance(getattr(workers, name), type)]
    methods = {name for cls in classes for name in registered_methods(cls)}
    assert sorted(STAGES.keys() - methods) == []
