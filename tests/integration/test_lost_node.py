"""Clusters whose nodes die during a run, which goes on with the same results, and with fewer processes if it must."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.tiny_run import differing, metrics_differ
from hybridflow.runtime.observe import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.ray, pytest.mark.own_run("recovered: nodes of a cluster die")]

TESTS = Path(__file__).parents[1]
STEPS = 6

PROGRAM = """
import contextlib, json, sys, threading, time
import psutil
from pathlib import Path
import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster
from hybridflow.cli.main import main
from hybridflow.trainers.run import training_loop

ray._private.utils.set_sigterm_handler = lambda handler: None  # only the main thread may set one

commands, changes = json.loads(sys.argv[1])
cluster = Cluster()
numbers = iter(range(1, 100))

def new_node():
    address = f"127.0.0.{next(numbers)}"
    return cluster.add_node(
        num_cpus=1, node_ip_address=address, object_store_memory=80 * 2**20, include_dashboard=False
    )

nodes = [new_node() for _ in range(3)]

def kill_node(index):
    (raylet,) = nodes.pop(index).all_processes["raylet"]
    raylet = psutil.Process(raylet.process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

def change_nodes(metrics):
    for num_rows, change in changes:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < num_rows:
            time.sleep(0.05)
        if change == "add":
            nodes.append(new_node())
            while available_resources_per_node().get(nodes[-1].node_id, {}).get("CPU") != 1:
                time.sleep(0.05)
        else:
            kill_node(change)
    are_changed.set()
    threading.Event().wait()  # the processes of a node end with the thread that started them

def wait_for_changes(name, step=None):
    if (name, step) == ("step", STEP_AFTER_CHANGES):
        are_changed.wait()

are_changed = threading.Event()
STEP_AFTER_CHANGES = max(num_rows for num_rows, _ in changes) + 1
status = 0
for command, is_disturbed in commands:
    if is_disturbed:
        run_dir = command[-1].removeprefix("trainer.run_dir=")
        threading.Thread(target=change_nodes, args=[Path(run_dir, "metrics.jsonl")], daemon=True).start()
        training_loop.fault_point = wait_for_changes
    status += main([argument.replace("CLUSTER", cluster.address) for argument in command])
cluster.shutdown()
sys.exit(status)
"""

ON_CLUSTER = ("controller.backend=ray", "controller.address=CLUSTER", "recovery.backoff_s=0.1")
LENGTH = (f"trainer.total_steps={STEPS}", "data.val_files=[]", "trainer.val_every=0", "trainer.save_every=100")


def run_on_cluster(commands, changes):
    """Run commands, (arguments, is_disturbed), in turn on a cluster of three nodes.

    `changes`: pairs (rows in the metrics of the disturbed run, what happens then: "add" a node, or the index of the
    living node that dies). A disturbed command ends in its run directory.
    """
    directory = Path(f"/tmp/hfn{os.getpid() % 10**6}")
    directory.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on the loopback interface
        "OMP_NUM_THREADS": "1",
        "SECONDS_FOR_EACH_REWARD": "0.05",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    commands = [(list(map(str, arguments)), is_disturbed) for arguments, is_disturbed in commands]
    command = [sys.executable, "-c", PROGRAM, json.dumps([commands, changes])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]


def test_a_run_goes_on_with_the_same_results_when_a_node_dies(tiny, task, tmp_path):
    command = [*tiny.commands(task)["grpo"], *ON_CLUSTER, *LENGTH, "placement.pools={main=[1,1]}"]
    runs = [tmp_path / name for name in ("undisturbed", "disturbed")]
    commands = [([*command, f"trainer.run_dir={run}"], run is runs[1]) for run in runs]
    run_on_cluster(commands, [(2, 1)])
    assert differing(*runs, STEPS) == set()
    assert {row["action"] for row in read_jsonl(runs[1] / "recoveries.jsonl")} == {"restart"}


LAG = ("trainer.lag=1", "algorithm.rollout_weights=token")
ENGINES = ("placement.pools={main=[1],rollout=[1,1]}", "placement.roles.rollout=rollout")
RANKS = ("placement.pools={main=[1,1]}",)


@pytest.mark.parametrize(
    ("name", "pool", "more", "pools", "changes"),
    [
        ("grpo", "rollout", LAG, ENGINES, [(2, 2), (4, "add")]),
        ("ppo", "main", ("critic.warmup_steps=0",), RANKS, [(2, 2), (2, 1), (4, "add")]),
    ],
)
def test_a_run_goes_on_with_fewer_processes_and_uses_a_node_that_joins(
    name, pool, more, pools, changes, tiny, task, tmp_path
):
    exact = ("model.dtype=float64", "trainer.log_samples=24", "trainer.deterministic=false")
    recipe = [*tiny.commands(task)[name], *LENGTH, *exact, *more]
    runs = [tmp_path / name for name in ("fixed", "changing")]
    changing = [*recipe, *ON_CLUSTER, *pools, f"placement.min_processes={{{pool}=1}}", f"trainer.run_dir={runs[1]}"]
    run_on_cluster([([*recipe, f"trainer.run_dir={runs[0]}"], False), (changing, True)], changes)
    actions = [row["action"] for row in read_jsonl(runs[1] / "recoveries.jsonl")]
    assert (actions[0], actions[-1]) == ("restart", "resize")
    changed = read_jsonl(runs[1] / "metrics.jsonl")
    assert [row["step"] for row in changed] == list(range(1, STEPS + 1))
    sizes = [row[f"processes/{pool}"] for row in changed]
    assert sizes[0] == sizes[-1] == 2
    assert 1 in sizes
    assert (
        metrics_differ(*runs, "actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "actor/lr") == []
    )
    keys = ("step", "prompt", "response", "score")
    fixed, changed = ([[row[key] for key in keys] for row in read_jsonl(run / "samples.jsonl")] for run in runs)
    assert changed == fixed
