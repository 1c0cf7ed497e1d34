"""Scripts with a cluster of their own: closing it, GPUs that are made up, services that die, and a full store."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.exhaustive,
    pytest.mark.own_run("ray: each script starts, harms or closes a cluster of its own"),
]

IMPORTS = """
import os, signal, sys, time
import ray, torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.ray import RayBackend, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridflow.controller.ray.liveness import cluster_watch
from hybridflow.controller.ray.reaper import cluster_processes
from hybridflow.errors import ConfigError, HybridFlowError, LostWorkerError, WorkerError
from hybridflow.protocol import DataProto

class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)
"""


@pytest.fixture(scope="module")
def run(fork_server):
    """Return `run(script, NAME=value)`: what a script with its names replaced, and its Ray, print."""

    def run(script, environment=(), **values):
        for name, value in values.items():
            script = script.replace(name, repr(value))
        environment = {**os.environ, **dict(environment)}
        process = fork_server.start(["-c", IMPORTS + script], environment=environment, merge_streams=True)
        try:
            return process.communicate(timeout=300)[0]
        finally:
            process.discard()

    return run


@pytest.fixture
def short_directory():
    with tempfile.TemporaryDirectory(prefix="hf") as directory:  # pytest's is too long for Ray's sockets
        yield directory


CLOSED = """
backend = RayBackend(num_cpus=2)
backend.close()
pool = ResourcePool([1])
group = WorkerGroup(pool, ClassWithInitArgs(Echo), backend)
future, read, unread = group.echo.remote(1), group.execute_all("echo", 1), group.execute_all("echo", 2)
assert backend.get(read) == [1]
print(group.echo(2))
session = backend.connection._local.session
backend.close()
backend.close()
print("left", cluster_processes(session), group.is_alive())

def attempt(call):
    try:
        print(call())
    except WorkerError as error:
        print("WorkerError:", error)
    except BaseException as error:
        print("raised:", type(error).__name__, error)

attempt(lambda: group.echo(3))
with WorkerGroup(pool, ClassWithInitArgs(Echo), backend) as again:
    print(again.echo(4))
backend.close()

def init(*_, **__):
    raise RuntimeError("ray.init was called")

ray.init = init
backend.wait(read)
backend.wait([])
attempt(future.get)
for late in (read, unread):
    attempt(lambda: backend.get(late))
"""


def test_a_closed_backend_leaves_no_process_and_can_be_used_again(run):
    lines = run(CLOSED).splitlines()
    assert lines[:2] == ["[2]", "left [] False"]
    assert lines[2] == "WorkerError: worker Echo/0 was shut down; echo cannot be called on it."
    assert lines[3] == "[4]"
    assert lines[4].startswith("WorkerError: ")
    assert ["this backend was closed" in line for line in lines[5:]] == [True, True]


ALL_GPUS_VISIBLE = """
os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
torch.cuda.device_count = lambda: 2
with RayBackend(num_cpus=2, num_gpus=2) as backend:
    WorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Worker), backend)
    print("without a GPU: started")
    try:
        WorkerGroup(RayResourcePool([1], use_gpu=True), ClassWithInitArgs(Worker), backend)
    except ConfigError as error:
        print("with a GPU:", str(error).replace(chr(10), " "))
"""


def test_a_rank_that_sees_the_gpus_of_other_ranks_is_an_error(run):
    output = run(ALL_GPUS_VISIBLE)
    assert "without a GPU: started" in output
    message = (
        r"with a GPU: .*RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES='1' is not supported: this rank sees all GPUs of "
        r"node \S+ instead of GPU \d, which Ray assigned to it.*; unset the variable"
    )
    assert re.search(message, output), output


SHARED_GPU = """
torch.cuda.device_count = lambda: 8
with RayBackend(num_gpus=NUM_GPUS) as backend:
    pools = [RayResourcePool([1], use_gpu=True, gpus_per_process=0.5) for _ in range(2)]
    backend.check_fit(pools)
    gpus = ray.remote(num_cpus=1, num_gpus=0.5)(ray.get_gpu_ids)
    strategies = [PlacementGroupSchedulingStrategy(p.group, p.bundle) for pool in pools for p in pool.places()]
    found = ray.get([gpus.options(scheduling_strategy=strategy).remote() for strategy in strategies])
    print("cluster", ray.cluster_resources()["GPU"], "ids", found)
"""


@pytest.mark.parametrize(("num_gpus", "of_cluster"), [(0, 1), (4, 4)])
def test_pools_of_half_a_gpu_share_one(run, num_gpus, of_cluster):
    output = run(SHARED_GPU, NUM_GPUS=num_gpus)
    number = re.search(rf"^cluster {of_cluster}\.0 ids \[\[(\d)\], \[(\d)\]\]$", output, re.MULTILINE)
    assert number is not None, output
    assert number[1] == number[2]


SERVICE_DIES = """
cluster_watch.LAST_RESORT_S = 8.0 if SIGNAL == signal.SIGKILL else 50.0
cluster_watch.STOPPED_PATIENCE_S = 6.0

backend = RayBackend(num_cpus=1)
group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend)
(service,) = ray._private.worker._global_node.all_processes[SERVICE]
os.kill(service.process.pid, SIGNAL)
if STUCK:
    ray.util.remove_placement_group(ray.util.placement_group([{"CPU": 1}]))
    print("not stuck")
try:
    group.sleep(600)
except LostWorkerError as error:
    print("lost:", error)
backend.close()
print("closed")
"""

SERVICES = pytest.mark.parametrize(
    ("service", "name"), [("gcs_server", "control service"), ("raylet", "raylet of this node")]
)


@SERVICES
@pytest.mark.parametrize(
    ("number", "says"),
    [(9, "has died: it has not accepted a connection for "), (19, r"is stopped: it has not run for [6-9] s")],
)
def test_a_dead_or_stopped_service_of_ray_is_an_error_that_can_be_handled(run, service, name, number, says):
    output = run(SERVICE_DIES, SERVICE=service, STUCK=False, SIGNAL=number)
    assert re.search(rf"^lost: the {name}.* {says}", output, re.MULTILINE), output
    assert output.splitlines()[-1] == "closed"


def test_a_process_that_waits_for_a_dead_service_ends_with_a_message(run):
    output = run(SERVICE_DIES, SERVICE="gcs_server", STUCK=True, SIGNAL=9)
    assert re.search(r"^error: the control service .* the same command continues from the last", output, re.MULTILINE)
    assert "not stuck" not in output


SERVICE_CONTINUES = (
    SERVICE_DIES.partition("if STUCK:")[0].replace("STOPPED_PATIENCE_S = 6.0", "STOPPED_PATIENCE_S = 60.0")
    + """
import threading
import psutil
while psutil.Process(service.process.pid).status() != psutil.STATUS_STOPPED:  # a busy machine delivers a signal late
    time.sleep(0.01)
start = time.monotonic()
threading.Timer(4, os.kill, (service.process.pid, signal.SIGCONT)).start()
backend.settle(group.workers, 30)
assert time.monotonic() - start > 3
group.echo(0)
backend.close()
print("closed")
"""
)


def test_a_recovery_waits_for_a_service_that_is_stopped(run):
    assert run(SERVICE_CONTINUES, SERVICE="raylet", SIGNAL=19).splitlines()[-1] == "closed"


DISCONNECTED = """
cluster_watch.PATIENCE_S = cluster_watch.PATIENCE_LOCAL_S = 5.0
cluster_watch.LAST_RESORT_S = 10.0  # longer than a shutdown takes on a busy machine

def init():
    ray.init(num_cpus=1, include_dashboard=False, _temp_dir=DIRECTORY)

init()
backend = RayBackend()
WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend)
ray.shutdown()
time.sleep(15)
init()
print(WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo), backend).echo("again"))
print(backend.connection._watch.is_current)
backend.close()
ray.shutdown()
"""


def test_a_process_that_has_left_its_cluster_is_not_ended(run, short_directory):
    output = run(DISCONNECTED, DIRECTORY=short_directory)
    assert "has died" not in output
    assert output.splitlines()[-2:] == ["['again']", "True"], output


STORE = """
class Big(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, writes=("big",))
    def make(self, batch):
        return DataProto.from_dict({"big": torch.ones(len(batch), 50 * 2**18)})

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("sums",))
    def sum(self, batch):
        return DataProto.from_dict({"sums": batch.batch["big"].sum(1)})

def attempt(name, call):
    try:
        print(name, call(), flush=True)
    except HybridFlowError as error:
        print(name, "error:", type(error).__name__, str(error)[:2000].replace(chr(10), " "), flush=True)
    except BaseException as error:
        print(name, "raised:", repr(error)[:300].replace(chr(10), " "), flush=True)

backend = RayBackend(num_cpus=1, object_store_bytes=80 * 2**20, call_timeout_s=120)
group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Big), backend)
rows = DataProto.from_dict({"x": torch.arange(NUM_ROWS)})
attempt("result", lambda: group.make(rows).batch["big"].sum().item() / 2**18)
attempt("passed on", lambda: group.sum(group.make.remote(rows)).batch["sums"].sum().item() / 2**18)
big = DataProto.from_dict({"big": torch.ones(NUM_ROWS, 50 * 2**18)})
attempt("argument", lambda: group.sum(big).batch["sums"].sum().item() / 2**18)
def keep():
    kept = [group.make.remote(rows) for _ in range(2)]
    return sum(future.get().batch["big"].sum().item() for future in kept) / 2**18
attempt("kept", keep)
attempt("small", lambda: group.sum(DataProto.from_dict({"big": torch.ones(2, 3)})).batch["sums"].tolist())
backend.close()
"""


def test_results_and_arguments_larger_than_the_object_store_arrive(run):
    output = run(STORE, NUM_ROWS=2)
    names = ("result", "passed on", "argument", "kept", "small")
    lines = [line for line in output.splitlines() if line.startswith(names)]
    assert lines == ["result 100.0", "passed on 100.0", "argument 100.0", "kept 200.0", "small [3.0, 3.0]"], output


def test_a_full_store_and_disk_are_an_error_that_the_group_survives(run):
    directory = Path(f"/tmp/hf{os.getpid() % 10**6}")
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory], capture_output=True)
    if mounted.returncode != 0:
        directory.rmdir()
        pytest.skip("a small file system cannot be mounted here")
    try:
        output = run(STORE, {"TMPDIR": str(directory)}, NUM_ROWS=4)
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
        directory.rmdir()
    for what in ("result", "passed on", "argument", "kept"):
        (line,) = (line for line in output.splitlines() if line.startswith(what))
        assert line.startswith(f"{what} error: "), output
        assert "WorkerTimeoutError" not in line  # raised before the deadline
        if what == "passed on":
            assert "a result of Big.make fits neither into the shared memory of its node nor on its disk" in line
    assert "small [3.0, 3.0]" in output.splitlines(), output
