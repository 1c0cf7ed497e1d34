import pytest
import ray

from hybridflow.controller.ray import RayBackend, cluster


@pytest.fixture
def cluster_of(monkeypatch):
    """Return a function that pretends a connection to a Ray cluster with some resources."""

    def pretend(resources):
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(cluster.Connection, "open", lambda self, pools: None)
        monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
        return RayBackend("10.0.0.1:6379")

    return pretend


@pytest.mark.parametrize(
    ("resources", "answer"),
    [
        ({"CPU": 8.0}, None),
        ({"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, True),
        ({"GPU": 2.0}, True),  # a kind that Ray does not name
        ({"GPU": 2.0, "accelerator_type:T4": 1.0}, False),
        ({"GPU": 9.0, "accelerator_type:H100": 1.0, "accelerator_type:V100": 1.0}, False),
    ],
)
def test_bfloat16_is_known_from_the_kinds_of_gpus_of_a_cluster(cluster_of, resources, answer):
    assert cluster_of(resources).gpus_have_bfloat16() is answer


@pytest.mark.parametrize("answer", [True, False])
def test_a_local_cluster_has_the_gpus_of_this_machine(monkeypatch, answer):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "gpu_has_bfloat16", lambda: answer)
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 1)
    assert RayBackend().gpus_have_bfloat16() is answer
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 0)
    assert RayBackend().gpus_have_bfloat16() is None
