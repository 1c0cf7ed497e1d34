"""The choice of nodes and pools, and the size of a local cluster: decisions on made-up clusters."""

import itertools
import time
from types import SimpleNamespace

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.controller.ray import (
    RayBackend,
    RayResourcePool,
    cluster,
    merge_resource_pool,
    resource_pool,
    split_resource_pool,
)
from hybridflow.controller.ray.cluster import Connection, gpus_for
from hybridflow.controller.ray.nodes import Node, choose_nodes, does_not_fit, sorted_nodes
from hybridflow.controller.ray.worker_process import own_interface
from hybridflow.errors import ConfigError

ONE_CPU = {"CPU": 1.0}


def node(address, cpus, free=None, gpus=0.0, node_id=""):
    total = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
    return Node(node_id or f"id of {address}", address, total | {"CPU": float(cpus if free is None else free)}, total)


def addresses(nodes):
    return None if nodes is None else [node.address for node in nodes]


def numbered(*cpus):
    """Return nodes with the ids "1", "2", ..."""
    return [node(f"10.0.0.{n}", count, node_id=str(n)) for n, count in enumerate(cpus, start=1)]


# Nodes


@pytest.mark.parametrize(
    "names", [["9.0.0.1", "10.0.0.9", "10.0.0.10"], ["node1", "node2"], ["fd00::1", "fd00::2"]], ids=lambda n: n[0]
)
def test_nodes_are_sorted_by_address_whatever_their_ids(names):
    for ids in itertools.permutations("abc", len(names)):
        nodes = [node(name, 1, node_id=node_id) for name, node_id in zip(names, ids, strict=True)]
        assert addresses(sorted_nodes(nodes[::-1])) == names


@pytest.mark.parametrize(
    ("processes", "share", "nodes", "chosen"),
    [
        ([2], {}, [4, 2, 4], "1"),
        ([2, 2], {}, [4, 2, 4], "12"),
        ([2, 4, 4], {}, [4, 2, 4], "213"),  # the first node that leaves room for the others
        ([4, 2, 4], {}, [4, 2, 4], "123"),
        ([1, 1], {}, [64], None),  # each entry gets a node of its own
        ([1], {}, [], None),
        ([10], {"CPU": 0.1}, [1], "1"),
        ([3], {"CPU": 1 / 3}, [1], "1"),
        ([11], {"CPU": 0.1}, [1], None),
        ([1000], {"CPU": 0.0}, [1], "1"),
    ],
)
def test_nodes_are_chosen_in_order_of_address(processes, share, nodes, chosen):
    found = choose_nodes(processes, share or ONE_CPU, numbered(*nodes))
    assert found == chosen or "".join(each.node_id for each in found) == chosen


def test_only_free_resources_count_unless_empty_is_set():
    nodes = [node("10.0.0.1", 4, free=1), node("10.0.0.2", 4)]
    assert addresses(choose_nodes([2], ONE_CPU, nodes)) == ["10.0.0.2"]
    assert addresses(choose_nodes([2], ONE_CPU, nodes, empty=True)) == ["10.0.0.1"]
    assert choose_nodes([2, 2], ONE_CPU, nodes) is None
    assert addresses(choose_nodes([2, 2], ONE_CPU, nodes, empty=True)) == ["10.0.0.1", "10.0.0.2"]


def test_every_resource_of_a_share_must_be_available():
    share = {"CPU": 1.0, "GPU": 1.0}
    nodes = [node("10.0.0.1", 64), node("10.0.0.2", 2, gpus=8), node("10.0.0.3", 8, gpus=2)]
    assert addresses(choose_nodes([2, 2], share, nodes)) == ["10.0.0.2", "10.0.0.3"]
    assert choose_nodes([3], share, nodes) is None


def test_taken_shares_add_up_without_rounding_errors():
    left = node("10.0.0.1", 1)
    for _ in range(10):
        assert choose_nodes([1], {"CPU": 0.1}, [left]) is not None
        left = left.without(1, {"CPU": 0.1})
    assert choose_nodes([1], {"CPU": 0.1}, [left]) is None
    assert Node("id", "127.0.0.1", {}, {"CPU": 2.0}).without(-2, {"CPU": 0.5}).free == {"CPU": 1.0}


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_a_choice_is_found_if_one_exists(cpus, wishes):
    nodes = numbered(*cpus)
    orders = itertools.permutations(cpus, len(wishes))
    fits = any(all(have >= wish for have, wish in zip(order, wishes, strict=True)) for order in orders)
    chosen = choose_nodes(wishes, ONE_CPU, nodes)
    assert (chosen is not None) == fits
    if chosen is not None:
        assert len(set(addresses(chosen))) == len(wishes)
        assert all(n.capacity(ONE_CPU) >= wish for n, wish in zip(chosen, wishes, strict=True))


def test_error_names_the_request_and_the_resources_of_each_node():
    nodes = [node("10.0.0.10", 4, free=0.5), node("10.0.0.9", 8)]
    assert str(does_not_fit("the pool", [9, 1], ONE_CPU, nodes)) == (
        "the pool does not fit the cluster: requested [9, 1] processes on 2 node(s), each with 1 CPU; the cluster has "
        "2 node(s): 10.0.0.9: 8 of 8 CPU free; 10.0.0.10: 0.5 of 4 CPU free. Use fewer processes or a smaller share "
        "(controller.cpus_per_worker; cpus_per_process of a pool), add nodes, or wait until other groups release "
        "resources (shutdown() of a group)."
    )
    assert "the cluster has 0 node(s): none." in str(does_not_fit("the pool", [1], ONE_CPU, []))
    on_gpu = Node("a", "10.0.0.1", {"CPU": 5.0, "GPU": 0.8}, {"CPU": 8.0, "GPU": 2.0})
    error = str(does_not_fit("the pool", [1], {"CPU": 1.0, "GPU": 0.6}, [on_gpu]))
    assert "0.8 of 2 GPU free. Use fewer processes or a smaller share (controller.cpus_per_worker, " in error
    assert "controller.gpus_per_worker, of which each process needs all on one GPU; cpus_per_process" in error


def test_the_interface_of_an_address_is_found():
    assert own_interface("127.0.0.1") == "lo"
    assert own_interface("192.0.2.1") == ""  # reserved for documentation


# Pools


@pytest.fixture
def on_nodes(monkeypatch):
    """Return a function that pretends a cluster with these nodes, which the pools see at once."""

    def pretend(*nodes):
        monkeypatch.setattr(resource_pool, "nodes_of_cluster", lambda: list(nodes))
        monkeypatch.setattr(resource_pool, "SETTLING_S", 0.0)

    return pretend


def pool_of(*processes, **options):
    return RayResourcePool(list(processes), **options)


def test_pools_must_fit_the_cluster_together(on_nodes, monkeypatch):
    on_nodes(*numbered(4, 2))
    resource_pool.require_fit([pool_of(4), pool_of(2)])
    with pytest.raises(ConfigError, match=r"requested \[3\] .*: 0 of 4 CPU free; 10.0.0.2: 2 of 2 CPU free"):
        resource_pool.require_fit([pool_of(4), pool_of(3)])
    monkeypatch.setattr(resource_pool, "SETTLING_S", 1e6)  # which can never fit: an error without a wait
    with pytest.raises(ConfigError, match=r"requested \[1, 1, 1\] processes on 3 node\(s\), each with 1 CPU"):
        resource_pool.require_fit([pool_of(1, 1, 1)])
    with pytest.raises(ConfigError, match="does not fit the cluster"):
        pool_of(5).places()


def test_a_pool_that_could_fit_waits_for_released_resources(on_nodes, monkeypatch):
    looks = [numbered(4), numbered(4), numbered(4)]
    looks[0] = looks[1] = [node("10.0.0.1", 4, free=1)]
    on_nodes()
    monkeypatch.setattr(resource_pool, "nodes_of_cluster", lambda: looks.pop(0))
    monkeypatch.setattr(resource_pool, "SETTLING_S", 1e6)
    monkeypatch.setattr(resource_pool, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    resource_pool.require_fit([pool_of(3)])
    assert looks == []


def test_the_earliest_pools_that_fit_together_are_chosen(on_nodes):
    on_nodes(*numbered(4))
    options = [[pool_of(n) for n in (3, 2, 1)] for _ in range(2)]
    assert [pool.world_size for pool in resource_pool.choose_fitting(options, 0.0)] == [3, 1]
    with pytest.raises(ConfigError, match="does not fit the cluster"):
        resource_pool.choose_fitting([[pool_of(6), pool_of(5)]], 0.0)


def test_a_pool_has_room_in_the_places_of_another(on_nodes):
    small = pool_of(1)
    small._reserved = [SimpleNamespace(node=numbered(3)[0])]
    on_nodes(node("10.0.0.1", 3, free=2, node_id="1"))
    assert resource_pool.has_room(pool_of(3), small)
    assert not resource_pool.has_room(pool_of(4), small)


def test_split_and_merged_pools_share_the_places_of_their_pools():
    pool, single = pool_of(2, 2), pool_of(1)
    assert [part.process_on_nodes for part in split_resource_pool(pool, 2)] == [[2], [2]]
    first, rest = split_resource_pool(pool, [1, 3])
    assert (first.process_on_nodes, rest.process_on_nodes) == ([1], [1, 2])
    assert merge_resource_pool(rest, single)._owned() == [(pool, 1), (pool, 2), (pool, 3), (single, 0)]
    for size in (3, 0, -1, [1, 1], [5], [4, 0], []):
        with pytest.raises(ConfigError, match=r"is invalid for the 4 places of .*; use a divisor of 4, or a list"):
            split_resource_pool(pool, size)
    for other in (pool_of(1, cpus_per_process=0.5), pool_of(1, use_gpu=True), pool_of(1, max_colocate_count=2)):
        with pytest.raises(ConfigError, match="make them equal"):
            merge_resource_pool(pool, other)


def test_a_pool_has_room_for_max_colocate_count_groups():
    pool = pool_of(2, max_colocate_count=2, name_prefix="shared")
    first, second = split_resource_pool(pool, 1)
    pool.take_tenancy()
    first.take_tenancy()
    with pytest.raises(ConfigError, match=r"'shared'.*already has max_colocate_count=2 worker.*raise max_colocate_co"):
        pool.take_tenancy()
    second.take_tenancy()
    first.give_up_tenancy()
    first.take_tenancy()
    pool._reserved = []
    for _ in range(2):
        first.give_up_tenancy()
    for _ in range(2):
        assert pool._reserved == []
        second.give_up_tenancy()
    assert pool._reserved is None  # released after the last group


def test_a_share_is_a_multiple_of_the_unit_that_ray_accepts():
    pool = pool_of(1, use_gpu=True, max_colocate_count=3, cpus_per_process=1 / 3, gpus_per_process=0.7)
    assert pool.share == {"CPU": 1.0, "GPU": 0.7}
    assert pool.share_of_one_group == {"CPU": 0.3333, "GPU": 0.2333}
    third = pool_of(1, use_gpu=True, gpus_per_process=0.33333333)
    assert third.share == third.share_of_one_group == {"CPU": 1.0, "GPU": 0.3333}
    assert gpus_for([third] * 3) == 1


@pytest.mark.parametrize("share", [0, 1.5, float("nan")])
def test_a_share_that_no_process_can_have_is_an_error(share):
    with pytest.raises(ConfigError, match="expected a share of a GPU, above 0 and at most 1"):
        pool_of(1, use_gpu=True, gpus_per_process=share)
    with pytest.raises(ConfigError, match="expected a number of logical CPUs, 0 or more"):
        pool_of(1, cpus_per_process=-share or -1)


# The local cluster and its GPUs


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
def test_bfloat16_is_known_from_the_kinds_of_gpus_of_a_cluster(monkeypatch, resources, answer):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.Connection, "open", lambda self, pools: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    assert RayBackend("10.0.0.1:6379").connection.gpus_have_bfloat16() is answer


@pytest.mark.parametrize("answer", [True, False])
def test_a_local_cluster_has_the_gpus_of_this_machine(monkeypatch, answer):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "gpu_has_bfloat16", lambda: answer)
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 1)
    assert RayBackend().connection.gpus_have_bfloat16() is answer
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 0)
    assert RayBackend().connection.gpus_have_bfloat16() is None


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
        Connection("", 1, num_gpus, None).open(pools)
        return started[-1]

    return start


def test_a_local_cluster_has_at_most_the_gpus_of_this_machine(gpus_of_local_cluster):
    pool = pool_of(4, use_gpu=True)
    assert [gpus_of_local_cluster(count, [pool]) for count in (0, 2, 4, 8)] == [0, 2, 4, 4]
    assert [gpus_of_local_cluster(2, [pool], num_gpus) for num_gpus in (1, 2)] == [1, 2]
    for count in (0, 2):
        message = (
            rf"num_gpus=3 is invalid for a local cluster: this machine has {count} GPUs .*; use at most {count}, or"
        )
        with pytest.raises(ConfigError, match=message):
            gpus_of_local_cluster(count, [], num_gpus=3)


@pytest.mark.parametrize(
    ("share", "processes", "gpus"),
    [(1.0, [[4], [2, 2]], 8), (0.5, [[1], [1]], 1), (0.6, [[1]] * 3, 3), (0.3, [[1]] * 4, 2), (0.2, [[1]] * 5, 1)],
)
def test_a_cluster_has_whole_gpus_for_the_shares_of_all_pools(share, processes, gpus):
    pools = [pool_of(*counts, use_gpu=True, gpus_per_process=share) for counts in processes]
    assert gpus_for([*pools, pool_of(3)]) == gpus


def test_invalid_addresses_and_deadlines_are_errors(monkeypatch):
    with pytest.raises(ConfigError, match=r"'ray://head:10001' .*address='auto' .* 'head:6379'"):
        RayBackend("ray://head:10001")
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="is invalid: expected seconds above 0, or None"):
            RayBackend(call_timeout_s=timeout_s)


def test_an_address_without_a_cluster_is_an_error_before_ray_starts(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("ray.init was called, which retries for minutes"))
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at address='127\.0\.0\.1:9'"):
        Connection("127.0.0.1:9", 0, 0, None).open([])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"address='auto', the last cluster started here: \S+:1 "):
        Connection("auto", 0, 0, None).open([])
