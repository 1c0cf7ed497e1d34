"""Placement of ranks: the choice of nodes, one node, unequal nodes, and groups that outlive their driver."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from hybridflow.controller.ray.nodes import Node, choose_nodes, does_not_fit, sorted_nodes
from hybridflow.errors import ConfigError
from hybridflow.protocol import DataProto

pytestmark = pytest.mark.ray

ONE_CPU = {"CPU": 1.0}
TESTS = Path(__file__).parents[2]


def node(address, cpus, free=None, gpus=0.0, node_id=""):
    total = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
    return Node(node_id or f"id of {address}", address, total | {"CPU": float(cpus if free is None else free)}, total)


def addresses(nodes):
    return None if nodes is None else [node.address for node in nodes]


# ------------------------------------------------------------------------------------------ choice of nodes


def test_nodes_are_sorted_by_numeric_address():
    nodes = [node("10.0.0.10", 1, node_id="a"), node("9.0.0.1", 1, node_id="c"), node("10.0.0.9", 1, node_id="b")]
    assert addresses(sorted_nodes(nodes)) == ["9.0.0.1", "10.0.0.9", "10.0.0.10"]


@pytest.mark.parametrize("names", [["node1", "node2"], ["fd00::1", "fd00::2"]])
def test_nodes_with_other_addresses_have_a_stable_order(names):
    first = sorted_nodes([node(names[0], 1, node_id="a"), node(names[1], 1, node_id="b")])
    second = sorted_nodes([node(names[0], 1, node_id="b"), node(names[1], 1, node_id="a")])
    assert addresses(first) == addresses(second)


def test_each_entry_takes_the_first_node_that_leaves_room_for_others():
    nodes = [node("10.0.0.1", 4), node("10.0.0.2", 2), node("10.0.0.3", 4)]
    assert addresses(choose_nodes([2], ONE_CPU, nodes)) == ["10.0.0.1"]
    assert addresses(choose_nodes([2, 2], ONE_CPU, nodes)) == ["10.0.0.1", "10.0.0.2"]
    assert addresses(choose_nodes([2, 4], ONE_CPU, nodes)) == ["10.0.0.1", "10.0.0.3"]
    assert addresses(choose_nodes([2, 4, 4], ONE_CPU, nodes)) == ["10.0.0.2", "10.0.0.1", "10.0.0.3"]
    assert addresses(choose_nodes([4, 2, 4], ONE_CPU, nodes)) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_each_entry_gets_a_separate_node():
    assert choose_nodes([1, 1], ONE_CPU, [node("10.0.0.1", 64)]) is None
    assert choose_nodes([4, 4], ONE_CPU, [node("10.0.0.1", 4), node("10.0.0.2", 3)]) is None
    assert choose_nodes([1], ONE_CPU, []) is None


def test_only_free_resources_count_unless_empty_is_set():
    nodes = [node("10.0.0.1", 4, free=1), node("10.0.0.2", 4)]
    assert addresses(choose_nodes([2], ONE_CPU, nodes)) == ["10.0.0.2"]
    assert addresses(choose_nodes([2], ONE_CPU, nodes, empty=True)) == ["10.0.0.1"]
    assert choose_nodes([2, 2], ONE_CPU, nodes) is None
    assert addresses(choose_nodes([2, 2], ONE_CPU, nodes, empty=True)) == ["10.0.0.1", "10.0.0.2"]


def test_shares_are_counted_without_rounding_errors():
    assert choose_nodes([10], {"CPU": 0.1}, [node("10.0.0.1", 1)]) is not None
    assert choose_nodes([3], {"CPU": 1 / 3}, [node("10.0.0.1", 1)]) is not None
    assert choose_nodes([11], {"CPU": 0.1}, [node("10.0.0.1", 1)]) is None
    assert choose_nodes([1000], {"CPU": 0.0}, [node("10.0.0.1", 1)]) is not None
    left = node("10.0.0.1", 1)
    for _ in range(10):
        assert choose_nodes([1], {"CPU": 0.1}, [left]) is not None
        left = left.without(1, {"CPU": 0.1})
    assert choose_nodes([1], {"CPU": 0.1}, [left]) is None


def test_every_resource_of_a_share_must_be_available():
    share = {"CPU": 1.0, "GPU": 1.0}
    nodes = [node("10.0.0.1", 64), node("10.0.0.2", 2, gpus=8), node("10.0.0.3", 8, gpus=2)]
    assert addresses(choose_nodes([2], share, nodes)) == ["10.0.0.2"]
    assert addresses(choose_nodes([2, 2], share, nodes)) == ["10.0.0.2", "10.0.0.3"]
    assert choose_nodes([3], share, nodes) is None


def test_choose_nodes_finds_a_choice_if_one_exists():
    import itertools

    for cpus in itertools.product(range(4), repeat=3):
        nodes = [node(f"10.0.0.{index}", count) for index, count in enumerate(cpus)]
        for wishes in itertools.chain.from_iterable(itertools.product((1, 2, 3), repeat=n) for n in (1, 2, 3)):
            fits = any(
                all(cpus[index] >= wish for index, wish in zip(order, wishes, strict=False))
                for order in itertools.permutations(range(3), len(wishes))
            )
            chosen = choose_nodes(wishes, ONE_CPU, nodes)
            assert (chosen is not None) == fits, (cpus, wishes)
            if chosen is not None:
                assert len(set(addresses(chosen))) == len(wishes)
                assert all(n.holds(wish, ONE_CPU) for n, wish in zip(chosen, wishes, strict=True))


def test_error_names_the_request_and_the_resources_of_each_node():
    nodes = [node("10.0.0.10", 4, free=0.5), node("10.0.0.9", 8)]
    assert str(does_not_fit("the pool", [9, 1], ONE_CPU, nodes)) == (
        "the pool does not fit the cluster: requested [9, 1] processes on 2 node(s), each with 1 CPU; the cluster has "
        "2 node(s): 10.0.0.9: 8 of 8 CPU free; 10.0.0.10: 0.5 of 4 CPU free. Use fewer processes or a smaller share "
        "(controller.cpus_per_worker; cpus_per_process of a pool), add nodes, or wait until other groups release "
        "resources (shutdown() of a group)."
    )
    assert "the cluster has 0 node(s): none." in str(does_not_fit("the pool", [1], ONE_CPU, []))


# ------------------------------------------------------------------------------------------ pools on one node


class Rank(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        return [os.environ[name] for name in names]

    @register(Dispatch.ONE_TO_ALL)
    def total(self):
        import torch

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        total = torch.tensor(self.rank + 1)
        torch.distributed.all_reduce(total)
        return int(total)

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_others(self, directory, num_ranks):
        Path(directory, str(os.getpid())).touch()
        while len(os.listdir(directory)) < num_ranks:
            time.sleep(0.01)

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("y",))
    def add_one(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"] + 1})


def build_group(pool, backend, name):
    return WorkerGroup(pool, ClassWithInitArgs(Rank), backend, name)


def wait_until(condition, timeout_s=100.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def free_cpus():
    import ray

    return ray.available_resources().get("CPU", 0.0)


def settled_cpus():
    """Return the free CPUs after the cluster has processed the resources released by earlier tests."""
    import ray

    reserved = [g["bundles"].values() for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    expected = ray.cluster_resources()["CPU"] - sum(bundle.get("CPU", 0) for group in reserved for bundle in group)
    wait_until(lambda: free_cpus() == expected)
    return expected


@pytest.fixture
def cluster(ray_backend):
    """Return the backend, connected to a running cluster."""
    from hybridflow.controller.ray import RayResourcePool

    ray_backend.check_fit([RayResourcePool([1])])
    return ray_backend


@pytest.mark.slow
def test_fractional_cpus_are_reserved_released_and_reserved_again(cluster):
    from hybridflow.controller.ray import RayResourcePool

    before = settled_cpus()
    pool = RayResourcePool([2], cpus_per_process=0.25)
    assert free_cpus() == before  # a pool without a group reserves nothing
    with build_group(pool, cluster, "first") as group:
        assert [ranks[:4] for ranks in group.environment()] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
        assert group.total() == [3, 3]
        wait_until(lambda: free_cpus() == before - 0.5)
    with build_group(pool, cluster, "second") as group:  # the place of the first is free again
        assert group.total() == [3, 3]
    pool.release()
    wait_until(lambda: free_cpus() == before)
    pool.release()  # releasing twice is allowed


@pytest.mark.slow
def test_groups_share_a_pool_up_to_max_colocate_count(cluster):
    from hybridflow.controller.ray import RayResourcePool

    before = settled_cpus()
    pool = RayResourcePool([1], max_colocate_count=2, cpus_per_process=0.5, name_prefix="shared")
    groups = [build_group(pool, cluster, name) for name in ("actor", "critic")]
    wait_until(lambda: free_cpus() == before - 1.0)
    processes = list(cluster._processes)
    with pytest.raises(ConfigError, match=r"'shared'.*already has max_colocate_count=2 worker.*raise max_colocate_co"):
        build_group(pool, cluster, "third")
    assert cluster._processes == processes
    groups[0].shutdown()
    groups[0].shutdown()  # a second shutdown frees no second place
    groups[0] = build_group(pool, cluster, "third")
    with pytest.raises(ConfigError, match="already has max_colocate_count=2"):
        build_group(pool, cluster, "fourth")
    assert [group.total() for group in groups] == [[1], [1]]
    for group in groups:
        group.shutdown()
    pool.release()
    wait_until(lambda: free_cpus() == before)


@pytest.mark.slow
def test_split_and_merged_pools_run_groups_at_the_same_time(cluster, tmp_path):
    from hybridflow.controller.ray import RayResourcePool, merge_resource_pool, split_resource_pool

    before = settled_cpus()
    pool, single = RayResourcePool([3], cpus_per_process=0.5), RayResourcePool([1], cpus_per_process=0.5)
    first, rest = split_resource_pool(pool, [1, 2])
    merged = merge_resource_pool(rest, single)
    assert (first.process_on_nodes, rest.process_on_nodes, merged.world_size) == ([1], [2], 3)
    groups = [build_group(first, cluster, "first"), build_group(merged, cluster, "merged")]
    wait_until(lambda: free_cpus() == before - 2.0)
    assert groups[0].environment()[0][:4] == ["0", "1", "0", "1"]
    assert [ranks[:4] for ranks in groups[1].environment()] == [[str(i), "3", str(i), "3"] for i in range(3)]
    assert [group.total() for group in groups] == [[1], [6, 6, 6]]
    pending = [group.wait_for_others.remote(str(tmp_path), 4) for group in groups]
    assert [len(future.get()) for future in pending] == [1, 3]
    for group in groups:
        group.shutdown()
    for reserved in (pool, single):
        reserved.release()
    wait_until(lambda: free_cpus() == before)


def test_split_sizes_must_add_up_to_the_pool():
    from hybridflow.controller.ray import RayResourcePool, merge_resource_pool, split_resource_pool

    pool = RayResourcePool([2, 2])
    assert [part.process_on_nodes for part in split_resource_pool(pool, 2)] == [[2], [2]]
    assert [part.process_on_nodes for part in split_resource_pool(pool, [1, 3])] == [[1], [1, 2]]
    for size in (3, 0, -1, [1, 1], [5], [4, 0], []):
        with pytest.raises(ConfigError, match=r"is invalid for the 4 places of .*; use a divisor of 4, or a list"):
            split_resource_pool(pool, size)
    with pytest.raises(ConfigError, match="make them equal"):
        merge_resource_pool(pool, RayResourcePool([1], cpus_per_process=0.5))
    with pytest.raises(ConfigError, match="make them equal"):
        merge_resource_pool(pool, RayResourcePool([1], use_gpu=True))


@pytest.mark.slow
def test_a_group_on_a_part_of_a_full_pool_starts_no_worker(cluster):
    from hybridflow.controller.ray import RayBackend, RayResourcePool, split_resource_pool

    pool = RayResourcePool([1], cpus_per_process=0.25)
    (part,) = split_resource_pool(pool, 1)
    try:
        with build_group(pool, cluster, "whole"), RayBackend(call_timeout_s=120) as backend:
            with pytest.raises(ConfigError, match=r"already has max_colocate_count=1"):
                build_group(part, backend, "part")
            assert list(backend._processes) == []
    finally:
        pool.release()


@pytest.mark.slow
def test_closing_a_backend_releases_places_reserved_through_a_part(cluster):
    from hybridflow.controller.ray import RayBackend, RayResourcePool, split_resource_pool

    before, pool = settled_cpus(), RayResourcePool([1], cpus_per_process=0.25)
    (part,) = split_resource_pool(pool, 1)
    try:
        with RayBackend() as backend:
            build_group(part, backend, "part")
        wait_until(lambda: free_cpus() == before)
    finally:
        pool.release()


# ------------------------------------------------------------------------------------------ unequal nodes

START = """
import json, os, subprocess, sys, time
from fixtures.forked import fork_ray_workers
from ray.cluster_utils import Cluster

fork_ray_workers()
STORE = 80 * 2**20

def start_nodes(*cpus):
    cluster = Cluster()
    for last, num_cpus in cpus:
        cluster.add_node(
            num_cpus=num_cpus, node_ip_address=f"127.0.0.{last}", object_store_memory=STORE, include_dashboard=False
        )
    return cluster
"""

DRIVER = """
import json, os, sys, time
import ray, torch
from hybridflow.controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from hybridflow.controller.ray import *
from hybridflow.controller.ray import resource_pool
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.protocol import DataProto

class Rank(Worker):
    def __init__(self):
        self.value = 0

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        import ray
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        return [*(os.environ[name] for name in names), ray.util.get_node_ip_address()]

    @register(Dispatch.ONE_TO_ALL)
    def total(self):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        total = torch.tensor(self.rank + 1)
        torch.distributed.all_reduce(total)
        return int(total)

    @register(Dispatch.ONE_TO_ALL)
    def add(self, value):
        self.value += value
        return self.value

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("y",))
    def add_one(self, batch):
        return DataProto.from_dict({"y": batch.batch["x"] + 1})

def settle(cpus):
    end = time.monotonic() + 100
    while ray.available_resources().get("CPU", 0) < cpus and time.monotonic() < end:
        time.sleep(0.1)
    return ray.available_resources().get("CPU", 0)

backend = RayBackend(ADDRESS, call_timeout_s=120)
seen = {}
"""

UNEQUAL = """
cluster = start_nodes((1, 1), (2, 2), (10, 2))
exec(DRIVER.replace("ADDRESS", repr(cluster.address)))
for name, shape in (("2, 1", [2, 1]), ("1, 2", [1, 2]), ("2, 2", [2, 2])):
    for start in ("first", "second"):
        pool = RayResourcePool(shape)
        with WorkerGroup(pool, ClassWithInitArgs(Rank), backend, "rank") as group:
            seen[f"{name} {start}"] = group.environment()
            seen[f"{name} {start} total"] = group.total()
        pool.release()
        settle(5)
        if name == "2, 2":
            break

big, small = RayResourcePool([2]), RayResourcePool([1])
here, there = (WorkerGroup(p, ClassWithInitArgs(Rank), backend, n) for p, n in ((big, "here"), (small, "there")))
seen["here"], seen["there"] = here.environment(), there.environment()
backend.trace.take()
backend.measure_nodes()
seen["measured"] = [event.worker for event in backend.trace.take() if event.kind == "probe" and event.bytes_in]
future = here.add_one.remote(DataProto.from_dict({"x": torch.arange(2**20)}))  # 4 MiB per rank, sent through the stores
future = there.add_one.remote(future.rename("y", "x"))
result = here.add_one(future.rename("y", "x")).batch["y"]
seen["passed on"] = [len(result), bool((result == torch.arange(2**20) + 3).all())]
resource_pool.SETTLING_S = 1e6
for name, shape in (("too many nodes", [1, 1, 1, 1]), ("too large", [2, 2, 2])):
    try:
        backend.check_fit([RayResourcePool(shape)])
    except HybridFlowError as error:
        seen[name] = str(error)
backend.close()
cluster.shutdown()
print(json.dumps(seen))
"""

DETACHED = """
cluster = start_nodes((1, 4), (2, 2))

def drive(script):
    script = f"{DRIVER.replace('ADDRESS', repr(cluster.address))}\\n{script}\\nprint(json.dumps(seen))\\n"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    try:
        return json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": process.stdout[-1500:] + process.stderr[-1500:]}

seen = {}
seen["first"] = drive('''
pool = RayResourcePool([2, 1])
group = RayWorkerGroup(pool, RayClassWithInitArgs(Rank), "kept", backend=backend, detached=True)
seen["value"] = group.add(5)
seen["environment"] = group.environment()
backend.close()
''')
seen["second"] = drive('''
group = RayWorkerGroup.attach("kept", RayClassWithInitArgs(Rank), backend=backend)
seen["value"] = group.add(2)
seen["environment"] = group.environment()
seen["pool"] = group.resource_pool.process_on_nodes
seen["total"] = group.total()
seen["rows"] = group.add_one(DataProto.from_dict({"x": torch.arange(7)})).batch["y"].tolist()
seen["free"] = ray.available_resources().get("CPU", 0)
try:
    RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Rank), "kept", backend=backend, detached=True)
except ConfigError as error:
    seen["taken"] = str(error)
group.shutdown()
seen["free after"] = settle(6)
try:
    RayWorkerGroup.attach("kept", RayClassWithInitArgs(Rank), backend=backend)
except HybridFlowError as error:
    seen["gone"] = str(error)
backend.close()
''')
seen["own shutdown"] = drive('''
pool = RayResourcePool([1])
group = RayWorkerGroup(pool, RayClassWithInitArgs(Rank), "own", backend=backend, detached=True)
group.shutdown()
pool.release()
seen["free after"] = settle(6)
backend.close()
''')
seen["hole"] = drive('''
RayWorkerGroup(RayResourcePool([3]), RayClassWithInitArgs(Rank), "hole", backend=backend, detached=True)
ray.kill(ray.get_actor("hole/1", namespace="hybridflow"))
end = time.monotonic() + 100
while "refused" not in seen and time.monotonic() < end:
    try:
        RayWorkerGroup.attach("hole", RayClassWithInitArgs(Rank), backend=backend)
    except HybridFlowError as error:
        seen["refused"] = str(error)
for rank in (0, 2):
    ray.kill(ray.get_actor(f"hole/{rank}", namespace="hybridflow"))
backend.close()
''')
seen["shared pool"] = drive('''
pool = RayResourcePool([1], max_colocate_count=2)
ordinary = RayWorkerGroup(pool, RayClassWithInitArgs(Rank), "ordinary", backend=backend)
try:
    RayWorkerGroup(pool, RayClassWithInitArgs(Rank), "beside", backend=backend, detached=True)
except ConfigError as error:
    seen["refused"] = str(error)
backend.close()
''')
cluster.shutdown()
print(json.dumps(seen))
"""


SLOW_LINK = """
from hybridflow.controller.ray import links

cluster = start_nodes((1, 1), (2, 2), (3, 2), (4, 2))
exec(DRIVER.replace("ADDRESS", repr(cluster.address)).replace("call_timeout_s=120", "prefer_fast_links=True"))
plain = links._Probe

class Delayed(plain):
    def take(self, references):
        if ray.util.get_node_ip_address() == "127.0.0.2":
            time.sleep(0.5)
        return super().take(references) + 0.5 * (ray.util.get_node_ip_address() == "127.0.0.2")

def addresses(shape):
    pool = RayResourcePool(shape, cpus_per_process=0.25)
    backend.check_fit([pool])
    return [place.node.address for place in pool.places()]

seen["equal links"] = addresses([2, 5])
links._Probe = Delayed
for name, shape in (("two", [1, 1]), ("four", [1, 1, 1, 1])):
    seen[name] = addresses(shape)
backend.close()
cluster.shutdown()
print(json.dumps(seen))
"""


def run_cluster(script, fork_server):
    """Return the JSON that the script prints last; it runs in a separate process with a separate Ray directory."""
    directory = Path(f"/tmp/hfp{os.getpid() % 10**6}")
    directory.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on the loopback interface
        "RAY_worker_niceness": "0",
        "FORK_SERVER": fork_server.address,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", f"{START}\nDRIVER = {DRIVER!r}\n{script}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        output, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors[-3000:]
        return json.loads(output.splitlines()[-1])
    finally:
        if process.poll() is None:
            process.terminate()  # Ray's own handlers stop its processes
            process.communicate()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def unequal(fork_server):
    return run_cluster(UNEQUAL, fork_server)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["first", "second"])
def test_ranks_return_to_their_nodes_after_a_restart(unequal, start):
    assert unequal[f"2, 1 {start}"] == [
        ["0", "3", "0", "2", "127.0.0.2", "127.0.0.2"],
        ["1", "3", "1", "2", "127.0.0.2", "127.0.0.2"],
        ["2", "3", "0", "1", "127.0.0.2", "127.0.0.1"],
    ]
    assert unequal[f"1, 2 {start}"] == [
        ["0", "3", "0", "1", "127.0.0.1", "127.0.0.1"],
        ["1", "3", "0", "2", "127.0.0.1", "127.0.0.2"],
        ["2", "3", "1", "2", "127.0.0.1", "127.0.0.2"],
    ]


@pytest.mark.slow
def test_nodes_are_used_in_order_of_numeric_address(unequal):
    assert [ranks[5] for ranks in unequal["2, 2 first"]] == ["127.0.0.2", "127.0.0.2", "127.0.0.10", "127.0.0.10"]


@pytest.mark.slow
def test_a_process_group_over_nodes_needs_only_its_backend(unequal):
    assert unequal["2, 1 first total"] == unequal["1, 2 second total"] == [6, 6, 6]
    assert unequal["2, 2 first total"] == [10, 10, 10, 10]


@pytest.mark.slow
def test_batches_pass_between_groups_on_different_nodes(unequal):
    assert {ranks[5] for ranks in unequal["here"]} & {ranks[5] for ranks in unequal["there"]} == set()
    assert unequal["passed on"] == [2**20, True]


@pytest.mark.slow
def test_each_node_is_measured_by_one_process(unequal):
    assert unequal["measured"] == ["here/0", "there/0"]


@pytest.mark.slow
def test_a_pool_with_too_many_or_too_large_nodes_is_an_error_without_a_wait(unequal):
    text = unequal["too many nodes"]
    assert "requested [1, 1, 1, 1] processes on 4 node(s), each with 1 CPU; the cluster has 3 node(s): " in text
    text = unequal["too large"]
    assert "127.0.0.1: " in text
    assert "of 1 CPU free; 127.0.0.2: " in text
    assert "of 2 CPU free; 127.0.0.10: " in text


@pytest.mark.slow
def test_a_node_whose_transfers_are_delayed_is_used_last(fork_server):
    seen = run_cluster(SLOW_LINK, fork_server)
    assert seen["equal links"] == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 5
    assert seen["two"] == ["127.0.0.1", "127.0.0.3"]
    assert seen["four"] == ["127.0.0.1", "127.0.0.3", "127.0.0.4", "127.0.0.2"]


@pytest.fixture(scope="module")
def detached(fork_server):
    return run_cluster(DETACHED, fork_server)


@pytest.mark.slow
def test_a_second_driver_attaches_to_a_detached_group(detached):
    first, second = detached["first"], detached["second"]
    assert first["value"] == [5, 5, 5]
    assert second["value"] == [7, 7, 7]
    assert second["environment"] == first["environment"]
    assert second["pool"] == [2, 1]
    assert second["total"] == [6, 6, 6]
    assert second["rows"] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_shutdown_of_an_attached_group_releases_its_reservation(detached):
    second = detached["second"]
    assert (
        "a detached group 'kept' already exists on the cluster; use it with RayWorkerGroup.attach('kept'"
        in second["taken"]
    )
    assert second["free"] == 3
    assert second["free after"] == 6
    assert second["gone"].startswith("no detached worker group 'kept' was found on the cluster, or its rank 0 is gone;")


@pytest.mark.slow
def test_shutdown_of_a_detached_group_releases_its_reservation(detached):
    assert detached["own shutdown"] == {"free after": 6}


@pytest.mark.slow
def test_attaching_to_a_group_with_a_lost_rank_is_an_error(detached):
    refused = detached["hole"]["refused"]
    assert refused.startswith("rank 1 of the 3 ranks of the detached worker group 'hole' is gone")
    assert "ray.kill(ray.get_actor('hole/0', namespace='hybridflow'))" in refused


@pytest.mark.slow
def test_detached_and_other_groups_cannot_share_a_pool(detached):
    assert "use a separate pool for a detached group" in detached["shared pool"]["refused"]


@pytest.mark.slow
def test_a_node_is_measured_at_its_first_process_and_on_request(cluster):
    from hybridflow.controller.ray import RayResourcePool
    from hybridflow.observability import transfer_report

    with build_group(RayResourcePool([2], cpus_per_process=0.25), cluster, "measured"):
        cluster.trace.take()
        with build_group(RayResourcePool([1], cpus_per_process=0.25), cluster, "later"):
            assert not transfer_report(cluster.trace.take())["nodes"]  # the node is already measured
        cluster.measure_nodes()
        (link,) = transfer_report(cluster.trace.take())["nodes"].values()
    assert 0 < link["latency"] < math.inf
    assert 0 < link["bandwidth"] < math.inf
