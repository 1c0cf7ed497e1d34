"""A cluster whose node dies during a run: its rank starts on another node, and the results are the same."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TESTS = Path(__file__).parents[1]
STEPS = 6

PROGRAM = """
import contextlib, json, sys, threading, time
import psutil
from pathlib import Path
from ray.cluster_utils import Cluster
from hybridflow.cli.main import main

arguments, undisturbed, disturbed = json.loads(sys.argv[1])
cluster = Cluster()
nodes = [
    cluster.add_node(
        num_cpus=1, node_ip_address=f"127.0.0.{last}", object_store_memory=80 * 2**20, include_dashboard=False
    )
    for last in (1, 2, 3)
]

def kill_second_node():
    metrics = Path(disturbed, "metrics.jsonl")
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.05)
    (raylet,) = nodes[1].all_processes["raylet"]
    raylet = psutil.Process(raylet.process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

arguments.append(f"controller.address={cluster.address}")
status = main([*arguments, f"trainer.run_dir={undisturbed}"])
threading.Thread(target=kill_second_node, daemon=True).start()
status += main([*arguments, f"trainer.run_dir={disturbed}"])
cluster.shutdown()
sys.exit(status)
"""


def test_a_run_goes_on_with_the_same_results_when_a_node_dies(tiny, task, tmp_path):
    arguments = [*tiny.commands(task)["grpo"], "controller.backend=ray", "placement.pools={main=[1,1]}"]
    arguments += [
        f"trainer.total_steps={STEPS}",
        "data.val_files=[]",
        "trainer.save_every=100",
        "recovery.backoff_s=0.1",
    ]
    runs = [str(tmp_path / name) for name in ("undisturbed", "disturbed")]
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
    command = [sys.executable, "-c", PROGRAM, json.dumps([list(map(str, arguments)), *runs])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    undisturbed, disturbed = (tiny.results_of(Path(run), STEPS) for run in runs)
    assert [name for name in undisturbed if undisturbed[name] != disturbed[name]] == []
    assert {row["action"] for row in read_jsonl(Path(runs[1]) / "recoveries.jsonl")} == {"restart"}
