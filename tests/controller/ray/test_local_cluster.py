"""Real clusters, each in a separate process; tests check in /proc and /dev/shm that nothing is left."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hybridflow.controller.ray import local_cluster, reaper
from hybridflow.controller.ray.local_cluster import LocalCluster
from hybridflow.controller.ray.reaper import SESSION_VARIABLE, cluster_processes
from hybridflow.errors import ConfigError, LostClusterError, WorkerError

pytestmark = [
    pytest.mark.own_run("ray: it starts and kills clusters and their reapers"),
]


def CLUSTER(test):
    """Mark a test that starts a cluster of its own."""
    return pytest.mark.ray(pytest.mark.exhaustive(test))


SHARED_MEMORY = Path("/dev/shm")

# An actor with a child that has left the actor's session and process group.
ACTOR = """
import os, subprocess
import ray

@ray.remote
class AnActorWithANameThatIsLongerThanTheCommandLineOfItsProcess:
    def start_child(self):
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return os.getpid(), self.child.pid

actor = AnActorWithANameThatIsLongerThanTheCommandLineOfItsProcess.remote()
actor_pid, child_pid = ray.get(actor.start_child.remote())
"""

# A failed start, then two clusters one after the other; all observations are printed as one JSON object at the end.
TWO_CYCLES = """
import json, os, signal, stat, subprocess, time, warnings
from contextlib import suppress
from pathlib import Path

from hybridflow.controller.ray.local_cluster import LocalCluster
from hybridflow.controller.ray.reaper import cluster_processes
from hybridflow.errors import ConfigError, WorkerError

def message(kind, act):
    try:
        act()
    except kind as error:
        return str(error)

def listening(pids):
    inodes = set()
    for pid in pids:
        with suppress(OSError):  # a process or file is gone by now
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]

def titles(pids):
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\\0 "))
    return " ".join(found)

def is_complete(pids):
    # agents have their titles and sockets a while after the start
    parts = ("gcs_server", "raylet", "log_monitor", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "sleep")
    return all(part in titles(pids) for part in parts) and len(listening([*pids, os.getpid()])) >= 5

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def reaper_pid():
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)

seen = {}
environment = dict(os.environ)
handler = signal.getsignal(signal.SIGTERM)
too_large = LocalCluster(1, object_store_bytes=10**15)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ResourceWarning)  # Ray does not wait for the processes it had started
    seen["too large"] = message(WorkerError, too_large.start)
seen["restored after the failure"] = dict(os.environ) == environment

with LocalCluster(2.5, object_store_bytes=80 * 2**20) as cluster:
    exec(ACTOR)
    deadline = time.monotonic() + 60
    while not is_complete(pids := cluster_processes(cluster.session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen["session"], seen["directory"] = cluster.session, str(cluster.directory)
    seen["actor"], seen["child"] = actor_pid in pids, child_pid in pids
    seen["all titles"] = titles(pids)
    seen["priorities"] = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (actor_pid, 0)]
    seen["num_cpus"] = ray.cluster_resources()["CPU"]
    seen["mode"] = stat.S_IMODE(os.stat(cluster.directory).st_mode)
    seen["listening"] = listening([*pids, os.getpid()])
    seen["started again"] = message(ConfigError, cluster.start)
    seen["another started"] = message(ConfigError, LocalCluster(1).start)
    later = subprocess.Popen(["sleep", "600"])
seen["processes"] = cluster_processes(cluster.session)
seen["directory exists"] = cluster.directory.exists()
seen["environment restored"] = dict(os.environ) == environment
seen["handler restored"] = signal.getsignal(signal.SIGTERM) is handler
seen["initialized"] = ray.is_initialized()
seen["the driver's own child lives"] = later.poll() is None
later.kill()
later.wait()
cluster.stop()
after_first = descriptors()

first = cluster.session
cluster.start()
exec(ACTOR)
os.kill(reaper_pid(), signal.SIGKILL)
cluster.stop()
seen["another session"] = cluster.session != first
seen["processes without reaper"] = cluster_processes(cluster.session)
seen["directory exists without reaper"] = cluster.directory.exists()
seen["new descriptors"] = descriptors() - after_first
seen["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
print(json.dumps(seen))
"""

DRIVER = """
import json, os, sys, time
from hybridflow.controller.ray.local_cluster import LocalCluster

cluster = LocalCluster(1)
cluster.start()
exec(ACTOR)
forked = os.fork() if sys.argv[1] == "sleep" else None
if forked == 0:
    time.sleep(600)
seen = {"session": cluster.session, "directory": str(cluster.directory), "actor": actor_pid, "child": child_pid}
print(json.dumps({**seen, "forked": forked}), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(600)
raise ZeroDivisionError("on purpose")
"""


def run_driver(script: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "default", "-c", f"ACTOR = {ACTOR!r}\n{script}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def ignores_signals(pid: int) -> bool:
    """Return whether the reaper ignores its three signals; under nohup it inherits the one for SIGHUP."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    return all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def stores_left() -> set[str]:
    """Return the object stores that no process has open, which excludes those of running clusters."""
    left = set()
    for path in SHARED_MEMORY.glob("plasma*"):
        with contextlib.suppress(FileNotFoundError):
            if not reaper.is_open(path.stat()):
                left.add(path.name)
    return left


@pytest.fixture(scope="module")
def two_cycles(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    stores = stores_left()
    process = run_driver(TWO_CYCLES, HOME=str(home), RAY_ADDRESS="127.0.0.1:1")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    *printed, result = output.splitlines()
    left = {"printed": printed, "errors": errors, "home": os.listdir(home), "stores": stores_left() - stores}
    return {**json.loads(result), **left}


@CLUSTER
def test_a_cluster_starts_and_stops_without_a_trace(two_cycles):
    assert two_cycles["processes"] == []
    assert not two_cycles["directory exists"]
    assert two_cycles["stores"] == set()
    assert two_cycles["home"] == []
    assert two_cycles["children"] == []
    assert not two_cycles["initialized"]
    assert two_cycles["the driver's own child lives"]
    assert two_cycles["environment restored"]
    assert two_cycles["restored after the failure"]
    assert two_cycles["handler restored"]
    assert two_cycles["printed"] == []
    assert two_cycles["errors"] == ""


@CLUSTER
def test_all_processes_have_the_token_and_the_priority_of_the_driver(two_cycles):
    assert two_cycles["actor"]
    assert two_cycles["child"]
    for part in ("gcs_server", "raylet", "log_monitor", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "sleep"):
        assert part in two_cycles["all titles"]
    worker, driver = two_cycles["priorities"]
    assert worker == driver


@CLUSTER
def test_a_cluster_is_accessible_to_this_user_on_this_machine_only(two_cycles):
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert len(two_cycles["listening"]) >= 5  # gcs, raylet, an agent, the actor and the driver at least
    assert set(two_cycles["listening"]) <= loopback
    assert two_cycles["mode"] == 0o700


@CLUSTER
def test_starting_twice_or_too_large_is_an_error(two_cycles):
    assert "is already started; call stop()" in two_cycles["started again"]
    assert "Ray is already initialized in this process; call ray.shutdown()" in two_cycles["another started"]
    assert two_cycles["too large"].startswith("Ray failed to start: ")
    assert "object store" in two_cycles["too large"]
    assert two_cycles["num_cpus"] == 3  # 2.5, rounded up


@CLUSTER
def test_a_restart_has_a_new_session_and_a_killed_reaper_is_replaced(two_cycles):
    assert two_cycles["another session"]
    assert two_cycles["new descriptors"] <= 4  # Ray itself leaks one or two
    assert two_cycles["processes without reaper"] == []
    assert not two_cycles["directory exists without reaper"]


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("too large"), WorkerError), (RuntimeError("timed out"), LostClusterError)]
)
def test_a_service_that_does_not_start_in_time_is_a_lost_cluster(monkeypatch, error, kind):
    def fail(**_):
        raise error

    monkeypatch.setattr("ray.init", fail)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # a cluster of other tests may be
    monkeypatch.setattr("hybridflow.controller.ray.local_cluster._shut_down", lambda: None)
    # Its threads would take the token of the cluster that does not start.
    monkeypatch.setattr("hybridflow.controller.ray.local_cluster._let_ray_read_variables", lambda: None)
    with pytest.raises(WorkerError, match=f"Ray failed to start: {error}") as raised:
        LocalCluster(1).start()
    assert type(raised.value) is kind


def reapers_of(driver: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{driver}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has exited
            pids = children.read_text().split()
            found += [int(pid) for pid in pids if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@CLUSTER
def test_the_reaper_cleans_up_after_a_killed_driver(wait_until):
    stores = stores_left()
    driver = run_driver(DRIVER, "sleep")
    seen = json.loads(driver.stdout.readline())
    try:
        assert {seen["actor"], seen["child"]} <= set(cluster_processes(seen["session"]))
        os.kill(seen["actor"], signal.SIGSTOP)
        (killed,) = reapers_of(driver.pid)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: reapers_of(driver.pid) not in ([], [killed]))  # the next one has its place
        driver.kill()
        driver.wait()
        wait_until(lambda: not os.path.exists(seen["directory"]))
        assert cluster_processes(seen["session"]) == []
        assert stores_left() <= stores
        os.kill(seen["forked"], 0)
    finally:
        driver.kill()
        os.kill(seen["forked"], signal.SIGKILL)
        driver.communicate()


@CLUSTER
def test_a_driver_that_raises_leaves_no_process_and_no_directory():
    driver = run_driver(DRIVER, "raise")
    output, errors = driver.communicate(timeout=120)  # returns when no process has the driver's output open
    seen = json.loads(output.splitlines()[0])
    assert driver.returncode == 1
    assert errors.strip().endswith("ZeroDivisionError: on purpose")
    assert cluster_processes(seen["session"]) == []
    assert not os.path.exists(seen["directory"])


@pytest.fixture
def session_process():
    """Yield `session_process("token")`, which starts a sleeping process with this token."""
    processes = []

    def start(session: str, **variables: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, SESSION_VARIABLE: session, **variables}
        processes.append(subprocess.Popen(["sleep", "600"], env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def start_reaper(session: str, directory: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-I", reaper.__file__, session, directory], stdin=subprocess.PIPE)


@pytest.mark.runs
def test_the_reaper_ignores_terminal_signals_until_the_pipe_closes(tmp_path, session_process, wait_until):
    directory = tmp_path / "cluster"
    (directory / "logs").mkdir(parents=True)
    frozen, other = session_process("frozen"), session_process("other")
    frozen.send_signal(signal.SIGSTOP)
    process = start_reaper("frozen", directory)
    wait_until(lambda: ignores_signals(process.pid))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None
    assert frozen.poll() is None

    process.communicate(timeout=120)
    assert process.returncode == 0
    assert frozen.wait() == -signal.SIGKILL  # a frozen process cannot handle SIGTERM
    assert other.poll() is None
    assert not directory.exists()


@pytest.mark.runs
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")
def test_the_reaper_removes_only_object_stores_that_are_not_open(tmp_path, wait_until):
    directory = tmp_path / "cluster"
    directory.mkdir()
    earlier = make_store()
    time.sleep(0.1)
    process = start_reaper("no_process", directory)
    wait_until(lambda: ignores_signals(process.pid))
    time.sleep(0.1)  # file times have a coarser resolution
    abandoned, in_use, foreign = make_store(), make_store(), make_store("no_plasma")
    try:
        with open(in_use):
            process.communicate(timeout=120)
        assert not abandoned.exists()
        assert in_use.exists()
        assert earlier.exists()
        assert foreign.exists()
    finally:
        for path in (earlier, abandoned, in_use, foreign):
            path.unlink(missing_ok=True)


SHARE_BY_NAME = """
import torch, sys
torch.multiprocessing.set_sharing_strategy("file_system")
tensor = torch.zeros(8).share_memory_()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")
def test_the_reaper_removes_pytorch_shared_memory_of_killed_processes(tmp_path, wait_until):
    # The counts of CUDA IPC handles have the same kind of name as a tensor that is shared by name on a CPU.
    directory = tmp_path / "cluster"
    directory.mkdir()
    process = start_reaper("no_process", directory)
    wait_until(lambda: ignores_signals(process.pid))
    time.sleep(0.1)  # file times have a coarser resolution
    sharing = [
        subprocess.Popen([sys.executable, "-c", SHARE_BY_NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for each in sharing:
            assert each.stdout is not None
            each.stdout.readline()
        managers = [int(pid) for each in sharing for pid in children_of(each.pid)]
        killed, living = ([path.name for path in SHARED_MEMORY.glob(f"torch_{each.pid}_*")] for each in sharing)
        assert len(killed) == len(living) == 1
        for pid in (managers[0], sharing[0].pid):  # the first is PyTorch's own remover, which CUDA IPC does not have
            os.kill(pid, signal.SIGKILL)
        sharing[0].wait()
        assert (SHARED_MEMORY / killed[0]).exists()
        process.communicate(timeout=120)
        assert not (SHARED_MEMORY / killed[0]).exists()
        assert (SHARED_MEMORY / living[0]).exists()
    finally:
        for each in sharing:
            each.kill()
            each.communicate()
        for path in SHARED_MEMORY.glob("torch_*"):
            if path.name.split("_")[1] in {str(each.pid) for each in sharing}:
                path.unlink(missing_ok=True)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def make_store(prefix: str = "plasma") -> Path:
    letters = "".join(chr(ord("a") + byte % 26) for byte in os.urandom(6))
    path = SHARED_MEMORY / f"{prefix}{letters}"
    path.touch(exist_ok=False)
    return path


def test_impossible_resources_raise_before_the_cluster_starts():
    for num_cpus in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="expected a finite positive number"):
            LocalCluster(num_cpus)
    with pytest.raises(ConfigError, match="num_gpus=-1 is negative"):
        LocalCluster(1, num_gpus=-1)
    with pytest.raises(ConfigError, match="object_store_bytes=1000 is below Ray's minimum; use at least 78643200"):
        LocalCluster(1, object_store_bytes=1000)


def test_the_directory_path_is_short_enough_for_sockets(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = local_cluster._directory_of("0123456789abcdef")
    assert len(str(directory)) < 30


@pytest.mark.runs
def test_the_reaper_removes_directories_of_processes_of_user_code(tmp_path, session_process):
    directories = [tmp_path / name for name in ("hybridflow-reward-ab_12", "hybridflow-environment-c", "mine")]
    for directory in directories:
        directory.mkdir()
    processes = [session_process("of this test", TMPDIR=str(directory)) for directory in directories]
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    ended = subprocess.run(
        [sys.executable, "-I", "-S", reaper.__file__, "of this test", str(cluster)],
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert ended.returncode == 0
    assert [process.wait(10) for process in processes] == [-signal.SIGTERM] * 3
    assert [path.exists() for path in (cluster, *directories)] == [False, False, False, True]
