"""Placement of ranks: one node, and unequal nodes."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from fixtures.rank_worker import Rank
from hybridflow.controller import ClassWithInitArgs, WorkerGroup
from hybridflow.controller.ray import RayBackend, RayResourcePool, merge_resource_pool, split_resource_pool
from hybridflow.runtime.observe import transfer_report

pytestmark = [pytest.mark.ray, pytest.mark.own_run("ray_two: it starts clusters of several nodes")]

TESTS = Path(__file__).parents[2]


# Pools on one node


def build_group(pool, backend, name):
    return WorkerGroup(pool, ClassWithInitArgs(Rank), backend, name)


def free_cpus():
    return ray.available_resources().get("CPU", 0.0)


@pytest.fixture
def free(ray_backend, wait_until):
    """Return the free CPUs after the cluster has processed the resources released by earlier tests."""
    reserved = [g["bundles"].values() for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    expected = ray.cluster_resources()["CPU"] - sum(bundle.get("CPU", 0) for group in reserved for bundle in group)
    wait_until(lambda: free_cpus() == expected)
    return expected


def test_split_and_merged_pools_run_groups_at_the_same_time(ray_backend, free, wait_until, tmp_path):
    pool, single = RayResourcePool([3], cpus_per_process=0.5), RayResourcePool([1], cpus_per_process=0.5)
    first, rest = split_resource_pool(pool, [1, 2])
    merged = merge_resource_pool(rest, single)
    assert (first.process_on_nodes, rest.process_on_nodes, merged.world_size) == ([1], [2], 3)
    groups = [build_group(first, ray_backend, "first"), build_group(merged, ray_backend, "merged")]
    wait_until(lambda: free_cpus() == free - 2.0)
    assert groups[0].environment()[0][:4] == ["0", "1", "0", "1"]
    assert [ranks[:4] for ranks in groups[1].environment()] == [[str(i), "3", str(i), "3"] for i in range(3)]
    assert [group.total() for group in groups] == [[1], [6, 6, 6]]
    pending = [group.wait_for_others.remote(str(tmp_path), 4) for group in groups]
    assert [len(future.get()) for future in pending] == [1, 3]
    for group in groups:
        group.shutdown()
    for reserved in (pool, single):
        reserved.release()
    wait_until(lambda: free_cpus() == free)


@pytest.mark.exhaustive
def test_closing_a_backend_releases_places_reserved_through_a_part(ray_backend, free, wait_until):
    pool = RayResourcePool([1], cpus_per_process=0.25)
    (part,) = split_resource_pool(pool, 1)
    try:
        with RayBackend() as backend:
            build_group(part, backend, "part")
        wait_until(lambda: free_cpus() == free)
    finally:
        pool.release()


# Unequal nodes

UNEQUAL = """
import json, time
import ray, torch
from fixtures.forked import fork_ray_workers
from fixtures.rank_worker import Rank
from hybridflow.controller import ClassWithInitArgs, WorkerGroup
from hybridflow.controller.ray import *
from hybridflow.protocol import DataProto
from ray.cluster_utils import Cluster

fork_ray_workers()
cluster = Cluster()
for last, num_cpus in ((1, 1), (2, 2), (10, 2)):
    cluster.add_node(
        num_cpus=num_cpus, node_ip_address=f"127.0.0.{last}", object_store_memory=80 * 2**20, include_dashboard=False
    )

def settle(cpus):
    end = time.monotonic() + 100
    while ray.available_resources().get("CPU", 0) < cpus and time.monotonic() < end:
        time.sleep(0.1)

backend = RayBackend(cluster.address, call_timeout_s=120)
seen = {}
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
backend.close()
cluster.shutdown()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def unequal(fork_server):
    """Return the JSON that UNEQUAL prints last; it runs in a separate process with a separate Ray directory."""
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
        [sys.executable, "-c", UNEQUAL],
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


@pytest.mark.exhaustive
def test_ranks_return_to_their_nodes_after_a_restart(unequal):
    for start in ("first", "second"):
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
    assert [ranks[5] for ranks in unequal["2, 2 first"]] == ["127.0.0.2", "127.0.0.2", "127.0.0.10", "127.0.0.10"]


@pytest.mark.exhaustive
def test_groups_and_batches_span_nodes(unequal):
    assert unequal["2, 1 first total"] == unequal["1, 2 second total"] == [6, 6, 6]
    assert unequal["2, 2 first total"] == [10, 10, 10, 10]
    assert {ranks[5] for ranks in unequal["here"]} & {ranks[5] for ranks in unequal["there"]} == set()
    assert unequal["passed on"] == [2**20, True]
    assert unequal["measured"] == ["here/0", "there/0"]  # one process of each node


@pytest.mark.exhaustive
def test_a_node_is_measured_at_its_first_process_and_on_request(ray_backend):
    from hybridflow.controller.ray import RayResourcePool

    with build_group(RayResourcePool([2], cpus_per_process=0.25), ray_backend, "measured"):
        ray_backend.trace.take()
        with build_group(RayResourcePool([1], cpus_per_process=0.25), ray_backend, "later"):
            assert not transfer_report(ray_backend.trace.take())["nodes"]  # the node is already measured
        ray_backend.measure_nodes()
        (link,) = transfer_report(ray_backend.trace.take())["nodes"].values()
    assert 0 < link["latency"] < math.inf
    assert 0 < link["bandwidth"] < math.inf
