import pytest
import ray

from hybridflow.controller.ray import RayBackend, RayResourcePool, cluster
from hybridflow.controller.ray.cluster import gpus_for
from hybridflow.controller.ray.nodes import Node, does_not_fit
from hybridflow.errors import ConfigError


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


@pytest.fixture
def gpus_of_local_cluster(monkeypatch):
    """Return a function (GPUs of this machine, pools, num_gpus) -> GPUs that the local cluster is started with."""
    started = []

    class LocalCluster:
        def __init__(self, num_cpus, num_gpus, object_store_bytes):
            self.num_gpus = num_gpus

        def start(self):
            started.append(self.num_gpus)

    def start(count, pools, num_gpus=0):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(cluster, "LocalCluster", LocalCluster)
        monkeypatch.setattr(cluster, "ClusterWatch", lambda is_local: None)
        monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: count)
        cluster.Connection("", 1, num_gpus, None).open(pools)
        return started[-1]

    return start


@pytest.mark.parametrize(("count", "gpus"), [(0, 0), (2, 2), (4, 4), (8, 4)])
def test_a_local_cluster_has_at_most_the_gpus_of_this_machine(gpus_of_local_cluster, count, gpus):
    assert gpus_of_local_cluster(count, [RayResourcePool([4], use_gpu=True)]) == gpus


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_local_cluster_can_have_fewer_gpus_than_this_machine(gpus_of_local_cluster, num_gpus):
    assert gpus_of_local_cluster(2, [RayResourcePool([4], use_gpu=True)], num_gpus) == num_gpus


@pytest.mark.parametrize("count", [0, 2])
def test_a_local_cluster_with_gpus_that_do_not_exist_is_an_error(gpus_of_local_cluster, count):
    message = rf"num_gpus=3 is invalid for a local cluster: this machine has {count} GPUs .*; use at most {count}, or"
    with pytest.raises(ConfigError, match=message):
        gpus_of_local_cluster(count, [], num_gpus=3)


@pytest.mark.parametrize(
    ("share", "processes", "gpus"),
    [(1.0, [[4], [2, 2]], 8), (0.5, [[1], [1]], 1), (0.6, [[1]] * 3, 3), (0.3, [[1]] * 4, 2), (0.2, [[1]] * 5, 1)],
)
def test_a_cluster_has_whole_gpus_for_the_shares_of_all_pools(share, processes, gpus):
    pools = [RayResourcePool(counts, use_gpu=True, gpus_per_process=share) for counts in processes]
    assert gpus_for([*pools, RayResourcePool([3])]) == gpus


def test_a_pool_without_room_on_a_gpu_names_the_key_of_its_share():
    node = Node("a", "10.0.0.1", {"CPU": 5.0, "GPU": 0.8}, {"CPU": 8.0, "GPU": 2.0})
    error = str(does_not_fit("the pool", [1], {"CPU": 1.0, "GPU": 0.6}, [node]))
    assert "0.8 of 2 GPU free. Use fewer processes or a smaller share (controller.cpus_per_worker, " in error
    assert "controller.gpus_per_worker, of which each process needs all on one GPU; cpus_per_process" in error


def test_a_share_is_a_multiple_of_the_unit_that_ray_accepts():
    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=3, cpus_per_process=1 / 3, gpus_per_process=0.7)
    assert pool.share == {"CPU": 1.0, "GPU": 0.7}
    assert pool.share_of_one_group == {"CPU": 0.3333, "GPU": 0.2333}
    third = RayResourcePool([1], use_gpu=True, gpus_per_process=0.33333333)
    assert third.share == third.share_of_one_group == {"CPU": 1.0, "GPU": 0.3333}
    assert gpus_for([third] * 3) == 1
